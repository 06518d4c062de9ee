/* SPDX-License-Identifier: Apache-2.0 */
#include "index.h"

/* Fibonacci hashing: ids are consecutive numbers. room is a power of two. */
static size_t place(const struct index *x, uint64_t id)
{
	return (size_t)(id * 0x9e3779b97f4a7c15ull >> 32) & (x->room - 1);
}

static size_t find(const struct index *x, uint64_t id)
{
	size_t i = place(x, id);

	while (x->slots[i].id && x->slots[i].id != id)
		i = (i + 1) & (x->room - 1);
	return i;
}

static int grow(struct index *x)
{
	struct index bigger = { .room = x->room ? x->room * 2 : 256, .used = x->used };

	bigger.slots = calloc(bigger.room, sizeof(*bigger.slots));
	if (!bigger.slots)
		return -ENOMEM;
	for (size_t i = 0; i < x->room; i++)
		if (x->slots[i].id)
			bigger.slots[find(&bigger, x->slots[i].id)] = x->slots[i];
	free(x->slots);
	*x = bigger;
	return 0;
}

int index_put(struct index *x, uint64_t id, int kind, void *object)
{
	size_t i;

	if (2 * (x->used + 1) > x->room && grow(x) < 0)
		return -ENOMEM;
	i = find(x, id);
	if (!x->slots[i].id)
		x->used++;
	x->slots[i] = (struct index_slot){ id, kind, object };
	return 0;
}

void *index_get(const struct index *x, uint64_t id, int kind)
{
	const struct index_slot *s;

	if (!x->room || !id)
		return NULL;
	s = &x->slots[find(x, id)];
	return s->id == id && s->kind == kind ? s->object : NULL;
}

void index_remove(struct index *x, uint64_t id)
{
	size_t i, hole;

	if (!x->room || !id)
		return;
	hole = find(x, id);
	if (!x->slots[hole].id)
		return;
	x->slots[hole].id = 0;
	x->used--;
	/* What follows in the run may have been pushed past the hole. */
	for (i = (hole + 1) & (x->room - 1); x->slots[i].id; i = (i + 1) & (x->room - 1)) {
		size_t wanted = place(x, x->slots[i].id);

		if (((i - wanted) & (x->room - 1)) >= ((i - hole) & (x->room - 1))) {
			x->slots[hole] = x->slots[i];
			x->slots[i].id = 0;
			hole = i;
		}
	}
}

void index_clear(struct index *x)
{
	free(x->slots);
	*x = (struct index){ 0 };
}
