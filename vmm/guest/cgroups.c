/* SPDX-License-Identifier: Apache-2.0 */
#include <sys/stat.h>
#include <sys/sysinfo.h>

#include <vmenv/util.h>

#include "cgroups.h"

#define SANDBOX_PIDS_MAX 8192u
#define RESERVE_MIN (12u << 20) /* memory the sandbox may not have: the agent's and the kernel's own */

static int put(int dir, const char *name, const char *text)
{
	AUTO_CLOSE int fd = openat(dir, name, O_WRONLY | O_CLOEXEC);

	if (fd < 0 || write(fd, text, strlen(text)) < 0)
		return -errno;
	return 0;
}

static int make(int dir, const char *name)
{
	int fd;

	if (mkdirat(dir, name, 0755) < 0 && errno != EEXIST)
		return -errno;
	fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	return fd < 0 ? -errno : fd;
}

static int put_number(int dir, const char *name, uint64_t n)
{
	char text[24];

	snprintf(text, sizeof(text), "%llu", (unsigned long long)n);
	return put(dir, name, text);
}

/* A fork bomb or a memory hog is stopped here, before it takes what the agent and the other runs need. */
void cgroups_limit(struct cgroups *c)
{
	AUTO_CLOSE int top = openat(c->parent, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	struct sysinfo si;
	uint64_t memory, reserve, pids;

	if (sysinfo(&si) < 0)
		return;
	put(top, "cgroup.subtree_control", "+pids +memory");
	memory = (uint64_t)(si.freeram + si.bufferram) * si.mem_unit;
	reserve = MAX(memory / 16, RESERVE_MIN);
	if (memory > 2 * reserve)
		put_number(c->parent, "memory.max", memory - reserve);
	/* A task that does nothing costs some 64 KiB. */
	pids = MIN(memory / 65536, SANDBOX_PIDS_MAX);
	pids = MAX(pids, 64u);
	put_number(c->parent, "pids.max", pids);
	c->pids_max = (uint32_t)(pids / 2);
	put(c->parent, "cgroup.subtree_control", "+pids");
}

int cgroups_open(struct cgroups *c, const char *path, const char *name, struct err *e)
{
	AUTO_CLOSE int top = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	int r;

	*c = (struct cgroups){ .parent = -1, .init = -1 };
	if (top < 0)
		return err_set(e, errno, "%s: %s", path, strerror(errno));
	if (faccessat(top, "cgroup.procs", W_OK, 0) < 0)
		return err_set(e, errno, "%s is not a cgroup2 file system that can be written: %s", path, strerror(errno));
	c->parent = make(top, name);
	if (c->parent < 0) {
		r = c->parent;
		c->parent = -1;
		return err_set(e, -r, "%s/%s: %s", path, name, strerror(-r));
	}
	/* Older kernels cannot kill a cgroup at once; then nothing is gained by having them. */
	c->init = make(c->parent, "init");
	if (c->init < 0 || faccessat(c->init, "cgroup.kill", W_OK, 0) < 0) {
		cgroups_close(c, path, name);
		return err_set(e, ENOTSUP, "cgroup.kill is not there");
	}
	return 0;
}

static void item_name(char name[16], int index)
{
	snprintf(name, 16, "%d", index);
}

void cgroups_close(struct cgroups *c, const char *path, const char *name)
{
	AUTO_CLOSE int top = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	char item[16];

	if (c->parent < 0)
		return;
	put(c->parent, "cgroup.kill", "1");
	for (int i = 0; i < c->count; i++) {
		if (c->items[i].state == CGROUP_NONE)
			continue;
		close(c->items[i].fd);
		item_name(item, i);
		/* The killed take a moment to go. */
		for (int tries = 0; unlinkat(c->parent, item, AT_REMOVEDIR) < 0 && errno == EBUSY && tries < 200; tries++)
			usleep(1000);
	}
	if (c->init >= 0)
		close(c->init);
	unlinkat(c->parent, "init", AT_REMOVEDIR);
	close(c->parent);
	unlinkat(top, name, AT_REMOVEDIR);
	free(c->items);
	*c = (struct cgroups){ .parent = -1, .init = -1 };
}

static bool empty(const struct cgroup *g)
{
	AUTO_CLOSE int fd = openat(g->fd, "cgroup.events", O_RDONLY | O_CLOEXEC);
	char text[128];
	ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);

	if (n < 0)
		return false;
	text[n] = '\0';
	return strstr(text, "populated 0") != NULL;
}

/* A given-back cgroup that has become empty is free again, or gone. */
static void settle(struct cgroups *c, int index)
{
	struct cgroup *g = &c->items[index];
	char name[16];

	if (!empty(g)) {
		g->state = CGROUP_LINGERING;
		return;
	}
	g->state = CGROUP_FREE;
	if (!g->killed)
		return;
	item_name(name, index);
	close(g->fd);
	unlinkat(c->parent, name, AT_REMOVEDIR);
	*g = (struct cgroup){ .fd = -1, .state = CGROUP_NONE };
}

/* An index with no cgroup. */
static int vacancy(struct cgroups *c)
{
	struct cgroup *items;

	for (int i = 0; i < c->count; i++)
		if (c->items[i].state == CGROUP_NONE)
			return i;
	if (c->count == CGROUPS_MAX)
		return -EAGAIN;
	if (c->count % 16 == 0) {
		items = realloc(c->items, (size_t)(c->count + 16) * sizeof(*items));
		if (!items)
			return -ENOMEM;
		c->items = items;
	}
	c->items[c->count] = (struct cgroup){ .fd = -1, .state = CGROUP_NONE };
	return c->count++;
}

static int make_one(struct cgroups *c)
{
	int fd, index = vacancy(c);
	char name[16];

	if (index < 0)
		return index;
	item_name(name, index);
	fd = make(c->parent, name);
	if (fd < 0)
		return fd;
	if (c->pids_max)
		put_number(fd, "pids.max", c->pids_max);
	c->items[index] = (struct cgroup){ .fd = fd, .state = CGROUP_FREE };
	return index;
}

void cgroups_prepare(struct cgroups *c, int n)
{
	if (c->parent < 0)
		return;
	for (int i = 0; i < c->count; i++)
		n -= c->items[i].state == CGROUP_FREE;
	while (n-- > 0 && make_one(c) >= 0)
		;
}

static int first_free(struct cgroups *c)
{
	for (int i = 0; i < c->count; i++)
		if (c->items[i].state == CGROUP_FREE)
			return i;
	return -EAGAIN;
}

int cgroups_take(struct cgroups *c)
{
	int r;

	if (c->parent < 0)
		return -ENOTSUP;
	r = first_free(c);
	if (r < 0) {
		for (int i = 0; i < c->count; i++)
			if (c->items[i].state == CGROUP_LINGERING)
				settle(c, i);
		r = first_free(c);
	}
	if (r < 0)
		r = make_one(c);
	if (r >= 0)
		c->items[r].state = CGROUP_TAKEN;
	return r;
}

void cgroups_give(struct cgroups *c, int index)
{
	settle(c, index);
}

void cgroup_thaw(int dir)
{
	if (dir >= 0)
		put(dir, "cgroup.freeze", "0");
}

int cgroups_kill(struct cgroups *c, int index)
{
	c->items[index].killed = true;
	return put(c->items[index].fd, "cgroup.kill", "1");
}
