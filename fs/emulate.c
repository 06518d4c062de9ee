/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The emulated KVM host: QEMU emulating a processor with AMD SVM, a stock kernel, vmm/emulated/init.c, and in there
 * this same program serving the mount over a virtio-serial port. Everything durable is on its disk, emulated.img in the
 * state folder. One processor: QEMU's nested SVM is not sound with more.
 */
#include "emulate.h"

#include <linux/sockios.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include "../vmm/emulated/port.h"
#include "host.h"
#include "relay.h"

#define MEMORY_LEAST_MB 768u
#define MEMORY_WANTED_MB 2048u
#define MEMORY_MOST_MB 16384u
#define DISK_LEAST (8ull << 30)
#define DISK_MOST (256ull << 30)
#define DISK_STEP (1ull << 30)
#define CLOCK_SECONDS 5
#define END_WITHIN 20 /* seconds for the guest to power off */
#define LOCK_ENDING " ending"
#define LOG_KEPT (4 << 20)

/* What TCG would warn that it does not do is switched off. */
#define PROCESSOR                                                                                            \
	"EPYC,+svm,+npt,-rdseed,-sha-ni,-fxsr-opt,-misalignsse,-3dnowprefetch,-osvw,-topoext,-perfctr-core," \
	"-clzero,-xsaveerptr,-ibpb,-nrip-save,-xsavec,-xsaves"

/*
 * panic=-1 with -no-reboot: a kernel that panics ends QEMU. Watchdogs are off as the host's pauses would set them off.
 * nx_huge_pages takes KVM_CREATE_VM from 27 to 2 ms; with one processor, polling in KVM for a halted guest's wake-up
 * only delays it. That guests write to registers that KVM does not have is no news, and each line on the console takes
 * milliseconds.
 */
#define CMDLINE                                                                                              \
	"console=ttyS0 quiet panic=-1 mitigations=off audit=0 nowatchdog rcupdate.rcu_cpu_stall_suppress=1 " \
	"init_on_alloc=0 random.trust_cpu=on tsc=reliable kvm.nx_huge_pages=never kvm.halt_poll_ns=0 "       \
	"kvm.report_ignored_msrs=0"

struct emulation {
	const struct host_options *options;
	char *kernel, *initrd, *disk, *log, *cmdline;
	uint64_t memory_mb;
	int lock;  /* held on the state folder */
	int clock; /* to the guest's clock port */
	unsigned ticks;
};

/* A number of kB in /proc/meminfo, in MB. */
static uint64_t meminfo_mb(const char *key)
{
	AUTO_FILE FILE *f = fopen("/proc/meminfo", "re");
	char line[128];
	unsigned long long kb;

	while (f && fgets(line, sizeof(line), f))
		if (strncmp(line, key, strlen(key)) == 0 && sscanf(line + strlen(key), ": %llu", &kb) == 1)
			return kb / 1024;
	return 0;
}

uint64_t emulate_memory_mb(uint64_t *available)
{
	uint64_t mb = meminfo_mb("MemAvailable"), half = mb / 2;

	*available = mb;
	if (half < MEMORY_WANTED_MB)
		half = MIN(MEMORY_WANTED_MB, mb * 3 / 4);
	half = MIN(half, MEMORY_MOST_MB);
	return half < MEMORY_LEAST_MB ? 0 : half;
}

char *emulate_find_qemu(void)
{
	const char *path = getenv("PATH");
	char *found;

	for (const char *s = path ? path : "/usr/bin:/usr/local/bin"; *s; s += strcspn(s, ":"), s += *s == ':') {
		if (asprintf(&found, "%.*s/qemu-system-x86_64", (int)strcspn(s, ":"), s) < 0)
			return NULL;
		if (access(found, X_OK) == 0)
			return found;
		free(found);
	}
	return NULL;
}

/* In a -blockdev, -chardev or -device value a comma is doubled. */
static char *quote_commas(const char *text)
{
	char *out = malloc(2 * strlen(text) + 1), *o = out;

	if (!out)
		return NULL;
	for (; *text; text++) {
		*o++ = *text;
		if (*text == ',')
			*o++ = ',';
	}
	*o = 0;
	return out;
}

/* Sparse; made once, as large as the free space lets it grow. The file system is made from within. */
static int make_disk(const char *path, struct err *e)
{
	AUTO_CLOSE int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	struct statvfs v;
	struct stat st;
	uint64_t size;

	if (fd < 0 || fstat(fd, &st) < 0 || fstatvfs(fd, &v) < 0)
		return err_set(e, errno, "cannot make %s: %s", path, strerror(errno));
	if (st.st_size > 0)
		return 0;
	size = (uint64_t)v.f_bavail * v.f_frsize / 10 * 9;
	size = MIN(MAX(size, DISK_LEAST), DISK_MOST) / DISK_STEP * DISK_STEP;
	if (ftruncate(fd, (off_t)size) < 0)
		return err_set(e, errno, "cannot make %s of %llu GB: %s", path, (unsigned long long)(size >> 30),
			       strerror(errno));
	return 0;
}

static int make_folders(const char *path, struct err *e)
{
	AUTO_FREE char *copy = strdup(path);

	if (!copy)
		return err_set(e, ENOMEM, "out of memory");
	for (char *end = copy, was = '/'; was; *end = was) {
		end += strspn(end, "/");
		end += strcspn(end, "/");
		was = *end;
		*end = 0;
		if (mkdir(copy, 0700) < 0 && errno != EEXIST)
			return err_set(e, errno, "cannot make the state folder %s: %s", copy, strerror(errno));
	}
	return 0;
}

/* What the lock file says is for people, and for whoever waits: the process, and whether it is about to end. */
static int lock_write(struct emulation *m, const char *more)
{
	char text[64];
	int n = snprintf(text, sizeof(text), "%d%s\n", getpid(), more);

	return ftruncate(m->lock, 0) < 0 || pwrite(m->lock, text, (size_t)n, 0) < 0 ? -errno : 0;
}

/*
 * One emulated host for each state folder. The one before may just have been unmounted, and be saving what it has: that
 * is waited for.
 */
static int lock_state(struct emulation *m, const char *state, struct err *e)
{
	AUTO_FREE char *path = NULL;
	uint64_t start = now_ns(CLOCK_MONOTONIC);
	char text[64];
	int r;

	if (asprintf(&path, "%s/emulated.lock", state) < 0)
		return err_set(e, ENOMEM, "out of memory");
	m->lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (m->lock < 0)
		return err_set(e, errno, "cannot open %s: %s", path, strerror(errno));
	while (flock(m->lock, LOCK_EX | LOCK_NB) < 0) {
		int error = errno;
		ssize_t n = pread(m->lock, text, sizeof(text) - 1, 0);
		unsigned patience = 3;

		text[MAX(n, 0)] = 0;
		if (strstr(text, LOCK_ENDING))
			patience = END_WITHIN + 10;
		if (error != EWOULDBLOCK || now_ns(CLOCK_MONOTONIC) - start > patience * 1000000000ull)
			return err_set(e, EBUSY, "the state folder %s is in use by process %d", state, atoi(text));
		usleep(20000);
	}
	r = lock_write(m, "");
	return r < 0 ? err_set(e, -r, "cannot write %s: %s", path, strerror(-r)) : 0;
}

static void emulation_ending(struct backend *b)
{
	struct emulation *m = b->arg;

	if (lock_write(m, LOCK_ENDING) < 0)
		host_say(true, "cannot write the lock file of the state folder");
}

static void keep_log_small(const char *log)
{
	AUTO_FREE char *old = NULL;
	struct stat st;

	if (stat(log, &st) == 0 && st.st_size > LOG_KEPT && asprintf(&old, "%s.old", log) > 0)
		rename(log, old);
}

/* What QEMU is started with: see the top. */
static int qemu_start(struct emulation *m, int fuse, int clock, int log, struct upstream *u, struct err *e)
{
	AUTO_FREE char *qemu = emulate_find_qemu(), *disk = quote_commas(m->disk), *file = NULL, *fuse_port = NULL,
		       *clock_port = NULL;
	AUTO_CLOSE int null = open("/dev/null", O_RDWR | O_CLOEXEC);
	char memory[32];
	const int keep[] = { fuse, clock, -1 };

	if (!qemu)
		return err_set(e, ENOENT,
			       "there is no qemu-system-x86_64 to emulate a KVM host: apt-get install qemu-system-x86");
	snprintf(memory, sizeof(memory), "%llu", (unsigned long long)m->memory_mb);
	if (!disk || asprintf(&file, "driver=file,filename=%s,node-name=file,discard=unmap", disk) < 0 ||
	    asprintf(&fuse_port, "socket,id=fuse,fd=%d", fuse) < 0 ||
	    asprintf(&clock_port, "socket,id=clock,fd=%d", clock) < 0)
		return err_set(e, ENOMEM, "out of memory");

	const char *const argv[] = {
		qemu, "-name", "vmenv-host", "-no-user-config", "-nodefaults", "-display", "none", "-no-reboot",
		"-M", "q35,sata=off,usb=off,smbus=off,smm=off", "-accel", "tcg,thread=single,tb-size=512",
		"-cpu", PROCESSOR, "-smp", "1", "-m", memory,
		"-kernel", m->kernel, "-initrd", m->initrd, "-append", m->cmdline,
		"-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
		/* A full disk outside is an error inside, not a stopped machine. A flush inside is one outside. */
		"-blockdev", file, "-blockdev", "driver=raw,file=file,node-name=disk,discard=unmap",
		"-device", "virtio-blk-pci,drive=disk,werror=report,rerror=report",
		"-device", "virtio-serial-pci,id=ports,max_ports=3",
		"-chardev", fuse_port, "-device", "virtserialport,bus=ports.0,chardev=fuse,name=" PORT_FUSE,
		"-chardev", clock_port, "-device", "virtserialport,bus=ports.0,chardev=clock,name=" PORT_CLOCK,
		NULL,
	};

	u->group = true; /* Ctrl-C is ours, so that it can end in good order */
	return host_spawn(argv, null, log, log, keep, true, SIGKILL, &u->pid, e);
}

static int emulation_start(struct backend *b, struct upstream *u, struct err *e)
{
	struct emulation *m = b->arg;
	AUTO_CLOSE int log = open(m->log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
	AUTO_CLOSE int fuse = -1, fuse_out = -1, fuse_theirs = -1, clock = -1, clock_theirs = -1;
	int pair[2], r;

	if (log < 0)
		return err_set(e, errno, "cannot open %s: %s", m->log, strerror(errno));
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
		return err_set(e, errno, "cannot make a socket: %s", strerror(errno));
	fuse = pair[0];
	fuse_theirs = pair[1];
	fuse_out = fcntl(fuse, F_DUPFD_CLOEXEC, 0); /* each direction is watched by itself */
	if (fuse_out < 0 || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
		return err_set(e, errno, "cannot make a socket: %s", strerror(errno));
	clock = pair[0];
	clock_theirs = pair[1];
	if (fcntl(fuse, F_SETFL, O_NONBLOCK) < 0 || fcntl(clock, F_SETFL, O_NONBLOCK) < 0)
		return err_set(e, errno, "cannot set O_NONBLOCK: %s", strerror(errno));
	r = qemu_start(m, fuse_theirs, clock_theirs, log, u, e);
	if (r < 0)
		return r;
	u->in = steal_fd(&fuse);
	u->out = steal_fd(&fuse_out);
	if (m->clock >= 0)
		close(m->clock);
	m->clock = u->aside = steal_fd(&clock);
	m->ticks = 0;
	return 0;
}

static void send_time(struct emulation *m, bool with_entropy)
{
	struct port_time t = { .magic = PORT_TIME_MAGIC };

	if (with_entropy && getrandom(t.entropy, sizeof(t.entropy), GRND_NONBLOCK) == sizeof(t.entropy))
		t.entropy_bytes = sizeof(t.entropy);
	t.realtime_ns = now_ns(CLOCK_REALTIME);
	/* It goes whole or not at all: the buffer was empty. */
	if (send(m->clock, &t, sizeof(t), MSG_NOSIGNAL | MSG_DONTWAIT) < 0 && errno != EAGAIN && errno != EPIPE)
		host_say(true, "cannot send the time to the emulated host: %s", strerror(errno));
}

/* The guest asks for the time once, when it is there to hear it. */
static void emulation_asked(struct backend *b)
{
	struct emulation *m = b->arg;
	char bytes[64];

	if (read(m->clock, bytes, sizeof(bytes)) > 0)
		send_time(m, true);
}

static void emulation_tick(struct backend *b)
{
	struct emulation *m = b->arg;
	int unsent = 1;

	if (++m->ticks % CLOCK_SECONDS == 0 && ioctl(m->clock, SIOCOUTQ, &unsent) == 0 && unsent == 0)
		send_time(m, false);
}

/* The last line of the log. */
static void emulation_post_mortem(struct backend *b, char *text, size_t size)
{
	struct emulation *m = b->arg;
	AUTO_CLOSE int fd = open(m->log, O_RDONLY | O_CLOEXEC);
	char tail[2048];
	off_t end = fd < 0 ? 0 : lseek(fd, 0, SEEK_END);
	ssize_t n = end > 0 ? pread(fd, tail, sizeof(tail) - 1, MAX(end - (off_t)sizeof(tail) + 1, 0)) : 0;
	char *line;

	while (n > 0 && strchr("\r\n", tail[n - 1]))
		n--;
	tail[MAX(n, 0)] = 0;
	for (char *s = tail; *s; s++)
		if (*s == '\r')
			*s = '\n';
	line = strrchr(tail, '\n');
	line = line ? line + 1 : tail;
	if (*line)
		snprintf(text, size, "%s ends with: %.200s", m->log, line);
	else
		snprintf(text, size, "see %s", m->log);
}

/*
 * The emulated processor's TSC is this one's. The kernel in there would measure its frequency against an emulated
 * timer, and get it wrong by any factor on a busy machine; then everything that waits, waits wrongly. So it is told.
 */
static uint64_t tsc_khz(void)
{
	uint64_t tsc[2] = { 0 }, ns[2] = { 0 };

	for (int end = 0; end < 2; end++) {
		uint64_t best = UINT64_MAX;

		if (end)
			usleep(20000);
		/* The reading least disturbed. */
		for (int n = 0; n < 20; n++) {
			uint64_t before = now_ns(CLOCK_MONOTONIC), t = __builtin_ia32_rdtsc(),
				 took = now_ns(CLOCK_MONOTONIC) - before;

			if (took < best) {
				best = took;
				tsc[end] = t;
				ns[end] = before + took / 2;
			}
		}
	}
	return (tsc[1] - tsc[0]) * 1000000 / (ns[1] - ns[0]);
}

static int prepare(struct emulation *m, struct err *e)
{
	const struct host_options *o = m->options;
	AUTO_FREE char *state = NULL;
	uint64_t available;
	int r;

	umask(077); /* ours would be files that we cannot open again, if it were 0777 */
	r = make_folders(o->state, e);
	if (r < 0)
		return r;
	state = realpath(o->state, NULL);
	if (!state)
		return err_set(e, errno, "cannot use the state folder %s: %s", o->state, strerror(errno));
	m->kernel = o->kernel ? realpath(o->kernel, NULL) : host_file(HOST_KERNEL);
	m->initrd = host_file(HOST_EMULATED_INITRD);
	if (!m->kernel || access(m->kernel, R_OK) < 0)
		return err_set(e, ENOENT, "there is no kernel for the emulated host%s%s", o->kernel ? ": " : "",
			       o->kernel ? o->kernel : "");
	if (!m->initrd)
		return err_set(e, ENOENT, "there is no host-initramfs.cpio for the emulated host beside vmenvfs");
	m->memory_mb = o->emulated_memory_mb ? o->emulated_memory_mb : emulate_memory_mb(&available);
	if (!m->memory_mb)
		return err_set(e, ENOMEM, "%llu MB of free memory are too few for an emulated host",
			       (unsigned long long)available);
	r = lock_state(m, state, e);
	if (r < 0)
		return r;
	if (asprintf(&m->disk, "%s/emulated.img", state) < 0 || asprintf(&m->log, "%s/emulated.log", state) < 0 ||
	    asprintf(&m->cmdline, CMDLINE " tsc_early_khz=%llu", (unsigned long long)tsc_khz()) < 0)
		return err_set(e, ENOMEM, "out of memory");
	keep_log_small(m->log);
	return make_disk(m->disk, e);
}

int emulate_run(const struct host_options *o, struct err *e)
{
	struct emulation m = { .options = o, .lock = -1, .clock = -1 };
	struct backend b = {
		.what = "the emulated host",
		.start = emulation_start,
		.tick = emulation_tick,
		.aside = emulation_asked,
		.ending = emulation_ending,
		.post_mortem = emulation_post_mortem,
		.restarts = 3,
		.answer_within = 180,
		.silent_after = 30,
		.end_within = END_WITHIN,
		.progress = true,
		.arg = &m,
	};
	int r = prepare(&m, e);

	if (r == 0)
		r = relay_run(o, &b, e);
	if (m.clock >= 0)
		close(m.clock);
	if (m.lock >= 0)
		close(m.lock);
	free(m.kernel);
	free(m.initrd);
	free(m.disk);
	free(m.log);
	free(m.cmdline);
	return r;
}
