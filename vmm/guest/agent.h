/* SPDX-License-Identifier: Apache-2.0 */
/* The agent: what main.c puts together and everything else hangs off. One thread, one event loop. */
#ifndef VMENV_GUEST_AGENT_H
#define VMENV_GUEST_AGENT_H

#include <stdbool.h>

#include <vmenv/loop.h>

#include "cgroups.h"
#include "sandbox.h"
#include "stream.h"

#define SCRATCH_SIZE (64u << 10)
#define CONNECTIONS_MAX 512
#define LEFTOVERS_MAX 1024
#define CGROUPS_SPARE 4 /* made before the freeze, for the first runs of every clone */

struct run;
struct connection;
struct leftover;

struct agent {
	struct loop *loop;
	bool guest;       /* PID 1 of a machine, as against a process on somebody's host */
	int disk;         /* the root of the disk */
	const char *root; /* its path, for the sandbox; NULL: runs live where the agent lives */
	struct sandbox sandbox;
	struct cgroups cgroups;
	struct budget budget;
	struct run *runs;
	int run_count;
	struct connection *connections;
	int connection_count;
	struct leftover *leftovers;
	int leftover_count;
	int listener;
	struct watch listen_watch, signal_watch;
	/* SCRATCH_SIZE bytes each that are nobody's from one callback to the next: for what the server sends, and the rest. */
	uint8_t *input, *scratch;
	void *stack;      /* SPAWN_STACK bytes for the child being born */
};

/* A line on the console. */
__attribute__((format(printf, 1, 2))) void say(const char *fmt, ...);

#endif
