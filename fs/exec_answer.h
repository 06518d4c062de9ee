/* SPDX-License-Identifier: Apache-2.0 */
/* The text that exec.json answers with, made of a run's result and its stored output, a piece at a time. */
#ifndef FS_EXEC_ANSWER_H
#define FS_EXEC_ANSWER_H

#include "server.h"

/*
 * new -> work -> read. work blocks for as long as the output is long: it touches nothing but the answer, so it may be
 * done on a worker, which then owns the answer until the job is reported.
 */
struct exec_answer {
	struct job job; /* first; work is set */
	struct err err; /* of work */
	/* when done: a file, or bytes in `text` */
	int fd; /* -1: text */
	uint64_t bytes;
	struct buffer text;
	/* private: what it is made of */
	char *head;
	int output[2]; /* own descriptors, -1 for none */
	uint64_t stored[2];
};

/* Of a run that has ended. */
int exec_answer_new(struct run *r, struct exec_answer **a, struct err *e);
/* Whether it is too long to be made while others wait. */
bool exec_answer_long(const struct exec_answer *a);
void exec_answer_read(const struct exec_answer *a, fuse_req_t req, size_t size, uint64_t offset);
void exec_answer_free(struct exec_answer *a); /* NULL is fine */

#endif
