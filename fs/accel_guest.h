/* SPDX-License-Identifier: Apache-2.0 */
/* The smallest machine that proves KVM: a few instructions of 64-bit code in a VM of its own. */
#ifndef FS_ACCEL_GUEST_H
#define FS_ACCEL_GUEST_H

#include <vmenv/util.h>

/* kvm: an open /dev/kvm. 0 if the guest did what it should; it may hang where KVM is broken, so run it in a process to
 * kill. */
int accel_guest_run(int kvm, struct err *e);

#endif
