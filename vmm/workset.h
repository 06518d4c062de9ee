/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pages that a restored machine touches first, so that its siblings do not fault them in one by one.
 *
 * A guest that has just been restored spends most of its first command in page faults: a nested one for each page, and a
 * copy for each page it writes. Which pages these are hardly differs from one child of a template to the next. So the first
 * child of a zygote records them, in memory shared with the zygote; from then on children copy the pages that will be
 * written and give KVM the whole set at once (KVM_PRE_FAULT_MEMORY, Linux 6.11), and the zygote keeps page table entries,
 * which every fork copies, for no others.
 *
 * All of it is best effort: without it machines are slower, not different. It changes no contents.
 */
#ifndef VMM_WORKSET_H
#define VMM_WORKSET_H

#include <vmenv/loop.h>

#include "mapping.h"
#include "memory.h"

struct vcpu;
struct workset_shared;

struct workset {
	struct workset_shared *shared; /* NULL: not here */
	const struct mapping *ram, *disk;
	bool applied; /* zygote: its page tables are down to the set */
	/* While recording. */
	int uffd; /* -1: not recording */
	unsigned sample;
	struct loop *loop;
	struct timer timer;
};

/* In a zygote. */
void workset_init(struct workset *w, struct loop *l, const struct mapping *ram, const struct mapping *disk);
/* In a zygote, before it forks: once the set is known, drops all page table entries but those. */
void workset_apply(struct workset *w);
/* In a child, its VM made and its state loaded. */
void workset_prefault(const struct workset *w, const struct memory *m, const struct vcpu *v);
/* In a child of a zygote, before it first runs: records, if nobody has. */
void workset_record(struct workset *w);
/* Ends a recording, if there is one, and keeps what was seen. Before a pause, a fork, the end. */
void workset_stop(struct workset *w);
/* In a forked child, after loop_forked: a recording is the parent's. */
void workset_forked(struct workset *w);
void workset_free(struct workset *w);

#endif
