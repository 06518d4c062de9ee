/* SPDX-License-Identifier: Apache-2.0 */
/* Files that are read from a descriptor and grow: what runs print, logs, the console; and the uploads. */
#include <poll.h>
#include <pthread.h>
#include <sys/stat.h>

#include "server.h"

static uint64_t grown_size(const struct node *n)
{
	uint64_t size = 0;

	return n->entry->source(n, &size) < 0 ? 0 : size;
}

/* The descriptor is asked for at each read: it may come and go while the file is open. */
static void grown_read(struct handle *h, fuse_req_t req, size_t size, uint64_t offset)
{
	uint64_t end = 0;
	int fd = h->node.entry->source(&h->node, &end);

	h->seen = MIN(offset + size, MAX(end, offset));
	reply_file(req, fd, end, size, offset);
}

const struct behaviour grown_file = { .read = grown_read, .size = grown_size };

/* What a run prints: whoever polls waits for more of it, or for its end. */
static unsigned result_poll(struct handle *h)
{
	const struct run *r = h->node.run;

	if (r && r->state <= RUN_RUNNING && h->seen >= r->stored[h->node.entry->which])
		return 0;
	return POLLIN | POLLRDNORM;
}

static int result_open(struct handle *h, fuse_req_t req, struct err *e)
{
	(void)req;
	(void)e;
	if (h->node.run)
		server_watch_run(h->server, h->node.run);
	return 0;
}

const struct behaviour result_file = { .open = result_open, .read = grown_read, .poll = result_poll, .size = grown_size };

static void console_written(struct simple *w)
{
	fuse_reply_write(w->pending.req, w->bytes);
}

static void console_write(struct handle *h, fuse_req_t req, const char *bytes, size_t size, uint64_t offset)
{
	struct simple *w = simple_new(h->server, req, h, &h->node, "console", console_written);
	struct err e = { 0 };

	(void)offset;
	if (!w)
		return;
	w->bytes = size;
	simple_end(w, sandbox_console_write(h->node.sandbox, bytes, size, &w->pending.op, &e), &e);
}

const struct behaviour console_file = {
	.read = grown_read, .write = console_write, .size = grown_size, .resize = resize_nothing,
};

static void upload_read(struct handle *h, fuse_req_t req, size_t size, uint64_t offset)
{
	enum template_upload which = (enum template_upload)h->node.entry->which;
	struct template *t = h->node.template;

	reply_file(req, template_upload_read_fd(t, which), (uint64_t)template_upload_size(t, which), size, offset);
}

static uint64_t upload_size(const struct node *n)
{
	return (uint64_t)template_upload_size(n->template, (enum template_upload)n->entry->which);
}

static int upload_open(struct handle *h, fuse_req_t req, struct err *e)
{
	int fd = 0;

	(void)req;
	if (h->writes)
		fd = template_upload(h->node.template, (enum template_upload)h->node.entry->which, e);
	return MIN(fd, 0);
}

/* It is asked for at each write, so that one that is still open when a bake begins is refused. */
static void upload_write(struct handle *h, fuse_req_t req, const char *bytes, size_t size, uint64_t offset)
{
	struct err e = { 0 };
	int fd = template_upload(h->node.template, (enum template_upload)h->node.entry->which, &e);
	ssize_t n = fd < 0 ? -1 : pwrite(fd, bytes, size, (off_t)offset);

	if (fd >= 0 && n < 0)
		err_set(&e, errno, "cannot write %s: %s", h->node.entry->name, strerror(errno));
	if (n < 0)
		request_fail(h->server, req, &h->node, h->node.entry->name, &e);
	else
		fuse_reply_write(req, (size_t)n);
}

static int upload_resize(const struct node *n, uint64_t size, struct err *e)
{
	int fd = template_upload(n->template, (enum template_upload)n->entry->which, e);

	if (fd < 0)
		return fd;
	if (ftruncate(fd, (off_t)size) < 0)
		return err_set(e, errno, "cannot make %s %llu bytes long: %s", n->entry->name, (unsigned long long)size,
			       strerror(errno));
	return 0;
}

/* fsync of an upload takes as long as the disk does: a thread of its own waits for it. The template's row is durable already. */
struct sync {
	struct watch watch; /* the end that the loop reads */
	struct server *server;
	fuse_req_t req;
	int fd, folder, pipe, error; /* the thread's, until it writes to the pipe */
};

static void *sync_thread(void *arg)
{
	struct sync *s = arg;

	s->error = fsync(s->fd) < 0 || fsync(s->folder) < 0 ? errno : 0;
	while (write(s->pipe, "", 1) < 0 && errno == EINTR)
		;
	return NULL;
}

static void sync_free(struct sync *s)
{
	if (s->fd >= 0)
		close(s->fd);
	if (s->folder >= 0)
		close(s->folder);
	close(s->pipe);
	close(s->watch.fd);
	free(s);
}

static void sync_done(struct watch *w, uint32_t events)
{
	struct sync *s = w->arg;

	(void)events;
	loop_remove(s->server->loop, w);
	fuse_reply_err(s->req, s->error);
	sync_free(s);
}

static void upload_fsync(struct handle *h, fuse_req_t req)
{
	int fd = template_upload_read_fd(h->node.template, (enum template_upload)h->node.entry->which), pipes[2], r;
	struct sync *s = calloc(1, sizeof(*s));
	pthread_t thread;

	if (!s || fd < 0 || pipe2(pipes, O_CLOEXEC) < 0) {
		free(s);
		fuse_reply_err(req, fd < 0 ? 0 : ENOMEM);
		return;
	}
	*s = (struct sync){ .watch = { pipes[0], sync_done, s }, .server = h->server, .req = req, .pipe = pipes[1] };
	s->fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
	s->folder = fcntl(template_folder_fd(h->node.template), F_DUPFD_CLOEXEC, 3);
	r = s->fd < 0 || s->folder < 0 ? EMFILE : -loop_add(h->server->loop, &s->watch, EPOLLIN);
	if (!r) {
		r = pthread_create(&thread, NULL, sync_thread, s);
		if (!r) {
			pthread_detach(thread);
			return;
		}
		loop_remove(h->server->loop, &s->watch);
	}
	sync_free(s);
	fuse_reply_err(req, r);
}

const struct behaviour upload_file = {
	.open = upload_open, .read = upload_read, .write = upload_write, .fsync = upload_fsync,
	.size = upload_size, .resize = upload_resize,
};
