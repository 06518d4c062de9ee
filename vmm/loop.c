/* SPDX-License-Identifier: Apache-2.0 */
#include <vmenv/loop.h>
#include <vmenv/util.h>

#define BATCH 64

struct loop {
	int epoll;
	bool stop;
	struct timer *timers; /* sorted by deadline */
	/* The batch in hand: loop_remove clears a watch out of it, so that it is not called after its removal. */
	struct epoll_event batch[BATCH];
	int next, count;
};

struct loop *loop_new(void)
{
	struct loop *l = calloc(1, sizeof(*l));

	if (!l)
		return NULL;
	l->epoll = epoll_create1(EPOLL_CLOEXEC);
	if (l->epoll < 0) {
		free(l);
		return NULL;
	}
	return l;
}

void loop_free(struct loop *l)
{
	if (!l)
		return;
	close(l->epoll);
	free(l);
}

static int control(struct loop *l, int op, struct watch *w, uint32_t events)
{
	struct epoll_event e = { .events = events, .data.ptr = w };

	return epoll_ctl(l->epoll, op, w->fd, &e) < 0 ? -errno : 0;
}

int loop_add(struct loop *l, struct watch *w, uint32_t events)
{
	return control(l, EPOLL_CTL_ADD, w, events);
}

int loop_change(struct loop *l, struct watch *w, uint32_t events)
{
	return control(l, EPOLL_CTL_MOD, w, events);
}

void loop_remove(struct loop *l, struct watch *w)
{
	control(l, EPOLL_CTL_DEL, w, 0);
	for (int i = l->next; i < l->count; i++)
		if (l->batch[i].data.ptr == w)
			l->batch[i].data.ptr = NULL;
}

void loop_timer_cancel(struct loop *l, struct timer *t)
{
	for (struct timer **p = &l->timers; *p; p = &(*p)->next)
		if (*p == t) {
			*p = t->next;
			return;
		}
}

void loop_timer(struct loop *l, struct timer *t, uint64_t deadline)
{
	struct timer **p = &l->timers;

	loop_timer_cancel(l, t);
	t->deadline = deadline;
	while (*p && (*p)->deadline <= deadline)
		p = &(*p)->next;
	t->next = *p;
	*p = t;
}

/* Milliseconds until the first timer, rounded up so that it is due on waking; -1 without timers. */
static int patience(const struct loop *l)
{
	uint64_t now, ms;

	if (!l->timers)
		return -1;
	now = now_ns(CLOCK_MONOTONIC);
	if (l->timers->deadline <= now)
		return 0;
	ms = (l->timers->deadline - now + 999999) / 1000000;
	return (int)MIN(ms, 1000000u);
}

static void fire_due(struct loop *l)
{
	uint64_t now;

	if (!l->timers)
		return;
	now = now_ns(CLOCK_MONOTONIC);
	while (l->timers && l->timers->deadline <= now) {
		struct timer *t = l->timers;

		l->timers = t->next;
		t->fire(t);
	}
}

void loop_run(struct loop *l)
{
	l->stop = false;
	while (!l->stop) {
		int n = epoll_wait(l->epoll, l->batch, BATCH, patience(l));

		l->count = MAX(n, 0);
		for (l->next = 0; l->next < l->count && !l->stop;) {
			struct epoll_event *e = &l->batch[l->next++];
			struct watch *w = e->data.ptr;

			if (w)
				w->ready(w, e->events);
		}
		l->count = 0;
		fire_due(l);
	}
}

void loop_stop(struct loop *l)
{
	l->stop = true;
}

void loop_forked(struct loop *l)
{
	close(l->epoll);
	l->epoll = epoll_create1(EPOLL_CLOEXEC);
	l->timers = NULL;
	l->count = l->next = 0;
}
