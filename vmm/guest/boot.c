/* SPDX-License-Identifier: Apache-2.0 */
#include <limits.h>
#include <net/if.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <vmenv/util.h>

#include "agent.h"
#include "boot.h"

#define DISK_DEVICE "/dev/pmem0"
#define DISK_WAIT_MS 10000
#define FILES_LIMIT 65536
/*
 * The disk is memory that lives and dies, is frozen and forked with the guest's: flushes to it have no one to be safe from,
 * access times and lazy initialisation would only make pages private.
 */
#define DISK_OPTIONS "nobarrier,noinit_itable"

static int fail(struct err *e, const char *what)
{
	return err_set(e, errno, "%s: %s", what, strerror(errno));
}

static int mount_kernel(struct err *e)
{
	static const struct {
		const char *type, *path, *options;
	} all[] = {
		{ "devtmpfs", "/dev", "mode=755" },
		{ "proc", "/proc", NULL },
		{ "sysfs", "/sys", NULL },
		{ "cgroup2", BOOT_CGROUP, NULL },
	};

	for (size_t i = 0; i < ARRAY_SIZE(all); i++) {
		mkdir(all[i].path, 0755);
		if (mount(all[i].type, all[i].path, all[i].type, MS_NOSUID | MS_NOEXEC, all[i].options) < 0 && errno != EBUSY)
			return fail(e, all[i].path);
	}
	return 0;
}

/* The kernel gives PID 1 a console only if it found one early enough. */
static void open_console(void)
{
	int fd = open("/dev/console", O_RDWR | O_NOCTTY);

	if (fd < 0)
		fd = open("/dev/null", O_RDWR);
	while (fd >= 0 && fd < 3) {
		int next = dup(fd);

		if (next < 0 || next > 2)
			break;
		fd = next;
	}
	for (int i = 0; i < 3; i++)
		if (fd != i && fd >= 0)
			dup2(fd, i);
	if (fd > 2)
		close(fd);
}

static int load_module(const char *name, const char *options, struct err *e)
{
	char path[600];
	AUTO_CLOSE int fd = -1;

	snprintf(path, sizeof(path), "/modules/%s", name);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return fail(e, path);
	if (syscall(SYS_finit_module, fd, options, 0) < 0 && errno != EEXIST)
		return fail(e, path);
	unlink(path);
	return 0;
}

static int load_modules(struct err *e)
{
	AUTO_FILE FILE *order = fopen("/modules/order", "re");
	char line[512];

	while (order && fgets(line, sizeof(line), order)) {
		char *options = line + strcspn(line, " \n");
		int r;

		if (*options)
			*options++ = '\0';
		options[strcspn(options, "\n")] = '\0';
		r = load_module(line, options, e);
		if (r < 0)
			return r;
	}
	/* They are in the kernel now; the files would only take the guest's memory. */
	unlink("/modules/order");
	rmdir("/modules");
	return 0;
}

static int mount_disk(struct err *e)
{
	struct timespec ms = { .tv_nsec = 1000000 };
	int waited = 0;

	while (access(DISK_DEVICE, F_OK) < 0 && waited++ < DISK_WAIT_MS)
		nanosleep(&ms, NULL);
	mkdir(BOOT_DISK, 0755);
	if (mount(DISK_DEVICE, BOOT_DISK, "ext4", MS_NOATIME, "dax=always," DISK_OPTIONS) == 0)
		return 0;
	if (errno == ENOENT)
		return err_set(e, ENODEV, "there is no disk: %s did not appear in %d s", DISK_DEVICE, DISK_WAIT_MS / 1000);
	say("mounting the disk with DAX: %s; without it, then", strerror(errno));
	return mount(DISK_DEVICE, BOOT_DISK, "ext4", MS_NOATIME, DISK_OPTIONS) < 0 ? fail(e, "mounting the disk") : 0;
}

static void set_sysctls(void)
{
	static const struct {
		const char *path, *value;
	} all[] = {
		/* A machine that was frozen for a week is not hung. */
		{ "/proc/sys/kernel/hung_task_timeout_secs", "0" },
		{ "/proc/sys/kernel/soft_watchdog", "0" },
		/* Periodic work wakes idle clones and makes pages private. */
		{ "/proc/sys/vm/stat_interval", "120" },
		{ "/proc/sys/vm/dirty_writeback_centisecs", "6000" },
		{ "/proc/sys/net/ipv4/ping_group_range", "0 2147483647" },
	};

	for (size_t i = 0; i < ARRAY_SIZE(all); i++) {
		AUTO_CLOSE int fd = open(all[i].path, O_WRONLY | O_CLOEXEC);

		/* What a kernel does not have it does not need. */
		if (fd >= 0 && write(fd, all[i].value, strlen(all[i].value)) < 0)
			say("%s: %s", all[i].path, strerror(errno));
	}
}

static void loopback_up(void)
{
	AUTO_CLOSE int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	struct ifreq ifr = { .ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING };

	if (fd < 0 || ioctl(fd, SIOCSIFFLAGS, &ifr) < 0)
		say("loopback: %s", strerror(errno));
}

/* What the root file system says it is called. */
static void set_hostname(void)
{
	char name[HOST_NAME_MAX + 1] = "sandbox";
	AUTO_CLOSE int fd = open(BOOT_DISK "/etc/hostname", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	ssize_t n = fd < 0 ? -1 : read(fd, name, HOST_NAME_MAX);

	if (n > 0)
		name[n] = '\0';
	name[strcspn(name, " \t\r\n")] = '\0';
	if (!name[0])
		strcpy(name, "sandbox");
	if (sethostname(name, strlen(name)) < 0)
		say("hostname: %s", strerror(errno));
}

int boot(struct err *e)
{
	struct rlimit files = { FILES_LIMIT, FILES_LIMIT };
	int r;

	umask(022);
	r = mount_kernel(e);
	open_console();
	if (r == 0)
		r = load_modules(e);
	if (r == 0)
		r = mount_disk(e);
	if (r < 0)
		return r;
	/* Whoever gets out of the sandbox finds nothing here. */
	unlink("/init");
	set_sysctls();
	set_hostname();
	loopback_up();
	setrlimit(RLIMIT_NOFILE, &files);
	return 0;
}
