/* SPDX-License-Identifier: Apache-2.0 */
/* The core: its folders, its lock, ids, the end of requests, events, errors and figures. */
#include "back.h"

#include <dirent.h>
#include <limits.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#define JOURNAL_BYTES (1u << 20)

static void later_run(struct timer *t)
{
	core_settle(t->arg);
}

void core_settle(struct core *c)
{
	while (c->later) {
		struct later *l = c->later;

		c->later = l->next;
		if (!c->later)
			c->later_tail = &c->later;
		l->fn(l->arg);
		free(l);
	}
}

void core_later(struct core *c, void (*fn)(void *arg), void *arg)
{
	struct later *l = malloc(sizeof(*l));

	if (!l) {
		/* Nothing is lost for want of 24 bytes; the price is a deeper stack. */
		fn(arg);
		return;
	}
	*l = (struct later){ NULL, fn, arg };
	*c->later_tail = l;
	c->later_tail = &l->next;
	/* A timer that is due runs at the end of the loop's turn: no further wait is entered. */
	loop_timer(c->loop, &c->later_timer, 0);
}

struct completion {
	struct op *op; /* NULL: cancelled */
	int status;
	struct err err;
};

static void completion_cancel(struct op *op)
{
	((struct completion *)op->callee)->op = NULL;
}

static void complete(void *arg)
{
	struct completion *p = arg;

	if (p->op) {
		p->op->cancel = NULL;
		p->op->done(p->op, p->status, p->status < 0 ? &p->err : NULL);
	}
	free(p);
}

void op_finish(struct core *c, struct op *op, int status, const struct err *e)
{
	struct completion *p;

	if (!op)
		return;
	p = calloc(1, sizeof(*p));
	if (!p) {
		op->cancel = NULL;
		op->done(op, status, e);
		return;
	}
	p->op = op;
	p->status = status;
	if (e)
		p->err = *e;
	op->callee = p;
	op->cancel = completion_cancel;
	core_later(c, complete, p);
}

void ops_finish(struct core *c, struct op **list, int status, const struct err *e)
{
	while (*list) {
		struct op *op = *list;

		*list = op->next;
		op_finish(c, op, status, e);
	}
}

void op_unlink(struct op **list, struct op *op)
{
	for (; *list; list = &(*list)->next)
		if (*list == op) {
			*list = op->next;
			return;
		}
}

static void wait_cancel(struct op *op)
{
	op_unlink(op->callee, op);
}

void op_wait(struct op **list, struct op *op)
{
	op->next = *list;
	*list = op;
	op->callee = list;
	op->cancel = wait_cancel;
}

int object_init(struct core *c, struct object *o, enum kind kind, void *self, void (*free_it)(struct object *o),
		struct err *e)
{
	o->id = store_id(c->store);
	if (!o->id)
		return err_set(e, EIO, "the store gives no more ids");
	if (index_put(&c->index, o->id, kind, self) < 0)
		return err_set(e, ENOMEM, "out of memory");
	o->free = free_it;
	object_changed(o);
	return 0;
}

void object_changed(struct object *o)
{
	o->changed_ns = now_ns(CLOCK_REALTIME);
}

void object_put(struct object *o)
{
	if (--o->references == 0 && o->gone)
		o->free(o);
}

static void put_later(void *o)
{
	object_put(o);
}

void object_remove(struct core *c, struct object *o)
{
	if (o->gone)
		return;
	index_remove(&c->index, o->id);
	o->gone = true;
	c->generation++;
	core_later(c, put_later, object_get(o));
}

struct journal *core_errors(struct core *c)
{
	return &c->errors;
}

struct journal *core_events(struct core *c)
{
	return &c->events;
}

uint64_t core_generation(struct core *c)
{
	return c->generation;
}

void journal_clear(struct journal *j)
{
	free(j->text);
	j->text = NULL;
	j->bytes = 0;
}

static void format_time(char text[40])
{
	struct timespec ts;
	struct tm tm;
	size_t n;

	clock_gettime(CLOCK_REALTIME, &ts);
	gmtime_r(&ts.tv_sec, &tm);
	n = strftime(text, 40, "%Y-%m-%dT%H:%M:%S", &tm);
	snprintf(text + n, 40 - n, ".%03ldZ", ts.tv_nsec / 1000000);
}

void core_event(struct core *c, const char *kind, const char *sandbox, json_t *more)
{
	AUTO_FREE char *text = NULL;
	char time[40];
	json_t *j;

	format_time(time);
	j = json_pack("{s:s, s:s}", "time", time, "event", kind);
	if (j && sandbox)
		json_object_set_new(j, "sandbox", json_string(sandbox));
	if (j && more)
		json_object_update(j, more);
	text = j ? json_dumps(j, JSON_COMPACT | JSON_REAL_PRECISION(12)) : NULL;
	if (text)
		journal_add(&c->events, text, strlen(text));
	json_decref(j);
	json_decref(more);
}

/*
 * Words of others in a line of ours: control characters are shown ('base\r' is no template, and is seen to be another
 * word than 'base'), not endless, valid UTF-8 is not asked for here.
 */
static void one_line(char *out, size_t room, const char *text)
{
	size_t n = 0;

	for (; *text && n + 5 < room; text++) {
		unsigned char c = (unsigned char)*text;
		const char *letter = strchr("\rr\nn\tt", c);

		if (c >= ' ' && c != 0x7f)
			out[n++] = *text;
		else if (letter)
			n += (size_t)sprintf(out + n, "\\%c", letter[1]);
		else
			n += (size_t)sprintf(out + n, "\\x%02x", c);
	}
	out[n] = 0;
}

void core_fail(struct core *c, const char *sandbox, const char *command, const struct err *e)
{
	char time[40], what[200], why[sizeof(e->text)], line[900];
	const char *name = strerrorname_np(e->code);
	json_t *more;

	format_time(time);
	one_line(what, sizeof(what), command ? command : "-");
	one_line(why, sizeof(why), e->text[0] ? e->text : strerror(e->code));
	snprintf(line, sizeof(line), "%s %s '%s' %s: %s", time, sandbox && *sandbox ? sandbox : "-", what,
		 name ? name : "EIO", why);
	journal_add(&c->errors, line, strlen(line));
	more = json_object();
	/* json_string refuses what is not UTF-8: then the event goes without. */
	json_object_set_new(more, "command", json_string(what));
	json_object_set_new(more, "errno", json_string(name ? name : "EIO"));
	json_object_set_new(more, "sentence", json_string(why));
	core_event(c, "error", sandbox && *sandbox && strcmp(sandbox, "-") != 0 ? sandbox : NULL, more);
}

static uint64_t read_field(const char *path, const char *field)
{
	AUTO_FILE FILE *f = fopen(path, "re");
	char line[256];
	size_t n = strlen(field);

	while (f && fgets(line, sizeof(line), f))
		if (strncmp(line, field, n) == 0 && line[n] == ':')
			return strtoull(line + n + 1, NULL, 10);
	return 0;
}

uint64_t core_available_kb(struct core *c)
{
	pressure_look(&c->pressure);
	return c->pressure.available_kb;
}

/* What the machines that are being made now will take and have not taken yet. */
static uint64_t young_kb(struct core *c)
{
	uint64_t now = now_ns(CLOCK_REALTIME), kb = 0;

	for (struct sandbox *s = c->sandboxes; s; s = s->next) {
		if (s->state == SANDBOX_CREATING)
			kb += MEMORY_PER_MACHINE_KB;
		else if (now < s->created_ns + YOUNG_NS && s->state != SANDBOX_DEAD)
			kb += MEMORY_YOUNG_KB;
	}
	return kb;
}

int core_admit(struct core *c, unsigned n, struct err *e)
{
	uint64_t have = core_available_kb(c);
	uint64_t reserve = MAX(MEMORY_RESERVE_KB, c->pressure.floor_kb + MEMORY_MARGIN_KB) + young_kb(c);
	uint64_t need = reserve + (uint64_t)n * MEMORY_PER_MACHINE_KB;

	if (have && have < need)
		return err_set(
			e, ENOMEM,
			"%u more machine%s would need %llu MB of memory, %llu MB of it a reserve; the host has %llu MB",
			n, n == 1 ? "" : "s", (unsigned long long)(need >> 10),
			(unsigned long long)(reserve >> 10), (unsigned long long)(have >> 10));
	return 0;
}

static unsigned count_entries(int folder)
{
	int fd = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *d = fd >= 0 ? fdopendir(fd) : NULL;
	unsigned n = 0;

	if (!d) {
		if (fd >= 0)
			close(fd);
		return 0;
	}
	while (readdir(d))
		n++;
	closedir(d);
	return n >= 2 ? n - 2 : 0;
}

char *core_stats(struct core *c)
{
	unsigned state[SANDBOX_DEAD + 1] = { 0 }, ready = 0, templates = 0, runs = 0, kept = 0;
	AUTO_CLOSE int fds = open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	char *text = NULL;
	int n;

	for (struct template *t = c->templates; t; t = t->next) {
		templates++;
		ready += t->state == TEMPLATE_READY;
	}
	for (struct sandbox *s = c->sandboxes; s; s = s->next) {
		state[s->state]++;
		runs += s->running;
		for (struct run *r = s->runs; r; r = r->next)
			kept++;
	}
	n = asprintf(&text,
		     "templates %u\ntemplates_ready %u\nsandboxes %u\nsandboxes_creating %u\nsandboxes_running %u\n"
		     "sandboxes_frozen %u\nsandboxes_dead %u\nruns_running %u\nruns_kept %u\ncreates_total %llu\n"
		     "create_failures_total %llu\nforks_total %llu\nfork_failures_total %llu\nresets_total "
		     "%llu\nkills_total %llu\n"
		     "expired_total %llu\ndeaths_total %llu\nout_of_memory_total %llu\n"
		     "runs_total %llu\nmachine_processes %u\nopen_files %u\n"
		     "state_files %u\nserver_rss_kb %llu\nserver_threads %llu\nmemory_available_kb "
		     "%llu\nuptime_seconds %llu\n",
		     templates, ready, state[0] + state[1] + state[2] + state[3] + state[4], state[SANDBOX_CREATING],
		     state[SANDBOX_RUNNING], state[SANDBOX_FROZEN], state[SANDBOX_DEAD], runs, kept,
		     (unsigned long long)c->count.creates, (unsigned long long)c->count.create_failures,
		     (unsigned long long)c->count.forks, (unsigned long long)c->count.fork_failures,
		     (unsigned long long)c->count.resets, (unsigned long long)c->count.kills,
		     (unsigned long long)c->count.expired, (unsigned long long)c->count.deaths,
		     (unsigned long long)c->count.out_of_memory,
		     (unsigned long long)c->count.runs, c->machines.count, fds >= 0 ? count_entries(fds) : 0,
		     count_entries(c->machines.folder) + count_entries(c->consoles_fd) + count_entries(c->outputs_fd),
		     (unsigned long long)read_field("/proc/self/status", "VmRSS"),
		     (unsigned long long)read_field("/proc/self/status", "Threads"),
		     (unsigned long long)core_available_kb(c),
		     (unsigned long long)((now_ns(CLOCK_MONOTONIC) - c->started_ns) / 1000000000));
	return n < 0 ? NULL : text;
}

/* Guests write their console logs themselves; what has grown past the limit starts anew. */
static void sweep(struct timer *t)
{
	static const char note[] = "\n[the console log was full and starts anew here]\n";
	struct core *c = t->arg;
	struct stat st;

	for (struct sandbox *s = c->sandboxes; s; s = s->next)
		if (s->state == SANDBOX_RUNNING && s->console_fd >= 0 && fstat(s->console_fd, &st) == 0 &&
		    st.st_size > CONSOLE_MAX && ftruncate(s->console_fd, 0) == 0 &&
		    write(s->console_fd, note, sizeof(note) - 1) < 0)
			core_event(c, "console-full", s->name, NULL);
	loop_timer(c->loop, t, deadline_ms(5000));
}

void folder_clear(int folder)
{
	int fd = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), inner;
	DIR *d = fd >= 0 ? fdopendir(fd) : NULL;
	struct dirent *entry;

	if (!d) {
		if (fd >= 0)
			close(fd);
		return;
	}
	while ((entry = readdir(d)) != NULL) {
		if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
			continue;
		if (unlinkat(folder, entry->d_name, 0) == 0)
			continue;
		inner = openat(folder, entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		if (inner < 0)
			continue;
		folder_clear(inner);
		close(inner);
		unlinkat(folder, entry->d_name, AT_REMOVEDIR);
	}
	closedir(d);
}

static int make_parents(const char *path)
{
	AUTO_FREE char *copy = strdup(path);

	if (!copy)
		return -ENOMEM;
	for (char *p = copy + 1; *p; p++)
		if (*p == '/') {
			*p = 0;
			if (mkdir(copy, 0755) < 0 && errno != EEXIST)
				return -errno;
			*p = '/';
		}
	return mkdir(copy, 0700) < 0 && errno != EEXIST ? -errno : 0;
}

static int open_folder(int at, const char *name, int *fd, struct err *e)
{
	if (mkdirat(at, name, 0700) < 0 && errno != EEXIST)
		return err_set(e, errno, "cannot make %s in the state folder: %s", name, strerror(errno));
	*fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	return *fd < 0 ? err_set(e, errno, "cannot open %s in the state folder: %s", name, strerror(errno)) : 0;
}

static int take_lock(struct core *c, struct err *e)
{
	char text[24] = { 0 };

	c->lock_fd = openat(c->state_fd, "lock", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (c->lock_fd < 0)
		return err_set(e, errno, "cannot open the lock in %.300s: %s", c->state, strerror(errno));
	if (flock(c->lock_fd, LOCK_EX | LOCK_NB) < 0) {
		if (errno != EWOULDBLOCK)
			return err_set(e, errno, "cannot lock %.300s: %s", c->state, strerror(errno));
		if (pread(c->lock_fd, text, sizeof(text) - 1, 0) < 1)
			strcpy(text, "?");
		text[strcspn(text, "\n")] = 0;
		return err_set(e, EBUSY, "the state folder %.300s is in use by process %s", c->state, text);
	}
	snprintf(text, sizeof(text), "%d\n", (int)getpid());
	if (ftruncate(c->lock_fd, 0) < 0 || pwrite(c->lock_fd, text, strlen(text), 0) < 0)
		return err_set(e, errno, "cannot write to the lock in %.300s: %s", c->state, strerror(errno));
	return 0;
}

/* A relative path would mean something else to a machine process. Files that are missing are found out when used. */
static char *absolute(const char *path)
{
	char *whole = realpath(path, NULL);

	return whole ? whole : strdup(path);
}

static int open_state(struct core *c, const struct core_options *o, struct err *e)
{
	AUTO_FREE char *path = NULL;
	int r = make_parents(o->state);

	if (r < 0)
		return err_set(e, -r, "cannot make the state folder %.300s: %s", o->state, strerror(-r));
	c->state = realpath(o->state, NULL);
	c->state_fd = c->state ? open(c->state, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
	if (c->state_fd < 0)
		return err_set(e, errno, "cannot open the state folder %.300s: %s", o->state, strerror(errno));
	r = take_lock(c, e);
	if (r == 0)
		r = open_folder(c->state_fd, "templates", &c->templates_fd, e);
	if (r == 0)
		r = open_folder(c->state_fd, "machines", &c->machines.folder, e);
	if (r == 0)
		r = open_folder(c->state_fd, "consoles", &c->consoles_fd, e);
	if (r == 0)
		r = open_folder(c->state_fd, "outputs", &c->outputs_fd, e);
	if (r < 0)
		return r;
	if (asprintf(&path, "%s/store.db", c->state) < 0)
		return err_set(e, ENOMEM, "out of memory");
	return store_open(path, c->loop, &c->store, e);
}

int core_job(struct core *c, struct job *j, struct err *e)
{
	return c->closing ? err_set(e, EIO, "the server ends") : job_start(c->workers, j, e);
}

/* Each machine takes three descriptors here, each run in progress three. */
static void raise_limits(void)
{
	struct rlimit l;

	if (getrlimit(RLIMIT_NOFILE, &l) == 0 && l.rlim_cur < l.rlim_max) {
		l.rlim_cur = l.rlim_max;
		setrlimit(RLIMIT_NOFILE, &l);
	}
}

int core_open(const struct core_options *o, struct loop *l, struct core **out, struct err *e)
{
	struct core *c = calloc(1, sizeof(*c));
	int r;

	if (!c)
		return err_set(e, ENOMEM, "out of memory");
	raise_limits();
	/* A machine whose parent has ended becomes our child, to be reaped, wherever the system's init does not see to
	 * that. */
	prctl(PR_SET_CHILD_SUBREAPER, 1);
	c->state_fd = c->lock_fd = c->templates_fd = c->consoles_fd = c->outputs_fd = c->machines.folder = -1;
	c->loop = c->machines.loop = l;
	c->later_tail = &c->later;
	c->later_timer = (struct timer){ .fire = later_run, .arg = c };
	c->sweep = (struct timer){ .fire = sweep, .arg = c };
	c->errors.limit = c->events.limit = JOURNAL_BYTES;
	c->started_ns = now_ns(CLOCK_MONOTONIC);
	c->generation = 1;
	c->kernel = absolute(o->kernel ? o->kernel : "");
	c->initrd = absolute(o->initrd ? o->initrd : "");
	c->machine = absolute(o->machine ? o->machine : "");
	c->workers = workers_new(l);
	r = c->workers && c->kernel && c->initrd && c->machine ? 0 : err_set(e, ENOMEM, "out of memory");
	if (r == 0)
		r = open_state(c, o, e);
	if (r == 0)
		r = recover(c, e);
	if (r == 0)
		r = templates_load(c, e);
	if (r < 0) {
		core_close(c);
		return r;
	}
	loop_timer(l, &c->sweep, deadline_ms(5000));
	pressure_start(c);
	*out = c;
	return 0;
}

static void close_fd(int fd)
{
	if (fd >= 0)
		close(fd);
}

void core_close(struct core *c)
{
	if (!c)
		return;
	c->closing = true;
	pressure_stop(c);
	sandboxes_close(c);
	templates_close(c);
	core_settle(c);
	reapers_close(c);
	machines_close(&c->machines);
	workers_free(c->workers);
	core_settle(c);
	if (c->store) {
		folder_clear(c->consoles_fd);
		folder_clear(c->outputs_fd);
		store_close(c->store);
	}
	loop_timer_cancel(c->loop, &c->sweep);
	loop_timer_cancel(c->loop, &c->later_timer);
	index_clear(&c->index);
	journal_clear(&c->errors);
	journal_clear(&c->events);
	close_fd(c->templates_fd);
	close_fd(c->consoles_fd);
	close_fd(c->outputs_fd);
	close_fd(c->machines.folder);
	close_fd(c->state_fd);
	close_fd(c->lock_fd); /* last: the state is another server's from here on */
	free(c->state);
	free(c->kernel);
	free(c->initrd);
	free(c->machine);
	free(c);
}
