/* SPDX-License-Identifier: Apache-2.0 */
/* Open files: what is the same for every kind of file; the rest is in its behaviour. */
#include <poll.h>

#include "server.h"

static struct handle *handle_of(const struct fuse_file_info *fi)
{
	return (struct handle *)(uintptr_t)fi->fh;
}

static struct handle *handle_new(const struct node *n, const struct fuse_file_info *fi)
{
	struct handle *h = calloc(1, sizeof(*h));

	if (!h)
		return NULL;
	h->server = n->server;
	h->node = *n;
	if (n->entry->newest)
		h->node.run = n->sandbox->runs;
	node_hold(&h->node);
	h->references = 1;
	h->nonblock = fi->flags & O_NONBLOCK;
	h->writes = (fi->flags & O_ACCMODE) != O_RDONLY;
	h->reads = (fi->flags & O_ACCMODE) != O_WRONLY;
	h->next = n->server->handles;
	h->link = &n->server->handles;
	if (h->next)
		h->next->link = &h->next;
	n->server->handles = h;
	return h;
}

void handle_put(struct handle *h)
{
	if (--h->references)
		return;
	*h->link = h->next;
	if (h->next)
		h->next->link = h->link;
	if (h->poll)
		fuse_pollhandle_destroy(h->poll);
	buffer_free(&h->text);
	node_drop(&h->node);
	free(h);
}

static void handle_close(struct handle *h)
{
	if (h->node.entry->behaviour->release)
		h->node.entry->behaviour->release(h);
	handle_put(h);
}

/* -ENOENT from an answer means that the opener is gone: no release will come. */
void handle_opened(struct handle *h, fuse_req_t req)
{
	struct fuse_file_info fi = { .fh = (uintptr_t)h, .direct_io = 1 };

	if (fuse_reply_open(req, &fi) == -ENOENT)
		handle_close(h);
}

void handle_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	struct server *s = fuse_req_userdata(req);
	struct err e = { 0 };
	struct handle *h;
	struct node n;
	int r = node_resolve(s, ino, &n);

	if (r < 0 || !n.entry) {
		fuse_reply_err(req, r < 0 ? -r : EISDIR);
		return;
	}
	if ((fi->flags & O_ACCMODE) != O_RDONLY && !(n.entry->mode & 0222)) {
		err_set(&e, EACCES, "%s is a result: it is only read", n.entry->name);
		request_fail(s, req, &n, n.entry->name, &e);
		return;
	}
	h = handle_new(&n, fi);
	if (!h) {
		fuse_reply_err(req, ENOMEM);
		return;
	}
	r = n.entry->behaviour->open ? n.entry->behaviour->open(h, req, &e) : 0;
	if (r == VMENV_PENDING)
		return;
	if (r < 0) {
		request_fail(s, req, &n, n.entry->name ? n.entry->name : n.key, &e);
		handle_put(h);
		return;
	}
	handle_opened(h, req);
}

void handle_create(fuse_req_t req, const struct node *n, const struct fuse_entry_param *entry, struct fuse_file_info *fi)
{
	struct handle *h = handle_new(n, fi);
	struct err e = { 0 };
	int r;

	if (!h) {
		fuse_reply_err(req, ENOMEM);
		return;
	}
	r = n->entry->behaviour->open ? n->entry->behaviour->open(h, req, &e) : 0;
	if (r < 0) {
		request_fail(n->server, req, n, n->key, &e);
		handle_put(h);
		return;
	}
	fi->fh = (uintptr_t)h;
	fi->direct_io = 1;
	if (fuse_reply_create(req, entry, fi) == -ENOENT)
		handle_close(h);
}

void handle_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset, struct fuse_file_info *fi)
{
	struct handle *h = handle_of(fi);
	const struct behaviour *b = h->node.entry->behaviour;

	(void)ino;
	h->nonblock = fi->flags & O_NONBLOCK;
	if (b->read)
		b->read(h, req, size, (uint64_t)offset);
	else
		fuse_reply_buf(req, NULL, 0);
}

void handle_write(fuse_req_t req, fuse_ino_t ino, const char *bytes, size_t size, off_t offset, struct fuse_file_info *fi)
{
	struct handle *h = handle_of(fi);
	const struct behaviour *b = h->node.entry->behaviour;

	(void)ino;
	h->nonblock = fi->flags & O_NONBLOCK;
	if (node_gone(&h->node))
		fuse_reply_err(req, ENOENT);
	else if (b->write)
		b->write(h, req, bytes, size, (uint64_t)offset);
	else
		fuse_reply_err(req, EACCES);
}

void handle_flush(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	struct handle *h = handle_of(fi);

	(void)ino;
	if (h->node.entry->behaviour->flush)
		h->node.entry->behaviour->flush(h, req);
	else
		fuse_reply_err(req, 0);
}

void handle_fsync(fuse_req_t req, fuse_ino_t ino, int data_only, struct fuse_file_info *fi)
{
	struct handle *h = handle_of(fi);

	(void)ino;
	(void)data_only;
	if (h->node.entry->behaviour->fsync)
		h->node.entry->behaviour->fsync(h, req);
	else
		fuse_reply_err(req, 0);
}

void handle_release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	(void)ino;
	handle_close(handle_of(fi));
	fuse_reply_err(req, 0);
}

static unsigned handle_ready(struct handle *h)
{
	const struct behaviour *b = h->node.entry->behaviour;

	if (node_gone(&h->node))
		return POLLIN | POLLRDNORM | POLLERR | POLLHUP;
	return b->poll ? b->poll(h) : POLLIN | POLLRDNORM | POLLOUT | POLLWRNORM;
}

void handle_poll(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi, struct fuse_pollhandle *ph)
{
	struct handle *h = handle_of(fi);

	(void)ino;
	if (ph) {
		if (h->poll)
			fuse_pollhandle_destroy(h->poll);
		h->poll = ph;
	}
	fuse_reply_poll(req, handle_ready(h));
}

void server_wake(struct server *s)
{
	for (struct handle *h = s->handles; h; h = h->next) {
		if (!h->poll || !handle_ready(h))
			continue;
		fuse_lowlevel_notify_poll(h->poll);
		fuse_pollhandle_destroy(h->poll);
		h->poll = NULL;
	}
}

static void run_grown(struct run *r, enum stream which)
{
	struct server *s = r->grown_arg;

	(void)which;
	for (struct handle *h = s->handles, *next; h; h = next) {
		next = h->next;
		if (h->node.entry->behaviour->grown)
			h->node.entry->behaviour->grown(h, r);
	}
	server_wake(s);
}

void server_watch_run(struct server *s, struct run *r)
{
	r->grown_arg = s;
	r->grown = run_grown;
}

/* The session is over: no more releases come. */
void server_close_handles(struct server *s)
{
	for (struct handle *h = s->handles, *next; h; h = next) {
		next = h->next;
		handle_close(h);
	}
}
