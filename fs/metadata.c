/* SPDX-License-Identifier: Apache-2.0 */
/* A sandbox's metadata: small values by name, kept in the order they were made. */
#include "back.h"

struct metadata *metadata_find(struct sandbox *s, const char *key)
{
	for (struct metadata *m = s->metadata; m; m = m->next)
		if (strcmp(m->key, key) == 0)
			return m;
	return NULL;
}

static int make(struct sandbox *s, const char *key, struct metadata **out, struct err *e)
{
	struct metadata *m, **p;
	unsigned n = 0;

	if (!name_valid(key, strlen(key)))
		return err_set(
			e, EINVAL,
			"'%.80s' cannot be a metadata key: letters, digits, and . _ - after the first, at most %d", key,
			NAME_LIMIT);
	for (p = &s->metadata; *p; p = &(*p)->next)
		n++;
	if (n >= METADATA_KEYS_MAX)
		return err_set(e, ENOSPC, "a sandbox has at most %d metadata keys", METADATA_KEYS_MAX);
	m = calloc(1, sizeof(*m));
	if (!m)
		return err_set(e, ENOMEM, "out of memory");
	m->id = store_id(s->core->store);
	if (!m->id) {
		free(m);
		return err_set(e, EIO, "the store gives no more ids");
	}
	snprintf(m->key, sizeof(m->key), "%s", key);
	*p = m;
	s->core->generation++;
	*out = m;
	return 0;
}

int metadata_set(struct sandbox *s, const char *key, const char *value, size_t n, struct err *e)
{
	struct metadata *m = metadata_find(s, key);
	char *copy;
	int r;

	if (s->object.gone)
		return err_set(e, ENOENT, "the sandbox is gone");
	if (n > METADATA_VALUE_MAX)
		return err_set(e, EFBIG, "metadata %.64s would be %zu bytes: at most %d", key, n, METADATA_VALUE_MAX);
	copy = malloc(n + 1);
	if (!copy)
		return err_set(e, ENOMEM, "out of memory");
	if (!m) {
		r = make(s, key, &m, e);
		if (r < 0) {
			free(copy);
			return r;
		}
	}
	memcpy(copy, n ? value : "", n);
	copy[n] = 0;
	free(m->value);
	m->value = copy;
	m->bytes = n;
	object_changed(&s->object);
	return 0;
}

int metadata_remove(struct sandbox *s, const char *key, struct err *e)
{
	struct metadata **p, *m;

	for (p = &s->metadata; (m = *p) != NULL; p = &m->next)
		if (strcmp(m->key, key) == 0) {
			*p = m->next;
			free(m->value);
			free(m);
			s->core->generation++;
			object_changed(&s->object);
			return 0;
		}
	return err_set(e, ENOENT, "there is no metadata %.64s", key);
}

void metadata_clear(struct sandbox *s)
{
	struct metadata *m;

	while ((m = s->metadata) != NULL) {
		s->metadata = m->next;
		free(m->value);
		free(m);
	}
}

int metadata_copy(struct sandbox *to, const struct sandbox *from, struct err *e)
{
	for (const struct metadata *m = from->metadata; m; m = m->next) {
		int r = metadata_set(to, m->key, m->value, m->bytes, e);

		if (r < 0)
			return r;
	}
	return 0;
}
