/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the runs live: a PID, mount and cgroup namespace rooted on the disk, held by a PID 1 of its own that only reaps.
 * The agent stays outside, its children are born inside.
 */
#ifndef VMENV_GUEST_SANDBOX_H
#define VMENV_GUEST_SANDBOX_H

#include <stdbool.h>
#include <sys/types.h>

struct err;

struct sandbox {
	pid_t init;     /* as the agent sees it, -1 for none */
	int pidfd;      /* of it, -1 for none */
	int cgroup_ns;  /* made by the first init, entered by a later one; -1 for none */
};

/*
 * `root` is the folder to be the root, `cgroup` (a descriptor or -1) the sandbox's, `init_cgroup` the one below it for
 * init: the first one is born in `cgroup`, to see the tree from there, and moved; so no controller may be on yet below it.
 */
int sandbox_open(struct sandbox *s, const char *root, int cgroup, int init_cgroup, struct err *e);
/* Its init has died, or is about to have: the guest was told to power off, say. */
bool sandbox_ending(const struct sandbox *s);
/* Kills all that is in it. The caller reaps. */
void sandbox_close(struct sandbox *s);

#endif
