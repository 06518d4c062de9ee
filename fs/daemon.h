/* SPDX-License-Identifier: Apache-2.0 */
/* Going into the background only once the mount answers, so that whoever started the server sees why it could not. */
#ifndef FS_DAEMON_H
#define FS_DAEMON_H

#include <vmenv/util.h>

struct daemon {
	bool foreground; /* stay: daemon_start and daemon_ready then do nothing */
	int pipe;        /* to the parent that waits; -1 if none does */
	bool detached;   /* nobody sees what goes to stderr any more */
};

/*
 * Call it before anything that a fork would break (threads, epoll, mounts). The parent waits in there: it exits with 0
 * when the child calls daemon_ready, or else with the child's exit status; SIGINT, SIGTERM and SIGHUP are passed on to the
 * child meanwhile. The child returns 0, still with the terminal, so that Ctrl-C ends it and what it starts can ask for a
 * password.
 */
int daemon_start(struct daemon *d, struct err *e);
/* The mount answers: lets the parent go, and the terminal too. */
void daemon_ready(struct daemon *d);

#endif
