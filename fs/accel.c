/* SPDX-License-Identifier: Apache-2.0 */
/* Whether KVM is usable here. Having /dev/kvm is not enough: some cannot run a 64-bit guest. */
#include <cpuid.h>
#include <libkmod.h>
#include <linux/kvm.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/wait.h>

#include "accel_guest.h"
#include "host.h"

#define GUEST_MS 10000 /* the guest's few instructions, also on a slow, nested host */
#define CPUID_ENTRIES 256

static const struct {
	unsigned cap;
	const char *name;
} needed[] = {
	{ KVM_CAP_IRQCHIP, "IRQCHIP" },
	{ KVM_CAP_IRQFD, "IRQFD" },
	{ KVM_CAP_IOEVENTFD, "IOEVENTFD" },
	{ KVM_CAP_USER_MEMORY, "USER_MEMORY" },
	{ KVM_CAP_EXT_CPUID, "EXT_CPUID" },
	{ KVM_CAP_MP_STATE, "MP_STATE" },
	{ KVM_CAP_VCPU_EVENTS, "VCPU_EVENTS" },
	{ KVM_CAP_DEBUGREGS, "DEBUGREGS" },
	{ KVM_CAP_XSAVE, "XSAVE" },
	{ KVM_CAP_XCRS, "XCRS" },
	{ KVM_CAP_ADJUST_CLOCK, "ADJUST_CLOCK" },
	{ KVM_CAP_IMMEDIATE_EXIT, "IMMEDIATE_EXIT" },
};

static const char not_real[] =
    "it may be a software KVM for special guests only, which no stock kernel runs on; a real one is needed";

static const char *virtualization_module(const char **feature)
{
	unsigned a, b, c, d;

	*feature = "svm or vmx";
	if (!__get_cpuid(0, &a, &b, &c, &d))
		return NULL;
	if (b == signature_INTEL_ebx) {
		*feature = "vmx";
		return __get_cpuid(1, &a, &b, &c, &d) && (c & 1u << 5) ? "kvm_intel" : NULL;
	}
	*feature = "svm";
	return __get_cpuid(0x80000001, &a, &b, &c, &d) && (c & 1u << 2) ? "kvm_amd" : NULL;
}

/* As modprobe would. 0 or -errno. */
static int load_module(const char *name)
{
	struct kmod_ctx *ctx = kmod_new(NULL, NULL);
	struct kmod_module *module = NULL;
	int r;

	if (!ctx)
		return -ENOMEM;
	kmod_set_log_priority(ctx, 0);
	r = kmod_module_new_from_name(ctx, name, &module);
	if (r >= 0)
		r = kmod_module_probe_insert_module(module, KMOD_PROBE_APPLY_BLACKLIST, NULL, NULL, NULL, NULL);
	kmod_module_unref(module);
	kmod_unref(ctx);
	return r > 0 ? -EPERM : r; /* positive: it is blacklisted */
}

__attribute__((format(printf, 4, 5))) static int unusable(struct finding *f, int code, const char *remedy,
							  const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(f->text, sizeof(f->text), fmt, ap);
	va_end(ap);
	snprintf(f->remedy, sizeof(f->remedy), "%s", remedy);
	f->level = FINDING_MISSING;
	return -code;
}

static int open_kvm(struct finding *f)
{
	const char *feature, *module = virtualization_module(&feature);
	int fd = open("/dev/kvm", O_RDWR | O_CLOEXEC), r;

	if (fd >= 0)
		return fd;
	if (errno == EACCES || errno == EPERM)
		return unusable(f, errno, "join the group that owns it: adduser USER kvm, and log in anew",
				"no permission to open /dev/kvm");
	if (!module)
		return unusable(f, ENODEV,
				"run on a machine with virtualization, or switch it on: in the firmware, or as nested "
				"virtualization "
				"in the hypervisor around this machine",
				"no /dev/kvm, and the processor shows no %s", feature);
	if (geteuid() != 0)
		return unusable(f, ENODEV, "as root: modprobe kvm_amd or kvm_intel",
				"no /dev/kvm; the module %s may be missing", module);
	r = load_module(module);
	fd = open("/dev/kvm", O_RDWR | O_CLOEXEC);
	if (fd >= 0)
		return fd;
	if (r < 0)
		return unusable(f, ENODEV, "install a kernel that has it, or see dmesg why it does not load",
				"no /dev/kvm, and the module %s cannot be loaded: %s", module, strerror(-r));
	return unusable(f, ENODEV, "see dmesg", "the module %s is loaded, but there is no /dev/kvm", module);
}

static bool cpuid_has(const struct kvm_cpuid2 *c, uint32_t function, unsigned bit)
{
	for (uint32_t n = 0; n < c->nent; n++)
		if (c->entries[n].function == function)
			return c->entries[n].edx >> bit & 1;
	return false;
}

static int check_processor(int kvm, struct finding *f)
{
	static const struct {
		uint32_t function;
		unsigned bit;
		const char *name;
	} features[] = { { 0x80000001, 29, "64-bit mode" }, { 0x80000001, 20, "no-execute pages" }, { 1, 26, "SSE2" } };
	AUTO_FREE struct kvm_cpuid2 *cpuid = calloc(1, sizeof(*cpuid) + CPUID_ENTRIES * sizeof(cpuid->entries[0]));
	char lacking[100] = "";

	if (!cpuid)
		return unusable(f, ENOMEM, "", "out of memory");
	cpuid->nent = CPUID_ENTRIES;
	if (ioctl(kvm, KVM_GET_SUPPORTED_CPUID, cpuid) < 0)
		return unusable(f, errno, "", "/dev/kvm does not say what processor it offers: %s", strerror(errno));
	for (size_t n = 0; n < ARRAY_SIZE(features); n++)
		if (!cpuid_has(cpuid, features[n].function, features[n].bit))
			snprintf(lacking + strlen(lacking), sizeof(lacking) - strlen(lacking), "%s%s",
				 *lacking ? ", " : "", features[n].name);
	if (*lacking)
		return unusable(f, EOPNOTSUPP, not_real, "/dev/kvm offers guests no %s", lacking);
	return 0;
}

static int check_kvm(struct finding *f)
{
	AUTO_CLOSE int kvm = open_kvm(f);
	struct err e = { 0 };
	int r;

	if (kvm < 0)
		return kvm;
	r = ioctl(kvm, KVM_GET_API_VERSION, 0);
	if (r != KVM_API_VERSION)
		return unusable(f, EOPNOTSUPP, "", "/dev/kvm has API version %d, not %d", r, KVM_API_VERSION);
	for (size_t n = 0; n < ARRAY_SIZE(needed); n++)
		if (ioctl(kvm, KVM_CHECK_EXTENSION, needed[n].cap) <= 0)
			return unusable(f, EOPNOTSUPP, "run a newer kernel", "/dev/kvm lacks KVM_CAP_%s",
					needed[n].name);
	r = check_processor(kvm, f);
	if (r < 0)
		return r;
	r = accel_guest_run(kvm, &e);
	if (r < 0)
		return unusable(f, -r, not_real, "/dev/kvm cannot run a guest: %s", e.text);
	f->level = FINDING_OK;
	snprintf(f->text, sizeof(f->text), "/dev/kvm runs 64-bit guests");
	return 0;
}

struct report {
	int status;
	struct finding finding;
};

/* In a process of its own, since a KVM that does not work may well hang, and what it leaves behind goes with it. */
int accel_probe(struct finding *f, struct err *e)
{
	struct report r = { .status = -EIO, .finding.name = "kvm" };
	int pipes[2];
	pid_t child;

	unusable(&r.finding, EIO, "see dmesg", "/dev/kvm hangs or kills whoever uses it");
	if (pipe2(pipes, O_CLOEXEC) < 0)
		return err_set(e, errno, "cannot make a pipe: %s", strerror(errno));
	child = fork();
	if (child == 0) {
		r.finding.remedy[0] = 0;
		r.status = check_kvm(&r.finding);
		_exit(write(pipes[1], &r, sizeof(r)) == sizeof(r) ? 0 : 1);
	}
	close(pipes[1]);
	if (child > 0) {
		struct pollfd p = { .fd = pipes[0], .events = POLLIN };
		struct report got;

		if (poll(&p, 1, GUEST_MS) == 1 && read(pipes[0], &got, sizeof(got)) == sizeof(got))
			r = got;
		kill(child, SIGKILL);
		while (waitpid(child, NULL, 0) < 0 && errno == EINTR)
			;
	}
	close(pipes[0]);
	r.finding.name = "kvm";
	if (f)
		*f = r.finding;
	if (r.status < 0)
		err_set(e, -r.status, "%s", r.finding.text);
	return r.status;
}
