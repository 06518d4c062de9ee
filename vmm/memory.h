/* SPDX-License-Identifier: Apache-2.0 */
/* Guest-physical memory: the one bounds-checked way from a guest's address to a host pointer. */
#ifndef VMM_MEMORY_H
#define VMM_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#define RAM_HOLE_START 0xc0000000ull /* RAM above 3 GiB goes on at 4 GiB; devices live in between */
#define RAM_HIGH_START 0x100000000ull
#define PAGE_BYTES 4096u

struct memory {
	uint8_t *ram; /* one mapping, ram_bytes long; owned by struct machine */
	uint64_t ram_bytes;
	uint8_t *disk; /* the pmem mapping, 2 MiB aligned in both address spaces; NULL without a disk */
	uint64_t disk_bytes, disk_gpa;
};

/* The host address of [gpa, gpa + len) if all of it is RAM, or all disk, and contiguous there; otherwise, and for len 0, NULL. */
void *memory_at(const struct memory *m, uint64_t gpa, uint64_t len);

#endif
