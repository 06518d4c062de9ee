/* SPDX-License-Identifier: Apache-2.0 */
/* vsock packets: the receive and transmit queues. */
#include <sys/socket.h>

#include "vsock_private.h"

/* ---- to the guest ---- */

static bool rx_take(struct vsock *s, struct chain *c)
{
	/* The guest may race with the flag; a few tries, then its kick. */
	for (int i = 0; i < 4; i++) {
		int e = virtqueue_take(&s->v, RX, c);

		if (e == 1 && (c->readable || c->writable_bytes <= HDR)) {
			virtio_break(&s->v, "a receive buffer cannot hold a packet");
			return false;
		}
		if (e)
			return e == 1;
		if (!virtqueue_kicks(&s->v, RX, true))
			break;
	}
	s->starved = true;
	return false;
}

static void rx_give(struct vsock *s, const struct chain *c, const struct virtio_vsock_hdr *h)
{
	chain_write(c, 0, h, HDR);
	virtqueue_give(&s->v, RX, c, (uint32_t)HDR + h->len);
	s->rx_given = true;
}

static struct virtio_vsock_hdr header(struct stream *st, uint16_t op)
{
	st->told_taken = st->taken; /* every packet carries the credit */
	st->say &= (uint8_t)~SAY_CREDIT;
	return (struct virtio_vsock_hdr){ .src_cid = HOST_CID, .dst_cid = VSOCK_GUEST_CID, .src_port = st->port,
					  .dst_port = st->guest_port, .type = VIRTIO_VSOCK_TYPE_STREAM, .op = op,
					  .buf_alloc = VSOCK_BUFFER, .fwd_cnt = st->taken };
}

/* One packet that is owed. */
static void speak(struct stream *st, const struct chain *c)
{
	struct virtio_vsock_hdr h;

	if (st->say & SAY_REQUEST) {
		h = header(st, VIRTIO_VSOCK_OP_REQUEST);
		st->say &= (uint8_t)~SAY_REQUEST;
		st->requested = true;
	} else if (st->say & SAY_ASK) {
		h = header(st, VIRTIO_VSOCK_OP_CREDIT_REQUEST);
		st->say &= (uint8_t)~SAY_ASK;
	} else if (st->say & SAY_SHUT) {
		h = header(st, VIRTIO_VSOCK_OP_SHUTDOWN);
		st->say &= (uint8_t)~SAY_SHUT;
		h.flags = st->told_shut = st->host_shut;
	} else {
		h = header(st, VIRTIO_VSOCK_OP_CREDIT_UPDATE);
	}
	rx_give(st->s, c, &h);
}

void vsock_talk(struct vsock *s)
{
	struct chain *c = &s->chain;

	while (s->rst_count) {
		struct rst *r = &s->rst[s->rst_head];
		struct virtio_vsock_hdr h = { .src_cid = r->src_cid, .dst_cid = r->dst_cid, .src_port = r->src_port,
					      .dst_port = r->dst_port, .type = r->type, .op = VIRTIO_VSOCK_OP_RST };

		if (!rx_take(s, c))
			return;
		rx_give(s, c, &h);
		s->rst_head = (s->rst_head + 1) % RST_MAX;
		s->rst_count--;
	}
	while (!TAILQ_EMPTY(&s->talk)) {
		struct stream *st = TAILQ_FIRST(&s->talk);

		if (st->say) {
			if (!rx_take(s, c))
				return;
			speak(st, c);
		}
		if (!st->say) {
			TAILQ_REMOVE(&s->talk, st, talk);
			st->in_talk = false;
		}
	}
}

/* Takes up to `want` chains and lays out their payload room, at most `limit` bytes. Returns the chains, *count iovecs. */
static unsigned gather(struct vsock *s, unsigned want, uint32_t limit, size_t *count)
{
	unsigned chains = 0;
	size_t n = 0;

	while (chains < want && limit && n + VIRTIO_QUEUE_SIZE_MAX <= GATHER_IOV) {
		struct chain *c = &s->gather[chains];
		size_t skip = HDR;

		if (chains ? virtqueue_take(&s->v, RX, c) != 1 : !rx_take(s, c))
			break;
		chains++;
		if (c->readable || c->writable_bytes <= HDR) {
			virtio_break(&s->v, "a receive buffer cannot hold a packet");
			return 0;
		}
		c->writable_bytes = MIN(c->writable_bytes, HDR + limit);
		for (unsigned i = 0; i < c->writable && limit; i++) {
			struct iovec io = c->iov[i];
			size_t jump = MIN(skip, io.iov_len);

			skip -= jump;
			io.iov_base = (uint8_t *)io.iov_base + jump;
			io.iov_len = MIN(io.iov_len - jump, limit);
			limit -= (uint32_t)io.iov_len;
			if (io.iov_len)
				s->iov[n++] = io;
		}
	}
	*count = n;
	return chains;
}

/* One read of a stream's socket into `want` chains. Returns the chains filled; 0: nothing there, or the queue is empty. */
static unsigned read_host(struct stream *st, unsigned want, bool *filled)
{
	struct vsock *s = st->s;
	struct msghdr m = { .msg_iov = s->iov };
	unsigned chains, given = 0;
	ssize_t n;

	*filled = false;
	chains = gather(s, want, MIN(stream_credit(st), READ_MAX), &m.msg_iovlen);
	if (!chains)
		return 0;
	do
		n = recvmsg(st->watch.fd, &m, MSG_DONTWAIT);
	while (n < 0 && errno == EINTR);
	if (n <= 0) {
		if (n < 0 && errno == EAGAIN) {
			st->readable = false;
		} else {
			st->eof = true;
			st->hup |= n < 0;
		}
	}
	for (; n > 0; given++) {
		struct virtio_vsock_hdr h = header(st, VIRTIO_VSOCK_OP_RW);
		const struct chain *c = &s->gather[given];

		h.len = (uint32_t)MIN((size_t)n, c->writable_bytes - HDR);
		st->sent += h.len;
		n -= h.len;
		*filled = h.len == c->writable_bytes - HDR;
		rx_give(s, c, &h);
	}
	for (unsigned i = given; i < chains; i++)
		virtqueue_untake(&s->v, RX);
	return given;
}

static void out_of_credit(struct stream *st)
{
	struct vsock *s = st->s;

	if (st->asked || s->ask_timer_set)
		return;
	s->ask_timer_set = true;
	loop_timer(s->loop, &s->ask_timer, now_ns(CLOCK_MONOTONIC) + ASK_NS);
}

/* A stream's share of the receive queue: some 64 KiB at most. False if the queue is empty. */
static bool serve(struct stream *st, unsigned *budget)
{
	unsigned share = GATHER + 1, want = 1;

	while (st->readable && !st->eof && share && *budget) {
		bool filled;
		unsigned n;

		if (!stream_credit(st)) {
			out_of_credit(st);
			break;
		}
		n = read_host(st, MIN(want, MIN(share, *budget)), &filled);
		if (!n) {
			if (st->readable && !st->eof) /* no chain */
				return false;
			break;
		}
		/* A read that did not fill its room has most likely emptied the socket: the next is only to make sure. */
		want = filled ? GATHER : 1;
		share -= MIN(n, share);
		*budget -= MIN(n, *budget);
	}
	return true;
}

void vsock_pump(struct vsock *s)
{
	unsigned budget = TURN_CHAINS;

	while (!TAILQ_EMPTY(&s->ready) && budget) {
		struct stream *st = TAILQ_FIRST(&s->ready);

		if (!serve(st, &budget))
			return; /* keeps its place */
		TAILQ_REMOVE(&s->ready, st, ready);
		st->in_ready = false;
		if (st->eof) {
			if (st->hup || (st->guest_shut & SHUT_W && !st->used)) {
				stream_host_gone(st);
			} else {
				st->host_shut |= SHUT_W;
				stream_say(st, SAY_SHUT);
			}
		} else if (st->readable && stream_credit(st)) {
			st->in_ready = true;
			TAILQ_INSERT_TAIL(&s->ready, st, ready);
		}
	}
	if (!TAILQ_EMPTY(&s->ready))
		vsock_wake(s);
}

/* ---- from the guest ---- */

static void packet(struct stream *st, struct chain *c, const struct virtio_vsock_hdr *h)
{
	uint32_t before = stream_credit(st);

	st->peer_alloc = h->buf_alloc;
	st->peer_taken = h->fwd_cnt;
	if (h->op == VIRTIO_VSOCK_OP_RST) {
		if (st->state == CONNECTING)
			stream_drop(st, -ECONNREFUSED);
		else
			stream_guest_gone(st);
		return;
	}
	if (st->state == CONNECTING) {
		if (h->op != VIRTIO_VSOCK_OP_RESPONSE) {
			stream_offend(st);
			return;
		}
		st->state = OPEN;
		loop_timer_cancel(st->s->loop, &st->timer);
		st->readable = true; /* if not, the first read says so */
		stream_ready(st);
		stream_finish(st, 0);
		return;
	}
	if (!before && stream_credit(st)) {
		st->asked = false;
		stream_ready(st);
	}
	switch (h->op) { /* the stream may be gone after these */
	case VIRTIO_VSOCK_OP_RW:
		stream_take_bytes(st, c, h->len);
		break;
	case VIRTIO_VSOCK_OP_SHUTDOWN:
		stream_guest_shutdown(st, h->flags);
		break;
	case VIRTIO_VSOCK_OP_CREDIT_UPDATE:
		break;
	case VIRTIO_VSOCK_OP_CREDIT_REQUEST:
		stream_say(st, SAY_CREDIT);
		break;
	default:
		stream_offend(st);
	}
}

static void take_packet(struct vsock *s, struct chain *c)
{
	struct virtio_vsock_hdr h;
	struct stream *st;
	struct rst r;

	if (chain_read(c, 0, &h, HDR) != HDR || h.len > c->readable_bytes - HDR) {
		virtio_break(&s->v, "a packet is longer than its buffers");
		return;
	}
	if (h.src_cid != VSOCK_GUEST_CID)
		return; /* there is no one to answer */
	if (h.dst_cid == HOST_CID && h.type == VIRTIO_VSOCK_TYPE_STREAM) {
		st = stream_find(s, h.dst_port, h.src_port);
		if (st) {
			packet(st, c, &h);
			return;
		}
	}
	if (h.op == VIRTIO_VSOCK_OP_RST)
		return;
	r = (struct rst){ .dst_cid = VSOCK_GUEST_CID, .src_cid = h.dst_cid, .src_port = h.dst_port, .dst_port = h.src_port,
			  .type = h.type };
	vsock_queue_rst(s, &r);
}

void vsock_take_tx(struct vsock *s)
{
	struct chain *c = &s->chain;
	unsigned n;

	s->tx_left = false;
	virtqueue_kicks(&s->v, TX, false); /* no need of more kicks while at it */
	for (n = 0; n < TURN_CHAINS && !(s->v.s.status & VIRTIO_CONFIG_S_NEEDS_RESET); n++) {
		if (virtqueue_take(&s->v, TX, c) != 1) {
			/* Empty, it seems: ask for kicks again, and look once more. */
			if (!virtqueue_kicks(&s->v, TX, true) || virtqueue_take(&s->v, TX, c) != 1)
				break;
		}
		take_packet(s, c);
		virtqueue_give(&s->v, TX, c, 0);
		s->tx_given++;
	}
	if (n == TURN_CHAINS) {
		s->tx_left = true;
		vsock_wake(s);
	}
	vsock_turn_soon(s);
}

