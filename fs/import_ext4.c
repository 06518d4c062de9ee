/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes a disk image of an ext4 image: copied without its zeros, checked, grown to the size of the disk.
 *
 * The image is hostile: its superblock is read here, field by field, for size and features; the rest is e2fsck's, run
 * as a process of its own with limits on its memory and time. What e2fsck will not repair unasked is refused. Its
 * kind, ext2 and ext3 included, and its journal if it has one, stay as they are.
 */
#include "import_private.h"
#include "mkfs.h"

#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define TOOL_MEMORY (4ull << 30)
#define TOOL_SECONDS 3600
#define TOOL_IMAGE "/proc/self/fd/3"

/* --- features --- */

enum word { COMPAT, INCOMPAT, RO_COMPAT, WORDS };

/* What the guest's kernel mounts with DAX, and e2fsck and resize2fs handle. All else is refused, also what is not
 * known here. */
static const uint32_t served[WORDS] = {
	[COMPAT] = EXT2_FEATURE_COMPAT_DIR_PREALLOC | EXT3_FEATURE_COMPAT_HAS_JOURNAL | EXT2_FEATURE_COMPAT_EXT_ATTR |
		   EXT2_FEATURE_COMPAT_RESIZE_INODE | EXT2_FEATURE_COMPAT_DIR_INDEX |
		   EXT4_FEATURE_COMPAT_SPARSE_SUPER2 | EXT4_FEATURE_COMPAT_FAST_COMMIT | EXT4_FEATURE_COMPAT_ORPHAN_FILE,
	[INCOMPAT] = EXT2_FEATURE_INCOMPAT_FILETYPE | EXT3_FEATURE_INCOMPAT_RECOVER | EXT2_FEATURE_INCOMPAT_META_BG |
		     EXT3_FEATURE_INCOMPAT_EXTENTS | EXT4_FEATURE_INCOMPAT_64BIT | EXT4_FEATURE_INCOMPAT_FLEX_BG |
		     EXT4_FEATURE_INCOMPAT_EA_INODE | EXT4_FEATURE_INCOMPAT_CSUM_SEED | EXT4_FEATURE_INCOMPAT_LARGEDIR,
	[RO_COMPAT] = EXT2_FEATURE_RO_COMPAT_SPARSE_SUPER | EXT2_FEATURE_RO_COMPAT_LARGE_FILE |
		      EXT4_FEATURE_RO_COMPAT_HUGE_FILE | EXT4_FEATURE_RO_COMPAT_GDT_CSUM |
		      EXT4_FEATURE_RO_COMPAT_DIR_NLINK | EXT4_FEATURE_RO_COMPAT_EXTRA_ISIZE | EXT4_FEATURE_RO_COMPAT_QUOTA |
		      EXT4_FEATURE_RO_COMPAT_METADATA_CSUM | EXT4_FEATURE_RO_COMPAT_PROJECT |
		      EXT4_FEATURE_RO_COMPAT_ORPHAN_PRESENT,
};

static const struct {
	enum word word;
	uint32_t bit;
	const char *name;
} refused_names[] = {
	{ INCOMPAT, EXT2_FEATURE_INCOMPAT_COMPRESSION, "compression" },
	{ INCOMPAT, EXT3_FEATURE_INCOMPAT_JOURNAL_DEV, "journal_dev" },
	{ INCOMPAT, EXT4_FEATURE_INCOMPAT_MMP, "mmp" },
	{ INCOMPAT, EXT4_FEATURE_INCOMPAT_INLINE_DATA, "inline_data" },
	{ INCOMPAT, EXT4_FEATURE_INCOMPAT_ENCRYPT, "encrypt" },
	{ INCOMPAT, EXT4_FEATURE_INCOMPAT_CASEFOLD, "casefold" },
	{ RO_COMPAT, EXT4_FEATURE_RO_COMPAT_BIGALLOC, "bigalloc" },
	{ RO_COMPAT, EXT4_FEATURE_RO_COMPAT_READONLY, "read-only" },
	{ RO_COMPAT, EXT4_FEATURE_RO_COMPAT_SHARED_BLOCKS, "shared_blocks" },
	{ RO_COMPAT, EXT4_FEATURE_RO_COMPAT_VERITY, "verity" },
};

static int check_features(const struct ext2_super_block *sb, struct err *e)
{
	static const char *const word_names[WORDS] = { "compat", "incompat", "ro_compat" };
	const uint32_t has[WORDS] = { sb->s_feature_compat, sb->s_feature_incompat, sb->s_feature_ro_compat };

	for (size_t i = 0; i < ARRAY_SIZE(refused_names); i++)
		if (has[refused_names[i].word] & refused_names[i].bit)
			return err_set(e, EINVAL,
				       "the ext4 image has the feature %s, which a machine's disk cannot have",
				       refused_names[i].name);
	for (int w = 0; w < WORDS; w++)
		if (has[w] & ~served[w])
			return err_set(e, EINVAL, "the ext4 image has a feature that is not known (%s 0x%x)",
				       word_names[w], has[w] & ~served[w]);
	return 0;
}

/* Reads and checks the superblock: the file system's length in *bytes. */
static int check_superblock(struct import *i, uint64_t *bytes, struct err *e)
{
	struct ext2_super_block sb;
	uint64_t blocks;
	struct stat st;
	ssize_t n = import_read(i, &sb, sizeof(sb), SUPERBLOCK_OFFSET, e);
	int r;

	if (n < 0)
		return (int)n;
	if (n != sizeof(sb) || fstat(i->source, &st))
		return err_set(e, EINVAL, "the ext4 image is cut off in its superblock");
	if (sb.s_rev_level > EXT2_DYNAMIC_REV)
		return err_set(e, EINVAL, "the ext4 image is of revision %u, which is not known", sb.s_rev_level);
	r = check_features(&sb, e);
	if (r)
		return r;
	if (sb.s_log_block_size != 2)
		return err_set(e, EINVAL, "the ext4 image's block size is %llu, not 4096 (make it with mke2fs -b 4096)",
			       sb.s_log_block_size < 16 ? 1024ull << sb.s_log_block_size : 0ull);
	blocks = sb.s_blocks_count;
	if (sb.s_feature_incompat & EXT4_FEATURE_INCOMPAT_64BIT)
		blocks |= (uint64_t)sb.s_blocks_count_hi << 32;
	if (blocks == 0 || blocks > UINT64_MAX / EXT4_BLOCK)
		return err_set(e, EINVAL, "the ext4 image's superblock says it has no size that can be");
	*bytes = blocks * EXT4_BLOCK;
	if (*bytes > (uint64_t)st.st_size)
		return err_set(e, EINVAL, "the ext4 image is cut off: %llu bytes of %llu",
			       (unsigned long long)st.st_size, (unsigned long long)*bytes);
	if (*bytes > i->disk_bytes)
		return err_set(e, ENOSPC, "the ext4 image is of %llu MiB and the disk of %llu MiB",
			       (unsigned long long)((*bytes + (1 << 20) - 1) >> 20),
			       (unsigned long long)(i->disk_bytes >> 20));
	return 0;
}

/* --- copy --- */

static bool all_zero(const char *p, size_t n)
{
	return n == 0 || (p[0] == 0 && !memcmp(p, p + 1, n - 1));
}

static int write_all(int fd, const char *p, size_t n, uint64_t at, struct err *e)
{
	while (n) {
		ssize_t w = pwrite(fd, p, n, (off_t)at);

		if (w < 0 && errno == EINTR)
			continue;
		if (w <= 0) {
			bool full = w < 0 && (errno == ENOSPC || errno == EDQUOT);

			return err_set(e, full ? ENOSPC : EIO, "cannot write the disk image: %s",
				       strerror(w < 0 ? errno : EIO));
		}
		p += w;
		at += (uint64_t)w;
		n -= (size_t)w;
	}
	return 0;
}

static int copy_image(struct import *i, uint64_t bytes, struct err *e)
{
	AUTO_FREE char *piece = malloc(IMPORT_PIECE);
	uint64_t at = 0;

	if (!piece)
		return err_set(e, ENOMEM, "out of memory for copying the image");
	if (ftruncate(i->image, 0) || ftruncate(i->image, (off_t)i->disk_bytes))
		return err_set(e, EIO, "cannot make the disk image %llu MiB long: %s",
			       (unsigned long long)(i->disk_bytes >> 20), strerror(errno));
	while (at < bytes) {
		off_t data = lseek(i->source, (off_t)at, SEEK_DATA);
		ssize_t n;

		/* No more data, or a file system that does not tell. */
		if (data < 0 && errno == ENXIO)
			break;
		if (data > (off_t)at)
			at = (uint64_t)data / EXT4_BLOCK * EXT4_BLOCK;
		if (at >= bytes)
			break;
		n = import_read(i, piece, (size_t)MIN((uint64_t)IMPORT_PIECE, bytes - at), at, e);
		if (n < 0)
			return (int)n;
		if (n == 0)
			return err_set(e, EINVAL, "the ext4 image was cut off while it was read");
		for (size_t from = 0; from < (size_t)n;) {
			size_t to = from;
			int r;

			while (to < (size_t)n && !all_zero(piece + to, MIN(EXT4_BLOCK, (size_t)n - to)))
				to += MIN(EXT4_BLOCK, (size_t)n - to);
			r = to > from ? write_all(i->image, piece + from, to - from, at + from, e) : 0;
			if (r)
				return r;
			from = to;
			while (from < (size_t)n && all_zero(piece + from, MIN(EXT4_BLOCK, (size_t)n - from)))
				from += MIN(EXT4_BLOCK, (size_t)n - from);
		}
		at += (uint64_t)n;
	}
	return 0;
}

/* --- e2fsck and resize2fs --- */

/* Keeps the end of what a tool printed: the reason comes last. */
static void keep_tail(char *tail, size_t size, const char *more, size_t n)
{
	size_t have = strlen(tail);

	if (n >= size)
		more += n - (size - 1), n = size - 1;
	if (have + n >= size) {
		size_t drop = have + n - (size - 1);

		memmove(tail, tail + drop, have - drop);
		have -= drop;
	}
	memcpy(tail + have, more, n);
	tail[have + n] = 0;
}

/* Starts tool ARGUMENTS... with the image as descriptor 3, and its output in a pipe. */
static int start(struct import *i, char *const argv[], pid_t *pid, int *output, struct err *e)
{
	char *const env[] = { "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C", NULL };
	posix_spawn_file_actions_t actions;
	posix_spawnattr_t attributes;
	AUTO_CLOSE int from = -1;
	AUTO_CLOSE int to = -1;
	sigset_t none, all;
	char path[64];
	int fds[2], r = 0;

	if (pipe2(fds, O_CLOEXEC))
		return err_set(e, errno, "cannot start %s: %s", argv[0], strerror(errno));
	from = fds[0];
	to = fds[1];
	snprintf(path, sizeof(path), "/usr/sbin/%s", argv[0]);
	if (access(path, X_OK))
		snprintf(path, sizeof(path), "/sbin/%s", argv[0]);
	sigemptyset(&none);
	sigfillset(&all);
	posix_spawn_file_actions_init(&actions);
	posix_spawnattr_init(&attributes);
	posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
	posix_spawnattr_setsigmask(&attributes, &none);
	posix_spawnattr_setsigdefault(&attributes, &all);
	r = posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
	if (!r)
		r = posix_spawn_file_actions_adddup2(&actions, to, 1);
	if (!r)
		r = posix_spawn_file_actions_adddup2(&actions, to, 2);
	if (!r)
		r = posix_spawn_file_actions_adddup2(&actions, i->image, 3);
	if (!r)
		r = posix_spawn_file_actions_addclosefrom_np(&actions, 4);
	if (!r)
		r = posix_spawn(pid, path, &actions, &attributes, argv, env);
	posix_spawn_file_actions_destroy(&actions);
	posix_spawnattr_destroy(&attributes);
	if (r)
		return err_set(e, EIO, "cannot start %s (Debian package e2fsprogs): %s", argv[0], strerror(r));
	*output = steal_fd(&from);
	return 0;
}

/* Runs a tool to its end: its exit code, and the end of what it printed. */
static int run_tool(struct import *i, char *const argv[], int *code, char *tail, size_t size, struct err *e)
{
	const struct rlimit memory = { TOOL_MEMORY, TOOL_MEMORY }, core = { 0, 0 };
	const struct rlimit seconds = { TOOL_SECONDS, TOOL_SECONDS };
	AUTO_CLOSE int output = -1;
	bool cancelled = false;
	char piece[1024];
	pid_t pid = 0;
	int status = 0, r = start(i, argv, &pid, &output, e);

	if (r)
		return r;
	prlimit(pid, RLIMIT_AS, &memory, NULL);
	prlimit(pid, RLIMIT_CPU, &seconds, NULL);
	prlimit(pid, RLIMIT_CORE, &core, NULL);
	for (;;) {
		struct pollfd p = { .fd = output, .events = POLLIN };
		ssize_t n;

		if (!cancelled && atomic_load(&i->cancel)) {
			cancelled = true;
			kill(pid, SIGKILL);
		}
		if (poll(&p, 1, 100) <= 0)
			continue;
		n = read(output, piece, sizeof(piece));
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			break;
		keep_tail(tail, size, piece, (size_t)n);
	}
	do
		r = waitpid(pid, &status, 0);
	while (r < 0 && errno == EINTR);
	if (cancelled)
		return err_set(e, ECANCELED, "the import was cancelled");
	if (r < 0)
		return err_set(e, EIO, "cannot tell how %s ended: %s", argv[0], strerror(errno));
	*code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
	return 0;
}

/* The last lines of a tool's output as part of a sentence. */
static const char *reason(char *tail, char *out, size_t n)
{
	char *p;

	while ((p = strstr(tail, TOOL_IMAGE ": ")))
		memmove(p, p + strlen(TOOL_IMAGE ": "), strlen(p + strlen(TOOL_IMAGE ": ")) + 1);
	for (p = tail; *p; p++)
		if (*p == '\n' || *p == '\t')
			*p = ' ';
	while (p > tail && p[-1] == ' ')
		*--p = 0;
	return import_quote(tail, out, n);
}

static int check(struct import *i, struct err *e)
{
	char *const argv[] = { "e2fsck", "-f", "-p", TOOL_IMAGE, NULL };
	char tail[240] = "", text[260];
	int code = 0, r = run_tool(i, argv, &code, tail, sizeof(tail), e);

	if (r)
		return r;
	/* 1 and 2: it repaired what is safe to repair, such as a journal that was not played back. */
	if (code > 2)
		return err_set(e, EINVAL, "the ext4 image has errors (e2fsck -fp exits %d): %s", code,
			       reason(tail, text, sizeof(text)));
	return 0;
}

static int grow(struct import *i, struct err *e)
{
	char *const argv[] = { "resize2fs", "-f", TOOL_IMAGE, NULL };
	char tail[240] = "", text[260];
	int code = 0, r = run_tool(i, argv, &code, tail, sizeof(tail), e);

	if (r)
		return r;
	if (code)
		return err_set(e, EINVAL, "the ext4 image cannot be made larger (resize2fs exits %d): %s", code,
			       reason(tail, text, sizeof(text)));
	return 0;
}

/* --- inode tables --- */

/*
 * Zeroes the unused parts of inode tables and says so in the group descriptors. Otherwise the guest's kernel would do
 * it in the background, in every clone of the machine, in its private memory.
 */
static int zero_tables(struct import *i, struct err *e)
{
	ext2_filsys fs = NULL;
	errcode_t code = 0;

	if (mkfs_open_existing(i->image, EXT2_FLAG_RW, &fs, &code)) {
		if (fs)
			ext2fs_free(fs);
		return err_set(e, EINVAL, "the ext4 image cannot be opened: %s", error_message(code));
	}
	if (ext2fs_has_group_desc_csum(fs)) {
		uint32_t per_block = EXT4_BLOCK / EXT2_INODE_SIZE(fs->super);

		for (dgrp_t g = 0; g < fs->group_desc_count && !code; g++) {
			uint32_t inodes = fs->super->s_inodes_per_group, used = inodes - ext2fs_bg_itable_unused(fs, g);
			uint32_t first = (used + per_block - 1) / per_block;
			off_t at;

			if (ext2fs_bg_flags_test(fs, g, EXT2_BG_INODE_ZEROED))
				continue;
			if (ext2fs_bg_flags_test(fs, g, EXT2_BG_INODE_UNINIT))
				first = 0;
			at = (off_t)(ext2fs_inode_table_loc(fs, g) + first) * EXT4_BLOCK;
			if (first < fs->inode_blocks_per_group &&
			    fallocate(i->image, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at,
				      (off_t)(fs->inode_blocks_per_group - first) * EXT4_BLOCK))
				code = io_channel_zeroout(fs->io, (uint64_t)at / EXT4_BLOCK,
							  fs->inode_blocks_per_group - first);
			ext2fs_bg_flags_set(fs, g, EXT2_BG_INODE_ZEROED);
			ext2fs_group_desc_csum_set(fs, g);
			ext2fs_mark_super_dirty(fs);
		}
	}
	if (!code)
		code = ext2fs_close2(fs, EXT2_FLAG_FLUSH_NO_SYNC);
	if (code) {
		ext2fs_free(fs);
		return mkfs_error(e, code, "preparing the ext4 image");
	}
	return 0;
}

int import_ext4(struct import *i, struct err *e)
{
	uint64_t bytes = 0;
	int r = check_superblock(i, &bytes, e);

	if (!r)
		r = copy_image(i, bytes, e);
	if (!r)
		r = check(i, e);
	if (!r && bytes < i->disk_bytes)
		r = grow(i, e);
	return r ? r : zero_tables(i, e);
}
