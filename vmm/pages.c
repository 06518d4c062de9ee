/* SPDX-License-Identifier: Apache-2.0 */
/* Reading /proc/self/pagemap, and a machine's use of memory by it. */
#include "machine.h"
#include "memory.h"
#include "pages.h"

int pages_open(struct pages *p, struct err *e)
{
	p->fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	if (p->fd < 0)
		return err_set(e, errno, "cannot open /proc/self/pagemap: %s", strerror(errno));
	return 0;
}

void pages_close(struct pages *p)
{
	if (p->fd >= 0)
		close(p->fd);
	p->fd = -1;
}

int pages_look(struct pages *p, const uint8_t *at, uint64_t pages)
{
	size_t want = MIN(pages, PAGES_BATCH) * sizeof(p->entry[0]);
	uint64_t offset = (uintptr_t)at / PAGE_BYTES * sizeof(p->entry[0]);
	ssize_t n = pread(p->fd, p->entry, want, (off_t)offset);

	if (n < 0)
		return -errno;
	return (size_t)n == want ? 0 : -EIO;
}

int pages_use(struct pages *p, const uint8_t *at, uint64_t bytes, struct page_use *use)
{
	uint64_t own = 0, resident = 0;

	for (uint64_t done = 0, n; done < bytes / PAGE_BYTES; done += n) {
		int r;

		n = MIN(bytes / PAGE_BYTES - done, PAGES_BATCH);
		r = pages_look(p, at + done * PAGE_BYTES, n);
		if (r < 0)
			return r;
		for (uint64_t i = 0; i < n; i++) {
			own += page_private(p->entry[i]);
			resident += page_resident(p->entry[i]);
		}
	}
	use->private_bytes = own * PAGE_BYTES;
	use->resident_bytes = resident * PAGE_BYTES;
	return 0;
}

void machine_use(struct machine *m, struct machine_use *u)
{
	const struct memory *memory = machine_memory(m);
	struct page_use ram = { 0 }, disk = { 0 };
	AUTO_FREE struct pages *p = malloc(sizeof(*p));

	*u = (struct machine_use){ 0 };
	if (!p || pages_open(p, NULL) < 0)
		return;
	pages_use(p, memory->ram, memory->ram_bytes, &ram);
	if (memory->disk)
		pages_use(p, memory->disk, memory->disk_bytes, &disk);
	pages_close(p);
	u->private_memory_bytes = ram.private_bytes;
	u->private_disk_bytes = disk.private_bytes;
	u->private_bytes = ram.private_bytes + disk.private_bytes;
	u->resident_bytes = ram.resident_bytes + disk.resident_bytes;
}
