/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The child shares the agent's memory until it executes (the agent waits meanwhile), so it writes nothing but its stack,
 * errno and its answer in struct command, and uses bare system calls where libc has a state of its own.
 */
#include <linux/sched.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <vmenv/util.h>

#include "cgroups.h"
#include "child.h"

#define FILES_SOFT 1024
#define FILES_HARD 524288
#define THAW_AFTER_MS 200
#define PATIENCE_MS 8000

__attribute__((noreturn)) static void give_up(struct command *c, enum spawn_step step)
{
	c->failed_errno = errno;
	c->failed = step;
	_exit(step == SPAWN_EXEC && (errno == ENOENT || errno == ENOTDIR) ? 127 : 126);
}

static void execute(struct command *c)
{
	int worst = ENOENT;

	for (const char *const *path = c->paths; *path; path++) {
		execve(*path, (char *const *)c->argv, c->envp);
		if (errno == ENOEXEC) {
			const char **argv = c->argv - 1;

			argv[0] = "/bin/sh";
			argv[1] = *path;
			execve(argv[0], (char *const *)argv, c->envp);
		}
		/* As execvp: a later folder may have it; that it was found but not allowed is said if none has. */
		if (errno != ENOENT && errno != ENOTDIR)
			worst = errno;
		if (errno != ENOENT && errno != ENOTDIR && errno != EACCES)
			break;
	}
	errno = worst;
}

static void become(struct command *c)
{
	const struct user *u = c->user;

	if (!u)
		return;
	if (syscall(SYS_setgroups, (long)u->group_count, u->groups) < 0 || syscall(SYS_setresgid, u->gid, u->gid, u->gid) < 0 ||
	    syscall(SYS_setresuid, u->uid, u->uid, u->uid) < 0)
		give_up(c, SPAWN_USER);
}

__attribute__((noreturn)) static void child(struct command *c)
{
	struct rlimit files = { FILES_SOFT, FILES_HARD };
	struct sigaction plain = { .sa_handler = SIG_DFL };
	sigset_t none;

	if (c->sandbox >= 0 && setns(c->sandbox, CLONE_NEWNS | CLONE_NEWCGROUP) < 0)
		give_up(c, SPAWN_SANDBOX);
	if (dup2(c->input, 0) < 0 || dup2(c->output, 1) < 0 || dup2(c->error, 2) < 0)
		give_up(c, SPAWN_SETUP);
	if (c->script == SCRIPT_FD ? fcntl(SCRIPT_FD, F_SETFD, 0) < 0 : c->script >= 0 && dup2(c->script, SCRIPT_FD) < 0)
		give_up(c, SPAWN_SETUP);
	setsid();
	umask(022);
	if (c->sandbox >= 0)
		syscall(SYS_prlimit64, 0, RLIMIT_NOFILE, &files, NULL);
	become(c);
	if (chdir(c->cwd) < 0)
		give_up(c, SPAWN_CWD);
	sigaction(SIGPIPE, &plain, NULL);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	execute(c);
	give_up(c, SPAWN_EXEC);
}

/* clone3 with a stack for the child, which never returns: there is no wrapper for it in the C library. */
static long clone3_with_stack(struct clone_args *args, struct command *c)
{
	register long result __asm__("rax") = SYS_clone3;
	register void (*entry)(struct command *) __asm__("r12") = child;
	register struct command *arg __asm__("r13") = c;

	__asm__ volatile("syscall\n\t"
			 "test %%rax, %%rax\n\t"
			 "jnz 1f\n\t"
			 "xor %%ebp, %%ebp\n\t"
			 "mov %%r13, %%rdi\n\t"
			 "call *%%r12\n\t"
			 "hlt\n"
			 "1:"
			 : "+r"(result)
			 : "D"(args), "S"(sizeof(*args)), "r"(entry), "r"(arg)
			 : "rcx", "r11", "memory", "cc");
	return result;
}

/*
 * The write end closes as the child executes or ends. Not CLONE_VFORK: the agent would sleep for ever with a child whose
 * cgroup the guest has frozen. True if it executed or gave up by itself.
 */
static bool await_execution(const struct command *c, pid_t pid, int fd)
{
	struct pollfd p = { .fd = fd };

	if (poll(&p, 1, THAW_AFTER_MS) != 0)
		return true;
	cgroup_thaw(c->sandbox_cgroup);
	cgroup_thaw(c->cgroup);
	if (poll(&p, 1, PATIENCE_MS) != 0)
		return true;
	kill(pid, SIGKILL);
	/* Until it is gone it has our memory. */
	poll(&p, 1, -1);
	return false;
}

pid_t spawn(struct command *c, void *stack, struct err *e)
{
	struct clone_args args = {
		.flags = CLONE_VM | (c->cgroup >= 0 ? CLONE_INTO_CGROUP : 0),
		.exit_signal = SIGCHLD,
		.stack = (uint64_t)(uintptr_t)stack,
		.stack_size = SPAWN_STACK,
		.cgroup = c->cgroup >= 0 ? (uint64_t)c->cgroup : 0,
	};
	bool executed = true;
	sigset_t all, old;
	int executing[2];
	long r;

	/* Neither end is SCRIPT_FD, which the child replaces: the agent's loop is older. */
	if (pipe2(executing, O_CLOEXEC) < 0)
		return err_set(e, errno, "a pipe: %s", strerror(errno));
	c->failed = SPAWN_STARTED;
	/* No handler may run on the shared memory. */
	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, &old);
	r = clone3_with_stack(&args, c);
	close(executing[1]);
	if (r > 0)
		executed = await_execution(c, (pid_t)r, executing[0]);
	close(executing[0]);
	sigprocmask(SIG_SETMASK, &old, NULL);
	if (r < 0)
		return err_set(e, (int)-r, "cannot start a process: %s", strerror((int)-r));
	if (!executed)
		return err_set(e, ETIMEDOUT, "the process did not start within %d seconds: the guest has frozen it, or its folder hangs",
			       (THAW_AFTER_MS + PATIENCE_MS) / 1000);
	return (pid_t)r;
}

pid_t fork_with(uint64_t flags, int cgroup)
{
	struct clone_args args = {
		.flags = flags | (cgroup >= 0 ? CLONE_INTO_CGROUP : 0),
		.exit_signal = SIGCHLD,
		.cgroup = cgroup >= 0 ? (uint64_t)cgroup : 0,
	};
	long r = syscall(SYS_clone3, &args, sizeof(args));

	return r < 0 ? -errno : (pid_t)r;
}
