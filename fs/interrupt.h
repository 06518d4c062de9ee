/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whether an interrupted request was meant to be interrupted.
 *
 * The kernel reports any signal that a waiting process handles: also the SIGCHLD of a shell whose background job has
 * ended, and the SIGURG by which Go's scheduler preempts. Killing a run for those would be wrong. The signal is still
 * pending while the process waits for our answer, so it can be seen in /proc.
 */
#ifndef FS_INTERRUPT_H
#define FS_INTERRUPT_H

#include <vmenv/util.h>

/* False if the thread has nothing but housekeeping signals pending; true in every other case, and when it cannot be seen.
 * The kernel tells of the first signal only: whoever goes on waiting must ask again from time to time. */
bool interrupt_meant(pid_t thread);

#endif
