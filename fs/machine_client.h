/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The server's end of vmenv/machine.h: one client per machine process, from the connect to the end of the process.
 *
 * A client is made by machine_connect and frees itself when its process is gone; its owner drops the pointer at `ended`
 * or at machine_quit, whichever comes first. Requests are sent without waiting for earlier answers, also before the
 * machine has accepted the connection: what a birth needs is all in the socket when the process first looks.
 */
#ifndef FS_MACHINE_CLIENT_H
#define FS_MACHINE_CLIENT_H

#include <sys/types.h>
#include <vmenv/loop.h>
#include <vmenv/machine.h>
#include <vmenv/util.h>

struct machine_client;

/* Every machine process there is, and the folder of their sockets. */
struct machines {
	struct loop *loop;
	int folder;
	struct machine_client *list;
	unsigned count;
};

/* One request. The caller's until done or machine_call_drop. */
struct machine_call {
	/* status 0 with the answer, or -errno with *e (and *m if the machine answered so). */
	void (*done)(struct machine_call *c, int status, const struct machine_msg *m, const struct err *e);
	void *arg;
	/* the client's */
	struct machine_client *client; /* NULL: not pending */
	uint32_t id, op;
	struct timer timer;
	struct machine_call *next;
};

struct machine_client {
	struct machines *machines;
	struct machine_client *next;
	uint64_t id; /* names the socket */
	pid_t pid;   /* 0 until known */
	bool child;  /* of this process: it is to be reaped */
	bool hello, quitting, finished;
	char sentence[480]; /* why it ended */
	uint64_t hello_ns;  /* CLOCK_MONOTONIC */
	/* The owner's. ended: once, unless machine_quit came first. gone: the process is no more; the last call. */
	void (*greeted)(struct machine_client *c);
	void (*ended)(struct machine_client *c, const char *sentence);
	void (*gone)(struct machine_client *c);
	void *arg;
	/* private */
	struct watch socket, process;
	bool writing;
	struct timer kill;
	uint32_t last_id;
	struct machine_call *calls;
	struct outgoing *out, **out_tail;
};

/* Makes the machine's listening socket, 0600, named by id. Descriptor or -errno. */
int machine_listen(struct machines *s, uint64_t id, struct err *e);
/* Connects to it. */
int machine_connect(struct machines *s, uint64_t id, struct machine_client **c, struct err *e);
/* The process, when the server started it itself. */
void machine_is_child(struct machine_client *c, pid_t pid);
/*
 * Sends a request. Takes the descriptors over, also when it fails. text may be NULL. Fails at once only when the machine
 * has ended; otherwise call->done is called once, later. timeout_ms 0: none.
 */
int machine_request(struct machine_client *c, struct machine_call *call, uint32_t op, uint32_t count, const void *text,
		    size_t text_bytes, int *fds, unsigned nfds, unsigned timeout_ms, struct err *e);
/* A stream to a guest port: the near end, usable at once (what is written waits for the guest). call ends when the
 * guest has accepted or refused. */
int machine_stream(struct machine_client *c, struct machine_call *call, uint32_t port, unsigned timeout_ms, int *fd,
		   struct err *e);
void machine_call_drop(struct machine_call *call);
/* Ends the process: it is asked to, and killed if it does not. Calls in progress fail with c->sentence. Twice is fine. */
void machine_quit(struct machine_client *c);
/* Ends all and waits, for the end of the server. */
void machines_close(struct machines *s);

/*
 * Starts vmenv-machine with `listening` as its --control descriptor and log (may be -1) as stdout and stderr: a session of
 * its own, no other descriptor, signals as by default. argv[2] must be "3". Takes nothing over.
 */
int machine_spawn(const char *program, char *const argv[], int listening, int log, pid_t *pid, struct err *e);

#endif
