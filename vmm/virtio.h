/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Virtio devices: split virtqueues (virtio 1.2, 2.7) and the MMIO transport (4.2), version 2.
 *
 * Everything in a ring is the guest's and hostile: a chain is followed at most `size` descriptors, each buffer is checked
 * by memory_at, indirect tables are refused (the feature is not offered), and descriptors are copied before use, so a
 * guest that rewrites them meanwhile changes nothing. What breaks a rule sets DEVICE_NEEDS_RESET and the queue stands still.
 *
 * Threads: registers are handled on vCPU threads, queues on the event loop; `lock` guards everything in struct virtio.
 * Ops run with it held. All state that a restore needs is in the structs marked "saved": plain data, no pointers.
 */
#ifndef VMM_VIRTIO_H
#define VMM_VIRTIO_H

#include <linux/virtio_ids.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "irq.h"
#include "memory.h"

#define VIRTIO_QUEUE_SIZE_MAX 256
#define VIRTIO_QUEUES_MAX 4
#define VIRTIO_F_VERSION_1_BIT (1ull << 32)

/* Saved. */
struct virtqueue {
	uint64_t desc, avail, used; /* guest-physical */
	uint16_t size;              /* a power of two, <= VIRTIO_QUEUE_SIZE_MAX */
	uint16_t next_avail;        /* the next avail->idx to take */
	uint16_t next_used;         /* the next used->idx to write */
	uint8_t ready;
	uint8_t broken;
};

/* A chain copied out of the ring: readable buffers first, then writable. */
struct chain {
	uint16_t head;
	unsigned readable, writable; /* counts of iovecs */
	size_t readable_bytes, writable_bytes;
	struct iovec iov[VIRTIO_QUEUE_SIZE_MAX];
};

struct virtio;

struct virtio_ops {
	const char *name;
	uint32_t id; /* VIRTIO_ID_... */
	uint64_t features;
	unsigned queues;
	const void *(*config)(struct virtio *v, size_t *bytes); /* read-only config space; NULL if none */
	/* Event loop: the guest kicked queue q (or it may have; after a restore every queue is kicked once). */
	void (*kick)(struct virtio *v, unsigned q);
	void (*reset)(struct virtio *v); /* the guest wrote status 0; queues are cleared after */
	void (*broke)(struct virtio *v); /* DEVICE_NEEDS_RESET was set, on whatever thread; NULL if of no concern */
	/* The device's own saved state: plain bytes, fixed size. NULL if none. */
	void *(*saved)(struct virtio *v, size_t *bytes);
	/* Event loop, after a restore or fork, saved state in place, before the vCPUs run and before the kicks. */
	void (*restored)(struct virtio *v);
};

struct virtio {
	const struct virtio_ops *ops;
	const struct memory *memory;
	pthread_mutex_t lock;
	struct irq irq;
	unsigned gsi;  /* edge triggered */
	uint64_t mmio; /* base, 0x1000 long */
	const char *why; /* the rule that the guest broke; NULL while none. A string constant */
	/* Saved. */
	struct virtio_saved {
		uint64_t driver_features;
		uint32_t status, interrupt_status, features_select, driver_features_select, queue_select, generation;
		struct virtqueue queue[VIRTIO_QUEUES_MAX];
	} s;
};

/* virtqueue.c */

/* Takes the next chain. 1: there is one. 0: none. -EINVAL: the guest broke a rule; the device is now broken. */
int virtqueue_take(struct virtio *v, unsigned q, struct chain *c);
/* Gives a taken chain back, `written` bytes put in its writable part. Does not interrupt. */
void virtqueue_give(struct virtio *v, unsigned q, const struct chain *c, uint32_t written);
/* Puts the last taken chain back, so that the next take finds it again. */
void virtqueue_untake(struct virtio *v, unsigned q);
/* Interrupts the guest for given chains, unless it asked for none (VRING_AVAIL_F_NO_INTERRUPT). True if it did. */
bool virtqueue_interrupt(struct virtio *v, unsigned q);
/* Tells the guest whether to kick this queue (VRING_USED_F_NO_NOTIFY). True if there is a chain to take by now. */
bool virtqueue_kicks(struct virtio *v, unsigned q, bool wanted);
/* avail->idx as the guest has it now; next_avail if the queue is not usable. */
uint16_t virtqueue_posted(struct virtio *v, unsigned q);
/* Device found guest behaviour impossible: DEVICE_NEEDS_RESET and a config interrupt; queues stand still until reset. */
void virtio_break(struct virtio *v, const char *why);

/* Copies between a flat buffer and a chain's readable (or writable) part at byte offset `at`; returns bytes copied. */
size_t chain_read(const struct chain *c, size_t at, void *to, size_t n);
size_t chain_write(const struct chain *c, size_t at, const void *from, size_t n);

/* virtio_mmio.c: these take the lock themselves; interrupt status and acknowledgement go without it. */
void virtio_init(struct virtio *v, const struct virtio_ops *ops, const struct memory *m);
void virtio_mmio_read(struct virtio *v, uint64_t offset, void *data, unsigned n);
/* Returns the queue to kick (QueueNotify without ioeventfd) or -1. */
int virtio_mmio_write(struct virtio *v, uint64_t offset, const void *data, unsigned n);
/* Event loop: ops->kick with the lock held, if the driver is up and the queue is there. */
void virtio_kick(struct virtio *v, unsigned q);
/* Whether saved state taken from a file can be used with this device: no index out of range. */
bool virtio_saved_valid(const struct virtio *v, const struct virtio_saved *s);

#endif
