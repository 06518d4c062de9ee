/* SPDX-License-Identifier: Apache-2.0 */
/* vCPU threads: the run loop, its exits, and parking. */
#include "vcpu.h"

#include <linux/futex.h>
#include <limits.h>
#include <linux/kvm.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>

enum gate { GATE_PARK, GATE_RUN, GATE_QUIT };

/* Takes a thread out of KVM_RUN. Its handler does nothing: immediate_exit says the rest. */
#define KICK_SIGNAL (SIGRTMIN + 1)

static void on_kick(int signal_number)
{
}

static void futex_wait(atomic_uint *at, unsigned value)
{
	syscall(SYS_futex, at, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(atomic_uint *at)
{
	syscall(SYS_futex, at, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static void end(struct vcpu *v, enum machine_exit why, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static void end(struct vcpu *v, enum machine_exit why, const char *fmt, ...)
{
	char text[256], where[64] = "";
	struct kvm_regs regs;
	va_list ap;
	int n;

	va_start(ap, fmt);
	n = vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	if (ioctl(v->fd, KVM_GET_REGS, &regs) == 0)
		snprintf(where, sizeof(where), " (vCPU %u, RIP %#llx)", v->index, regs.rip);
	if (n >= 0 && (size_t)n + strlen(where) < sizeof(text))
		strcpy(text + n, where);
	v->crew->bus->end(v->crew->bus->arg, why, text);
}

static void port_io(struct vcpu *v)
{
	const struct bus *bus = v->crew->bus;
	struct kvm_run *run = v->run;
	uint8_t *data = (uint8_t *)run + run->io.data_offset;

	for (uint32_t i = 0; i < run->io.count; i++, data += run->io.size) {
		if (run->io.direction == KVM_EXIT_IO_IN)
			bus->in(bus->arg, run->io.port, data, run->io.size);
		else
			bus->out(bus->arg, run->io.port, data, run->io.size);
	}
}

static void memory_io(struct vcpu *v)
{
	const struct bus *bus = v->crew->bus;
	struct kvm_run *run = v->run;

	if (run->mmio.is_write)
		bus->write(bus->arg, run->mmio.phys_addr, run->mmio.data, run->mmio.len);
	else
		bus->read(bus->arg, run->mmio.phys_addr, run->mmio.data, run->mmio.len);
}

/* True while the guest can go on. */
static bool handle_exit(struct vcpu *v)
{
	struct kvm_run *run = v->run;

	switch (run->exit_reason) {
	case KVM_EXIT_IO:
		port_io(v);
		return true;
	case KVM_EXIT_MMIO:
		memory_io(v);
		return true;
	case KVM_EXIT_INTR:
	case KVM_EXIT_IRQ_WINDOW_OPEN:
	case KVM_EXIT_HLT:
		return true;
	case KVM_EXIT_SHUTDOWN:
		end(v, MACHINE_EXIT_FAULT, "the guest's processor shut down: a triple fault");
		return false;
	case KVM_EXIT_SYSTEM_EVENT:
		end(v, MACHINE_EXIT_REBOOT, "the guest asked for system event %u", run->system_event.type);
		return false;
	case KVM_EXIT_FAIL_ENTRY:
		end(v, MACHINE_EXIT_FAULT, "the processor refused to enter the guest: hardware reason %#llx",
		    run->fail_entry.hardware_entry_failure_reason);
		return false;
	case KVM_EXIT_INTERNAL_ERROR:
		end(v, MACHINE_EXIT_FAULT, "KVM could not go on with the guest: internal error %u%s", run->internal.suberror,
		    run->internal.suberror == KVM_INTERNAL_ERROR_EMULATION ? ", an instruction it cannot emulate" : "");
		return false;
	default:
		end(v, MACHINE_EXIT_FAULT, "the guest stopped for a reason that is not known here: KVM exit %u", run->exit_reason);
		return false;
	}
}

/* Runs the guest until the gate is no longer open: true, or the guest cannot go on: false. */
static bool run_guest(struct vcpu *v)
{
	struct crew *c = v->crew;
	struct kvm_run *run = v->run;

	/*
	 * Cleared before the gate is looked at; crew_park closes the gate before it sets it. So either the gate is seen closed
	 * here or the next KVM_RUN returns at once.
	 */
	__atomic_store_n(&run->immediate_exit, 0, __ATOMIC_SEQ_CST);
	if (atomic_load(&c->gate) != GATE_RUN)
		return true;
	for (;;) {
		if (ioctl(v->fd, KVM_RUN, 0) == 0) {
			if (!handle_exit(v))
				return false;
			continue;
		}
		/* Only here is the register access of the last exit complete, so only here may the vCPU be parked. */
		if (errno == EINTR) {
			if (atomic_load(&c->gate) != GATE_RUN)
				return true;
			__atomic_store_n(&run->immediate_exit, 0, __ATOMIC_SEQ_CST);
			if (atomic_load(&c->gate) != GATE_RUN)
				return true;
			continue;
		}
		if (errno == EAGAIN)
			continue;
		if (errno == EFAULT)
			end(v, MACHINE_EXIT_HOST, "the host could not provide the guest's memory: a mapped file is shorter than it was, "
						  "or memory ran out");
		else
			end(v, MACHINE_EXIT_HOST, "KVM_RUN failed: %s", strerror(errno));
		return false;
	}
}

static void *vcpu_thread(void *arg)
{
	struct vcpu *v = arg;
	struct crew *c = v->crew;
	bool going = true;

	for (;;) {
		unsigned gate = atomic_load(&c->gate);

		if (gate == GATE_QUIT)
			return NULL;
		if (gate == GATE_RUN && going) {
			going = run_guest(v);
			continue;
		}
		atomic_fetch_add(&c->parked, 1);
		futex_wake(&c->parked);
		do {
			futex_wait(&c->gate, gate);
			gate = atomic_load(&c->gate);
		} while (gate == GATE_PARK || (gate == GATE_RUN && !going));
		atomic_fetch_sub(&c->parked, 1);
	}
}

void crew_init(struct crew *c, const struct bus *bus)
{
	struct sigaction a = { .sa_handler = on_kick };

	memset(c, 0, sizeof(*c));
	atomic_init(&c->gate, GATE_PARK);
	c->bus = bus;
	for (unsigned i = 0; i < VCPUS_MAX; i++)
		c->vcpu[i].fd = -1;
	sigaction(KICK_SIGNAL, &a, NULL);
}

static int make(struct vcpu *v, const struct vm *m, struct err *e)
{
	v->fd = ioctl(m->fd, KVM_CREATE_VCPU, v->index);
	if (v->fd < 0)
		return err_set(e, errno, "cannot make vCPU %u: %s", v->index, strerror(errno));
	v->run = mmap(NULL, v->crew->run_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, v->fd, 0);
	if (v->run == MAP_FAILED) {
		v->run = NULL;
		return err_set(e, errno, "cannot map vCPU %u: %s", v->index, strerror(errno));
	}
	return 0;
}

int crew_make(struct crew *c, const struct kvm *k, const struct vm *m, unsigned vcpus, struct err *e)
{
	c->run_bytes = k->run_bytes;
	c->vcpus = vcpus;
	for (unsigned i = 0; i < vcpus; i++) {
		int r;

		c->vcpu[i] = (struct vcpu){ .crew = c, .index = i, .fd = -1 };
		r = make(&c->vcpu[i], m, e);
		if (r < 0) {
			crew_close(c);
			return r;
		}
	}
	return 0;
}

int crew_start(struct crew *c, struct err *e)
{
	sigset_t all, kick, old;
	int r = 0;

	/* Every signal but the kick is the event loop's thread's. */
	sigfillset(&all);
	sigemptyset(&kick);
	sigaddset(&kick, KICK_SIGNAL);
	sigaddset(&kick, SIGBUS);
	sigaddset(&kick, SIGSEGV);
	for (int s = 1; s < NSIG; s++)
		if (sigismember(&kick, s) == 1)
			sigdelset(&all, s);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	for (unsigned i = 0; i < c->vcpus && r == 0; i++) {
		r = pthread_create(&c->vcpu[i].thread, NULL, vcpu_thread, &c->vcpu[i]);
		c->vcpu[i].started = r == 0;
	}
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (r)
		return err_set(e, r, "cannot start a vCPU's thread: %s", strerror(r));
	return 0;
}

static unsigned started(const struct crew *c)
{
	unsigned n = 0;

	for (unsigned i = 0; i < c->vcpus; i++)
		n += c->vcpu[i].started;
	return n;
}

static void set_gate(struct crew *c, enum gate gate)
{
	atomic_store(&c->gate, gate);
	futex_wake(&c->gate);
}

static void kick(struct crew *c)
{
	for (unsigned i = 0; i < c->vcpus; i++) {
		struct vcpu *v = &c->vcpu[i];

		if (!v->started)
			continue;
		__atomic_store_n(&v->run->immediate_exit, 1, __ATOMIC_SEQ_CST);
		pthread_kill(v->thread, KICK_SIGNAL);
	}
}

static void wait_parked(struct crew *c)
{
	unsigned all = started(c), n;

	while ((n = atomic_load(&c->parked)) < all)
		futex_wait(&c->parked, n);
}

void crew_run(struct crew *c)
{
	set_gate(c, GATE_RUN);
}

void crew_park(struct crew *c)
{
	if (atomic_load(&c->gate) != GATE_PARK) {
		set_gate(c, GATE_PARK);
		kick(c);
	}
	wait_parked(c);
}

void crew_close(struct crew *c)
{
	set_gate(c, GATE_QUIT);
	kick(c);
	for (unsigned i = 0; i < c->vcpus; i++)
		if (c->vcpu[i].started)
			pthread_join(c->vcpu[i].thread, NULL);
	crew_forked(c);
}

void crew_forked(struct crew *c)
{
	for (unsigned i = 0; i < c->vcpus; i++) {
		struct vcpu *v = &c->vcpu[i];

		if (v->run)
			munmap(v->run, c->run_bytes);
		if (v->fd >= 0)
			close(v->fd);
		*v = (struct vcpu){ .crew = c, .index = i, .fd = -1 };
	}
	c->vcpus = 0;
	atomic_store(&c->gate, GATE_PARK);
	atomic_store(&c->parked, 0);
}

int vcpu_set_cpuid(const struct vcpu *v, const struct cpuid *c, struct err *e)
{
	if (ioctl(v->fd, KVM_SET_CPUID2, c) < 0)
		return err_set(e, errno, "KVM refuses the CPUID of vCPU %u: %s", v->index, strerror(errno));
	return 0;
}
