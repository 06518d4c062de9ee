/* SPDX-License-Identifier: Apache-2.0 */
/* PID 1's work in a guest before there is an agent: file systems, kernel modules, the disk. */
#ifndef VMENV_GUEST_BOOT_H
#define VMENV_GUEST_BOOT_H

#define BOOT_DISK "/disk"
#define BOOT_CGROUP "/sys/fs/cgroup"

struct err;

int boot(struct err *e);

#endif
