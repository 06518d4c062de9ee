/* SPDX-License-Identifier: Apache-2.0 */
/* A KVM virtual machine: its interrupt controllers, memory slots and event descriptors. */
#ifndef VMM_VM_H
#define VMM_VM_H

#include <stdbool.h>
#include <stdint.h>

#include <vmenv/util.h>

#include "memory.h"

/* What the host's KVM can do. Survives a fork: /dev/kvm itself may be inherited, unlike what was made from it. */
struct kvm {
	int fd; /* /dev/kvm; -1 before kvm_open */
	size_t run_bytes;
	size_t xsave_bytes; /* of KVM_GET_XSAVE2, or 0 where only KVM_GET_XSAVE is there */
	bool tsc_deadline, tsc_control, pre_fault;
};

int kvm_open(struct kvm *k, struct err *e);

struct vm {
	int fd; /* -1: none */
};

/* Makes it, with in-kernel PICs, I/O APIC and local APICs, and with RAM and disk as slots. */
int vm_make(struct vm *v, struct kvm *k, const struct memory *m, struct err *e);
/* Interrupts the guest at the (edge-triggered) pin `gsi`; see irq.h. Any thread. */
void vm_edge(void *vm, unsigned gsi);
/* The guest's 32-bit writes to `gpa` signal the eventfd, without an exit. */
int vm_signal_at(struct vm *v, int event_fd, uint64_t gpa, struct err *e);
void vm_close(struct vm *v);

#endif
