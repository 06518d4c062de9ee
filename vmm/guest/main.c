/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vmenv-agent: runs commands for the filesystem server, as PID 1 of a guest over vsock, or (for tests and debugging) as an
 * ordinary process over a Unix socket.
 */
#include <getopt.h>
#include <linux/vm_sockets.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/reboot.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/sysinfo.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <jansson.h>

#include <vmenv/agent.h>
#include <vmenv/machine.h>
#include <vmenv/util.h>

#include "agent.h"
#include "boot.h"
#include "connection.h"
#include "run.h"
#include "child.h"

#define ACCEPTS_AT_ONCE 16
#define BUDGET_MIN (4u << 20)

struct options {
	const char *listen_unix, *disk, *cgroup_path;
	char cgroup_name[32];
};

void say(const char *fmt, ...)
{
	char text[600];
	va_list ap;
	int n;

	va_start(ap, fmt);
	n = vsnprintf(text, sizeof(text) - 1, fmt, ap);
	va_end(ap);
	dprintf(2, "vmenv-agent: %.*s\n", MAX(n, 0), text);
}

/* Where the PID namespace ended because somebody in it called reboot(2), that is meant for the machine. */
static void sandbox_lost(struct agent *a, int code, int status)
{
	struct err e = { 0 };

	if (a->guest && code == CLD_KILLED && (status == SIGINT || status == SIGHUP)) {
		sync();
		reboot(status == SIGINT ? RB_POWER_OFF : RB_AUTOBOOT);
	}
	say("the sandbox's init died of %s %d: starting another", code == CLD_EXITED ? "exit" : "signal", status);
	sandbox_close(&a->sandbox);
	runs_lost(a);
	if (sandbox_open(&a->sandbox, a->root, a->cgroups.parent, a->cgroups.init, &e) < 0)
		say("%s", e.text);
}

static void reap(struct agent *a)
{
	siginfo_t si = { 0 };

	while (waitid(P_ALL, 0, &si, WEXITED | WNOHANG) == 0 && si.si_pid) {
		pid_t pid = si.si_pid;

		/* An agent that is not PID 1 also gets the orphans of its runs; they are nobody's. */
		if (pid == a->sandbox.init)
			sandbox_lost(a, si.si_code, si.si_status);
		else
			run_reaped(a, pid, si.si_code, si.si_status);
		si.si_pid = 0;
	}
}

static void signalled(struct watch *w, uint32_t events)
{
	struct agent *a = w->arg;
	struct signalfd_siginfo si;
	bool child = false;

	while (read(w->fd, &si, sizeof(si)) == sizeof(si)) {
		if (si.ssi_signo == SIGCHLD)
			child = true;
		else if (!a->guest)
			loop_stop(a->loop);
	}
	if (child)
		reap(a);
}

static void acceptable(struct watch *w, uint32_t events)
{
	struct agent *a = w->arg;

	for (int i = 0; i < ACCEPTS_AT_ONCE; i++) {
		struct sockaddr_vm peer = { 0 };
		socklen_t size = sizeof(peer);
		int fd = accept4(w->fd, (struct sockaddr *)&peer, &size, SOCK_NONBLOCK | SOCK_CLOEXEC);

		if (fd < 0)
			return;
		/* The guest's own processes have no business here. */
		if (a->guest && peer.svm_cid != VMADDR_CID_HOST)
			close(fd);
		else
			connection_new(a, fd);
	}
}

static int listen_vsock(struct err *e)
{
	struct sockaddr_vm sa = { .svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_ANY, .svm_port = MACHINE_AGENT_PORT };
	AUTO_CLOSE int fd = socket(AF_VSOCK, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

	if (fd < 0 || bind(fd, (struct sockaddr *)&sa, sizeof(sa)) < 0 || listen(fd, 512) < 0)
		return err_set(e, errno, "vsock port %u: %s", MACHINE_AGENT_PORT, strerror(errno));
	return steal_fd(&fd);
}

static int listen_unix(const char *path, struct err *e)
{
	struct sockaddr_un sa = { .sun_family = AF_UNIX };
	AUTO_CLOSE int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

	if (strlen(path) >= sizeof(sa.sun_path))
		return err_set(e, ENAMETOOLONG, "%s: too long for a socket's path", path);
	strcpy(sa.sun_path, path);
	if (fd < 0 || bind(fd, (struct sockaddr *)&sa, sizeof(sa)) < 0 || listen(fd, 512) < 0)
		return err_set(e, errno, "%s: %s", path, strerror(errno));
	return steal_fd(&fd);
}

/* Children are learnt of by a descriptor, so that everything happens in the loop. */
static int watch_signals(struct agent *a, struct err *e)
{
	sigset_t set;
	int fd;

	signal(SIGPIPE, SIG_IGN);
	sigemptyset(&set);
	sigaddset(&set, SIGCHLD);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGHUP);
	sigprocmask(SIG_BLOCK, &set, NULL);
	fd = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
	a->signal_watch = (struct watch){ .fd = fd, .ready = signalled, .arg = a };
	if (fd < 0 || loop_add(a->loop, &a->signal_watch, EPOLLIN) < 0)
		return err_set(e, errno, "signalfd: %s", strerror(errno));
	return 0;
}

static int allocate(struct agent *a, struct err *e)
{
	struct sysinfo si;
	uint8_t *memory = mmap(NULL, 2 * SCRATCH_SIZE + SPAWN_STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	a->loop = loop_new();
	if (memory == MAP_FAILED || !a->loop || sysinfo(&si) < 0)
		return err_set(e, ENOMEM, "out of memory");
	a->input = memory;
	a->scratch = memory + SCRATCH_SIZE;
	a->stack = memory + 2 * SCRATCH_SIZE;
	a->budget.limit = MAX((uint64_t)si.totalram * si.mem_unit / 4, BUDGET_MIN);
	/* The server's JSON is no attack on a hash table; this saves reading random bytes for the seed. */
	json_object_seed(1);
	return 0;
}

static int open_cgroups(struct agent *a, struct options *o, struct err *e)
{
	static const char *const places[] = { BOOT_CGROUP, "/sys/fs/cgroup/unified" };
	int r = -ENOENT;

	strcpy(o->cgroup_name, "sandbox");
	if (!a->guest)
		snprintf(o->cgroup_name, sizeof(o->cgroup_name), "vmenv-agent.%d", getpid());
	for (size_t i = 0; i < (a->guest ? 1 : ARRAY_SIZE(places)) && r < 0; i++) {
		o->cgroup_path = places[i];
		r = cgroups_open(&a->cgroups, places[i], o->cgroup_name, e);
	}
	/* Outside of a guest it does without. */
	return a->guest ? r : 0;
}

static int start(struct agent *a, struct options *o, struct err *e)
{
	int r = a->guest ? boot(e) : 0;

	if (r == 0)
		r = allocate(a, e);
	if (r == 0)
		r = open_cgroups(a, o, e);
	if (r < 0)
		return r;
	a->root = a->guest ? BOOT_DISK : o->disk;
	a->disk = open(a->root ? a->root : "/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (a->disk < 0)
		return err_set(e, errno, "%s: %s", a->root, strerror(errno));
	if (a->root)
		r = sandbox_open(&a->sandbox, a->root, a->cgroups.parent, a->cgroups.init, e);
	if (r == 0)
		r = watch_signals(a, e);
	if (r < 0)
		return r;
	if (a->guest)
		cgroups_limit(&a->cgroups);
	cgroups_prepare(&a->cgroups, CGROUPS_SPARE);
	prctl(PR_SET_CHILD_SUBREAPER, 1);
	a->listener = a->guest ? listen_vsock(e) : listen_unix(o->listen_unix, e);
	if (a->listener < 0)
		return a->listener;
	a->listen_watch = (struct watch){ .fd = a->listener, .ready = acceptable, .arg = a };
	r = loop_add(a->loop, &a->listen_watch, EPOLLIN);
	return r < 0 ? err_set(e, -r, "epoll: %s", strerror(-r)) : 0;
}

static void stop(struct agent *a, const struct options *o)
{
	for (struct run *r = a->runs; r; r = r->next)
		run_signal(r, SIGKILL);
	sandbox_close(&a->sandbox);
	cgroups_close(&a->cgroups, o->cgroup_path, o->cgroup_name);
	unlink(o->listen_unix);
}

static const char usage[] =
	"usage: vmenv-agent --listen-unix PATH [--disk DIR]\n"
	"  --listen-unix PATH   serve on this Unix socket, as an ordinary process; the host's clock and name are left alone\n"
	"  --disk DIR           run commands in a sandbox with this root (needs root), else where the agent is\n"
	"As PID 1 (the initramfs's /init) it takes no options: it boots the guest and serves on vsock.\n";

static int parse(struct options *o, int argc, char **argv)
{
	static const struct option long_options[] = {
		{ "listen-unix", required_argument, NULL, 'u' },
		{ "disk", required_argument, NULL, 'd' },
		{ "help", no_argument, NULL, 'h' },
		{ NULL, 0, NULL, 0 },
	};
	int c;

	while ((c = getopt_long(argc, argv, "h", long_options, NULL)) != -1) {
		if (c == 'u')
			o->listen_unix = optarg;
		else if (c == 'd')
			o->disk = optarg;
		else {
			fputs(usage, c == 'h' ? stdout : stderr);
			return c == 'h' ? 0 : 2;
		}
	}
	if (o->listen_unix && optind == argc)
		return -1;
	fputs(usage, stderr);
	return 2;
}

static uint64_t milliseconds(void)
{
	return now_ns(CLOCK_BOOTTIME) / 1000000;
}

int main(int argc, char **argv)
{
	struct agent a = { .guest = getpid() == 1, .disk = -1, .listener = -1, .sandbox = { .init = -1, .pidfd = -1, .cgroup_ns = -1 } };
	struct options o = { 0 };
	struct err e = { 0 };
	int r = a.guest ? -1 : parse(&o, argc, argv);

	if (r >= 0)
		return r;
	r = start(&a, &o, &e);
	if (r < 0) {
		say("%s", e.text);
		if (a.guest)
			reboot(RB_POWER_OFF);
		return 1;
	}
	if (a.guest)
		say("ready in %llu ms", (unsigned long long)milliseconds());
	loop_run(a.loop);
	stop(&a, &o);
	return 0;
}
