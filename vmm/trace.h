/* SPDX-License-Identifier: Apache-2.0 */
/* Step timings on stderr, when VMENV_TRACE=1 is in the environment. */
#ifndef VMM_TRACE_H
#define VMM_TRACE_H

#include <vmenv/util.h>

struct trace {
	bool on;
	uint64_t last;
};

static inline void trace_start(struct trace *t)
{
	const char *v = getenv("VMENV_TRACE");

	t->on = v && strcmp(v, "1") == 0;
	t->last = t->on ? now_ns(CLOCK_MONOTONIC) : 0;
}

/* Prints how long it took since the last one. */
static inline void trace(struct trace *t, const char *step)
{
	uint64_t now;

	if (!t->on)
		return;
	now = now_ns(CLOCK_MONOTONIC);
	fprintf(stderr, "[%d %llu us] %s\n", (int)getpid(), (unsigned long long)(now - t->last) / 1000, step);
	t->last = now_ns(CLOCK_MONOTONIC);
}

#endif
