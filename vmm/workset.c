/* SPDX-License-Identifier: Apache-2.0 */
/* Recording and using the working set of a restore. */
#include "workset.h"

#include <linux/kvm.h>
#include <linux/userfaultfd.h>
#include <stdatomic.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include "pages.h"
#include "vcpu.h"

#define PAGES_MAX 6144u /* more than this is a workload, not a restore */
#define RANGES_MAX 4096u
#define RECORDING_NS 10000000000ull /* a recorder that took longer has died */

/* When to look, after the start: the last look that finds no more than PAGES_MAX counts. */
static const uint64_t look_ns[] = { 100000000, 200000000, 400000000, 800000000, 1600000000 };

struct range {
	uint32_t page, pages; /* in the mapping */
	uint8_t disk, written;
	uint16_t reserved;
};

struct ranges {
	uint32_t count;
	struct range range[RANGES_MAX];
};

enum { RECORDING, KNOWN, FAILED };

/* What the zygote shares with its recorder, a guest's process: nothing in here is trusted. */
struct workset_shared {
	atomic_uint state;
	struct ranges set;
};

#ifndef UFFD_FEATURE_WP_ASYNC
#define UFFD_FEATURE_WP_ASYNC (1ull << 15)
#endif
#ifndef UFFD_USER_MODE_ONLY
#define UFFD_USER_MODE_ONLY 1
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

/* KVM_PRE_FAULT_MEMORY. */
struct pre_fault {
	uint64_t gpa, size, flags, padding[5];
};
#define PRE_FAULT_MEMORY _IOWR(KVMIO, 0xd5, struct pre_fault)

void workset_init(struct workset *w, struct loop *l, const struct mapping *ram, const struct mapping *disk)
{
	*w = (struct workset){ .on = true, .ram = ram, .disk = disk, .uffd = -1, .loop = l };
}

static void let_go(struct workset *w)
{
	if (w->shared)
		munmap(w->shared, sizeof(*w->shared));
	w->shared = NULL;
	w->recorder = false;
}

void workset_free(struct workset *w)
{
	workset_stop(w);
	let_go(w);
	free(w->known);
	w->known = NULL;
}

static uint8_t *range_at(const struct workset *w, const struct range *r)
{
	return (r->disk ? w->disk : w->ram)->at + (uint64_t)r->page * PAGE_BYTES;
}

/*
 * The kernel maps file pages around the one that was touched, which would all look touched; it does not where userfaultfd
 * watches for writes, for which mode nobody need listen and nothing is protected here.
 */
static bool no_fault_around(int uffd, const struct mapping *m)
{
	struct uffdio_register r = {
		.range = { .start = (uintptr_t)m->at, .len = m->bytes }, .mode = UFFDIO_REGISTER_MODE_WP,
	};

	return m->kind == MAPPING_NONE || ioctl(uffd, UFFDIO_REGISTER, &r) == 0;
}

static int watch_pages(const struct workset *w)
{
	struct uffdio_api api = { .api = UFFD_API, .features = UFFD_FEATURE_WP_ASYNC };
	AUTO_CLOSE int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);

	if (fd < 0 || ioctl(fd, UFFDIO_API, &api) < 0 || !no_fault_around(fd, w->ram) || !no_fault_around(fd, w->disk))
		return -1;
	return steal_fd(&fd);
}

/* Drops all page table entries but those of the set. */
static void keep_only(const struct workset *w)
{
	int uffd = watch_pages(w); /* for those pages and no others around them */

	madvise(w->ram->at, w->ram->bytes, MADV_DONTNEED);
	if (w->disk->kind != MAPPING_NONE)
		madvise(w->disk->at, w->disk->bytes, MADV_DONTNEED);
	for (uint32_t i = 0; i < w->known->count; i++) {
		const struct range *r = &w->known->range[i];

		madvise(range_at(w, r), (size_t)r->pages * PAGE_BYTES, MADV_POPULATE_READ);
	}
	mapping_own(w->ram);
	if (w->disk->kind != MAPPING_NONE)
		mapping_own(w->disk);
	if (uffd >= 0)
		close(uffd);
}

static bool valid(const struct workset *w, const struct ranges *set)
{
	uint64_t total = 0;

	if (set->count == 0 || set->count > RANGES_MAX)
		return false;
	for (uint32_t i = 0; i < set->count; i++) {
		const struct range *r = &set->range[i];
		const struct mapping *m = r->disk ? w->disk : w->ram;
		uint64_t pages = m->kind == MAPPING_NONE ? 0 : m->bytes / PAGE_BYTES;

		if (r->pages == 0 || (uint64_t)r->page + r->pages > pages)
			return false;
		total += r->pages;
	}
	return total <= PAGES_MAX;
}

/* Takes over what the recorder has found: a copy of our own, looked at after it was made. */
static void adopt(struct workset *w)
{
	struct ranges *set = malloc(sizeof(*set));

	if (set)
		memcpy(set, &w->shared->set, sizeof(*set));
	let_go(w);
	if (!set || !valid(w, set)) {
		free(set);
		return;
	}
	w->known = set;
	keep_only(w);
}

static void offer(struct workset *w)
{
	void *p = mmap(NULL, sizeof(struct workset_shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED)
		return;
	w->shared = p;
	w->recorder = true;
	w->since = now_ns(CLOCK_MONOTONIC);
}

void workset_before_fork(struct workset *w)
{
	unsigned state;

	if (!w->on || w->known)
		return;
	if (w->shared) {
		state = atomic_load(&w->shared->state);
		if (state == KNOWN)
			adopt(w);
		else if (state == FAILED)
			w->on = false; /* it will not work the next time either */
		else if (now_ns(CLOCK_MONOTONIC) - w->since < RECORDING_NS)
			return;
		let_go(w);
	}
	if (w->on && !w->known)
		offer(w);
}

void workset_after_fork(struct workset *w)
{
	w->recorder = false;
}

static uint64_t range_gpa(const struct memory *m, const struct range *r)
{
	uint64_t offset = (uint64_t)r->page * PAGE_BYTES;

	if (r->disk)
		return m->disk_gpa + offset;
	return offset < RAM_HOLE_START ? offset : RAM_HIGH_START + (offset - RAM_HOLE_START);
}

void workset_prefault(const struct workset *w, const struct memory *m, const struct vcpu *v)
{
	if (!w->known)
		return;
	/* Copied before KVM looks, which then maps them writable at once. */
	for (uint32_t i = 0; i < w->known->count; i++) {
		const struct range *r = &w->known->range[i];

		if (r->written)
			madvise(range_at(w, r), (size_t)r->pages * PAGE_BYTES, MADV_POPULATE_WRITE);
	}
	for (uint32_t i = 0; i < w->known->count; i++) {
		const struct range *r = &w->known->range[i];
		struct pre_fault f = { .gpa = range_gpa(m, r), .size = (uint64_t)r->pages * PAGE_BYTES };

		/* It may stop short, and then says how far it came. */
		while (f.size) {
			if (ioctl(v->fd, PRE_FAULT_MEMORY, &f) == 0 || errno == EINTR || errno == EAGAIN)
				continue;
			return;
		}
	}
}

/* Recording. */

/* A look: the ranges of pages that are in the page tables. False if there are too many. */
static bool add_mapping(struct ranges *s, struct pages *p, const struct mapping *m, bool disk, uint32_t *total)
{
	for (uint64_t at = 0, n; at < m->bytes / PAGE_BYTES; at += n) {
		n = MIN(m->bytes / PAGE_BYTES - at, PAGES_BATCH);
		if (pages_look(p, m->at + at * PAGE_BYTES, n) < 0)
			return false;
		for (uint64_t i = 0, run; i < n; i += run) {
			bool there = page_there(p->entry[i]), written = page_private(p->entry[i]);

			for (run = 1; i + run < n && page_there(p->entry[i + run]) == there &&
				      page_private(p->entry[i + run]) == written;)
				run++;
			if (!there)
				continue;
			*total += (uint32_t)run;
			if (s->count == RANGES_MAX || *total > PAGES_MAX)
				return false;
			s->range[s->count++] = (struct range){
				.page = (uint32_t)(at + i), .pages = (uint32_t)run, .disk = disk, .written = written,
			};
		}
	}
	return true;
}

static bool look(struct workset *w)
{
	AUTO_FREE struct ranges *seen = malloc(sizeof(*seen));
	AUTO_FREE struct pages *p = malloc(sizeof(*p));
	uint32_t total = 0;
	bool fits;

	if (!seen || !p || pages_open(p, NULL) < 0)
		return false;
	seen->count = 0;
	fits = add_mapping(seen, p, w->ram, false, &total) && add_mapping(seen, p, w->disk, true, &total);
	pages_close(p);
	if (fits) {
		free(w->known);
		w->known = steal_ptr(&seen);
	}
	return fits;
}

/* The zygote gets what was seen. If that is nothing, it will ask another child after a while. */
static void finish(struct workset *w)
{
	loop_timer_cancel(w->loop, &w->timer);
	close(w->uffd);
	w->uffd = -1;
	if (w->known) {
		memcpy(&w->shared->set, w->known, sizeof(*w->known));
		atomic_store(&w->shared->state, KNOWN);
	}
	let_go(w);
}

static void on_time(struct timer *t)
{
	struct workset *w = t->arg;

	if (!look(w) || ++w->sample == ARRAY_SIZE(look_ns))
		finish(w);
	else
		loop_timer(w->loop, t, w->since + look_ns[w->sample]);
}

void workset_record(struct workset *w)
{
	if (!w->recorder || w->uffd >= 0)
		return;
	w->uffd = watch_pages(w);
	if (w->uffd < 0) {
		atomic_store(&w->shared->state, FAILED);
		let_go(w);
		return;
	}
	/* It has run nothing yet, so there is nothing in it but what is in the files. */
	madvise(w->ram->at, w->ram->bytes, MADV_DONTNEED);
	if (w->disk->kind != MAPPING_NONE)
		madvise(w->disk->at, w->disk->bytes, MADV_DONTNEED);
	w->sample = 0;
	w->since = now_ns(CLOCK_MONOTONIC);
	w->timer = (struct timer){ .fire = on_time, .arg = w };
	loop_timer(w->loop, &w->timer, w->since + look_ns[0]);
}

void workset_stop(struct workset *w)
{
	if (w->uffd < 0)
		return;
	look(w);
	finish(w);
}

void workset_forked(struct workset *w, bool first_of_zygote)
{
	if (w->uffd >= 0)
		close(w->uffd);
	w->uffd = -1;
	if (!first_of_zygote || !w->recorder)
		let_go(w);
}
