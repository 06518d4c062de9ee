/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libfuse keeps the protocol; the loop is ours, because everything happens on one thread: a request that waits keeps its
 * fuse_req_t (see struct pending) and is answered when its operation is done.
 */
#include "session.h"

#include <signal.h>
#include <spawn.h>
#include <sys/mount.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "mountpoint.h"
#include "server.h"
#include "stream.h"

#define MESSAGES_A_TURN 32 /* before others in the loop have theirs */

struct session {
	struct server server;
	const struct session_options *options;
	struct watch device, signals;
	struct mount_watch mount;
	struct fuse_buf buffer;
	struct byte_stream stream;
	bool ready;
	int status; /* why it ended, for the caller */
};

static void set_signals(sigset_t *set)
{
	sigemptyset(set);
	sigaddset(set, SIGINT);
	sigaddset(set, SIGTERM);
	sigaddset(set, SIGHUP);
}

void session_block_signals(void)
{
	sigset_t set;

	set_signals(&set);
	sigprocmask(SIG_BLOCK, &set, NULL);
	/* A stream's other end that goes away is an error of write, not the end of the process. */
	signal(SIGPIPE, SIG_IGN);
}

static void process(struct session *s, const struct fuse_buf *buffer)
{
	fuse_session_process_buf(s->server.session, buffer);
	pending_interrupts(&s->server);
	/* The first message is INIT: now it is answered. */
	if (!s->ready && s->options->ready)
		s->options->ready(s->options->arg);
	s->ready = true;
}

static void device_ready(struct watch *w, uint32_t events)
{
	struct session *s = w->arg;

	(void)events;
	for (int i = 0; i < MESSAGES_A_TURN; i++) {
		int n = fuse_session_receive_buf(s->server.session, &s->buffer);

		if (n == -EINTR)
			continue;
		if (n == -EAGAIN)
			return;
		if (n <= 0) {
			/* Unmounted. An abort by the administrator is as good. */
			s->status = n == -ENODEV || n == -ECONNABORTED ? 0 : n;
			loop_stop(s->server.loop);
			return;
		}
		process(s, &s->buffer);
	}
}

static void signals_ready(struct watch *w, uint32_t events)
{
	struct session *s = w->arg;
	struct signalfd_siginfo info;

	(void)events;
	if (read(w->fd, &info, sizeof(info)) == sizeof(info))
		loop_stop(s->server.loop);
}

static void stream_received(struct byte_stream *stream, char *message, size_t n)
{
	struct fuse_buf buffer = { .mem = message, .size = n };

	process(stream->arg, &buffer);
}

static void stream_over(struct byte_stream *stream)
{
	struct session *s = stream->arg;

	s->status = MIN(stream->ended, 0);
	loop_stop(s->server.loop);
}

static struct session *session_of(void *userdata)
{
	return (struct session *)userdata; /* the server is its first member */
}

static ssize_t custom_writev(int fd, struct iovec *iov, int count, void *userdata)
{
	(void)fd;
	return stream_send(&session_of(userdata)->stream, iov, count);
}

/* Messages are received by the stream and handed to libfuse: it never reads. */
static ssize_t custom_read(int fd, void *buffer, size_t n, void *userdata)
{
	(void)fd;
	(void)buffer;
	(void)n;
	(void)userdata;
	errno = ENODEV;
	return -1;
}

static int open_stream(struct session *s, struct err *e)
{
	static const struct fuse_custom_io io = { .writev = custom_writev, .read = custom_read };
	AUTO_CLOSE int null = open("/dev/null", O_RDWR | O_CLOEXEC);
	int in = fcntl(0, F_DUPFD_CLOEXEC, 3), out = fcntl(1, F_DUPFD_CLOEXEC, 3), r;

	if (in < 0 || out < 0 || null < 0) {
		if (in >= 0)
			close(in);
		if (out >= 0)
			close(out);
		return err_set(e, EBADF, "standard input and output must be open");
	}
	/* Nothing else must get into the stream. */
	dup2(null, 0);
	dup2(2, 1);
	s->stream.received = stream_received;
	s->stream.over = stream_over;
	s->stream.arg = s;
	r = stream_open(&s->stream, s->server.loop, in, out, e);
	if (r == 0)
		r = fuse_session_custom_io(s->server.session, &io, fcntl(out, F_DUPFD_CLOEXEC, 3));
	return r < 0 && e->code == 0 ? err_set(e, -r, "libfuse does not take the stream: %s", strerror(-r)) : r;
}

static void unmounted(void *arg)
{
	struct session *s = arg;

	loop_stop(s->server.loop);
}

static int open_device(struct session *s, struct err *e)
{
	int fd, r;

	if (fuse_session_mount(s->server.session, s->options->mountpoint) < 0)
		return err_set(e, EIO, "cannot mount at %s", s->options->mountpoint);
	fd = fuse_session_fd(s->server.session);
	fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
	s->device = (struct watch){ fd, device_ready, s };
	r = loop_add(s->server.loop, &s->device, EPOLLIN);
	if (r < 0) {
		fuse_session_unmount(s->server.session);
		return err_set(e, -r, "cannot watch /dev/fuse: %s", strerror(-r));
	}
	mount_watch_start(&s->mount, s->server.loop, s->options->mountpoint, unmounted, s);
	return 0;
}

static int open_signals(struct session *s, struct err *e)
{
	sigset_t set;
	int r;

	set_signals(&set);
	s->signals = (struct watch){ signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK), signals_ready, s };
	r = s->signals.fd < 0 ? -errno : loop_add(s->server.loop, &s->signals, EPOLLIN);
	return r < 0 ? err_set(e, -r, "cannot watch signals: %s", strerror(-r)) : 0;
}

/* libfuse leaves the mount alone when the connection is gone already, and after an abort (umount -f of a busy mount) that
 * leaves a mount point that only answers ENOTCONN. */
static void remove_dead_mount(const char *mountpoint)
{
	char *argv[] = { (char *)"fusermount3", (char *)"-u", (char *)"-q", (char *)"-z", (char *)"--", (char *)mountpoint, NULL };
	struct stat st;
	pid_t child;

	if (stat(mountpoint, &st) == 0 || errno != ENOTCONN || umount2(mountpoint, MNT_DETACH) == 0)
		return;
	if (posix_spawnp(&child, argv[0], NULL, NULL, argv, environ) == 0)
		waitpid(child, NULL, 0);
}

static void journal_grown(struct journal *j)
{
	struct server *s = j->arg;

	s->journal_ns = now_ns(CLOCK_REALTIME);
	server_wake(s);
}

static void watch_journals(struct server *s, bool on)
{
	struct journal *both[] = { core_errors(s->core), core_events(s->core) };

	for (size_t i = 0; i < ARRAY_SIZE(both); i++) {
		both[i]->arg = on ? s : NULL;
		both[i]->grown = on ? journal_grown : NULL;
	}
}

static struct fuse_session *new_session(struct session *s)
{
	char *argv[] = { (char *)"vmenvfs", (char *)"-o", (char *)s->options->mount_options, NULL };
	struct fuse_args args = FUSE_ARGS_INIT(s->options->mountpoint && s->options->mount_options ? 3 : 1, argv);
	struct fuse_session *se = fuse_session_new(&args, &server_ops, sizeof(server_ops), s);

	fuse_opt_free_args(&args);
	return se;
}

static int serve(struct session *s, struct err *e)
{
	bool mounted = s->options->mountpoint;
	int r = mounted ? open_device(s, e) : open_stream(s, e);

	if (r == 0) {
		watch_journals(&s->server, true);
		loop_run(s->server.loop);
		pending_stop_all(&s->server, EIO);
		watch_journals(&s->server, false);
		if (mounted) {
			loop_remove(s->server.loop, &s->device);
			/* What is mounted there by now may be somebody else's. */
			if (!s->mount.gone) {
				fuse_session_unmount(s->server.session);
				remove_dead_mount(s->options->mountpoint);
			}
			mount_watch_stop(&s->mount);
		}
		server_close_handles(&s->server);
		r = s->status;
		if (r < 0)
			err_set(e, -r, mounted ? "/dev/fuse: %s" : "the stream of requests: %s", strerror(-r));
	}
	if (!mounted && s->stream.in.fd)
		stream_close(&s->stream);
	return r;
}

int session_run(const struct session_options *o, struct core *c, struct loop *l, struct err *e)
{
	struct session s = {
		.options = o,
		.signals = { .fd = -1 },
		.server = {
			.core = c, .loop = l, .state = o->state, .uid = o->uid, .gid = o->gid, .local = o->mountpoint,
			.started_ns = now_ns(CLOCK_REALTIME),
		},
	};
	int r = open_signals(&s, e);

	s.server.journal_ns = s.server.started_ns;
	if (r == 0) {
		s.server.session = new_session(&s);
		r = s.server.session ? serve(&s, e) : err_set(e, EINVAL, "libfuse does not take the mount options");
	}
	if (s.server.session)
		fuse_session_destroy(s.server.session);
	free(s.buffer.mem);
	if (s.signals.fd >= 0) {
		loop_remove(l, &s.signals);
		close(s.signals.fd);
	}
	return r;
}
