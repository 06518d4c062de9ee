/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forking a machine: fork(2) with the vCPUs parked, and a new KVM VM over the copied mappings in the child.
 *
 * KVM answers EIO to a process that is not the one that made a VM, and inherited descriptors keep the parent's VM alive:
 * the child closes them first. Only mappings that are copied on write may be forked; of a shared one the parent's later
 * writes would be seen in the child.
 */
#include "machine_private.h"

#include <signal.h>
#include <sys/types.h>

int machine_capture(struct machine *m, struct err *e)
{
	struct state_header *h;
	int r;

	if (m->saved_valid)
		return 0;
	r = state_begin(&m->saved, e);
	if (r < 0)
		return r;
	h = state_header(&m->saved);
	h->cpu = m->cpu;
	h->memory_bytes = m->memory.ram_bytes;
	h->disk_bytes = m->memory.disk ? m->memory.disk_bytes : 0;
	h->disk_gpa = m->memory.disk ? m->memory.disk_gpa : 0;
	h->vcpus = m->vcpus;
	r = cpustate_save(&m->saved, &m->kvm, &m->vm, m->crew.vcpu, m->vcpus, &m->msrs, e);
	if (r == 0)
		r = devices_save(&m->devices, &m->saved, e);
	/* Paused before: the clock is what it was then. */
	if (r == 0 && m->stood_clock)
		state_header(&m->saved)->clock_ns = m->stood_clock;
	m->saved_valid = r == 0;
	trace(&m->trace, "state saved");
	return r;
}

/* In the child, first thing: nothing of the parent's KVM, event loop and connections is left. */
static int become_child(struct machine *m, struct err *e)
{
	m->of_zygote = m->vm.fd < 0;
	crew_forked(&m->crew);
	vm_close(&m->vm);
	devices_forked(&m->devices);
	if (m->console_fd >= 0)
		close(m->console_fd);
	m->console_fd = -1;
	m->console_waits = false;
	serial_keep(&m->devices.serial, true);
	close(m->notice_fd);
	loop_forked(m->loop);
	workset_forked(&m->workset);
	m->state = MACHINE_PAUSED;
	m->restored = true;
	m->stood_clock = 0;
	return machine_watch_notices(m, e);
}

static void kill_all(const pid_t *pid, unsigned count)
{
	for (unsigned i = 0; i < count; i++)
		kill(pid[i], SIGKILL);
}

/*
 * The first child forks the others, so that the parent stands still for one fork whatever their number: it has the very
 * same memory and has not run. It tells the parent by the pipe how that went. Returns the child's index, or -errno.
 */
static int fork_others(unsigned count, int report)
{
	pid_t pid[MACHINE_FORK_MAX];
	int32_t r = 0;

	for (unsigned i = 1; i < count && r == 0; i++) {
		pid[i - 1] = fork();
		if (pid[i - 1] == 0)
			return (int)i;
		if (pid[i - 1] < 0) {
			r = -errno;
			kill_all(pid, i - 1);
		}
	}
	if (write(report, &r, sizeof(r)) != sizeof(r)) {
		kill_all(pid, count - 1); /* the parent is gone, and with it whoever was to serve the children */
		r = -EPIPE;
	}
	return r;
}

/* What the first child said. */
static int read_report(int fd)
{
	int32_t r = 0;
	ssize_t n;

	do
		n = read(fd, &r, sizeof(r));
	while (n < 0 && errno == EINTR);
	return n == sizeof(r) ? r : -EIO;
}

static int in_child(struct machine *m, unsigned count, unsigned *child, const int report[2])
{
	int index = 0;

	close(report[0]);
	if (count > 1)
		index = fork_others(count, report[1]);
	if (index < 0)
		_exit(1); /* this copy was never anybody's */
	close(report[1]);
	*child = (unsigned)index;
	trace(&m->trace, "child: forked");
	if (become_child(m, NULL) < 0)
		_exit(1);
	trace(&m->trace, "child: let go of the parent's");
	/* Begun before anybody asks for it, since somebody waits for it. A failure is said by machine_resume, which tries again. */
	machine_build(m, NULL);
	return 1;
}

static int check(struct machine *m, unsigned count, struct err *e)
{
	if (count < 1 || count > MACHINE_FORK_MAX)
		return err_set(e, EINVAL, "a fork makes 1 to %u machines, not %u", MACHINE_FORK_MAX, count);
	if (machine_check_end(m))
		return err_set(e, EIO, "the guest has ended: %s", m->ending.sentence);
	if (m->ram.kind == MAPPING_SHARED || m->disk.kind == MAPPING_SHARED)
		return err_set(e, EBUSY, "a machine that writes to its image files cannot be forked");
	return 0;
}

int machine_fork(struct machine *m, unsigned count, unsigned *child, uint64_t *still_ns, struct err *e)
{
	bool running = m->state == MACHINE_RUNNING;
	int report[2] = { -1, -1 }, r = check(m, count, e);
	uint64_t start;
	pid_t pid;

	if (r < 0)
		return r;
	if (pipe2(report, O_CLOEXEC) < 0)
		return err_set(e, errno, "cannot make a pipe: %s", strerror(errno));
	trace(&m->trace, "asked to fork");
	if (running)
		workset_stop(&m->workset);
	else if (m->vm.fd < 0)
		workset_apply(&m->workset);
	start = now_ns(CLOCK_MONOTONIC);
	if (running)
		machine_stand(m);
	r = machine_capture(m, e);
	pid = r == 0 ? fork() : -1;
	if (pid == 0)
		return in_child(m, count, child, report);
	if (r == 0 && pid < 0)
		r = err_set(e, errno, "cannot fork: %s", strerror(errno));
	if (running)
		machine_go(m);
	*still_ns = running ? now_ns(CLOCK_MONOTONIC) - start : 0;
	trace(&m->trace, "parent: goes on");
	close(report[1]);
	if (r == 0 && count > 1) {
		r = read_report(report[0]);
		if (r < 0)
			err_set(e, -r, "cannot fork %u machines: %s", count, strerror(-r));
	}
	close(report[0]);
	return r;
}
