/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the streams of runs that have ended for everyone here but not yet in the guest. */
#include "run_private.h"

#define PATIENCE_MS 60000u

struct reaper {
	struct reaper *next;
	struct core *core;
	struct agent *agent;
	struct timer deadline;
	uint64_t got[2], acknowledged;
};

static void reaper_free(struct reaper *x)
{
	for (struct reaper **p = &x->core->reapers; *p; p = &(*p)->next)
		if (*p == x) {
			*p = x->next;
			break;
		}
	loop_timer_cancel(x->core->loop, &x->deadline);
	agent_close(x->agent);
	free(x);
}

static void on_frame(struct agent *a, uint32_t type, const uint8_t *payload, uint32_t n)
{
	if (type == AGENT_STARTED)
		return;
	if (type == AGENT_EXIT)
		agent_send(a, AGENT_RELEASE, NULL, 0);
	reaper_free(a->arg);
}

static void on_output(struct agent *a, unsigned which, const uint8_t *bytes, uint32_t n)
{
	struct reaper *x = a->arg;

	x->got[which] += n;
	if (x->got[0] + x->got[1] - x->acknowledged < 65536)
		return;
	x->acknowledged = x->got[0] + x->got[1];
	agent_send_offsets(a, x->got[0], x->got[1]);
}

static void on_ended(struct agent *a, const struct err *e)
{
	reaper_free(a->arg);
}

static void on_deadline(struct timer *t)
{
	reaper_free(t->arg);
}

void reaper_take(struct core *c, struct agent *a, const uint64_t got[2])
{
	struct reaper *x = calloc(1, sizeof(*x));

	if (!x) {
		agent_close(a);
		return;
	}
	x->core = c;
	x->agent = a;
	x->got[0] = got[0];
	x->got[1] = got[1];
	x->deadline = (struct timer){ .fire = on_deadline, .arg = x };
	x->next = c->reapers;
	c->reapers = x;
	a->frame = on_frame;
	a->output = on_output;
	a->ended = on_ended;
	a->arg = x;
	loop_timer(c->loop, &x->deadline, deadline_ms(PATIENCE_MS));
}

void reapers_close(struct core *c)
{
	while (c->reapers)
		reaper_free(c->reapers);
}
