/* SPDX-License-Identifier: Apache-2.0 */
#include "mountpoint.h"

#define GRACE_NS 1000000000ull /* for requests in progress to end by themselves */
#define LINE_BYTES 8192

/* A line of /proc/self/mountinfo (proc(5)). */
struct mounted {
	int id;
	unsigned major, minor;
	char type[64];
};

static bool parse(const char *line, struct mounted *m)
{
	const char *rest = strstr(line, " - ");

	return rest && sscanf(line, "%d %*d %u:%u", &m->id, &m->major, &m->minor) == 3 && sscanf(rest, " - %63s", m->type) == 1;
}

/* The first mount that has this id, or else (id < 0) is of this device. */
static bool find(int id, unsigned major, unsigned minor, struct mounted *m)
{
	AUTO_FILE FILE *f = fopen("/proc/self/mountinfo", "re");
	AUTO_FREE char *line = malloc(LINE_BYTES);
	bool whole = true;

	while (f && line && fgets(line, LINE_BYTES, f)) {
		bool starts = whole;

		whole = strchr(line, '\n');
		if (starts && parse(line, m) && (id >= 0 ? m->id == id : m->major == major && m->minor == minor))
			return true;
	}
	return false;
}

/* What is mounted at, or above, a directory. -ENOSYS: cannot be told. */
static int look(const char *path, struct mounted *m)
{
	AUTO_CLOSE int fd = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
	AUTO_FILE FILE *f = NULL;
	char name[64], line[128];
	int id = -1;

	if (fd < 0)
		return -errno;
	snprintf(name, sizeof(name), "/proc/self/fdinfo/%d", fd);
	f = fopen(name, "re");
	while (f && id < 0 && fgets(line, sizeof(line), f))
		if (sscanf(line, "mnt_id: %d", &id) != 1)
			id = -1;
	return id >= 0 && find(id, 0, 0, m) ? 0 : -ENOSYS;
}

int mountpoint_check(const char *path, struct err *e)
{
	struct mounted m;
	int r = look(path, &m);

	if (r == 0 && strcmp(m.type, "fuse.vmenvfs") == 0)
		return err_set(e, EBUSY, "%s is mounted by vmenvfs already: umount it first, or give another folder", path);
	if (r < 0 && r != -ENOSYS)
		return err_set(e, -r, "cannot mount on %s: %s", path, strerror(-r));
	return 0;
}

static bool is_there(const struct mount_watch *w)
{
	struct mounted m;

	return find(-1, w->major, w->minor, &m);
}

static void on_time(struct timer *t)
{
	struct mount_watch *w = t->arg;

	w->gone = !is_there(w);
	if (w->gone)
		w->over(w->arg);
}

static void table_changed(struct watch *watch, uint32_t events)
{
	struct mount_watch *w = watch->arg;

	if (!is_there(w))
		loop_timer(w->loop, &w->timer, now_ns(CLOCK_MONOTONIC) + GRACE_NS);
}

void mount_watch_start(struct mount_watch *w, struct loop *l, const char *mountpoint, void (*over)(void *arg), void *arg)
{
	struct mounted m;
	int fd;

	*w = (struct mount_watch){ .loop = l, .over = over, .arg = arg };
	if (look(mountpoint, &m) < 0)
		return;
	fd = open("/proc/self/mountinfo", O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return;
	w->major = m.major;
	w->minor = m.minor;
	w->watch = (struct watch){ fd, table_changed, w };
	w->timer = (struct timer){ .fire = on_time, .arg = w };
	/* The kernel tells of each change once. */
	if (loop_add(l, &w->watch, EPOLLPRI) < 0) {
		close(fd);
		w->watch.ready = NULL;
	}
}

void mount_watch_stop(struct mount_watch *w)
{
	if (!w->watch.ready)
		return;
	loop_timer_cancel(w->loop, &w->timer);
	loop_remove(w->loop, &w->watch);
	close(w->watch.fd);
	w->watch.ready = NULL;
}
