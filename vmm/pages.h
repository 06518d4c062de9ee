/* SPDX-License-Identifier: Apache-2.0 */
/* What the kernel says about this process's pages (/proc/self/pagemap), for accounting and digests. */
#ifndef VMM_PAGES_H
#define VMM_PAGES_H

#include <stdbool.h>
#include <stdint.h>

#include <vmenv/util.h>

#define PAGES_BATCH 2048u

struct pages {
	int fd; /* /proc/self/pagemap of this very process: opened anew after a fork */
	uint64_t entry[PAGES_BATCH];
};

int pages_open(struct pages *p, struct err *e);
void pages_close(struct pages *p);
/* Fills entry[] for the pages from `at` on, at most PAGES_BATCH. 0 or -errno. */
int pages_look(struct pages *p, const uint8_t *at, uint64_t pages);

/* In memory or swapped out: has contents of its own, or a file's page mapped. */
static inline bool page_there(uint64_t entry)
{
	return entry >> 62;
}
static inline bool page_resident(uint64_t entry)
{
	return entry >> 63;
}
/*
 * Anonymous: in a private file mapping, changed since the file. Bit 61 says file page or shared. (In memory that no file
 * is behind, the shared zero page, where it was only read, looks the same.)
 */
static inline bool page_private(uint64_t entry)
{
	return page_there(entry) && !(entry >> 61 & 1);
}

struct page_use {
	uint64_t private_bytes, resident_bytes;
};
int pages_use(struct pages *p, const uint8_t *at, uint64_t bytes, struct page_use *use);

#endif
