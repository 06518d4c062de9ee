/* SPDX-License-Identifier: Apache-2.0 */
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>

#include <vmenv/util.h>

#include "sandbox.h"
#include "cgroups.h"
#include "child.h"

struct mount_point {
	const char *type, *path, *options;
	unsigned long flags;
	bool needed;
	bool read_only; /* by a second step, so that only this view of the file system is */
};

static const struct mount_point mounts[] = {
	{ "proc", "/proc", NULL, MS_NOSUID | MS_NODEV | MS_NOEXEC, true, false },
	{ "sysfs", "/sys", NULL, MS_NOSUID | MS_NODEV | MS_NOEXEC, true, true },
	{ "cgroup2", "/sys/fs/cgroup", NULL, MS_NOSUID | MS_NODEV | MS_NOEXEC, false, true },
	{ "tmpfs", "/dev", "mode=755,size=1m", MS_NOSUID | MS_NOATIME, true, false },
	{ "devpts", "/dev/pts", "newinstance,ptmxmode=0666,mode=620,gid=5", MS_NOSUID | MS_NOEXEC, true, false },
	{ "tmpfs", "/dev/shm", "mode=1777", MS_NOSUID | MS_NODEV, true, false },
};

static const struct {
	const char *path;
	unsigned int major, minor;
} devices[] = {
	{ "/dev/null", 1, 3 }, { "/dev/zero", 1, 5 },    { "/dev/full", 1, 7 },
	{ "/dev/random", 1, 8 }, { "/dev/urandom", 1, 9 }, { "/dev/tty", 5, 0 },
};

static const struct {
	const char *target, *path;
} links[] = {
	{ "pts/ptmx", "/dev/ptmx" },
	{ "/proc/self/fd", "/dev/fd" },
	{ "/proc/self/fd/0", "/dev/stdin" },
	{ "/proc/self/fd/1", "/dev/stdout" },
	{ "/proc/self/fd/2", "/dev/stderr" },
};

static int fail(struct err *e, const char *what)
{
	return err_set(e, errno, "%s: %s", what, strerror(errno));
}

/* The disk becomes the root. What the guest may have made of /proc, say a symlink, is not followed: that is refused. */
static int enter_root(const char *root, struct err *e)
{
	static const char *const own[] = { "/sys/fs/cgroup", "/sys", "/proc", "/dev" };

	if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
		return fail(e, "making mounts private");
	if (strcmp(root, "/") == 0)
		return err_set(e, EINVAL, "the sandbox's root cannot be /");
	if (chdir(root) < 0)
		return fail(e, root);
	if (mount(root, root, NULL, MS_BIND, NULL) == 0 && chdir(root) == 0 && syscall(SYS_pivot_root, ".", ".") == 0)
		return umount2(".", MNT_DETACH) < 0 || chdir("/") < 0 ? fail(e, "leaving the old root") : 0;
	/* The initramfs is a root that pivot_root cannot leave: cover it. */
	for (size_t i = 0; i < ARRAY_SIZE(own); i++)
		umount2(own[i], MNT_DETACH);
	if (chdir(root) < 0 || mount(".", "/", NULL, MS_MOVE, NULL) < 0 || chroot(".") < 0 || chdir("/") < 0)
		return fail(e, "making the disk the root");
	return 0;
}

static int directory(const char *path, struct err *e)
{
	struct stat st;

	if (mkdir(path, 0755) == 0)
		return 0;
	if (errno != EEXIST || lstat(path, &st) < 0)
		return fail(e, path);
	return S_ISDIR(st.st_mode) ? 0 : err_set(e, ENOTDIR, "the disk's %s is not a directory", path);
}

static int mount_all(struct err *e)
{
	for (size_t i = 0; i < ARRAY_SIZE(mounts); i++) {
		const struct mount_point *m = &mounts[i];

		if (m->needed && directory(m->path, e) < 0)
			return -e->code;
		if (mount(m->type, m->path, m->type, m->flags, m->options) < 0) {
			if (m->needed)
				return fail(e, m->path);
			continue;
		}
		if (m->read_only && mount(NULL, m->path, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | m->flags, NULL) < 0)
			return fail(e, m->path);
	}
	return 0;
}

static int make_devices(struct err *e)
{
	for (size_t i = 0; i < ARRAY_SIZE(devices); i++)
		if (mknod(devices[i].path, S_IFCHR | 0666, makedev(devices[i].major, devices[i].minor)) < 0)
			return fail(e, devices[i].path);
	for (size_t i = 0; i < ARRAY_SIZE(links); i++)
		if (symlink(links[i].target, links[i].path) < 0)
			return fail(e, links[i].path);
	return 0;
}

static int prepare(const char *root, int cgroup_ns, struct err *e)
{
	AUTO_CLOSE int oom = -1;
	int r;

	/* The view of cgroups begins at the one we are in. */
	if (cgroup_ns >= 0 ? setns(cgroup_ns, CLONE_NEWCGROUP) < 0 : unshare(CLONE_NEWCGROUP) < 0)
		return fail(e, "a cgroup namespace");
	umask(0);
	r = enter_root(root, e);
	if (r == 0)
		r = mount_all(e);
	if (r == 0)
		r = make_devices(e);
	if (r < 0)
		return r;
	umask(022);
	/* With it would go every run. Outside of a guest this may not be allowed, and matters less. */
	oom = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
	if (oom < 0 || (write(oom, "-1000", 5) < 0 && errno != EACCES))
		return fail(e, "/proc/self/oom_score_adj");
	return 0;
}

/* What the usual tools send to PID 1. In a PID namespace, reboot(2) ends its init with a signal that says which it was. */
static void power(int signal)
{
	if (signal == SIGUSR1 || signal == SIGUSR2 || signal == SIGPWR)
		reboot(RB_POWER_OFF);
	if (signal == SIGTERM || signal == SIGINT)
		reboot(RB_AUTOBOOT);
}

__attribute__((noreturn)) static void init_main(const char *root, int cgroup_ns, int report)
{
	struct err e = { 0 };
	sigset_t all;
	int null;

	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, NULL);
	if (prepare(root, cgroup_ns, &e) < 0) {
		if (write(report, &e, sizeof(e)) < 0)
			_exit(2);
		_exit(1);
	}
	prctl(PR_SET_NAME, "init");
	setsid();
	null = open("/dev/null", O_RDWR);
	for (int i = 0; i < 3; i++)
		dup2(null, i);
	if (write(report, &e, sizeof(e)) < 0)
		_exit(2);
	syscall(SYS_close_range, 3u, ~0u, 0u);
	for (;;) {
		int signal;

		while (waitpid(-1, NULL, WNOHANG) > 0)
			;
		signal = sigwaitinfo(&all, NULL);
		if (signal > 0 && signal != SIGCHLD)
			power(signal);
	}
}

/* Once init has made its namespaces. */
static int adopt(struct sandbox *s, pid_t pid, int init_cgroup, struct err *e)
{
	AUTO_CLOSE int pidfd = (int)syscall(SYS_pidfd_open, pid, 0u), procs = -1;
	char text[40];

	if (pidfd < 0 || setns(pidfd, CLONE_NEWPID) < 0)
		return fail(e, "entering the sandbox's PID namespace");
	if (s->cgroup_ns < 0 && init_cgroup >= 0) {
		snprintf(text, sizeof(text), "/proc/%d/ns/cgroup", pid);
		s->cgroup_ns = open(text, O_RDONLY | O_CLOEXEC);
		procs = openat(init_cgroup, "cgroup.procs", O_WRONLY | O_CLOEXEC);
		snprintf(text, sizeof(text), "%d", pid);
		if (s->cgroup_ns < 0 || procs < 0 || write(procs, text, strlen(text)) < 0)
			return fail(e, "the cgroup of the sandbox's init");
	}
	s->init = pid;
	s->pidfd = steal_fd(&pidfd);
	return 0;
}

int sandbox_open(struct sandbox *s, const char *root, int cgroup, int init_cgroup, struct err *e)
{
	AUTO_CLOSE int self = open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC);
	struct err said = { 0 };
	int report[2], r;
	pid_t pid;
	ssize_t n;

	if (self < 0 || setns(self, CLONE_NEWPID) < 0)
		return fail(e, "/proc/self/ns/pid");
	if (pipe2(report, O_CLOEXEC) < 0)
		return fail(e, "pipe");
	cgroup_thaw(cgroup);
	cgroup_thaw(init_cgroup);
	pid = fork_with(CLONE_NEWPID | CLONE_NEWNS, s->cgroup_ns < 0 ? cgroup : init_cgroup);
	if (pid == 0)
		init_main(root, s->cgroup_ns, report[1]);
	close(report[1]);
	if (pid < 0) {
		close(report[0]);
		return err_set(e, -pid, "the sandbox's namespaces: %s", strerror(-pid));
	}
	n = read(report[0], &said, sizeof(said));
	close(report[0]);
	r = n == sizeof(said) && !said.code ? adopt(s, pid, init_cgroup, e) :
					      err_set(e, said.code ? said.code : EIO, "the sandbox: %s",
						      said.code ? said.text : "its init died");
	if (r < 0) {
		kill(pid, SIGKILL);
		waitpid(pid, NULL, 0);
	}
	return r;
}

/* One that is ending has let go of its memory, and so of its program, before its PID namespace takes no more processes. */
bool sandbox_ending(const struct sandbox *s)
{
	char path[40], program[8];

	if (s->init <= 0)
		return false;
	snprintf(path, sizeof(path), "/proc/%d/exe", s->init);
	return readlink(path, program, sizeof(program)) < 0 && (errno == ENOENT || errno == ESRCH);
}

void sandbox_close(struct sandbox *s)
{
	if (s->init > 0)
		kill(s->init, SIGKILL);
	if (s->pidfd >= 0)
		close(s->pidfd);
	s->init = -1;
	s->pidfd = -1;
}
