/* SPDX-License-Identifier: Apache-2.0 */
/*
 * virtio-vsock in user space. Theory of operation:
 *
 * A stream is a host socket and a host port. Host sockets are watched edge triggered, so that a stream for which there is no
 * credit or no room costs nothing: an edge sets `readable`, and the stream queues in `ready` until it has been read dry.
 * Bytes go straight between the socket and the guest's buffers, several packets to a system call. The one buffer is for
 * what the guest sent and the host socket did not take: at most VSOCK_BUFFER a stream, which is the credit that the guest
 * is given, so that a guest that keeps to its credit never overruns it and one that does not loses its stream.
 *
 * Work on the receive queue (guest-bound) is gathered and done once per turn of the event loop, by a timer that is due
 * at once; so a turn costs the guest at most one interrupt. Used transmit buffers alone do not interrupt at once: they
 * wait for the next packet to the guest, for TX_GIVEN_MAX of them, or TX_DELAY_NS.
 *
 * After a restore the guest is told by a transport reset event that its connections are gone, and gets nothing else until
 * it has handled the event. Linux posts the event's buffer again after it has reset its sockets, so that is the sign: as many
 * buffers posted on the event queue as events given.
 *
 * Trusted: nothing. The guest's packets are copied out before they are looked at; ports select among at most
 * VSOCK_STREAMS_MAX streams; what fits no stream is answered with RST, RST_MAX of them waiting at most (then none). A packet
 * longer than its chain, or a chain that can hold no packet, breaks the device.
 *
 * Threads: all on the event loop, with virtio's lock held, but the reset op: that only sets `was_reset` and wakes the loop.
 */
#include <sys/eventfd.h>

#include "vsock_private.h"

void vsock_turn_soon(struct vsock *s)
{
	if (s->turn_set || s->held)
		return;
	s->turn_set = true;
	loop_timer(s->loop, &s->turn, 0);
}

void vsock_wake(struct vsock *s)
{
	uint64_t one = 1;

	if (s->wake.fd >= 0 && write(s->wake.fd, &one, sizeof(one)) != sizeof(one))
		return; /* the counter is full: it will wake */
}

static bool up(const struct vsock *s)
{
	return (s->v.s.status & (VIRTIO_CONFIG_S_DRIVER_OK | VIRTIO_CONFIG_S_NEEDS_RESET)) == VIRTIO_CONFIG_S_DRIVER_OK &&
	       !s->was_reset;
}

/* ---- turns ---- */

/* Counts event buffers posted again; true when the guest has handled every event given. */
static bool events_handled(struct vsock *s)
{
	uint16_t posted = virtqueue_posted(&s->v, EVENT);
	uint16_t fresh = (uint16_t)(posted - (uint16_t)s->saved.event_posted);

	s->saved.event_posted = posted;
	s->saved.events_owed -= MIN(s->saved.events_owed, fresh);
	return s->saved.events_owed == 0;
}

/* True when the guest may get packets. */
static bool reset_taken(struct vsock *s)
{
	struct virtio_vsock_event event = { .id = VIRTIO_VSOCK_EVENT_TRANSPORT_RESET };
	struct chain *c = &s->chain;
	bool handled = events_handled(s);

	if (!s->saved.reset_due)
		return handled;
	if (virtqueue_take(&s->v, EVENT, c) != 1)
		return false; /* the guest will kick when it posts one */
	if (c->readable || chain_write(c, 0, &event, sizeof(event)) != sizeof(event)) {
		virtio_break(&s->v, "an event buffer cannot hold an event");
		return false;
	}
	virtqueue_give(&s->v, EVENT, c, sizeof(event));
	s->saved.reset_due = 0;
	s->saved.events_owed++;
	virtqueue_interrupt(&s->v, EVENT);
	return false;
}

static void interrupt(struct vsock *s)
{
	bool raised = s->rx_given && virtqueue_interrupt(&s->v, RX);

	s->rx_given = false;
	if (!raised && s->tx_given >= TX_GIVEN_MAX)
		raised = virtqueue_interrupt(&s->v, TX) || true;
	if (raised)
		s->tx_given = 0; /* one interrupt line: the driver looks at all its queues */
	if (s->tx_given && !s->tx_timer_set) {
		s->tx_timer_set = true;
		loop_timer(s->loop, &s->tx_timer, now_ns(CLOCK_MONOTONIC) + TX_DELAY_NS);
	} else if (!s->tx_given && s->tx_timer_set) {
		s->tx_timer_set = false;
		loop_timer_cancel(s->loop, &s->tx_timer);
	}
}

static void forget_device(struct vsock *s)
{
	s->was_reset = false;
	vsock_drop_all(s, true);
	s->rst_count = 0;
	s->starved = s->rx_given = false;
	s->tx_left = true; /* a new driver may have kicked already */
	s->tx_given = 0;
	/* A driver that starts afresh has no connection to lose. */
	s->saved.reset_due = s->saved.events_owed = s->saved.event_posted = 0;
}

static void work(struct vsock *s)
{
	if (s->was_reset)
		forget_device(s);
	if (s->v.s.status & VIRTIO_CONFIG_S_NEEDS_RESET) {
		vsock_drop_all(s, false);
		return;
	}
	if (s->held || !up(s))
		return;
	if (s->tx_left)
		vsock_take_tx(s);
	if (!reset_taken(s))
		return;
	if (!s->starved) {
		vsock_talk(s);
		vsock_pump(s);
		vsock_talk(s);
	}
	interrupt(s);
	if (s->v.s.status & VIRTIO_CONFIG_S_NEEDS_RESET)
		vsock_drop_all(s, false);
}

static void deliver(struct vsock *s)
{
	for (;;) {
		struct stream *st;
		void (*done)(void *arg, int status);
		void *arg;
		int status;

		pthread_mutex_lock(&s->v.lock);
		st = TAILQ_FIRST(&s->finished);
		if (!st) {
			pthread_mutex_unlock(&s->v.lock);
			return;
		}
		TAILQ_REMOVE(&s->finished, st, finished);
		st->in_finished = false;
		done = st->done;
		arg = st->arg;
		status = st->status;
		st->done = NULL;
		if (st->gone)
			stream_free(st);
		pthread_mutex_unlock(&s->v.lock);
		done(arg, status);
	}
}

static void turn(struct vsock *s)
{
	pthread_mutex_lock(&s->v.lock);
	work(s);
	pthread_mutex_unlock(&s->v.lock);
	deliver(s);
}

static void on_turn(struct timer *t)
{
	struct vsock *s = t->arg;

	s->turn_set = false;
	turn(s);
}

static void on_wake(struct watch *w, uint32_t events)
{
	struct vsock *s = w->arg;
	uint64_t n;

	(void)events;
	if (read(w->fd, &n, sizeof(n)) < 0)
		return;
	turn(s);
}

static void on_tx_timer(struct timer *t)
{
	struct vsock *s = t->arg;

	pthread_mutex_lock(&s->v.lock);
	s->tx_timer_set = false;
	if (s->tx_given && !s->held && up(s)) {
		virtqueue_interrupt(&s->v, TX);
		s->tx_given = 0;
	}
	pthread_mutex_unlock(&s->v.lock);
}

static void on_ask_timer(struct timer *t)
{
	struct vsock *s = t->arg;

	pthread_mutex_lock(&s->v.lock);
	s->ask_timer_set = false;
	for (unsigned i = 0; i < VSOCK_STREAMS_MAX; i++) {
		struct stream *st = s->slot[i];

		if (!st || st->state != OPEN || st->gone || !st->readable || st->eof || st->asked || stream_credit(st))
			continue;
		st->asked = true;
		stream_say(st, SAY_ASK);
	}
	pthread_mutex_unlock(&s->v.lock);
}

static void on_stream_timer(struct timer *t)
{
	struct stream *st = t->arg;
	struct vsock *s = st->s;

	pthread_mutex_lock(&s->v.lock);
	stream_rst(st);
	stream_drop(st, -ETIMEDOUT);
	pthread_mutex_unlock(&s->v.lock);
}

static void on_socket(struct watch *w, uint32_t events)
{
	struct stream *st = w->arg;
	struct vsock *s = st->s; /* the stream may be gone before the lock is given back */

	pthread_mutex_lock(&s->v.lock);
	stream_socket(st, events);
	pthread_mutex_unlock(&s->v.lock);
}

/* ---- virtio ---- */

static void vsock_kick(struct virtio *v, unsigned q)
{
	struct vsock *s = (struct vsock *)v;

	if (s->held || s->was_reset) {
		/* Looked at when it goes on. */
		s->tx_left |= q == TX;
		s->starved &= q != RX;
		vsock_wake(s);
		return;
	}
	if (q == RX) {
		/* From here on kicks only cost; rx_take asks for one when it finds the queue empty. */
		s->starved = false;
		virtqueue_kicks(v, RX, false);
		vsock_turn_soon(s);
	} else if (q == TX) {
		vsock_take_tx(s);
	} else {
		vsock_turn_soon(s);
	}
}

static void vsock_reset(struct virtio *v)
{
	struct vsock *s = (struct vsock *)v;

	/* On a vCPU thread: streams and watches are the loop's. */
	s->was_reset = true;
	vsock_wake(s);
}

static void vsock_broke(struct virtio *v)
{
	vsock_wake((struct vsock *)v); /* its streams end */
}

static const void *vsock_config(struct virtio *v, size_t *bytes)
{
	struct vsock *s = (struct vsock *)v;

	*bytes = sizeof(s->config);
	return &s->config;
}

static void *vsock_saved(struct virtio *v, size_t *bytes)
{
	struct vsock *s = (struct vsock *)v;

	*bytes = sizeof(s->saved);
	return &s->saved;
}

static int make_wake(struct vsock *s)
{
	s->wake.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (s->wake.fd < 0)
		return -errno;
	return loop_add(s->loop, &s->wake, EPOLLIN);
}

static void vsock_restored(struct virtio *v)
{
	struct vsock *s = (struct vsock *)v;

	if (s->wake.fd < 0)
		make_wake(s);
	s->held = true;
	s->was_reset = false;
	s->starved = false;
	s->tx_left = true; /* what the guest had sent when it was saved */
	if (v->s.status & VIRTIO_CONFIG_S_DRIVER_OK)
		s->saved.reset_due = 1;
	if (s->saved.next_port < FIRST_PORT)
		s->saved.next_port = FIRST_PORT;
}

static const struct virtio_ops vsock_ops = {
	.name = "vsock",
	.id = VIRTIO_ID_VSOCK,
	.queues = 3,
	.config = vsock_config,
	.kick = vsock_kick,
	.reset = vsock_reset,
	.broke = vsock_broke,
	.saved = vsock_saved,
	.restored = vsock_restored,
};

struct vsock *vsock_new(struct loop *l, const struct memory *m)
{
	struct vsock *s = calloc(1, sizeof(*s));

	if (!s)
		return NULL;
	virtio_init(&s->v, &vsock_ops, m);
	s->loop = l;
	s->config.guest_cid = VSOCK_GUEST_CID;
	s->saved.next_port = FIRST_PORT;
	s->held = true; /* until the machine first runs */
	TAILQ_INIT(&s->ready);
	TAILQ_INIT(&s->talk);
	TAILQ_INIT(&s->finished);
	s->turn = (struct timer){ .fire = on_turn, .arg = s };
	s->tx_timer = (struct timer){ .fire = on_tx_timer, .arg = s };
	s->ask_timer = (struct timer){ .fire = on_ask_timer, .arg = s };
	s->wake = (struct watch){ .ready = on_wake, .arg = s };
	if (make_wake(s) < 0) {
		if (s->wake.fd >= 0)
			close(s->wake.fd);
		pthread_mutex_destroy(&s->v.lock);
		free(s);
		return NULL;
	}
	return s;
}

void vsock_free(struct vsock *s)
{
	if (!s)
		return;
	pthread_mutex_lock(&s->v.lock);
	vsock_drop_all(s, false);
	pthread_mutex_unlock(&s->v.lock);
	deliver(s);
	loop_timer_cancel(s->loop, &s->turn);
	loop_timer_cancel(s->loop, &s->tx_timer);
	loop_timer_cancel(s->loop, &s->ask_timer);
	if (s->wake.fd >= 0) {
		loop_remove(s->loop, &s->wake);
		close(s->wake.fd);
	}
	pthread_mutex_destroy(&s->v.lock);
	free(s);
}

struct virtio *vsock_virtio(struct vsock *s)
{
	return &s->v;
}

void vsock_connect(struct vsock *s, uint32_t port, int fd, unsigned timeout_ms,
		   void (*done)(void *arg, int status), void *arg)
{
	struct stream *st;

	pthread_mutex_lock(&s->v.lock);
	if (s->streams == VSOCK_STREAMS_MAX || !(st = calloc(1, sizeof(*st)))) {
		int status = s->streams == VSOCK_STREAMS_MAX ? -EMFILE : -ENOMEM;

		pthread_mutex_unlock(&s->v.lock);
		close(fd);
		done(arg, status);
		return;
	}
	while (s->slot[s->saved.next_port % VSOCK_STREAMS_MAX])
		s->saved.next_port++;
	st->s = s;
	st->port = s->saved.next_port++;
	if (s->saved.next_port < FIRST_PORT)
		s->saved.next_port = FIRST_PORT;
	st->guest_port = port;
	st->done = done;
	st->arg = arg;
	st->watch = (struct watch){ .fd = fd, .ready = on_socket, .arg = st };
	st->timer = (struct timer){ .fire = on_stream_timer, .arg = st };
	s->slot[st->port % VSOCK_STREAMS_MAX] = st;
	s->streams++;
	loop_timer(s->loop, &st->timer, now_ns(CLOCK_MONOTONIC) + timeout_ms * 1000000ull);
	if (loop_add(s->loop, &st->watch, EPOLLIN | EPOLLRDHUP | EPOLLET) < 0)
		stream_drop(st, -EIO);
	else {
		st->watched = true;
		stream_say(st, SAY_REQUEST);
	}
	pthread_mutex_unlock(&s->v.lock);
}

void vsock_drain(struct vsock *s)
{
	pthread_mutex_lock(&s->v.lock);
	if (!s->held && !s->was_reset && up(s)) {
		vsock_take_tx(s);
		if (s->tx_given)
			virtqueue_interrupt(&s->v, TX);
		s->tx_given = 0;
	}
	s->held = true;
	pthread_mutex_unlock(&s->v.lock);
}

void vsock_go(struct vsock *s)
{
	pthread_mutex_lock(&s->v.lock);
	s->held = false;
	work(s);
	pthread_mutex_unlock(&s->v.lock);
	vsock_wake(s); /* the rest on the loop: results to deliver, work past a turn's bounds */
}

void vsock_forget(struct vsock *s)
{
	for (unsigned i = 0; i < VSOCK_STREAMS_MAX; i++) {
		struct stream *st = s->slot[i];

		if (!st)
			continue;
		if (st->watch.fd >= 0)
			close(st->watch.fd);
		stream_free(st);
	}
	TAILQ_INIT(&s->ready);
	TAILQ_INIT(&s->talk);
	TAILQ_INIT(&s->finished);
	/* The eventfd is the parent's too. Without the loop: its epoll may still be the parent's as well. */
	close(s->wake.fd);
	s->wake.fd = -1;
	s->turn_set = s->tx_timer_set = s->ask_timer_set = false;
	s->held = true;
	s->was_reset = s->starved = s->tx_left = s->rx_given = false;
	s->tx_given = 0;
	s->rst_count = 0;
}
