/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs of a fork. Ended ones are the same in parent and child and share their files. One in progress goes on in both:
 * the child's agent is attached to by the run's number and says from which offset its output follows; what came before
 * is the parent's too, and is copied from there.
 *
 * What the parent's side knows of a run at the instant of the fork may be older than what is in the child: the run may
 * have ended and been released between the two. Then the child's agent does not know it, and its result is the
 * parent's.
 */
#include "run_private.h"

#define COPY_HERE_BYTES (256u << 10) /* more is copied on a worker */

static int inherit(struct sandbox *to, struct run *from, struct err *e)
{
	struct run_private *fp = from->p, *p;
	struct run *r;

	fp->text->references++;
	r = run_new(to, from->number, fp->text, from->command_bytes, e);
	if (!r)
		return -ENOMEM;
	p = r->p;
	r->state = from->state;
	r->exit_code = from->exit_code;
	r->signal = from->signal;
	r->timed_out = from->timed_out;
	r->duration_ns = from->duration_ns;
	r->object.changed_ns = from->object.changed_ns;
	p->limit = fp->limit;
	p->timeout_ms = fp->timeout_ms;
	p->begun_ns = fp->begun_ns;
	p->killed = fp->killed;
	run_list(r);
	if (!run_going(from)) {
		run_share_output(r, from);
		return 0;
	}
	to->running++;
	p->origin = from;
	object_get(&from->object);
	p->origin_started = from->state == RUN_RUNNING;
	r->state = RUN_STARTING;
	for (int w = 0; w < 2; w++) {
		if (from->output_fd[w] < 0)
			continue;
		p->prefix_fd[w] = fcntl(from->output_fd[w], F_DUPFD_CLOEXEC, 3);
		if (p->prefix_fd[w] < 0)
			return err_set(e, errno, "cannot share a run's output: %s", strerror(errno));
	}
	return 0;
}

static int inherit_from(struct sandbox *to, struct run *r, struct err *e)
{
	/* The list is newest first, and so is the child's to be: reversed twice. */
	struct run *reversed[RUNS_KEPT + AGENT_RUNS_MAX + 1];
	size_t n = 0;
	int status = 0;

	for (; r && n < ARRAY_SIZE(reversed); r = r->next)
		reversed[n++] = r;
	while (n && status == 0)
		status = inherit(to, reversed[--n], e);
	return status;
}

int runs_inherit(struct sandbox *to, struct sandbox *from, struct err *e)
{
	to->p->next_run = from->p->next_run;
	return inherit_from(to, from->runs, e);
}

static void attach_cancel(struct op *op)
{
	((struct sandbox *)op->callee)->p->attacher = NULL;
}

int runs_attach(struct sandbox *s, struct op *op, struct err *e)
{
	for (struct run *r = s->runs; r; r = r->next) {
		int status;

		if (!run_going(r))
			continue;
		r->p->attaching = true;
		s->p->attaching++;
		status = run_attach(r, e);
		if (status < 0)
			return status;
	}
	if (s->p->attaching == 0)
		return 0;
	s->p->attacher = op;
	op->callee = s;
	op->cancel = attach_cancel;
	return VMENV_PENDING;
}

static void origin_drop(struct run *r)
{
	struct run_private *p = r->p;

	for (int w = 0; w < 2; w++) {
		if (p->prefix_fd[w] >= 0)
			close(p->prefix_fd[w]);
		p->prefix_fd[w] = -1;
	}
	if (p->origin)
		object_put(&p->origin->object);
	p->origin = NULL;
}

void run_not_in_fork(struct run *r)
{
	struct run *from = r->p->origin;

	if (run_going(from) || !r->p->origin_started) {
		/* At the instant of the fork it had not begun. */
		struct sandbox *s = r->sandbox;
		struct err e = { 0 };

		err_set(&e, EIO, "run %llu had not begun in the copy", (unsigned long long)r->number);
		origin_drop(r);
		run_end(r, RUN_LOST, -EIO, &e);
		run_drop(r);
		store_run_remove(s->core->store, s->object.id, r->number, NULL);
		return;
	}
	run_share_output(r, from);
	r->exit_code = from->exit_code;
	r->signal = from->signal;
	r->timed_out = from->timed_out;
	r->duration_ns = from->duration_ns;
	{
		enum run_state state = from->state;

		origin_drop(r);
		run_end(r, state, 0, NULL);
	}
}

struct copy {
	struct job job;
	struct run *r; /* referenced */
	enum stream w;
	int from, to; /* to: the copy's own descriptor */
	uint64_t bytes;
	struct err err;
};

static int copy_bytes(int from, int to, uint64_t bytes, struct err *e)
{
	char buffer[65536];

	for (uint64_t at = 0; at < bytes;) {
		ssize_t n = pread(from, buffer, MIN(sizeof(buffer), bytes - at), (off_t)at);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return err_set(e, n < 0 ? errno : EIO, "the beginning of a run's output cannot be read");
		if (pwrite(to, buffer, (size_t)n, (off_t)at) != n)
			return err_set(e, errno, "the beginning of a run's output cannot be copied: %s",
				       strerror(errno));
		at += (uint64_t)n;
	}
	return 0;
}

static void copy_work(struct job *j)
{
	struct copy *c = j->arg;

	copy_bytes(c->from, c->to, c->bytes, &c->err);
}

static void copy_done(struct job *j)
{
	struct copy *c = j->arg;
	struct run *r = c->r;

	r->p->copying[c->w] = false;
	if (c->err.code) {
		run_lost(r, c->err.code, "%.470s", c->err.text);
	} else {
		run_publish(r, c->w);
		run_finish_if_due(r);
		if (!r->p->copying[!c->w])
			attach_settled(r);
	}
	close(c->from);
	close(c->to);
	object_put(&r->object);
	free(c);
}

static int copy_start(struct run *r, enum stream w, uint64_t bytes, struct err *e)
{
	struct run_private *p = r->p;
	struct copy *c;
	int status = run_need_file(r, w, e);

	if (status < 0)
		return status;
	if (bytes <= COPY_HERE_BYTES) {
		status = copy_bytes(p->prefix_fd[w], r->output_fd[w], bytes, e);
		if (status < 0)
			return status;
		p->have[w] = bytes;
		run_publish(r, w);
		return 0;
	}
	c = calloc(1, sizeof(*c));
	if (!c)
		return err_set(e, ENOMEM, "out of memory");
	c->r = r;
	c->w = w;
	c->bytes = bytes;
	c->to = fcntl(r->output_fd[w], F_DUPFD_CLOEXEC, 3);
	c->from = fcntl(p->prefix_fd[w], F_DUPFD_CLOEXEC, 3);
	c->job = (struct job){ .work = copy_work, .done = copy_done, .arg = c };
	status = c->to < 0 || c->from < 0 ? err_set(e, EMFILE, "too many open files") :
					    job_start(r->sandbox->core->workers, &c->job, e);
	if (status < 0) {
		if (c->to >= 0)
			close(c->to);
		if (c->from >= 0)
			close(c->from);
		free(c);
		return status;
	}
	object_get(&r->object);
	/* Output that follows is written behind the part that is being copied, and shown with it. */
	p->have[w] = bytes;
	p->copying[w] = true;
	return 0;
}

int run_copy_beginning(struct run *r, const uint64_t offsets[2], struct err *e)
{
	for (int w = 0; w < 2; w++) {
		int status;

		if (offsets[w] == 0)
			continue;
		if (r->p->prefix_fd[w] < 0 || offsets[w] > r->p->origin->p->have[w])
			return err_set(e, EPROTO, "the guest's agent goes on past what it has sent");
		status = copy_start(r, (enum stream)w, offsets[w], e);
		if (status < 0)
			return status;
	}
	origin_drop(r);
	return 0;
}
