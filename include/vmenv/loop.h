/* SPDX-License-Identifier: Apache-2.0 */
/* An event loop for one thread: one epoll, callbacks by descriptor, timers. vmm/loop.c; used by every vmenv process. */
#ifndef VMENV_LOOP_H
#define VMENV_LOOP_H

#include <stdint.h>
#include <sys/epoll.h>

struct loop;
struct watch {
	int fd; /* not owned */
	void (*ready)(struct watch *w, uint32_t events);
	void *arg;
};

struct loop *loop_new(void);
void loop_free(struct loop *l);
/* events: EPOLLIN, EPOLLOUT... level triggered. The watch is the caller's and must stay until loop_remove. 0 or -errno. */
int loop_add(struct loop *l, struct watch *w, uint32_t events);
int loop_change(struct loop *l, struct watch *w, uint32_t events);
/* Safe from any callback, also of watches whose events are already collected: they are not called any more. */
void loop_remove(struct loop *l, struct watch *w);
/* Calls fn(arg) once at `deadline` (CLOCK_MONOTONIC ns). The timer is the caller's. Setting it again moves it. */
struct timer {
	uint64_t deadline;
	void (*fire)(struct timer *t);
	void *arg;
	struct timer *next;
};
void loop_timer(struct loop *l, struct timer *t, uint64_t deadline);
void loop_timer_cancel(struct loop *l, struct timer *t);
/* Until loop_stop. */
void loop_run(struct loop *l);
void loop_stop(struct loop *l);
/* In a forked child: a new epoll with no watches; what the parent watched is forgotten, its descriptors untouched. */
void loop_forked(struct loop *l);

#endif
