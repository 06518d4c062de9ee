/* SPDX-License-Identifier: Apache-2.0 */
/* Serves the tree to a kernel: over /dev/fuse at a mount point, or over a byte stream. */
#ifndef FS_SESSION_H
#define FS_SESSION_H

#include "core.h"

struct session_options {
	const char *mountpoint;    /* NULL: a stream of FUSE messages on standard input and output */
	const char *mount_options; /* for -o */
	const char *state;         /* the state directory, for statfs */
	uid_t uid;                 /* who the files belong to; (uid_t)-1: whoever asks */
	gid_t gid;
	/* Called once, when the mount answers. */
	void (*ready)(void *arg);
	void *arg;
};

/*
 * Until it is unmounted, the stream ends, or SIGINT, SIGTERM or SIGHUP comes; requests that wait then fail with EIO, and
 * the mount is gone when this returns. 0, or -errno and a sentence. The signals must be blocked by the caller, before any
 * thread is made.
 */
int session_run(const struct session_options *o, struct core *c, struct loop *l, struct err *e);
void session_block_signals(void);

#endif
