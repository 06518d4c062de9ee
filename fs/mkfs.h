/* SPDX-License-Identifier: Apache-2.0 */
/* Makes an empty ext4 file system for a machine's disk, the same bytes every time, and says what libext2fs reports. */
#ifndef FS_MKFS_H
#define FS_MKFS_H

#include <com_err.h>
#include <ext2fs/ext2fs.h>
#include <vmenv/util.h>

#define EXT4_BLOCK 4096u

/* What the file system itself is dated, so that one tar always gives one image: 2020-01-01. */
#define MKFS_TIME 1577836800

/*
 * Opens a new file system over the whole of `image` (a regular file, set to `bytes`, all holes): tables allocated, no
 * inode in use, not even the root. Blocks of 4 KiB, one inode per `inode_ratio` bytes, nothing reserved, no journal.
 */
int mkfs_open(int image, uint64_t bytes, unsigned inode_ratio, ext2_filsys *fs, struct err *e);

/* Opens the file system in `image` for writing, past libext2fs's own block cache. */
int mkfs_open_existing(int image, int flags, ext2_filsys *fs, errcode_t *code);

/* Fills *e from what libext2fs returned; -ENOSPC when the image is full, -EIO when it is the host. `doing` reads
 * "writing x". */
int mkfs_error(struct err *e, errcode_t code, const char *doing);

#endif
