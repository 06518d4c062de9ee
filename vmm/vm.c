/* SPDX-License-Identifier: Apache-2.0 */
/* The VM side of the KVM API (Linux, Documentation/virt/kvm/api.rst). */
#include "vm.h"

#include <linux/kvm.h>
#include <sys/ioctl.h>

#include "layout.h"

#define CAP_PRE_FAULT_MEMORY 236 /* Linux 6.11 */

static int capability(int fd, int cap)
{
	return ioctl(fd, KVM_CHECK_EXTENSION, cap);
}

int kvm_open(struct kvm *k, struct err *e)
{
	static const struct {
		int cap;
		const char *name;
	} needed[] = {
		{ KVM_CAP_IRQCHIP, "an in-kernel interrupt controller" },
		{ KVM_CAP_USER_MEMORY, "user memory slots" },
		{ KVM_CAP_IOEVENTFD, "ioeventfd" },
		{ KVM_CAP_IMMEDIATE_EXIT, "immediate exit" },
		{ KVM_CAP_ADJUST_CLOCK, "kvmclock control" },
		{ KVM_CAP_XSAVE, "XSAVE state" },
		{ KVM_CAP_XCRS, "XCR state" },
		{ KVM_CAP_VCPU_EVENTS, "vCPU events" },
		{ KVM_CAP_DEBUGREGS, "debug registers" },
		{ KVM_CAP_MP_STATE, "processor states" },
	};
	AUTO_CLOSE int fd = open("/dev/kvm", O_RDWR | O_CLOEXEC);
	int n;

	if (fd < 0)
		return err_set(e, errno, "cannot open /dev/kvm: %s", strerror(errno));
	n = ioctl(fd, KVM_GET_API_VERSION, 0);
	if (n != KVM_API_VERSION)
		return err_set(e, ENOTSUP, "/dev/kvm speaks version %d of its interface, not %d", n, KVM_API_VERSION);
	for (unsigned i = 0; i < ARRAY_SIZE(needed); i++)
		if (capability(fd, needed[i].cap) <= 0)
			return err_set(e, ENOTSUP, "this host's KVM lacks %s", needed[i].name);
	n = ioctl(fd, KVM_GET_VCPU_MMAP_SIZE, 0);
	if (n < (int)sizeof(struct kvm_run))
		return err_set(e, ENOTSUP, "this host's KVM has a kvm_run of %d bytes", n);
	k->run_bytes = (size_t)n;
	n = capability(fd, KVM_CAP_XSAVE2);
	k->xsave_bytes = n > (int)sizeof(struct kvm_xsave) ? (size_t)n : 0;
	k->tsc_deadline = capability(fd, KVM_CAP_TSC_DEADLINE_TIMER) > 0;
	k->tsc_control = capability(fd, KVM_CAP_TSC_CONTROL) > 0;
	k->pre_fault = capability(fd, CAP_PRE_FAULT_MEMORY) > 0;
	k->fd = steal_fd(&fd);
	return 0;
}

static int slot(struct vm *v, unsigned number, uint64_t gpa, uint64_t bytes, const uint8_t *at, struct err *e)
{
	struct kvm_userspace_memory_region region = {
		.slot = number,
		.guest_phys_addr = gpa,
		.memory_size = bytes,
		.userspace_addr = (uintptr_t)at,
	};

	if (ioctl(v->fd, KVM_SET_USER_MEMORY_REGION, &region) < 0)
		return err_set(e, errno, "KVM refuses %llu MB of memory at %#llx: %s", (unsigned long long)(bytes >> 20),
			       (unsigned long long)gpa, strerror(errno));
	return 0;
}

static int slots(struct vm *v, const struct memory *m, struct err *e)
{
	uint64_t low = MIN(m->ram_bytes, RAM_HOLE_START);
	int r = slot(v, 0, 0, low, m->ram, e);

	if (r == 0 && m->ram_bytes > low)
		r = slot(v, 1, RAM_HIGH_START, m->ram_bytes - low, m->ram + low, e);
	if (r == 0 && m->disk)
		r = slot(v, 2, m->disk_gpa, m->disk_bytes, m->disk, e);
	return r;
}

int vm_make(struct vm *v, struct kvm *k, const struct memory *m, struct err *e)
{
	uint64_t identity_map = KVM_IDENTITY_MAP;
	int r;

	do
		v->fd = ioctl(k->fd, KVM_CREATE_VM, 0);
	while (v->fd < 0 && errno == EINTR);
	if (v->fd < 0)
		return err_set(e, errno, "cannot make a KVM virtual machine: %s", strerror(errno));
	if (ioctl(v->fd, KVM_SET_IDENTITY_MAP_ADDR, &identity_map) < 0 || ioctl(v->fd, KVM_SET_TSS_ADDR, KVM_TSS) < 0)
		r = err_set(e, errno, "KVM refuses a place for its task state segment: %s", strerror(errno));
	else if (ioctl(v->fd, KVM_CREATE_IRQCHIP, 0) < 0)
		r = err_set(e, errno, "KVM cannot make interrupt controllers: %s", strerror(errno));
	else
		r = slots(v, m, e);
	if (r < 0)
		vm_close(v);
	return r;
}

/*
 * Not by an irqfd: KVM passes those on in a kernel worker, which costs a context switch, and an interrupt that is still
 * with the worker when the state is saved would be in neither the state nor the device.
 */
void vm_edge(void *vm, unsigned gsi)
{
	const struct vm *v = vm;

	for (uint32_t level = 2; level-- > 0;) {
		struct kvm_irq_level line = { .irq = gsi, .level = level };

		/* Nothing that can fail with a pin that is there. */
		(void)ioctl(v->fd, KVM_IRQ_LINE, &line);
	}
}

int vm_signal_at(struct vm *v, int event_fd, uint64_t gpa, struct err *e)
{
	struct kvm_ioeventfd io = { .addr = gpa, .len = 4, .fd = event_fd };

	if (ioctl(v->fd, KVM_IOEVENTFD, &io) < 0)
		return err_set(e, errno, "KVM refuses to watch address %#llx: %s", (unsigned long long)gpa, strerror(errno));
	return 0;
}

void vm_close(struct vm *v)
{
	if (v->fd >= 0)
		close(v->fd);
	v->fd = -1;
}
