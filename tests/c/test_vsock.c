/* SPDX-License-Identifier: Apache-2.0 */
/* The vsock device against a guest that behaves, and guests that do not. */
#include "driver.h"

#include <errno.h>
#include <linux/virtio_vsock.h>
#include <poll.h>
#include <sys/socket.h>

#include <vmenv/util.h>

#include "../../vmm/vsock.h"

#define HDR sizeof(struct virtio_vsock_hdr)
#define RX_CHAINS (DRIVER_SIZE / 2)
#define RX_AT BUFFERS_AT              /* RX_CHAINS pieces of 0x2000: header, then 4096 bytes at 0x1000 */
#define TX_AT (BUFFERS_AT + 0x100000) /* one at a time: header, then up to 512 KiB at 0x1000 */
#define EVENT_AT (BUFFERS_AT + 0x200000)
#define PORT 1024u
#define WINDOW (256u << 10)
enum { RX, TX, EVENT };

struct guest {
	struct driver d;
	struct loop *loop;
	struct vsock *s;
	struct timer stop;
	uint32_t alloc, fwd; /* the credit it gives */
	bool rx_closed;      /* posts no more receive buffers */
};

struct result {
	int calls, status;
};

static void done(void *arg, int status)
{
	struct result *r = arg;

	r->calls++;
	r->status = status;
}

static void stop_now(struct timer *t)
{
	loop_stop(t->arg);
}

static void run_for(struct guest *g, unsigned ms)
{
	g->stop = (struct timer){ .fire = stop_now, .arg = g->loop };
	loop_timer(g->loop, &g->stop, now_ns(CLOCK_MONOTONIC) + ms * 1000000ull);
	loop_run(g->loop);
	loop_timer_cancel(g->loop, &g->stop);
}

static void post_rx(struct guest *g, unsigned i)
{
	driver_desc(&g->d, RX, 2 * i, RX_AT + i * 0x2000, HDR, VRING_DESC_F_WRITE | VRING_DESC_F_NEXT, 2 * i + 1);
	driver_desc(&g->d, RX, 2 * i + 1, RX_AT + i * 0x2000 + 0x1000, 4096, VRING_DESC_F_WRITE, 0);
	driver_post(&g->d, RX, 2 * i);
}

static void post_event(struct guest *g, unsigned i)
{
	driver_desc(&g->d, EVENT, i, EVENT_AT + i * 8, 4, VRING_DESC_F_WRITE, 0);
	driver_post(&g->d, EVENT, i);
}

static void guest_up(struct guest *g)
{
	driver_up(&g->d, vsock_virtio(g->s));
	for (unsigned i = 0; i < RX_CHAINS && !g->rx_closed; i++)
		post_rx(g, i);
	for (unsigned i = 0; i < 8; i++)
		post_event(g, i);
	virtio_kick(g->d.v, RX);
	virtio_kick(g->d.v, EVENT);
	g->alloc = WINDOW;
	g->fwd = 0;
}

static void guest_new(struct guest *g)
{
	memset(g, 0, sizeof(*g));
	driver_memory(&g->d);
	g->loop = loop_new();
	g->s = vsock_new(g->loop, &g->d.memory);
	vsock_go(g->s);
}

static void guest_free(struct guest *g)
{
	vsock_free(g->s);
	loop_free(g->loop);
	munmap(g->d.memory.ram, GUEST_BYTES);
}

/* The next packet for the guest, within 300 ms. Its payload, if any, is copied to `data` (4096 bytes). */
static bool next_packet(struct guest *g, struct virtio_vsock_hdr *h, uint8_t *data)
{
	struct vring_used_elem u;
	unsigned i;

	for (int tries = 0; !driver_used(&g->d, RX, &u); tries++) {
		if (tries == 100)
			return false;
		run_for(g, tries ? 3 : 0);
	}
	CHECK(u.id % 2 == 0 && u.id < DRIVER_SIZE && u.len >= HDR);
	i = u.id / 2;
	memcpy(h, g->d.memory.ram + RX_AT + i * 0x2000, HDR);
	CHECK(u.len == HDR + h->len && h->len <= 4096);
	if (data)
		memcpy(data, g->d.memory.ram + RX_AT + i * 0x2000 + 0x1000, h->len);
	if (!g->rx_closed) {
		post_rx(g, i);
		if (!(g->d.q[RX].used->flags & VRING_USED_F_NO_NOTIFY))
			virtio_kick(g->d.v, RX);
	}
	return true;
}

static void expect(struct guest *g, struct virtio_vsock_hdr *h, unsigned op)
{
	CHECK(next_packet(g, h, NULL));
	CHECK(h->op == op);
	CHECK(h->dst_cid == VSOCK_GUEST_CID && h->type == VIRTIO_VSOCK_TYPE_STREAM);
}

static void expect_nothing(struct guest *g, unsigned ms)
{
	struct vring_used_elem u;

	run_for(g, ms);
	CHECK(!driver_used(&g->d, RX, &u));
}

static void send_raw(struct guest *g, const struct virtio_vsock_hdr *h, const void *data, uint32_t len)
{
	struct vring_used_elem u;

	memcpy(g->d.memory.ram + TX_AT, h, HDR);
	driver_desc(&g->d, TX, 0, TX_AT, HDR, len ? VRING_DESC_F_NEXT : 0, 1);
	if (len) {
		memcpy(g->d.memory.ram + TX_AT + 0x1000, data, len);
		driver_desc(&g->d, TX, 1, TX_AT + 0x1000, len, 0, 0);
	}
	driver_post(&g->d, TX, 0);
	virtio_kick(g->d.v, TX);
	if (driver_broken(&g->d))
		return;
	if (!driver_used(&g->d, TX, &u)) { /* just after a reset, the loop comes first */
		run_for(g, 1);
		CHECK(driver_broken(&g->d) || driver_used(&g->d, TX, &u));
	}
}

/* An answer along the ways of `in`, a packet that the guest got. */
static struct virtio_vsock_hdr reply(struct guest *g, const struct virtio_vsock_hdr *in, unsigned op, uint32_t len)
{
	return (struct virtio_vsock_hdr){ .src_cid = VSOCK_GUEST_CID, .dst_cid = 2, .src_port = in->dst_port,
					  .dst_port = in->src_port, .type = VIRTIO_VSOCK_TYPE_STREAM, .op = (uint16_t)op,
					  .len = len, .buf_alloc = g->alloc, .fwd_cnt = g->fwd };
}

static void say(struct guest *g, const struct virtio_vsock_hdr *in, unsigned op, uint32_t flags)
{
	struct virtio_vsock_hdr h = reply(g, in, op, 0);

	h.flags = flags;
	send_raw(g, &h, NULL, 0);
}

static void send_bytes(struct guest *g, const struct virtio_vsock_hdr *in, const void *data, uint32_t len)
{
	struct virtio_vsock_hdr h = reply(g, in, VIRTIO_VSOCK_OP_RW, len);

	send_raw(g, &h, data, len);
}

/* Asks for a stream; returns the host's other end. */
static int ask(struct guest *g, struct result *r, unsigned ms)
{
	int pair[2];

	CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
	*r = (struct result){ 0 };
	vsock_connect(g->s, PORT, pair[0], ms, done, r);
	return pair[1];
}

static int open_stream(struct guest *g, struct virtio_vsock_hdr *h)
{
	struct result r;
	int fd = ask(g, &r, 1000);

	expect(g, h, VIRTIO_VSOCK_OP_REQUEST);
	CHECK(h->dst_port == PORT && h->src_cid == 2 && h->buf_alloc == WINDOW && h->fwd_cnt == 0 && r.calls == 0);
	say(g, h, VIRTIO_VSOCK_OP_RESPONSE, 0);
	run_for(g, 0);
	CHECK(r.calls == 1 && r.status == 0);
	return fd;
}

static bool at_end(int fd)
{
	char c;

	return recv(fd, &c, 1, MSG_DONTWAIT) == 0;
}

static bool reset_or_end(int fd)
{
	char c;
	ssize_t n = recv(fd, &c, 1, MSG_DONTWAIT);

	return n == 0 || (n < 0 && errno == ECONNRESET);
}

static void test_echo(void)
{
	struct virtio_vsock_hdr h, p;
	uint8_t data[4096];
	struct result r;
	struct guest g;
	char text[64];
	int fd;

	guest_new(&g);
	fd = ask(&g, &r, 1000); /* before there is a driver: waits */
	run_for(&g, 5);
	CHECK(r.calls == 0);
	guest_up(&g);
	expect(&g, &h, VIRTIO_VSOCK_OP_REQUEST);
	CHECK(write(fd, "early", 5) == 5); /* before the guest accepts: comes after */
	expect_nothing(&g, 3);
	say(&g, &h, VIRTIO_VSOCK_OP_RESPONSE, 0);
	CHECK(next_packet(&g, &p, data) && p.op == VIRTIO_VSOCK_OP_RW && p.len == 5 && memcmp(data, "early", 5) == 0);
	CHECK(r.calls == 1 && r.status == 0);
	driver_interrupted(&g.d);
	CHECK(write(fd, "question", 8) == 8);
	CHECK(next_packet(&g, &p, data) && p.len == 8 && memcmp(data, "question", 8) == 0 && driver_interrupted(&g.d));
	CHECK(g.d.q[RX].used->flags & VRING_USED_F_NO_NOTIFY); /* the guest is spared kicks */
	send_bytes(&g, &h, "answer", 6);
	CHECK(recv(fd, text, sizeof(text), MSG_DONTWAIT) == 6 && memcmp(text, "answer", 6) == 0);
	CHECK(!driver_interrupted(&g.d)); /* a used transmit buffer alone waits a little */
	run_for(&g, 10);
	CHECK(driver_interrupted(&g.d));

	/* Half-close, host first. */
	shutdown(fd, SHUT_WR);
	expect(&g, &p, VIRTIO_VSOCK_OP_SHUTDOWN);
	CHECK(p.flags == VIRTIO_VSOCK_SHUTDOWN_SEND);
	send_bytes(&g, &h, "still here", 10);
	CHECK(recv(fd, text, sizeof(text), MSG_DONTWAIT) == 10 && !at_end(fd));
	say(&g, &h, VIRTIO_VSOCK_OP_SHUTDOWN, 3);
	expect(&g, &p, VIRTIO_VSOCK_OP_RST);
	CHECK(at_end(fd));
	close(fd);

	/* Half-close, guest first. */
	fd = open_stream(&g, &h);
	say(&g, &h, VIRTIO_VSOCK_OP_SHUTDOWN, VIRTIO_VSOCK_SHUTDOWN_SEND);
	CHECK(at_end(fd));
	CHECK(write(fd, "more", 4) == 4);
	CHECK(next_packet(&g, &p, data) && p.op == VIRTIO_VSOCK_OP_RW && p.len == 4);
	close(fd);
	expect(&g, &p, VIRTIO_VSOCK_OP_SHUTDOWN);
	CHECK(p.flags == 3);
	say(&g, &h, VIRTIO_VSOCK_OP_RST, 0);
	expect_nothing(&g, 3);
	send_bytes(&g, &h, "late", 4); /* to a stream that is gone */
	expect(&g, &p, VIRTIO_VSOCK_OP_RST);

	/* The guest will not read: the host's writer learns it. */
	fd = open_stream(&g, &h);
	say(&g, &h, VIRTIO_VSOCK_OP_SHUTDOWN, VIRTIO_VSOCK_SHUTDOWN_RCV);
	CHECK(send(fd, "x", 1, MSG_NOSIGNAL) == -1 && errno == EPIPE);
	send_bytes(&g, &h, "but it talks", 12);
	CHECK(recv(fd, text, sizeof(text), MSG_DONTWAIT) == 12);
	close(fd);
	expect(&g, &p, VIRTIO_VSOCK_OP_SHUTDOWN);
	say(&g, &h, VIRTIO_VSOCK_OP_RST, 0);

	/* The guest resets: what it said before arrives. */
	fd = open_stream(&g, &h);
	send_bytes(&g, &h, "last words", 10);
	say(&g, &h, VIRTIO_VSOCK_OP_RST, 0);
	CHECK(recv(fd, text, sizeof(text), MSG_DONTWAIT) == 10 && at_end(fd));
	close(fd);
	guest_free(&g);
}

static void test_connect_fails(void)
{
	struct virtio_vsock_hdr h, p;
	struct result r;
	struct guest g;
	static struct result many[VSOCK_STREAMS_MAX];
	static int fds[VSOCK_STREAMS_MAX];
	int fd;

	guest_new(&g);
	guest_up(&g);
	fd = ask(&g, &r, 1000);
	expect(&g, &h, VIRTIO_VSOCK_OP_REQUEST);
	say(&g, &h, VIRTIO_VSOCK_OP_RST, 0);
	run_for(&g, 1);
	CHECK(r.calls == 1 && r.status == -ECONNREFUSED && at_end(fd));
	close(fd);

	fd = ask(&g, &r, 5);
	expect(&g, &h, VIRTIO_VSOCK_OP_REQUEST);
	expect(&g, &p, VIRTIO_VSOCK_OP_RST);
	CHECK(r.calls == 1 && r.status == -ETIMEDOUT && at_end(fd) && p.src_port == h.src_port);
	say(&g, &h, VIRTIO_VSOCK_OP_RESPONSE, 0); /* too late */
	expect(&g, &p, VIRTIO_VSOCK_OP_RST);
	close(fd);

	fd = ask(&g, &r, 1000); /* an answer that is none */
	expect(&g, &h, VIRTIO_VSOCK_OP_REQUEST);
	send_bytes(&g, &h, "data", 4);
	run_for(&g, 1);
	CHECK(r.calls == 1 && r.status == -EIO && at_end(fd));
	expect(&g, &p, VIRTIO_VSOCK_OP_RST);
	close(fd);

	/* More than there is room for. */
	for (unsigned i = 0; i < VSOCK_STREAMS_MAX; i++)
		fds[i] = ask(&g, &many[i], 60000);
	fd = ask(&g, &r, 60000);
	CHECK(r.calls == 1 && r.status == -EMFILE && at_end(fd));
	close(fd);
	for (unsigned i = 0; i < VSOCK_STREAMS_MAX; i++) {
		expect(&g, &h, VIRTIO_VSOCK_OP_REQUEST);
		say(&g, &h, i % 2 ? VIRTIO_VSOCK_OP_RST : VIRTIO_VSOCK_OP_RESPONSE, 0);
	}
	run_for(&g, 1);
	for (unsigned i = 0; i < VSOCK_STREAMS_MAX; i++) {
		CHECK(many[i].calls == 1 && many[i].status == (i % 2 ? -ECONNREFUSED : 0));
		close(fds[i]);
	}
	for (unsigned i = 0; i < VSOCK_STREAMS_MAX / 2; i++) {
		expect(&g, &h, VIRTIO_VSOCK_OP_SHUTDOWN);
		CHECK(h.flags == 3);
		say(&g, &h, VIRTIO_VSOCK_OP_RST, 0);
	}
	fd = open_stream(&g, &h); /* there is room again */
	close(fd);
	guest_free(&g);
}

static void fill(uint8_t *b, size_t n, uint32_t seed)
{
	for (size_t i = 0; i < n; i++) {
		seed = seed * 1664525u + 1013904223u;
		b[i] = (uint8_t)(seed >> 24);
	}
}

static void test_credit(void)
{
	static uint8_t bytes[1u << 20], got[1u << 20];
	struct virtio_vsock_hdr h, p;
	struct guest g;
	size_t total = 0, sent = 0, taken = 0;
	uint32_t told = 0;
	int fd;

	fill(bytes, sizeof(bytes), 7);
	guest_new(&g);
	guest_up(&g);

	/* To the guest: not a byte more than its credit, then a request for more; nothing lost when it comes bit by bit. */
	g.alloc = 10000;
	fd = open_stream(&g, &h);
	sent = 100000;
	CHECK(write(fd, bytes, sent) == (ssize_t)sent);
	while (next_packet(&g, &p, got + total) && p.op == VIRTIO_VSOCK_OP_RW)
		total += p.len;
	CHECK(total == 10000 && p.op == VIRTIO_VSOCK_OP_CREDIT_REQUEST);
	expect_nothing(&g, 120); /* asked once */
	for (uint32_t step = 1; total < sent; step = step * 3 % 9973) {
		size_t before = total;

		g.fwd += step;
		say(&g, &h, VIRTIO_VSOCK_OP_CREDIT_UPDATE, 0);
		while (total < MIN(sent, (size_t)g.fwd + 10000)) {
			CHECK(next_packet(&g, &p, got + total));
			if (p.op == VIRTIO_VSOCK_OP_RW)
				total += p.len;
		}
		CHECK(total == MIN(sent, before + step));
	}
	CHECK(memcmp(bytes, got, sent) == 0);
	/* Credit that makes no sense is no credit. */
	g.fwd += 1u << 31;
	say(&g, &h, VIRTIO_VSOCK_OP_CREDIT_UPDATE, 0);
	CHECK(write(fd, bytes, 1) == 1);
	while (next_packet(&g, &p, NULL))
		CHECK(p.op == VIRTIO_VSOCK_OP_CREDIT_REQUEST);
	say(&g, &h, VIRTIO_VSOCK_OP_RST, 0);
	close(fd);

	/* To a host that does not read: the credit is what fits, and comes back as the host reads. */
	g.alloc = WINDOW;
	g.fwd = 0;
	fd = open_stream(&g, &h);
	sent = taken = 0;
	while (taken < sizeof(bytes)) {
		ssize_t n;

		while (sent < sizeof(bytes) && sent - told < WINDOW) {
			uint32_t part = (uint32_t)MIN(MIN(WINDOW - (sent - told), (size_t)60001), sizeof(bytes) - sent);

			send_bytes(&g, &h, bytes + sent, part);
			sent += part;
			run_for(&g, 0);
			while (g.d.q[RX].used->idx != g.d.q[RX].seen) {
				CHECK(next_packet(&g, &p, NULL) && p.op == VIRTIO_VSOCK_OP_CREDIT_UPDATE && p.fwd_cnt <= sent);
				told = p.fwd_cnt;
			}
		}
		n = recv(fd, got + taken, 30000, MSG_DONTWAIT);
		CHECK(n > 0 || sent < sizeof(bytes) || errno == EAGAIN);
		if (n > 0)
			taken += (size_t)n;
		run_for(&g, 0);
		while (g.d.q[RX].used->idx != g.d.q[RX].seen) {
			CHECK(next_packet(&g, &p, NULL) && p.op == VIRTIO_VSOCK_OP_CREDIT_UPDATE);
			told = p.fwd_cnt;
		}
	}
	CHECK(memcmp(bytes, got, sizeof(bytes)) == 0);
	say(&g, &h, VIRTIO_VSOCK_OP_CREDIT_REQUEST, 0);
	expect(&g, &p, VIRTIO_VSOCK_OP_CREDIT_UPDATE);
	CHECK(p.fwd_cnt == sizeof(bytes) && p.buf_alloc == WINDOW);

	/* And one that does not keep to it loses its stream, and only that. */
	for (sent = 0; !(next_packet(&g, &p, NULL) && p.op == VIRTIO_VSOCK_OP_RST); sent += 100000) {
		CHECK(sent < 4 * WINDOW);
		send_bytes(&g, &h, bytes, 100000);
	}
	CHECK(!driver_broken(&g.d));
	for (taken = 0; (total = (size_t)recv(fd, got, sizeof(got), MSG_DONTWAIT)) <= sizeof(got) && total;) {
		taken += total;
		run_for(&g, 0);
	}
	CHECK(total == 0 && taken % 100000 == 0 && taken >= WINDOW); /* what was taken arrives, whole packets */
	close(fd);
	fd = open_stream(&g, &h);
	close(fd);
	guest_free(&g);
}

static void test_strange_packets(void)
{
	struct virtio_vsock_hdr h, p, x;
	uint8_t data[64] = { 0 };
	struct guest g;
	int fd;

	guest_new(&g);
	guest_up(&g);
	fd = open_stream(&g, &h);

	/* Another's CID cannot be answered; a packet for another CID, or of another type, is refused there. */
	x = reply(&g, &h, VIRTIO_VSOCK_OP_RW, 0);
	x.src_cid = 99;
	send_raw(&g, &x, NULL, 0);
	expect_nothing(&g, 2);
	x = reply(&g, &h, VIRTIO_VSOCK_OP_REQUEST, 0);
	x.dst_cid = 77;
	send_raw(&g, &x, NULL, 0);
	expect(&g, &p, VIRTIO_VSOCK_OP_RST);
	CHECK(p.src_cid == 77 && p.dst_port == h.dst_port && p.src_port == h.src_port);
	x = reply(&g, &h, VIRTIO_VSOCK_OP_REQUEST, 0);
	x.type = 9;
	send_raw(&g, &x, NULL, 0);
	CHECK(next_packet(&g, &p, NULL) && p.op == VIRTIO_VSOCK_OP_RST && p.type == 9);
	/* The guest connects to the host. */
	x = (struct virtio_vsock_hdr){ .src_cid = 3, .dst_cid = 2, .src_port = 5, .dst_port = 6, .type = 1, .op = 1 };
	send_raw(&g, &x, NULL, 0);
	expect(&g, &p, VIRTIO_VSOCK_OP_RST);
	CHECK(p.src_port == 6 && p.dst_port == 5);
	x.op = VIRTIO_VSOCK_OP_RST; /* no answer to a reset */
	send_raw(&g, &x, NULL, 0);
	expect_nothing(&g, 2);
	/* The right host port from another guest port. */
	x = reply(&g, &h, VIRTIO_VSOCK_OP_RW, 0);
	x.src_port++;
	send_raw(&g, &x, NULL, 0);
	expect(&g, &p, VIRTIO_VSOCK_OP_RST);
	/* The stream lives through all that. */
	send_bytes(&g, &h, "ok", 2);
	CHECK(recv(fd, data, sizeof(data), MSG_DONTWAIT) == 2);
	/* An operation that is none ends it. */
	x = reply(&g, &h, 1234, 0);
	send_raw(&g, &x, NULL, 0);
	expect(&g, &p, VIRTIO_VSOCK_OP_RST);
	CHECK(at_end(fd));
	close(fd);
	/* So many that they cannot all be answered: some are, and the device goes on. */
	x = (struct virtio_vsock_hdr){ .src_cid = 3, .dst_cid = 2, .src_port = 5, .dst_port = 6, .type = 1, .op = 1 };
	for (unsigned i = 0; i < 3000; i++)
		send_raw(&g, &x, NULL, 0);
	while (next_packet(&g, &p, NULL))
		CHECK(p.op == VIRTIO_VSOCK_OP_RST);
	/* Bytes after shutting down. */
	fd = open_stream(&g, &h);
	say(&g, &h, VIRTIO_VSOCK_OP_SHUTDOWN, VIRTIO_VSOCK_SHUTDOWN_SEND);
	send_bytes(&g, &h, "x", 1);
	expect(&g, &p, VIRTIO_VSOCK_OP_RST);
	close(fd);
	/* A length longer than the buffers, and a chain shorter than a header, break the device; its streams end. */
	fd = open_stream(&g, &h);
	x = reply(&g, &h, VIRTIO_VSOCK_OP_RW, 65);
	send_raw(&g, &x, data, 64);
	run_for(&g, 1);
	CHECK(driver_broken(&g.d) && reset_or_end(fd));
	close(fd);
	guest_up(&g);
	CHECK(!driver_broken(&g.d));
	fd = open_stream(&g, &h);
	driver_desc(&g.d, TX, 0, TX_AT, HDR - 1, 0, 0);
	driver_post(&g.d, TX, 0);
	virtio_kick(g.d.v, TX);
	run_for(&g, 1);
	CHECK(driver_broken(&g.d) && reset_or_end(fd));
	close(fd);
	/* A receive buffer that can hold no packet. */
	g.rx_closed = true;
	guest_up(&g);
	driver_desc(&g.d, RX, 0, RX_AT, HDR, VRING_DESC_F_WRITE, 0);
	driver_post(&g.d, RX, 0);
	virtio_kick(g.d.v, RX);
	x = (struct virtio_vsock_hdr){ .src_cid = 3, .dst_cid = 2, .src_port = 5, .dst_port = 6, .type = 1, .op = 1 };
	send_raw(&g, &x, NULL, 0);
	run_for(&g, 1);
	CHECK(driver_broken(&g.d));
	guest_free(&g);
}

static void test_reset_in_flight(void)
{
	struct virtio_vsock_hdr h, old;
	struct result r;
	struct guest g;
	char text[8];
	int fd, waiting;

	guest_new(&g);
	guest_up(&g);
	fd = open_stream(&g, &old);
	g.rx_closed = true;
	CHECK(write(fd, "unread", 6) == 6);
	waiting = ask(&g, &r, 1000);
	driver_write(&g.d, VIRTIO_MMIO_STATUS, 0); /* data and a REQUEST had no chance to go out */
	run_for(&g, 1);
	CHECK(reset_or_end(fd));
	CHECK(r.calls == 0); /* the guest has not heard of this one: it waits for the next driver */
	close(fd);
	g.rx_closed = false;
	guest_up(&g);
	expect(&g, &h, VIRTIO_VSOCK_OP_REQUEST);
	say(&g, &h, VIRTIO_VSOCK_OP_RESPONSE, 0);
	send_bytes(&g, &h, "ok", 2);
	run_for(&g, 1);
	CHECK(r.calls == 1 && r.status == 0 && recv(waiting, text, sizeof(text), MSG_DONTWAIT) == 2);
	send_bytes(&g, &old, "old", 3);
	expect(&g, &h, VIRTIO_VSOCK_OP_RST);
	close(waiting);
	guest_free(&g);
}

static void test_starved(void)
{
	static uint8_t bytes[200000], got[200000];
	struct virtio_vsock_hdr h[2], p;
	uint8_t data[4096];
	struct guest g;
	size_t total[2] = { 0 };
	unsigned seen = 0, most[2] = { 0 };
	int fd[2];

	fill(bytes, sizeof(bytes), 3);
	guest_new(&g);
	guest_up(&g);
	fd[0] = open_stream(&g, &h[0]);
	fd[1] = open_stream(&g, &h[1]);
	for (unsigned i = 0; i < 2; i++)
		CHECK(send(fd[i], bytes, sizeof(bytes), MSG_DONTWAIT) == sizeof(bytes));
	/* Two streams share the queue, and a queue that runs empty loses nothing. */
	run_for(&g, 1);
	CHECK(g.d.q[RX].used->idx - g.d.q[RX].seen == RX_CHAINS && g.d.q[RX].used->flags == 0);
	while (total[0] + total[1] < 2 * sizeof(bytes)) {
		unsigned i;

		CHECK(next_packet(&g, &p, data) && p.op == VIRTIO_VSOCK_OP_RW);
		i = p.src_port == h[1].src_port;
		if (i == 0)
			memcpy(got + total[0], data, p.len);
		CHECK(memcmp(bytes + total[i], data, p.len) == 0);
		total[i] += p.len;
		if (++seen == 60)
			most[0] = (unsigned)total[0], most[1] = (unsigned)total[1];
	}
	CHECK(most[0] > 60000 && most[1] > 60000);
	CHECK(memcmp(got, bytes, sizeof(bytes)) == 0);
	close(fd[0]);
	close(fd[1]);
	guest_free(&g);
}

static void test_hold(void)
{
	struct virtio_vsock_hdr h, p;
	struct guest g;
	uint8_t *copy = malloc(GUEST_BYTES), data[4096];
	char text[8];
	int fd;

	guest_new(&g);
	guest_up(&g);
	fd = open_stream(&g, &h);
	/* Sent, not yet kicked: a drain takes it. */
	p = reply(&g, &h, VIRTIO_VSOCK_OP_RW, 4);
	memcpy(g.d.memory.ram + TX_AT, &p, HDR);
	memcpy(g.d.memory.ram + TX_AT + 0x1000, "last", 4);
	driver_desc(&g.d, TX, 0, TX_AT, HDR, VRING_DESC_F_NEXT, 1);
	driver_desc(&g.d, TX, 1, TX_AT + 0x1000, 4, 0, 0);
	driver_post(&g.d, TX, 0);
	vsock_drain(g.s);
	CHECK(recv(fd, text, sizeof(text), MSG_DONTWAIT) == 4);
	memcpy(copy, g.d.memory.ram, GUEST_BYTES);
	CHECK(write(fd, "held", 4) == 4);
	virtio_kick(g.d.v, TX); /* late kicks change nothing */
	virtio_kick(g.d.v, RX);
	run_for(&g, 20);
	vsock_drain(g.s);
	run_for(&g, 2);
	CHECK(memcmp(copy, g.d.memory.ram, GUEST_BYTES) == 0);
	vsock_go(g.s);
	CHECK(next_packet(&g, &p, data) && p.len == 4 && memcmp(data, "held", 4) == 0);
	close(fd);
	free(copy);
	guest_free(&g);
}

static void test_transport_reset(void)
{
	struct virtio_vsock_hdr old, h, p;
	struct vring_used_elem u;
	struct virtio_vsock_event event;
	struct result r;
	struct guest g;
	int fd, fresh;

	guest_new(&g);
	guest_up(&g);
	fd = open_stream(&g, &old);
	vsock_drain(g.s);
	/* As in a forked child. */
	vsock_forget(g.s);
	loop_forked(g.loop);
	CHECK(at_end(fd));
	close(fd);
	g.d.v->ops->restored(g.d.v);
	fresh = ask(&g, &r, 1000);
	run_for(&g, 1);
	CHECK(!driver_used(&g.d, EVENT, &u));
	driver_interrupted(&g.d);
	vsock_go(g.s);
	CHECK(driver_used(&g.d, EVENT, &u) && u.len == sizeof(event) && driver_interrupted(&g.d));
	memcpy(&event, g.d.memory.ram + EVENT_AT + u.id * 8, sizeof(event));
	CHECK(event.id == VIRTIO_VSOCK_EVENT_TRANSPORT_RESET);
	send_bytes(&g, &old, "from before", 11);
	expect_nothing(&g, 5); /* neither the RST nor the REQUEST, until the event's buffer is back */
	post_event(&g, u.id);
	virtio_kick(g.d.v, EVENT);
	expect(&g, &p, VIRTIO_VSOCK_OP_RST);
	CHECK(p.src_port == old.src_port);
	expect(&g, &h, VIRTIO_VSOCK_OP_REQUEST);
	CHECK(h.src_port > old.src_port); /* ports are not used again */
	say(&g, &h, VIRTIO_VSOCK_OP_RESPONSE, 0);
	run_for(&g, 1);
	CHECK(r.calls == 1 && r.status == 0);
	close(fresh);
	expect(&g, &p, VIRTIO_VSOCK_OP_SHUTDOWN);

	/* Restored again before the guest has run: two events, both to be handled. And again, until no buffer is left. */
	for (unsigned i = 0; i < 10; i++) {
		vsock_drain(g.s);
		vsock_forget(g.s);
		loop_forked(g.loop);
		g.d.v->ops->restored(g.d.v);
		vsock_go(g.s);
		run_for(&g, 0);
	}
	fresh = ask(&g, &r, 1000);
	expect_nothing(&g, 3);
	for (unsigned i = 0; i < 8; i++) {
		CHECK(driver_used(&g.d, EVENT, &u));
		post_event(&g, u.id);
		virtio_kick(g.d.v, EVENT);
		run_for(&g, 0);
		CHECK(g.d.q[RX].used->idx == g.d.q[RX].seen);
	}
	CHECK(driver_used(&g.d, EVENT, &u)); /* the last one had to wait for a buffer */
	post_event(&g, u.id);
	virtio_kick(g.d.v, EVENT);
	expect(&g, &h, VIRTIO_VSOCK_OP_REQUEST);
	close(fresh);
	guest_free(&g);

	/* Saved before a driver was up: nobody to tell. */
	guest_new(&g);
	vsock_forget(g.s);
	loop_forked(g.loop);
	vsock_virtio(g.s)->ops->restored(vsock_virtio(g.s));
	vsock_go(g.s);
	guest_up(&g);
	CHECK(!driver_used(&g.d, EVENT, &u));
	fd = open_stream(&g, &h);
	close(fd);
	guest_free(&g);
}

/* A guest that writes whatever it likes into rings and packets; the device neither crashes, nor hangs, nor leaks. */
static void test_noise(unsigned seed, unsigned rounds)
{
	struct virtio_vsock_hdr h;
	struct result r[16];
	struct guest g;
	uint8_t *ram;
	int fd[16];

	guest_new(&g);
	guest_up(&g);
	ram = g.d.memory.ram;
	for (unsigned i = 0; i < 16; i++)
		fd[i] = ask(&g, &r[i], 20);
	srandom(seed);
	for (unsigned n = 0; n < rounds; n++) {
		unsigned k = (unsigned)random() % 16, q = (unsigned)random() % 3;
		struct vring_used_elem u;
		char text[5000];

		if (driver_broken(&g.d)) {
			run_for(&g, 0);
			guest_up(&g);
		}
		switch (random() % 12) {
		case 0:
			close(fd[k]);
			fd[k] = ask(&g, &r[k], 20);
			break;
		case 1:
			CHECK(send(fd[k], text, (size_t)random() % sizeof(text), MSG_DONTWAIT | MSG_NOSIGNAL) >= -1);
			break;
		case 2:
			CHECK(recv(fd[k], text, sizeof(text), MSG_DONTWAIT) >= -1);
			break;
		case 3:
			ram[queue_at(q) + (unsigned)random() % 0x500] = (uint8_t)random();
			break;
		case 4:
			ram[queue_at(q) + 0x2000 + (unsigned)random() % 0x90] = (uint8_t)random();
			break;
		case 5:
			driver_post(&g.d, q, (unsigned)random() % DRIVER_SIZE);
			virtio_kick(g.d.v, q);
			break;
		default:
			memset(&h, 0, sizeof(h));
			h = (struct virtio_vsock_hdr){ .src_cid = 3, .dst_cid = 2, .src_port = PORT,
						       .dst_port = (1u << 30) + n / 40 + (unsigned)random() % 40, .type = 1,
						       .op = (uint16_t)(random() % 9), .len = (uint32_t)random() % 300,
						       .flags = (uint32_t)random() % 4, .buf_alloc = (uint32_t)random() % 100000,
						       .fwd_cnt = (uint32_t)random() % 1000 };
			memcpy(ram + TX_AT, &h, HDR);
			driver_desc(&g.d, TX, 0, TX_AT, HDR, VRING_DESC_F_NEXT, 1);
			driver_desc(&g.d, TX, 1, TX_AT + 0x1000, 280, 0, 0);
			driver_post(&g.d, TX, 0);
			virtio_kick(g.d.v, TX);
			while (driver_used(&g.d, RX, &u))
				post_rx(&g, u.id / 2 % RX_CHAINS);
			virtio_kick(g.d.v, RX);
		}
		if (n % 8 == 0)
			run_for(&g, 0);
		if (n % 1000 == 999) {
			vsock_drain(g.s);
			vsock_go(g.s);
		}
	}
	for (unsigned i = 0; i < 16; i++)
		close(fd[i]);
	guest_free(&g);
}

int main(int argc, char **argv)
{
	test_echo();
	test_connect_fails();
	test_credit();
	test_strange_packets();
	test_reset_in_flight();
	test_starved();
	test_hold();
	test_transport_reset();
	test_noise(argc > 1 ? (unsigned)atoi(argv[1]) : 1, 20000);
	return 0;
}
