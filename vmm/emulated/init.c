/* SPDX-License-Identifier: Apache-2.0 */
/*
 * PID 1 of the emulated KVM host: loads KVM, mounts the data disk, keeps the clock, runs the filesystem server on a
 * virtio-serial port, and powers off when the server ends. Static, its initramfs is the whole system.
 *
 * It trusts its initramfs and whoever started it. The disk may be in any state a dying host left it in.
 */
#include <dirent.h>
#include <linux/kvm.h>
#include <linux/random.h>
#include <net/if.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/timex.h>
#include <sys/wait.h>
#include <vmenv/util.h>

#include "port.h"

#define CMDLINE_MAX 4096

struct init {
	char cmdline[CMDLINE_MAX];
	pid_t server;
	int clock_port; /* gets struct port_time from outside; -1 if there is none */
};

__attribute__((format(printf, 1, 2))) static void say(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	fputs("vmenv-host: ", stderr);
	vfprintf(stderr, fmt, ap);
	fputc('\n', stderr);
	va_end(ap);
}

static void put_text(const char *path, const char *text)
{
	AUTO_CLOSE int fd = open(path, O_WRONLY | O_CLOEXEC);

	if (fd < 0 || write(fd, text, strlen(text)) < 0)
		say("cannot write %s: %s", path, strerror(errno));
}

/* The value of the first word KEY=VALUE of the kernel command line, or NULL. */
static const char *cmdline_value(const struct init *i, const char *key, char *out, size_t size)
{
	size_t n = strlen(key);

	for (const char *s = i->cmdline; *s; s += strcspn(s, " \n"), s += strspn(s, " \n"))
		if (strncmp(s, key, n) == 0 && s[n] == '=') {
			snprintf(out, size, "%.*s", (int)strcspn(s + n + 1, " \n"), s + n + 1);
			return out;
		}
	return NULL;
}

static int mount_basics(void)
{
	static const struct {
		const char *type, *at, *options;
		unsigned long flags;
		bool vital;
	} mounts[] = {
		{ "proc", "/proc", NULL, MS_NOSUID | MS_NODEV | MS_NOEXEC, true },
		{ "sysfs", "/sys", NULL, MS_NOSUID | MS_NODEV | MS_NOEXEC, true },
		{ "devtmpfs", "/dev", NULL, MS_NOSUID, true },
		{ "devpts", "/dev/pts", "mode=0620,ptmxmode=0666", MS_NOSUID | MS_NOEXEC, false },
		{ "tmpfs", "/dev/shm", "mode=1777", MS_NOSUID | MS_NODEV, false },
		{ "tmpfs", "/tmp", "mode=1777", MS_NOSUID | MS_NODEV, false },
		{ "tmpfs", "/run", "mode=0755", MS_NOSUID | MS_NODEV, false },
		{ "cgroup2", "/sys/fs/cgroup", NULL, MS_NOSUID | MS_NODEV | MS_NOEXEC, false },
	};

	for (size_t n = 0; n < ARRAY_SIZE(mounts); n++) {
		mkdir(mounts[n].at, 0755);
		if (mount(mounts[n].type, mounts[n].at, mounts[n].type, mounts[n].flags, mounts[n].options) < 0 &&
		    errno != EBUSY) {
			say("cannot mount %s: %s", mounts[n].at, strerror(errno));
			if (mounts[n].vital)
				return -1;
		}
	}
	return 0;
}

/* A module's parameters from the kernel command line, its words MODULE.NAME=VALUE; a built-in modprobe would do the
 * same. */
static void module_parameters(const struct init *i, const char *file, char *out, size_t size)
{
	size_t name = strcspn(file, "."), n = 0;

	*out = 0;
	for (const char *s = i->cmdline; *s; s += strcspn(s, " \n"), s += strspn(s, " \n")) {
		bool same = true;

		for (size_t k = 0; k < name && same; k++)
			same = s[k] == file[k] || ((s[k] == '-' || s[k] == '_') && (file[k] == '-' || file[k] == '_'));
		if (same && s[name] == '.' && n < size)
			n += (size_t)snprintf(out + n, size - n, "%.*s ", (int)strcspn(s + name + 1, " \n"),
					      s + name + 1);
	}
}

/* In the order given, so dependencies come first; a line is "FILE [OPTION]...". A module that does not fit this
 * processor is passed over. */
static void load_modules(const struct init *i)
{
	AUTO_FILE FILE *order = fopen("/modules/order", "re");
	char line[512], path[600], parameters[1024];

	while (order && fgets(line, sizeof(line), order)) {
		line[strcspn(line, "\n")] = 0;
		if (!*line)
			continue;
		size_t name = strcspn(line, " ");
		int given = snprintf(parameters, sizeof(parameters), "%s ", line + name + strspn(line + name, " "));

		line[name] = 0;
		snprintf(path, sizeof(path), "/modules/%s", line);
		AUTO_CLOSE int fd = open(path, O_RDONLY | O_CLOEXEC);

		module_parameters(i, line, parameters + given, sizeof(parameters) - (size_t)given);
		if ((fd < 0 || syscall(SYS_finit_module, fd, parameters, 0) < 0) && errno != EEXIST &&
		    errno != EOPNOTSUPP)
			say("cannot load %s: %s", line, strerror(errno));
	}
}

static void raise_limits(void)
{
	struct rlimit files = { 1 << 20, 1 << 20 }, all = { RLIM_INFINITY, RLIM_INFINITY };

	put_text("/proc/sys/fs/nr_open", "1048576");
	setrlimit(RLIMIT_NOFILE, &files);
	setrlimit(RLIMIT_MEMLOCK, &all);
	setrlimit(RLIMIT_NPROC, &all);
	put_text("/proc/sys/kernel/pid_max", "4194304");
	put_text("/proc/sys/kernel/threads-max", "1000000");
	put_text("/proc/sys/vm/max_map_count", "1048576");
	/* Machines map far more than they touch. */
	put_text("/proc/sys/vm/overcommit_memory", "1");
	put_text("/proc/sys/kernel/panic_on_oops", "1");
	put_text("/proc/sys/kernel/hung_task_timeout_secs", "0");
	if (access("/sys/fs/cgroup/cgroup.subtree_control", W_OK) == 0)
		put_text("/sys/fs/cgroup/cgroup.subtree_control", "+memory +pids +cpu");
}

static void loopback_up(void)
{
	AUTO_CLOSE int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	struct ifreq request = { .ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING };

	if (s >= 0)
		ioctl(s, SIOCSIFFLAGS, &request);
}

/* The VM held open here keeps KVM switched on: its code is patched once now, not at every first and last machine. */
static int hold_vm(void)
{
	int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC), vm;

	if (kvm < 0)
		return -errno;
	vm = ioctl(kvm, KVM_CREATE_VM, 0);
	if (vm < 0)
		return -errno;
	return fcntl(vm, F_SETFD, FD_CLOEXEC);
}

static int run(const char *const argv[])
{
	pid_t pid = vfork();
	int status;

	if (pid == 0) {
		execv(argv[0], (char *const *)argv);
		_exit(127);
	}
	if (pid < 0 || waitpid(pid, &status, 0) < 0)
		return -1;
	return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* 1: ext4, 0: blank, -1: something else or unreadable. */
static int disk_kind(const char *device)
{
	AUTO_FREE unsigned char *head = calloc(1, 65536);
	AUTO_CLOSE int fd = open(device, O_RDONLY | O_CLOEXEC);

	if (!head || fd < 0 || pread(fd, head, 65536, 0) != 65536)
		return -1;
	if (head[1024 + 56] == 0x53 && head[1024 + 57] == 0xef)
		return 1;
	for (size_t n = 0; n < 65536; n++)
		if (head[n])
			return -1;
	return 0;
}

static bool wait_for(const char *path, unsigned ms)
{
	for (unsigned n = 0; access(path, F_OK) < 0; n += 5) {
		if (n >= ms)
			return false;
		usleep(5000);
	}
	return true;
}

static int mount_state(const char *device)
{
	static const char options[] = "discard,errors=remount-ro";
	int kind;

	mkdir("/state", 0700);
	if (!wait_for(device, 10000)) {
		say("there is no %s", device);
		return -1;
	}
	kind = disk_kind(device);
	if (kind < 0) {
		say("%s is not empty and holds no ext4 file system: not touched", device);
		return -1;
	}
	if (kind == 0) {
		/* Few inodes: it holds images, not trees. The journal's and the tables' zeros come from the blank disk. */
		const char *const mkfs[] = { "/sbin/mke2fs", "-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-i", "65536",
					     "-J", "size=64", "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard",
					     device, NULL };

		if (run(mkfs) != 0) {
			say("mke2fs of %s failed", device);
			return -1;
		}
	}
	if (mount(device, "/state", "ext4", MS_NOSUID | MS_NODEV | MS_NOATIME, options) == 0)
		return 0;
	say("cannot mount %s (%s): checking it", device, strerror(errno));
	const char *const fsck[] = { "/sbin/e2fsck", "-f", "-y", device, NULL };

	run(fsck);
	if (mount(device, "/state", "ext4", MS_NOSUID | MS_NODEV | MS_NOATIME, options) == 0)
		return 0;
	say("cannot mount %s: %s", device, strerror(errno));
	return -1;
}

/* Opens the virtio-serial port of that name, which takes a moment to appear. */
static int open_port(const char *name, unsigned ms)
{
	for (unsigned waited = 0; waited <= ms; waited += 5) {
		DIR *d = opendir("/sys/class/virtio-ports");
		struct dirent *entry;
		int found = -1;

		while (d && found < 0 && (entry = readdir(d))) {
			char path[400], text[64] = "";
			AUTO_FILE FILE *f = NULL;

			if (entry->d_name[0] == '.')
				continue;
			snprintf(path, sizeof(path), "/sys/class/virtio-ports/%s/name", entry->d_name);
			f = fopen(path, "re");
			if (!f || !fgets(text, sizeof(text), f))
				continue;
			text[strcspn(text, "\n")] = 0;
			snprintf(path, sizeof(path), "/dev/%s", entry->d_name);
			if (strcmp(text, name) == 0)
				found = open(path, O_RDWR | O_CLOEXEC);
		}
		if (d)
			closedir(d);
		if (found >= 0)
			return found;
		usleep(5000);
	}
	return -1;
}

/* Takes what the outside says the time is. A machine that was suspended, or emulated in fits and starts, falls behind.
 */
static void keep_clock(struct init *i)
{
	struct port_time message;
	ssize_t n = read(i->clock_port, &message, sizeof(message));
	int64_t off;

	if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
		close(i->clock_port);
		i->clock_port = -1;
	}
	if (n != sizeof(message) || message.magic != PORT_TIME_MAGIC)
		return;
	off = (int64_t)(message.realtime_ns - now_ns(CLOCK_REALTIME));
	if (off > 100000000 || off < -100000000) {
		struct timespec ts = { (time_t)(message.realtime_ns / 1000000000u),
				       (long)(message.realtime_ns % 1000000000u) };

		clock_settime(CLOCK_REALTIME, &ts);
	} else {
		struct timeval slew = { 0, (suseconds_t)(off / 1000) };

		if (slew.tv_usec < 0) {
			slew.tv_sec = -1;
			slew.tv_usec += 1000000;
		}
		adjtime(&slew, NULL);
	}
	if (message.entropy_bytes == sizeof(message.entropy)) {
		struct {
			int bits, bytes;
			unsigned char data[sizeof(message.entropy)];
		} pool = { 8 * (int)sizeof(message.entropy), (int)sizeof(message.entropy), { 0 } };
		AUTO_CLOSE int fd = open("/dev/urandom", O_RDWR | O_CLOEXEC);

		memcpy(pool.data, message.entropy, sizeof(message.entropy));
		ioctl(fd, RNDADDENTROPY, &pool);
		ioctl(fd, RNDRESEEDCRNG, 0);
	}
}

/* The server is vmenvfs, or /bin/server where the initramfs has one: that is how contributors run something else in
 * here. */
static pid_t start_server(int port)
{
	pid_t pid = fork();

	if (pid == 0) {
		static const char *const argv[] = { "/bin/server", NULL };
		static const char *const env[] = { "PATH=/bin:/sbin:/usr/bin:/usr/sbin", "HOME=/state",
						   "LC_ALL=C.UTF-8", NULL };
		sigset_t none;

		sigemptyset(&none);
		sigprocmask(SIG_SETMASK, &none, NULL);
		setsid();
		dup2(port, STDIN_FILENO);
		dup2(port, STDOUT_FILENO);
		if (access("/bin/server", X_OK) == 0)
			execve(argv[0], (char *const *)argv, (char *const *)env);
		else {
			static const char *const server[] = { "/bin/vmenvfs", "--stdio", "--accel=kvm", "--state", "/state",
							      "--kernel", "/boot/vmlinuz", "--initrd", "/boot/guest.img",
							      "--machine", "/bin/vmenv-machine", NULL };

			execve(server[0], (char *const *)server, (char *const *)env);
		}
		say("cannot start the server: %s", strerror(errno));
		_exit(127);
	}
	return pid;
}

/* Until the server has ended; reaps whatever else becomes an orphan. */
static void supervise(struct init *i)
{
	struct pollfd clock = { .events = POLLIN };
	int status;
	sigset_t before, child;

	sigemptyset(&child);
	sigaddset(&child, SIGCHLD);
	sigprocmask(SIG_BLOCK, &child, &before);
	for (;;) {
		pid_t pid;

		while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
			if (pid == i->server) {
				if (WIFSIGNALED(status))
					say("the server was killed by signal %d (%s)", WTERMSIG(status),
					    strsignal(WTERMSIG(status)));
				else if (WEXITSTATUS(status) != 0)
					say("the server ended with status %d", WEXITSTATUS(status));
				return;
			}
		clock.fd = i->clock_port;
		if (ppoll(&clock, 1, NULL, &before) > 0)
			keep_clock(i);
	}
}

static void on_child(int signal)
{
}

static void power_off(void)
{
	kill(-1, SIGTERM);
	for (unsigned n = 0; n < 100 && (waitpid(-1, NULL, WNOHANG) >= 0 || errno != ECHILD); n++)
		usleep(10000);
	kill(-1, SIGKILL);
	sync();
	if (umount2("/state", 0) < 0)
		mount(NULL, "/state", NULL, MS_REMOUNT | MS_RDONLY, NULL);
	reboot(RB_POWER_OFF);
	for (;;)
		pause();
}

int main(void)
{
	static struct init i; /* a page of command line */
	char text[64];
	int port, cmdline, held;

	i.clock_port = -1;
	signal(SIGCHLD, on_child);
	signal(SIGPIPE, SIG_IGN);
	umask(022);
	if (mount_basics() < 0)
		power_off();
	cmdline = open("/proc/cmdline", O_RDONLY | O_CLOEXEC);
	if (cmdline >= 0 && read(cmdline, i.cmdline, sizeof(i.cmdline) - 1) < 0)
		i.cmdline[0] = 0;
	raise_limits();
	load_modules(&i);
	loopback_up();
	held = hold_vm();
	if (held < 0) {
		say("KVM does not work here: %s", strerror(-held));
		power_off();
	}
	port = open_port(PORT_FUSE, 5000);
	if (port < 0) {
		say("there is no port called %s", PORT_FUSE);
		power_off();
	}
	i.clock_port = open_port(PORT_CLOCK, 50);
	if (i.clock_port >= 0) {
		struct pollfd first = { .fd = i.clock_port, .events = POLLIN };

		fcntl(i.clock_port, F_SETFL, O_NONBLOCK);
		if (write(i.clock_port, "?", 1) == 1 && poll(&first, 1, 2000) == 1)
			keep_clock(&i);
	}
	if (mount_state(cmdline_value(&i, "vmenv.disk", text, sizeof(text)) ? text : "/dev/vda") < 0)
		power_off();
	say("ready in %.1f s", (double)now_ns(CLOCK_BOOTTIME) / 1e9);
	i.server = start_server(port);
	close(port);
	if (i.server > 0)
		supervise(&i);
	power_off();
}
