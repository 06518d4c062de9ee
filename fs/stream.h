/* SPDX-License-Identifier: Apache-2.0 */
/*
 * FUSE messages over a byte stream. Each begins with its length, in the header's first word. Messages in are bounded and
 * whole before they are handed on; messages out never block: what the stream does not take is kept, and while much is
 * kept no more requests are read.
 */
#ifndef FS_STREAM_H
#define FS_STREAM_H

#include <sys/uio.h>
#include <vmenv/loop.h>
#include <vmenv/util.h>

#define STREAM_MESSAGE_MAX ((1u << 20) + 65536) /* a write of 1 MiB and its headers */

struct byte_stream {
	struct loop *loop;
	struct watch in, out;
	char *message; /* STREAM_MESSAGE_MAX bytes */
	size_t have;
	char *kept; /* kept_at .. kept_bytes is still to be written */
	size_t kept_at, kept_bytes, kept_room;
	bool writing, stalled;
	int ended; /* 1: end of file, -errno: broken */
	void (*received)(struct byte_stream *s, char *message, size_t n);
	void (*over)(struct byte_stream *s); /* `ended` is set */
	void *arg;
};

/* Takes over the descriptors. */
int stream_open(struct byte_stream *s, struct loop *l, int in, int out, struct err *e);
void stream_close(struct byte_stream *s);
/* The whole message is sent, or kept to be. Its length, or -1 with errno. */
ssize_t stream_send(struct byte_stream *s, const struct iovec *iov, int count);

#endif
