/* SPDX-License-Identifier: Apache-2.0 */
/* The way between inode numbers, names and nodes, by tree.c's tables. */
#include "server.h"

/* A number is, from the low end: the place of the name in tree.c's tables, the object's id, and for files that are apart
 * which lookup it is of. Ids have room for 68 billion objects in the life of a state directory. */
#define PLACE_BITS 8
#define ID_BITS 36
#define LOOKUP_BITS 20
#define ID_MAX ((1ull << ID_BITS) - 1)

static const struct directory *directory_at(unsigned place)
{
	for (const struct directory *const *d = directories; *d; d++)
		if (place >= (*d)->first && place <= (*d)->last)
			return *d;
	return NULL;
}

/* There is no index of metadata by id: values are few, and looked up by number only right after the name. */
static bool metadata_by_id(struct core *c, uint64_t id, struct node *n)
{
	for (struct sandbox *s = sandbox_list(c); s; s = s->next)
		for (struct metadata *m = s->metadata; m; m = m->next)
			if (m->id == id) {
				n->sandbox = s;
				n->key_id = id;
				memcpy(n->key, m->key, sizeof(n->key));
				return true;
			}
	return false;
}

static bool find_object(struct core *c, enum object_kind of, uint64_t id, struct node *n)
{
	switch (of) {
	case OF_NOTHING:
		return id == 0;
	case OF_TEMPLATE:
		n->template = template_by_id(c, id);
		return n->template;
	case OF_SANDBOX:
		n->sandbox = sandbox_by_id(c, id);
		return n->sandbox;
	case OF_RUN:
		n->run = run_by_id(c, id);
		if (n->run)
			n->sandbox = n->run->sandbox;
		return n->run;
	case OF_METADATA:
		return metadata_by_id(c, id, n);
	}
	return false;
}

int node_resolve(struct server *s, uint64_t ino, struct node *n)
{
	unsigned place = ino & ((1u << PLACE_BITS) - 1);
	const struct directory *d = directory_at(place);

	if (!d || place - d->first > d->count)
		return -ENOENT;
	*n = (struct node){ .server = s, .directory = d };
	if (place > d->first)
		n->entry = &d->entries[place - d->first - 1];
	else if (d->count && !d->entries[0].name)
		return -ENOENT; /* values have names, their table is no directory */
	if (!find_object(s->core, d->of, ino >> PLACE_BITS & ID_MAX, n) || node_gone(n))
		return -ENOENT;
	return 0;
}

struct object *node_object(const struct node *n)
{
	if (n->run)
		return &n->run->object;
	if (n->sandbox)
		return &n->sandbox->object;
	return n->template ? &n->template->object : NULL;
}

bool node_gone(const struct node *n)
{
	const struct object *o = node_object(n);

	return (o && o->gone) || (n->sandbox && n->sandbox->object.gone);
}

void node_hold(struct node *n)
{
	if (n->template)
		object_get(&n->template->object);
	if (n->sandbox)
		object_get(&n->sandbox->object);
	if (n->run)
		object_get(&n->run->object);
}

void node_drop(struct node *n)
{
	if (n->run)
		object_put(&n->run->object);
	if (n->sandbox)
		object_put(&n->sandbox->object);
	if (n->template)
		object_put(&n->template->object);
	n->run = NULL;
	n->sandbox = NULL;
	n->template = NULL;
}

const char *node_subject(const struct node *n, char *buffer, size_t n_buffer)
{
	if (n->sandbox)
		return n->sandbox->name;
	if (!n->template)
		return NULL;
	snprintf(buffer, n_buffer, "templates/%s", n->template->name);
	return buffer;
}

uint64_t node_ino(const struct node *n)
{
	uint64_t id = 0, place = n->directory->first;

	switch (n->directory->of) {
	case OF_NOTHING:
		break;
	case OF_TEMPLATE:
		id = n->template->object.id;
		break;
	case OF_SANDBOX:
		id = n->sandbox->object.id;
		break;
	case OF_RUN:
		id = n->run->object.id;
		break;
	case OF_METADATA:
		id = n->key_id;
		break;
	}
	if (n->entry)
		place += 1 + (uint64_t)(n->entry - n->directory->entries);
	return (id & ID_MAX) << PLACE_BITS | place;
}

uint64_t node_number(const struct node *n)
{
	uint64_t ino = node_ino(n);

	if (n->entry && n->entry->apart)
		ino |= (++n->server->lookups & ((1u << LOOKUP_BITS) - 1)) << (PLACE_BITS + ID_BITS);
	return ino;
}

static void entry_node(const struct node *n, const struct entry *e, struct node *child)
{
	*child = *n;
	if (e->inside) {
		child->directory = e->inside;
		child->entry = NULL;
	} else {
		child->entry = e;
	}
}

int node_child(const struct node *n, const char *name, struct node *child)
{
	const struct directory *d = n->directory;

	if (n->entry)
		return -ENOTDIR;
	for (unsigned i = 0; i < d->count; i++)
		if (!strcmp(d->entries[i].name, name)) {
			entry_node(n, &d->entries[i], child);
			return 0;
		}
	*child = *n;
	return d->find ? d->find(n, name, child) : -ENOENT;
}

void node_children(const struct node *n, node_fn *each, void *arg)
{
	const struct directory *d = n->directory;
	struct node child;

	for (unsigned i = 0; i < d->count; i++) {
		entry_node(n, &d->entries[i], &child);
		each(arg, d->entries[i].name, &child);
	}
	if (d->list)
		d->list(n, each, arg);
}

static void count_directory(void *arg, const char *name, const struct node *child)
{
	(void)name;
	if (!child->entry)
		++*(nlink_t *)arg;
}

void node_stat(const struct node *n, fuse_req_t req, struct stat *st)
{
	const struct fuse_ctx *who = fuse_req_ctx(req);
	const struct object *o = node_object(n);
	uint64_t ns = o && o->changed_ns ? o->changed_ns : n->server->started_ns;

	*st = (struct stat){ .st_ino = node_ino(n), .st_blksize = 4096, .st_nlink = 1 };
	st->st_uid = n->server->uid == (uid_t)-1 ? who->uid : n->server->uid;
	st->st_gid = n->server->uid == (uid_t)-1 ? who->gid : n->server->gid;
	if (!n->entry) {
		st->st_mode = S_IFDIR | 0755;
		st->st_nlink = 2;
		node_children(n, count_directory, &st->st_nlink);
	} else {
		st->st_mode = S_IFREG | n->entry->mode;
		st->st_size = (off_t)n->entry->behaviour->size(n);
		st->st_blocks = (st->st_size + 511) / 512;
		if (n->entry->journal)
			ns = n->server->journal_ns;
	}
	st->st_mtim.tv_sec = (time_t)(ns / 1000000000u);
	st->st_mtim.tv_nsec = (long)(ns % 1000000000u);
	st->st_atim = st->st_ctim = st->st_mtim;
}
