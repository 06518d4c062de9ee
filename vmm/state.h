/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Saved state of vCPUs and devices: a header and sections, the same bytes in memory (for a fork) and in a file (for a
 * template). Memory and disk are not in it.
 *
 * A file is hostile: state_load checks magic, version, lengths, digest and processor before anything else looks at it, and
 * whoever takes a section checks that it has the size and the values that it must have.
 */
#ifndef VMM_STATE_H
#define VMM_STATE_H

#include <vmenv/util.h>

#include "cpuid.h"

#define STATE_MAGIC "VMENVST\n"
#define STATE_VERSION 1u
#define STATE_BYTES_MAX (8u << 20)

struct state_header {
	char magic[8];
	uint32_t version;
	uint32_t bytes;     /* of everything, header included */
	uint8_t digest[32]; /* SHA-256 of everything after this field */
	struct fingerprint cpu;
	uint64_t memory_bytes, disk_bytes, disk_gpa; /* disk_bytes 0: no disk */
	uint64_t clock_ns;                           /* kvmclock */
	uint32_t tsc_khz;
	uint32_t vcpus;
	uint32_t devices; /* virtio */
	uint32_t reserved;
};

enum state_tag {
	STATE_CPUID = 1, /* index: vCPU. struct kvm_cpuid_entry2[] */
	STATE_MP,        /* index: vCPU, from here on. struct kvm_mp_state */
	STATE_REGS,
	STATE_SREGS,
	STATE_XSAVE, /* kvm_xsave, or longer */
	STATE_XCRS,
	STATE_DEBUGREGS,
	STATE_LAPIC,
	STATE_MSRS, /* struct kvm_msr_entry[] */
	STATE_EVENTS,
	STATE_TSC,     /* u64: what vCPU `index` reads */
	STATE_IRQCHIP, /* index: KVM_IRQCHIP_*. struct kvm_irqchip */
	STATE_SERIAL,  /* struct serial_saved */
	STATE_VIRTIO,  /* index: device, from here on. u32 virtio id, u32 0, struct virtio_saved */
	STATE_DEVICE,  /* the device's own */
};

struct state {
	uint8_t *bytes; /* owned; starts with a struct state_header */
	size_t used, room;
};

static inline struct state_header *state_header(const struct state *s)
{
	return (struct state_header *)(void *)s->bytes;
}

/* Writing: begin, add in a fixed order, end. Nothing but -ENOMEM can fail. */
int state_begin(struct state *s, struct err *e);
int state_add(struct state *s, enum state_tag tag, uint32_t index, const void *bytes, size_t n, struct err *e);
int state_end(struct state *s, struct err *e); /* computes the digest */
void state_free(struct state *s);

/* The section, or NULL; *n is its length. 8-byte aligned. */
const void *state_find(const struct state *s, enum state_tag tag, uint32_t index, size_t *n);
/* The same for one that must be there and be `n` bytes long. */
int state_get(const struct state *s, enum state_tag tag, uint32_t index, const void **at, size_t n, struct err *e);

int state_write(const struct state *s, int fd, struct err *e);
/* Reads and checks a file. */
int state_load(struct state *s, const char *path, const struct fingerprint *cpu, struct err *e);
/* Checks bytes that came from outside (what state_load does after reading). */
int state_check(const uint8_t *bytes, size_t n, const struct fingerprint *cpu, struct err *e);

#endif
