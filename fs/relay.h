/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Mounts /dev/fuse and carries its messages to and from a server behind a byte stream, which may die and be started
 * anew.
 *
 * Theory: FUSE messages begin with their length, in both directions, so a stream needs no other framing. Both
 * directions are independent and buffered within bounds: what the server says is always taken (a write to /dev/fuse
 * does not block), so a server that is slow to listen cannot deadlock with us. Every request that awaits an answer is
 * remembered, and answered with EIO if the stream dies. Open file handles are numbered here, not by the server, so that
 * a server started anew never sees a handle of the one before it. The kernel's FUSE_INIT is kept and replayed to a new
 * server.
 */
#ifndef FS_RELAY_H
#define FS_RELAY_H

#include <signal.h>
#include <sys/types.h>

#include "host.h"
#include "process.h"

/* The other end of the stream: a process of ours. */
struct upstream {
	int in, out; /* non-blocking; what we read from, what we write to */
	pid_t pid;
	int aside;  /* also watched for input; the backend's own; -1: none */
	bool group; /* pid leads a process group of its own */
};

struct backend {
	const char *what; /* "the emulated host": the subject of sentences */
	/* Starts the process. Called again after it died, if restarts allows. */
	int (*start)(struct backend *b, struct upstream *u, struct err *e);
	/* Every second while the stream is up; may be NULL. */
	void (*tick)(struct backend *b);
	/* upstream.aside is readable. */
	void (*aside)(struct backend *b);
	/* The mount is gone, the process is about to be ended; may be NULL. */
	void (*ending)(struct backend *b);
	/* The process has ended: what is known about it beyond its status, for the sentence; may be NULL. */
	void (*post_mortem)(struct backend *b, char *text, size_t size);
	unsigned restarts;	/* at most so many in a minute; 0: its death is the end */
	unsigned answer_within; /* seconds for FUSE_INIT's answer; 0: no limit */
	unsigned silent_after;	/* seconds without an answer to a ping until it counts as hung; 0: not pinged */
	unsigned end_within;	/* seconds from the end of the stream to the end of the process before it is killed */
	bool progress;		/* shown on a terminal while it starts */
	void *arg;
};

/* Until unmounted or a signal (0), or the backend has failed for good (-errno). */
int relay_run(const struct host_options *o, struct backend *b, struct err *e);

#endif
