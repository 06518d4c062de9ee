/* SPDX-License-Identifier: Apache-2.0 */
/*
 * When the host runs out of memory: the machine that holds most of it is ended, so that the others go on.
 *
 * The kernel's own killer comes too late. What the machines share are pages of files, which the kernel would rather
 * evict and read again, over and over, than kill anything: every machine stands still then. So pages that are mapped
 * now do not count as free here, and the limit is reached while there is still memory to act with.
 */
#include "back.h"

#include <signal.h>
#include <sys/pidfd.h>

#define CALM_MS 250u
#define TENSE_MS 60u        /* when it comes near */
#define ENDING_MS 3000u     /* most to wait for a victim's process before the next is chosen */
#define FLOOR_KB (64u << 10)
#define MOST_KB (1u << 20)  /* no share of a big host's memory is kept beyond this */
#define WORTH_KB (16u << 10) /* ending a smaller machine would help nobody */
#define CANDIDATES 6
#define STALL_NS (1000 * MS)
#define STALL_PERCENT 30u

struct candidate {
	struct sandbox *s;
	uint64_t kb;
};

void pressure_look(struct pressure *p)
{
	uint64_t now = now_ns(CLOCK_MONOTONIC), mapped = 0, shared = 0, total = 0, n;
	AUTO_FILE FILE *f = NULL;
	char line[128];

	if (p->looked_ns && now - p->looked_ns < 50 * MS)
		return;
	f = fopen("/proc/meminfo", "re");
	while (f && fgets(line, sizeof(line), f)) {
		if (sscanf(line, "MemTotal: %lu", &n) == 1)
			total = n;
		else if (sscanf(line, "MemAvailable: %lu", &n) == 1)
			p->available_kb = n;
		else if (sscanf(line, "Mapped: %lu", &n) == 1)
			mapped = n;
		else if (sscanf(line, "Shmem: %lu", &n) == 1)
			shared = n;
	}
	p->looked_ns = now;
	p->floor_kb = MAX(FLOOR_KB, MIN(total / 25, MOST_KB));
	/* Shared memory is no file's, and is not in MemAvailable. */
	if (mapped > shared)
		p->floor_kb += MIN(mapped - shared, MIN(total / 8, MOST_KB));
}

/* Microseconds that all processes together have stood still for want of memory, since the start of the host. */
static bool stalled_us(uint64_t *us)
{
	AUTO_FILE FILE *f = fopen("/proc/pressure/memory", "re");
	char line[128];

	while (f && fgets(line, sizeof(line), f)) {
		const char *at = strncmp(line, "full ", 5) == 0 ? strstr(line, "total=") : NULL;

		if (at) {
			*us = strtoull(at + 6, NULL, 10);
			return true;
		}
	}
	return false;
}

/* Whether the last second or so went largely into waiting for memory. */
static bool stalling(struct pressure *p)
{
	uint64_t now = now_ns(CLOCK_MONOTONIC), us, was = p->stall_us, since = now - p->stall_ns;

	if (p->stall_ns && since < STALL_NS)
		return false;
	if (!stalled_us(&us))
		return false;
	p->stall_us = us;
	p->stall_ns = now;
	/* After a pause there is nothing to compare with. */
	return since < 4 * STALL_NS && (us - was) * 1000 * 100 > since * STALL_PERCENT;
}

/* What a process has for itself and its forks: cheap, from counters, and takes no lock that its vCPUs take. */
static uint64_t anonymous_kb(pid_t pid)
{
	unsigned long size, resident = 0, of_files = 0;
	AUTO_FILE FILE *f = NULL;
	char path[48];

	snprintf(path, sizeof(path), "/proc/%d/statm", (int)pid);
	f = fopen(path, "re");
	if (!f || fscanf(f, "%lu %lu %lu", &size, &resident, &of_files) != 3 || resident < of_files)
		return 0;
	return (uint64_t)(resident - of_files) * (uint64_t)sysconf(_SC_PAGESIZE) >> 10;
}

/* The same with what forks share divided among them: looks at every page table, so it is asked of a few only. */
static uint64_t own_kb(pid_t pid, uint64_t otherwise)
{
	AUTO_FILE FILE *f = NULL;
	char path[48], line[128];

	snprintf(path, sizeof(path), "/proc/%d/smaps_rollup", (int)pid);
	f = fopen(path, "re");
	while (f && fgets(line, sizeof(line), f))
		if (strncmp(line, "Pss_Anon:", 9) == 0)
			return strtoull(line + 9, NULL, 10);
	return otherwise;
}

static struct candidate largest(struct core *c)
{
	struct candidate list[CANDIDATES] = { 0 }, best = { 0 };

	for (struct sandbox *s = c->sandboxes; s; s = s->next) {
		struct candidate one = { .s = s };

		if ((s->state != SANDBOX_RUNNING && s->state != SANDBOX_FROZEN) || !s->p->machine || !s->p->machine->pid)
			continue;
		one.kb = anonymous_kb(s->p->machine->pid);
		for (unsigned i = 0; i < CANDIDATES; i++)
			if (one.kb > list[i].kb) {
				struct candidate other = list[i];

				list[i] = one;
				one = other;
			}
	}
	for (unsigned i = 0; i < CANDIDATES && list[i].s; i++) {
		if (list[i].kb <= best.kb)
			break; /* it cannot have more of its own than it has */
		list[i].kb = own_kb(list[i].s->p->machine->pid, list[i].kb);
		if (list[i].kb > best.kb)
			best = list[i];
	}
	return best;
}

static bool still_ending(struct pressure *p)
{
	if (!p->victim)
		return false;
	if (p->victim->p->ending && now_ns(CLOCK_MONOTONIC) < p->victim_until)
		return true;
	object_put(&p->victim->object);
	p->victim = NULL;
	p->looked_ns = 0; /* its memory is free now */
	return false;
}

static void end_largest(struct core *c)
{
	struct candidate most = largest(c);
	struct machine_client *m;
	struct err e = { 0 };

	if (!most.s || most.kb < WORTH_KB)
		return;
	err_set(&e, ENOMEM, "the host is out of memory: it held %llu MB, most of all",
		(unsigned long long)(most.kb >> 10));
	c->pressure.victim = most.s;
	c->pressure.victim_until = deadline_ms(ENDING_MS);
	object_get(&most.s->object);
	c->count.out_of_memory++;
	/* Asking it to end would wait until it gets to run. */
	m = most.s->p->machine;
	if (m->process.fd >= 0)
		pidfd_send_signal(m->process.fd, SIGKILL, NULL, 0);
	core_fail(c, most.s->name, "-", &e);
	sandbox_kill(most.s, e.text, NULL, NULL);
}

static void look(struct timer *t)
{
	struct core *c = t->arg;
	struct pressure *p = &c->pressure;
	unsigned next = CALM_MS;

	if (c->machines.count) {
		bool ending = still_ending(p);

		pressure_look(p);
		if (p->available_kb < 3 * p->floor_kb) {
			next = TENSE_MS;
			if (!ending && (p->available_kb < p->floor_kb || stalling(p)))
				end_largest(c);
		}
	}
	loop_timer(c->loop, t, deadline_ms(next));
}

/* Whoever must be ended: not the server. Only root may ask for less than it was given. */
static void protect_server(void)
{
	AUTO_CLOSE int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);

	if (fd >= 0 && write(fd, "-500", 4) < 0)
		return; /* an ordinary user's server: its machines still say that they go first */
}

void pressure_start(struct core *c)
{
	protect_server();
	c->pressure.timer = (struct timer){ .fire = look, .arg = c };
	loop_timer(c->loop, &c->pressure.timer, deadline_ms(CALM_MS));
}

void pressure_stop(struct core *c)
{
	loop_timer_cancel(c->loop, &c->pressure.timer);
	if (c->pressure.victim)
		object_put(&c->pressure.victim->object);
	c->pressure.victim = NULL;
}
