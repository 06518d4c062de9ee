/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The protocol between the filesystem server and the agent in the guest, over vsock streams to MACHINE_AGENT_PORT.
 *
 * Both sides send frames: struct agent_frame (little endian), then `length` bytes. The first frame from the server says
 * what the connection is for: AGENT_SETUP, AGENT_RUN, AGENT_ATTACH or AGENT_SYNC. Once that is done (AGENT_OK, AGENT_NEXT)
 * the connection may be used for another purpose, or kept for one: a run then needs no connection of its own. Either side
 * ends the connection on a frame it does not know, that is too long, or out of place; the agent says AGENT_FAILED first.
 *
 * The server believes none of it: lengths, offsets and codes are checked, and a guest's output is bounded on the host.
 *
 * A run outlives its connection: the agent goes on, keeps what was not acknowledged (AGENT_WINDOW bytes a stream, then
 * the run's own writes block), and a new connection attaches by run number. Nothing is lost or doubled: offsets count a
 * stream's bytes from its start, after truncation.
 */
#ifndef VMENV_AGENT_H
#define VMENV_AGENT_H

#include <stdint.h>

#define AGENT_FRAME_MAX (1u << 20) /* payload bytes */
#define AGENT_WINDOW (512u << 10)  /* unacknowledged bytes kept for each of stdout and stderr */
#define AGENT_RUNS_MAX 256         /* runs at once */
#define AGENT_TAIL_MAX (1u << 20)  /* of a truncated output, the tail is min(limit / 4, this); the head is the rest */

struct agent_frame {
	uint32_t length; /* of what follows, <= AGENT_FRAME_MAX */
	uint32_t type;   /* enum agent_type */
};

enum agent_type {
	/* server to agent */
	AGENT_SETUP = 1, /* JSON {"unix_ns": N|null, "entropy": HEX (32..512 bytes), "hostname": S|null, "machine_id": S|null}.
	                  * Sets wall clock, adds the entropy (RNDADDENTROPY, RNDRESEEDCRNG), hostname, /etc/machine-id.
	                  * Answered by AGENT_OK or AGENT_FAILED. Sent after every restore, before anything else. */
	AGENT_RUN,       /* JSON, below; then AGENT_DATA frames of the script and stdin as announced. Answered by AGENT_STARTED */
	AGENT_ATTACH,    /* JSON {"run": N}. Answered by AGENT_STARTED with the window's start, then output from there */
	AGENT_SYNC,      /* JSON {"drop_caches": bool}: syncfs of the disk. Answered by AGENT_OK. The last thing before a freeze */
	AGENT_DATA,      /* bytes of the script and then of stdin, in order, as many as AGENT_RUN announced */
	AGENT_SIGNAL,    /* u32 signal number: to the run's process group; SIGKILL: to every descendant */
	AGENT_ACK,       /* struct agent_offsets: the server has stored up to there */
	AGENT_RELEASE,   /* no payload: the exit is stored; the agent forgets the run. Answered by closing the connection */
	AGENT_NEXT,      /* the same, not answered: another first frame may follow */

	/* agent to server */
	AGENT_OK = 64,
	AGENT_FAILED,  /* JSON {"errno": N, "text": S} */
	AGENT_STARTED, /* struct agent_offsets: the offsets from which output follows (0, 0 for a new run) */
	AGENT_STDOUT,  /* bytes, following on */
	AGENT_STDERR,
	AGENT_EXIT, /* JSON {"exit_code": N, "signal": N, "timed_out": B, "duration_ns": N, "stdout_bytes": N, "stderr_bytes": N,
	             * "stdout_head": N, "stderr_head": N}; after all output. *_bytes count what the run printed, before truncation;
	             * *_head is where the head ended if truncated, else equal to *_bytes. */
};

struct agent_offsets {
	uint64_t out, err;
};

/*
 * AGENT_RUN: {"run": N, "argv": [S...] | null, "script_bytes": N, "stdin_bytes": N, "cwd": S, "user": S, "env": {S: S},
 *             "timeout_ms": N, "output_limit": N, "oldest": N}
 * What has ended of the runs with a lower number than `oldest` is forgotten, unless a connection has it: the server knows all of
 * them. (A copy of a machine may hold runs whose AGENT_NEXT went to the original alone.)
 * With argv null the script's bytes (which come first in AGENT_DATA) are run by /bin/sh. The environment is exactly `env`
 * plus HOME, USER, LOGNAME, SHELL of the user where env does not have them. The exit code is as a shell says it: 128 + N for a
 * signal, 124 for a timeout (with timed_out), 126 and 127 for a command that cannot be run or found. A run ends
 * when its first process ends (output that is in the pipes by then is kept), not when the last holder of stdout does.
 * Past output_limit (each stream) the head and the tail are kept. At the deadline every descendant is killed.
 */

#endif
