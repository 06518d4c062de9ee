/* SPDX-License-Identifier: Apache-2.0 */
#define FUSE_USE_VERSION 312
#include "relay.h"

#include <fuse_lowlevel.h>
#include <linux/fuse.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <vmenv/loop.h>

#include "interrupt.h"
#include "mountpoint.h"
#include "relay_table.h"

#define PAYLOAD_MAX (16u << 20)		   /* of one message, whatever is negotiated */
#define MESSAGE_MAX (PAYLOAD_MAX + 65536u) /* with its headers */
#define FIRST_BUFFER ((1u << 20) + 65536u) /* what a message takes with libfuse's and the kernel's defaults */
#define BURST 64			   /* messages taken from the kernel in one go */
#define PING_UNIQUE (1ull << 62)	   /* the kernel counts from 0 */
#define SECOND 1000000000ull
#define DOUBT (SECOND / 10) /* how often an interrupt that may be none is looked at again */

struct bytes {
	char *data;
	size_t first, end, room; /* data[first..end) is there */
};

/* A FUSE_INTERRUPT that is kept back: see interrupt.h. Only we are where the process that waits can be seen. */
struct doubt {
	struct fuse_in_header header;
	struct fuse_interrupt_in interrupt;
};

enum phase {
	PHASE_MOUNTED, /* waiting for the kernel's FUSE_INIT */
	PHASE_INIT,    /* it is with the server; nothing else is taken from the kernel */
	PHASE_UP,
	PHASE_DOWN, /* between a death and a new start */
	PHASE_OVER,
};

struct relay {
	const struct host_options *options;
	struct backend *backend;
	struct loop *loop;
	struct fuse_session *session; /* only mounts and unmounts */
	int fuse, signals;
	struct watch fuse_watch, signal_watch, in_watch, out_watch, aside_watch;
	bool fuse_watched, in_watched, out_watched, aside_watched;
	struct timer second;
	struct mount_watch mount;

	enum phase phase;
	struct upstream upstream; /* pid 0: none */
	struct bytes to, from;	  /* towards the server; of the server, not yet a whole message */
	struct table table;	  /* pending requests and handles */
	struct doubt *doubts;
	size_t doubt_count, doubt_room;
	struct timer doubt;

	char init[512]; /* the kernel's FUSE_INIT */
	size_t init_bytes;
	struct fuse_init_out agreed; /* the first answer to it */
	bool answered;		     /* the kernel has that; so the mount answers */

	uint64_t started_ns, ping;
	unsigned silent;     /* seconds since the server was last heard, while a ping is unanswered */
	uint64_t starts[16]; /* times of the last starts after a death */
	bool shown;	     /* a progress line is on the terminal */
	int status;
	struct err err;
};

static int bytes_reserve(struct bytes *b, size_t n)
{
	char *data;

	if (b->first > 0) {
		memmove(b->data, b->data + b->first, b->end - b->first);
		b->end -= b->first;
		b->first = 0;
	}
	if (b->end + n <= b->room)
		return 0;
	data = realloc(b->data, b->end + n);
	if (!data)
		return -ENOMEM;
	b->data = data;
	b->room = b->end + n;
	return 0;
}

static size_t bytes_held(const struct bytes *b)
{
	return b->end - b->first;
}

static void watch_change(struct relay *r, struct watch *w, bool *watched, bool wanted, uint32_t events)
{
	if (wanted && !*watched)
		*watched = loop_add(r->loop, w, events) == 0;
	else if (!wanted && *watched) {
		loop_remove(r->loop, w);
		*watched = false;
	}
}

/* Takes requests from the kernel only while there is room for one more towards the server. */
static void watches_update(struct relay *r)
{
	bool up = r->upstream.pid > 0;
	bool take = r->phase == PHASE_MOUNTED ||
		    (r->phase == PHASE_UP && bytes_held(&r->to) < FIRST_BUFFER && !table_full(&r->table));

	watch_change(r, &r->fuse_watch, &r->fuse_watched, take, EPOLLIN);
	watch_change(r, &r->in_watch, &r->in_watched, up, EPOLLIN);
	watch_change(r, &r->aside_watch, &r->aside_watched, up && r->upstream.aside >= 0, EPOLLIN);
	watch_change(r, &r->out_watch, &r->out_watched, up && bytes_held(&r->to) > 0, EPOLLOUT);
}

static void progress(struct relay *r, bool done)
{
	if (!done && r->backend->progress && !r->answered && isatty(STDERR_FILENO)) {
		fprintf(stderr, "\rstarting %s: %llu s\033[K", r->backend->what,
			(unsigned long long)((now_ns(CLOCK_MONOTONIC) - r->started_ns) / SECOND));
		r->shown = true;
	} else if (done && r->shown) {
		fputs("\r\033[K", stderr);
		r->shown = false;
	}
}

static void over(struct relay *r, int status)
{
	r->phase = PHASE_OVER;
	r->status = status;
	loop_stop(r->loop);
}

/* To the kernel. -ENODEV: unmounted. What it refuses otherwise is a matter between it and the answer. */
static int kernel_write(struct relay *r, const void *message, size_t n)
{
	ssize_t w;

	do
		w = write(r->fuse, message, n);
	while (w < 0 && errno == EINTR);
	return w < 0 ? -errno : 0;
}

static int kernel_error(struct relay *r, uint64_t unique, int error)
{
	struct fuse_out_header h = { .len = sizeof(h), .error = -error, .unique = unique };

	return kernel_write(r, &h, sizeof(h));
}

static void fail_pending(struct relay *r)
{
	struct request q;

	while (table_pop(&r->table, &q))
		if (q.opcode != FUSE_INIT)
			kernel_error(r, q.unique, EIO);
}

/* Closes the stream and sees the process end, by force if it does not by itself within so many ms. True: it did. */
static bool upstream_stop(struct relay *r, int patience_ms, int *status)
{
	struct upstream *u = &r->upstream;
	bool ended;
	int target;

	if (u->pid <= 0)
		return false;
	watch_change(r, &r->in_watch, &r->in_watched, false, 0);
	watch_change(r, &r->out_watch, &r->out_watched, false, 0);
	watch_change(r, &r->aside_watch, &r->aside_watched, false, 0);
	close(u->in);
	close(u->out);
	r->to.first = r->to.end = r->from.first = r->from.end = 0;
	target = u->group ? -u->pid : u->pid;
	ended = host_wait(u->pid, patience_ms, status);
	if (!ended) {
		if (patience_ms > 0)
			kill(target, SIGTERM);
		if (patience_ms <= 0 || !host_wait(u->pid, 3000, status)) {
			kill(target, SIGKILL);
			while (waitpid(u->pid, status, 0) < 0 && errno == EINTR)
				;
		}
	}
	if (u->group) /* what it left behind */
		kill(target, SIGKILL);
	u->pid = 0;
	return ended;
}

static int upstream_start(struct relay *r, struct err *e)
{
	int ret;

	r->upstream = (struct upstream){ -1, -1, .aside = -1 };
	ret = r->backend->start(r->backend, &r->upstream, e);
	if (ret < 0) {
		r->upstream.pid = 0;
		return ret;
	}
	r->in_watch.fd = r->upstream.in;
	r->out_watch.fd = r->upstream.out;
	r->aside_watch.fd = r->upstream.aside;
	r->started_ns = now_ns(CLOCK_MONOTONIC);
	r->ping = 0;
	r->silent = 0;
	return 0;
}

static int send_upstream(struct relay *r, const void *message, size_t n)
{
	if (bytes_reserve(&r->to, n) < 0)
		return -ENOMEM;
	memcpy(r->to.data + r->to.end, message, n);
	r->to.end += n;
	return 0;
}

/* One more start is allowed if there were fewer than `restarts` in the last minute. */
static bool may_restart(struct relay *r)
{
	uint64_t now = now_ns(CLOCK_MONOTONIC);
	unsigned most = MIN(r->backend->restarts, (unsigned)ARRAY_SIZE(r->starts)), recent = 0, oldest = 0;

	for (unsigned n = 0; n < most; n++) {
		recent += r->starts[n] && now - r->starts[n] < 60 * SECOND;
		if (r->starts[n] < r->starts[oldest])
			oldest = n;
	}
	if (recent >= most)
		return false;
	r->starts[oldest] = now;
	return true;
}

static bool signal_pending(struct relay *r)
{
	struct pollfd p = { .fd = r->signals, .events = POLLIN };

	return poll(&p, 1, 0) == 1;
}

/* The stream has ended or makes no sense any more. */
static void stream_died(struct relay *r, const char *how, bool hung)
{
	char ending[100] = "", more[480] = "";
	int status = 0;

	if (r->phase == PHASE_OVER)
		return;
	/* The end of the stream may be seen before that of the process. One that hangs gets no time. */
	if (upstream_stop(r, hung ? 0 : 500, &status)) {
		if (WIFSIGNALED(status))
			snprintf(ending, sizeof(ending), ": killed by signal %d (%s)", WTERMSIG(status),
				 strsignal(WTERMSIG(status)));
		else if (WEXITSTATUS(status))
			snprintf(ending, sizeof(ending), ": exit status %d", WEXITSTATUS(status));
	}
	fail_pending(r);
	table_forsake(&r->table);
	r->phase = PHASE_DOWN;
	progress(r, true);
	/* On a terminal Ctrl-C reaches the command as well as us: then that is why. */
	if (signal_pending(r)) {
		over(r, 0);
		return;
	}
	if (r->backend->post_mortem)
		r->backend->post_mortem(r->backend, more, sizeof(more));
	if (!r->answered || !r->backend->restarts) {
		over(r, err_set(&r->err, EIO, "%s %s%s%s%s", r->backend->what, how, ending, *more ? "; " : "", more));
		return;
	}
	while (may_restart(r)) {
		struct err e = { 0 };

		host_say(true, "%s %s%s: starting it again; its sandboxes are gone%s%s", r->backend->what, how, ending,
			 *more ? "; " : "", more);
		if (upstream_start(r, &e) == 0) {
			r->phase = PHASE_INIT;
			send_upstream(r, r->init, r->init_bytes);
			table_push(&r->table,
				   &(struct request){ ((struct fuse_in_header *)r->init)->unique, FUSE_INIT, 0 });
			watches_update(r);
			return;
		}
		snprintf(more, sizeof(more), "%s", e.text);
	}
	over(r, err_set(&r->err, EIO, "%s %s%s, too often: giving up%s%s", r->backend->what, how, ending,
			*more ? "; " : "", more));
}

/* The answer to FUSE_INIT: the kernel's to see the first time, and the same again after every restart. */
static int init_answer(struct relay *r, const char *message, size_t n)
{
	const struct fuse_out_header *h = (const void *)message;
	struct fuse_init_out out = { 0 };
	int ret;

	if (h->error)
		return -EPROTO;
	memcpy(&out, message + sizeof(*h), MIN(n - sizeof(*h), sizeof(out)));
	if (out.major != FUSE_KERNEL_VERSION || out.max_write > PAYLOAD_MAX)
		return -EPROTO;
	if (r->answered) {
		if (out.minor != r->agreed.minor || out.flags != r->agreed.flags || out.flags2 != r->agreed.flags2 ||
		    out.max_write < r->agreed.max_write)
			return -EPROTO;
	} else {
		ret = kernel_write(r, message, n);
		if (ret < 0)
			return ret;
		r->agreed = out;
		r->answered = true;
		progress(r, true);
		if (r->options->ready)
			r->options->ready(r->options->arg);
	}
	r->phase = PHASE_UP;
	return 0;
}

/* One whole message of the server. -EPROTO: it makes no sense; -ENODEV: unmounted. */
static int from_server(struct relay *r, char *message, size_t n)
{
	struct fuse_out_header *h = (void *)message;
	struct request q;
	int ret;

	if (h->unique == 0) {
		/* A notification: `error` is its code. */
		if (r->phase != PHASE_UP || h->error <= 0)
			return -EPROTO;
		ret = kernel_write(r, message, n);
		return ret == -ENODEV ? ret : 0;
	}
	if (h->unique & PING_UNIQUE) {
		if (h->unique == (r->ping | PING_UNIQUE)) {
			r->ping = 0;
			r->silent = 0;
		}
		return 0;
	}
	/* An answer to an interrupt (the interrupted request's number, plus one) is optional. */
	if (h->unique & 1) {
		ret = kernel_write(r, message, n);
		return ret == -ENODEV ? ret : 0;
	}
	if (!table_take(&r->table, h->unique, &q))
		return -EPROTO;
	if (q.opcode == FUSE_INIT)
		return init_answer(r, message, n);
	if (r->phase != PHASE_UP || h->error > 0)
		return -EPROTO;
	if (h->error == 0 && table_opened(&r->table, &q, message, n) < 0) {
		ret = kernel_error(r, h->unique, ENOMEM);
		return ret == -ENODEV ? ret : 0;
	}
	ret = kernel_write(r, message, n);
	/* An answer that the kernel does not understand must not leave its request waiting. */
	if (ret == -EINVAL)
		ret = kernel_error(r, h->unique, EIO);
	return ret == -ENODEV ? ret : 0;
}

static void in_ready(struct watch *w, uint32_t events)
{
	struct relay *r = w->arg;
	ssize_t n;

	if (bytes_reserve(&r->from, FIRST_BUFFER) < 0) {
		stream_died(r, "sent more than memory holds", true);
		return;
	}
	n = read(w->fd, r->from.data + r->from.end, r->from.room - r->from.end);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n <= 0) {
		stream_died(r, "has ended", false);
		return;
	}
	r->from.end += (size_t)n;
	r->silent = 0;
	while (bytes_held(&r->from) >= sizeof(struct fuse_out_header)) {
		struct fuse_out_header h;
		int ret;

		memcpy(&h, r->from.data + r->from.first, sizeof(h));
		if (h.len < sizeof(h) || h.len > MESSAGE_MAX) {
			stream_died(r, "sent something that is not FUSE", true);
			return;
		}
		if (bytes_held(&r->from) < h.len)
			break;
		/* Aligned at the front, for those who look inside. */
		if (r->from.first % 8)
			bytes_reserve(&r->from, 0);
		ret = from_server(r, r->from.data + r->from.first, h.len);
		if (ret == -ENODEV) {
			over(r, 0);
			return;
		}
		if (ret < 0) {
			stream_died(r, "sent an answer that makes no sense", true);
			return;
		}
		r->from.first += h.len;
	}
	watches_update(r);
}

static void out_ready(struct watch *w, uint32_t events)
{
	struct relay *r = w->arg;
	ssize_t n = write(w->fd, r->to.data + r->to.first, bytes_held(&r->to));

	if (n < 0) {
		/* EPIPE: what it said before it ended is read first, and then its end. */
		if (errno != EAGAIN && errno != EINTR) {
			r->to.first = r->to.end = 0;
			if (errno != EPIPE && errno != ECONNRESET)
				stream_died(r, "cannot be written to", false);
		}
		watches_update(r);
		return;
	}
	r->to.first += (size_t)n;
	if (r->to.first == r->to.end)
		r->to.first = r->to.end = 0;
	watches_update(r);
}

static void aside_ready(struct watch *w, uint32_t events)
{
	struct relay *r = w->arg;

	/* At its end the stream ends as well: that is where it is noticed. */
	if (events & (EPOLLHUP | EPOLLERR))
		watch_change(r, &r->aside_watch, &r->aside_watched, false, 0);
	else
		r->backend->aside(r->backend);
}

/* Looks again at all that are kept back: those whose request is answered are dropped, those that are meant go on. */
static void doubt_fire(struct timer *t)
{
	struct relay *r = t->arg;
	size_t kept = 0;

	for (size_t i = 0; i < r->doubt_count; i++) {
		const struct request *q = table_find(&r->table, r->doubts[i].interrupt.unique);

		if (q && !interrupt_meant((pid_t)q->thread))
			r->doubts[kept++] = r->doubts[i];
		else if (q && r->phase == PHASE_UP)
			send_upstream(r, &r->doubts[i], sizeof(r->doubts[i]));
	}
	r->doubt_count = kept;
	if (kept)
		loop_timer(r->loop, t, now_ns(CLOCK_MONOTONIC) + DOUBT);
	watches_update(r);
}

/* True if the interrupt is not meant, and kept back. */
static bool doubt_keep(struct relay *r, const struct doubt *d)
{
	const struct request *q = table_find(&r->table, d->interrupt.unique);

	if (!q || interrupt_meant((pid_t)q->thread))
		return false;
	if (r->doubt_count == r->doubt_room) {
		size_t room = r->doubt_room ? r->doubt_room * 2 : 16;
		struct doubt *more = reallocarray(r->doubts, room, sizeof(*more));

		if (!more)
			return false;
		r->doubts = more;
		r->doubt_room = room;
	}
	r->doubts[r->doubt_count++] = *d;
	if (r->doubt_count == 1) {
		r->doubt = (struct timer){ .fire = doubt_fire, .arg = r };
		loop_timer(r->loop, &r->doubt, now_ns(CLOCK_MONOTONIC) + DOUBT);
	}
	return true;
}

/* One message of the kernel, at the end of r->to, where it stays unless it is answered here. */
static int from_kernel(struct relay *r, char *message, size_t n, bool *keep)
{
	struct fuse_in_header *h = (void *)message;
	struct request q = { h->unique, h->opcode, h->pid, 0 };
	int error;

	*keep = true;
	if (r->phase == PHASE_MOUNTED) {
		if (h->opcode != FUSE_INIT || n > sizeof(r->init))
			return -EPROTO;
		memcpy(r->init, message, n);
		r->init_bytes = n;
		r->phase = PHASE_INIT;
		return table_push(&r->table, &q);
	}
	error = table_request(&r->table, &q, message, n);
	if (error != TABLE_FORWARD) {
		*keep = false;
		kernel_error(r, h->unique, error);
		return 0;
	}
	switch (h->opcode) {
	case FUSE_FORGET:
	case FUSE_BATCH_FORGET:
	case FUSE_NOTIFY_REPLY:
		return 0; /* not answered */
	case FUSE_INTERRUPT:
		*keep = n < sizeof(struct doubt) || !doubt_keep(r, (const struct doubt *)message);
		return 0;
	}
	if (table_push(&r->table, &q) == 0)
		return 0;
	*keep = false;
	kernel_error(r, h->unique, ENOMEM);
	return 0;
}

static void fuse_ready(struct watch *w, uint32_t events)
{
	struct relay *r = w->arg;

	for (unsigned n = 0; n < BURST; n++) {
		struct fuse_in_header h;
		bool keep;
		ssize_t got;

		if (bytes_held(&r->to) >= FIRST_BUFFER || (r->phase != PHASE_MOUNTED && r->phase != PHASE_UP) ||
		    table_full(&r->table))
			break;
		if (bytes_reserve(&r->to, MAX(FIRST_BUFFER, r->agreed.max_write + 65536u)) < 0)
			break;
		got = read(r->fuse, r->to.data + r->to.end, r->to.room - r->to.end);
		if (got < 0) {
			if (errno == ENODEV)
				over(r, 0);
			else if (errno != EAGAIN && errno != EINTR && errno != ENOENT)
				over(r, err_set(&r->err, errno, "cannot read /dev/fuse: %s", strerror(errno)));
			break;
		}
		memcpy(&h, r->to.data + r->to.end, MIN((size_t)got, sizeof(h)));
		if ((size_t)got < sizeof(h) || h.len != (size_t)got ||
		    from_kernel(r, r->to.data + r->to.end, (size_t)got, &keep) < 0) {
			over(r, err_set(&r->err, EPROTO, "the kernel sent a FUSE message that makes no sense"));
			break;
		}
		if (keep)
			r->to.end += (size_t)got;
	}
	/* Most often the server can take it at once. */
	if (r->phase != PHASE_OVER && r->upstream.pid > 0 && bytes_held(&r->to) > 0)
		out_ready(&r->out_watch, 0);
	else
		watches_update(r);
}

static void send_ping(struct relay *r)
{
	struct fuse_in_header h = { .len = sizeof(h), .opcode = FUSE_STATFS, .nodeid = FUSE_ROOT_ID };

	r->ping = now_ns(CLOCK_MONOTONIC) & (PING_UNIQUE - 1);
	h.unique = r->ping | PING_UNIQUE;
	if (send_upstream(r, &h, sizeof(h)) < 0)
		r->ping = 0;
	watches_update(r);
}

/*
 * Once a second. Silence is counted in seconds that we saw pass, not in time: whoever stopped us as well, or suspended
 * the machine, is not the server's fault.
 */
static void each_second(struct timer *t)
{
	struct relay *r = t->arg;
	struct backend *b = r->backend;

	loop_timer(r->loop, t, now_ns(CLOCK_MONOTONIC) + SECOND);
	if (r->upstream.pid > 0 && b->tick)
		b->tick(b);
	if (r->phase == PHASE_INIT) {
		progress(r, false);
		r->silent++;
		if (b->answer_within && r->silent > b->answer_within)
			stream_died(r, "did not come up in time", true);
	} else if (r->phase == PHASE_UP && b->silent_after) {
		if (r->ping && ++r->silent > b->silent_after)
			stream_died(r, "does not answer any more", true);
		else if (!r->ping)
			send_ping(r);
	}
}

static void signal_ready(struct watch *w, uint32_t events)
{
	struct relay *r = w->arg;
	struct signalfd_siginfo info;

	if (read(w->fd, &info, sizeof(info)) == sizeof(info))
		over(r, 0);
}

static void unmounted(void *arg)
{
	over(arg, 0);
}

static int relay_mount(struct relay *r, struct err *e)
{
	static const struct fuse_lowlevel_ops none = { 0 };
	struct stat st;
	const char *const argv[] = { "vmenvfs", "-o",
				     r->options->mount_options ? r->options->mount_options : "fsname=vmenvfs", NULL };
	struct fuse_args args = FUSE_ARGS_INIT(3, (char **)argv);

	if (stat(r->options->mountpoint, &st) < 0)
		return err_set(e, errno, "cannot mount on %s: %s", r->options->mountpoint, strerror(errno));
	if (!S_ISDIR(st.st_mode))
		return err_set(e, ENOTDIR, "cannot mount on %s: not a directory", r->options->mountpoint);
	errno = 0;
	r->session = fuse_session_new(&args, &none, sizeof(none), NULL);
	fuse_opt_free_args(&args);
	if (!r->session)
		return err_set(e, EINVAL, "cannot make a FUSE session (mount options: %s)", argv[2]);
	if (fuse_session_mount(r->session, r->options->mountpoint) != 0) {
		fuse_session_destroy(r->session);
		r->session = NULL;
		return err_set(e, errno ? errno : EIO, "cannot mount %s", r->options->mountpoint);
	}
	r->fuse = fuse_session_fd(r->session);
	if (fcntl(r->fuse, F_SETFL, fcntl(r->fuse, F_GETFL) | O_NONBLOCK) < 0)
		return err_set(e, errno, "cannot set O_NONBLOCK: %s", strerror(errno));
	return 0;
}

static int relay_start(struct relay *r, struct err *e)
{
	sigset_t set;
	int ret;

	signal(SIGPIPE, SIG_IGN);
	sigemptyset(&set);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGHUP);
	sigprocmask(SIG_BLOCK, &set, NULL);
	r->signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	r->loop = loop_new();
	if (r->signals < 0 || !r->loop || table_init(&r->table) < 0)
		return err_set(e, errno ? errno : ENOMEM, "cannot set up the event loop: %s", strerror(errno));
	ret = relay_mount(r, e);
	if (ret == 0)
		ret = upstream_start(r, e);
	if (ret < 0)
		return ret;
	r->fuse_watch = (struct watch){ r->fuse, fuse_ready, r };
	r->signal_watch = (struct watch){ r->signals, signal_ready, r };
	r->second = (struct timer){ .fire = each_second, .arg = r };
	loop_add(r->loop, &r->signal_watch, EPOLLIN);
	mount_watch_start(&r->mount, r->loop, r->options->mountpoint, unmounted, r);
	loop_timer(r->loop, &r->second, now_ns(CLOCK_MONOTONIC) + SECOND);
	watches_update(r);
	return 0;
}

int relay_run(const struct host_options *o, struct backend *b, struct err *e)
{
	AUTO_FREE struct relay *r = calloc(1, sizeof(*r));
	int ret, status;

	if (!r)
		return err_set(e, ENOMEM, "out of memory");
	r->options = o;
	r->backend = b;
	r->fuse = r->signals = -1;
	r->in_watch = (struct watch){ -1, in_ready, r };
	r->out_watch = (struct watch){ -1, out_ready, r };
	r->aside_watch = (struct watch){ -1, aside_ready, r };
	ret = relay_start(r, e);
	if (ret == 0) {
		loop_run(r->loop);
		ret = r->status;
		if (ret < 0 && e)
			*e = r->err;
	}
	progress(r, true);
	if (r->session) {
		fail_pending(r);
		/* What is mounted there by now may be somebody else's. The connection ends with its descriptor. */
		if (!r->mount.gone)
			fuse_session_unmount(r->session);
		else
			close(r->fuse);
	}
	mount_watch_stop(&r->mount);
	if (b->ending)
		b->ending(b);
	upstream_stop(r, r->answered ? (int)b->end_within * 1000 : 100, &status);
	if (r->session)
		fuse_session_destroy(r->session);
	if (r->signals >= 0)
		close(r->signals);
	loop_free(r->loop);
	table_free(&r->table);
	free(r->doubts);
	free(r->to.data);
	free(r->from.data);
	return ret;
}
