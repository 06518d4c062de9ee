/* SPDX-License-Identifier: Apache-2.0 */
/* Templates: their files, their rows, their uploads, and the zygote, the process that sandboxes are forked from. */
#include "back.h"

#include <dirent.h>
#include <stdarg.h>
#include <sys/stat.h>

#define TEMPLATES_MAX 4096
#define ZYGOTE_STARTS_WITHIN_S 60

const char *const template_state_names[] = {
	[TEMPLATE_NEW] = "new", [TEMPLATE_BAKING] = "baking", [TEMPLATE_READY] = "ready", [TEMPLATE_FAILED] = "failed",
};

static const char *const upload_names[] = { [UPLOAD_ROOTFS] = "rootfs", [UPLOAD_KERNEL] = "kernel" };

struct template *template_list(struct core *c)
{
	return c->templates;
}

struct template *template_find(struct core *c, const char *name)
{
	for (struct template *t = c->templates; t; t = t->next)
		if (strcmp(t->name, name) == 0)
			return t;
	return NULL;
}

struct template *template_by_id(struct core *c, uint64_t id)
{
	return index_get(&c->index, id, KIND_TEMPLATE);
}

static void close_fd(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

static void template_free(struct object *o)
{
	struct template *t = (struct template *)o;
	struct template_private *p = t->p;

	config_clear(&t->config);
	free(t->config_text);
	close_fd(&t->log_fd);
	close_fd(&p->folder);
	close_fd(&p->upload_fd[0]);
	close_fd(&p->upload_fd[1]);
	free(p->path);
	free(p->kernel_version);
	free(p->digest);
	free(p->rootfs_kind);
	free(p);
	free(t);
}

static struct template *template_alloc(struct core *c, const char *name)
{
	struct template *t = calloc(1, sizeof(*t));
	struct template_private *p = calloc(1, sizeof(*p));

	if (!t || !p) {
		free(t);
		free(p);
		return NULL;
	}
	t->core = c;
	t->p = p;
	t->log_fd = p->folder = p->upload_fd[0] = p->upload_fd[1] = -1;
	snprintf(t->name, sizeof(t->name), "%s", name);
	t->object.free = template_free;
	return t;
}

static int open_files(struct template *t, struct err *e)
{
	struct template_private *p = t->p;

	snprintf(p->folder_name, sizeof(p->folder_name), "%llu", (unsigned long long)t->object.id);
	if (asprintf(&p->path, "%s/templates/%s", t->core->state, p->folder_name) < 0) {
		p->path = NULL;
		return err_set(e, ENOMEM, "out of memory");
	}
	if (mkdirat(t->core->templates_fd, p->folder_name, 0700) < 0 && errno != EEXIST)
		return err_set(e, errno, "cannot make the template's folder: %s", strerror(errno));
	p->folder = openat(t->core->templates_fd, p->folder_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (p->folder < 0)
		return err_set(e, errno, "cannot open the template's folder: %s", strerror(errno));
	for (int i = UPLOAD_ROOTFS; i <= UPLOAD_KERNEL; i++)
		p->upload_fd[i] = openat(p->folder, upload_names[i], O_RDWR | O_CLOEXEC);
	t->log_fd = openat(p->folder, "log", O_RDWR | O_APPEND | O_CLOEXEC);
	return 0;
}

static void list_append(struct template *t)
{
	struct template **p;

	for (p = &t->core->templates; *p; p = &(*p)->next)
		;
	*p = t;
	t->core->generation++;
}

int template_save(struct template *t, struct err *e)
{
	struct template_private *p = t->p;

	return store_template_put(t->core->store,
				  &(struct store_template){.id = t->object.id,
							   .name = t->name,
							   .state = template_state_names[t->state],
							   .reason = t->reason,
							   .config = t->config_text,
							   .kernel = p->kernel_version,
							   .digest = p->digest,
							   .rootfs_kind = p->rootfs_kind,
							   .baked_ns = p->baked_ns,
							   .bake_ms = p->bake_ms,
							   .changed_ns = (int64_t)t->object.changed_ns},
				  e);
}

int template_move(struct template *t, enum template_state state, const char *reason, struct err *e)
{
	static const bool legal[][TEMPLATE_FAILED + 1] = {
		[TEMPLATE_NEW] = { [TEMPLATE_BAKING] = true },
		[TEMPLATE_BAKING] = { [TEMPLATE_READY] = true, [TEMPLATE_FAILED] = true },
		[TEMPLATE_READY] = { 0 },
		[TEMPLATE_FAILED] = { [TEMPLATE_BAKING] = true },
	};
	json_t *more;

	if (!legal[t->state][state])
		return err_set(e, EBUSY, "a template that is %s cannot become %s", template_state_names[t->state],
			       template_state_names[state]);
	t->state = state;
	snprintf(t->reason, sizeof(t->reason), "%s", reason ? reason : "");
	object_changed(&t->object);
	more = json_pack("{s:s, s:s}", "template", t->name, "state", template_state_names[state]);
	if (more && reason)
		json_object_set_new(more, "reason", json_string(reason));
	core_event(t->core, "template", NULL, more);
	return template_save(t, e);
}

int template_make(struct core *c, const char *name, struct template **out, struct err *e)
{
	struct template *t;
	unsigned n = 0;
	int r;

	if (!name_valid(name, strlen(name)))
		return err_set(
			e, EINVAL,
			"'%.80s' cannot be a template's name: letters, digits, and . _ - after the first, at most %d",
			name, NAME_LIMIT);
	for (t = c->templates; t; t = t->next, n++)
		if (strcmp(t->name, name) == 0)
			return err_set(e, EEXIST, "there is a template %s already", name);
	if (n >= TEMPLATES_MAX)
		return err_set(e, ENOSPC, "there are %u templates: no more are taken", n);
	t = template_alloc(c, name);
	if (!t)
		return err_set(e, ENOMEM, "out of memory");
	r = config_parse("", 0, &t->config, e);
	if (r == 0)
		r = object_init(c, &t->object, KIND_TEMPLATE, t, template_free, e);
	if (r == 0)
		r = open_files(t, e);
	if (r == 0)
		r = template_save(t, e);
	if (r < 0) {
		if (t->p->folder >= 0)
			unlinkat(c->templates_fd, t->p->folder_name, AT_REMOVEDIR);
		index_remove(&c->index, t->object.id);
		template_free(&t->object);
		return r;
	}
	list_append(t);
	core_event(c, "template", NULL, json_pack("{s:s, s:s}", "template", name, "state", "new"));
	*out = t;
	return 0;
}

static void zygote_drop(struct template *t)
{
	struct machine_client *m = t->p->zygote;

	if (!m)
		return;
	t->p->zygote = NULL;
	machine_quit(m);
}

int template_remove(struct template *t, struct err *e)
{
	struct core *c = t->core;
	struct template **p;
	int r;

	if (t->object.gone)
		return err_set(e, ENOENT, "the template is gone");
	if (t->state == TEMPLATE_BAKING || t->p->bake)
		return err_set(e, EBUSY, "template %s is baking", t->name);
	if (t->users)
		return err_set(e, EBUSY, "%u sandbox%s alive came from template %s", t->users,
			       t->users == 1 ? "" : "es", t->name);
	/* The row first: files without a row are removed at the next start, a row without files would be a lie. */
	r = store_template_remove(c->store, t->object.id, e);
	if (r < 0)
		return r;
	zygote_drop(t);
	folder_clear(t->p->folder);
	unlinkat(c->templates_fd, t->p->folder_name, AT_REMOVEDIR);
	for (p = &c->templates; *p != t; p = &(*p)->next)
		;
	*p = t->next;
	core_event(c, "template", NULL, json_pack("{s:s, s:s}", "template", t->name, "state", "removed"));
	object_remove(c, &t->object);
	return 0;
}

static int writable(struct template *t, const char *what, struct err *e)
{
	if (t->object.gone)
		return err_set(e, ENOENT, "the template is gone");
	if (t->state == TEMPLATE_BAKING || t->p->bake)
		return err_set(e, EBUSY, "template %s is baking: its %s cannot be changed", t->name, what);
	if (t->state == TEMPLATE_READY)
		return err_set(e, EBUSY, "template %s is baked: its %s cannot be changed any more", t->name, what);
	return 0;
}

int template_config_write(struct template *t, const char *text, size_t n, struct err *e)
{
	struct config c;
	char *copy;
	int r = writable(t, "config", e);

	if (r == 0)
		r = config_parse(text, n, &c, e);
	if (r < 0)
		return r;
	copy = n ? strndup(text, n) : NULL;
	if (n && !copy) {
		config_clear(&c);
		return err_set(e, ENOMEM, "out of memory");
	}
	config_clear(&t->config);
	t->config = c;
	free(t->config_text);
	t->config_text = copy;
	object_changed(&t->object);
	return template_save(t, e);
}

int template_upload(struct template *t, enum template_upload which, struct err *e)
{
	struct template_private *p = t->p;
	int r = writable(t, upload_names[which], e);

	if (r < 0)
		return r;
	if (p->upload_fd[which] < 0)
		p->upload_fd[which] = openat(p->folder, upload_names[which], O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (p->upload_fd[which] < 0)
		return err_set(e, errno, "cannot make the template's %s: %s", upload_names[which], strerror(errno));
	object_changed(&t->object);
	return p->upload_fd[which];
}

int template_upload_read_fd(struct template *t, enum template_upload which)
{
	return t->p->upload_fd[which];
}

int template_folder_fd(struct template *t)
{
	return t->p->folder;
}

static off_t size_of(int fd)
{
	struct stat st;

	return fd >= 0 && fstat(fd, &st) == 0 ? st.st_size : 0;
}

off_t template_upload_size(struct template *t, enum template_upload which)
{
	return size_of(t->p->upload_fd[which]);
}

static void add_size(json_t *sizes, struct template *t, const char *file, const char *key, const char *allocated)
{
	struct stat st;

	if (fstatat(t->p->folder, file, &st, 0) < 0)
		return;
	json_object_set_new(sizes, key, json_integer(st.st_size));
	if (allocated)
		json_object_set_new(sizes, allocated, json_integer(st.st_blocks * 512));
}

static void add_digests(json_t *j, const char *digest)
{
	char memory[65], disk[65], state[65];

	if (digest && sscanf(digest, "%64s %64s %64s", memory, disk, state) == 3)
		json_object_set_new(j, "digests",
				    json_pack("{s:s, s:s, s:s}", "memory", memory, "disk", disk, "state", state));
}

char *template_info(struct template *t)
{
	struct template_private *p = t->p;
	json_t *j = json_pack("{s:I, s:s, s:s, s:i, s:I, s:I, s:i}", "id", (json_int_t)t->object.id, "name", t->name,
			      "state", template_state_names[t->state], "vcpus", (int)t->config.vcpus, "memory_mb",
			      (json_int_t)t->config.memory_mb, "disk_mb", (json_int_t)t->config.disk_mb, "sandboxes",
			      (int)t->users);
	json_t *sizes = json_object();
	char *text, *line = NULL, time[32];
	time_t baked = (time_t)(p->baked_ns / 1000000000);
	struct tm tm;

	if (t->reason[0])
		json_object_set_new(j, "reason", json_string(t->reason));
	if (p->kernel_version)
		json_object_set_new(j, "kernel", json_string(p->kernel_version));
	if (p->rootfs_kind && *p->rootfs_kind)
		json_object_set_new(j, "rootfs", json_string(p->rootfs_kind));
	if (t->state == TEMPLATE_READY) {
		gmtime_r(&baked, &tm);
		strftime(time, sizeof(time), "%Y-%m-%dT%H:%M:%SZ", &tm);
		json_object_set_new(j, "baked", json_string(time));
		json_object_set_new(j, "bake_ms", json_integer(p->bake_ms));
		add_digests(j, p->digest);
	}
	add_size(sizes, t, "rootfs", "rootfs", NULL);
	add_size(sizes, t, "kernel", "kernel", NULL);
	if (t->state == TEMPLATE_READY) {
		add_size(sizes, t, "memory.img", "memory", "memory_allocated");
		add_size(sizes, t, "disk.img", "disk", "disk_allocated");
		add_size(sizes, t, "state", "state", NULL);
	}
	json_object_set_new(j, "sizes", sizes);
	text = json_dumps(j, JSON_INDENT(2));
	json_decref(j);
	if (text && asprintf(&line, "%s\n", text) < 0)
		line = NULL;
	free(text);
	return line;
}

void template_say(struct template *t, const char *fmt, ...)
{
	char line[1024];
	va_list ap;
	int n;

	if (t->log_fd < 0)
		return;
	n = snprintf(line, sizeof(line), "[vmenvfs] ");
	va_start(ap, fmt);
	n += vsnprintf(line + n, sizeof(line) - (size_t)n - 1, fmt, ap);
	va_end(ap);
	n = MIN(n, (int)sizeof(line) - 2);
	line[n++] = '\n';
	if (write(t->log_fd, line, (size_t)n) < 0)
		return; /* a log that cannot be written is no reason to fail what it tells of */
}

void template_last_line(struct template *t, char *line, size_t n)
{
	char tail[2048];
	off_t size = size_of(t->log_fd), from = MAX(size - (off_t)sizeof(tail) + 1, 0);
	ssize_t got = t->log_fd >= 0 ? pread(t->log_fd, tail, sizeof(tail) - 1, from) : -1;
	char *p, *save = NULL;

	line[0] = 0;
	if (got <= 0)
		return;
	for (ssize_t i = 0; i < got; i++)
		if (!tail[i] || tail[i] == '\r')
			tail[i] = ' ';
	tail[got] = 0;
	for (p = strtok_r(tail, "\n", &save); p; p = strtok_r(NULL, "\n", &save))
		if (strncmp(p, "[vmenvfs]", 9) != 0 && strspn(p, " ") != strlen(p))
			snprintf(line, n, "%s", p);
}

void template_agent_line(struct template *t, char *line, size_t n)
{
	static const char mark[] = "vmenv-agent: ";
	char tail[4096], *p, *found = NULL;
	off_t size = size_of(t->log_fd), from = MAX(size - (off_t)sizeof(tail) + 1, 0);
	ssize_t got = t->log_fd >= 0 ? pread(t->log_fd, tail, sizeof(tail) - 1, from) : -1;

	line[0] = 0;
	if (got <= 0)
		return;
	for (ssize_t i = 0; i < got; i++)
		if (!tail[i])
			tail[i] = ' ';
	tail[got] = 0;
	for (p = tail; (p = strstr(p, mark)); p += sizeof(mark) - 1)
		found = p;
	if (found)
		snprintf(line, n, "%.*s", (int)strcspn(found, "\r\n"), found);
}

static void zygote_ended(struct machine_client *m, const char *sentence)
{
	struct template *t = m->arg;
	char line[256] = "";

	t->p->zygote = NULL;
	if (!m->hello)
		template_last_line(t, line, sizeof(line));
	template_say(t, "the template's machine ended: %s", sentence);
	/* Those who wait for a fork of it are told by their call, which has failed with this sentence. */
	core_event(t->core, "zygote-ended", NULL,
		   json_pack("{s:s, s:s, s:s}", "template", t->name, "reason", sentence, "log", line));
}

static int zygote_start(struct template *t, struct err *e)
{
	struct core *c = t->core;
	struct template_private *p = t->p;
	AUTO_FREE char *state = NULL, *memory = NULL, *disk = NULL;
	AUTO_CLOSE int listening = -1;
	uint64_t id = store_id(c->store), now = now_ns(CLOCK_MONOTONIC);
	size_t last = ARRAY_SIZE(p->zygote_started) - 1;
	struct machine_client *m;
	pid_t pid;
	int r;

	if (p->zygote_started[last] && now - p->zygote_started[last] < ZYGOTE_STARTS_WITHIN_S * 1000 * MS)
		return err_set(e, EIO, "the machine of template %s has ended %zu times within %d seconds: see its log",
			       t->name, last + 1, ZYGOTE_STARTS_WITHIN_S);
	if (asprintf(&state, "%s/state", p->path) < 0 || asprintf(&memory, "%s/memory.img", p->path) < 0 ||
	    asprintf(&disk, "%s/disk.img", p->path) < 0)
		return err_set(e, ENOMEM, "out of memory");
	listening = machine_listen(&c->machines, id, e);
	if (listening < 0)
		return listening;
	r = machine_connect(&c->machines, id, &m, e);
	if (r < 0)
		return r;
	m->ended = zygote_ended;
	m->arg = t;
	{
		char *argv[] = { c->machine, (char *)"--control", (char *)"3", (char *)"--restore", state,
				 (char *)"--memory-image", memory, (char *)"--disk", disk, NULL };

		r = machine_spawn(c->machine, argv, listening, t->log_fd, &pid, e);
	}
	if (r < 0) {
		/* Nobody has the other end: the client ends by itself. */
		machine_quit(m);
		return r;
	}
	machine_is_child(m, pid);
	memmove(p->zygote_started + 1, p->zygote_started, last * sizeof(p->zygote_started[0]));
	p->zygote_started[0] = now;
	p->zygote = m;
	return 0;
}

int template_zygote(struct template *t, struct machine_client **m, struct err *e)
{
	if (t->object.gone)
		return err_set(e, ENOENT, "template %s is gone", t->name);
	if (!t->p->zygote) {
		int r = zygote_start(t, e);

		if (r < 0)
			return r;
	}
	*m = t->p->zygote;
	return 0;
}

static enum template_state state_named(const char *name)
{
	for (int i = TEMPLATE_NEW; i <= TEMPLATE_FAILED; i++)
		if (strcmp(name, template_state_names[i]) == 0)
			return (enum template_state)i;
	return TEMPLATE_FAILED;
}

struct loading {
	struct core *core;
	struct err *e;
};

static int load(void *arg, const struct store_template *row)
{
	struct loading *l = arg;
	struct template *t = template_alloc(l->core, row->name);
	int r;

	if (!t)
		return err_set(l->e, ENOMEM, "out of memory");
	t->object.id = row->id;
	t->object.changed_ns = (uint64_t)row->changed_ns;
	t->state = state_named(row->state);
	snprintf(t->reason, sizeof(t->reason), "%s", row->reason);
	t->p->baked_ns = row->baked_ns;
	t->p->bake_ms = row->bake_ms;
	t->config_text = *row->config ? strdup(row->config) : NULL;
	t->p->kernel_version = strdup(row->kernel);
	t->p->digest = strdup(row->digest);
	t->p->rootfs_kind = strdup(row->rootfs_kind);
	r = config_parse(row->config, strlen(row->config), &t->config, l->e);
	if (r == 0)
		r = open_files(t, l->e);
	if (r == 0 && index_put(&l->core->index, row->id, KIND_TEMPLATE, t) < 0)
		r = err_set(l->e, ENOMEM, "out of memory");
	if (r < 0) {
		template_free(&t->object);
		return r;
	}
	list_append(t);
	return 0;
}

/* Folders of templates that have no row: removed ones, or made just before a crash. */
static void remove_leftovers(struct core *c)
{
	int fd = openat(c->templates_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), inner;
	DIR *d = fd >= 0 ? fdopendir(fd) : NULL;
	struct dirent *entry;

	if (!d) {
		if (fd >= 0)
			close(fd);
		return;
	}
	while ((entry = readdir(d)) != NULL) {
		if (entry->d_name[0] == '.' || template_by_id(c, strtoull(entry->d_name, NULL, 10)))
			continue;
		inner = openat(c->templates_fd, entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		if (inner < 0)
			continue;
		folder_clear(inner);
		close(inner);
		unlinkat(c->templates_fd, entry->d_name, AT_REMOVEDIR);
	}
	closedir(d);
}

int templates_load(struct core *c, struct err *e)
{
	struct loading l = { c, e };
	int r = store_templates(c->store, load, &l, e);

	if (r < 0)
		return r;
	remove_leftovers(c);
	for (struct template *t = c->templates; t; t = t->next) {
		struct machine_client *m;
		struct err why = { 0 };

		if (t->state == TEMPLATE_BAKING) {
			r = template_move(t, TEMPLATE_FAILED, "interrupted", e);
			if (r < 0)
				return r;
		}
		/* In the background; who creates meanwhile waits in its socket. What fails here is tried again then. */
		if (t->state == TEMPLATE_READY && template_zygote(t, &m, &why) < 0)
			core_fail(c, NULL, "start of a template's machine", &why);
	}
	return 0;
}

void templates_close(struct core *c)
{
	while (c->templates) {
		struct template *t = c->templates;

		c->templates = t->next;
		if (t->p->bake)
			bake_abandon(t->p->bake, "interrupted: the server was stopped");
		zygote_drop(t);
		object_remove(c, &t->object);
	}
}
