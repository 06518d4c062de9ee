/* SPDX-License-Identifier: Apache-2.0 */
/* What a vCPU says about itself (CPUID), and the fingerprint of the host's processor that saved state is tied to. */
#ifndef VMM_CPUID_H
#define VMM_CPUID_H

#include <linux/kvm.h>
#include <stddef.h>
#include <vmenv/util.h>

#include "vm.h"

#define CPUID_ENTRIES_MAX 256u

/* struct kvm_cpuid2, with room for the entries. */
struct cpuid {
	uint32_t nent, padding;
	struct kvm_cpuid_entry2 entry[CPUID_ENTRIES_MAX];
};
_Static_assert(offsetof(struct cpuid, entry) == sizeof(struct kvm_cpuid2), "as KVM has it");

/* What KVM on this host can show to guests. */
int cpuid_supported(const struct kvm *k, struct cpuid *c, struct err *e);
/* `supported` made right for vCPU `index` of `vcpus`. */
void cpuid_for_vcpu(const struct kvm *k, struct cpuid *c, unsigned index, unsigned vcpus);
/* How many bits of guest-physical address there are. */
unsigned cpuid_address_bits(const struct cpuid *c);

struct fingerprint {
	uint8_t digest[32]; /* of vendor, model, and every feature bit that KVM can show */
	char text[96];      /* vendor, family, model, stepping, for people */
};
int cpuid_fingerprint(const struct cpuid *supported, struct fingerprint *f, struct err *e);

#endif
