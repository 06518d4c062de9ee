/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The stream that the last run used, kept for the next one. A sandbox has at most one: what runs beside that opens a
 * stream of its own. What the guest sends meanwhile is out of place and ends it, as does the guest's end of it.
 */
#include "back.h"

/* What is queued for the agent (that it may forget the last run) goes with the next run if that comes at once. */
#define FLUSH_MS 20u

static void on_frame(struct agent *a, uint32_t type, const uint8_t *payload, uint32_t n)
{
	spare_close(a->arg);
}

static void on_output(struct agent *a, unsigned which, const uint8_t *bytes, uint32_t n)
{
	spare_close(a->arg);
}

static void on_ended(struct agent *a, const struct err *e)
{
	spare_close(a->arg);
}

static void on_flush(struct timer *t)
{
	struct spare *p = t->arg;

	agent_flush(p->agent);
}

void spare_put(struct sandbox *s, struct agent *a)
{
	struct spare *p = &s->p->spare;

	if (!a)
		return;
	if (p->agent || !s->p->machine) {
		agent_flush(a);
		agent_close(a);
		return;
	}
	p->agent = a;
	p->loop = s->core->loop;
	p->flush = (struct timer){ .fire = on_flush, .arg = p };
	a->frame = on_frame;
	a->output = on_output;
	a->ended = on_ended;
	a->arg = s;
	loop_timer(p->loop, &p->flush, deadline_ms(FLUSH_MS));
}

struct agent *spare_take(struct sandbox *s)
{
	struct spare *p = &s->p->spare;

	if (p->agent)
		loop_timer_cancel(p->loop, &p->flush);
	return steal_ptr(&p->agent);
}

void spare_close(struct sandbox *s)
{
	agent_close(spare_take(s));
}
