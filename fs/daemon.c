/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon.h"

#include <signal.h>
#include <sys/wait.h>

/* The parent's part: exits as the child says, or dies as it dies. */
static void wait_for_child(pid_t child, int pipe)
{
	char ready;
	int status;
	ssize_t n;

	do
		n = read(pipe, &ready, 1);
	while (n < 0 && errno == EINTR);
	if (n == 1)
		_exit(0);
	while (waitpid(child, &status, 0) < 0)
		if (errno != EINTR)
			_exit(1);
	_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
}

int daemon_start(struct daemon *d, struct err *e)
{
	int pipes[2];
	pid_t child;

	d->pipe = -1;
	if (d->foreground)
		return 0;
	if (pipe2(pipes, O_CLOEXEC) < 0)
		return err_set(e, errno, "cannot make a pipe: %s", strerror(errno));
	fflush(NULL);
	child = fork();
	if (child < 0) {
		int error = errno;

		close(pipes[0]);
		close(pipes[1]);
		return err_set(e, error, "cannot fork: %s", strerror(error));
	}
	if (child > 0) {
		close(pipes[1]);
		wait_for_child(child, pipes[0]);
	}
	close(pipes[0]);
	d->pipe = pipes[1];
	setsid();
	return 0;
}

void daemon_ready(struct daemon *d)
{
	AUTO_CLOSE int null = -1;

	if (d->foreground || d->pipe < 0)
		return;
	if (chdir("/") < 0)
		fprintf(stderr, "vmenvfs: cannot change to /: %s\n", strerror(errno));
	if (write(d->pipe, "", 1) != 1)
		fprintf(stderr, "vmenvfs: whoever started this is gone\n");
	close(d->pipe);
	d->pipe = -1;
	null = open("/dev/null", O_RDWR | O_CLOEXEC);
	for (int fd = 0; null >= 0 && fd <= 2; fd++)
		dup2(null, fd);
}
