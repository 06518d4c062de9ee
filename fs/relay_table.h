/* SPDX-License-Identifier: Apache-2.0 */
/* What the relay remembers of the FUSE traffic: requests that await their answer, and the numbers of open files. */
#ifndef FS_RELAY_TABLE_H
#define FS_RELAY_TABLE_H

#include <vmenv/util.h>

#define PENDING_MAX 65536u   /* requests at once */
#define HANDLES_MAX 1048576u /* open files at once */

struct request {
	uint64_t unique;
	uint32_t opcode;
	uint32_t thread; /* that waits for the answer */
	uint32_t next;	 /* the table's */
};

/* Our number for an open file is its place in the table plus one. */
struct handle_entry {
	uint64_t theirs; /* the server's number; free entries: the next free place */
	enum { HANDLE_FREE, HANDLE_OPEN, HANDLE_LOST /* its server is gone */ } state;
};

struct table {
	struct request *requests;
	uint32_t *buckets, room, used, free_request;
	struct handle_entry *handles;
	uint32_t handle_room, handle_used, free_handle;
};

int table_init(struct table *t);
void table_free(struct table *t);
bool table_full(const struct table *t);
int table_push(struct table *t, const struct request *q); /* 0 or -ENOMEM */
/* Takes the request of that number out. False: there is none. */
bool table_take(struct table *t, uint64_t unique, struct request *q);
/* The request of that number, until the table changes; NULL: there is none. */
const struct request *table_find(const struct table *t, uint64_t unique);
/* Takes any out. */
bool table_pop(struct table *t, struct request *q);

/*
 * A request on its way to the server: our file numbers in it become the server's. TABLE_FORWARD, or the errno to answer
 * it with (0: success) in the server's stead, as the file was opened at a server that is gone.
 */
#define TABLE_FORWARD (-1)
int table_request(struct table *t, const struct request *q, char *message, size_t n);
/* The successful answer to q: the server's number in it becomes ours. -ENOMEM: too many open files. */
int table_opened(struct table *t, const struct request *q, char *message, size_t n);
/* The server is gone: the files that are open are lost. */
void table_forsake(struct table *t);

#endif
