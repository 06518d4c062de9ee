/* SPDX-License-Identifier: Apache-2.0 */
/* Moves the state of a VM and its vCPUs between KVM and a struct state. */
#ifndef VMM_CPUSTATE_H
#define VMM_CPUSTATE_H

#include "state.h"
#include "vcpu.h"
#include "vm.h"

#define MSRS_MAX 512u

/* The MSRs to save. */
struct msr_list {
	unsigned count;
	uint32_t index[MSRS_MAX];
};
/* Those that this KVM can read of this vCPU, which has its CPUID. */
int cpustate_msrs(const struct kvm *k, const struct vcpu *v, struct msr_list *l, struct err *e);

/* All vCPUs parked. Fills in the header's clock and TSC frequency, and adds the sections of vCPUs and VM. */
int cpustate_save(struct state *s, const struct kvm *k, const struct vm *m, const struct vcpu *v, unsigned vcpus,
		  const struct msr_list *l, struct err *e);
/* The vCPUs are new. */
int cpustate_load(const struct state *s, const struct kvm *k, const struct vm *m, const struct vcpu *v, unsigned vcpus,
		  struct err *e);
/* The MSRs that a loaded state has, to save the same ones again. */
int cpustate_msrs_of(const struct state *s, struct msr_list *l, struct err *e);

/* Guest time: stands still while the machine does. */
int cpustate_clock(const struct vm *m, uint64_t *ns, struct err *e);
int cpustate_set_clock(const struct vm *m, uint64_t ns, struct err *e);
/* Before vCPUs run again: tells the guest's watchdogs not to mind. */
void cpustate_continued(const struct vcpu *v);

#endif
