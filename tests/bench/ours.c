/* SPDX-License-Identifier: Apache-2.0 */
/* vmenvfs itself, driven as its users drive it: by file I/O on a mount. */
#include <pthread.h>
#include <sys/stat.h>

#include "bench.h"
#include "ours.h"

#define AT_ONCE 64

static int put(const char *mount, const char *file, const char *text)
{
	char path[512];
	int fd, r = 0;

	snprintf(path, sizeof(path), "%s/%s", mount, file);
	fd = open(path, O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	if (write(fd, text, strlen(text)) < 0)
		r = -errno;
	if (close(fd) < 0 && r == 0)
		r = -errno;
	if (r)
		fprintf(stderr, "bench: %s: %s: %s\n", file, text, strerror(-r));
	return r;
}

static int drop(const char *mount, const char *name)
{
	char path[512];

	snprintf(path, sizeof(path), "%s/sandboxes/%s", mount, name);
	return rmdir(path) < 0 ? -errno : 0;
}

static int command(const char *mount, const char *name, const char *script)
{
	char file[256];

	snprintf(file, sizeof(file), "sandboxes/%s/exec", name);
	return put(mount, file, script);
}

/* A number out of a sandbox's info. */
static double info(const char *mount, const char *name, const char *key)
{
	char path[512], text[8192], quoted[80];
	AUTO_CLOSE int fd = -1;
	ssize_t n;
	char *at;

	snprintf(path, sizeof(path), "%s/sandboxes/%s/info", mount, name);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	n = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);
	if (n <= 0)
		return -1;
	text[n] = 0;
	snprintf(quoted, sizeof(quoted), "\"%s\":", key);
	at = strstr(text, quoted);
	return at ? atof(at + strlen(quoted)) : -1;
}

int ours_create(const char *mount, const char *template, unsigned rounds, struct samples *create, struct samples *first, struct samples *next,
		struct samples *private_kb)
{
	for (unsigned i = 0; i < rounds; i++) {
		double start = ms_now(), created, answered;
		char line[256];
		int r;

		snprintf(line, sizeof(line), "create bench from=%s", template);
		r = put(mount, "ctl", line);
		created = ms_now();
		if (r == 0)
			r = command(mount, "bench", "true");
		answered = ms_now();
		if (r == 0)
			r = command(mount, "bench", "true");
		if (r)
			return r;
		samples_add(next, ms_now() - answered);
		samples_add(create, created - start);
		samples_add(first, answered - start);
		samples_add(private_kb, info(mount, "bench", "private_kb"));
		r = drop(mount, "bench");
		if (r)
			return r;
	}
	return 0;
}

int ours_fork(const char *mount, const char *template, unsigned rounds, unsigned dirty_mb, struct samples *pause, struct samples *first)
{
	char line[256];
	int r;

	snprintf(line, sizeof(line), "create parent from=%s", template);
	r = put(mount, "ctl", line);
	snprintf(line, sizeof(line), "mount -t tmpfs -o size=%um t /mnt && dd if=/dev/urandom of=/mnt/dirty bs=1M count=%u 2>/dev/null",
		 dirty_mb + 16, dirty_mb);
	if (r == 0)
		r = command(mount, "parent", line);
	for (unsigned i = 0; r == 0 && i < rounds; i++) {
		double start = ms_now();

		r = put(mount, "sandboxes/parent/ctl", "fork child");
		if (r == 0)
			r = command(mount, "child", "true");
		if (r)
			break;
		samples_add(first, ms_now() - start);
		samples_add(pause, info(mount, "child", "pause_ms"));
		r = drop(mount, "child");
	}
	drop(mount, "parent");
	return r;
}

struct creation {
	pthread_t thread;
	const char *mount, *template;
	unsigned number;
	int status;
};

static void *create_one(void *arg)
{
	struct creation *c = arg;
	char line[256];

	snprintf(line, sizeof(line), "create many%u from=%s", c->number, c->template);
	c->status = put(c->mount, "ctl", line);
	return NULL;
}

int ours_at_once(const char *mount, const char *template, double *per_second)
{
	struct creation c[AT_ONCE];
	double start = ms_now();
	int r = 0;

	for (unsigned i = 0; i < AT_ONCE; i++) {
		c[i] = (struct creation){ .mount = mount, .template = template, .number = i };
		if (pthread_create(&c[i].thread, NULL, create_one, &c[i]))
			return -EAGAIN;
	}
	for (unsigned i = 0; i < AT_ONCE; i++) {
		pthread_join(c[i].thread, NULL);
		if (c[i].status)
			r = c[i].status;
	}
	*per_second = AT_ONCE / ((ms_now() - start) / 1000);
	for (unsigned i = 0; i < AT_ONCE; i++) {
		char name[32];

		snprintf(name, sizeof(name), "many%u", i);
		drop(mount, name);
	}
	return r;
}
