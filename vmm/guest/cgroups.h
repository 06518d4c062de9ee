/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A cgroup for each run, so that every descendant can be killed however it detached itself.
 *
 * Making one costs more than starting a command in it, so they are used again once empty (but not one that was killed), and a few are made in advance
 * (in the guest: before the freeze, so that a restored machine has them).
 */
#ifndef VMENV_GUEST_CGROUPS_H
#define VMENV_GUEST_CGROUPS_H

#include <stdbool.h>
#include <stdint.h>

#define CGROUPS_MAX 1024

struct err;

enum cgroup_state {
	CGROUP_NONE, /* not there */
	CGROUP_FREE, /* empty: may be taken */
	CGROUP_TAKEN,
	CGROUP_LINGERING, /* given back with processes in it; free once they have ended */
};

struct cgroup {
	int fd;
	enum cgroup_state state;
	/*
	 * Not to be used again: kernels that count kills to catch forks in flight compare with the count of the cgroup the
	 * parent is in, and so kill what is born into a cgroup that was ever killed (6.14, and 6.1 and 6.12 with its fix).
	 */
	bool killed;
};

struct cgroups {
	int parent; /* the sandbox's cgroup, -1 if there are none */
	int init;   /* where the sandbox's PID 1 is */
	struct cgroup *items;
	int count;
	uint32_t pids_max; /* of each; 0: unlimited */
};

/* Makes the sandbox's cgroup in the cgroup2 file system's folder `path`. */
int cgroups_open(struct cgroups *c, const char *path, const char *name, struct err *e);
/* In a guest: limits for the sandbox and each run, of those made from now on. */
void cgroups_limit(struct cgroups *c);
/* Kills what is left and removes the cgroups. */
void cgroups_close(struct cgroups *c, const char *path, const char *name);
/* Makes sure that `n` are free. */
void cgroups_prepare(struct cgroups *c, int n);
/* An empty cgroup's index, or -errno. */
int cgroups_take(struct cgroups *c);
void cgroups_give(struct cgroups *c, int index);
/* Undoes what a guest that has mounted its cgroups froze: nothing could be started in it. `dir` may be -1. */
void cgroup_thaw(int dir);
/* SIGKILL to all in it. */
int cgroups_kill(struct cgroups *c, int index);

#endif
