/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pages that a restored machine touches first, so that its siblings do not fault them in one by one.
 *
 * A guest that has just been restored spends most of its first command in page faults: a nested one for each page, and a
 * copy for each page it writes. Which pages these are hardly differs from one child of a template to the next. So one child
 * of a zygote, its recorder, notes them in memory shared with the zygote alone, which checks them and takes a copy; from then
 * on children copy the pages that will be written and give KVM the whole set at once (KVM_PRE_FAULT_MEMORY, Linux 6.11), and
 * the zygote keeps page table entries, which every fork copies, for no others.
 *
 * All of it is best effort: without it machines are slower, not different. It changes no contents. Whatever a recorder says,
 * no more than some thousand pages of its siblings are touched early.
 */
#ifndef VMM_WORKSET_H
#define VMM_WORKSET_H

#include <vmenv/loop.h>

#include "mapping.h"
#include "memory.h"

struct vcpu;
struct ranges;
struct workset_shared;

struct workset {
	bool on;
	const struct mapping *ram, *disk;
	struct ranges *known;          /* this process's own; NULL: not known (yet) */
	struct workset_shared *shared; /* in a zygote and its recorder, until the set is known */
	bool recorder;                 /* in a zygote: the child that is forked next will be it */
	uint64_t since;                /* CLOCK_MONOTONIC ns: when a recorder was forked, or began */
	/* While recording. */
	int uffd; /* -1: not recording */
	unsigned sample;
	struct loop *loop;
	struct timer timer;
};

/* In a zygote. */
void workset_init(struct workset *w, struct loop *l, const struct mapping *ram, const struct mapping *disk);
/* In a zygote, before and after it forks. */
void workset_before_fork(struct workset *w);
void workset_after_fork(struct workset *w);
/* In a forked child, after loop_forked: a recording is the parent's, and only a zygote's first child may be a recorder. */
void workset_forked(struct workset *w, bool first_of_zygote);
/* In a child, its VM made and its state loaded. */
void workset_prefault(const struct workset *w, const struct memory *m, const struct vcpu *v);
/* In a child of a zygote, before it first runs: records, if it is the one. */
void workset_record(struct workset *w);
/* Ends a recording, if there is one, and keeps what was seen. Before a pause, a fork, the end. */
void workset_stop(struct workset *w);
void workset_free(struct workset *w);

#endif
