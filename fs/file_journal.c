/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `events` and `error`: texts that grow at the end and lose their oldest lines.
 *
 * Offsets count from the first line ever, so the size only grows and `tail -f` stays right. A reader from offset 0 (cat)
 * wants the lines that are kept: its offsets are moved, from its first read on, by what is gone by then. So is a reader
 * in order that falls behind: it goes on with the oldest line kept. Whoever seeks into what is gone (tail, looking for
 * lines from the end backwards) finds zero bytes there, like a hole in a file.
 */
#include <poll.h>

#include "server.h"

struct place {
	uint64_t moved; /* added to the offsets of the handle's reads */
	uint64_t next;  /* where a reader in order reads next */
};

static struct journal *journal_of(const struct node *n)
{
	return n->entry->journal(n->server->core);
}

static uint64_t journal_size(const struct node *n)
{
	struct journal *j = journal_of(n);

	return j->dropped + j->bytes;
}

static int journal_open(struct handle *h, fuse_req_t req, struct err *e)
{
	(void)req;
	h->own = calloc(1, sizeof(struct place));
	return h->own ? 0 : err_set(e, ENOMEM, "no memory for an open file");
}

static void journal_release(struct handle *h)
{
	free(h->own);
}

static void read_hole(fuse_req_t req, const struct journal *j, size_t size, uint64_t at)
{
	size_t hole = (size_t)MIN(size, j->dropped - at), text = MIN(size - hole, j->bytes);
	AUTO_FREE char *bytes = calloc(1, hole + text);

	if (!bytes) {
		fuse_reply_err(req, ENOMEM);
		return;
	}
	if (text)
		memcpy(bytes + hole, j->text, text);
	fuse_reply_buf(req, bytes, hole + text);
}

static void journal_read(struct handle *h, fuse_req_t req, size_t size, uint64_t offset)
{
	struct journal *j = journal_of(&h->node);
	struct place *p = h->own;
	uint64_t at = offset + p->moved, end = j->dropped + j->bytes;

	if (offset == 0 || (at < j->dropped && offset == p->next)) {
		p->moved = j->dropped - offset;
		at = j->dropped;
	}
	h->seen = MIN(at + size, MAX(end, at));
	p->next = h->seen - p->moved;
	if (at < j->dropped)
		read_hole(req, j, size, at);
	else
		reply_slice(req, j->text, j->bytes, size, at - j->dropped);
}

static unsigned journal_poll(struct handle *h)
{
	return h->seen < journal_size(&h->node) ? POLLIN | POLLRDNORM : 0;
}

const struct behaviour journal_file = {
	.open = journal_open, .release = journal_release, .read = journal_read, .poll = journal_poll, .size = journal_size,
};
