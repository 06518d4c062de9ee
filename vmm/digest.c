/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Digests of a machine. The page digest is over the pages that are not all zero, so what is known to be zero without a
 * look (a hole of the mapped file, anonymous memory never touched) is passed over; /proc/self/maps says what is mapped,
 * pagemap which pages are in the page tables. Without either, every page is looked at.
 */
#include <inttypes.h>
#include <openssl/evp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "digest.h"
#include "machine.h"
#include "memory.h"
#include "pages.h"

#define READ_BYTES (256u << 10)

static void cleanup_context(EVP_MD_CTX **c)
{
	EVP_MD_CTX_free(*c);
}
#define AUTO_CONTEXT __attribute__((cleanup(cleanup_context)))

/* One piece of the mapping, as /proc/self/maps has it. */
struct piece {
	const uint8_t *at;
	uint64_t bytes, offset; /* offset in the file */
	bool known;             /* what is mapped here is known: anonymous memory if fd is -1 */
	int fd;
	uint64_t data, hole;    /* of the file: from the last look on there is nothing before `data`, and data up to `hole` */
};

struct walk {
	EVP_MD_CTX *sha;
	const uint8_t *start;
	struct pages pages;
	uint8_t buffer[READ_BYTES] __attribute__((aligned(64)));
};

static bool all_zero(const uint8_t *page)
{
	const uint64_t *w = (const uint64_t *)(const void *)page;

	for (unsigned i = 0; i < PAGE_BYTES / sizeof(*w); i += 8)
		if (w[i] | w[i + 1] | w[i + 2] | w[i + 3] | w[i + 4] | w[i + 5] | w[i + 6] | w[i + 7])
			return false;
	return true;
}

static int add_page(struct walk *w, const uint8_t *place, const uint8_t *bytes)
{
	uint64_t index = (uint64_t)(place - w->start) / PAGE_BYTES; /* little-endian, as x86 is */

	if (all_zero(bytes))
		return 0;
	if (!EVP_DigestUpdate(w->sha, &index, sizeof(index)) || !EVP_DigestUpdate(w->sha, bytes, PAGE_BYTES))
		return -ENOMEM;
	return 0;
}

/* Whether the file has data at `offset` (page aligned); in doubt, it has. */
static bool has_data(struct piece *p, uint64_t offset)
{
	off_t at;

	if (offset < p->data)
		return false;
	if (offset < p->hole)
		return true;
	at = lseek(p->fd, (off_t)offset, SEEK_DATA);
	if (at < 0) {
		p->data = errno == ENXIO ? UINT64_MAX : offset;
		p->hole = UINT64_MAX;
		return p->data == offset;
	}
	p->data = (uint64_t)at / PAGE_BYTES * PAGE_BYTES;
	at = lseek(p->fd, at, SEEK_HOLE);
	p->hole = at < 0 ? UINT64_MAX : (uint64_t)at;
	return offset >= p->data;
}

/* `pages` pages from `at` on, none of them in the page tables. */
static int add_absent(struct walk *w, struct piece *p, const uint8_t *at, uint64_t pages)
{
	while (p->fd >= 0 && pages) {
		uint64_t offset = p->offset + (uint64_t)(at - p->at), n = 0, got = 0;

		while (n < pages && n < READ_BYTES / PAGE_BYTES && has_data(p, offset + n * PAGE_BYTES))
			n++;
		while (got < n * PAGE_BYTES) {
			ssize_t r = pread(p->fd, w->buffer + got, n * PAGE_BYTES - got, (off_t)(offset + got));

			if (r < 0)
				return -errno;
			if (r == 0) { /* the last page's end is past the file's */
				memset(w->buffer + got, 0, n * PAGE_BYTES - got);
				break;
			}
			got += (uint64_t)r;
		}
		for (uint64_t i = 0; i < n; i++)
			if (add_page(w, at + i * PAGE_BYTES, w->buffer + i * PAGE_BYTES) < 0)
				return -ENOMEM;
		n = MAX(n, 1u); /* a hole's page */
		at += n * PAGE_BYTES;
		pages -= n;
	}
	return 0;
}

static int add_piece(struct walk *w, struct piece *p)
{
	uint64_t total = p->bytes / PAGE_BYTES;

	for (uint64_t done = 0, n; done < total; done += n) {
		const uint8_t *at = p->at + done * PAGE_BYTES;

		n = MIN(total - done, PAGES_BATCH);
		if (!p->known || w->pages.fd < 0 || pages_look(&w->pages, at, n) < 0)
			memset(w->pages.entry, 0xff, sizeof(w->pages.entry));
		for (uint64_t i = 0, run; i < n; i += run) {
			bool there = page_there(w->pages.entry[i]);
			int r = 0;

			for (run = 1; i + run < n && page_there(w->pages.entry[i + run]) == there;)
				run++;
			if (!there)
				r = add_absent(w, p, at + i * PAGE_BYTES, run);
			for (uint64_t k = i; there && k < i + run && r == 0; k++)
				r = add_page(w, at + k * PAGE_BYTES, at + k * PAGE_BYTES);
			if (r < 0)
				return r;
		}
	}
	return 0;
}

/* The mapped file, by whichever way lets us have it; it must be the file that is mapped. */
static int open_mapped(uint64_t from, uint64_t to, dev_t dev, uint64_t inode, const char *path)
{
	char link[64];
	struct stat st;
	AUTO_CLOSE int fd = -1;

	snprintf(link, sizeof(link), "/proc/self/map_files/%" PRIx64 "-%" PRIx64, from, to);
	fd = open(link, O_RDONLY | O_CLOEXEC);
	if (fd < 0 && path[0] == '/')
		fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || st.st_dev != dev || st.st_ino != inode)
		return -1;
	return steal_fd(&fd);
}

/* Fills *p from a line of maps, if it is about part of [at, end). */
static bool parse_piece(const char *line, const uint8_t *at, const uint8_t *end, struct piece *p)
{
	uint64_t from, to, offset, inode;
	unsigned major_number, minor_number;
	int path = 0;

	if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %*s %" SCNx64 " %x:%x %" SCNu64 " %n", &from, &to, &offset, &major_number,
		   &minor_number, &inode, &path) < 6 ||
	    to <= (uintptr_t)at || from >= (uintptr_t)end)
		return false;
	*p = (struct piece){ .fd = -1, .known = inode == 0 };
	if (inode) {
		p->fd = open_mapped(from, to, makedev(major_number, minor_number), inode, line + path);
		p->known = p->fd >= 0;
	}
	p->at = MAX(at, (const uint8_t *)(uintptr_t)from);
	p->bytes = (uint64_t)(MIN(end, (const uint8_t *)(uintptr_t)to) - p->at);
	p->offset = offset + (uint64_t)(p->at - (const uint8_t *)(uintptr_t)from);
	return true;
}

static int walk_all(struct walk *w, uint64_t bytes)
{
	const uint8_t *at = w->start, *end = w->start + bytes;
	AUTO_FILE FILE *maps = fopen("/proc/self/maps", "re");
	AUTO_FREE char *line = NULL;
	size_t room = 0;
	ssize_t n;
	int r = 0;

	while (maps && r == 0 && at < end && (n = getline(&line, &room, maps)) > 0) {
		struct piece p;

		if (line[n - 1] == '\n')
			line[n - 1] = 0;
		if (!parse_piece(line, at, end, &p))
			continue;
		if (p.at == at) {
			r = add_piece(w, &p);
			at += p.bytes;
		}
		if (p.fd >= 0)
			close(p.fd);
	}
	if (r == 0 && at < end) {
		struct piece rest = { .at = at, .bytes = (uint64_t)(end - at), .fd = -1 };

		r = add_piece(w, &rest);
	}
	return r;
}

static int finish(EVP_MD_CTX *sha, int r, uint8_t digest[DIGEST_BYTES], struct err *e)
{
	if (r == 0 && !EVP_DigestFinal_ex(sha, digest, NULL))
		r = -ENOMEM;
	if (r < 0)
		return err_set(e, -r, "cannot compute a digest: %s", strerror(-r));
	return 0;
}

static int start(EVP_MD_CTX *sha)
{
	return sha && EVP_DigestInit_ex(sha, EVP_sha256(), NULL) ? 0 : -ENOMEM;
}

int digest_pages(const uint8_t *at, uint64_t bytes, uint8_t digest[DIGEST_BYTES], struct err *e)
{
	AUTO_CONTEXT EVP_MD_CTX *sha = EVP_MD_CTX_new();
	AUTO_FREE struct walk *w = NULL;
	int r = start(sha);

	if (posix_memalign((void **)&w, 64, sizeof(*w)) != 0) {
		w = NULL;
		r = -ENOMEM;
	}
	if (r == 0) {
		w->sha = sha;
		w->start = at;
		pages_open(&w->pages, NULL);
		r = walk_all(w, bytes);
		pages_close(&w->pages);
	}
	return finish(sha, r, digest, e);
}

int digest_file(int fd, uint8_t digest[DIGEST_BYTES], struct err *e)
{
	AUTO_CONTEXT EVP_MD_CTX *sha = EVP_MD_CTX_new();
	uint8_t buffer[16384];
	off_t at = 0;
	int r = start(sha);

	while (r == 0) {
		ssize_t n = pread(fd, buffer, sizeof(buffer), at);

		if (n == 0)
			break;
		if (n < 0)
			r = -errno;
		else if (!EVP_DigestUpdate(sha, buffer, (size_t)n))
			r = -ENOMEM;
		at += n;
	}
	return finish(sha, r, digest, e);
}

int machine_digest(struct machine *m, uint8_t digest[3][32], struct err *e)
{
	const struct memory *memory = machine_memory(m);
	uint8_t out[3][DIGEST_BYTES];
	/* The state as MACHINE_SAVE writes it; by the bytes, so that whoever has the file can check. */
	AUTO_CLOSE int state = memfd_create("vmenv-state", MFD_CLOEXEC);
	int r;

	if (state < 0)
		return err_set(e, errno, "cannot make a memory file: %s", strerror(errno));
	r = machine_save(m, state, -1, -1, e);
	if (r == 0)
		r = digest_file(state, out[2], e);
	if (r == 0)
		r = digest_pages(memory->ram, memory->ram_bytes, out[0], e);
	if (r == 0)
		r = digest_pages(memory->disk, memory->disk ? memory->disk_bytes : 0, out[1], e);
	if (r == 0)
		memcpy(digest, out, sizeof(out));
	return r;
}
