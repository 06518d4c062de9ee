/* SPDX-License-Identifier: Apache-2.0 */
/* Requests that wait, and the answers that several kinds of file give. */
#include "interrupt.h"
#include "server.h"

#define JSON_EARLY_MAX 65536u /* bytes of a text that is judged before it is whole */
#define CUT_MAX 8u           /* bytes of what a text may be cut within */
#define DOUBT_NS 100000000u /* how often a request with a housekeeping signal is looked at again */

/* libfuse may call this with the request locked: only a note is taken. */
static void interrupted(fuse_req_t req, void *data)
{
	struct pending *p = data;

	(void)req;
	p->interrupted = true;
	p->server->interrupted = true;
}

void pending_start(struct pending *p, struct server *s, fuse_req_t req, struct handle *h)
{
	p->server = s;
	p->req = req;
	p->handle = h;
	p->interrupted = p->doubtful = false;
	if (h)
		h->references++;
	p->next = s->pending;
	p->link = &s->pending;
	if (p->next)
		p->next->link = &p->next;
	s->pending = p;
	fuse_req_interrupt_func(req, interrupted, p);
}

void pending_end(struct pending *p)
{
	fuse_req_interrupt_func(p->req, NULL, NULL);
	*p->link = p->next;
	if (p->next)
		p->next->link = p->link;
	if (p->handle)
		handle_put(p->handle);
	p->handle = NULL;
}

static void look_again(struct timer *t)
{
	struct server *s = t->arg;

	s->doubting = false;
	for (struct pending *p = s->pending; p; p = p->next)
		if (p->doubtful)
			p->interrupted = s->interrupted = true;
	pending_interrupts(s);
}

static struct pending *first_interrupted(struct server *s)
{
	for (struct pending *p = s->pending; p; p = p->next) {
		if (!p->interrupted)
			continue;
		p->interrupted = false;
		if (!s->local || interrupt_meant(fuse_req_ctx(p->req)->pid))
			return p;
		p->doubtful = true;
		if (s->doubting)
			continue;
		s->doubting = true;
		s->doubt.fire = look_again;
		s->doubt.arg = s;
		loop_timer(s->loop, &s->doubt, now_ns(CLOCK_MONOTONIC) + DOUBT_NS);
	}
	return NULL;
}

void pending_interrupts(struct server *s)
{
	struct pending *p;

	if (!s->interrupted)
		return;
	s->interrupted = false;
	/* Stopping one may end others: start anew each time. */
	while ((p = first_interrupted(s)))
		p->stop(p, EINTR);
}

void pending_stop_all(struct server *s, int error)
{
	while (s->pending)
		s->pending->stop(s->pending, error);
	loop_timer_cancel(s->loop, &s->doubt);
}

static void simple_done(struct op *op, int status, const struct err *e)
{
	struct simple *w = op->arg;

	pending_end(&w->pending);
	if (status < 0)
		request_fail(w->pending.server, w->pending.req, &w->node, w->what, e);
	else
		w->answer(w);
	node_drop(&w->node);
	free(w);
}

static void simple_stop(struct pending *p, int error)
{
	struct simple *w = (struct simple *)p;

	op_cancel(&p->op);
	pending_end(p);
	fuse_reply_err(p->req, error);
	node_drop(&w->node);
	free(w);
}

struct simple *simple_new(struct server *s, fuse_req_t req, struct handle *h, const struct node *n, const char *what,
			  void (*answer)(struct simple *w))
{
	struct simple *w = calloc(1, sizeof(*w));

	if (!w) {
		fuse_reply_err(req, ENOMEM);
		return NULL;
	}
	w->pending.server = s;
	w->pending.req = req;
	w->pending.handle = h;
	w->pending.stop = simple_stop;
	w->pending.op.done = simple_done;
	w->pending.op.arg = w;
	w->node = *n;
	node_hold(&w->node);
	w->answer = answer;
	snprintf(w->what, sizeof(w->what), "%s", what);
	return w;
}

void simple_end(struct simple *w, int status, struct err *e)
{
	if (status == VMENV_PENDING) {
		pending_start(&w->pending, w->pending.server, w->pending.req, w->pending.handle);
		return;
	}
	if (status < 0)
		request_fail(w->pending.server, w->pending.req, &w->node, w->what, e);
	else
		w->answer(w);
	node_drop(&w->node);
	free(w);
}

void request_fail(struct server *s, fuse_req_t req, const struct node *n, const char *what, const struct err *e)
{
	char subject[NAME_LIMIT + 16];

	core_fail(s->core, node_subject(n, subject, sizeof(subject)), what, e);
	fuse_reply_err(req, e->code ? e->code : EIO);
}

void reply_slice(fuse_req_t req, const char *text, size_t n, size_t size, uint64_t offset)
{
	if (offset >= n)
		fuse_reply_buf(req, NULL, 0);
	else
		fuse_reply_buf(req, text + offset, MIN(size, n - (size_t)offset));
}

void reply_file(fuse_req_t req, int fd, uint64_t end, size_t size, uint64_t offset)
{
	AUTO_FREE char *bytes = NULL;
	ssize_t n;

	if (fd < 0 || offset >= end) {
		fuse_reply_buf(req, NULL, 0);
		return;
	}
	size = (size_t)MIN(size, end - offset);
	bytes = malloc(size);
	if (!bytes) {
		fuse_reply_err(req, ENOMEM);
		return;
	}
	n = pread(fd, bytes, size, (off_t)offset);
	if (n < 0)
		fuse_reply_err(req, errno);
	else
		fuse_reply_buf(req, bytes, (size_t)n);
}

int buffer_add(struct buffer *b, const void *bytes, size_t n)
{
	if (n > b->room - b->n) {
		size_t room = MAX(b->room * 2, b->n + n);
		char *grown = realloc(b->bytes, room);

		if (!grown)
			return -ENOMEM;
		b->bytes = grown;
		b->room = room;
	}
	if (n)
		memcpy(b->bytes + b->n, bytes, n);
	b->n += n;
	return 0;
}

void buffer_free(struct buffer *b)
{
	free(b->bytes);
	*b = (struct buffer){ 0 };
}

enum judgement { JSON_WHOLE, JSON_ENDS_EARLY, JSON_WRONG_AT_END, JSON_WRONG };

static enum judgement judge(const char *bytes, size_t n)
{
	json_error_t error;
	json_t *json = json_loadb(bytes, n, 0, &error);

	if (json) {
		json_decref(json);
		return JSON_WHOLE;
	}
	if (json_error_code(&error) == json_error_premature_end_of_input)
		return JSON_ENDS_EARLY;
	return (size_t)MAX(error.position, 0) + CUT_MAX < n ? JSON_WRONG : JSON_WRONG_AT_END;
}

/* Can it be made a text that only ends early? It may be cut within a word, a number, an escape or a character. */
static bool cut_within(const struct buffer *b)
{
	static const char *const rests[] = {
		"rue", "ue", "e", "alse", "lse", "se", "ull", "ll", "l", "0", "00", "000", "0000", "\\",
		"\x80", "\x80\x80", "\xa0\x80", "\x80\x80\x80", "\x90\x80\x80",
	};
	AUTO_FREE char *more = malloc(b->n + 8);

	if (!more)
		return true; /* close will tell */
	memcpy(more, b->bytes, b->n);
	for (size_t i = 0; i < ARRAY_SIZE(rests); i++) {
		size_t n = strlen(rests[i]);

		memcpy(more + b->n, rests[i], n);
		if (judge(more, b->n + n) == JSON_ENDS_EARLY)
			return true;
	}
	return false;
}

bool json_incomplete(const struct buffer *b)
{
	static const char blank[] = { ' ', '\t', '\r', '\n' };
	size_t n = b->n, start = 0;
	enum judgement j;

	while (start < n && memchr(blank, b->bytes[start], sizeof(blank)))
		start++;
	if (start == n)
		return true;
	if (b->bytes[start] != '{')
		return false;
	while (memchr(blank, b->bytes[n - 1], sizeof(blank)))
		n--;
	/* A long text comes in many writes, and is not parsed at each. */
	if (b->bytes[n - 1] != '}' && b->n > JSON_EARLY_MAX)
		return true;
	j = judge(b->bytes, b->n);
	return j == JSON_ENDS_EARLY || (j == JSON_WRONG_AT_END && b->n <= JSON_EARLY_MAX && cut_within(b));
}

int resize_nothing(const struct node *n, uint64_t size, struct err *e)
{
	(void)n;
	(void)size;
	(void)e;
	return 0;
}
