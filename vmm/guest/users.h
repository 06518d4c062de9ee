/* SPDX-License-Identifier: Apache-2.0 */
/* Users and groups of the disk, from its own /etc/passwd and /etc/group: the agent is static and has no other source. */
#ifndef VMENV_GUEST_USERS_H
#define VMENV_GUEST_USERS_H

#include <sys/types.h>

#define GROUPS_MAX 64

struct err;

struct user {
	uid_t uid;
	gid_t gid;
	gid_t groups[GROUPS_MAX];
	int group_count;
	char name[64], home[256], shell[256];
};

/* "NAME", "NUMBER", or either with ":GROUP". root and numbers need no entry. -EINVAL with a sentence if there is none. */
int user_find(struct user *u, int disk, const char *spec, struct err *e);
/* Opens a regular file by its path inside `root`, wherever its symlinks point, and never waits (for a FIFO). -errno */
int open_inside(int root, const char *path, int flags, mode_t mode);

#endif
