/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The host memory behind guest memory and disk: mappings of files or of nothing, and what happens when a mapped file
 * turns out to be shorter than its mapping or unreadable (SIGBUS).
 */
#ifndef VMM_MAPPING_H
#define VMM_MAPPING_H

#include <stdbool.h>
#include <stdint.h>

#include <vmenv/util.h>

#define MAPPING_ALIGN (2ull << 20)

enum mapping_kind {
	MAPPING_NONE,
	MAPPING_ANONYMOUS,
	MAPPING_SHARED,  /* the file changes as the guest writes */
	MAPPING_PRIVATE, /* the file stays; what is written is anonymous memory */
};

struct mapping {
	uint8_t *at;    /* 2 MiB aligned; owned */
	uint64_t bytes; /* a multiple of 2 MiB or of the page size, as asked for */
	enum mapping_kind kind;
};

int mapping_anonymous(struct mapping *m, uint64_t bytes, struct err *e);
/*
 * Maps `path`. bytes 0: as long as the file is, up to the next 2 MiB (the rest is anonymous memory, and so may only be
 * there with `padded`). Otherwise the file must be that long; with `make` it is made and sized first.
 */
struct mapping_file {
	const char *path;
	uint64_t bytes;
	enum mapping_kind kind;
	bool make, padded;
};
int mapping_open(struct mapping *m, const struct mapping_file *f, struct err *e);
void mapping_close(struct mapping *m);
/*
 * Fills the page tables with the file's pages that hold data, and owns one page: fork(2) copies the page tables of a
 * private file mapping only when there is an anonymous page in it, and children that find them full do not fault.
 */
void mapping_populate(const struct mapping *m, const char *path);
/* Only the second half of that. */
void mapping_own(const struct mapping *m);

/*
 * SIGBUS in one of the mappings puts a zero page there, so that whoever touched it can go on, and signals `notice_fd`.
 * SIGBUS anywhere else kills the process as ever. One set of mappings a process: a signal handler has no argument.
 */
void mapping_guard(const struct mapping *ram, const struct mapping *disk, int notice_fd);
/* Before the mappings go. */
void mapping_unguard(void);
bool mapping_guard_hit(void);

#endif
