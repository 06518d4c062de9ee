/* SPDX-License-Identifier: Apache-2.0 */
#include "process.h"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <syslog.h>

void host_say(bool to_syslog, const char *fmt, ...)
{
	char text[800];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	fprintf(stderr, "vmenvfs: %s\n", text);
	if (to_syslog) {
		openlog("vmenvfs", LOG_PID, LOG_DAEMON);
		syslog(LOG_WARNING, "%s", text);
		closelog();
	}
}

int host_spawn(const char *const argv[], int in, int out, int err, const int *keep, bool own_group, int death,
	       pid_t *pid, struct err *e)
{
	pid_t parent = getpid(), child;
	AUTO_CLOSE int report_read = -1;
	int report[2], error = 0;

	if (pipe2(report, O_CLOEXEC) < 0)
		return err_set(e, errno, "cannot make a pipe: %s", strerror(errno));
	report_read = report[0];
	child = fork();
	if (child < 0) {
		error = errno;
		close(report[1]);
		return err_set(e, error, "cannot fork: %s", strerror(error));
	}
	if (child == 0) {
		sigset_t none;
		int fds[3] = { in, out, err };

		if (own_group)
			setpgid(0, 0);
		prctl(PR_SET_PDEATHSIG, death);
		if (getppid() != parent)
			_exit(1);
		sigemptyset(&none);
		sigprocmask(SIG_SETMASK, &none, NULL);
		signal(SIGPIPE, SIG_DFL);
		/* Above 2 first, so that none is overwritten before its turn. */
		for (int n = 0; n < 3; n++)
			if (fds[n] >= 0 && fds[n] <= 2 && fds[n] != n)
				fds[n] = fcntl(fds[n], F_DUPFD_CLOEXEC, 3);
		for (int n = 0; n < 3; n++)
			if (fds[n] == n)
				fcntl(n, F_SETFD, 0);
			else if (fds[n] >= 0)
				dup2(fds[n], n);
		for (; keep && *keep >= 0; keep++)
			fcntl(*keep, F_SETFD, 0);
		execvp(argv[0], (char *const *)argv);
		error = errno;
		if (write(report[1], &error, sizeof(error)) < 0)
			_exit(126);
		_exit(127);
	}
	close(report[1]);
	if (read(report_read, &error, sizeof(error)) == sizeof(error)) {
		waitpid(child, NULL, 0);
		return err_set(e, error, "cannot run %s: %s", argv[0], strerror(error));
	}
	*pid = child;
	return 0;
}

bool host_wait(pid_t pid, int ms, int *status)
{
	AUTO_CLOSE int fd = (int)syscall(SYS_pidfd_open, pid, 0);
	struct pollfd p = { .fd = fd, .events = POLLIN };

	if (fd >= 0)
		poll(&p, 1, ms);
	return waitpid(pid, status, WNOHANG) == pid;
}
