/* SPDX-License-Identifier: Apache-2.0 */
/* Host mappings behind guest memory and disk. */
#include "mapping.h"

#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define PAGE 4096ull
#define MAPPING_MAX (1ull << 40)

static uint64_t round_up(uint64_t n, uint64_t to)
{
	return (n + to - 1) / to * to;
}

/* Address space of `bytes`, 2 MiB aligned, readable and writable but empty and unaccounted. */
static int reserve(struct mapping *m, uint64_t bytes, struct err *e)
{
	uint64_t room = bytes + MAPPING_ALIGN;
	uint8_t *p, *start;

	if (bytes == 0 || bytes > MAPPING_MAX)
		return err_set(e, EINVAL, "cannot map %llu bytes", (unsigned long long)bytes);
	p = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (p == MAP_FAILED)
		return err_set(e, errno, "cannot map %llu MB: %s", (unsigned long long)(bytes >> 20), strerror(errno));
	start = (uint8_t *)round_up((uintptr_t)p, MAPPING_ALIGN);
	if (start > p)
		munmap(p, (size_t)(start - p));
	munmap(start + bytes, (size_t)(p + room - (start + bytes)));
	m->at = start;
	m->bytes = bytes;
	m->kind = MAPPING_ANONYMOUS;
	return 0;
}

/* A core dump of a machine process is about the process. */
static void keep_out_of_dumps(const struct mapping *m)
{
	madvise(m->at, m->bytes, MADV_DONTDUMP);
}

int mapping_anonymous(struct mapping *m, uint64_t bytes, struct err *e)
{
	int r = reserve(m, bytes, e);

	if (r == 0)
		keep_out_of_dumps(m);
	return r;
}

static int size_of(const struct mapping_file *f, int fd, uint64_t *file, uint64_t *bytes, struct err *e)
{
	struct stat st;

	if (f->make && ftruncate(fd, (off_t)f->bytes) < 0)
		return err_set(e, errno, "cannot make %s %llu MB long: %s", f->path, (unsigned long long)(f->bytes >> 20),
			       strerror(errno));
	if (fstat(fd, &st) < 0)
		return err_set(e, errno, "cannot open %s: %s", f->path, strerror(errno));
	if (!S_ISREG(st.st_mode) || st.st_size <= 0)
		return err_set(e, EINVAL, "%s is not a file with something in it", f->path);
	*file = (uint64_t)st.st_size;
	*bytes = f->bytes;
	if (f->bytes && *file != f->bytes)
		return err_set(e, EINVAL, "%s is %llu bytes long and should be %llu", f->path, (unsigned long long)*file,
			       (unsigned long long)f->bytes);
	if (!f->bytes)
		*bytes = round_up(*file, MAPPING_ALIGN);
	if (*bytes != *file && !f->padded)
		return err_set(e, EINVAL, "%s is not a multiple of 2 MiB long", f->path);
	return 0;
}

int mapping_open(struct mapping *m, const struct mapping_file *f, struct err *e)
{
	bool shared = f->kind == MAPPING_SHARED;
	uint64_t file = 0, bytes = 0;
	AUTO_CLOSE int fd = open(f->path, (shared ? O_RDWR : O_RDONLY) | (f->make ? O_CREAT : 0) | O_CLOEXEC, 0600);
	int r;

	if (fd < 0)
		return err_set(e, errno, "cannot open %s: %s", f->path, strerror(errno));
	r = size_of(f, fd, &file, &bytes, e);
	if (r == 0)
		r = reserve(m, bytes, e);
	if (r < 0)
		return r;
	if (mmap(m->at, file, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_NORESERVE | (shared ? MAP_SHARED : MAP_PRIVATE), fd, 0) ==
	    MAP_FAILED) {
		r = err_set(e, errno, "cannot map %s: %s", f->path, strerror(errno));
		mapping_close(m);
		return r;
	}
	m->kind = f->kind;
	keep_out_of_dumps(m);
	return 0;
}

void mapping_close(struct mapping *m)
{
	if (m->kind != MAPPING_NONE)
		munmap(m->at, m->bytes);
	*m = (struct mapping){ 0 };
}

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

void mapping_populate(const struct mapping *m, const char *path)
{
	AUTO_CLOSE int fd = open(path, O_RDONLY | O_CLOEXEC);
	off_t at = 0, end;

	while (fd >= 0 && (at = lseek(fd, at, SEEK_DATA)) >= 0 && (uint64_t)at < m->bytes) {
		end = lseek(fd, at, SEEK_HOLE);
		if (end < 0)
			break;
		at -= at % (off_t)PAGE;
		end = (off_t)MIN(round_up((uint64_t)end, PAGE), m->bytes);
		/* Best effort: where it fails, the guest faults the pages in. */
		madvise(m->at + at, (size_t)(end - at), MADV_POPULATE_READ);
		at = end;
	}
	mapping_own(m);
}

void mapping_own(const struct mapping *m)
{
	volatile uint8_t *page = m->at;

	*page = *page;
}

/* What the handler knows. Written once before any thread is started, and by the handler itself. */
static struct guard {
	const struct mapping *mapping[2];
	int notice_fd;
	atomic_bool hit;
} guard;

static void on_sigbus(int signal_number, siginfo_t *info, void *context)
{
	uint8_t *page = (uint8_t *)((uintptr_t)info->si_addr & ~(PAGE - 1));
	int saved = errno;
	uint64_t one = 1;

	for (unsigned i = 0; i < ARRAY_SIZE(guard.mapping); i++) {
		const struct mapping *m = guard.mapping[i];

		if (!m || page < m->at || page >= m->at + m->bytes)
			continue;
		if (mmap(page, PAGE, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED)
			break;
		atomic_store(&guard.hit, true);
		if (write(guard.notice_fd, &one, sizeof(one)) < 0)
			break;
		errno = saved;
		return;
	}
	signal(signal_number, SIG_DFL);
	raise(signal_number);
}

void mapping_guard(const struct mapping *ram, const struct mapping *disk, int notice_fd)
{
	struct sigaction a = { .sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO };

	guard.mapping[0] = ram;
	guard.mapping[1] = disk;
	guard.notice_fd = notice_fd;
	sigaction(SIGBUS, &a, NULL);
}

bool mapping_guard_hit(void)
{
	return atomic_load(&guard.hit);
}

void mapping_unguard(void)
{
	guard.mapping[0] = guard.mapping[1] = NULL;
}
