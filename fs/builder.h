/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fills a new ext4 image with files in one pass, in the order they come.
 *
 * File data goes to the image as it comes, into the next free blocks. Names stay in memory, in one hash table, and
 * every directory is written once, at the end, already indexed: so a directory of 100,000 entries costs no more per
 * entry than a small one, and an entry may come before its parent, come twice (the later wins), or be linked to from
 * anywhere.
 *
 * Paths are resolved inside the image and nowhere else; nothing here touches the host's file system.
 */
#ifndef FS_BUILDER_H
#define FS_BUILDER_H

#include <vmenv/util.h>

struct builder;
struct node; /* an inode of the image */

struct attributes {
	uint32_t mode; /* S_IFMT and permissions */
	uint32_t uid, gid;
	int64_t mtime;
	uint32_t mtime_ns;
	uint32_t major, minor; /* of a device */
	const char *target;    /* of a symlink */
};

int builder_open(int image, uint64_t bytes, unsigned inode_ratio, struct builder **b, struct err *e);
/* Writes the directories and everything else that is kept back, and closes the file system. Not synced. */
int builder_finish(struct builder *b, struct err *e);
void builder_free(struct builder *b); /* also without builder_finish: the image is then good for nothing */

/*
 * Adds an entry. Missing parents are made; a parent that is a symlink of the image is followed; what has the same
 * name is replaced (a directory by a directory: its entries stay). A regular file is then written by builder_write,
 * in ascending order of offset, and ended by builder_end. -EINVAL for a path that is refused, -ENOSPC.
 */
int builder_add(struct builder *b, const char *path, const struct attributes *a, struct node **n, struct err *e);
int builder_write(struct builder *b, const void *data, size_t bytes, uint64_t offset, struct err *e);
int builder_end(struct builder *b, uint64_t size, struct err *e);
/* A second name for what `target` names, which must be there and no directory. */
int builder_link(struct builder *b, const char *path, const char *target, struct err *e);
/* After builder_end. A name outside Linux's namespaces cannot be stored: -EOPNOTSUPP, *e untouched. */
int builder_xattr(struct builder *b, struct node *n, const char *name, const void *value, size_t bytes, struct err *e);

/* Why a call answered -ENOSPC: no room in the image, or no inode. If neither, it was the host. */
bool builder_full(const struct builder *b);
bool builder_out_of_inodes(const struct builder *b);
uint64_t builder_used_bytes(const struct builder *b); /* with what builder_finish will add, about */

#endif
