/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Trusts: nothing in an answer but its form. A machine process may be in the hands of its guest, so messages of the
 * wrong size end the connection, descriptors that come along are closed, unknown ids are ignored.
 */
#include "machine_client.h"

#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/pidfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#define KILL_AFTER_MS 2000

struct outgoing {
	struct outgoing *next;
	struct machine_msg msg;
	unsigned nfds;
	int fds[];
};

static void close_all(int *fds, unsigned n)
{
	for (unsigned i = 0; i < n; i++)
		close(fds[i]);
}

/* sun_path holds 108 bytes and a state folder's path may be longer: name the socket through the folder's descriptor. */
static void socket_name(const struct machines *s, uint64_t id, struct sockaddr_un *a)
{
	memset(a, 0, sizeof(*a));
	a->sun_family = AF_UNIX;
	snprintf(a->sun_path, sizeof(a->sun_path), "/proc/self/fd/%d/%llu.sock", s->folder, (unsigned long long)id);
}

static void socket_unlink(const struct machines *s, uint64_t id)
{
	char name[40];

	snprintf(name, sizeof(name), "%llu.sock", (unsigned long long)id);
	unlinkat(s->folder, name, 0);
}

int machine_listen(struct machines *s, uint64_t id, struct err *e)
{
	AUTO_CLOSE int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	struct sockaddr_un a;

	if (fd < 0)
		return err_set(e, errno, "cannot make a socket: %s", strerror(errno));
	socket_name(s, id, &a);
	/* The mode is the socket's before it has a name, so that there is no moment at which others may connect. */
	fchmod(fd, 0600);
	if (bind(fd, (struct sockaddr *)&a, sizeof(a)) < 0)
		return err_set(e, errno, "cannot bind a machine's socket in the state folder: %s", strerror(errno));
	if (listen(fd, 4) < 0) {
		int code = errno;

		socket_unlink(s, id);
		return err_set(e, code, "cannot listen on a machine's socket: %s", strerror(code));
	}
	return steal_fd(&fd);
}

static void call_end(struct machine_call *call, int status, const struct machine_msg *m, const struct err *e)
{
	machine_call_drop(call);
	call->done(call, status, m, e);
}

void machine_call_drop(struct machine_call *call)
{
	struct machine_call **p;

	if (!call->client)
		return;
	for (p = &call->client->calls; *p; p = &(*p)->next)
		if (*p == call) {
			*p = call->next;
			break;
		}
	loop_timer_cancel(call->client->machines->loop, &call->timer);
	call->client = NULL;
}

static void outgoing_clear(struct machine_client *c)
{
	struct outgoing *o, *next;

	for (o = c->out; o; o = next) {
		next = o->next;
		close_all(o->fds, o->nfds);
		free(o);
	}
	c->out = NULL;
	c->out_tail = &c->out;
}

static void socket_close(struct machine_client *c)
{
	if (c->socket.fd < 0)
		return;
	loop_remove(c->machines->loop, &c->socket);
	close(c->socket.fd);
	c->socket.fd = -1;
	outgoing_clear(c);
}

/* The process is no more: the end of the client. */
static void process_gone(struct machine_client *c)
{
	struct machine_client **p;

	socket_close(c);
	loop_timer_cancel(c->machines->loop, &c->kill);
	if (c->process.fd >= 0) {
		loop_remove(c->machines->loop, &c->process);
		close(c->process.fd);
	}
	if (c->pid)
		waitpid(c->pid, NULL,
			WNOHANG); /* not ours unless started here, or its parent went first: see core_open */
	socket_unlink(c->machines, c->id);
	for (p = &c->machines->list; *p != c; p = &(*p)->next)
		;
	*p = c->next;
	c->machines->count--;
	if (c->gone)
		c->gone(c);
	free(c);
}

static void kill_now(struct timer *t)
{
	struct machine_client *c = t->arg;

	if (c->process.fd >= 0)
		pidfd_send_signal(c->process.fd, SIGKILL, NULL, 0);
	/* Without a pid the process has not looked at its socket yet: what it finds there first is MACHINE_QUIT, and
	 * the connection is kept until it does or until nobody can any more. */
	loop_timer(c->machines->loop, t, now_ns(CLOCK_MONOTONIC) + KILL_AFTER_MS * 1000000ull);
}

static void expect_end(struct machine_client *c)
{
	c->quitting = true;
	loop_timer(c->machines->loop, &c->kill, now_ns(CLOCK_MONOTONIC) + KILL_AFTER_MS * 1000000ull);
}

/* Tells the owner and the callers, once. The process may still be there. */
static void finish(struct machine_client *c, const char *sentence)
{
	void (*ended)(struct machine_client *, const char *);
	struct err e = { 0 };

	if (c->finished)
		return;
	c->finished = true;
	if (!c->sentence[0])
		snprintf(c->sentence, sizeof(c->sentence), "%s", sentence);
	err_set(&e, EIO, "%.470s", c->sentence);
	while (c->calls)
		call_end(c->calls, -EIO, NULL, &e);
	ended = c->ended; /* if those who were just told have not let go of it */
	c->ended = NULL;
	if (ended)
		ended(c, c->sentence);
}

static void socket_ended(struct machine_client *c)
{
	socket_close(c);
	finish(c, "the machine process died");
	if (c->process.fd < 0)
		process_gone(c);
	else
		expect_end(c);
}

/* How a child of ours ended, as a sentence. */
static void describe_exit(struct machine_client *c)
{
	siginfo_t si = { 0 };

	if (!c->child || c->sentence[0] || waitid(P_PID, (id_t)c->pid, &si, WEXITED | WNOHANG | WNOWAIT) < 0 ||
	    !si.si_pid)
		return;
	if (si.si_code == CLD_EXITED)
		snprintf(c->sentence, sizeof(c->sentence), "the machine process ended with exit code %d", si.si_status);
	else
		snprintf(c->sentence, sizeof(c->sentence), "the machine process was killed by signal %d (%s)",
			 si.si_status, strsignal(si.si_status));
}

static void socket_ready(struct watch *w, uint32_t events);

static void process_ready(struct watch *w, uint32_t events)
{
	struct machine_client *c = w->arg;

	/* Its last words first. They may end the client: not here, where the process is still known. */
	for (int i = 0; i < 64 && c->socket.fd >= 0; i++) {
		char byte;

		if (recv(c->socket.fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) <= 0)
			break;
		socket_ready(&c->socket, EPOLLIN);
	}
	describe_exit(c);
	finish(c, "the machine process died");
	process_gone(c);
}

static int watch_process(struct machine_client *c)
{
	int fd = pidfd_open(c->pid, 0);

	if (fd < 0)
		return -errno;
	fcntl(fd, F_SETFD, FD_CLOEXEC);
	c->process = (struct watch){ .fd = fd, .ready = process_ready, .arg = c };
	return loop_add(c->machines->loop, &c->process, EPOLLIN);
}

void machine_is_child(struct machine_client *c, pid_t pid)
{
	c->child = true;
	c->pid = pid;
	if (watch_process(c) < 0)
		c->process.fd = -1;
}

/* False: it is no machine of ours. */
static bool greet(struct machine_client *c, const struct machine_msg *m, pid_t pid)
{
	char byte;

	if (c->hello)
		return true;
	if (m->count != MACHINE_PROTOCOL) {
		snprintf(c->sentence, sizeof(c->sentence),
			 "vmenv-machine speaks protocol %u, the server %u: they are of different versions", m->count,
			 MACHINE_PROTOCOL);
		return false;
	}
	c->hello = true;
	c->hello_ns = now_ns(CLOCK_MONOTONIC);
	if (!c->pid && pid > 0) {
		/* The pid was right when the message was sent, and is while the connection stands: so look at that
		 * last. */
		c->pid = pid;
		if (watch_process(c) < 0 || recv(c->socket.fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0) {
			if (c->process.fd >= 0) {
				loop_remove(c->machines->loop, &c->process);
				close(c->process.fd);
				c->process.fd = -1;
			}
			c->pid = 0;
		}
	}
	if (c->greeted)
		c->greeted(c);
	return true;
}

static void answered(struct machine_client *c, const struct machine_msg *m)
{
	struct machine_call *call;
	struct err e = { 0 };

	for (call = c->calls; call && call->id != m->id; call = call->next)
		;
	if (!call || call->op != m->op)
		return;
	if (m->status == 0) {
		call_end(call, 0, m, NULL);
		return;
	}
	e.code = m->status < 0 && m->status > -4096 ? -m->status : EIO;
	snprintf(e.text, sizeof(e.text), "%.447s", m->text[0] ? m->text : strerror(e.code));
	call_end(call, -e.code, m, &e);
}

static ssize_t receive(struct machine_client *c, struct machine_msg *m, pid_t *pid)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(struct ucred)) + CMSG_SPACE(16 * sizeof(int))];
	} control;
	struct iovec iov = { m, sizeof(*m) };
	struct msghdr h = {
		.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
	ssize_t n = recvmsg(c->socket.fd, &h, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

	*pid = 0;
	if (n < 0)
		return errno == EAGAIN || errno == EINTR ? -EAGAIN : -errno;
	for (struct cmsghdr *p = CMSG_FIRSTHDR(&h); p; p = CMSG_NXTHDR(&h, p)) {
		if (p->cmsg_level != SOL_SOCKET)
			continue;
		if (p->cmsg_type == SCM_CREDENTIALS && p->cmsg_len >= CMSG_LEN(sizeof(struct ucred))) {
			struct ucred cred;

			memcpy(&cred, CMSG_DATA(p), sizeof(cred));
			*pid = cred.pid;
		} else if (p->cmsg_type == SCM_RIGHTS) {
			for (size_t i = 0; CMSG_LEN((i + 1) * sizeof(int)) <= p->cmsg_len; i++) {
				int fd;

				memcpy(&fd, CMSG_DATA(p) + i * sizeof(int), sizeof(int));
				close(fd);
			}
		}
	}
	if (n == 0)
		return -ECONNRESET;
	return n == sizeof(*m) && !(h.msg_flags & MSG_TRUNC) ? n : -EPROTO;
}

static void flush(struct machine_client *c);

static void socket_ready(struct watch *w, uint32_t events)
{
	struct machine_client *c = w->arg;
	struct machine_msg m;
	ssize_t n;
	pid_t pid;

	if (events & EPOLLOUT)
		flush(c);
	if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
		return;
	/* One message a call: callbacks may do anything, and the loop knows which watches are still there. */
	n = receive(c, &m, &pid);
	if (n == -EAGAIN)
		return;
	if (n < 0) {
		if (n == -EPROTO)
			snprintf(c->sentence, sizeof(c->sentence), "the machine process sent a malformed message");
		socket_ended(c);
		return;
	}
	m.text[sizeof(m.text) - 1] = 0;
	if (m.op == MACHINE_HELLO && m.id == 0) {
		if (!greet(c, &m, pid))
			socket_ended(c);
	} else if (m.op == MACHINE_EXITED && m.id == 0) {
		snprintf(c->sentence, sizeof(c->sentence), "%s", m.text[0] ? m.text : "the machine ended");
		finish(c, "");
		machine_quit(c);
	} else {
		answered(c, &m);
	}
}

int machine_connect(struct machines *s, uint64_t id, struct machine_client **out, struct err *e)
{
	struct machine_client *c = calloc(1, sizeof(*c));
	struct sockaddr_un a;
	int fd, on = 1, r;

	if (!c)
		return err_set(e, ENOMEM, "out of memory");
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	socket_name(s, id, &a);
	if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)) < 0 ||
	    connect(fd, (struct sockaddr *)&a, sizeof(a)) < 0) {
		r = err_set(e, errno, "cannot connect to a machine: %s", strerror(errno));
		if (fd >= 0)
			close(fd);
		free(c);
		return r;
	}
	c->machines = s;
	c->id = id;
	c->socket = (struct watch){ .fd = fd, .ready = socket_ready, .arg = c };
	c->process.fd = -1;
	c->kill = (struct timer){ .fire = kill_now, .arg = c };
	c->out_tail = &c->out;
	r = loop_add(s->loop, &c->socket, EPOLLIN);
	if (r < 0) {
		close(fd);
		free(c);
		return err_set(e, -r, "cannot watch a machine: %s", strerror(-r));
	}
	c->next = s->list;
	s->list = c;
	s->count++;
	*out = c;
	return 0;
}

static int send_now(struct machine_client *c, const struct outgoing *o)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(MACHINE_FORK_MAX * sizeof(int))];
	} control;
	struct iovec iov = { (void *)&o->msg, sizeof(o->msg) };
	struct msghdr h = { .msg_iov = &iov, .msg_iovlen = 1 };

	if (o->nfds) {
		struct cmsghdr *p;

		h.msg_control = &control;
		h.msg_controllen = CMSG_SPACE(o->nfds * sizeof(int));
		p = CMSG_FIRSTHDR(&h);
		p->cmsg_level = SOL_SOCKET;
		p->cmsg_type = SCM_RIGHTS;
		p->cmsg_len = CMSG_LEN(o->nfds * sizeof(int));
		memcpy(CMSG_DATA(p), o->fds, o->nfds * sizeof(int));
	}
	return sendmsg(c->socket.fd, &h, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 ? -errno : 0;
}

static void want_output(struct machine_client *c, bool on)
{
	if (c->writing == on)
		return;
	c->writing = on;
	loop_change(c->machines->loop, &c->socket, on ? EPOLLIN | EPOLLOUT : EPOLLIN);
}

/* An error here is also one of receiving, and is handled there. */
static void flush(struct machine_client *c)
{
	while (c->out) {
		struct outgoing *o = c->out;
		int r = send_now(c, o);

		if (r == -EAGAIN || r == -EINTR || r == -ENOBUFS)
			break;
		c->out = o->next;
		if (!c->out)
			c->out_tail = &c->out;
		close_all(o->fds, o->nfds);
		free(o);
	}
	want_output(c, c->out != NULL);
}

static int enqueue(struct machine_client *c, uint32_t id, uint32_t op, uint32_t count, const void *text,
		   size_t text_bytes, const int *fds, unsigned nfds)
{
	struct outgoing *o = calloc(1, sizeof(*o) + nfds * sizeof(int));

	if (!o)
		return -ENOMEM;
	o->msg.op = op;
	o->msg.id = id;
	o->msg.count = count;
	memcpy(o->msg.text, text ? text : "", text ? MIN(text_bytes, sizeof(o->msg.text)) : 0);
	o->nfds = nfds;
	memcpy(o->fds, fds ? fds : (const int[]){ 0 }, nfds * sizeof(int));
	*c->out_tail = o;
	c->out_tail = &o->next;
	flush(c);
	return 0;
}

static void call_late(struct timer *t)
{
	struct machine_call *call = t->arg;
	struct err e = { 0 };

	err_set(&e, ETIMEDOUT, "the machine did not answer in time");
	call_end(call, -ETIMEDOUT, NULL, &e);
}

int machine_request(struct machine_client *c, struct machine_call *call, uint32_t op, uint32_t count, const void *text,
		    size_t text_bytes, int *fds, unsigned nfds, unsigned timeout_ms, struct err *e)
{
	if (c->finished || c->quitting || c->socket.fd < 0) {
		close_all(fds, nfds);
		return err_set(e, EIO, "%.470s", c->sentence[0] ? c->sentence : "the machine has ended");
	}
	call->id = ++c->last_id ? c->last_id : ++c->last_id;
	call->op = op;
	if (enqueue(c, call->id, op, count, text, text_bytes, fds, nfds) < 0) {
		close_all(fds, nfds);
		return err_set(e, ENOMEM, "out of memory");
	}
	call->client = c;
	call->timer = (struct timer){ .fire = call_late, .arg = call };
	call->next = c->calls;
	c->calls = call;
	if (timeout_ms)
		loop_timer(c->machines->loop, &call->timer, now_ns(CLOCK_MONOTONIC) + timeout_ms * 1000000ull);
	return 0;
}

int machine_stream(struct machine_client *c, struct machine_call *call, uint32_t port, unsigned timeout_ms, int *fd,
		   struct err *e)
{
	int ends[2], r;

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) < 0)
		return err_set(e, errno, "cannot make a stream to the guest: %s", strerror(errno));
	r = machine_request(c, call, MACHINE_CONNECT, port, NULL, 0, &ends[1], 1, timeout_ms, e);
	if (r < 0) {
		close(ends[0]);
		return r;
	}
	*fd = ends[0];
	return 0;
}

void machine_quit(struct machine_client *c)
{
	c->ended = NULL;
	c->greeted = NULL;
	finish(c, "the machine was ended");
	if (c->quitting)
		return;
	if (c->socket.fd >= 0 && enqueue(c, ++c->last_id, MACHINE_QUIT, 0, NULL, 0, NULL, 0) < 0 && c->process.fd >= 0)
		pidfd_send_signal(c->process.fd, SIGKILL, NULL, 0);
	expect_end(c);
}

/* Until `deadline` or until the process is gone. */
static bool await_end(struct machine_client *c, uint64_t deadline)
{
	while (now_ns(CLOCK_MONOTONIC) < deadline) {
		struct machine_msg m;
		pid_t pid;
		ssize_t n;

		if (c->process.fd >= 0) {
			struct pollfd p = { .fd = c->process.fd, .events = POLLIN };

			if (poll(&p, 1, 50) == 1)
				return true;
			continue;
		} else {
			if (c->socket.fd < 0)
				return true;
			n = receive(c, &m, &pid);
			if (n > 0 && m.op == MACHINE_HELLO)
				greet(c, &m, pid);
			else if (n < 0 && n != -EAGAIN)
				return true;
			if (n > 0)
				continue;
		}
		nanosleep(&(struct timespec){ .tv_nsec = 500000 }, NULL);
	}
	return false;
}

void machines_close(struct machines *s)
{
	uint64_t deadline = now_ns(CLOCK_MONOTONIC) + KILL_AFTER_MS * 1000000ull;
	struct machine_client *c;

	for (c = s->list; c; c = c->next) {
		c->gone = NULL;
		machine_quit(c);
		flush(c);
	}
	/* A machine that was forked into an unanswered connection gets its end of file when its parent's process is
	 * gone: so those without a process come last, after the others were made to end. */
	for (int pass = 0; pass < 2; pass++) {
		for (c = s->list; c; c = c->next) {
			if ((c->process.fd >= 0) != (pass == 0))
				continue;
			if (!await_end(c, deadline) && c->process.fd >= 0) {
				pidfd_send_signal(c->process.fd, SIGKILL, NULL, 0);
				await_end(c, now_ns(CLOCK_MONOTONIC) + KILL_AFTER_MS * 1000000ull);
			}
		}
		deadline = now_ns(CLOCK_MONOTONIC) + KILL_AFTER_MS * 1000000ull;
	}
	while (s->list)
		process_gone(s->list);
}

int machine_spawn(const char *program, char *const argv[], int listening, int log, pid_t *pid, struct err *e)
{
	posix_spawn_file_actions_t actions;
	posix_spawnattr_t attr;
	sigset_t none, all;
	int r;

	posix_spawn_file_actions_init(&actions);
	posix_spawnattr_init(&attr);
	sigemptyset(&none);
	sigfillset(&all);
	posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
	posix_spawnattr_setsigmask(&attr, &none);
	posix_spawnattr_setsigdefault(&attr, &all);
	/* Neither descriptor is among 0 to 3 in the server, which has its lock and folders open before. */
	r = posix_spawn_file_actions_adddup2(&actions, listening, 3);
	if (!r)
		r = posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
	if (!r && log >= 0)
		r = posix_spawn_file_actions_adddup2(&actions, log, 1);
	else if (!r)
		r = posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
	if (!r)
		r = posix_spawn_file_actions_adddup2(&actions, 1, 2);
	if (!r)
		r = posix_spawn_file_actions_addchdir_np(&actions, "/");
	if (!r)
		r = posix_spawn_file_actions_addclosefrom_np(&actions, 4);
	if (!r)
		r = posix_spawn(pid, program, &actions, &attr, argv, environ);
	posix_spawn_file_actions_destroy(&actions);
	posix_spawnattr_destroy(&attr);
	if (r)
		return err_set(e, r, "cannot start %.300s: %s", program, strerror(r));
	return 0;
}
