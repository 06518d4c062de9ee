/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writing to a ctl file: all commands of a write are parsed before the first runs; they run one after the other, and the
 * write is answered when the last has taken effect, or with the first failure.
 */
#include "ctl.h"

#define WHAT_MAX 120 /* of a command, for `error` */

struct script {
	struct pending pending;
	struct handle *handle;
	struct lines lines;
	struct command *commands;
	unsigned next;
	size_t bytes; /* of the write */
};

static void script_free(struct script *s)
{
	for (unsigned i = 0; s->commands && i < s->lines.count; i++)
		free(s->commands[i].create);
	free(s->commands);
	lines_free(&s->lines);
	free(s);
}

/* The command as `error` has it, cut to a reasonable length. */
static void describe(const struct words *w, char *what)
{
	size_t at = 0;

	for (unsigned i = 0; i < w->count && at < WHAT_MAX; i++)
		at += (size_t)snprintf(what + at, WHAT_MAX - at, "%s%s", i ? " " : "", w->word[i]);
}

static void fail(struct script *s, const struct words *w, const struct err *e)
{
	struct handle *h = s->handle;
	char what[WHAT_MAX] = "ctl";

	if (w)
		describe(w, what);
	request_fail(h->server, s->pending.req, &h->node, what, e);
	script_free(s);
}

static void step(struct script *s);

static void command_done(struct op *op, int status, const struct err *e)
{
	struct script *s = op->arg;

	pending_end(&s->pending);
	if (status < 0)
		fail(s, &s->commands[s->next - 1].words, e);
	else
		step(s);
}

static void script_stop(struct pending *p, int error)
{
	struct script *s = (struct script *)p;

	op_cancel(&p->op);
	pending_end(p);
	/* Not EINTR: dash, Python and others write again then, and would begin anew what was just given up. */
	fuse_reply_err(p->req, error == EINTR ? ECANCELED : error);
	script_free(s);
}

/* Runs the commands that are left, as far as they end at once. */
static void step(struct script *s)
{
	struct handle *h = s->handle;

	while (s->next < s->lines.count) {
		struct command *c = &s->commands[s->next++];
		struct err e = { 0 };
		int r;

		if (node_gone(&h->node))
			r = err_set(&e, ENOENT, "it is gone");
		else {
			s->pending.op = (struct op){ .done = command_done, .arg = s };
			r = c->verb->run(&h->node, c, &s->pending.op, &e);
		}
		if (r == VMENV_PENDING) {
			pending_start(&s->pending, h->server, s->pending.req, h);
			return;
		}
		if (r < 0) {
			fail(s, &c->words, &e);
			return;
		}
	}
	fuse_reply_write(s->pending.req, s->bytes);
	script_free(s);
}

static void ctl_write(struct handle *h, fuse_req_t req, const char *bytes, size_t size, uint64_t offset)
{
	struct script *s = calloc(1, sizeof(*s));
	struct err e = { 0 };

	(void)offset;
	if (!s) {
		fuse_reply_err(req, ENOMEM);
		return;
	}
	s->handle = h;
	s->pending.req = req;
	s->pending.stop = script_stop;
	s->bytes = size;
	if (lines_parse(bytes, size, &s->lines, &e) < 0) {
		fail(s, NULL, &e);
		return;
	}
	s->commands = calloc(MAX(s->lines.count, 1u), sizeof(*s->commands));
	if (!s->commands) {
		err_set(&e, ENOMEM, "no memory for %u commands", s->lines.count);
		fail(s, NULL, &e);
		return;
	}
	for (unsigned i = 0; i < s->lines.count; i++) {
		struct command *c = &s->commands[i];
		int r;

		c->words = s->lines.line[i];
		r = command_parse(&h->node, c, &e);
		if (r == 0 && c->verb->slow && h->nonblock)
			r = err_set(&e, EAGAIN, "%s may wait: open ctl without O_NONBLOCK", c->verb->name);
		if (r < 0) {
			fail(s, &c->words, &e);
			return;
		}
	}
	step(s);
}

const struct behaviour ctl_file = { .read = text_read, .write = ctl_write, .size = text_size, .resize = resize_nothing };
