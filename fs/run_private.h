/* SPDX-License-Identifier: Apache-2.0 */
/* What run.c, run_output.c, run_fork.c and reaper.c share. */
#ifndef FS_RUN_PRIVATE_H
#define FS_RUN_PRIVATE_H

#include <signal.h>

#include "back.h"

/* A command's text, shared by the runs of forks. */
struct shared_text {
	unsigned references;
	char bytes[];
};

struct run_private {
	struct op *op;           /* who waits for the end */
	struct agent *agent;     /* NULL: between attempts, or ended */
	struct machine_call connect;
	struct timer timer;      /* to start, to end, or to be killed; retry: the next attempt */
	struct timer retry;
	uint64_t left_ns;        /* of timer, while frozen */
	unsigned attempts;
	bool sent, attach, attaching, killed, killed_softly;
	bool may_time_out; /* also before it has begun: its own time is over before the agent's to begin */
	struct output *output[2];
	uint64_t got[2];         /* the offset of the next byte from the guest */
	uint64_t have[2];        /* bytes in the file */
	uint64_t acknowledged, limit, timeout_ms, begun_ns;
	struct shared_text *text;
	/* the request, until it has started */
	json_t *argv, *env;
	void *input;
	size_t input_bytes;
	char *cwd, *user;
	/* in a fork, of a run that was in progress: the parent's, and its files, until the beginning is copied */
	struct run *origin;
	bool origin_started;
	int prefix_fd[2];
	bool copying[2];
	bool finished; /* result is there, copying is not done */
	struct agent_result result;
};

bool run_going(const struct run *r);
struct run *run_new(struct sandbox *s, uint64_t number, struct shared_text *text, size_t text_bytes, struct err *e);
void run_list(struct run *r);
void run_drop(struct run *r);
void run_end(struct run *r, enum run_state state, int status, const struct err *e);
void run_lost(struct run *r, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
int run_attach(struct run *r, struct err *e);
void run_finish_if_due(struct run *r);
void link_close(struct run *r);
void attach_settled(struct run *r);
struct shared_text *shared_text_new(const void *bytes, size_t n);

/* run_output.c */
void output_put(struct output *o);
void run_share_output(struct run *to, struct run *from);
int run_need_file(struct run *r, enum stream w, struct err *e);
void run_publish(struct run *r, enum stream w);
int run_store(struct run *r, enum stream w, const uint8_t *bytes, uint64_t n, struct err *e);
void run_close_outputs(struct run *r);

/* run_fork.c: the agent of a fork goes on from `offsets`: what came before is in the parent's files. */
int run_copy_beginning(struct run *r, const uint64_t offsets[2], struct err *e);
/* The agent of a fork does not know the run. */
void run_not_in_fork(struct run *r);

/* reaper.c: reads a stream to its end for nobody, so that the agent can forget the run. Takes the stream over. */
void reaper_take(struct core *c, struct agent *a, const uint64_t got[2]);

#endif
