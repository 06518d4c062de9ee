/* SPDX-License-Identifier: Apache-2.0 */
/* The inodes of an image being filled: taken, filled in, given back; and symlinks, which are hardly more than an
 * inode. */
#include "builder_private.h"

#include <sys/stat.h>

int inode_take(struct builder *b, bool is_dir, uint32_t *ino, struct err *e)
{
	const struct ext2_super_block *sb = b->fs->super;
	ext2_ino_t found = b->next_ino;

	if (found > sb->s_inodes_count) {
		/* The end is reached; some may have been given back since. */
		if (ext2fs_find_first_zero_inode_bitmap2(b->fs->inode_map, EXT2_FIRST_INODE(sb), sb->s_inodes_count,
							 &found)) {
			b->out_of_inodes = true;
			return err_set(e, ENOSPC, "more than %u files, too many for this disk", sb->s_inodes_count);
		}
	} else {
		b->next_ino++;
	}
	ext2fs_inode_alloc_stats2(b->fs, found, +1, is_dir);
	*ino = found;
	return 0;
}

static void set_time(uint32_t *low, uint32_t *extra, int64_t seconds, uint32_t ns)
{
	*low = (uint32_t)seconds;
	*extra = (ns << 2) | (uint32_t)(((seconds - (int32_t)seconds) >> 32) & 3);
}

int inode_fill(struct builder *b, const struct attributes *a, struct err *e)
{
	/* What ext4 can say: 1901 to 2446. */
	int64_t t = MAX(MIN(a->mtime, (int64_t)0x37fffffff), (int64_t)INT32_MIN);
	struct ext2_inode_large *in = &b->inode;
	uint32_t ns = a->mtime_ns < 1000000000 ? a->mtime_ns : 0;

	memset(in, 0, sizeof(*in));
	in->i_mode = (uint16_t)a->mode;
	in->i_uid = (uint16_t)a->uid;
	ext2fs_set_i_uid_high(*in, a->uid >> 16);
	in->i_gid = (uint16_t)a->gid;
	ext2fs_set_i_gid_high(*in, a->gid >> 16);
	in->i_links_count = 1;
	in->i_extra_isize = sizeof(*in) - EXT2_GOOD_OLD_INODE_SIZE;
	set_time(&in->i_mtime, &in->i_mtime_extra, t, ns);
	set_time(&in->i_atime, &in->i_atime_extra, t, ns);
	set_time(&in->i_ctime, &in->i_ctime_extra, t, ns);
	set_time(&in->i_crtime, &in->i_crtime_extra, t, ns);
	b->newest = MAX(b->newest, t);
	if (S_ISCHR(a->mode) || S_ISBLK(a->mode)) {
		if (a->major > 0xfff || a->minor > 0xfffff)
			return err_set(e, EINVAL, "device number %u:%u is out of range", a->major, a->minor);
		if (a->major < 256 && a->minor < 256)
			in->i_block[0] = a->major << 8 | a->minor;
		else
			in->i_block[1] = (a->minor & 0xff) | a->major << 8 | (a->minor & ~0xffu) << 12;
	}
	return 0;
}

int inode_write(struct builder *b, uint32_t ino, struct err *e)
{
	errcode_t code = ext2fs_write_inode_full(b->fs, ino, EXT2_INODE(&b->inode), sizeof(b->inode));

	return code ? builder_error(b, e, code, "writing an inode") : 0;
}

int symlink_write(struct builder *b, uint32_t ino, const char *target, struct err *e)
{
	size_t n = target ? strlen(target) : 0;
	AUTO_FREE char *block = NULL;
	int r;

	if (n == 0 || n >= EXT4_BLOCK)
		return err_set(e, EINVAL, n ? "its target is longer than 4095 bytes" : "it has no target");
	if (n < sizeof(b->inode.i_block)) {
		memcpy(b->inode.i_block, target, n);
		b->inode.i_size = (uint32_t)n;
		return inode_write(b, ino, e);
	}
	block = calloc(1, EXT4_BLOCK);
	if (!block)
		return err_set(e, ENOMEM, "out of memory for a symlink");
	memcpy(block, target, n);
	r = data_begin(b, ino, e);
	if (!r)
		r = data_blocks(b, ino, 0, block, 1, e);
	return r ? r : data_finish(b, ino, n, e);
}

int symlink_read(struct builder *b, uint32_t ino, char *out /* EXT4_BLOCK */, struct err *e)
{
	struct ext2_inode in;
	blk64_t block = 0;
	errcode_t code = ext2fs_read_inode(b->fs, ino, &in);

	if (!code && in.i_size < sizeof(in.i_block)) {
		memcpy(out, in.i_block, in.i_size);
	} else if (!code) {
		code = ext2fs_bmap2(b->fs, ino, &in, NULL, 0, 0, NULL, &block);
		if (!code)
			code = io_channel_read_blk64(b->fs->io, block, 1, out);
	}
	if (code)
		return builder_error(b, e, code, "reading a symlink");
	out[MIN(in.i_size, EXT4_BLOCK - 1)] = 0;
	return 0;
}

int inode_release(struct builder *b, uint32_t ino, bool is_dir, struct err *e)
{
	struct ext2_inode_large in;
	errcode_t code = ext2fs_read_inode_full(b->fs, ino, EXT2_INODE(&in), sizeof(in));

	if (!code && ext2fs_file_acl_block(b->fs, EXT2_INODE(&in)))
		code = ext2fs_free_ext_attr(b->fs, ino, &in);
	if (!code && ext2fs_inode_has_valid_blocks2(b->fs, EXT2_INODE(&in)))
		code = ext2fs_punch(b->fs, ino, EXT2_INODE(&in), NULL, 0, ~0ULL);
	if (!code) {
		memset(&in, 0, sizeof(in));
		in.i_dtime = MKFS_TIME;
		code = ext2fs_write_inode_full(b->fs, ino, EXT2_INODE(&in), sizeof(in));
	}
	if (code)
		return builder_error(b, e, code, "removing a replaced entry");
	ext2fs_inode_alloc_stats2(b->fs, ino, -1, is_dir);
	return 0;
}
