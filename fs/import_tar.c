/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads a tar, plain or compressed by gzip, zstd or xz, into a new ext4 image.
 *
 * Two libarchive readers, one behind the other: the first only decompresses, the second only parses tar. So every
 * byte the parser takes passes through `feed`, which can say how many it took: a header (with its pax records, long
 * names and sparse map, which the parser keeps in memory) is at most HEADER_MAX bytes, and an archive without its end
 * marker is known to be cut off. How much an archive unpacks to is bounded by the image, how long it takes by
 * i->cancel.
 *
 * Owners and groups are by number. Absolute paths are taken as relative to the root; a path with ".." is refused.
 */
#include "builder.h"
#include "import_private.h"

#include <archive.h>
#include <archive_entry.h>
#include <locale.h>
#include <sys/stat.h>

#define HEADER_MAX (8u << 20)
#define NEED_SECONDS 5 /* how long to read on after the image is full, to say how much there is */

#define NOT_AN_ARCHIVE "rootfs is neither an ext4 image nor a tar (plain, gzip, zstd, xz)"

struct tar {
	struct import *import;
	struct builder *builder;
	struct archive *unpack, *parse;
	bool started;
	uint64_t source_at; /* bytes of the source read */
	uint64_t fed;       /* bytes of tar given to the parser */
	uint64_t header_at; /* `fed` when this header began; UINT64_MAX: not in a header */
	struct err failure; /* of the source, the decompressor or `feed`: it counts, not what the parser makes of it */
	char piece[IMPORT_PIECE];
	char name[240]; /* of the entry at hand, for sentences */
	struct archive_entry *entry;
	uint64_t written; /* of its data */
};

static la_ssize_t read_source(struct archive *a, void *arg, const void **bytes)
{
	struct tar *t = arg;
	ssize_t n = import_read(t->import, t->piece, sizeof(t->piece), t->source_at, &t->failure);

	if (n < 0) {
		archive_set_error(a, t->failure.code, "%s", t->failure.text);
		return -1;
	}
	t->source_at += (uint64_t)n;
	*bytes = t->piece;
	return n;
}

static la_ssize_t feed(struct archive *a, void *arg, const void **bytes)
{
	struct tar *t = arg;
	size_t n = 0;
	int64_t at = 0;
	int r = ARCHIVE_OK;

	if (t->header_at != UINT64_MAX && t->fed - t->header_at > HEADER_MAX) {
		err_set(&t->failure, EINVAL, "a header of more than %u MiB", HEADER_MAX >> 20);
		archive_set_error(a, EINVAL, "%s", t->failure.text);
		return -1;
	}
	if (!t->started) {
		struct archive_entry *whole;

		r = archive_read_next_header(t->unpack, &whole);
		t->started = true;
	}
	while (r == ARCHIVE_OK && n == 0)
		r = archive_read_data_block(t->unpack, bytes, &n, &at);
	if (r == ARCHIVE_EOF)
		return 0;
	if (r < ARCHIVE_WARN) {
		char text[200];
		const char *why = archive_error_string(t->unpack);

		if (!t->failure.code)
			err_set(&t->failure, EINVAL, "rootfs cannot be decompressed: %s",
				import_quote(why ? why : "no reason given", text, sizeof(text)));
		archive_set_error(a, t->failure.code, "%s", t->failure.text);
		return -1;
	}
	t->fed += n;
	return (la_ssize_t)n;
}

/* What the parser or `feed` said, with the entry it was about. */
static int archive_failure(struct tar *t, struct err *e)
{
	const char *why = archive_error_string(t->parse);
	char text[200];

	if (t->failure.code == ECANCELED || t->failure.code == EIO) {
		*e = t->failure;
		return -e->code;
	}
	if (t->failure.code)
		why = t->failure.text;
	else if (!t->name[0] && !archive_format(t->parse))
		return err_set(e, EINVAL, NOT_AN_ARCHIVE);
	import_quote(why ? why : "no reason given", text, sizeof(text));
	if (!t->name[0])
		return err_set(e, EINVAL, t->failure.code ? "%s" : "the tar is broken at its start: %s", text);
	return err_set(e, EINVAL, "the tar is broken at or after \"%s\": %s", t->name, text);
}

/* Puts the entry's name before what the builder refused. */
static int entry_failure(struct tar *t, int r, struct err *e)
{
	struct err inner = *e;

	if (!r)
		return 0;
	return err_set(e, inner.code, "\"%s\": %.220s", t->name, inner.text);
}

static int copy_data(struct tar *t, struct err *e)
{
	int64_t size = archive_entry_size(t->entry);

	for (;;) {
		const void *bytes = NULL;
		size_t n = 0;
		int64_t at = 0;
		int r = archive_read_data_block(t->parse, &bytes, &n, &at);

		if (r == ARCHIVE_EOF)
			break;
		if (r < ARCHIVE_WARN)
			return archive_failure(t, e);
		if (at < 0 || at > size || n > (uint64_t)(size - at))
			return entry_failure(t, err_set(e, EINVAL, "it has more data than its size says"), e);
		r = builder_write(t->builder, bytes, n, (uint64_t)at, e);
		if (r)
			return entry_failure(t, r, e);
		t->written += n;
	}
	return entry_failure(t, builder_end(t->builder, (uint64_t)size, e), e);
}

/* --- extended attributes --- */

/* Linux's form of an ACL in an extended attribute (linux/posix_acl_xattr.h). */
struct acl_entry {
	uint16_t tag, perm;
	uint32_t id;
};
#define ACL_VERSION 2u
#define ACL_ENTRIES_MAX 500
enum { ACL_USER_OBJ = 1, ACL_USER = 2, ACL_GROUP_OBJ = 4, ACL_GROUP = 8, ACL_MASK = 16, ACL_OTHER = 32 };

static int by_tag(const void *x, const void *y)
{
	const struct acl_entry *a = x, *b = y;

	if (a->tag != b->tag)
		return a->tag < b->tag ? -1 : 1;
	return a->id < b->id ? -1 : a->id > b->id;
}

static uint16_t acl_tag(int tag)
{
	switch (tag) {
	case ARCHIVE_ENTRY_ACL_USER_OBJ:
		return ACL_USER_OBJ;
	case ARCHIVE_ENTRY_ACL_USER:
		return ACL_USER;
	case ARCHIVE_ENTRY_ACL_GROUP_OBJ:
		return ACL_GROUP_OBJ;
	case ARCHIVE_ENTRY_ACL_GROUP:
		return ACL_GROUP;
	case ARCHIVE_ENTRY_ACL_MASK:
		return ACL_MASK;
	default:
		return ACL_OTHER;
	}
}

static int put_acl(struct tar *t, struct node *n, int which, const char *attribute, struct err *e)
{
	AUTO_FREE char *value = malloc(sizeof(ACL_VERSION) + ACL_ENTRIES_MAX * sizeof(struct acl_entry));
	uint32_t version = ACL_VERSION;
	struct acl_entry entry[ACL_ENTRIES_MAX];
	int type, permset, tag, id;
	unsigned count = 0;
	const char *who;

	if (!value)
		return err_set(e, ENOMEM, "out of memory for an ACL");
	if (archive_entry_acl_reset(t->entry, which) <= 0)
		return 0;
	while (archive_entry_acl_next(t->entry, which, &type, &permset, &tag, &id, &who) == ARCHIVE_OK) {
		bool named = tag == ARCHIVE_ENTRY_ACL_USER || tag == ARCHIVE_ENTRY_ACL_GROUP;

		if (count == ACL_ENTRIES_MAX)
			return err_set(e, EINVAL, "its ACL has more than %d entries", ACL_ENTRIES_MAX);
		if (named && id < 0)
			return err_set(e, EINVAL, "its ACL names users; make the tar with --numeric-owner");
		entry[count++] = (struct acl_entry){ .tag = acl_tag(tag), .perm = (uint16_t)(permset & 7),
						     .id = named ? (uint32_t)id : UINT32_MAX };
	}
	qsort(entry, count, sizeof(entry[0]), by_tag);
	memcpy(value, &version, sizeof(version));
	memcpy(value + sizeof(version), entry, count * sizeof(entry[0]));
	return builder_xattr(t->builder, n, attribute, value, sizeof(version) + count * sizeof(entry[0]), e);
}

static int put_attributes(struct tar *t, struct node *n, struct err *e)
{
	int types = archive_entry_acl_types(t->entry), r;
	const char *name;
	const void *value;
	size_t bytes;

	archive_entry_xattr_reset(t->entry);
	while (archive_entry_xattr_next(t->entry, &name, &value, &bytes) == ARCHIVE_OK) {
		r = name ? builder_xattr(t->builder, n, name, value, bytes, e) : 0;
		/* Another system's attributes have no place in Linux's file systems; they are left out, as GNU tar
		 * does. */
		if (r && r != -EOPNOTSUPP)
			return r;
	}
	if (types & ARCHIVE_ENTRY_ACL_TYPE_ACCESS) {
		r = put_acl(t, n, ARCHIVE_ENTRY_ACL_TYPE_ACCESS, "system.posix_acl_access", e);
		if (r)
			return r;
	}
	if ((types & ARCHIVE_ENTRY_ACL_TYPE_DEFAULT) && archive_entry_filetype(t->entry) == AE_IFDIR)
		return put_acl(t, n, ARCHIVE_ENTRY_ACL_TYPE_DEFAULT, "system.posix_acl_default", e);
	return 0;
}

/* --- entries --- */

static int put_entry(struct tar *t, struct err *e)
{
	struct archive_entry *en = t->entry;
	const char *path = archive_entry_pathname(en), *link = archive_entry_hardlink(en);
	struct attributes a = {
		.mode = archive_entry_mode(en),
		.uid = (uint32_t)archive_entry_uid(en),
		.gid = (uint32_t)archive_entry_gid(en),
		.mtime = archive_entry_mtime(en),
		.mtime_ns = (uint32_t)archive_entry_mtime_nsec(en),
		.target = archive_entry_symlink(en),
	};
	struct node *n = NULL;
	int r;

	if (archive_entry_uid(en) < 0 || archive_entry_uid(en) > UINT32_MAX || archive_entry_gid(en) < 0 ||
	    archive_entry_gid(en) > UINT32_MAX)
		return entry_failure(t, err_set(e, EINVAL, "its owner is out of range"), e);
	if (link)
		/* Data that comes with a hard link is that of the file it names. */
		return entry_failure(t, builder_link(t->builder, path, link, e), e);
	if (S_ISCHR(a.mode) || S_ISBLK(a.mode)) {
		a.major = (uint32_t)archive_entry_rdevmajor(en);
		a.minor = (uint32_t)archive_entry_rdevminor(en);
	}
	r = builder_add(t->builder, path, &a, &n, e);
	if (r)
		return entry_failure(t, r, e);
	if (S_ISREG(a.mode)) {
		r = copy_data(t, e);
		if (r)
			return r;
	}
	return entry_failure(t, put_attributes(t, n, e), e);
}

/* 1 with t->entry set, 0 at the end of the archive. */
static int next_entry(struct tar *t, struct err *e)
{
	uint64_t before;
	int r;

	/* What is left of the last one's data is not part of the next header. */
	if (t->entry && archive_read_data_skip(t->parse) < ARCHIVE_WARN)
		return archive_failure(t, e);
	before = (uint64_t)archive_filter_bytes(t->parse, 0);
	t->header_at = t->fed;
	r = archive_read_next_header(t->parse, &t->entry);
	t->header_at = UINT64_MAX;
	if (r == ARCHIVE_EOF) {
		if (!t->name[0])
			return err_set(e, EINVAL, "rootfs is a tar with nothing in it");
		if ((uint64_t)archive_filter_bytes(t->parse, 0) == before)
			return err_set(e, EINVAL, "the tar is cut off after \"%s\": it has no end marker", t->name);
		return 0;
	}
	/* ARCHIVE_RETRY, too: it would go on behind a damaged header, and leave out what that one was for. */
	if (r != ARCHIVE_OK && r != ARCHIVE_WARN)
		return archive_failure(t, e);
	if (!archive_entry_pathname(t->entry))
		return err_set(e, EINVAL, "the tar has an entry without a name after \"%s\"", t->name);
	import_quote(archive_entry_pathname(t->entry), t->name, sizeof(t->name));
	t->written = 0;
	return 1;
}

/* What the entry's data takes in the image. */
static uint64_t data_size(struct archive_entry *en)
{
	int64_t at, length, sum = 0;

	if (archive_entry_sparse_reset(en) == 0)
		return (uint64_t)MAX(archive_entry_size(en), 0);
	while (archive_entry_sparse_next(en, &at, &length) == ARCHIVE_OK)
		if (length > 0 && length < INT64_MAX / 2 - sum)
			sum += length;
	return (uint64_t)sum;
}

/* The image is full: reads on for a while to say how large it should have been. */
static void say_need(struct tar *t, struct err *e)
{
	uint64_t need = builder_used_bytes(t->builder), from = now_ns(CLOCK_MONOTONIC);
	char at[sizeof(t->name)];
	bool all = false;
	struct err ignored;
	int r = 1;

	snprintf(at, sizeof(at), "%s", t->name);
	need -= MIN(need, t->written); /* it is counted with the rest of its entry */
	while (r == 1) {
		need += (data_size(t->entry) + 4095) / 4096 * 4096;
		if (now_ns(CLOCK_MONOTONIC) - from > NEED_SECONDS * 1000000000ull || need > UINT64_MAX / 4)
			break;
		r = next_entry(t, &ignored);
		all = r == 0;
	}
	need += need / 16; /* extents, bitmaps, a little room */
	err_set(e, ENOSPC, "the root file system does not fit into %llu MiB: it needs %s %llu MiB (full at \"%s\")",
		(unsigned long long)(t->import->disk_bytes >> 20), all ? "about" : "at least",
		(unsigned long long)((need >> 20) + 1), at);
}

static int open_archives(struct tar *t, struct err *e)
{
	t->unpack = archive_read_new();
	t->parse = archive_read_new();
	if (!t->unpack || !t->parse)
		return err_set(e, ENOMEM, "out of memory for reading the archive");
	archive_read_support_filter_gzip(t->unpack);
	archive_read_support_filter_zstd(t->unpack);
	archive_read_support_filter_xz(t->unpack);
	archive_read_support_format_raw(t->unpack);
	archive_read_support_format_empty(t->unpack);
	archive_read_support_format_tar(t->parse);
	t->header_at = UINT64_MAX;
	/* Choosing a decompressor already runs it on the first bytes. */
	if (archive_read_open(t->unpack, t, NULL, read_source, NULL) < ARCHIVE_WARN) {
		if (t->failure.code) {
			*e = t->failure;
			return -e->code;
		}
		return err_set(e, EINVAL, "rootfs cannot be decompressed: %s", archive_error_string(t->unpack));
	}
	/* Opening the parser already asks for the first bytes. */
	if (archive_read_open(t->parse, t, NULL, feed, NULL) < ARCHIVE_WARN)
		return archive_failure(t, e);
	return 0;
}

static int run(struct tar *t, unsigned inode_ratio, bool *more_inodes, struct err *e)
{
	int r = open_archives(t, e);

	if (r)
		return r;
	r = next_entry(t, e);
	if (r == 1) {
		int opened = builder_open(t->import->image, t->import->disk_bytes, inode_ratio, &t->builder, e);

		if (opened)
			return opened;
	}
	while (r == 1) {
		r = put_entry(t, e);
		if (!r) {
			t->import->files++;
			r = next_entry(t, e);
		}
	}
	if (!r)
		r = builder_finish(t->builder, e);
	if (r == -ENOSPC && builder_out_of_inodes(t->builder))
		*more_inodes = true;
	else if (r == -ENOSPC && builder_full(t->builder))
		say_need(t, e);
	return r;
}

int import_tar(struct import *i, unsigned inode_ratio, bool *more_inodes, struct err *e)
{
	/* libarchive converts pax names to the thread's locale, and normalises them if that is UTF-8. In C it cannot,
	 * and keeps the bytes, which is what is wanted. */
	locale_t plain = newlocale(LC_CTYPE_MASK, "C", (locale_t)0), old;
	struct tar *t = calloc(1, sizeof(*t));
	int r;

	if (!t || plain == (locale_t)0) {
		free(t);
		if (plain != (locale_t)0)
			freelocale(plain);
		return err_set(e, ENOMEM, "out of memory for reading the archive");
	}
	t->import = i;
	i->files = 0;
	*more_inodes = false;
	old = uselocale(plain);
	r = run(t, inode_ratio, more_inodes, e);
	archive_read_free(t->parse);
	archive_read_free(t->unpack);
	uselocale(old);
	freelocale(plain);
	builder_free(t->builder);
	free(t);
	return r;
}
