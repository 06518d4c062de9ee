/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon.h"

#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <sys/wait.h>

/* SIGINT, SIGTERM and SIGHUP are blocked, and come by `signals`. */
static bool wait_for_ready(pid_t child, int pipe, int signals, int *last_signal)
{
	struct pollfd p[] = { { .fd = pipe, .events = POLLIN }, { .fd = signals, .events = POLLIN } };
	struct signalfd_siginfo info;
	char ready;

	for (;;) {
		if (poll(p, 2, -1) < 0)
			continue;
		if (p[1].revents && read(signals, &info, sizeof(info)) == sizeof(info)) {
			*last_signal = (int)info.ssi_signo;
			kill(child, *last_signal);
		}
		if (p[0].revents)
			return read(pipe, &ready, 1) == 1;
	}
}

/* The parent's part: exits as the child says, or dies as it dies. */
static void parent(pid_t child, int pipe, const sigset_t *set)
{
	int status, last_signal = 0, signals = signalfd(-1, set, SFD_CLOEXEC);

	if (signals < 0)
		sigprocmask(SIG_UNBLOCK, set, NULL);
	if (wait_for_ready(child, pipe, signals, &last_signal))
		_exit(0);
	while (waitpid(child, &status, 0) < 0)
		if (errno != EINTR)
			_exit(1);
	if (WIFSIGNALED(status))
		_exit(128 + WTERMSIG(status));
	/* It may have ended well, but there is no mount. */
	_exit(last_signal ? 128 + last_signal : MAX(WEXITSTATUS(status), 1));
}

int daemon_start(struct daemon *d, struct err *e)
{
	sigset_t set, before;
	int pipes[2];
	pid_t child;

	d->pipe = -1;
	if (d->foreground)
		return 0;
	if (pipe2(pipes, O_CLOEXEC) < 0)
		return err_set(e, errno, "cannot make a pipe: %s", strerror(errno));
	fflush(NULL);
	sigemptyset(&set);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGHUP);
	sigprocmask(SIG_BLOCK, &set, &before);
	child = fork();
	if (child > 0) {
		close(pipes[1]);
		parent(child, pipes[0], &set);
	}
	sigprocmask(SIG_SETMASK, &before, NULL);
	if (child < 0) {
		int error = errno;

		close(pipes[0]);
		close(pipes[1]);
		return err_set(e, error, "cannot fork: %s", strerror(error));
	}
	close(pipes[0]);
	d->pipe = pipes[1];
	return 0;
}

void daemon_ready(struct daemon *d)
{
	AUTO_CLOSE int null = -1;

	if (d->foreground || d->pipe < 0)
		return;
	setsid();
	if (chdir("/") < 0)
		fprintf(stderr, "vmenvfs: cannot change to /: %s\n", strerror(errno));
	if (write(d->pipe, "", 1) != 1)
		fprintf(stderr, "vmenvfs: whoever started this is gone\n");
	close(d->pipe);
	d->pipe = -1;
	d->detached = true;
	null = open("/dev/null", O_RDWR | O_CLOEXEC);
	for (int fd = 0; null >= 0 && fd <= 2; fd++)
		dup2(null, fd);
}
