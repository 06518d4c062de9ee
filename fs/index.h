/* SPDX-License-Identifier: Apache-2.0 */
/* Finds an object by its id: a hash table that grows. */
#ifndef FS_INDEX_H
#define FS_INDEX_H

#include <vmenv/util.h>

struct index {
	struct index_slot {
		uint64_t id; /* 0: free */
		int kind;
		void *object;
	} *slots;
	size_t room, used;
};

int index_put(struct index *x, uint64_t id, int kind, void *object); /* -ENOMEM */
void *index_get(const struct index *x, uint64_t id, int kind);
void index_remove(struct index *x, uint64_t id);
void index_clear(struct index *x);

#endif
