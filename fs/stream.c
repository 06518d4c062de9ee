/* SPDX-License-Identifier: Apache-2.0 */
#include "stream.h"

#include <linux/fuse.h>

#define KEPT_MOST (32u << 20) /* no more requests are read past this */
#define READS_A_TURN 32

static void end(struct byte_stream *s, int why)
{
	if (s->ended)
		return;
	s->ended = why;
	loop_remove(s->loop, &s->in);
	if (s->writing)
		loop_remove(s->loop, &s->out);
	s->writing = false;
	s->over(s);
}

/* Hands on all whole messages. */
static void deliver(struct byte_stream *s)
{
	size_t at = 0;

	while (!s->ended && s->have - at >= sizeof(struct fuse_in_header)) {
		struct fuse_in_header header;

		memcpy(&header, s->message + at, sizeof(header));
		if (header.len < sizeof(header) || header.len > STREAM_MESSAGE_MAX) {
			end(s, -EPROTO);
			return;
		}
		if (header.len > s->have - at)
			break;
		/* libfuse wants a message aligned, and may write to it. */
		if (at % sizeof(uint64_t)) {
			memmove(s->message, s->message + at, s->have - at);
			s->have -= at;
			at = 0;
		}
		s->received(s, s->message + at, header.len);
		at += header.len;
	}
	memmove(s->message, s->message + at, s->have - at);
	s->have -= at;
}

static void readable(struct watch *w, uint32_t events)
{
	struct byte_stream *s = w->arg;

	(void)events;
	for (int i = 0; i < READS_A_TURN && !s->ended && !s->stalled; i++) {
		ssize_t n = read(w->fd, s->message + s->have, STREAM_MESSAGE_MAX - s->have);

		if (n < 0 && (errno == EAGAIN || errno == EINTR))
			return;
		if (n <= 0) {
			end(s, n < 0 ? -errno : 1);
			return;
		}
		s->have += (size_t)n;
		deliver(s);
	}
}

static void settle(struct byte_stream *s)
{
	size_t left = s->kept_bytes - s->kept_at;

	if (left && !s->writing)
		s->writing = loop_add(s->loop, &s->out, EPOLLOUT) == 0;
	else if (!left && s->writing) {
		loop_remove(s->loop, &s->out);
		s->writing = false;
	}
	if (!s->stalled && left > KEPT_MOST) {
		loop_change(s->loop, &s->in, 0);
		s->stalled = true;
	} else if (s->stalled && left < KEPT_MOST / 2) {
		loop_change(s->loop, &s->in, EPOLLIN);
		s->stalled = false;
	}
}

static void writable(struct watch *w, uint32_t events)
{
	struct byte_stream *s = w->arg;
	ssize_t n = write(w->fd, s->kept + s->kept_at, s->kept_bytes - s->kept_at);

	(void)events;
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n < 0) {
		end(s, -errno);
		return;
	}
	s->kept_at += (size_t)n;
	if (s->kept_at == s->kept_bytes)
		s->kept_at = s->kept_bytes = 0;
	settle(s);
}

static int keep(struct byte_stream *s, const char *bytes, size_t n)
{
	if (s->kept_room - s->kept_bytes < n && s->kept_at) {
		memmove(s->kept, s->kept + s->kept_at, s->kept_bytes - s->kept_at);
		s->kept_bytes -= s->kept_at;
		s->kept_at = 0;
	}
	if (s->kept_room - s->kept_bytes < n) {
		size_t room = MAX(s->kept_room * 2, s->kept_bytes + n);
		char *grown = realloc(s->kept, room);

		if (!grown)
			return -ENOMEM;
		s->kept = grown;
		s->kept_room = room;
	}
	memcpy(s->kept + s->kept_bytes, bytes, n);
	s->kept_bytes += n;
	return 0;
}

ssize_t stream_send(struct byte_stream *s, const struct iovec *iov, int count)
{
	ssize_t sent = 0;
	size_t all = 0, skip;

	if (s->ended) {
		errno = ENOTCONN;
		return -1;
	}
	for (int i = 0; i < count; i++)
		all += iov[i].iov_len;
	if (s->kept_at == s->kept_bytes) {
		sent = writev(s->out.fd, iov, count);
		if (sent < 0 && errno != EAGAIN && errno != EINTR)
			return -1;
		sent = MAX(sent, 0);
	}
	skip = (size_t)sent;
	for (int i = 0; i < count; i++) {
		size_t n = MIN(skip, iov[i].iov_len);

		skip -= n;
		/* Half a message cannot be taken back: without memory for the rest the stream is broken. */
		if (n < iov[i].iov_len && keep(s, (char *)iov[i].iov_base + n, iov[i].iov_len - n) < 0) {
			end(s, -ENOMEM);
			errno = ENOMEM;
			return -1;
		}
	}
	settle(s);
	return (ssize_t)all;
}

int stream_open(struct byte_stream *s, struct loop *l, int in, int out, struct err *e)
{
	int r;

	s->loop = l;
	s->in = (struct watch){ in, readable, s };
	s->out = (struct watch){ out, writable, s };
	s->message = malloc(STREAM_MESSAGE_MAX);
	if (!s->message)
		return err_set(e, ENOMEM, "no memory for messages");
	if (fcntl(in, F_SETFL, fcntl(in, F_GETFL) | O_NONBLOCK) < 0 || fcntl(out, F_SETFL, fcntl(out, F_GETFL) | O_NONBLOCK) < 0)
		return err_set(e, errno, "the stream: %s", strerror(errno));
	r = loop_add(l, &s->in, EPOLLIN);
	if (r < 0)
		return err_set(e, -r, "standard input cannot carry a stream of messages: %s", strerror(-r));
	return 0;
}

void stream_close(struct byte_stream *s)
{
	if (!s->ended) {
		loop_remove(s->loop, &s->in);
		if (s->writing)
			loop_remove(s->loop, &s->out);
	}
	close(s->in.fd);
	close(s->out.fd);
	free(s->message);
	free(s->kept);
}
