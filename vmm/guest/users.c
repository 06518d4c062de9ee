/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The files are what the guest's processes made of them: opened inside the disk's root, regular and of at most 1 MiB, or
 * they count as empty. Lines that make no sense are passed over.
 */
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <vmenv/util.h>

#include "users.h"

#define DATABASE_MAX (1 << 20)
#define FIELDS_MAX 7

int open_inside(int root, const char *path, int flags, mode_t mode)
{
	struct open_how how = { .flags = (uint64_t)flags | O_CLOEXEC | O_NONBLOCK | O_NOCTTY,
				.mode = flags & O_CREAT ? mode : 0,
				.resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS };
	int fd = (int)syscall(SYS_openat2, root, path, &how, sizeof(how));
	struct stat st;

	if (fd < 0)
		return -errno;
	if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode)) {
		close(fd);
		return -EINVAL;
	}
	return fd;
}

static char *read_database(int disk, const char *path)
{
	AUTO_CLOSE int fd = open_inside(disk, path, O_RDONLY, 0);
	AUTO_FREE char *text = NULL;
	struct stat st;
	size_t have = 0;
	ssize_t n;

	if (fd < 0 || fstat(fd, &st) < 0 || st.st_size > DATABASE_MAX)
		return NULL;
	text = malloc((size_t)st.st_size + 1);
	if (!text)
		return NULL;
	while (have < (size_t)st.st_size && (n = read(fd, text + have, (size_t)st.st_size - have)) > 0)
		have += (size_t)n;
	text[have] = '\0';
	return steal_ptr(&text);
}

/* The next line of *text, cut into its fields; their number, -1 at the end. */
static int next_line(char **text, char *fields[FIELDS_MAX])
{
	char *line = strsep(text, "\n");
	int n = 0;

	if (!line)
		return -1;
	while (n < FIELDS_MAX && line)
		fields[n++] = strsep(&line, ":");
	return n;
}

static bool number(const char *s, uint32_t *out)
{
	char *end;
	unsigned long v;

	if (s[0] < '0' || s[0] > '9')
		return false;
	errno = 0;
	v = strtoul(s, &end, 10);
	if (errno || *end || v >= UINT32_MAX)
		return false;
	*out = (uint32_t)v;
	return true;
}

static bool member(const char *list, const char *name)
{
	size_t n = strlen(name);

	for (const char *s = list; *s; s += strspn(s, ",")) {
		size_t length = strcspn(s, ",");

		if (length == n && memcmp(s, name, n) == 0)
			return true;
		s += length;
	}
	return false;
}

static bool find_passwd(struct user *u, char *text, const char *name)
{
	char *f[FIELDS_MAX];
	uint32_t wanted, uid, gid;
	bool numeric = number(name, &wanted);
	int n;

	while ((n = next_line(&text, f)) >= 0) {
		if (n < 6 || !number(f[2], &uid) || !number(f[3], &gid))
			continue;
		if (numeric ? uid != wanted : strcmp(f[0], name) != 0)
			continue;
		u->uid = uid;
		u->gid = gid;
		snprintf(u->name, sizeof(u->name), "%s", f[0]);
		snprintf(u->home, sizeof(u->home), "%s", f[5][0] ? f[5] : "/");
		snprintf(u->shell, sizeof(u->shell), "%s", n > 6 && f[6][0] ? f[6] : "/bin/sh");
		return true;
	}
	return false;
}

/* Supplementary groups, or with `wanted` that group's number into u->gid. */
static bool find_groups(struct user *u, char *text, const char *wanted)
{
	char *f[FIELDS_MAX];
	uint32_t gid;
	int n;

	while ((n = next_line(&text, f)) >= 0) {
		if (n < 3 || !number(f[2], &gid))
			continue;
		if (wanted && strcmp(f[0], wanted) == 0) {
			u->gid = gid;
			return true;
		}
		if (!wanted && n > 3 && u->group_count < GROUPS_MAX && gid != u->gid && member(f[3], u->name))
			u->groups[u->group_count++] = gid;
	}
	return false;
}

int user_find(struct user *u, int disk, const char *spec, struct err *e)
{
	AUTO_FREE char *passwd = read_database(disk, "etc/passwd"), *group = read_database(disk, "etc/group"), *copy = NULL;
	const char *colon = strchr(spec, ':');
	char name[64];
	uint32_t n;

	*u = (struct user){ .home = "/", .shell = "/bin/sh" };
	if (snprintf(name, sizeof(name), "%.*s", colon ? (int)(colon - spec) : 256, spec) >= (int)sizeof(name) || !name[0])
		return err_set(e, EINVAL, "'%.100s' is not a user's name", spec);
	if (!passwd || !find_passwd(u, passwd, name)) {
		if (number(name, &n))
			u->uid = u->gid = n;
		else if (strcmp(name, "root") == 0)
			strcpy(u->home, "/root");
		else
			return err_set(e, EINVAL, "there is no user '%s' in /etc/passwd", name);
		strcpy(u->name, name);
	}
	if (colon && number(colon + 1, &n)) {
		u->gid = n;
	} else if (colon) {
		copy = group ? strdup(group) : NULL;
		if (!copy || !find_groups(u, copy, colon + 1))
			return err_set(e, EINVAL, "there is no group '%.100s' in /etc/group", colon + 1);
	}
	u->groups[u->group_count++] = u->gid;
	if (group)
		find_groups(u, group, NULL);
	return 0;
}
