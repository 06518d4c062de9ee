/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes directories: one block with the entries in order, or, if they do not fit into it, a hash tree as ext4's
 * dir_index describes it (kernel Documentation/filesystems/ext4/directory.rst): block 0 the root, then index nodes if
 * there are more leaves than the root has room for, then the leaves, sorted by hash.
 */
#include "builder_private.h"

#include <ext2fs/ext3_extents.h>

#define ROOT_FANOUT ((EXT4_BLOCK - 32) / 8) /* "." and "..", dx_root_info, 8 bytes an entry */
#define NODE_FANOUT ((EXT4_BLOCK - 8) / 8)
/* Leaves keep some room, or the first file a guest adds would split one. */
#define LEAF_FILL (EXT4_BLOCK - EXT4_BLOCK / 8)

struct hashed {
	const struct name *name;
	uint32_t hash, minor;
};

/* A block being filled with entries. */
struct leaf {
	char *block;
	uint32_t used, last; /* `last`: where the last entry starts */
};

static void leaf_add(struct leaf *l, uint32_t ino, uint8_t type, const char *text, uint8_t length)
{
	struct ext2_dir_entry_2 *d = (struct ext2_dir_entry_2 *)(l->block + l->used);
	uint32_t size = entry_size(length);

	d->inode = ino;
	d->rec_len = (uint16_t)size;
	d->name_len = length;
	d->file_type = type;
	memcpy(d->name, text, length);
	l->last = l->used;
	l->used += size;
}

/* The last entry of a block reaches to its end. */
static void leaf_close(struct leaf *l)
{
	struct ext2_dir_entry_2 *d = (struct ext2_dir_entry_2 *)(l->block + l->last);

	d->rec_len = (uint16_t)(EXT4_BLOCK - l->last);
}

static int by_hash(const void *x, const void *y)
{
	const struct hashed *a = x, *b = y;
	int c;

	if (a->hash != b->hash)
		return a->hash < b->hash ? -1 : 1;
	if (a->minor != b->minor)
		return a->minor < b->minor ? -1 : 1;
	c = memcmp(a->name->text, b->name->text, MIN(a->name->length, b->name->length));
	return c ? c : a->name->length - b->name->length;
}

static void set_index(char *entries, uint32_t i, uint32_t hash, uint32_t block)
{
	struct ext2_dx_entry *d = (struct ext2_dx_entry *)entries + i;

	/* The hash of entry 0 is implied; its place holds limit and count. */
	if (i)
		d->hash = hash;
	d->block = block;
}

static void set_count(char *entries, uint32_t limit, uint32_t count)
{
	struct ext2_dx_countlimit *c = (struct ext2_dx_countlimit *)entries;

	c->limit = (uint16_t)limit;
	c->count = (uint16_t)count;
}

/* Fills `blocks` blocks: the tree over `leaves` leaves whose first hashes are given; the leaves start at block
 * `first`. */
static void write_index(struct builder *b, struct dir *d, char *out, const uint32_t *hashes, uint32_t leaves,
			uint32_t nodes)
{
	struct leaf root = { .block = out };
	struct ext2_dx_root_info *info = (struct ext2_dx_root_info *)(out + 24);
	uint32_t first = 1 + nodes;

	leaf_add(&root, d->node.ino, EXT2_FT_DIR, ".", 1);
	leaf_add(&root, d->parent->node.ino, EXT2_FT_DIR, "..", 2);
	leaf_close(&root);
	info->hash_version = b->fs->super->s_def_hash_version;
	info->info_length = sizeof(*info);
	info->indirect_levels = nodes ? 1 : 0;
	if (!nodes) {
		for (uint32_t i = 0; i < leaves; i++)
			set_index(out + 32, i, hashes[i], first + i);
		set_count(out + 32, ROOT_FANOUT, leaves);
		return;
	}
	for (uint32_t n = 0, i = 0; n < nodes; n++) {
		char *node = out + (size_t)(1 + n) * EXT4_BLOCK;
		struct ext2_dir_entry_2 *fake = (struct ext2_dir_entry_2 *)node;
		uint32_t count = 0;

		fake->rec_len = EXT4_BLOCK;
		set_index(out + 32, n, hashes[i], 1 + n);
		/* Spread evenly, so that every node has room to grow. */
		for (uint32_t end = (uint32_t)((uint64_t)leaves * (n + 1) / nodes); i < end; i++)
			set_index(node + 8, count++, hashes[i], first + i);
		set_count(node + 8, NODE_FANOUT, count);
	}
	set_count(out + 32, ROOT_FANOUT, nodes);
}

static int build_tree(struct builder *b, struct dir *d, char **out, uint32_t *blocks, struct err *e)
{
	const struct ext2_super_block *sb = b->fs->super;
	AUTO_FREE struct hashed *all = calloc(d->entries, sizeof(*all));
	/* Each leaf but the last holds at least two thirds of LEAF_FILL, as an entry is 263 bytes at most. */
	size_t leaf_max = 2, bytes = 0;
	AUTO_FREE uint32_t *starts = NULL;
	AUTO_FREE uint32_t *hashes = NULL;
	AUTO_FREE char *image = NULL;
	uint32_t n = 0, leaves = 0, used = 0, nodes = 0;
	struct leaf leaf = { 0 };

	if (!all)
		return err_set(e, ENOMEM, "out of memory while sorting a directory");
	for (const struct name *m = d->first; m; m = m->next) {
		if (!m->node)
			continue;
		all[n].name = m;
		if (ext2fs_dirhash2(sb->s_def_hash_version, m->text, m->length, NULL, 0, sb->s_hash_seed, &all[n].hash,
				    &all[n].minor))
			return err_set(e, EIO, "cannot hash a name");
		all[n].hash &= ~1u;
		bytes += entry_size(m->length);
		n++;
	}
	qsort(all, n, sizeof(*all), by_hash);
	leaf_max += bytes / (LEAF_FILL * 2 / 3);
	starts = calloc(leaf_max + 1, sizeof(*starts));
	hashes = calloc(leaf_max + 1, sizeof(*hashes));
	if (!starts || !hashes)
		return err_set(e, ENOMEM, "out of memory while sorting a directory");
	for (uint32_t i = 0; i < n; i++) {
		uint32_t size = entry_size(all[i].name->length);

		if (i == 0 || used + size > LEAF_FILL) {
			starts[leaves] = i;
			/* The lowest bit says that the same hash began in the leaf before. */
			hashes[leaves] = all[i].hash | (i && all[i].hash == all[i - 1].hash);
			leaves++;
			used = 0;
		}
		used += size;
	}
	starts[leaves] = n;
	if (leaves > ROOT_FANOUT)
		nodes = (leaves + NODE_FANOUT * 3 / 4 - 1) / (NODE_FANOUT * 3 / 4);
	if (nodes > ROOT_FANOUT)
		return err_set(e, ENOSPC, "a directory has %u entries, more than an ext4 index of two levels holds", n);
	image = calloc(1 + nodes + leaves, EXT4_BLOCK);
	if (!image)
		return err_set(e, ENOMEM, "out of memory while writing a directory");
	write_index(b, d, image, hashes, leaves, nodes);
	for (uint32_t l = 0; l < leaves; l++) {
		leaf = (struct leaf){ .block = image + (size_t)(1 + nodes + l) * EXT4_BLOCK };
		for (uint32_t i = starts[l]; i < starts[l + 1]; i++) {
			const struct name *m = all[i].name;

			leaf_add(&leaf, m->node->ino, m->node->type, m->text, m->length);
		}
		leaf_close(&leaf);
	}
	*blocks = 1 + nodes + leaves;
	*out = steal_ptr(&image);
	return 0;
}

static int build_block(struct dir *d, char **out, uint32_t *blocks, struct err *e)
{
	struct leaf leaf = { .block = calloc(1, EXT4_BLOCK) };

	if (!leaf.block)
		return err_set(e, ENOMEM, "out of memory while writing a directory");
	leaf_add(&leaf, d->node.ino, EXT2_FT_DIR, ".", 1);
	leaf_add(&leaf, d->parent->node.ino, EXT2_FT_DIR, "..", 2);
	for (const struct name *m = d->first; m; m = m->next)
		if (m->node)
			leaf_add(&leaf, m->node->ino, m->node->type, m->text, m->length);
	leaf_close(&leaf);
	*blocks = 1;
	*out = leaf.block;
	return 0;
}

int dir_write(struct builder *b, struct dir *d, struct err *e)
{
	AUTO_FREE char *data = NULL;
	uint64_t bytes = entry_size(1) + entry_size(2);
	uint32_t blocks = 0;
	errcode_t code;
	int r;

	for (const struct name *m = d->first; m; m = m->next)
		if (m->node)
			bytes += entry_size(m->length);
	r = bytes <= EXT4_BLOCK ? build_block(d, &data, &blocks, e) : build_tree(b, d, &data, &blocks, e);
	if (r)
		return r;
	/* The inode is on the image since its entry came, with attributes and extended attributes. */
	code = ext2fs_read_inode_full(b->fs, d->node.ino, EXT2_INODE(&b->inode), sizeof(b->inode));
	if (code)
		return builder_error(b, e, code, "reading a directory's inode");
	r = data_begin(b, d->node.ino, e);
	if (!r)
		r = data_blocks(b, d->node.ino, 0, data, blocks, e);
	if (r)
		return r;
	/* dir_nlink: past the limit a directory's count is 1, for "unknown". */
	b->inode.i_links_count = (uint16_t)(d->subdirs + 2 < EXT2_LINK_MAX ? d->subdirs + 2 : 1);
	if (blocks > 1)
		b->inode.i_flags |= EXT2_INDEX_FL;
	return data_finish(b, d->node.ino, (uint64_t)blocks * EXT4_BLOCK, e);
}
