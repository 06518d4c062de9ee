/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Puts data into the image: free blocks in ascending order, a large write each, extents that grow as long as blocks
 * are neighbours. One inode at a time, whose contents are in b->inode until data_finish writes it.
 */
#include "builder_private.h"

#include <ext2fs/ext3_extents.h>

int builder_error(struct builder *b, struct err *e, errcode_t code, const char *doing)
{
	b->full |= code == EXT2_ET_BLOCK_ALLOC_FAIL;
	return mkfs_error(e, code, doing);
}

/* The directories come last and must still fit; an index makes a directory's blocks no less than half full. */
uint64_t data_reserve(const struct builder *b)
{
	return b->dir_count + b->entry_bytes / (EXT4_BLOCK / 2);
}

static int allocate(struct builder *b, uint32_t want, uint64_t *block, uint32_t *got, struct err *e)
{
	blk64_t start, length;
	errcode_t code = 0;

	if (b->file_node && ext2fs_free_blocks_count(b->fs->super) < want + data_reserve(b))
		code = EXT2_ET_BLOCK_ALLOC_FAIL;
	if (!code)
		code = ext2fs_new_range(b->fs, 0, b->goal, want, NULL, &start, &length);
	if (code)
		return builder_error(b, e, code, "writing files");
	ext2fs_block_alloc_stats_range(b->fs, start, (blk_t)length, +1);
	b->goal = start + length;
	*block = start;
	*got = (uint32_t)length;
	return 0;
}

static errcode_t insert_pending(struct builder *b, uint32_t ino)
{
	errcode_t code = 0;

	if (!b->pending.e_len)
		return 0;
	if (!b->extents)
		code = ext2fs_extent_open2(b->fs, ino, EXT2_INODE(&b->inode), &b->extents);
	if (!code)
		code = ext2fs_extent_insert(b->extents, EXT2_EXTENT_INSERT_AFTER, &b->pending);
	if (!code)
		code = ext2fs_extent_fix_parents(b->extents);
	b->pending.e_len = 0;
	return code;
}

int data_begin(struct builder *b, uint32_t ino, struct err *e)
{
	errcode_t code;

	/* An inode without extents still has the header of an empty tree. */
	memset(b->inode.i_block, 0, sizeof(b->inode.i_block));
	b->pending.e_len = 0;
	code = ext2fs_extent_open2(b->fs, ino, EXT2_INODE(&b->inode), &b->extents);
	return code ? builder_error(b, e, code, "starting a file") : 0;
}

int data_blocks(struct builder *b, uint32_t ino, uint64_t logical, const char *data, uint32_t blocks, struct err *e)
{
	while (blocks) {
		struct ext2fs_extent *p = &b->pending;
		uint64_t physical = 0;
		uint32_t got = 0;
		errcode_t code;
		int r = allocate(b, blocks, &physical, &got, e);

		if (r)
			return r;
		code = io_channel_write_blk64(b->fs->io, physical, (int)got, data);
		if (!code && p->e_len &&
		    (p->e_pblk + p->e_len != physical || p->e_lblk + p->e_len != logical ||
		     p->e_len + got > EXT_INIT_MAX_LEN))
			code = insert_pending(b, ino);
		if (code)
			return builder_error(b, e, code, "writing files");
		if (!p->e_len)
			*p = (struct ext2fs_extent){ .e_pblk = physical, .e_lblk = logical };
		p->e_len += got;
		ext2fs_iblk_add_blocks(b->fs, EXT2_INODE(&b->inode), got);
		blocks -= got;
		logical += got;
		data += (size_t)got * EXT4_BLOCK;
	}
	return 0;
}

int data_finish(struct builder *b, uint32_t ino, uint64_t size, struct err *e)
{
	errcode_t code = insert_pending(b, ino);

	ext2fs_extent_free(b->extents);
	b->extents = NULL;
	if (!code)
		code = ext2fs_inode_size_set(b->fs, EXT2_INODE(&b->inode), size);
	if (!code)
		code = ext2fs_write_inode_full(b->fs, ino, EXT2_INODE(&b->inode), sizeof(b->inode));
	return code ? builder_error(b, e, code, "writing an inode") : 0;
}

static int flush(struct builder *b, struct err *e)
{
	uint32_t blocks = (uint32_t)((b->buffered + EXT4_BLOCK - 1) / EXT4_BLOCK);
	int r;

	memset(b->buffer + b->buffered, 0, (size_t)blocks * EXT4_BLOCK - b->buffered);
	r = data_blocks(b, b->file_node->ino, b->buffer_at / EXT4_BLOCK, b->buffer, blocks, e);
	b->buffer_at += (uint64_t)blocks * EXT4_BLOCK;
	b->buffered = 0;
	return r;
}

int builder_write(struct builder *b, const void *data, size_t bytes, uint64_t offset, struct err *e)
{
	const char *from = data;
	int r;

	if (!bytes)
		return 0;
	if (!b->file_node || offset + bytes < offset || offset + bytes > (uint64_t)UINT32_MAX * EXT4_BLOCK)
		return err_set(e, EINVAL, "a file of more than 16 TiB");
	if (offset < b->buffer_at + b->buffered)
		return err_set(e, EINVAL, "its pieces overlap");
	/* A hole: within the block at hand it is zeros, past it the blocks in between are left out. */
	if (offset > b->buffer_at + b->buffered) {
		uint64_t gap = offset - (b->buffer_at + b->buffered);
		size_t rest = (EXT4_BLOCK - b->buffered % EXT4_BLOCK) % EXT4_BLOCK;
		size_t zeros = (size_t)MIN(gap, rest);

		memset(b->buffer + b->buffered, 0, zeros);
		b->buffered += zeros;
		if (gap > rest) {
			r = b->buffered ? flush(b, e) : 0;
			if (r)
				return r;
			b->buffer_at = offset / EXT4_BLOCK * EXT4_BLOCK;
			b->buffered = (size_t)(offset - b->buffer_at);
			memset(b->buffer, 0, b->buffered);
		}
	}
	while (bytes) {
		size_t n = MIN(bytes, WRITE_BUFFER - b->buffered);

		memcpy(b->buffer + b->buffered, from, n);
		b->buffered += n;
		from += n;
		bytes -= n;
		if (b->buffered == WRITE_BUFFER) {
			r = flush(b, e);
			if (r)
				return r;
		}
	}
	return 0;
}

int builder_end(struct builder *b, uint64_t size, struct err *e)
{
	uint32_t ino = b->file_node->ino;
	int r = 0;

	if (size > (uint64_t)UINT32_MAX * EXT4_BLOCK)
		return err_set(e, EINVAL, "a file of more than 16 TiB");
	if (size < b->buffer_at + b->buffered && b->buffered)
		return err_set(e, EINVAL, "it has more data than its size says");
	if (b->buffered)
		r = flush(b, e);
	if (!r)
		r = data_finish(b, ino, size, e);
	b->file_node = NULL;
	return r;
}
