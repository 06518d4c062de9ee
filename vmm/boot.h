/* SPDX-License-Identifier: Apache-2.0 */
/* Puts a Linux kernel, its initramfs and its boot parameters into guest memory: x86 boot protocol, 64-bit entry. */
#ifndef VMM_BOOT_H
#define VMM_BOOT_H

#include <vmenv/util.h>

#include "memory.h"

struct kvm_regs;
struct kvm_sregs;

struct boot {
	uint64_t entry; /* guest address of the 64-bit entry point */
};

/*
 * The kernel is a bzImage, which may be hostile: every length in it is checked against the file and the memory.
 * -EINVAL for what is no such kernel or no such command line, -ENOMEM for what does not fit into guest memory.
 */
int boot_load(const struct memory *m, const char *kernel, const char *initrd, const char *cmdline, struct boot *b,
	      struct err *e);
/* The first vCPU as the protocol wants it: long mode, flat segments, low 4 GiB mapped one to one, interrupts off. */
void boot_registers(const struct boot *b, struct kvm_regs *r, struct kvm_sregs *s);

#endif
