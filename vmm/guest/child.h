/* SPDX-License-Identifier: Apache-2.0 */
/* Starting a process without copying the agent: into a cgroup, and whatever else the process is to be. */
#ifndef VMENV_GUEST_CHILD_H
#define VMENV_GUEST_CHILD_H

#include <stdint.h>
#include <sys/types.h>

#include "users.h"

#define SCRIPT_FD 3 /* where a script too long for an argument is, in the process that runs it */

struct err;

enum spawn_step { SPAWN_STARTED, SPAWN_SANDBOX, SPAWN_USER, SPAWN_CWD, SPAWN_EXEC, SPAWN_SETUP };

struct command {
	const char *const *paths; /* NULL-terminated: what to try to execute, as a PATH search would */
	const char **argv;        /* argv[-1] is there and free: a script without #! is run as /bin/sh PATH ARGS */
	char *const *envp;
	const char *cwd;
	const struct user *user; /* NULL: who the agent is */
	int input, output, error;
	int script;  /* -1, or what becomes SCRIPT_FD */
	int sandbox; /* pidfd of the process whose mount and cgroup namespace to enter, or -1 */
	int cgroup;  /* or -1 */
	int sandbox_cgroup; /* the one above it, or -1 */
	/* Written by the child, which shares the memory, when it cannot go on: */
	enum spawn_step failed;
	int failed_errno;
};

/* A stack for the child; it is only ever one at a time. */
#define SPAWN_STACK (32u << 10)

/*
 * Returns when the child has executed its program or given up. The pid, or -errno with a sentence if there is no process.
 * A child that gave up has said so in `failed` and exits by itself with 126 or 127. One that does neither, as the guest
 * can bring about (a frozen cgroup, a folder of a file system that hangs), is killed after some seconds.
 */
pid_t spawn(struct command *c, void *stack, struct err *e);

/* A plain fork by clone3, with flags and a cgroup (-1 for none). */
pid_t fork_with(uint64_t flags, int cgroup);

#endif
