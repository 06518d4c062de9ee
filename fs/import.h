/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes a template's disk image from what was written to `rootfs`: an ext4 image, or a tar (plain, gzip, zstd, xz;
 * also what `docker export` writes). The source is hostile: see import.c for what is checked and refused.
 */
#ifndef FS_IMPORT_H
#define FS_IMPORT_H

#include <stdatomic.h>
#include <vmenv/util.h>

struct import {
	int source;          /* readable, seekable */
	int image;           /* empty, read-write: becomes an ext4 image of disk_bytes, 4 KiB blocks, for dax=always; not synced */
	uint64_t disk_bytes; /* a multiple of 2 MiB */
	atomic_bool cancel;  /* set by another thread: import returns -ECANCELED soon */
	_Atomic uint64_t done_bytes; /* progress: bytes of the source read */
	char kind[16];       /* out: "ext4" or "tar" */
	uint64_t files;      /* out: entries made (tar) */
};

/* Blocks; made for a worker thread. -EINVAL and a sentence (with the entry's name) for a source that is not what it
 * must be, -ENOSPC if it does not fit into disk_bytes (with how much it needs, if known), -EIO, -ECANCELED. */
int import_rootfs(struct import *i, struct err *e);

#endif
