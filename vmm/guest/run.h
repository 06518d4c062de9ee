/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A run, from its request to its release.
 *
 *   COLLECTING -> RUNNING -> DRAINING -> FINISHED
 *
 * COLLECTING: script and stdin arrive; the run ends with its connection. RUNNING: its first process lives. DRAINING: that
 * has ended, and what was in its pipes at that moment is being read; what is written later is not the run's. FINISHED:
 * kept, with its output, until released. From RUNNING on it does not need a connection.
 *
 * A background process that still holds the pipes finds them open and read: what it writes is thrown away, so that it
 * dies neither of SIGPIPE nor waits for ever.
 */
#ifndef VMENV_GUEST_RUN_H
#define VMENV_GUEST_RUN_H

#include "agent.h"
#include "request.h"

enum run_state { RUN_COLLECTING = 1, RUN_RUNNING, RUN_DRAINING, RUN_FINISHED };

/* stdout or stderr. */
struct channel {
	struct run *run;
	struct watch watch; /* its fd is the read end of the pipe, -1 when closed */
	bool watched, enlarged;
	uint64_t drain; /* DRAINING: bytes still to be read */
	struct stream stream;
	uint64_t sent; /* by the connection in hand */
};

struct run {
	struct agent *agent;
	struct run *next;
	struct connection *connection; /* or NULL */
	enum run_state state;
	struct request request;
	/* COLLECTING: the script's bytes, then stdin's. */
	uint64_t script_have, stdin_have;
	char *script;             /* a short one */
	int script_fd;            /* a long one: a memory file; -1 */
	int input_fd, input_feed; /* what the process reads, and where that comes from: a pipe or the same memory file */
	pid_t pid;  /* of the first process; -1 once it is reaped */
	int cgroup; /* index, -1 for none */
	struct timer timer;
	struct channel out, err;
	uint64_t started, ended; /* CLOCK_MONOTONIC */
	int exit_code, signal;
	bool timed_out;
};

/* Takes the request over, also on failure. In the table until run_free. */
int run_new(struct agent *a, struct request *q, struct run **out, struct err *e);
struct run *run_find(struct agent *a, uint64_t number);
/* Script and stdin bytes, as announced. All of them there, the run starts. -errno: the run cannot be, free it. */
int run_data(struct run *r, const uint8_t *data, size_t n, struct err *e);
/* Starts it if nothing is missing. */
int run_ready(struct run *r, struct err *e);
/* To the process group; SIGKILL to every descendant. */
void run_signal(struct run *r, int signal);
/* After an acknowledgement: there is room. */
void run_continue(struct run *r);
void run_free(struct run *r);
/* A child of the agent's has ended. False if it is no run's. */
bool run_reaped(struct agent *a, pid_t pid, int code, int status);
/* The sandbox died with everything in it. */
void runs_lost(struct agent *a);

#endif
