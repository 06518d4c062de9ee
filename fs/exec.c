/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `exec` and `exec.json`. A flush with bytes that have not run starts them and is answered when the run has ended; a
 * read does the same and gives the output as it comes. No flush is known to be the last, and a release is too late:
 * nobody waits for it. An interrupted wait kills the run.
 */
#include <poll.h>

#include "exec.h"

#define JSON_MAX (2 * SCRIPT_MAX + 65536)

/* A flush or a read that waits for a run. */
struct exec_wait {
	struct pending pending;
	struct exec_wait *next; /* in run->waiting */
	struct exec_run *run;
	struct handle *handle;
	bool flush;
	size_t size;
	uint64_t offset;
};

static bool is_json(const struct handle *h)
{
	return h->node.entry->behaviour == &exec_json_file;
}

static void run_put(struct exec_run *x)
{
	if (--x->references)
		return;
	if (x->run)
		object_put(&x->run->object);
	exec_answer_free(x->answer);
	free(x);
}

/* Takes it out of the lists; its request may then be answered. */
static void wait_end(struct exec_wait *w)
{
	struct exec_wait **p = &w->run->waiting;

	while (*p != w)
		p = &(*p)->next;
	*p = w->next;
	pending_end(&w->pending);
}

static void wake(struct exec_run *x);

static void answered(struct job *j)
{
	struct exec_run *x = j->arg;

	x->answering = false;
	/* Without the file nobody is left to tell, and the server may be gone. */
	if (x->references > 1) {
		wake(x);
		server_wake(x->server);
	}
	run_put(x);
}

/* Has the answer of a run that is over made, once: at once if it is short. */
static void answer(struct exec_run *x)
{
	if (x->answer || x->unanswerable.code || x->status < 0)
		return;
	if (exec_answer_new(x->run, &x->answer, &x->unanswerable) < 0)
		return;
	x->answer->job.done = answered;
	x->answer->job.arg = x;
	if (!exec_answer_long(x->answer)) {
		x->answer->job.work(&x->answer->job);
	} else if (core_job(x->server->core, &x->answer->job, &x->unanswerable) == 0) {
		x->answering = true;
		x->references++;
	} else {
		exec_answer_free(steal_ptr(&x->answer));
	}
}

/* Whether a read has something to say: the answer of exec.json comes when the run is over, output as it is printed. */
static bool readable(const struct handle *h, struct exec_run *x, uint64_t at)
{
	if (!is_json(h))
		return x->done || at < x->run->stored[STREAM_STDOUT];
	if (x->done)
		answer(x);
	return x->done && !x->answering;
}

static bool try_read(struct handle *h, struct exec_run *x, fuse_req_t req, size_t size, uint64_t offset);

/* Answers those who can be: the readers of what is there, and all when the run is over. */
static void wake(struct exec_run *x)
{
	for (struct exec_wait *w = x->waiting, *next; w; w = next) {
		next = w->next;
		if (w->flush ? !x->done : !readable(w->handle, x, w->offset - x->start))
			continue;
		wait_end(w);
		if (w->flush)
			fuse_reply_err(w->pending.req, -x->status);
		else
			try_read(w->handle, x, w->pending.req, w->size, w->offset);
		free(w);
	}
}

static void over(struct exec_run *x, int status)
{
	x->done = true;
	x->status = status;
	wake(x);
	server_wake(x->server);
	run_put(x);
}

static void run_done(struct op *op, int status, const struct err *e)
{
	struct exec_run *x = op->arg;

	if (status < 0)
		core_fail(x->server->core, x->run->sandbox->name, "exec", e);
	over(x, status);
}

/* Kills the run, with all its descendants; whoever else waits for it is told so. */
static void cut(struct exec_run *x)
{
	if (x->done)
		return;
	op_cancel(&x->op);
	over(x, -EINTR);
}

static void wait_stop(struct pending *p, int error)
{
	struct exec_wait *w = (struct exec_wait *)p;
	struct exec_run *x = w->run;

	wait_end(w);
	fuse_reply_err(p->req, error);
	free(w);
	cut(x);
}

static void wait_start(struct handle *h, struct exec_run *x, fuse_req_t req, bool flush, size_t size, uint64_t offset)
{
	struct exec_wait *w = calloc(1, sizeof(*w));

	if (!w) {
		fuse_reply_err(req, ENOMEM);
		return;
	}
	*w = (struct exec_wait){ .next = x->waiting, .run = x, .handle = h, .flush = flush, .size = size, .offset = offset };
	w->pending.stop = wait_stop;
	x->waiting = w;
	pending_start(&w->pending, h->server, req, h);
}

/* Starts what was written. The file's earlier run, if any, goes on and is no longer read here. */
static int start(struct handle *h, struct err *e)
{
	struct exec_request request = { .q = { .timeout_ms = UINT64_MAX, .output_limit = UINT64_MAX } };
	struct exec_run *x = calloc(1, sizeof(*x)), *old = h->own;
	int r;

	if (!x)
		return err_set(e, ENOMEM, "no memory for a run");
	*x = (struct exec_run){ .references = 2, .server = h->server, .op = { .done = run_done, .arg = x } };
	if (is_json(h)) {
		r = exec_json_parse(h->text.bytes, h->text.n, &request, e);
	} else {
		request.q.script = h->text.bytes;
		request.q.script_bytes = h->text.n;
		r = 0;
	}
	if (r == 0 && node_gone(&h->node))
		r = err_set(e, ENOENT, "the sandbox is gone");
	if (r == 0)
		r = run_start(h->node.sandbox, &request.q, &x->run, &x->op, e);
	exec_request_free(&request);
	buffer_free(&h->text);
	h->unapplied = false;
	if (r < 0) {
		x->run = NULL;
		free(x);
		return r;
	}
	object_get(&x->run->object);
	server_watch_run(h->server, x->run);
	h->own = x;
	h->seen = 0;
	if (old)
		run_put(old);
	if (r != VMENV_PENDING)
		over(x, 0);
	return 0;
}

static void read_answer(struct handle *h, const struct exec_run *x, fuse_req_t req, size_t size, uint64_t at)
{
	const struct err *e = x->answer ? &x->answer->err : &x->unanswerable;

	if (e->code)
		request_fail(h->server, req, &h->node, h->node.entry->name, e);
	else
		exec_answer_read(x->answer, req, size, at);
}

/* False if there is nothing to say yet. */
static bool try_read(struct handle *h, struct exec_run *x, fuse_req_t req, size_t size, uint64_t offset)
{
	uint64_t at, stored = x->run->stored[STREAM_STDOUT];

	/* A written file's offset is where the writes left it, so the output begins at the first read, or where a reader
	 * goes back to. */
	if (!x->placed || offset < x->start) {
		x->placed = true;
		x->start = offset;
	}
	at = offset - x->start;
	if (!readable(h, x, at))
		return false;
	h->seen = at + size;
	if (x->done && x->status < 0 && (is_json(h) || at >= stored)) {
		fuse_reply_err(req, -x->status);
	} else if (is_json(h)) {
		read_answer(h, x, req, size, at);
	} else {
		h->seen = MIN(h->seen, MAX(stored, at));
		reply_file(req, stored ? run_output_fd(x->run, STREAM_STDOUT) : -1, stored, size, at);
	}
	return true;
}

static void exec_read(struct handle *h, fuse_req_t req, size_t size, uint64_t offset)
{
	struct err e = { 0 };
	struct exec_run *x;

	if (h->unapplied) {
		if (start(h, &e) < 0) {
			request_fail(h->server, req, &h->node, h->node.entry->name, &e);
			return;
		}
		x = h->own;
		x->read_started = !h->nonblock;
	}
	x = h->own;
	if (!x) {
		text_read(h, req, size, offset);
	} else if (!try_read(h, x, req, size, offset)) {
		if (h->nonblock)
			fuse_reply_err(req, EAGAIN);
		else
			wait_start(h, x, req, false, size, offset);
	}
}

static void exec_flush(struct handle *h, fuse_req_t req)
{
	struct err e = { 0 };
	struct exec_run *x;

	if (!h->unapplied) {
		fuse_reply_err(req, 0);
		return;
	}
	if (start(h, &e) < 0) {
		request_fail(h->server, req, &h->node, h->node.entry->name, &e);
		return;
	}
	x = h->own;
	if (h->nonblock || x->done)
		fuse_reply_err(req, h->nonblock ? 0 : -x->status);
	else
		wait_start(h, x, req, true, 0, 0);
}

/* JSON that is complete is judged in the write, where every writer looks; what is left, when it is to run. */
static int check(struct handle *h, struct err *e)
{
	struct exec_request request = { 0 };
	int r;

	if (!is_json(h) || json_incomplete(&h->text))
		return 0;
	r = exec_json_parse(h->text.bytes, h->text.n, &request, e);
	exec_request_free(&request);
	return r;
}

static void exec_write(struct handle *h, fuse_req_t req, const char *bytes, size_t size, uint64_t offset)
{
	size_t limit = is_json(h) ? JSON_MAX : SCRIPT_MAX;
	struct err e = { 0 };
	int r;

	(void)offset;
	if (h->overfull || size > limit - h->text.n)
		r = err_set(&e, EFBIG, "%s takes at most %zu bytes", h->node.entry->name, limit);
	else if (buffer_add(&h->text, bytes, size) < 0)
		r = err_set(&e, ENOMEM, "no memory for %zu more bytes", size);
	else
		r = check(h, &e);
	if (r < 0) {
		/* What is not whole does not run. */
		buffer_free(&h->text);
		h->unapplied = false;
		h->overfull |= r == -EFBIG || r == -ENOMEM;
		request_fail(h->server, req, &h->node, h->node.entry->name, &e);
		return;
	}
	h->unapplied = h->text.n > 0;
	fuse_reply_write(req, size);
}

/* The reader that started a run is gone: nobody can read its output here any more. */
static void exec_release(struct handle *h)
{
	struct exec_run *x = steal_ptr(&h->own);

	if (!x)
		return;
	if (x->read_started && !x->done) {
		x->references--; /* the operation's is there, and goes with it */
		cut(x);
	} else {
		run_put(x);
	}
}

static unsigned exec_poll(struct handle *h)
{
	struct exec_run *x = h->own;
	unsigned events = POLLOUT | POLLWRNORM;

	if (!x || h->unapplied || readable(h, x, h->seen))
		events |= POLLIN | POLLRDNORM;
	return events;
}

static void exec_grown(struct handle *h, struct run *r)
{
	struct exec_run *x = h->own;

	if (x && x->run == r && x->waiting)
		wake(x);
}

/* What is refused is refused here, where every shell looks: bash and dash do not look at what close returns. */
static int exec_open(struct handle *h, fuse_req_t req, struct err *e)
{
	(void)req;
	return h->writes ? sandbox_takes_runs(h->node.sandbox, e) : 0;
}

const struct behaviour exec_file = {
	.open = exec_open, .read = exec_read, .write = exec_write, .flush = exec_flush, .release = exec_release, .poll = exec_poll,
	.grown = exec_grown, .size = text_size, .resize = resize_nothing,
};

const struct behaviour exec_json_file = {
	.open = exec_open, .read = exec_read, .write = exec_write, .flush = exec_flush, .release = exec_release, .poll = exec_poll,
	.grown = exec_grown, .size = text_size, .resize = resize_nothing,
};

char *exec_usage(const struct node *n, size_t *bytes)
{
	char *text = strdup("write a shell script here: it runs when the file is closed; then read stdout and exit_code\n");

	(void)n;
	*bytes = text ? strlen(text) : 0;
	return text;
}
