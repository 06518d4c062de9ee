/* SPDX-License-Identifier: Apache-2.0 */
/* The relay's table: requests come out as they went in, and a server never sees a file number of the one before it. */
#include "../../fs/relay_table.h"

#include <linux/fuse.h>
#include <stddef.h>

#define CHECK(x)                                                                                                       \
	do {                                                                                                           \
		if (!(x)) {                                                                                            \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #x);                                        \
			exit(1);                                                                                       \
		}                                                                                                      \
	} while (0)

struct message {
	struct fuse_in_header h;
	union {
		struct fuse_read_in read;
		struct fuse_release_in release;
		struct fuse_getattr_in getattr;
		struct fuse_setattr_in setattr;
		struct fuse_copy_file_range_in copy;
	};
};

static int request(struct table *t, uint32_t opcode, struct message *m)
{
	struct request q = { 2, opcode, 0 };

	m->h = (struct fuse_in_header){ .len = sizeof(*m), .opcode = opcode, .unique = 2 };
	return table_request(t, &q, (char *)m, sizeof(*m));
}

/* The server opened a file under `theirs`: our number for it. */
static uint64_t opened(struct table *t, uint32_t opcode, uint64_t theirs)
{
	struct {
		struct fuse_out_header h;
		struct fuse_entry_out entry;
		struct fuse_open_out open;
	} created = { .open.fh = theirs };
	struct {
		struct fuse_out_header h;
		struct fuse_open_out open;
	} plain = { .open.fh = theirs };
	struct request q = { 2, opcode, 0 };

	if (opcode == FUSE_CREATE) {
		CHECK(table_opened(t, &q, (char *)&created, sizeof(created)) == 0);
		return created.open.fh;
	}
	CHECK(table_opened(t, &q, (char *)&plain, sizeof(plain)) == 0);
	return plain.open.fh;
}

static void test_requests(void)
{
	struct table t;
	struct request q;
	unsigned left = 0;

	CHECK(table_init(&t) == 0);
	for (uint64_t n = 0; n < 20000; n++)
		CHECK(table_push(&t, &(struct request){ 2 * n, (uint32_t)n, 0 }) == 0);
	for (uint64_t n = 0; n < 20000; n += 2) {
		CHECK(table_take(&t, 2 * n, &q) && q.unique == 2 * n && q.opcode == n);
		CHECK(!table_take(&t, 2 * n, &q));
	}
	while (table_pop(&t, &q)) {
		CHECK(q.opcode % 2 == 1);
		left++;
	}
	CHECK(left == 10000);
	for (uint64_t n = 0; n < PENDING_MAX; n++) {
		CHECK(!table_full(&t));
		CHECK(table_push(&t, &(struct request){ 2 * n, 1, 0 }) == 0);
	}
	CHECK(table_full(&t));
	CHECK(table_push(&t, &(struct request){ 1000000, 1, 0 }) == -ENOMEM);
	table_free(&t);
}

static void test_handles(void)
{
	const uint64_t pointer = 0x55aa55aa55aa;
	struct message m = { 0 };
	struct table t;
	uint64_t a, b, c;

	CHECK(table_init(&t) == 0);
	a = opened(&t, FUSE_OPEN, pointer);
	b = opened(&t, FUSE_CREATE, pointer + 64);
	CHECK(a != b && a && b);
	m.read.fh = a;
	CHECK(request(&t, FUSE_READ, &m) == TABLE_FORWARD && m.read.fh == pointer);
	m.copy = (struct fuse_copy_file_range_in){ .fh_in = a, .fh_out = b };
	CHECK(request(&t, FUSE_COPY_FILE_RANGE, &m) == TABLE_FORWARD);
	CHECK(m.copy.fh_in == pointer && m.copy.fh_out == pointer + 64);
	m.setattr = (struct fuse_setattr_in){ .valid = FATTR_FH, .fh = b };
	CHECK(request(&t, FUSE_SETATTR, &m) == TABLE_FORWARD && m.setattr.fh == pointer + 64);
	/* A number that was never given out. */
	m.read.fh = 1000;
	CHECK(request(&t, FUSE_READ, &m) == EIO);

	/* The server dies; the next one hands out the same pointer. */
	table_forsake(&t);
	c = opened(&t, FUSE_OPEN, pointer);
	CHECK(c != a && c != b);
	m.read.fh = a;
	CHECK(request(&t, FUSE_WRITE, &m) == EIO);
	m.setattr = (struct fuse_setattr_in){ .valid = FATTR_FH, .fh = b };
	CHECK(request(&t, FUSE_SETATTR, &m) == EIO);
	m.getattr = (struct fuse_getattr_in){ .getattr_flags = FUSE_GETATTR_FH, .fh = b };
	CHECK(request(&t, FUSE_GETATTR, &m) == TABLE_FORWARD && !(m.getattr.getattr_flags & FUSE_GETATTR_FH));
	m.read.fh = c;
	CHECK(request(&t, FUSE_READ, &m) == TABLE_FORWARD && m.read.fh == pointer);

	/* Closing a lost file is nobody's business but ours, and its number is free again. */
	m.release.fh = a;
	CHECK(request(&t, FUSE_RELEASE, &m) == 0);
	CHECK(opened(&t, FUSE_OPENDIR, 7) == a);
	m.release.fh = c;
	CHECK(request(&t, FUSE_RELEASE, &m) == TABLE_FORWARD && m.release.fh == pointer);
	m.read.fh = c;
	CHECK(request(&t, FUSE_READ, &m) == EIO);
	table_free(&t);
}

int main(void)
{
	test_requests();
	test_handles();
	return 0;
}
