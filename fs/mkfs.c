/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes an empty ext4 file system for a machine's disk.
 *
 * There is no journal. A journal protects a disk that outlives the memory in front of it; here memory and disk are
 * one mapping, always frozen, forked and restored together, so it would protect nothing, and every transaction would
 * make pages of the machine's private copy dirty for no use.
 *
 * Every inode table is marked as zeroed, and it is: the image is a sparse file. The guest's kernel would otherwise
 * zero the tables in the background, in every clone, and each page so written is a page no longer shared with the
 * template.
 */
#include "mkfs.h"

/* Constant: what tells two disks apart is the machine they are in, and equal sources must give equal images. */
static const uint8_t mkfs_uuid[16] = { 0x7d, 0x6e, 0x6d, 0x76, 0x66, 0x73, 0x4d, 0x6b,
				       0x9a, 0x11, 0x20, 0x20, 0x01, 0x01, 0x00, 0x01 };
static const uint32_t mkfs_hash_seed[4] = { 0x766d656e, 0x76667320, 0x68617368, 0x73656564 };

int mkfs_error(struct err *e, errcode_t code, const char *doing)
{
	switch (code) {
	case EXT2_ET_BLOCK_ALLOC_FAIL:
	case EXT2_ET_INODE_ALLOC_FAIL:
		return err_set(e, ENOSPC, "the disk image is full while %s", doing);
	case ENOSPC:
	case EDQUOT:
		return err_set(e, ENOSPC, "the state folder's file system is full while %s", doing);
	case EXT2_ET_NO_MEMORY:
	case ENOMEM:
		return err_set(e, ENOMEM, "out of memory while %s", doing);
	default:
		return err_set(e, EIO, "%s failed: %s", doing, error_message(code));
	}
}

/* unix_io takes names only; a descriptor has one. Its block cache would be flushed at every large write: leave it
 * out. */
static void image_name(int image, char *name, size_t n)
{
	snprintf(name, n, "/proc/self/fd/%d", image);
}

int mkfs_open_existing(int image, int flags, ext2_filsys *fs, errcode_t *code)
{
	char name[40];

	initialize_ext2_error_table();
	image_name(image, name, sizeof(name));
	*code = ext2fs_open2(name, NULL, flags | EXT2_FLAG_64BITS, 0, 0, unix_io_manager, fs);
	if (!*code)
		*code = io_channel_set_options((*fs)->io, "cache=off");
	return *code ? -EIO : 0;
}

int mkfs_open(int image, uint64_t bytes, unsigned inode_ratio, ext2_filsys *ret, struct err *e)
{
	struct ext2_super_block param = {
		.s_rev_level = EXT2_DYNAMIC_REV,
		.s_log_block_size = 2, /* 1024 << 2: DAX wants blocks of a page */
		.s_log_cluster_size = 2,
		.s_inode_size = 256,
		.s_log_groups_per_flex = 4,
		.s_max_mnt_count = (uint16_t)-1,
		.s_default_mount_opts = EXT2_DEFM_XATTR_USER | EXT2_DEFM_ACL,
		.s_feature_compat = EXT2_FEATURE_COMPAT_EXT_ATTR | EXT2_FEATURE_COMPAT_DIR_INDEX,
		.s_feature_incompat = EXT2_FEATURE_INCOMPAT_FILETYPE | EXT3_FEATURE_INCOMPAT_EXTENTS |
				      EXT4_FEATURE_INCOMPAT_FLEX_BG,
		/* Group checksums, so that whoever checks the image need not read unused tables; not those of all
		 * metadata, which guard against media errors that memory does not have. */
		.s_feature_ro_compat = EXT2_FEATURE_RO_COMPAT_SPARSE_SUPER | EXT2_FEATURE_RO_COMPAT_LARGE_FILE |
				       EXT4_FEATURE_RO_COMPAT_HUGE_FILE | EXT4_FEATURE_RO_COMPAT_GDT_CSUM |
				       EXT4_FEATURE_RO_COMPAT_DIR_NLINK | EXT4_FEATURE_RO_COMPAT_EXTRA_ISIZE,
	};
	ext2_filsys fs = NULL;
	errcode_t code;
	char name[40];

	initialize_ext2_error_table();
	if (bytes / EXT4_BLOCK > UINT32_MAX)
		return err_set(e, EINVAL, "a disk of %llu MiB is too large", (unsigned long long)(bytes >> 20));
	if (ftruncate(image, 0) || ftruncate(image, (off_t)bytes))
		return err_set(e, errno, "cannot make the disk image %llu MiB long: %s",
			       (unsigned long long)(bytes >> 20), strerror(errno));
	ext2fs_blocks_count_set(&param, bytes / EXT4_BLOCK);
	param.s_inodes_count = (uint32_t)MIN(bytes / inode_ratio, (uint64_t)UINT32_MAX - 65536);
	image_name(image, name, sizeof(name));
	code = ext2fs_initialize(name, EXT2_FLAG_64BITS, &param, unix_io_manager, &fs);
	if (code)
		return mkfs_error(e, code, "making the file system");
	fs->now = MKFS_TIME;
	fs->super->s_mkfs_time = fs->super->s_lastcheck = fs->super->s_wtime = MKFS_TIME;
	memcpy(fs->super->s_uuid, mkfs_uuid, sizeof(mkfs_uuid));
	memcpy(fs->super->s_hash_seed, mkfs_hash_seed, sizeof(mkfs_hash_seed));
	fs->super->s_def_hash_version = EXT2_HASH_HALF_MD4;
	fs->super->s_flags = (fs->super->s_flags & ~(uint32_t)EXT2_FLAGS_UNSIGNED_HASH) | EXT2_FLAGS_SIGNED_HASH;
	/* The group checksums cover the UUID. */
	ext2fs_init_csum_seed(fs);
	code = io_channel_set_options(fs->io, "cache=off");
	if (!code)
		code = ext2fs_allocate_tables(fs);
	if (code) {
		ext2fs_free(fs);
		return mkfs_error(e, code, "making the file system");
	}
	for (dgrp_t g = 0; g < fs->group_desc_count; g++) {
		ext2fs_bg_flags_set(fs, g, EXT2_BG_INODE_ZEROED);
		ext2fs_group_desc_csum_set(fs, g);
	}
	/* The reserved inodes, but for the root, which is made by whoever fills the file system. */
	for (ext2_ino_t ino = 1; ino < EXT2_FIRST_INODE(fs->super); ino++)
		if (ino != EXT2_ROOT_INO)
			ext2fs_inode_alloc_stats2(fs, ino, +1, 0);
	*ret = fs;
	return 0;
}
