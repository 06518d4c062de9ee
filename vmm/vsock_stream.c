/* SPDX-License-Identifier: Apache-2.0 */
/* vsock streams: their life, and their host sockets. */
#include <sys/socket.h>

#include "vsock_private.h"

struct stream *stream_find(struct vsock *s, uint32_t port, uint32_t guest_port)
{
	struct stream *st = s->slot[port % VSOCK_STREAMS_MAX];

	/* A port that is not out yet the guest can only have guessed. */
	if (!st || st->gone || !st->requested || st->state == DRAINING)
		return NULL;
	return st->port == port && st->guest_port == guest_port ? st : NULL;
}

void stream_ready(struct stream *st)
{
	if (st->in_ready || !st->readable || st->eof || st->state != OPEN || (st->guest_shut & SHUT_R))
		return;
	st->in_ready = true;
	TAILQ_INSERT_TAIL(&st->s->ready, st, ready);
	vsock_turn_soon(st->s);
}

void stream_say(struct stream *st, uint8_t what)
{
	st->say |= what;
	if (!st->in_talk) {
		st->in_talk = true;
		TAILQ_INSERT_TAIL(&st->s->talk, st, talk);
	}
	vsock_turn_soon(st->s);
}

static void leave_lists(struct stream *st)
{
	if (st->in_ready)
		TAILQ_REMOVE(&st->s->ready, st, ready);
	if (st->in_talk)
		TAILQ_REMOVE(&st->s->talk, st, talk);
	st->in_ready = st->in_talk = false;
}

void stream_free(struct stream *st)
{
	st->s->slot[st->port % VSOCK_STREAMS_MAX] = NULL;
	st->s->streams--;
	free(st->buffer);
	free(st);
}

void stream_finish(struct stream *st, int status)
{
	if (!st->done || st->in_finished)
		return;
	st->status = status;
	st->in_finished = true;
	TAILQ_INSERT_TAIL(&st->s->finished, st, finished);
	if (st->s->held)
		vsock_wake(st->s); /* results are not the guest's: they are told all the same */
	else
		vsock_turn_soon(st->s);
}

void stream_drop(struct stream *st, int status)
{
	if (st->gone)
		return;
	st->gone = true;
	loop_timer_cancel(st->s->loop, &st->timer);
	if (st->watched)
		loop_remove(st->s->loop, &st->watch);
	close(st->watch.fd);
	st->watch.fd = -1;
	leave_lists(st);
	stream_finish(st, status);
	if (!st->in_finished)
		stream_free(st);
}

void vsock_drop_all(struct vsock *s, bool requested_only)
{
	for (unsigned i = 0; i < VSOCK_STREAMS_MAX; i++)
		if (s->slot[i] && (s->slot[i]->requested || !requested_only))
			stream_drop(s->slot[i], -EIO);
}

void vsock_queue_rst(struct vsock *s, const struct rst *r)
{
	if (s->rst_count == RST_MAX)
		return;
	s->rst[(s->rst_head + s->rst_count++) % RST_MAX] = *r;
	vsock_turn_soon(s);
}

void stream_rst(struct stream *st)
{
	struct rst r = { .dst_cid = VSOCK_GUEST_CID, .src_cid = HOST_CID, .src_port = st->port, .dst_port = st->guest_port,
			 .type = VIRTIO_VSOCK_TYPE_STREAM };

	if (st->requested)
		vsock_queue_rst(st->s, &r);
}

void stream_guest_gone(struct stream *st)
{
	loop_timer_cancel(st->s->loop, &st->timer);
	leave_lists(st);
	st->state = DRAINING;
	st->say = 0;
	if (!st->used || st->hup)
		stream_drop(st, 0);
}

void stream_host_gone(struct stream *st)
{
	if (st->state == DRAINING) {
		stream_drop(st, 0);
		return;
	}
	free(st->buffer);
	st->buffer = NULL;
	st->taken += st->used;
	st->used = 0;
	st->host_shut = SHUT_BOTH;
	if (st->host_shut != st->told_shut)
		stream_say(st, SAY_SHUT);
	loop_timer(st->s->loop, &st->timer, now_ns(CLOCK_MONOTONIC) + CLOSE_NS);
}

static void watch_out(struct stream *st, bool on)
{
	if (st->want_out == on || !st->watched)
		return;
	st->want_out = on;
	loop_change(st->s->loop, &st->watch, EPOLLIN | EPOLLRDHUP | EPOLLET | (on ? EPOLLOUT : 0));
}

/* After bytes went to the host, or will go no more. */
static void passed_on(struct stream *st)
{
	if (st->used)
		return;
	free(st->buffer);
	st->buffer = NULL;
	watch_out(st, false);
	if (st->state == DRAINING) {
		stream_drop(st, 0);
		return;
	}
	if (st->taken - st->told_taken >= VSOCK_BUFFER / 2)
		stream_say(st, SAY_CREDIT);
	if (st->guest_shut & SHUT_W) {
		shutdown(st->watch.fd, SHUT_WR);
		if (st->eof && st->host_shut != SHUT_BOTH)
			stream_host_gone(st);
	}
}

/* The host takes no more bytes: let the guest know, and pretend for what is on its way. */
static void host_deaf(struct stream *st)
{
	st->taken += st->used;
	st->used = 0;
	if (!(st->host_shut & SHUT_R)) {
		st->host_shut |= SHUT_R;
		if (st->state == OPEN)
			stream_say(st, SAY_SHUT);
	}
	passed_on(st);
}

static ssize_t send_host(struct stream *st, struct iovec *iov, size_t count)
{
	struct msghdr m = { .msg_iov = iov, .msg_iovlen = count };
	ssize_t n;

	do
		n = sendmsg(st->watch.fd, &m, MSG_DONTWAIT | MSG_NOSIGNAL);
	while (n < 0 && errno == EINTR);
	return n < 0 ? -errno : n;
}

static void drain_buffer(struct stream *st)
{
	while (st->used) {
		uint32_t first = MIN(st->used, VSOCK_BUFFER - st->head);
		struct iovec iov[2] = { { st->buffer + st->head, first }, { st->buffer, st->used - first } };
		ssize_t n = send_host(st, iov, 2);

		if (n == -EAGAIN) {
			watch_out(st, true);
			if (st->taken - st->told_taken >= VSOCK_BUFFER / 2 && st->state == OPEN)
				stream_say(st, SAY_CREDIT);
			return;
		}
		if (n < 0) {
			host_deaf(st);
			return;
		}
		st->head = (st->head + (uint32_t)n) % VSOCK_BUFFER;
		st->used -= (uint32_t)n;
		st->taken += (uint32_t)n;
	}
	passed_on(st);
}

uint32_t stream_credit(const struct stream *st)
{
	uint32_t flying = st->sent - st->peer_taken;

	return flying < st->peer_alloc ? st->peer_alloc - flying : 0;
}

void stream_offend(struct stream *st)
{
	stream_rst(st);
	if (st->state == CONNECTING)
		stream_drop(st, -EIO);
	else
		stream_guest_gone(st);
}

void stream_take_bytes(struct stream *st, const struct chain *c, uint32_t len)
{
	struct vsock *s = st->s;
	size_t count = 0, at = HDR;
	uint32_t left = len, put;
	ssize_t n = 0;

	if ((st->guest_shut & SHUT_W) || len > VSOCK_BUFFER - st->used) {
		stream_offend(st);
		return;
	}
	if (st->host_shut & SHUT_R) {
		st->taken += len;
		passed_on(st);
		return;
	}
	if (!st->used) {
		size_t skip = HDR;

		for (unsigned i = 0; i < c->readable && left; i++) {
			struct iovec io = c->iov[i];
			size_t jump = MIN(skip, io.iov_len);

			skip -= jump;
			io.iov_base = (uint8_t *)io.iov_base + jump;
			io.iov_len = MIN(io.iov_len - jump, left);
			left -= (uint32_t)io.iov_len;
			if (io.iov_len)
				s->iov[count++] = io;
		}
		n = send_host(st, s->iov, count);
		if (n < 0 && n != -EAGAIN) {
			st->taken += len;
			host_deaf(st);
			return;
		}
		n = MAX(n, 0);
		st->taken += (uint32_t)n;
		if ((uint32_t)n == len) {
			passed_on(st);
			return;
		}
		if (!st->buffer)
			st->buffer = malloc(VSOCK_BUFFER);
		if (!st->buffer) {
			stream_offend(st);
			return;
		}
		st->head = 0;
		watch_out(st, true);
	}
	at += (size_t)n;
	len -= (uint32_t)n;
	while (len) {
		uint32_t tail = (st->head + st->used) % VSOCK_BUFFER;

		put = MIN(len, VSOCK_BUFFER - tail);
		chain_read(c, at, st->buffer + tail, put);
		st->used += put;
		at += put;
		len -= put;
	}
}

void stream_guest_shutdown(struct stream *st, uint32_t flags)
{
	uint8_t fresh = flags & SHUT_BOTH & (uint8_t)~st->guest_shut;

	st->guest_shut |= fresh;
	if (st->guest_shut == SHUT_BOTH) {
		stream_rst(st);
		stream_guest_gone(st);
		return;
	}
	if (fresh & SHUT_R) {
		shutdown(st->watch.fd, SHUT_RD);
		if (st->hup && st->host_shut != SHUT_BOTH)
			stream_host_gone(st); /* what it left unread is unwanted now */
	}
	if ((fresh & SHUT_W) && !st->used)
		passed_on(st);
}

void stream_socket(struct stream *st, uint32_t events)
{
	if (events & (EPOLLHUP | EPOLLERR))
		st->hup = true;
	if (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR))
		st->readable = true;
	if (st->hup && st->state == DRAINING) {
		stream_drop(st, 0); /* nobody is left to drain to */
	} else if (st->hup && st->state == OPEN && (st->eof || (st->guest_shut & SHUT_R))) {
		if (st->host_shut != SHUT_BOTH)
			stream_host_gone(st);
	} else {
		stream_ready(st);
		if (events & EPOLLOUT)
			drain_buffer(st);
	}
}

