/* SPDX-License-Identifier: Apache-2.0 */
/* --via: the mount's server is a shell command's stdin and stdout. */
#include "host.h"

#include "relay.h"

#define PIPE_BYTES (1 << 20)

static int make_pipe(int p[2], struct err *e)
{
	if (pipe2(p, O_CLOEXEC) < 0)
		return err_set(e, errno, "cannot make a pipe: %s", strerror(errno));
	/* Whole messages fit; not vital, and limited for ordinary users. */
	fcntl(p[0], F_SETPIPE_SZ, PIPE_BYTES);
	return 0;
}

static int command_start(struct backend *b, struct upstream *u, struct err *e)
{
	const char *const argv[] = { "/bin/sh", "-c", b->arg, NULL };
	AUTO_CLOSE int their_in = -1, their_out = -1, our_in = -1, our_out = -1;
	AUTO_CLOSE int terminal = open("/dev/tty", O_RDWR | O_CLOEXEC | O_NOCTTY);
	int p[2], r;

	r = make_pipe(p, e);
	if (r < 0)
		return r;
	their_in = p[0];
	our_out = p[1];
	r = make_pipe(p, e);
	if (r < 0)
		return r;
	our_in = p[0];
	their_out = p[1];
	if (fcntl(our_in, F_SETFL, O_NONBLOCK) < 0 || fcntl(our_out, F_SETFL, O_NONBLOCK) < 0)
		return err_set(e, errno, "cannot set O_NONBLOCK: %s", strerror(errno));
	/* With a terminal it stays in the foreground group: ssh may ask for a password. */
	u->group = terminal < 0;
	r = host_spawn(argv, their_in, their_out, -1, NULL, u->group, SIGTERM, &u->pid, e);
	if (r < 0)
		return r;
	u->in = steal_fd(&our_in);
	u->out = steal_fd(&our_out);
	return 0;
}

int via_run(const struct host_options *o, const char *command, struct err *e)
{
	struct backend b = {
		.what = "the command of --via", .start = command_start, .end_within = 5, .arg = (void *)command
	};

	return relay_run(o, &b, e);
}
