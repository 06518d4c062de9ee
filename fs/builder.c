/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The names and inodes of an image being filled (see builder.h).
 *
 * What comes in is hostile. Bounds: the image's size for data and inodes; twice its inodes for names, which are what
 * takes memory here; PATH_MAX for a path and so for depth; 40 symlinks on the way to a parent. Past them an entry is
 * refused with the reason, and the whole import with it.
 */
#include "builder_private.h"

#include <linux/limits.h>
#include <sys/random.h>
#include <sys/stat.h>

#define SYMLINKS_MAX 40

/* Removes one name; what a directory holds must be gone already. */
static int detach(struct builder *b, struct name *m, struct err *e)
{
	struct node *n = m->node;
	struct dir *d = builder_dir(n);

	m->node = NULL;
	m->dir->entries--;
	b->entry_bytes -= entry_size(m->length);
	if (d) {
		m->dir->subdirs--;
		d->gone = true;
		b->dir_count--;
		return inode_release(b, n->ino, true, e);
	}
	return --n->links ? 0 : inode_release(b, n->ino, false, e);
}

/* Removes a name and all below it, children first, without recursion: depth is the archive's to choose. */
static int remove_tree(struct builder *b, struct name *top, struct err *e)
{
	struct name *at = top;

	for (;;) {
		struct dir *d = builder_dir(at->node), *in = at->dir;
		struct name *child = d ? d->first : NULL;
		int r;

		while (child && !child->node)
			child = child->next;
		if (d)
			d->first = child; /* nobody asks for the removed ones before it again */
		if (child) {
			at = child;
			continue;
		}
		r = detach(b, at, e);
		if (r || at == top)
			return r;
		at = in->name;
	}
}

/* A directory with its inode; `m` is its name, NULL for the root. */
static int make_dir(struct builder *b, struct name *m, struct dir **ret, struct err *e)
{
	struct dir *d = builder_arena(b, sizeof(*d), e);
	struct attributes a = { .mode = S_IFDIR | 0755 };
	int r;

	if (!d)
		return -ENOMEM;
	d->node.ino = EXT2_ROOT_INO;
	d->node.type = EXT2_FT_DIR;
	d->name = m;
	d->parent = m ? m->dir : d;
	d->implied = true;
	if (!m)
		ext2fs_inode_alloc_stats2(b->fs, EXT2_ROOT_INO, +1, 1);
	r = m ? inode_take(b, true, &d->node.ino, e) : 0;
	if (!r)
		r = inode_fill(b, &a, e);
	if (!r)
		r = inode_write(b, d->node.ino, e);
	if (r)
		return r;
	*b->dirs_end = d;
	b->dirs_end = &d->next;
	b->dir_count++;
	if (m)
		builder_attach(b, m, &d->node);
	*ret = d;
	return 0;
}

/* --- paths --- */

/* Takes the next component off *path. 0 at the end. Empty ones and "." are skipped. */
static size_t component(const char **path, const char **start)
{
	for (;;) {
		const char *p = *path;
		size_t n;

		while (*p == '/')
			p++;
		n = strcspn(p, "/");
		*start = p;
		*path = p + n;
		if (n != 1 || *p != '.')
			return n;
	}
}

static int check_path(const char *path, struct err *e)
{
	const char *p = path, *start;
	size_t n;

	if (strlen(path) >= PATH_MAX)
		return err_set(e, EINVAL, "its path is longer than %d bytes", PATH_MAX - 1);
	while ((n = component(&p, &start))) {
		if (n > 255)
			return err_set(e, EINVAL, "a name in it is longer than 255 bytes");
		if (n == 2 && start[0] == '.' && start[1] == '.')
			return err_set(e, EINVAL, "\"..\" in its path");
	}
	return 0;
}

/*
 * Finds the directory that holds the last component of a checked path, and that component; *length 0 for the root.
 * Symlinks on the way are followed as in a chroot into the image. `make`: directories that are not there are made.
 */
static int walk(struct builder *b, const char *path, bool make, struct dir **dir, char *last /* 256 */, size_t *length,
		struct err *e)
{
	AUTO_FREE char *rest = strdup(path);
	AUTO_FREE char *target = malloc(EXT4_BLOCK);
	struct dir *d = b->root;
	const char *p = rest, *start, *peek;
	unsigned links = 0;
	size_t n;

	if (!rest || !target)
		return err_set(e, ENOMEM, "out of memory for a path");
	while ((n = component(&p, &start))) {
		const char *after = p;
		struct name *m = NULL;
		struct dir *sub;
		char *joined;
		int r;

		if (!component(&after, &peek)) {
			memcpy(last, start, n);
			last[n] = 0;
			*length = n;
			*dir = d;
			return 0;
		}
		if (n == 2 && !memcmp(start, "..", 2)) {
			d = d->parent;
			continue;
		}
		if (n > 255)
			return err_set(e, EINVAL, "a symlink in its path leads to a name longer than 255 bytes");
		m = builder_find(b, d, start, n);
		if (!m || !m->node) {
			if (!make)
				return err_set(e, ENOENT, "%s", "there is no such path");
			r = builder_name(b, d, start, n, &m, e);
			if (!r)
				r = make_dir(b, m, &sub, e);
			if (r)
				return r;
			d = sub;
			continue;
		}
		sub = builder_dir(m->node);
		if (sub) {
			d = sub;
			continue;
		}
		if (m->node->type != EXT2_FT_SYMLINK)
			return err_set(e, EINVAL, "part of its path is a file");
		if (++links > SYMLINKS_MAX)
			return err_set(e, EINVAL, "its path goes round in symlinks");
		r = symlink_read(b, m->node->ino, target, e);
		if (r)
			return r;
		if (strlen(target) + strlen(p) >= 2 * PATH_MAX)
			return err_set(e, EINVAL, "its path through symlinks is too long");
		if (asprintf(&joined, "%s%s", target, p) < 0)
			return err_set(e, ENOMEM, "out of memory for a path");
		if (target[0] == '/')
			d = b->root;
		free(rest);
		rest = joined;
		p = rest;
	}
	*length = 0;
	*dir = d;
	return 0;
}

/* --- entries --- */

static uint8_t file_type(uint32_t mode)
{
	switch (mode & S_IFMT) {
	case S_IFREG:
		return EXT2_FT_REG_FILE;
	case S_IFDIR:
		return EXT2_FT_DIR;
	case S_IFLNK:
		return EXT2_FT_SYMLINK;
	case S_IFCHR:
		return EXT2_FT_CHRDEV;
	case S_IFBLK:
		return EXT2_FT_BLKDEV;
	case S_IFIFO:
		return EXT2_FT_FIFO;
	case S_IFSOCK:
		return EXT2_FT_SOCK;
	default:
		return EXT2_FT_UNKNOWN;
	}
}

/* An entry for a directory: it sets the attributes of the one that is there, or of a new one. */
static int add_dir(struct builder *b, struct dir *parent, const char *last, size_t length, const struct attributes *a,
		   struct node **node, struct err *e)
{
	struct name *m = length ? builder_find(b, parent, last, length) : NULL;
	struct dir *d = length ? builder_dir(m ? m->node : NULL) : parent;
	struct ext2_inode_large old;
	errcode_t code;
	int r = 0;

	if (!d) {
		r = builder_name(b, parent, last, length, &m, e);
		if (!r && m->node)
			r = remove_tree(b, m, e);
		if (!r)
			r = make_dir(b, m, &d, e);
		if (r)
			return r;
	}
	code = ext2fs_read_inode_full(b->fs, d->node.ino, EXT2_INODE(&old), sizeof(old));
	if (!code && ext2fs_file_acl_block(b->fs, EXT2_INODE(&old)))
		code = ext2fs_free_ext_attr(b->fs, d->node.ino, &old);
	if (code)
		return builder_error(b, e, code, "replacing a directory's attributes");
	d->implied = false;
	*node = &d->node;
	r = inode_fill(b, a, e);
	return r ? r : inode_write(b, d->node.ino, e);
}

int builder_add(struct builder *b, const char *path, const struct attributes *a, struct node **node, struct err *e)
{
	uint8_t type = file_type(a->mode);
	struct dir *parent = NULL;
	struct name *m = NULL;
	struct node *n;
	size_t length = 0;
	char last[256];
	int r = check_path(path, e);

	if (!r)
		r = walk(b, path, true, &parent, last, &length, e);
	if (r)
		return r;
	if (type == EXT2_FT_DIR)
		return add_dir(b, parent, last, length, a, node, e);
	if (type == EXT2_FT_UNKNOWN)
		return err_set(e, EINVAL, "it is of no type that a file system has");
	if (!length)
		return err_set(e, EINVAL, "the root is not a directory");
	if (parent == b->root && length == 10 && !memcmp(last, "lost+found", 10))
		return err_set(e, EINVAL, "lost+found is not a directory");
	r = builder_name(b, parent, last, length, &m, e);
	if (!r && m->node)
		r = remove_tree(b, m, e);
	n = r ? NULL : builder_arena(b, sizeof(*n), e);
	if (!n)
		return r ? r : -ENOMEM;
	r = inode_take(b, false, &n->ino, e);
	if (!r)
		r = inode_fill(b, a, e);
	if (r)
		return r;
	n->type = type;
	builder_attach(b, m, n);
	*node = n;
	switch (type) {
	case EXT2_FT_REG_FILE:
		b->file_node = n;
		b->buffer_at = 0;
		b->buffered = 0;
		return data_begin(b, n->ino, e);
	case EXT2_FT_SYMLINK:
		return symlink_write(b, n->ino, a->target, e);
	default:
		return inode_write(b, n->ino, e);
	}
}

int builder_link(struct builder *b, const char *path, const char *target, struct err *e)
{
	struct dir *parent = NULL;
	struct name *m = NULL, *t = NULL;
	struct node *n;
	size_t length = 0;
	char last[256];
	int r = check_path(path, e);

	if (!r)
		r = check_path(target, e);
	if (!r)
		r = walk(b, target, false, &parent, last, &length, e);
	if (!r || r == -ENOENT)
		t = !r && length ? builder_find(b, parent, last, length) : NULL;
	else
		return r;
	n = t ? t->node : NULL;
	if (!n)
		return err_set(e, EINVAL, "it is a hard link to what is not in the archive before it");
	if (n->type == EXT2_FT_DIR)
		return err_set(e, EINVAL, "it is a hard link to a directory");
	r = walk(b, path, true, &parent, last, &length, e);
	if (r)
		return r;
	if (!length)
		return err_set(e, EINVAL, "the root is not a directory");
	r = builder_name(b, parent, last, length, &m, e);
	if (r || m->node == n)
		return r;
	if (n->links >= EXT2_LINK_MAX)
		return err_set(e, EINVAL, "more than %d hard links to one file", EXT2_LINK_MAX);
	/* What has the name now may be a directory with the target in it: hold on to the inode. */
	n->links++;
	r = m->node ? remove_tree(b, m, e) : 0;
	n->links--;
	if (r)
		return r;
	builder_attach(b, m, n);
	return 0;
}

static bool known_namespace(const char *name)
{
	static const char *const prefixes[] = { "user.", "trusted.", "security." };

	for (size_t i = 0; i < ARRAY_SIZE(prefixes); i++)
		if (!strncmp(name, prefixes[i], strlen(prefixes[i])) && name[strlen(prefixes[i])])
			return true;
	return !strcmp(name, "system.posix_acl_access") || !strcmp(name, "system.posix_acl_default");
}

int builder_xattr(struct builder *b, struct node *n, const char *name, const void *value, size_t bytes, struct err *e)
{
	struct ext2_xattr_handle *h = NULL;
	errcode_t code;

	if (!known_namespace(name))
		return -EOPNOTSUPP;
	if (strlen(name) > 255 || bytes > EXT4_BLOCK)
		return err_set(e, EINVAL, "its extended attribute %.40s takes more than 4 KiB", name);
	code = ext2fs_xattrs_open(b->fs, n->ino, &h);
	if (!code)
		code = ext2fs_xattrs_read(h);
	if (!code)
		code = ext2fs_xattr_set(h, name, value, bytes);
	if (h)
		ext2fs_xattrs_close(&h);
	if (code == EXT2_ET_EA_NO_SPACE)
		return err_set(e, EINVAL, "its extended attributes take more than 4 KiB");
	if (code == EINVAL)
		return err_set(e, EINVAL, "its extended attribute %.40s is malformed", name);
	return code ? builder_error(b, e, code, "writing extended attributes") : 0;
}

/* --- the whole --- */

int builder_open(int image, uint64_t bytes, unsigned inode_ratio, struct builder **ret, struct err *e)
{
	struct builder *b = calloc(1, sizeof(*b));
	struct attributes lost_found = { .mode = S_IFDIR | 0700, .mtime = MKFS_TIME };
	struct node *n;
	int r;

	if (!b)
		return err_set(e, ENOMEM, "out of memory");
	b->dirs_end = &b->dirs;
	b->table_size = 4096;
	b->table = calloc(b->table_size, sizeof(*b->table));
	b->buffer = aligned_alloc(EXT4_BLOCK, WRITE_BUFFER);
	if (!b->table || !b->buffer) {
		builder_free(b);
		return err_set(e, ENOMEM, "out of memory");
	}
	if (getrandom(b->hash_seed, sizeof(b->hash_seed), 0) != sizeof(b->hash_seed)) {
		builder_free(b);
		return err_set(e, EIO, "no random bytes");
	}
	r = mkfs_open(image, bytes, inode_ratio, &b->fs, e);
	if (!r) {
		b->next_ino = EXT2_FIRST_INODE(b->fs->super);
		b->names_max = 2 * (size_t)b->fs->super->s_inodes_count;
		b->newest = INT32_MIN;
		r = make_dir(b, NULL, &b->root, e);
	}
	if (!r)
		r = builder_add(b, "lost+found", &lost_found, &n, e);
	if (r) {
		builder_free(b);
		return r;
	}
	b->newest = INT32_MIN;
	*ret = b;
	return 0;
}

/* What is known only now: the number of a file's names, and the dates of directories that no entry described. */
static int settle(struct builder *b, struct err *e)
{
	for (size_t i = 0; i < b->table_size; i++)
		for (struct name *m = b->table[i]; m; m = m->hash_next) {
			struct node *n = m->node;
			errcode_t code;

			if (!n || n->type == EXT2_FT_DIR || n->links == 1)
				continue;
			/* Once for each name of the inode: they are few, and it is the same number each time. */
			code = ext2fs_read_inode_full(b->fs, n->ino, EXT2_INODE(&b->inode), sizeof(b->inode));
			if (code)
				return builder_error(b, e, code, "reading an inode");
			if (b->inode.i_links_count == n->links)
				continue;
			b->inode.i_links_count = (uint16_t)n->links;
			code = ext2fs_write_inode_full(b->fs, n->ino, EXT2_INODE(&b->inode), sizeof(b->inode));
			if (code)
				return builder_error(b, e, code, "writing an inode");
		}
	for (struct dir *d = b->dirs; d; d = d->next) {
		struct attributes a = { .mode = S_IFDIR | 0755, .mtime = b->newest };
		int r;

		if (d->gone || !d->implied)
			continue;
		r = inode_fill(b, &a, e);
		if (!r)
			r = inode_write(b, d->node.ino, e);
		if (r)
			return r;
	}
	return 0;
}

int builder_finish(struct builder *b, struct err *e)
{
	int r = settle(b, e);
	errcode_t code;

	for (struct dir *d = b->dirs; d && !r; d = d->next)
		if (!d->gone)
			r = dir_write(b, d, e);
	if (r)
		return r;
	code = ext2fs_close2(b->fs, EXT2_FLAG_FLUSH_NO_SYNC);
	/* On failure it is still there, for builder_free. */
	if (code)
		return builder_error(b, e, code, "closing the file system");
	b->fs = NULL;
	return 0;
}

void builder_free(struct builder *b)
{
	if (!b)
		return;
	ext2fs_extent_free(b->extents);
	if (b->fs)
		ext2fs_free(b->fs);
	builder_free_names(b);
	free(b->buffer);
	free(b);
}

bool builder_full(const struct builder *b)
{
	return b->full;
}

bool builder_out_of_inodes(const struct builder *b)
{
	return b->out_of_inodes;
}

uint64_t builder_used_bytes(const struct builder *b)
{
	uint64_t used = ext2fs_blocks_count(b->fs->super) - ext2fs_free_blocks_count(b->fs->super);

	return used * EXT4_BLOCK + data_reserve(b) * EXT4_BLOCK;
}
