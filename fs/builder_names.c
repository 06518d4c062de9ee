/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The names of an image being filled: one hash table for all, and for each directory a list in the order they were
 * added. They, and what they name, are allocated together and freed together, so that a removed one costs its memory
 * until the end, and no more.
 */
#include "builder_private.h"

#define CHUNK (256u << 10)

struct chunk {
	struct chunk *next;
	size_t used;
	_Alignas(16) char bytes[CHUNK];
};

void *builder_arena(struct builder *b, size_t bytes, struct err *e)
{
	struct chunk *c = b->chunks;
	void *p;

	bytes = (bytes + 15) & ~(size_t)15;
	if (!c || c->used + bytes > CHUNK) {
		c = malloc(sizeof(*c));
		if (!c) {
			err_set(e, ENOMEM, "out of memory for the names of the root file system");
			return NULL;
		}
		c->next = b->chunks;
		c->used = 0;
		b->chunks = c;
	}
	p = c->bytes + c->used;
	c->used += bytes;
	memset(p, 0, bytes);
	return p;
}

static uint32_t hash_name(const struct builder *b, const struct dir *d, const char *text, size_t n)
{
	uint32_t h = 0;

	ext2fs_dirhash(EXT2_HASH_HALF_MD4, text, (int)n, b->hash_seed, &h, NULL);
	return (h >> 1) ^ (d->node.ino * 0x9e3779b1u);
}

struct name *builder_find(const struct builder *b, const struct dir *d, const char *text, size_t n)
{
	uint32_t h = hash_name(b, d, text, n);

	for (struct name *m = b->table[h & (b->table_size - 1)]; m; m = m->hash_next)
		if (m->hash == h && m->dir == d && m->length == n && !memcmp(m->text, text, n))
			return m;
	return NULL;
}

static void grow_table(struct builder *b)
{
	size_t size = b->table_size * 2;
	struct name **table = calloc(size, sizeof(*table));

	/* Without memory for a larger one the chains are longer, nothing worse. */
	if (!table)
		return;
	for (size_t i = 0; i < b->table_size; i++) {
		struct name *next;

		for (struct name *m = b->table[i]; m; m = next) {
			next = m->hash_next;
			m->hash_next = table[m->hash & (size - 1)];
			table[m->hash & (size - 1)] = m;
		}
	}
	free(b->table);
	b->table = table;
	b->table_size = size;
}

struct dir *builder_dir(struct node *n)
{
	return n && n->type == EXT2_FT_DIR ? (struct dir *)n : NULL;
}

/* The name in d, made (without a node) if it is not there. */
int builder_name(struct builder *b, struct dir *d, const char *text, size_t n, struct name **ret, struct err *e)
{
	struct name *m = builder_find(b, d, text, n);
	struct name **slot;

	if (!m) {
		if (b->names >= b->names_max) {
			b->out_of_inodes = true;
			return err_set(e, ENOSPC, "more than %zu names, too many for this disk", b->names_max);
		}
		m = builder_arena(b, sizeof(*m) + n, e);
		if (!m)
			return -ENOMEM;
		if (b->names++ >= b->table_size)
			grow_table(b);
		m->dir = d;
		m->length = (uint8_t)n;
		memcpy(m->text, text, n);
		m->hash = hash_name(b, d, text, n);
		slot = &b->table[m->hash & (b->table_size - 1)];
		m->hash_next = *slot;
		*slot = m;
		*(d->last ? &d->last->next : &d->first) = m;
		d->last = m;
	}
	*ret = m;
	return 0;
}

void builder_attach(struct builder *b, struct name *m, struct node *n)
{
	m->node = n;
	m->dir->entries++;
	b->entry_bytes += entry_size(m->length);
	n->links++;
	if (n->type == EXT2_FT_DIR)
		m->dir->subdirs++;
}

void builder_free_names(struct builder *b)
{
	struct chunk *next;

	for (struct chunk *c = b->chunks; c; c = next) {
		next = c->next;
		free(c);
	}
	b->chunks = NULL;
	free(b->table);
	b->table = NULL;
}
