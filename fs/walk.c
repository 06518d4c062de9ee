/* SPDX-License-Identifier: Apache-2.0 */
/* Directories and attributes: what the kernel asks about names. */
#include <sys/stat.h>
#include <sys/statvfs.h>

#include "server.h"

static bool resolve(fuse_req_t req, fuse_ino_t ino, struct node *n)
{
	int r = node_resolve(fuse_req_userdata(req), ino, n);

	if (r < 0)
		fuse_reply_err(req, -r);
	return r == 0;
}

/* A directory's name for sentences. */
static const char *what_of(const struct node *n)
{
	return n->entry && n->entry->name ? n->entry->name : n->key[0] ? n->key : "directory";
}

/*
 * Seconds for which the kernel need not ask again; each question is a round trip. Never of files: their sizes change at
 * any time. A directory's attributes need only last until the kernel, that has just looked it up, asks for its permissions.
 */
static double attributes_last(const struct node *n)
{
	return n->entry ? 0 : 0.02;
}

/* The directories that are always there, and that every path leads through. */
static double entry_lasts(const struct node *n)
{
	return n->entry || n->template || n->sandbox || n->run ? 0 : 1;
}

static void entry_of(const struct node *n, fuse_req_t req, struct fuse_entry_param *entry)
{
	*entry = (struct fuse_entry_param){ .generation = 1, .attr_timeout = attributes_last(n), .entry_timeout = entry_lasts(n) };
	node_stat(n, req, &entry->attr);
	entry->ino = node_number(n);
}

static void walk_lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
	struct fuse_entry_param entry;
	struct node n, child;
	int r;

	if (!resolve(req, parent, &n))
		return;
	r = node_child(&n, name, &child);
	if (r < 0) {
		fuse_reply_err(req, -r);
		return;
	}
	entry_of(&child, req, &entry);
	fuse_reply_entry(req, &entry);
}

/* Numbers can be looked up at any time: there is nothing to forget. */
static void walk_forget(fuse_req_t req, fuse_ino_t ino, uint64_t lookups)
{
	(void)ino;
	(void)lookups;
	fuse_reply_none(req);
}

static void walk_forget_multi(fuse_req_t req, size_t count, struct fuse_forget_data *forgets)
{
	(void)count;
	(void)forgets;
	fuse_reply_none(req);
}

static void walk_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	struct node n;
	struct stat st;

	(void)fi;
	if (!resolve(req, ino, &n))
		return;
	node_stat(&n, req, &st);
	fuse_reply_attr(req, &st, attributes_last(&n));
}

/* What may be changed: the size where that means something, times of what can be written, and nothing into what it is. */
static int change(const struct node *n, fuse_req_t req, const struct stat *to, int what, struct err *e)
{
	struct stat now;

	node_stat(n, req, &now);
	if ((what & FUSE_SET_ATTR_MODE) && (to->st_mode & 07777) != (now.st_mode & 07777))
		return err_set(e, EPERM, "%s: permissions are fixed", what_of(n));
	if (((what & FUSE_SET_ATTR_UID) && to->st_uid != now.st_uid) || ((what & FUSE_SET_ATTR_GID) && to->st_gid != now.st_gid))
		return err_set(e, EPERM, "%s: the owner is fixed", what_of(n));
	if (what & FUSE_SET_ATTR_SIZE) {
		if (!n->entry)
			return err_set(e, EISDIR, "a directory has no size");
		if (!(n->entry->mode & 0222) || !n->entry->behaviour->resize)
			return err_set(e, EACCES, "%s is a result: it is only read", what_of(n));
		return n->entry->behaviour->resize(n, (uint64_t)to->st_size, e);
	}
	if ((what & (FUSE_SET_ATTR_MTIME | FUSE_SET_ATTR_ATIME)) && n->entry && !(n->entry->mode & 0222))
		return err_set(e, EPERM, "%s: times are fixed", what_of(n));
	return 0;
}

static void walk_setattr(fuse_req_t req, fuse_ino_t ino, struct stat *to, int what, struct fuse_file_info *fi)
{
	struct err e = { 0 };
	struct node n;
	struct stat st;

	(void)fi;
	if (!resolve(req, ino, &n))
		return;
	if (change(&n, req, to, what, &e) < 0) {
		request_fail(n.server, req, &n, what_of(&n), &e);
		return;
	}
	node_stat(&n, req, &st);
	fuse_reply_attr(req, &st, 0);
}

/* A directory as it was when it was opened, or read again from the start: the offset is a place in it. */
struct listing {
	struct node node;
	struct listed {
		uint64_t ino;
		mode_t type;
		char name[NAME_LIMIT + 1];
	} *entries;
	size_t count, room;
	bool short_of_memory;
};

static void list_one(void *arg, const char *name, const struct node *child)
{
	struct listing *l = arg;
	struct listed *one;

	if (l->count == l->room) {
		size_t room = MAX(l->room * 2, (size_t)32);
		struct listed *grown = reallocarray(l->entries, room, sizeof(*grown));

		if (!grown) {
			l->short_of_memory = true;
			return;
		}
		l->entries = grown;
		l->room = room;
	}
	one = &l->entries[l->count++];
	one->ino = node_ino(child);
	one->type = child->entry ? S_IFREG : S_IFDIR;
	snprintf(one->name, sizeof(one->name), "%s", name);
}

/* The directory that holds this one; for `..`. */
static void parent_of(const struct node *n, struct node *parent)
{
	*parent = *n;
	parent->entry = NULL;
	if (n->directory == &root_directory || n->directory->of == OF_NOTHING) {
		parent->directory = &root_directory;
		return;
	}
	for (const struct directory *const *d = directories; *d; d++) {
		bool holds = (*d)->child == n->directory;

		for (unsigned i = 0; i < (*d)->count && !holds; i++)
			holds = (*d)->entries[i].inside == n->directory;
		if (holds)
			parent->directory = *d;
	}
}

static bool list(struct listing *l)
{
	struct node parent;

	l->count = 0;
	l->short_of_memory = false;
	parent_of(&l->node, &parent);
	list_one(l, ".", &l->node);
	list_one(l, "..", &parent);
	node_children(&l->node, list_one, l);
	return !l->short_of_memory;
}

static void listing_free(struct listing *l)
{
	node_drop(&l->node);
	free(l->entries);
	free(l);
}

static void walk_opendir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	struct listing *l;
	struct node n;

	if (!resolve(req, ino, &n))
		return;
	l = calloc(1, sizeof(*l));
	if (!l) {
		fuse_reply_err(req, ENOMEM);
		return;
	}
	l->node = n;
	node_hold(&l->node);
	if (!list(l)) {
		listing_free(l);
		fuse_reply_err(req, ENOMEM);
		return;
	}
	fi->fh = (uintptr_t)l;
	if (fuse_reply_open(req, fi) == -ENOENT)
		listing_free(l);
}

static void walk_readdir(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset, struct fuse_file_info *fi)
{
	struct listing *l = (struct listing *)(uintptr_t)fi->fh;
	AUTO_FREE char *buffer = malloc(size);
	size_t used = 0;

	(void)ino;
	if (!buffer || (offset == 0 && !node_gone(&l->node) && !list(l))) {
		fuse_reply_err(req, ENOMEM);
		return;
	}
	for (size_t i = (size_t)offset; i < l->count; i++) {
		struct stat st = { .st_ino = l->entries[i].ino, .st_mode = l->entries[i].type };
		size_t n = fuse_add_direntry(req, buffer + used, size - used, l->entries[i].name, &st, (off_t)i + 1);

		if (n > size - used)
			break;
		used += n;
	}
	fuse_reply_buf(req, buffer, used);
}

static void walk_releasedir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	(void)ino;
	listing_free((struct listing *)(uintptr_t)fi->fh);
	fuse_reply_err(req, 0);
}

static void made(struct simple *w)
{
	struct fuse_entry_param entry;
	struct node child;
	int r = node_child(&w->node, w->name, &child);

	if (r < 0) {
		fuse_reply_err(w->pending.req, -r);
		return;
	}
	entry_of(&child, w->pending.req, &entry);
	fuse_reply_entry(w->pending.req, &entry);
}

static void succeed(struct simple *w)
{
	fuse_reply_err(w->pending.req, 0);
}

static int check_new_name(const struct node *n, const char *name, struct err *e)
{
	struct node child;

	if (!name_valid(name, strlen(name)))
		return err_set(e, EINVAL, "'%.80s' cannot be a name: letters, digits, . _ -, at most %d, the first a letter or digit",
			       name, NAME_LIMIT);
	if (node_child(n, name, &child) == 0)
		return err_set(e, EEXIST, "there is a '%s' already", name);
	return 0;
}

static void walk_mkdir(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode)
{
	struct err e = { 0 };
	struct simple *w;
	struct node n;
	char what[96];
	int r;

	(void)mode;
	if (!resolve(req, parent, &n))
		return;
	if (!n.directory->mkdir || n.entry) {
		fuse_reply_err(req, EACCES);
		return;
	}
	snprintf(what, sizeof(what), "mkdir %.64s", name);
	w = simple_new(n.server, req, NULL, &n, what, made);
	if (!w)
		return;
	snprintf(w->name, sizeof(w->name), "%s", name);
	r = check_new_name(&n, name, &e);
	simple_end(w, r < 0 ? r : n.directory->mkdir(&n, name, &w->pending.op, &e), &e);
}

static void walk_rmdir(fuse_req_t req, fuse_ino_t parent, const char *name)
{
	struct err e = { 0 };
	struct node n, child;
	struct simple *w;
	int r;

	if (!resolve(req, parent, &n))
		return;
	r = node_child(&n, name, &child);
	if (r == 0 && child.entry)
		r = -ENOTDIR;
	else if (r == 0 && (!n.directory->rmdir || child.directory != n.directory->child))
		r = -EPERM;
	if (r < 0) {
		fuse_reply_err(req, -r);
		return;
	}
	w = simple_new(n.server, req, NULL, &child, "rmdir", succeed);
	if (w)
		simple_end(w, n.directory->rmdir(&child, &w->pending.op, &e), &e);
}

static void walk_create(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode, struct fuse_file_info *fi)
{
	struct fuse_entry_param entry;
	struct err e = { 0 };
	struct node n, child;

	(void)mode;
	if (!resolve(req, parent, &n))
		return;
	if (!n.directory->create || n.entry) {
		fuse_reply_err(req, EACCES);
		return;
	}
	if ((!name_valid(name, strlen(name)) && check_new_name(&n, name, &e) < 0) || n.directory->create(&n, name, &e) < 0) {
		request_fail(n.server, req, &n, name, &e);
		return;
	}
	if (node_child(&n, name, &child) < 0) {
		fuse_reply_err(req, ENOENT);
		return;
	}
	entry_of(&child, req, &entry);
	handle_create(req, &child, &entry, fi);
}

static void walk_unlink(fuse_req_t req, fuse_ino_t parent, const char *name)
{
	struct err e = { 0 };
	struct node n, child;
	int r;

	if (!resolve(req, parent, &n))
		return;
	r = node_child(&n, name, &child);
	if (r < 0 || !n.directory->unlink) {
		fuse_reply_err(req, r < 0 ? -r : EPERM);
		return;
	}
	if (n.directory->unlink(&n, name, &e) < 0)
		request_fail(n.server, req, &n, name, &e);
	else
		fuse_reply_err(req, 0);
}

static void refuse_mknod(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode, dev_t dev)
{
	(void)parent;
	(void)name;
	(void)mode;
	(void)dev;
	fuse_reply_err(req, EPERM);
}

static void refuse_symlink(fuse_req_t req, const char *target, fuse_ino_t parent, const char *name)
{
	(void)target;
	(void)parent;
	(void)name;
	fuse_reply_err(req, EPERM);
}

static void refuse_link(fuse_req_t req, fuse_ino_t ino, fuse_ino_t parent, const char *name)
{
	(void)ino;
	(void)parent;
	(void)name;
	fuse_reply_err(req, EPERM);
}

static void refuse_rename(fuse_req_t req, fuse_ino_t parent, const char *name, fuse_ino_t to, const char *new_name,
			  unsigned flags)
{
	(void)parent;
	(void)name;
	(void)to;
	(void)new_name;
	(void)flags;
	fuse_reply_err(req, EPERM);
}

/* Room is that of the file system that holds the state. */
static void walk_statfs(fuse_req_t req, fuse_ino_t ino)
{
	struct server *s = fuse_req_userdata(req);
	struct statvfs v;

	(void)ino;
	if (statvfs(s->state, &v) < 0)
		v = (struct statvfs){ .f_bsize = 4096, .f_frsize = 4096 };
	v.f_namemax = NAME_LIMIT;
	fuse_reply_statfs(req, &v);
}

static void walk_init(void *userdata, struct fuse_conn_info *conn)
{
	(void)userdata;
	/* Truncating while opening would be an open's business; so it is setattr's alone. */
	conn->want &= ~(unsigned)(FUSE_CAP_ATOMIC_O_TRUNC | FUSE_CAP_READDIRPLUS | FUSE_CAP_READDIRPLUS_AUTO);
	conn->want |= conn->capable & FUSE_CAP_PARALLEL_DIROPS;
	/* Reads through splice count as background ones, and may wait for a run. */
	conn->max_background = 4096;
	conn->congestion_threshold = 3072;
}

const struct fuse_lowlevel_ops server_ops = {
	.init = walk_init,
	.lookup = walk_lookup,
	.forget = walk_forget,
	.forget_multi = walk_forget_multi,
	.getattr = walk_getattr,
	.setattr = walk_setattr,
	.opendir = walk_opendir,
	.readdir = walk_readdir,
	.releasedir = walk_releasedir,
	.mkdir = walk_mkdir,
	.rmdir = walk_rmdir,
	.create = walk_create,
	.unlink = walk_unlink,
	.mknod = refuse_mknod,
	.symlink = refuse_symlink,
	.link = refuse_link,
	.rename = refuse_rename,
	.statfs = walk_statfs,
	.open = handle_open,
	.read = handle_read,
	.write = handle_write,
	.flush = handle_flush,
	.fsync = handle_fsync,
	.release = handle_release,
	.poll = handle_poll,
};
