/* SPDX-License-Identifier: Apache-2.0 */
/* `wait`, and the files whose text takes time to make. */
#include <poll.h>

#include "server.h"

static const char done_text[] = "done\n";

static uint64_t wait_size(const struct node *n)
{
	(void)n;
	return sizeof(done_text) - 1;
}

static void waited(struct simple *w)
{
	fuse_reply_buf(w->pending.req, done_text, MIN(w->bytes, sizeof(done_text) - 1));
}

static void wait_read(struct handle *h, fuse_req_t req, size_t size, uint64_t offset)
{
	struct sandbox *s = h->node.sandbox;
	struct err e = { 0 };
	struct simple *w;

	if (s->object.gone) {
		fuse_reply_err(req, ENOENT);
	} else if (offset) {
		reply_slice(req, done_text, sizeof(done_text) - 1, size, offset);
	} else if (s->running && h->nonblock) {
		fuse_reply_err(req, EAGAIN);
	} else {
		w = simple_new(h->server, req, h, &h->node, "wait", waited);
		if (!w)
			return;
		w->bytes = size;
		simple_end(w, sandbox_wait(s, &w->pending.op, &e), &e);
	}
}

static unsigned wait_poll(struct handle *h)
{
	return h->node.sandbox->running ? 0 : POLLIN | POLLRDNORM;
}

const struct behaviour wait_file = { .read = wait_read, .poll = wait_poll, .size = wait_size };

/* The open waits until the text is there, so that reads are slices of one text. */
struct digest {
	struct pending pending;
	struct handle *handle;
};

static void digest_end(struct digest *d, int status, const struct err *e)
{
	struct handle *h = d->handle;

	if (status < 0) {
		request_fail(h->server, d->pending.req, &h->node, "machine/digest", e);
		handle_put(h);
	} else {
		h->text.n = h->text.bytes ? strlen(h->text.bytes) : 0;
		handle_opened(h, d->pending.req);
	}
	free(d);
}

static void digest_done(struct op *op, int status, const struct err *e)
{
	struct digest *d = op->arg;

	pending_end(&d->pending);
	digest_end(d, status, e);
}

static void digest_stop(struct pending *p, int error)
{
	struct digest *d = (struct digest *)p;

	op_cancel(&p->op);
	pending_end(p);
	fuse_reply_err(p->req, error);
	handle_put(d->handle);
	free(d);
}

static int digest_open(struct handle *h, fuse_req_t req, struct err *e)
{
	struct digest *d = calloc(1, sizeof(*d));
	int r;

	if (!d)
		return err_set(e, ENOMEM, "no memory for an open file");
	d->handle = h;
	d->pending.op = (struct op){ .done = digest_done, .arg = d };
	d->pending.stop = digest_stop;
	r = sandbox_digest(h->node.sandbox, &h->text.bytes, &d->pending.op, e);
	if (r < 0) {
		free(d);
		return r;
	}
	d->pending.req = req;
	if (r == VMENV_PENDING)
		pending_start(&d->pending, h->server, req, h);
	else
		digest_end(d, 0, NULL);
	return VMENV_PENDING;
}

static void digest_read(struct handle *h, fuse_req_t req, size_t size, uint64_t offset)
{
	reply_slice(req, h->text.bytes, h->text.n, size, offset);
}

/* The form is fixed: three words, three hexadecimal SHA-256. */
static uint64_t digest_size(const struct node *n)
{
	return n->sandbox->state == SANDBOX_FROZEN ? sizeof("memory \ndisk \nstate \n") - 1 + 3 * 64 : 0;
}

const struct behaviour digest_file = { .open = digest_open, .read = digest_read, .size = digest_size };
