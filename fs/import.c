/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tells what a root file system's source is, and makes a disk image of it.
 *
 * The source is whatever somebody wrote to `rootfs`. Nothing of it is ever mounted on the host or extracted into the
 * host's file system: a tar goes entry by entry into an image that libext2fs writes; an ext4 image is copied, checked
 * by e2fsck in a process of its own, and mounted by nobody but the guest. See import_tar.c, builder.c and
 * import_ext4.c for the limits of each.
 */
#include "import_private.h"

#include <sys/stat.h>

#define EXT4_MAGIC_AT (1024 + 56)
#define USTAR_AT 257

ssize_t import_read(struct import *i, void *to, size_t bytes, uint64_t at, struct err *e)
{
	ssize_t n;

	if (atomic_load(&i->cancel))
		return err_set(e, ECANCELED, "the import was cancelled");
	do
		n = pread(i->source, to, bytes, (off_t)at);
	while (n < 0 && errno == EINTR);
	if (n < 0)
		return err_set(e, EIO, "cannot read rootfs: %s", strerror(errno));
	atomic_store(&i->done_bytes, at + (uint64_t)n);
	return n;
}

const char *import_quote(const char *s, char *out, size_t n)
{
	size_t used = 0;

	for (; *s; s++) {
		unsigned char c = (unsigned char)*s;

		if (used + 8 >= n) {
			memcpy(out + used, "...", 4);
			return out;
		}
		if (c >= 0x20 && c < 0x7f)
			out[used++] = (char)c;
		else
			used += (size_t)snprintf(out + used, n - used, "\\%03o", c);
	}
	out[used] = 0;
	return out;
}

int import_rootfs(struct import *i, struct err *e)
{
	/* One inode for 8 KiB suits a distribution's root; only one of very many tiny files asks for more, and is
	 * read again. */
	unsigned ratio = i->disk_bytes < (4ull << 30) ? 8192 : 16384;
	unsigned char head[2048] = { 0 };
	bool more_inodes = false;
	struct err first = { 0 };
	struct stat st;
	ssize_t n;
	int r;

	if (fstat(i->source, &st))
		return err_set(e, EIO, "cannot read rootfs: %s", strerror(errno));
	if (st.st_size == 0)
		return err_set(e, EINVAL, "rootfs is empty");
	n = import_read(i, head, sizeof(head), 0, e);
	if (n < 0)
		return (int)n;
	/* The first KiB of an ext4 image is anybody's, so it may not be asked; a tar has its own magic there. */
	if (head[EXT4_MAGIC_AT] == 0x53 && head[EXT4_MAGIC_AT + 1] == 0xef && memcmp(head + USTAR_AT, "ustar", 5)) {
		snprintf(i->kind, sizeof(i->kind), "ext4");
		return import_ext4(i, e);
	}
	snprintf(i->kind, sizeof(i->kind), "tar");
	r = import_tar(i, ratio, &more_inodes, &first);
	if (r == -ENOSPC && more_inodes)
		return import_tar(i, 4096, &more_inodes, e);
	if (r)
		*e = first;
	return r;
}
