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

void machine_oom_score(const char *score)
{
	AUTO_CLOSE int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);

	/* Without it the kernel chooses as it likes: no reason not to run. */
	if (fd < 0 || write(fd, score, strlen(score)) < 0)
		return;
}

/* In the child, first thing: nothing of the parent's KVM, event loop and connections is left. */
static int become_child(struct machine *m, unsigned index, struct err *e)
{
	m->of_zygote = m->vm.fd < 0;
	machine_oom_score(MACHINE_OOM_CHILD);
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
	workset_forked(&m->workset, m->of_zygote && index == 0);
	m->state = MACHINE_PAUSED;
	m->restored = true;
	m->stood_clock = 0;
	return machine_watch_notices(m, e);
}

/*
 * Between the parent, its first child, and the others, which the first one forks: so the parent stands still for one fork
 * whatever their number, and all have the very same memory. The first tells the parent how that went (`report`), and then
 * the others that they may serve (`go`). It holds the only other ends: should it die before, both see the end of their pipe.
 */
struct birth {
	int report[2], go[2];
};

static void close_end(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

static void birth_close(struct birth *b)
{
	for (unsigned i = 0; i < 2; i++) {
		close_end(&b->report[i]);
		close_end(&b->go[i]);
	}
}

static int birth_open(struct birth *b, struct err *e)
{
	int r;

	*b = (struct birth){ { -1, -1 }, { -1, -1 } };
	if (pipe2(b->report, O_CLOEXEC) == 0 && pipe2(b->go, O_CLOEXEC) == 0)
		return 0;
	r = err_set(e, errno, "cannot make a pipe: %s", strerror(errno));
	birth_close(b);
	return r;
}

static void kill_all(const pid_t *pid, unsigned count)
{
	for (unsigned i = 0; i < count; i++)
		kill(pid[i], SIGKILL);
}

/* In the first child. Returns the child's index, or -errno. */
static int fork_others(unsigned count, const struct birth *b)
{
	char go[MACHINE_FORK_MAX] = { 0 };
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
	if (write(b->report[1], &r, sizeof(r)) == sizeof(r) && (r < 0 || write(b->go[1], go, count - 1) == (ssize_t)count - 1))
		return r;
	if (r == 0)
		kill_all(pid, count - 1); /* the parent is gone, and with it whoever was to serve the children */
	return -EPIPE;
}

/* Reads n bytes, which come at once or never. */
static bool read_whole(int fd, void *to, size_t n)
{
	ssize_t got;

	do
		got = read(fd, to, n);
	while (got < 0 && errno == EINTR);
	return got == (ssize_t)n;
}

static int in_child(struct machine *m, unsigned count, unsigned *child, struct birth *b)
{
	int index = 0;
	char go;

	close_end(&b->report[0]);
	if (count > 1)
		index = fork_others(count, b);
	if (index < 0)
		_exit(1); /* this copy was never anybody's */
	close_end(&b->report[1]);
	close_end(&b->go[1]);
	*child = (unsigned)index;
	trace(&m->trace, "child: forked");
	if (become_child(m, *child, NULL) < 0)
		_exit(1);
	trace(&m->trace, "child: let go of the parent's");
	/* Begun before anybody asks for it, since somebody waits for it. A failure is said by machine_resume, which tries again. */
	machine_build(m, NULL);
	if (index > 0 && !read_whole(b->go[0], &go, 1))
		_exit(1); /* the fork failed: there may be fewer of us than were asked for */
	close_end(&b->go[0]);
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
	bool zygote = m->vm.fd < 0;
	int r = check(m, count, e);
	struct birth b;
	uint64_t start;
	int32_t said;
	pid_t pid;

	if (r == 0)
		r = birth_open(&b, e);
	if (r < 0)
		return r;
	trace(&m->trace, "asked to fork");
	if (running)
		workset_stop(&m->workset);
	else if (zygote)
		workset_before_fork(&m->workset);
	start = now_ns(CLOCK_MONOTONIC);
	if (running)
		machine_stand(m);
	r = machine_capture(m, e);
	pid = r == 0 ? fork() : -1;
	if (pid == 0)
		return in_child(m, count, child, &b);
	if (r == 0 && pid < 0)
		r = err_set(e, errno, "cannot fork: %s", strerror(errno));
	if (zygote)
		workset_after_fork(&m->workset);
	if (running)
		machine_go(m);
	*still_ns = running ? now_ns(CLOCK_MONOTONIC) - start : 0;
	trace(&m->trace, "parent: goes on");
	close_end(&b.report[1]);
	close_end(&b.go[1]);
	if (r == 0 && count > 1) {
		if (!read_whole(b.report[0], &said, sizeof(said)))
			r = err_set(e, EIO, "cannot fork %u machines: the first one died before the others were there", count);
		else if (said < 0)
			r = err_set(e, -said, "cannot fork %u machines: %s", count, strerror(-said));
	}
	birth_close(&b);
	return r;
}
