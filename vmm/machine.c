/* SPDX-License-Identifier: Apache-2.0 */
/* The life of a machine on its event loop: made, resumed, paused, ended. */
#include "machine_private.h"

#include <linux/kvm.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>

#include "acpi.h"
#include "boot.h"

#define GIB (1ull << 30)

/* Another thread's word. */

static void end(void *arg, enum machine_exit why, const char *sentence)
{
	struct machine *m = arg;
	uint64_t one = 1;

	if (atomic_exchange(&m->ending.claimed, 1))
		return;
	/* How a kernel reboots after a panic is its own choice. */
	if (why == MACHINE_EXIT_FAULT && serial_panicked(&m->devices.serial)) {
		why = MACHINE_EXIT_PANIC;
		sentence = "the guest's kernel panicked";
	}
	snprintf(m->ending.sentence, sizeof(m->ending.sentence), "%s", sentence);
	atomic_store(&m->ending.why, why);
	if (write(m->notice_fd, &one, sizeof(one)) < 0)
		return; /* full: it is signalled */
}

bool machine_check_end(struct machine *m)
{
	unsigned why;

	if (mapping_guard_hit())
		end(m, MACHINE_EXIT_HOST, "the host could not read a mapped file: it is shorter than it was, or damaged");
	why = atomic_load(&m->ending.why);
	if (!why || m->state == MACHINE_ENDED)
		return m->state == MACHINE_ENDED;
	crew_park(&m->crew);
	m->state = MACHINE_ENDED;
	machine_flush_console(m);
	if (m->ended)
		m->ended(m->ended_arg, why, m->ending.sentence);
	return true;
}

static void on_notice(struct watch *w, uint32_t events)
{
	struct machine *m = w->arg;
	uint64_t n;

	if (read(w->fd, &n, sizeof(n)) < 0)
		return;
	machine_flush_console(m);
	if (m->console_room && serial_input_room(&m->devices.serial))
		m->console_room(m->console_room_arg);
	machine_check_end(m);
}

int machine_watch_notices(struct machine *m, struct err *e)
{
	int r;

	m->notice_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (m->notice_fd < 0)
		return err_set(e, errno, "cannot make an eventfd: %s", strerror(errno));
	m->notice_watch = (struct watch){ .fd = m->notice_fd, .ready = on_notice, .arg = m };
	r = loop_add(m->loop, &m->notice_watch, EPOLLIN);
	if (r < 0)
		return err_set(e, -r, "cannot watch an eventfd: %s", strerror(-r));
	m->devices.serial.notice_fd = m->notice_fd;
	mapping_guard(&m->ram, &m->disk, m->notice_fd);
	return 0;
}

/* Console. */

static void on_console_writable(struct watch *w, uint32_t events)
{
	struct machine *m = w->arg;

	loop_remove(m->loop, w);
	m->console_waits = false;
	machine_flush_console(m);
}

void machine_flush_console(struct machine *m)
{
	uint8_t bytes[4096];
	size_t n;

	while (m->console_fd >= 0 && !m->console_waits && (n = serial_peek(&m->devices.serial, bytes, sizeof(bytes)))) {
		ssize_t done = write(m->console_fd, bytes, n);

		if (done < 0 && errno == EINTR)
			continue;
		if (done < 0 && errno == EAGAIN) {
			m->console_watch = (struct watch){ .fd = m->console_fd, .ready = on_console_writable, .arg = m };
			m->console_waits = loop_add(m->loop, &m->console_watch, EPOLLOUT) == 0;
			return;
		}
		/* A console that cannot be written (a full disk) loses output; the machine goes on. */
		serial_drop(&m->devices.serial, done < 0 ? n : (size_t)done);
	}
}

int machine_console_output(struct machine *m, int fd)
{
	int copy = -1;

	if (fd >= 0) {
		copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
		if (copy < 0)
			return -errno;
	}
	if (m->console_waits)
		loop_remove(m->loop, &m->console_watch);
	m->console_waits = false;
	if (m->console_fd >= 0)
		close(m->console_fd);
	m->console_fd = copy;
	serial_keep(&m->devices.serial, copy < 0);
	machine_flush_console(m);
	return 0;
}

unsigned machine_console_input(struct machine *m, const void *bytes, unsigned n)
{
	return (unsigned)serial_input(&m->devices.serial, bytes, n);
}

unsigned machine_console_input_room(struct machine *m)
{
	return (unsigned)serial_input_room(&m->devices.serial);
}

void machine_console_room(struct machine *m, void (*room)(void *arg), void *arg)
{
	m->console_room = room;
	m->console_room_arg = arg;
}

/* Making it. */

static void place_memory(struct machine *m)
{
	uint64_t high = m->ram.bytes > RAM_HOLE_START ? RAM_HIGH_START + m->ram.bytes - RAM_HOLE_START : RAM_HIGH_START;

	m->memory.ram = m->ram.at;
	m->memory.ram_bytes = m->ram.bytes;
	m->memory.disk = m->disk.kind == MAPPING_NONE ? NULL : m->disk.at;
	m->memory.disk_bytes = m->disk.bytes;
	m->memory.disk_gpa = (high + GIB - 1) / GIB * GIB;
}

static int map_to_boot(struct machine *m, const struct machine_options *o, struct err *e)
{
	struct mapping_file ram = {
		.path = o->memory_image, .bytes = o->memory_bytes, .kind = MAPPING_SHARED, .make = true,
	};
	struct mapping_file disk = {
		.path = o->disk, .kind = o->private_disk ? MAPPING_PRIVATE : MAPPING_SHARED, .padded = !o->memory_image,
	};
	int r = o->memory_image ? mapping_open(&m->ram, &ram, e) : mapping_anonymous(&m->ram, o->memory_bytes, e);

	if (r == 0 && o->disk)
		r = mapping_open(&m->disk, &disk, e);
	return r;
}

static int map_to_restore(struct machine *m, const struct machine_options *o, struct err *e)
{
	const struct state_header *h = state_header(&m->saved);
	struct mapping_file ram = { .path = o->memory_image, .bytes = h->memory_bytes, .kind = MAPPING_PRIVATE };
	struct mapping_file disk = { .path = o->disk, .bytes = h->disk_bytes, .kind = MAPPING_PRIVATE };
	int r = mapping_open(&m->ram, &ram, e);

	if (r < 0)
		return r;
	if (!o->disk != !h->disk_bytes)
		return err_set(e, EINVAL, o->disk ? "the saved machine has no disk" : "the saved machine has a disk");
	if (o->disk)
		r = mapping_open(&m->disk, &disk, e);
	if (r < 0)
		return r;
	mapping_populate(&m->ram, o->memory_image);
	if (o->disk)
		mapping_populate(&m->disk, o->disk);
	return 0;
}

static int boot_vcpus(struct machine *m, const struct cpuid *supported, const struct boot *b, struct err *e)
{
	AUTO_FREE struct cpuid *c = malloc(sizeof(*c));
	struct kvm_sregs sregs;
	struct kvm_regs regs;
	int r = c ? 0 : err_set(e, ENOMEM, "out of memory");

	for (unsigned i = 0; i < m->vcpus && r == 0; i++) {
		*c = *supported;
		cpuid_for_vcpu(&m->kvm, c, i, m->vcpus);
		r = vcpu_set_cpuid(&m->crew.vcpu[i], c, e);
	}
	if (r < 0)
		return r;
	if (ioctl(m->crew.vcpu[0].fd, KVM_GET_SREGS, &sregs) < 0)
		return err_set(e, errno, "KVM does not give a vCPU's registers: %s", strerror(errno));
	boot_registers(b, &regs, &sregs);
	if (ioctl(m->crew.vcpu[0].fd, KVM_SET_SREGS, &sregs) < 0 || ioctl(m->crew.vcpu[0].fd, KVM_SET_REGS, &regs) < 0)
		return err_set(e, errno, "KVM refuses the registers to boot with: %s", strerror(errno));
	return cpustate_msrs(&m->kvm, &m->crew.vcpu[0], &m->msrs, e);
}

static int write_acpi(struct machine *m, struct err *e)
{
	struct acpi_config c = { .vcpus = m->vcpus, .devices = m->devices.count };

	for (unsigned i = 0; i < c.devices; i++) {
		c.device[i].mmio = m->devices.device[i].v->mmio;
		c.device[i].gsi = m->devices.device[i].v->gsi;
	}
	if (!acpi_build(&c, memory_at(&m->memory, ACPI_START, ACPI_BYTES), ACPI_BYTES, ACPI_START))
		return err_set(e, E2BIG, "the ACPI tables do not fit");
	return 0;
}

static int boot(struct machine *m, const struct machine_options *o, const struct cpuid *supported, struct err *e)
{
	struct boot b;
	int r = boot_load(&m->memory, o->kernel, o->initrd, o->cmdline ? o->cmdline : MACHINE_CMDLINE, &b, e);

	if (r == 0)
		r = write_acpi(m, e);
	if (r == 0)
		r = vm_make(&m->vm, &m->kvm, &m->memory, e);
	if (r == 0)
		r = crew_make(&m->crew, &m->kvm, &m->vm, m->vcpus, e);
	if (r == 0)
		r = boot_vcpus(m, supported, &b, e);
	if (r == 0)
		r = devices_connect(&m->devices, &m->vm, e);
	if (r == 0)
		r = crew_start(&m->crew, e);
	trace(&m->trace, "booted");
	return r;
}

int machine_build(struct machine *m, struct err *e)
{
	int r = vm_make(&m->vm, &m->kvm, &m->memory, e);

	trace(&m->trace, "VM made");
	if (r == 0)
		r = crew_make(&m->crew, &m->kvm, &m->vm, m->vcpus, e);
	trace(&m->trace, "vCPUs made");
	if (r == 0)
		r = cpustate_load(&m->saved, &m->kvm, &m->vm, m->crew.vcpu, m->vcpus, e);
	trace(&m->trace, "state loaded");
	if (r == 0) {
		workset_prefault(&m->workset, &m->memory, &m->crew.vcpu[0]);
		trace(&m->trace, "working set mapped");
	}
	if (r == 0)
		r = devices_connect(&m->devices, &m->vm, e);
	trace(&m->trace, "devices connected");
	if (r == 0)
		r = crew_start(&m->crew, e);
	trace(&m->trace, "threads started");
	if (r < 0) {
		crew_close(&m->crew);
		devices_disconnect(&m->devices);
		vm_close(&m->vm);
	}
	return r;
}

static int restore(struct machine *m, const struct machine_options *o, struct err *e)
{
	int r = devices_load(&m->devices, &m->saved, e);

	if (r == 0)
		r = cpustate_msrs_of(&m->saved, &m->msrs, e);
	m->saved_valid = m->restored = true;
	if (r == 0 && m->kvm.pre_fault)
		workset_init(&m->workset, m->loop, &m->ram, &m->disk);
	return r;
}

static int check_options(const struct machine_options *o, struct err *e)
{
	if (o->restore) {
		if (!o->memory_image)
			return err_set(e, EINVAL, "to restore a machine needs its memory image");
		return 0;
	}
	if (!o->kernel)
		return err_set(e, EINVAL, "a machine needs a kernel to boot");
	if (o->vcpus < 1 || o->vcpus > VCPUS_MAX)
		return err_set(e, EINVAL, "a machine has 1 to %u vCPUs, not %u", VCPUS_MAX, o->vcpus);
	if (o->memory_bytes < 16u << 20 || o->memory_bytes > 1ull << 39 || o->memory_bytes % (2u << 20))
		return err_set(e, EINVAL, "a machine has 16 MB to 512 GB of memory, a multiple of 2 MB, not %llu bytes",
			       (unsigned long long)o->memory_bytes);
	return 0;
}

static int check_addresses(const struct machine *m, const struct cpuid *supported, struct err *e)
{
	uint64_t end_gpa = m->memory.disk ? m->memory.disk_gpa + m->memory.disk_bytes : m->memory.disk_gpa;

	if (end_gpa > 1ull << cpuid_address_bits(supported))
		return err_set(e, EINVAL, "memory and disk end at %#llx, past the %u address bits of this processor",
			       (unsigned long long)end_gpa, cpuid_address_bits(supported));
	return 0;
}

static int set_up(struct machine *m, const struct machine_options *o, struct cpuid *supported, struct err *e)
{
	int r = kvm_open(&m->kvm, e);

	if (r == 0)
		r = cpuid_supported(&m->kvm, supported, e);
	if (r == 0)
		r = cpuid_fingerprint(supported, &m->cpu, e);
	if (r == 0 && o->restore)
		r = state_load(&m->saved, o->restore, &m->cpu, e);
	if (r == 0)
		r = o->restore ? map_to_restore(m, o, e) : map_to_boot(m, o, e);
	if (r < 0)
		return r;
	trace(&m->trace, "mapped");
	m->vcpus = o->restore ? state_header(&m->saved)->vcpus : o->vcpus;
	place_memory(m);
	if (o->restore && m->memory.disk && m->memory.disk_gpa != state_header(&m->saved)->disk_gpa)
		return err_set(e, EINVAL, "the saved state is damaged: its disk is elsewhere");
	r = check_addresses(m, supported, e);
	if (r == 0)
		r = devices_make(&m->devices, m->loop, &m->memory, e);
	m->devices.end = end;
	m->devices.end_arg = m;
	if (r == 0)
		r = machine_watch_notices(m, e);
	if (r == 0)
		r = o->restore ? restore(m, o, e) : boot(m, o, supported, e);
	return r;
}

int machine_new(const struct machine_options *o, struct loop *l, struct machine **to, struct err *e)
{
	AUTO_FREE struct cpuid *supported = malloc(sizeof(*supported));
	struct machine *m = calloc(1, sizeof(*m));
	int r;

	if (!m || !supported) {
		free(m);
		return err_set(e, ENOMEM, "out of memory");
	}
	trace_start(&m->trace);
	m->loop = l;
	m->state = MACHINE_PAUSED;
	m->workset.uffd = -1;
	m->kvm.fd = m->vm.fd = m->console_fd = m->notice_fd = -1;
	m->bus = (struct bus){ &m->devices, devices_in, devices_out, devices_read, devices_write, devices_end };
	crew_init(&m->crew, &m->bus);
	r = check_options(o, e);
	if (r == 0)
		r = set_up(m, o, supported, e);
	if (r < 0) {
		machine_free(m);
		return r;
	}
	*to = m;
	return 0;
}

void machine_free(struct machine *m)
{
	if (!m)
		return;
	crew_close(&m->crew);
	workset_free(&m->workset);
	devices_free(&m->devices);
	vm_close(&m->vm);
	machine_console_output(m, -1);
	if (m->notice_fd >= 0) {
		loop_remove(m->loop, &m->notice_watch);
		close(m->notice_fd);
	}
	mapping_unguard();
	mapping_close(&m->ram);
	mapping_close(&m->disk);
	state_free(&m->saved);
	if (m->kvm.fd >= 0)
		close(m->kvm.fd);
	free(m);
}

/* Moves. */

void machine_on_end(struct machine *m, machine_ended *ended, void *arg)
{
	m->ended = ended;
	m->ended_arg = arg;
}

enum machine_state machine_state(const struct machine *m)
{
	return m->state;
}

const struct memory *machine_memory(struct machine *m)
{
	return &m->memory;
}

struct vsock *machine_vsock(struct machine *m)
{
	return m->devices.vsock;
}

void machine_stand(struct machine *m)
{
	crew_park(&m->crew);
	trace(&m->trace, "parked");
	devices_drain(&m->devices);
	machine_flush_console(m);
	trace(&m->trace, "drained");
}

void machine_go(struct machine *m)
{
	m->saved_valid = false;
	devices_go(&m->devices);
	crew_run(&m->crew);
}

static int go_on_from_pause(struct machine *m, struct err *e)
{
	int r;

	if (!m->stood_clock)
		return 0;
	r = cpustate_set_clock(&m->vm, m->stood_clock, e);
	for (unsigned i = 0; i < m->vcpus; i++)
		cpustate_continued(&m->crew.vcpu[i]);
	m->stood_clock = 0;
	return r;
}

int machine_resume(struct machine *m, struct err *e)
{
	int r = 0;

	if (m->state == MACHINE_RUNNING)
		return 0;
	if (machine_check_end(m))
		return err_set(e, EIO, "the guest has ended: %s", m->ending.sentence);
	trace(&m->trace, "asked to resume");
	if (m->vm.fd < 0)
		r = machine_build(m, e);
	if (r == 0 && m->restored) {
		if (m->of_zygote)
			workset_record(&m->workset); /* first: it drops pages that differ from the files */
		devices_restored(&m->devices);
	}
	if (r == 0)
		r = go_on_from_pause(m, e);
	if (r < 0)
		return r;
	m->restored = false;
	m->state = MACHINE_RUNNING;
	machine_go(m);
	trace(&m->trace, "running");
	return 0;
}

int machine_pause(struct machine *m, struct err *e)
{
	int r;

	if (m->state == MACHINE_PAUSED)
		return 0;
	if (m->state == MACHINE_RUNNING) {
		workset_stop(&m->workset);
		machine_stand(m);
		m->state = MACHINE_PAUSED;
	}
	if (machine_check_end(m))
		return err_set(e, EIO, "the guest has ended: %s", m->ending.sentence);
	r = cpustate_clock(&m->vm, &m->stood_clock, e);
	return r;
}
