/* SPDX-License-Identifier: Apache-2.0 */
/* Starting and ending the processes that vmenvfs depends on, and saying what became of them. */
#ifndef FS_PROCESS_H
#define FS_PROCESS_H

#include <sys/types.h>
#include <vmenv/util.h>

/* To stderr, and if asked also to syslog, for when stderr is nobody's any more. */
__attribute__((format(printf, 2, 3))) void host_say(bool to_syslog, const char *fmt, ...);

/*
 * Starts argv with in, out and err as its descriptors 0, 1 and 2 (negative: as they are here) and `keep` (NULL or ended
 * by -1) inherited under the same numbers. It gets the signal `death` when this process ends. own_group: it leads a
 * process group of its own.
 */
int host_spawn(const char *const argv[], int in, int out, int err, const int *keep, bool own_group, int death,
	       pid_t *pid, struct err *e);

/* Waits up to ms for the process to end; true if it has, with its wait status. */
bool host_wait(pid_t pid, int ms, int *status);

#endif
