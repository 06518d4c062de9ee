/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the kernel's mount table says about a mount point. None of this asks a file system anything: one that hangs hangs
 * nobody here.
 */
#ifndef FS_MOUNTPOINT_H
#define FS_MOUNTPOINT_H

#include <stdbool.h>
#include <vmenv/loop.h>
#include <vmenv/util.h>

/* Whether a mount of ours may go there: a directory that is not in a vmenvfs mount. 0 or -errno. */
int mountpoint_check(const char *path, struct err *e);

/*
 * Notices that a mount is not in the mount table any more although somebody still holds it: after a lazy unmount while it
 * is in use, or where another mount namespace has a copy. Whoever unmounted it wants it to end.
 */
struct mount_watch {
	struct loop *loop;
	unsigned major, minor;
	struct watch watch;
	struct timer timer;
	bool gone;		 /* says whether it is, when `over` is called or has been */
	void (*over)(void *arg); /* on the loop, a moment after it went away, unless it has ended by then */
	void *arg;
};

/* Best effort. The watch must stay where it is until mount_watch_stop, which may also be called without a start. */
void mount_watch_start(struct mount_watch *w, struct loop *l, const char *mountpoint, void (*over)(void *arg), void *arg);
void mount_watch_stop(struct mount_watch *w);

#endif
