/* SPDX-License-Identifier: Apache-2.0 */
/* Writes a paused machine out: its state, and the pages of memory and disk that differ from the mapped files. */
#include "machine_private.h"
#include "pages.h"

static int write_at(int fd, const uint8_t *from, uint64_t bytes, uint64_t offset)
{
	while (bytes) {
		ssize_t n = pwrite(fd, from, MIN(bytes, 1u << 30), (off_t)offset);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return n < 0 ? -errno : -EIO;
		from += n;
		bytes -= (uint64_t)n;
		offset += (uint64_t)n;
	}
	return 0;
}

/* Each at its own offset, so that the file is sparse and as long as the mapping. */
static int save_changed(struct pages *p, const struct mapping *m, int fd)
{
	uint64_t pages = m->bytes / PAGE_BYTES;

	if (ftruncate(fd, 0) < 0 || ftruncate(fd, (off_t)m->bytes) < 0)
		return -errno;
	for (uint64_t at = 0, n; at < pages; at += n) {
		int r;

		n = MIN(pages - at, PAGES_BATCH);
		r = pages_look(p, m->at + at * PAGE_BYTES, n);
		for (uint64_t i = 0, run; i < n && r == 0; i += run) {
			bool changed = page_private(p->entry[i]);

			for (run = 1; i + run < n && page_private(p->entry[i + run]) == changed;)
				run++;
			if (changed)
				r = write_at(fd, m->at + (at + i) * PAGE_BYTES, run * PAGE_BYTES, (at + i) * PAGE_BYTES);
		}
		if (r < 0)
			return r;
	}
	return 0;
}

static int save_pages(const struct mapping *m, int fd, const char *what, struct err *e)
{
	AUTO_FREE struct pages *p = malloc(sizeof(*p));
	int r;

	if (!p)
		return err_set(e, ENOMEM, "out of memory");
	r = pages_open(p, e);
	if (r < 0)
		return r;
	r = save_changed(p, m, fd);
	pages_close(p);
	return r < 0 ? err_set(e, -r, "cannot write the changed pages of %s: %s", what, strerror(-r)) : 0;
}

int machine_save(struct machine *m, int state, int memory, int disk, struct err *e)
{
	int r;

	if (m->state != MACHINE_PAUSED)
		return err_set(e, EBUSY, "only a paused machine can be saved");
	r = machine_capture(m, e);
	if (r == 0)
		r = state_end(&m->saved, e);
	if (r == 0)
		r = state_write(&m->saved, state, e);
	if (r == 0 && memory >= 0)
		r = save_pages(&m->ram, memory, "memory", e);
	if (r == 0 && disk >= 0 && m->disk.kind != MAPPING_NONE)
		r = save_pages(&m->disk, disk, "the disk", e);
	if (r == 0 && machine_check_end(m)) /* a page could not be read */
		r = err_set(e, EIO, "%s", m->ending.sentence);
	return r;
}
