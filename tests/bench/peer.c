/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The peer: QEMU with KVM, restoring the state of the same kernel, initramfs and disk to the same first command. It is given
 * its best case: x-ignore-shared over a private mapping of the memory file (nothing is copied at load), vhost-vsock,
 * virtio-pmem with DAX, no devices it does not need, and a warm page cache.
 */
#include <linux/vm_sockets.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <vmenv/agent.h>

#include "bench.h"

#define CID 42
#define PORT 1024
#define PATIENCE_MS 120000.0

static int send_frame(int fd, uint32_t type, const char *text)
{
	struct agent_frame h = { .length = (uint32_t)strlen(text), .type = type };

	if (write(fd, &h, sizeof(h)) != sizeof(h) || write(fd, text, h.length) != (ssize_t)h.length)
		return -EIO;
	return 0;
}

static int read_exactly(int fd, void *to, size_t n)
{
	for (size_t at = 0; at < n;) {
		ssize_t r = read(fd, (char *)to + at, n - at);

		if (r <= 0)
			return -EIO;
		at += (size_t)r;
	}
	return 0;
}

/* Reads frames until one of `type`. */
static int await_frame(int fd, uint32_t type)
{
	char text[4096];

	for (;;) {
		struct agent_frame h;

		if (read_exactly(fd, &h, sizeof(h)) || h.length >= sizeof(text) || read_exactly(fd, text, h.length))
			return -EIO;
		text[h.length] = 0;
		if (h.type == type)
			return 0;
		if (h.type == AGENT_FAILED) {
			fprintf(stderr, "agent: %s\n", text);
			return -EIO;
		}
	}
}

static int agent_connect(double deadline)
{
	struct sockaddr_vm a = { .svm_family = AF_VSOCK, .svm_cid = CID, .svm_port = PORT };

	do {
		int fd = socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC, 0);

		if (fd < 0)
			return -errno;
		if (connect(fd, (struct sockaddr *)&a, sizeof(a)) == 0)
			return fd;
		close(fd);
		usleep(1000);
	} while (ms_now() < deadline);
	return -ETIMEDOUT;
}

static int first_command(double deadline)
{
	char setup[512], hex[129];
	AUTO_CLOSE int fd = -1, run = -1;

	for (int i = 0; i < 128; i++)
		hex[i] = "0123456789abcdef"[random() & 15];
	hex[128] = 0;
	snprintf(setup, sizeof(setup), "{\"unix_ns\": %llu, \"entropy\": \"%s\", \"hostname\": null, \"machine_id\": null}",
		 (unsigned long long)now_ns(CLOCK_REALTIME), hex);
	/* A stream that was opened before the guest took the transport reset is dropped: try again. */
	do {
		if (fd >= 0)
			close(fd);
		fd = agent_connect(deadline);
		if (fd < 0)
			return fd;
	} while ((send_frame(fd, AGENT_SETUP, setup) || await_frame(fd, AGENT_OK)) && ms_now() < deadline);
	run = agent_connect(deadline);
	if (run < 0)
		return run;
	if (send_frame(run, AGENT_RUN,
		       "{\"run\": 1, \"argv\": [\"/bin/true\"], \"script_bytes\": 0, \"stdin_bytes\": 0, \"cwd\": \"/\", \"user\": \"root\", "
		       "\"env\": {\"PATH\": \"/bin\"}, \"timeout_ms\": 60000, \"output_limit\": 65536}") ||
	    await_frame(run, AGENT_EXIT) || send_frame(run, AGENT_RELEASE, ""))
		return -EIO;
	return 0;
}

/* Capabilities that both sides want: memory that is a shared mapping of a file is not copied into the state. */
#define IGNORE_SHARED                                                                                                       \
	"{\"execute\": \"migrate-set-capabilities\", \"arguments\": {\"capabilities\": "                                       \
	"[{\"capability\": \"x-ignore-shared\", \"state\": true}]}}\n"

/* Runs QMP commands, one a line. -EAGAIN: the answers do not have `until` in them (NULL: any will do). */
static int qmp(const char *path, const char *commands, const char *until, double deadline)
{
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	AUTO_CLOSE int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	unsigned wanted = 1, got; /* the first return is that of qmp_capabilities */
	char text[16384];
	size_t at = 0;

	for (const char *c = commands; *c; c++)
		wanted += *c == '\n';
	snprintf(a.sun_path, sizeof(a.sun_path), "%s", path);
	while (connect(fd, (struct sockaddr *)&a, sizeof(a)) < 0) {
		if (ms_now() > deadline)
			return -ETIMEDOUT;
		usleep(1000);
	}
	dprintf(fd, "{\"execute\": \"qmp_capabilities\"}\n%s", commands);
	while (at < sizeof(text) - 1 && ms_now() < deadline) {
		ssize_t r = read(fd, text + at, sizeof(text) - 1 - at);

		if (r <= 0)
			return -EIO;
		at += (size_t)r;
		text[at] = 0;
		if (strstr(text, "\"error\"")) {
			fprintf(stderr, "bench: QEMU: %s\n", text);
			return -EINVAL;
		}
		got = 0;
		for (const char *c = text; (c = strstr(c, "\"return\"")); c++)
			got++;
		if (got >= wanted)
			return !until || strstr(text, until) ? 0 : -EAGAIN;
	}
	return -EIO;
}

static pid_t start_qemu(const struct peer_options *o, bool restore)
{
	char memory[512], disk[512], qmp_arg[256], mb[16], cid[64];
	const char *share = restore ? "off" : "on";
	struct stat st;
	pid_t pid;

	if (stat(o->disk, &st) < 0)
		return -1;
	snprintf(mb, sizeof(mb), "%u", o->memory_mb);
	snprintf(memory, sizeof(memory), "memory-backend-file,id=ram,mem-path=%s/ram,size=%uM,share=%s", o->work, o->memory_mb, share);
	snprintf(disk, sizeof(disk), "memory-backend-file,id=disk,mem-path=%s,size=%llu,share=%s", o->disk,
		 (unsigned long long)st.st_size, share);
	snprintf(qmp_arg, sizeof(qmp_arg), "unix:%s/qmp,server=on,wait=off", o->work);
	snprintf(cid, sizeof(cid), "vhost-vsock-pci,guest-cid=%d", CID);
	pid = fork();
	if (pid == 0) {
		const char *argv[64] = { o->qemu, "-M", "q35,memory-backend=ram,accel=kvm", "-cpu", "host", "-smp", "1", "-m", NULL, "-nodefaults",
					 "-no-user-config", "-display", "none", "-object", memory, "-object", disk, "-device",
					 "virtio-pmem-pci,memdev=disk", "-device", cid, "-device", "virtio-rng-pci", "-qmp", qmp_arg, "-kernel",
					 o->kernel, "-initrd", o->initrd, "-append", "console=ttyS0 quiet reboot=k panic=-1", "-serial", "null" };
		char limit[64];
		unsigned n = 0;
		int null = open("/dev/null", O_RDWR);

		snprintf(limit, sizeof(limit), "%s,maxmem=%lluM", mb, (unsigned long long)o->memory_mb + ((unsigned long long)st.st_size >> 20) + 1024);
		argv[8] = limit;
		while (argv[n])
			n++;
		if (restore) {
			argv[n++] = "-incoming";
			argv[n++] = "defer";
		}
		if (!getenv("BENCH_VERBOSE"))
			dup2(null, 2);
		execvp(o->qemu, (char *const *)argv);
		_exit(127);
	}
	return pid;
}

static void end_qemu(pid_t pid)
{
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
}

static double private_kb_of(pid_t pid)
{
	char path[64], line[256];
	AUTO_FILE FILE *f = NULL;
	double kb = 0, v;

	snprintf(path, sizeof(path), "/proc/%d/smaps_rollup", pid);
	f = fopen(path, "re");
	while (f && fgets(line, sizeof(line), f))
		if (sscanf(line, "Private_Clean: %lf", &v) == 1 || sscanf(line, "Private_Dirty: %lf", &v) == 1)
			kb += v;
	return kb;
}

int bench_qemu(const struct peer_options *o, struct samples *restore, double *private_kb)
{
	char path[256], save[1024], load[1024];
	double deadline = ms_now() + PATIENCE_MS;
	pid_t pid;
	int r;

	snprintf(path, sizeof(path), "%s/qmp", o->work);
	snprintf(save, sizeof(save), IGNORE_SHARED "{\"execute\": \"migrate\", \"arguments\": {\"uri\": \"exec:cat > %s/state\"}}\n", o->work);
	snprintf(load, sizeof(load), IGNORE_SHARED "{\"execute\": \"migrate-incoming\", \"arguments\": {\"uri\": \"exec:cat %s/state\"}}\n",
		 o->work);
	unlink(path);
	pid = start_qemu(o, false);
	if (pid < 0)
		return -errno;
	r = first_command(deadline); /* warm, as a bake does */
	if (r == 0)
		r = qmp(path, save, NULL, deadline);
	while (r == 0 || r == -EAGAIN) {
		r = qmp(path, "{\"execute\": \"query-migrate\"}\n", "\"completed\"", deadline);
		if (r == 0)
			break;
		usleep(20000);
	}
	end_qemu(pid);
	for (unsigned i = 0; r == 0 && i < o->rounds; i++) {
		double start = ms_now();

		unlink(path);
		pid = start_qemu(o, true);
		if (pid < 0)
			return -errno;
		r = qmp(path, load, NULL, start + 30000);
		if (r == 0)
			r = first_command(start + 30000);
		if (r == 0)
			samples_add(restore, ms_now() - start);
		*private_kb = private_kb_of(pid);
		end_qemu(pid);
	}
	return r;
}
