/* SPDX-License-Identifier: Apache-2.0 */
#include "relay_table.h"

#include <linux/fuse.h>
#include <stddef.h>

#define BUCKETS 4096u
#define NONE UINT32_MAX

int table_init(struct table *t)
{
	*t = (struct table){ .free_request = NONE, .free_handle = NONE };
	t->buckets = malloc(BUCKETS * sizeof(*t->buckets));
	if (!t->buckets)
		return -ENOMEM;
	for (unsigned n = 0; n < BUCKETS; n++)
		t->buckets[n] = NONE;
	return 0;
}

void table_free(struct table *t)
{
	free(t->buckets);
	free(t->requests);
	free(t->handles);
	*t = (struct table){ 0 };
}

bool table_full(const struct table *t)
{
	return t->free_request == NONE && t->used >= PENDING_MAX;
}

/* The kernel's numbers are even and count up. */
static uint32_t *bucket(struct table *t, uint64_t unique)
{
	return &t->buckets[(unique >> 1) % BUCKETS];
}

int table_push(struct table *t, const struct request *q)
{
	uint32_t place = t->free_request, *head = bucket(t, q->unique);

	if (place != NONE)
		t->free_request = t->requests[place].next;
	else {
		if (t->used == t->room) {
			uint32_t room = t->room ? t->room * 2 : 256;
			struct request *more = room <= PENDING_MAX ? realloc(t->requests, room * sizeof(*more)) : NULL;

			if (!more)
				return -ENOMEM;
			t->requests = more;
			t->room = room;
		}
		place = t->used++;
	}
	t->requests[place] = *q;
	t->requests[place].next = *head;
	*head = place;
	return 0;
}

static void take(struct table *t, uint32_t *link, struct request *q)
{
	uint32_t place = *link;

	*q = t->requests[place];
	*link = t->requests[place].next;
	t->requests[place].next = t->free_request;
	t->free_request = place;
}

bool table_take(struct table *t, uint64_t unique, struct request *q)
{
	for (uint32_t *link = bucket(t, unique); *link != NONE; link = &t->requests[*link].next)
		if (t->requests[*link].unique == unique) {
			take(t, link, q);
			return true;
		}
	return false;
}

const struct request *table_find(const struct table *t, uint64_t unique)
{
	for (uint32_t place = *bucket((struct table *)t, unique); place != NONE; place = t->requests[place].next)
		if (t->requests[place].unique == unique)
			return &t->requests[place];
	return NULL;
}

bool table_pop(struct table *t, struct request *q)
{
	for (unsigned n = 0; t->buckets && n < BUCKETS; n++)
		if (t->buckets[n] != NONE) {
			take(t, &t->buckets[n], q);
			return true;
		}
	return false;
}

static int handle_add(struct table *t, uint64_t theirs, uint64_t *ours)
{
	uint32_t place = t->free_handle;

	if (place != NONE)
		t->free_handle = (uint32_t)t->handles[place].theirs;
	else {
		if (t->handle_used == t->handle_room) {
			uint32_t room = t->handle_room ? t->handle_room * 2 : 256;
			struct handle_entry *more =
			    room <= HANDLES_MAX ? realloc(t->handles, room * sizeof(*more)) : NULL;

			if (!more)
				return -ENOMEM;
			t->handles = more;
			t->handle_room = room;
		}
		place = t->handle_used++;
	}
	t->handles[place] = (struct handle_entry){ theirs, HANDLE_OPEN };
	*ours = place + 1;
	return 0;
}

/* Translates the number at `at`. False: lost. */
static bool translate(struct table *t, char *message, size_t n, size_t at, bool last)
{
	struct handle_entry *h;
	uint64_t ours;
	bool open;

	if (at + sizeof(ours) > n)
		return false;
	memcpy(&ours, message + at, sizeof(ours));
	if (ours == 0) /* a server that does without open has no numbers */
		return true;
	if (ours > t->handle_used)
		return false;
	h = &t->handles[ours - 1];
	open = h->state == HANDLE_OPEN;
	if (open)
		memcpy(message + at, &h->theirs, sizeof(h->theirs));
	if (last && h->state != HANDLE_FREE) {
		*h = (struct handle_entry){ t->free_handle, HANDLE_FREE };
		t->free_handle = (uint32_t)(ours - 1);
	}
	return open;
}

int table_request(struct table *t, const struct request *q, char *message, size_t n)
{
	const size_t body = sizeof(struct fuse_in_header);
	uint32_t flags = 0;

	if (n >= body + sizeof(flags))
		memcpy(&flags, message + body, sizeof(flags));
	switch (q->opcode) {
	case FUSE_READ:
	case FUSE_WRITE:
	case FUSE_FLUSH:
	case FUSE_FSYNC:
	case FUSE_READDIR:
	case FUSE_READDIRPLUS:
	case FUSE_FSYNCDIR:
	case FUSE_IOCTL:
	case FUSE_POLL:
	case FUSE_FALLOCATE:
	case FUSE_LSEEK:
	case FUSE_GETLK:
	case FUSE_SETLK:
	case FUSE_SETLKW:
		return translate(t, message, n, body, false) ? TABLE_FORWARD : EIO;
	case FUSE_RELEASE:
	case FUSE_RELEASEDIR:
		return translate(t, message, n, body, true) ? TABLE_FORWARD : 0;
	case FUSE_GETATTR:
		/* A lost file's attributes are still its inode's. */
		if ((flags & FUSE_GETATTR_FH) &&
		    !translate(t, message, n, body + offsetof(struct fuse_getattr_in, fh), false)) {
			flags &= ~FUSE_GETATTR_FH;
			memcpy(message + body, &flags, sizeof(flags));
		}
		return TABLE_FORWARD;
	case FUSE_SETATTR:
		if ((flags & FATTR_FH) && !translate(t, message, n, body + offsetof(struct fuse_setattr_in, fh), false))
			return EIO;
		return TABLE_FORWARD;
	case FUSE_COPY_FILE_RANGE:
		if (!translate(t, message, n, body + offsetof(struct fuse_copy_file_range_in, fh_in), false) ||
		    !translate(t, message, n, body + offsetof(struct fuse_copy_file_range_in, fh_out), false))
			return EIO;
		return TABLE_FORWARD;
	}
	return TABLE_FORWARD;
}

int table_opened(struct table *t, const struct request *q, char *message, size_t n)
{
	size_t at = sizeof(struct fuse_out_header) + offsetof(struct fuse_open_out, fh);
	uint64_t handle;
	int r;

	switch (q->opcode) {
	case FUSE_CREATE:
	case FUSE_TMPFILE:
		at += sizeof(struct fuse_entry_out);
		break;
	case FUSE_OPEN:
	case FUSE_OPENDIR:
		break;
	default:
		return 0;
	}
	if (at + sizeof(handle) > n)
		return 0; /* the kernel will refuse it */
	memcpy(&handle, message + at, sizeof(handle));
	r = handle_add(t, handle, &handle);
	if (r == 0)
		memcpy(message + at, &handle, sizeof(handle));
	return r;
}

void table_forsake(struct table *t)
{
	for (uint32_t n = 0; n < t->handle_used; n++)
		if (t->handles[n].state == HANDLE_OPEN)
			t->handles[n].state = HANDLE_LOST;
}
