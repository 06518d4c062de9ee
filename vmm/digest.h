/* SPDX-License-Identifier: Apache-2.0 */
/* The digest of memory and disk that vmenv/machine.h defines, and of plain bytes. */
#ifndef VMM_DIGEST_H
#define VMM_DIGEST_H

#include <stdint.h>

#include <vmenv/util.h>

#define DIGEST_BYTES 32

/*
 * Of a page-aligned mapping of this process. Pages that are in no page table are read from the mapped file, holes skipped,
 * so that a sparse image is neither faulted in nor filled.
 */
int digest_pages(const uint8_t *at, uint64_t bytes, uint8_t digest[DIGEST_BYTES], struct err *e);
/* SHA-256 of what is in the file. */
int digest_file(int fd, uint8_t digest[DIGEST_BYTES], struct err *e);

#endif
