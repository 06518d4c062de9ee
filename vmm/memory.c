/* SPDX-License-Identifier: Apache-2.0 */
/* Guest-physical memory: the one bounds-checked way from a guest's address to a host pointer. */
#include "memory.h"

/* [at, at + len) inside [start, start + bytes), without overflow. */
static int inside(uint64_t at, uint64_t len, uint64_t start, uint64_t bytes)
{
	return at >= start && at - start < bytes && len <= bytes - (at - start);
}

void *memory_at(const struct memory *m, uint64_t gpa, uint64_t len)
{
	uint64_t low = m->ram_bytes < RAM_HOLE_START ? m->ram_bytes : RAM_HOLE_START;

	if (len == 0)
		return NULL;
	if (inside(gpa, len, 0, low))
		return m->ram + gpa;
	if (inside(gpa, len, RAM_HIGH_START, m->ram_bytes - low))
		return m->ram + low + (gpa - RAM_HIGH_START);
	/* A guest may hand a DAX page of the disk to a device: it is memory like the rest. */
	if (m->disk && inside(gpa, len, m->disk_gpa, m->disk_bytes))
		return m->disk + (gpa - m->disk_gpa);
	return NULL;
}
