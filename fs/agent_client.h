/* SPDX-License-Identifier: Apache-2.0 */
/* The server's end of vmenv/agent.h: frames over a stream to the guest's agent, and the forms of what is in them. */
#ifndef FS_AGENT_CLIENT_H
#define FS_AGENT_CLIENT_H

#include <jansson.h>
#include <vmenv/agent.h>
#include <vmenv/loop.h>
#include <vmenv/util.h>

/*
 * A stream. Made by agent_open, ended by agent_close (also from its own callbacks). Output comes in pieces, as it
 * arrives, so that no stream holds a whole frame of it; other frames come whole and are small.
 */
struct agent {
	void (*frame)(struct agent *a, uint32_t type, const uint8_t *payload, uint32_t n); /* payload has a NUL after it */
	void (*output)(struct agent *a, unsigned which, const uint8_t *bytes, uint32_t n);  /* 0 stdout, 1 stderr */
	void (*ended)(struct agent *a, const struct err *e); /* once, not after agent_close; then agent_close it */
	void *arg;
	/* private */
	struct loop *loop;
	struct watch watch;
	bool writing, busy, closed, failed;
	struct agent_frame header;
	unsigned header_bytes;
	uint32_t left; /* of the payload */
	uint8_t *payload;
	uint32_t payload_bytes;
	uint8_t *out;
	size_t out_start, out_end, out_room;
};

/* Takes fd over, also on failure. */
int agent_open(struct loop *l, int fd, struct agent **a, struct err *e);
void agent_close(struct agent *a);
/* Queues; an error shows as `ended`. -ENOMEM, or 0. */
int agent_send(struct agent *a, uint32_t type, const void *payload, size_t n);
/* The same, but it leaves with what is sent next, or at agent_flush. */
int agent_queue(struct agent *a, uint32_t type, const void *payload, size_t n);
void agent_flush(struct agent *a);

/* unix_ns: ignored if frozen. entropy is fresh each time. */
int agent_send_setup(struct agent *a, int64_t unix_ns, bool frozen);

struct agent_run {
	uint64_t number, oldest; /* oldest: of the runs in progress */
	json_t *argv;       /* or NULL: the script */
	const void *script; size_t script_bytes;
	const void *input; size_t input_bytes;
	const char *cwd, *user;
	json_t *env;
	uint64_t timeout_ms, output_limit;
};
int agent_send_run(struct agent *a, const struct agent_run *r);
int agent_send_attach(struct agent *a, uint64_t number);
int agent_send_offsets(struct agent *a, uint64_t out, uint64_t err);
int agent_send_signal(struct agent *a, int signal);

/* -EPROTO and a sentence if they are not what they must be. */
int agent_read_offsets(const uint8_t *payload, uint32_t n, uint64_t offsets[2], struct err *e);
struct agent_result {
	int exit_code, signal;
	bool timed_out;
	uint64_t duration_ns, printed[2], head[2];
};
int agent_read_exit(const uint8_t *payload, uint32_t n, struct agent_result *r, struct err *e);
/* AGENT_FAILED: always fills *e, from the guest's errno and text if they are sound. Returns -e->code. */
int agent_read_failed(const uint8_t *payload, uint32_t n, struct err *e);

#endif
