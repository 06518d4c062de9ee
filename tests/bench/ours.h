/* SPDX-License-Identifier: Apache-2.0 */
/* vmenvfs measured through its mount. All times in ms; all return 0 or -errno. */
#ifndef BENCH_OURS_H
#define BENCH_OURS_H

#include "bench.h"

/* create: the write to ctl; first: from there to the first command's end; next: a second command; private_kb: KiB after both. */
int ours_create(const char *mount, const char *template, unsigned rounds, struct samples *create, struct samples *first, struct samples *next,
		struct samples *private_kb);
/* A running machine with dirty_mb of its memory written: what the fork cost the parent, and fork to the child's first result. */
int ours_fork(const char *mount, const char *template, unsigned rounds, unsigned dirty_mb, struct samples *pause, struct samples *first);
/* 64 creates asked at the same moment by 64 threads. */
int ours_at_once(const char *mount, const char *template, double *per_second);

#endif
