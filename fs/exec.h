/* SPDX-License-Identifier: Apache-2.0 */
/* What `exec` and `exec.json` share: a request is written, runs when it is flushed or read, and is read back. */
#ifndef FS_EXEC_H
#define FS_EXEC_H

#include "exec_answer.h"

/* A run that an open file started. */
struct exec_run {
	struct op op;
	unsigned references; /* the open file's; the operation's and the worker's until they are over: requests wait for those only */
	struct run *run;     /* held */
	struct server *server;
	bool done;           /* op is over */
	bool read_started;   /* nobody but the readers of this opening waits for it */
	int status;          /* of op */
	bool placed;         /* `start` is set */
	uint64_t start;      /* the offset of the first read, which is where the output begins */
	struct exec_answer *answer; /* exec.json: made once, when it is asked for after the end */
	bool answering;             /* a worker has it, and a reference */
	struct err unanswerable;
	struct exec_wait *waiting;
};

/* exec: the text as it is. exec.json: parsed and checked. *q points into *text and what the function made in *keep. */
struct exec_request {
	struct run_request q;
	json_t *json;
	void *input;
};
int exec_json_parse(const char *text, size_t n, struct exec_request *r, struct err *e);
void exec_request_free(struct exec_request *r);

#endif
