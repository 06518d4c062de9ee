/* SPDX-License-Identifier: Apache-2.0 */
/* --check: what this host has and lacks, and what to do about it. */
#include <errno.h>
#include <libkmod.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>

#include "emulate.h"
#include "host.h"

#define DISK_WANTED_GB 4
#define MEMORY_WANTED_MB 2048

__attribute__((format(printf, 4, 5))) static void found(struct finding *f, enum finding_level level, const char *remedy,
							const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(f->text, sizeof(f->text), fmt, ap);
	va_end(ap);
	snprintf(f->remedy, sizeof(f->remedy), "%s", remedy);
	f->level = level;
}

/* The first line of a file, without its newline; empty if it cannot be read. */
static void read_line(const char *path, char *text, int size)
{
	AUTO_FILE FILE *f = fopen(path, "re");

	if (!f || !fgets(text, size, f))
		*text = 0;
	text[strcspn(text, "\n")] = 0;
}

static void check_modules(struct finding *f)
{
	static const char *const names[] = { "kvm_amd", "kvm_intel" };
	struct kmod_ctx *ctx = kmod_new(NULL, NULL);
	struct utsname u;
	char text[200] = "";

	uname(&u);
	for (size_t n = 0; ctx && n < ARRAY_SIZE(names); n++) {
		struct kmod_module *module = NULL;
		const char *state = "not there";

		if (kmod_module_new_from_name(ctx, names[n], &module) == 0) {
			int s = kmod_module_get_initstate(module);

			if (s == KMOD_MODULE_LIVE)
				state = "loaded";
			else if (s == KMOD_MODULE_BUILTIN)
				state = "built in";
			else if (kmod_module_get_path(module))
				state = "not loaded";
		}
		snprintf(text + strlen(text), sizeof(text) - strlen(text), "%s%s %s", n ? ", " : "", names[n], state);
		kmod_module_unref(module);
	}
	kmod_unref(ctx);
	found(f, FINDING_OK, "", "%s (kernel %s)", text, u.release);
}

static void check_nx(struct finding *f)
{
	char text[32];

	read_line("/sys/module/kvm/parameters/nx_huge_pages", text, sizeof(text));
	if (!*text)
		found(f, FINDING_OK, "", "kvm.nx_huge_pages is not there");
	else if (strcmp(text, "never") == 0)
		found(f, FINDING_OK, "", "kvm.nx_huge_pages=never");
	else
		found(f, FINDING_WARN,
		      "to make machines some 20 ms faster, where the processor is not vulnerable to iTLB multihit: "
		      "options kvm nx_huge_pages=never in /etc/modprobe.d",
		      "kvm.nx_huge_pages=%s: each new machine attaches a kernel thread", text);
}

static void check_qemu(struct finding *f)
{
	AUTO_FREE char *qemu = emulate_find_qemu();

	if (qemu)
		found(f, FINDING_OK, "", "%s can emulate a KVM host, with AMD SVM", qemu);
	else
		found(f, FINDING_MISSING, "apt-get install qemu-system-x86",
		      "no qemu-system-x86_64 to emulate a KVM host with");
}

static void check_fuse(struct finding *f)
{
	AUTO_CLOSE int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);
	bool helper = access("/usr/bin/fusermount3", X_OK) == 0 || access("/bin/fusermount3", X_OK) == 0;

	if (fd < 0)
		found(f, FINDING_MISSING,
		      errno == ENOENT ? "as root: modprobe fuse; in a container: give it /dev/fuse" : "run as root",
		      "cannot open /dev/fuse: %s", strerror(errno));
	else if (!helper && geteuid() != 0)
		found(f, FINDING_MISSING, "apt-get install fuse3",
		      "/dev/fuse, but no fusermount3 for users that are not root");
	else
		found(f, FINDING_OK, "", "/dev/fuse%s",
		      helper ? ", fusermount3" : "; no fusermount3, but this is root");
}

static void check_cgroup(struct finding *f)
{
	struct statfs s;
	char group[512] = "", path[600], controllers[200];
	AUTO_FILE FILE *file = fopen("/proc/self/cgroup", "re");
	char line[512];

	if (statfs("/sys/fs/cgroup", &s) < 0 || s.f_type != CGROUP2_SUPER_MAGIC) {
		found(f, FINDING_WARN,
		      "boot with systemd.unified_cgroup_hierarchy=1, or mount -t cgroup2 cgroup2 /sys/fs/cgroup",
		      "no cgroup v2 on /sys/fs/cgroup: machines get no memory and process limits of their own");
		return;
	}
	while (file && fgets(line, sizeof(line), file))
		if (strncmp(line, "0::", 3) == 0) {
			line[strcspn(line, "\n")] = 0;
			snprintf(group, sizeof(group), "%s", line + 3);
		}
	snprintf(path, sizeof(path), "/sys/fs/cgroup%s/cgroup.controllers", group);
	read_line(path, controllers, sizeof(controllers));
	snprintf(path, sizeof(path), "/sys/fs/cgroup%s/cgroup.procs", group);
	if (access(path, W_OK) < 0)
		found(f, FINDING_WARN, "systemd-run --user --scope -p Delegate=yes vmenvfs ...",
		      "cgroup v2, but %s is not ours to divide", group);
	else if (!strstr(controllers, "memory") || !strstr(controllers, "pids"))
		found(f, FINDING_WARN, "delegate the memory and pids controllers to it",
		      "cgroup v2, but %s has only: %s", group, *controllers ? controllers : "no controllers");
	else
		found(f, FINDING_OK, "", "cgroup v2, %s has %s", group, controllers);
}

static void check_memory(struct finding *f, bool kvm)
{
	uint64_t available, emulated = emulate_memory_mb(&available);

	if (!emulated)
		found(f, FINDING_MISSING, "free some memory", "%llu MB available", (unsigned long long)available);
	else if (available < MEMORY_WANTED_MB)
		found(f, FINDING_WARN, "more is better: every machine takes what it writes to", "%llu MB available",
		      (unsigned long long)available);
	else if (kvm)
		found(f, FINDING_OK, "", "%llu MB available", (unsigned long long)available);
	else
		found(f, FINDING_OK, "", "%llu MB available, of which the emulated host gets %llu",
		      (unsigned long long)available, (unsigned long long)emulated);
}

/* The state folder, or the nearest folder above it that is there. */
static void check_disk(struct finding *f, const char *state)
{
	AUTO_FREE char *path = strdup(state);
	struct statvfs v;
	unsigned long long gb;
	char *slash;

	while (path && statvfs(path, &v) < 0) {
		slash = strrchr(path, '/');
		if (errno != ENOENT || !slash) {
			found(f, FINDING_MISSING, "choose another by --state DIR", "cannot use %s: %s", state,
			      strerror(errno));
			return;
		}
		slash[slash == path] = 0;
		if (slash == path && strlen(path) == 1 && statvfs(path, &v) < 0)
			break;
	}
	if (!path)
		return;
	gb = (unsigned long long)v.f_bavail * v.f_frsize >> 30;
	if (access(path, W_OK) < 0)
		found(f, FINDING_MISSING, "choose another by --state DIR, or run as root",
		      "the state folder %s cannot be written", state);
	else if (gb < DISK_WANTED_GB)
		found(f, FINDING_WARN,
		      "a template takes its memory and disk size at most; choose another by --state DIR",
		      "%llu GB free for the state folder %s", gb, state);
	else
		found(f, FINDING_OK, "", "%llu GB free for the state folder %s", gb, state);
}

static void check_files(struct finding *f, const struct host_options *o)
{
	AUTO_FREE char *kernel = o->kernel ? realpath(o->kernel, NULL) : host_file(HOST_KERNEL);
	AUTO_FREE char *guest = host_file(HOST_GUEST_INITRD), *host = host_file(HOST_EMULATED_INITRD),
		       *machine = host_file(HOST_MACHINE);
	char lacking[200] = "";
	const struct {
		const char *path, *name;
	} files[] = { { kernel, "a kernel" },
		      { guest, "the guest initramfs" },
		      { host, "the emulated host's initramfs" },
		      { machine, "vmenv-machine" } };

	for (size_t n = 0; n < ARRAY_SIZE(files); n++)
		if (!files[n].path || access(files[n].path, R_OK) < 0)
			snprintf(lacking + strlen(lacking), sizeof(lacking) - strlen(lacking), "%s%s",
				 *lacking ? ", " : "", files[n].name);
	if (*lacking)
		found(f, FINDING_MISSING, "build all of it (ninja -C BUILD), or install it (meson install -C BUILD)",
		      "not found: %s", lacking);
	else
		found(f, FINDING_OK, "", "kernel %s, initramfs, vmenv-machine", kernel);
}

static void check_limits(struct finding *f)
{
	char files[32], maps[32];

	read_line("/proc/sys/fs/nr_open", files, sizeof(files));
	read_line("/proc/sys/vm/max_map_count", maps, sizeof(maps));
	if (strtoull(maps, NULL, 10) < 65530)
		found(f, FINDING_WARN, "sysctl vm.max_map_count=1048576", "vm.max_map_count=%s is little", maps);
	else
		found(f, FINDING_OK, "", "fs.nr_open=%s, vm.max_map_count=%s", files, maps);
}

/* Text in columns of `width`, broken at blanks, the later lines indented. */
static void print_wrapped(FILE *out, const char *text, int indent, int width)
{
	while (strlen(text) > (size_t)width) {
		int n = width;

		while (n > 0 && text[n] != ' ')
			n--;
		if (n == 0)
			n = (int)strcspn(text, " ");
		fprintf(out, "%.*s\n%*s", n, text, indent, "");
		text += n;
		text += strspn(text, " ");
	}
	fprintf(out, "%s\n", text);
}

int check_run(const struct host_options *o, FILE *out)
{
	static const char *const levels[] = {
		[FINDING_OK] = "ok", [FINDING_WARN] = "warn", [FINDING_MISSING] = "missing"
	};
	enum { KVM, MODULES, NX, QEMU, FUSE, FILES, MEMORY, DISK, CGROUP, LIMITS, COUNT };
	static const char *const names[] = { "kvm",   "kvm modules", "kvm speed", "emulation", "fuse",
					     "files", "memory",	     "disk",	  "cgroups",   "limits" };
	struct finding f[COUNT] = { 0 };
	bool kvm, can;

	kvm = accel_probe(&f[KVM], NULL) == 0;
	check_modules(&f[MODULES]);
	if (kvm)
		check_nx(&f[NX]);
	else
		found(&f[NX], FINDING_OK, "", "kvm.nx_huge_pages does not matter here");
	check_qemu(&f[QEMU]);
	check_fuse(&f[FUSE]);
	check_files(&f[FILES], o);
	check_memory(&f[MEMORY], kvm);
	check_disk(&f[DISK], o->state);
	check_cgroup(&f[CGROUP]);
	check_limits(&f[LIMITS]);
	/* Only one of the two is needed. */
	if (f[QEMU].level == FINDING_OK && !kvm)
		f[KVM].level = FINDING_WARN;
	if (kvm && f[QEMU].level == FINDING_MISSING)
		f[QEMU].level = FINDING_WARN;
	can = true;
	for (unsigned n = 0; n < COUNT; n++) {
		can = can && f[n].level != FINDING_MISSING;
		fprintf(out, "%-8s %-12s ", levels[f[n].level], names[n]);
		print_wrapped(out, f[n].text, 22, 96);
		if (*f[n].remedy) {
			fprintf(out, "%22s-> ", "");
			print_wrapped(out, f[n].remedy, 25, 93);
		}
	}
	if (!can)
		fprintf(out, "\nvmenvfs cannot run here: see what is missing above.\n");
	else if (kvm)
		fprintf(out, "\nvmenvfs can run here, with KVM.\n");
	else
		fprintf(out,
			"\nvmenvfs can run here, with an emulated KVM host; expect it to be several times slower.\n");
	return can ? 0 : 1;
}
