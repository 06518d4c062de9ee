/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Serves vmenv/machine.h: one connection at a time on a listening SOCK_SEQPACKET socket.
 *
 * A message is exactly one struct machine_msg. One of another size, or with an op that is not a request, ends the
 * connection; descriptors that an op does not take are closed and the request is refused. Answers that the peer does not
 * read wait here while no more requests are taken, so no more than the connects in flight can pile up. A connection's
 * end cancels nothing: answers that come later are dropped.
 */
#include <inttypes.h>
#include <sys/queue.h>
#include <sys/socket.h>

#include "machine.h"

#define CONNECT_MS 30000u
#define CONNECT_MS_MAX 600000u
#define REQUESTS_PER_TURN 16

struct outgoing {
	STAILQ_ENTRY(outgoing) next;
	struct machine_msg msg;
};

struct control {
	struct machine *m;
	struct loop *loop;
	struct watch listen, peer; /* fds owned; peer.fd -1: no connection */
	uint64_t connection;       /* counts connections from 1, so that a late answer knows whose it is */
	STAILQ_HEAD(, outgoing) out;
	LIST_HEAD(, connecting) connecting;
	bool quit;
	bool exited;
	struct machine_msg exit_msg;
};

/* A connect in flight. */
struct connecting {
	LIST_ENTRY(connecting) next;
	struct control *c; /* NULL when there is nobody to tell any more */
	uint64_t connection;
	struct machine_msg answer;
};

/* Descriptors of one message. */
struct fds {
	int fd[MACHINE_FORK_MAX + 3];
	unsigned count;
};

static void close_fds(struct fds *f)
{
	for (unsigned i = 0; i < f->count; i++)
		if (f->fd[i] >= 0)
			close(f->fd[i]);
	f->count = 0;
}

/* ---- the connection ---- */

static void drop_out(struct control *c)
{
	while (!STAILQ_EMPTY(&c->out)) {
		struct outgoing *o = STAILQ_FIRST(&c->out);

		STAILQ_REMOVE_HEAD(&c->out, next);
		free(o);
	}
}

static void disconnect(struct control *c)
{
	if (c->peer.fd < 0)
		return;
	loop_remove(c->loop, &c->peer);
	close(c->peer.fd);
	c->peer.fd = -1;
	drop_out(c);
	/* The next one, which may have been waiting. */
	loop_add(c->loop, &c->listen, EPOLLIN);
}

/* 0, -EAGAIN, or another error. */
static int send_now(struct control *c, const struct machine_msg *msg)
{
	ssize_t n;

	do
		n = send(c->peer.fd, msg, sizeof(*msg), MSG_NOSIGNAL | MSG_DONTWAIT);
	while (n < 0 && errno == EINTR);
	return n < 0 ? -errno : 0;
}

static void post(struct control *c, const struct machine_msg *msg)
{
	struct outgoing *o;
	int r = -EAGAIN;

	if (c->peer.fd < 0)
		return;
	if (STAILQ_EMPTY(&c->out))
		r = send_now(c, msg);
	if (r == 0)
		return;
	o = r == -EAGAIN ? malloc(sizeof(*o)) : NULL;
	if (!o) { /* the peer would wait for ever for an answer that was lost */
		disconnect(c);
		return;
	}
	o->msg = *msg;
	if (STAILQ_EMPTY(&c->out))
		loop_change(c->loop, &c->peer, EPOLLOUT);
	STAILQ_INSERT_TAIL(&c->out, o, next);
}

static void send_waiting(struct control *c)
{
	while (!STAILQ_EMPTY(&c->out)) {
		struct outgoing *o = STAILQ_FIRST(&c->out);
		int r = send_now(c, &o->msg);

		if (r == -EAGAIN)
			return;
		if (r < 0) {
			disconnect(c);
			return;
		}
		STAILQ_REMOVE_HEAD(&c->out, next);
		free(o);
	}
	loop_change(c->loop, &c->peer, EPOLLIN);
}

static struct machine_msg answer_to(const struct machine_msg *q)
{
	return (struct machine_msg){ .op = q->op, .id = q->id };
}

/* status < 0: *e has the sentence. */
static void set_status(struct machine_msg *a, int status, const struct err *e)
{
	a->status = MIN(status, 0);
	if (status < 0)
		snprintf(a->text, sizeof(a->text), "%.*s", (int)sizeof(a->text) - 1, e->code ? e->text : strerror(-status));
}

/* ---- requests: each fills the answer, or returns false if it comes later or never ---- */

typedef bool handler(struct control *c, const struct machine_msg *q, struct fds *f, struct machine_msg *a);

static bool do_resume(struct control *c, const struct machine_msg *q, struct fds *f, struct machine_msg *a)
{
	struct err e = { 0 };
	int r = 0;

	if (f->count) {
		r = machine_console_output(c->m, f->fd[0]);
		if (r < 0)
			err_set(&e, -r, "cannot use the console's file: %s", strerror(-r));
	}
	if (r == 0)
		r = machine_resume(c->m, &e);
	set_status(a, r, &e);
	return true;
}

static bool do_pause(struct control *c, const struct machine_msg *q, struct fds *f, struct machine_msg *a)
{
	struct err e = { 0 };

	set_status(a, machine_pause(c->m, &e), &e);
	return true;
}

/* In the child: it serves its own socket, and has nothing of what its parent had open. */
static void become_child(struct control *c, int listening)
{
	close(c->listen.fd);
	close(c->peer.fd);
	c->peer.fd = -1;
	c->connection++;
	c->exited = false;
	drop_out(c);
	while (!LIST_EMPTY(&c->connecting)) { /* their streams were forgotten */
		struct connecting *w = LIST_FIRST(&c->connecting);

		LIST_REMOVE(w, next);
		free(w);
	}
	c->listen.fd = listening;
	machine_console_output(c->m, -1);
	if (loop_add(c->loop, &c->listen, EPOLLIN) < 0)
		loop_stop(c->loop); /* unreachable: better gone than unseen */
}

static bool do_fork(struct control *c, const struct machine_msg *q, struct fds *f, struct machine_msg *a)
{
	uint64_t start = now_ns(CLOCK_MONOTONIC), still = 0;
	struct err e = { 0 };
	unsigned child = 0;
	int r;

	if (q->count < 1 || q->count > MACHINE_FORK_MAX || f->count != q->count) {
		r = err_set(&e, EINVAL, "a fork of %u needs as many sockets, 1 to %u; %u came", q->count, MACHINE_FORK_MAX,
			    f->count);
		set_status(a, r, &e);
		return true;
	}
	r = machine_fork(c->m, q->count, &child, &still, &e);
	if (r == 1) {
		int listening = f->fd[child];

		f->fd[child] = -1;
		become_child(c, listening);
		return false;
	}
	a->value[0] = still;
	a->value[1] = now_ns(CLOCK_MONOTONIC) - start;
	set_status(a, r, &e);
	return true;
}

static void connected(void *arg, int status)
{
	struct connecting *w = arg;
	struct err e = { 0 };

	if (status < 0)
		err_set(&e, -status, status == -ECONNREFUSED ? "nothing in the guest listens on that port" :
				     status == -ETIMEDOUT    ? "the guest did not answer in time" :
				     status == -EMFILE	     ? "too many streams" :
							       "the guest's vsock device is not working");
	set_status(&w->answer, status, &e);
	if (w->c) {
		LIST_REMOVE(w, next);
		if (w->connection == w->c->connection)
			post(w->c, &w->answer);
	}
	free(w);
}

static bool do_connect(struct control *c, const struct machine_msg *q, struct fds *f, struct machine_msg *a)
{
	struct vsock *v = machine_vsock(c->m);
	struct connecting *w = NULL;
	struct err e = { 0 };
	uint64_t ms = q->value[0] ? MIN(q->value[0], CONNECT_MS_MAX) : CONNECT_MS;
	int type = 0, r = 0;
	socklen_t n = sizeof(type);

	if (!v)
		r = err_set(&e, EIO, "the machine has no vsock device");
	else if (getsockopt(f->fd[0], SOL_SOCKET, SO_TYPE, &type, &n) < 0 || type != SOCK_STREAM)
		r = err_set(&e, EINVAL, "not a stream socket");
	else if (!(w = malloc(sizeof(*w))))
		r = err_set(&e, ENOMEM, "out of memory");
	if (r < 0) {
		set_status(a, r, &e);
		return true;
	}
	*w = (struct connecting){ .c = c, .connection = c->connection, .answer = *a };
	LIST_INSERT_HEAD(&c->connecting, w, next);
	vsock_connect(v, q->count, f->fd[0], (unsigned)ms, connected, w);
	f->fd[0] = -1;
	return false;
}

static bool do_save(struct control *c, const struct machine_msg *q, struct fds *f, struct machine_msg *a)
{
	struct err e = { 0 };
	int r;

	if (machine_state(c->m) != MACHINE_PAUSED)
		r = err_set(&e, EBUSY, "only a paused machine can be saved");
	else
		r = machine_save(c->m, f->fd[0], f->count > 1 ? f->fd[1] : -1, f->count > 2 ? f->fd[2] : -1, &e);
	set_status(a, r, &e);
	return true;
}

static bool do_console(struct control *c, const struct machine_msg *q, struct fds *f, struct machine_msg *a)
{
	struct err e = { 0 };

	if (q->count < 1 || q->count > sizeof(q->text)) {
		set_status(a, err_set(&e, EINVAL, "console input is 1 to %zu bytes", sizeof(q->text)), &e);
		return true;
	}
	a->count = machine_console_input(c->m, q->text, q->count);
	if (a->count == 0)
		set_status(a, err_set(&e, EAGAIN, "the console's input is full"), &e);
	return true;
}

static bool do_info(struct control *c, const struct machine_msg *q, struct fds *f, struct machine_msg *a)
{
	struct machine_use u;

	machine_use(c->m, &u);
	a->value[0] = u.private_bytes;
	a->value[1] = u.resident_bytes;
	a->value[2] = u.private_memory_bytes;
	a->value[3] = u.private_disk_bytes;
	a->value[4] = machine_state(c->m);
	return true;
}

static bool do_digest(struct control *c, const struct machine_msg *q, struct fds *f, struct machine_msg *a)
{
	uint8_t d[3][32];
	struct err e = { 0 };
	unsigned at = 0;
	int r;

	if (machine_state(c->m) != MACHINE_PAUSED)
		r = err_set(&e, EBUSY, "only a paused machine has a digest");
	else
		r = machine_digest(c->m, d, &e);
	set_status(a, r, &e);
	for (unsigned i = 0; r == 0 && i < sizeof(d); i++) {
		if (i && i % sizeof(d[0]) == 0)
			a->text[at++] = ' ';
		at += (unsigned)snprintf(a->text + at, sizeof(a->text) - at, "%02x", d[i / sizeof(d[0])][i % sizeof(d[0])]);
	}
	return true;
}

static bool do_quit(struct control *c, const struct machine_msg *q, struct fds *f, struct machine_msg *a)
{
	c->quit = true;
	return true;
}

static const struct request {
	handler *handle;
	unsigned fds_min, fds_max;
	bool after_end; /* also when the guest has ended */
} requests[] = {
	[MACHINE_RESUME] = { do_resume, 0, 1, false },
	[MACHINE_PAUSE] = { do_pause, 0, 0, false },
	[MACHINE_FORK] = { do_fork, 0, MACHINE_FORK_MAX, false },
	[MACHINE_CONNECT] = { do_connect, 1, 1, false },
	[MACHINE_SAVE] = { do_save, 1, 3, false },
	[MACHINE_CONSOLE] = { do_console, 0, 0, false },
	[MACHINE_INFO] = { do_info, 0, 0, true },
	[MACHINE_DIGEST] = { do_digest, 0, 0, false },
	[MACHINE_QUIT] = { do_quit, 0, 0, true },
};

/* False if the connection is to end. */
static bool handle(struct control *c, const struct machine_msg *q, struct fds *f)
{
	struct machine_msg a = answer_to(q);
	const struct request *r;
	struct err e = { 0 };

	if (q->op >= ARRAY_SIZE(requests) || !requests[q->op].handle)
		return false;
	r = &requests[q->op];
	if (f->count < r->fds_min || f->count > r->fds_max) {
		err_set(&e, EINVAL, "%u descriptors came, %u to %u are wanted", f->count, r->fds_min, r->fds_max);
		set_status(&a, -EINVAL, &e);
	} else if (machine_state(c->m) == MACHINE_ENDED && !r->after_end) {
		err_set(&e, EIO, "the guest has ended");
		set_status(&a, -EIO, &e);
	} else if (!r->handle(c, q, f, &a)) {
		return true;
	}
	post(c, &a);
	return true;
}

/* Takes the descriptors out of a received message, all of them, whatever follows. */
static void collect_fds(struct msghdr *m, struct fds *f)
{
	for (struct cmsghdr *h = CMSG_FIRSTHDR(m); h; h = CMSG_NXTHDR(m, h)) {
		size_t bytes = h->cmsg_len - CMSG_LEN(0);

		if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t at = 0; at + sizeof(int) <= bytes; at += sizeof(int)) {
			int fd;

			memcpy(&fd, CMSG_DATA(h) + at, sizeof(fd));
			if (f->count < ARRAY_SIZE(f->fd))
				f->fd[f->count++] = fd;
			else
				close(fd);
		}
	}
}

/* 1: handled. 0: nothing there. -1: the connection is to end. */
static int receive(struct control *c)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int) * (MACHINE_FORK_MAX + 3))];
	} control;
	struct machine_msg q;
	struct iovec io = { &q, sizeof(q) };
	struct msghdr m = { .msg_iov = &io, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control) };
	struct fds f = { .count = 0 };
	ssize_t n;
	int r;

	do
		n = recvmsg(c->peer.fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	while (n < 0 && errno == EINTR);
	if (n < 0)
		return errno == EAGAIN ? 0 : -1;
	collect_fds(&m, &f);
	if (n != sizeof(q) || (m.msg_flags & (MSG_TRUNC | MSG_CTRUNC)))
		r = -1;
	else
		r = handle(c, &q, &f) ? 1 : -1;
	close_fds(&f);
	return r;
}

static void on_peer(struct watch *w, uint32_t events)
{
	struct control *c = w->arg;
	uint64_t connection = c->connection;

	if (events & EPOLLOUT)
		send_waiting(c);
	/* A fork makes another connection of it in the child (none), a failed answer here. */
	for (int i = 0; i < REQUESTS_PER_TURN && c->peer.fd >= 0 && c->connection == connection; i++) {
		int r;

		if (c->quit || !STAILQ_EMPTY(&c->out))
			break;
		r = receive(c);
		if (r == 0)
			break;
		if (r < 0) {
			disconnect(c);
			break;
		}
	}
	/* Hung up with answers waiting: nobody will read them. */
	if ((events & (EPOLLHUP | EPOLLERR)) && c->peer.fd >= 0 && c->connection == connection && !STAILQ_EMPTY(&c->out))
		disconnect(c);
	if (c->quit)
		loop_stop(c->loop);
}

static void accept_peer(struct control *c)
{
	int fd = accept4(c->listen.fd, NULL, NULL, SOCK_CLOEXEC);
	struct machine_msg hello = { .op = MACHINE_HELLO, .count = MACHINE_PROTOCOL };

	if (fd < 0)
		return;
	c->peer.fd = fd;
	if (loop_add(c->loop, &c->peer, EPOLLIN) < 0) {
		close(fd);
		c->peer.fd = -1;
		return;
	}
	c->connection++;
	loop_remove(c->loop, &c->listen); /* others wait in the backlog */
	hello.value[0] = (uint64_t)getpid();
	hello.value[1] = machine_state(c->m);
	post(c, &hello);
	if (c->exited)
		post(c, &c->exit_msg);
}

static void on_listen(struct watch *w, uint32_t events)
{
	struct control *c = w->arg;

	if (c->peer.fd < 0)
		accept_peer(c);
}

static void on_end(void *arg, enum machine_exit why, const char *sentence)
{
	struct control *c = arg;
	struct connecting *w;
	struct err e = { 0 };

	c->exit_msg = (struct machine_msg){ .op = MACHINE_EXITED, .count = why };
	snprintf(c->exit_msg.text, sizeof(c->exit_msg.text), "%s", sentence);
	c->exited = true;
	/* The guest will not answer these; the vsock device finds out only in time. */
	LIST_FOREACH(w, &c->connecting, next) {
		if (w->connection == c->connection) {
			err_set(&e, EIO, "the guest has ended");
			set_status(&w->answer, -EIO, &e);
			post(c, &w->answer);
		}
		w->connection = 0;
	}
	post(c, &c->exit_msg);
}

int control_serve(struct machine *m, struct loop *l, int listening)
{
	struct control c = { .m = m, .loop = l, .listen = { .fd = listening, .ready = on_listen },
			     .peer = { .fd = -1, .ready = on_peer } };
	int flags = fcntl(listening, F_GETFL);

	c.listen.arg = c.peer.arg = &c;
	STAILQ_INIT(&c.out);
	LIST_INIT(&c.connecting);
	/* The socket is the server's; a client may be gone between the event and the accept. */
	if (flags < 0 || fcntl(listening, F_SETFL, flags | O_NONBLOCK) < 0 || loop_add(l, &c.listen, EPOLLIN) < 0) {
		fprintf(stderr, "vmenv-machine: descriptor %d is not a socket to serve: %s\n", listening, strerror(errno));
		return 1;
	}
	machine_on_end(m, on_end, &c);
	loop_run(l);
	machine_on_end(m, NULL, NULL);
	/* What is owed before the end, the answer to QUIT last. */
	while (c.peer.fd >= 0 && !STAILQ_EMPTY(&c.out)) {
		struct outgoing *o = STAILQ_FIRST(&c.out);

		if (send(c.peer.fd, &o->msg, sizeof(o->msg), MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
			break;
		STAILQ_REMOVE_HEAD(&c.out, next);
		free(o);
	}
	drop_out(&c);
	while (!LIST_EMPTY(&c.connecting)) { /* the vsock device still has them */
		struct connecting *w = LIST_FIRST(&c.connecting);

		LIST_REMOVE(w, next);
		w->c = NULL;
	}
	if (c.peer.fd >= 0)
		close(c.peer.fd);
	close(c.listen.fd);
	return 0;
}
