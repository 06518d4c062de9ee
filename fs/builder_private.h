/* SPDX-License-Identifier: Apache-2.0 */
/* What the builder's files share. */
#ifndef FS_BUILDER_PRIVATE_H
#define FS_BUILDER_PRIVATE_H

#include "builder.h"
#include "mkfs.h"

#define WRITE_BUFFER (1u << 20)

struct node {
	uint32_t ino;
	uint32_t links; /* names; not used of directories */
	uint8_t type;   /* EXT2_FT_* */
};

struct dir {
	struct node node; /* first: a node of type EXT2_FT_DIR is a struct dir */
	struct dir *parent;
	struct name *name;         /* the one it has; NULL for the root */
	struct dir *next;          /* in the order they were made */
	struct name *first, *last; /* in the order they were added; some with no node: removed */
	uint32_t entries, subdirs; /* that are there */
	bool implied;              /* no entry of its own yet: made because something is in it */
	bool gone;
};

struct name {
	struct name *next, *hash_next;
	struct dir *dir;
	struct node *node; /* NULL: removed */
	uint32_t hash;
	uint8_t length;
	char text[];
};

struct builder {
	ext2_filsys fs;
	struct dir *root, *dirs, **dirs_end;
	struct name **table; /* table_size is a power of two */
	size_t table_size, names, names_max;
	uint32_t hash_seed[4];  /* random, so that nobody can aim at one chain; the image does not depend on it */
	struct chunk *chunks;   /* what names and nodes are allocated from */
	uint64_t goal;          /* where the next data goes */
	uint32_t next_ino;
	uint64_t entry_bytes, dir_count; /* what the directories will need */
	int64_t newest;                  /* mtime seen, for directories without an entry */
	bool out_of_inodes, full; /* why the last call answered -ENOSPC, if it was the image */

	/* The regular file being written: file_node is NULL when there is none. */
	struct node *file_node;
	struct ext2_inode_large inode;
	ext2_extent_handle_t extents;
	struct ext2fs_extent pending; /* e_len 0: none; grows while blocks come next to each other */
	uint64_t buffer_at;           /* file offset of buffer[0], whole blocks */
	size_t buffered;
	char *buffer; /* WRITE_BUFFER */
};

/* builder_names.c. Memory until builder_free, zeroed; NULL and *e. */
void *builder_arena(struct builder *b, size_t bytes, struct err *e);
void builder_free_names(struct builder *b);
/* The name in d; with no node if it was removed; NULL if it never was. builder_name makes it then. */
struct name *builder_find(const struct builder *b, const struct dir *d, const char *text, size_t n);
int builder_name(struct builder *b, struct dir *d, const char *text, size_t n, struct name **ret, struct err *e);
void builder_attach(struct builder *b, struct name *m, struct node *n); /* gives a name without a node one */
struct dir *builder_dir(struct node *n);                                /* NULL if it is none */

/* builder_inode.c. inode_fill fills b->inode, inode_write writes it. */
int inode_take(struct builder *b, bool is_dir, uint32_t *ino, struct err *e);
int inode_fill(struct builder *b, const struct attributes *a, struct err *e);
int inode_write(struct builder *b, uint32_t ino, struct err *e);
int inode_release(struct builder *b, uint32_t ino, bool is_dir, struct err *e); /* with all its blocks */
int symlink_write(struct builder *b, uint32_t ino, const char *target, struct err *e);
int symlink_read(struct builder *b, uint32_t ino, char *out /* EXT4_BLOCK */, struct err *e);

/* builder_data.c. Fills *e as mkfs_error does, and notes it when the image is full. */
int builder_error(struct builder *b, struct err *e, errcode_t code, const char *doing);

/* The blocks that directories will need at the end. */
uint64_t data_reserve(const struct builder *b);

/* Starts an inode's contents in b->inode, adds blocks of data to it, writes it. */
int data_begin(struct builder *b, uint32_t ino, struct err *e);
int data_blocks(struct builder *b, uint32_t ino, uint64_t logical, const char *data, uint32_t blocks, struct err *e);
int data_finish(struct builder *b, uint32_t ino, uint64_t size, struct err *e);

/* builder_dir.c: writes the blocks of one directory, and its inode. */
int dir_write(struct builder *b, struct dir *d, struct err *e);

/* What a name takes in a directory block. */
static inline uint32_t entry_size(uint32_t length)
{
	return (8 + length + 3) & ~3u;
}

#endif
