/* SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sysinfo.h>
#include <sys/wait.h>

#include <vmenv/agent.h>
#include <vmenv/util.h>

#include "connection.h"
#include "run.h"
#include "child.h"

#define SCRIPT_ARGUMENT_MAX 100000u /* longer scripts do not fit an argument (128 KiB) and go through a file */
#define PIPE_SIZE 65536u	    /* what a pipe takes without a reader */
#define PIPE_LARGE (512u << 10)	    /* of a pipe that was found full: fewer turns for whoever prints much */
#define READS_AT_ONCE 4		    /* of SCRATCH_SIZE, before others get their turn */
#define KILL_GRACE_NS 2000000000u   /* a killed process that is not gone by then is reported all the same */
#define DEFAULT_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

/* The read end of a pipe that a background process of a finished run still holds. */
struct leftover {
	struct watch watch;
	struct agent *agent;
	struct leftover *next;
};

static void leftover_close(struct leftover *l)
{
	struct agent *a = l->agent;

	for (struct leftover **p = &a->leftovers; *p; p = &(*p)->next)
		if (*p == l) {
			*p = l->next;
			break;
		}
	a->leftover_count--;
	loop_remove(a->loop, &l->watch);
	close(l->watch.fd);
	free(l);
}

static void leftover_ready(struct watch *w, uint32_t events)
{
	struct leftover *l = w->arg;

	for (int i = 0; i < READS_AT_ONCE; i++) {
		ssize_t n = read(w->fd, l->agent->scratch, SCRATCH_SIZE);

		if (n < 0 && (errno == EAGAIN || errno == EINTR))
			return;
		if (n <= 0) {
			leftover_close(l);
			return;
		}
	}
}

/* Takes the descriptor. With too many of them it is closed, and the writer gets SIGPIPE after all. */
static void leftover_new(struct agent *a, int fd)
{
	struct leftover *l = a->leftover_count < LEFTOVERS_MAX ? malloc(sizeof(*l)) : NULL;

	if (!l) {
		close(fd);
		return;
	}
	*l = (struct leftover){ .watch = { .fd = fd, .ready = leftover_ready, .arg = l }, .agent = a, .next = a->leftovers };
	if (loop_add(a->loop, &l->watch, EPOLLIN) < 0) {
		close(fd);
		free(l);
		return;
	}
	a->leftovers = l;
	a->leftover_count++;
}

static void channel_watch(struct channel *c, bool on)
{
	struct loop *loop = c->run->agent->loop;

	if (c->watched == on || c->watch.fd < 0)
		return;
	/* Taken off altogether: with no events asked for, a hang-up would still wake us for ever. */
	if (on)
		c->watched = loop_add(loop, &c->watch, EPOLLIN) == 0;
	else
		loop_remove(loop, &c->watch);
	if (!on)
		c->watched = false;
}

static void channel_close(struct channel *c)
{
	if (c->watch.fd < 0)
		return;
	channel_watch(c, false);
	close(c->watch.fd);
	c->watch.fd = -1;
}

/* Moves from the pipe to the stream what may be moved. */
static void channel_read(struct channel *c)
{
	struct run *r = c->run;
	bool draining = r->state == RUN_DRAINING;

	for (int i = 0; i < READS_AT_ONCE && c->watch.fd >= 0; i++) {
		size_t want = MIN(stream_accepts(&c->stream), SCRATCH_SIZE);
		ssize_t n;

		if (draining)
			want = MIN(want, c->drain);
		if (want == 0) {
			channel_watch(c, false);
			return;
		}
		n = read(c->watch.fd, r->agent->scratch, want);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN) {
			c->drain = 0;
			break;
		}
		if (n <= 0) {
			channel_close(c);
			return;
		}
		if (n == PIPE_SIZE && !c->enlarged)
			c->enlarged = fcntl(c->watch.fd, F_SETPIPE_SZ, PIPE_LARGE) != 0; /* once, whether it may or not */
		stream_put(&c->stream, r->agent->scratch, (size_t)n);
		c->drain -= draining ? MIN((uint64_t)n, c->drain) : 0;
	}
	channel_watch(c, !draining || c->drain > 0);
}

static void channel_finish(struct channel *c)
{
	stream_end(&c->stream);
	if (c->watch.fd < 0)
		return;
	/* Mostly nobody holds it any more. */
	if (read(c->watch.fd, c->run->agent->scratch, SCRATCH_SIZE) == 0) {
		channel_close(c);
		return;
	}
	channel_watch(c, false);
	leftover_new(c->run->agent, steal_fd(&c->watch.fd));
}

static void run_check(struct run *r)
{
	if (r->state != RUN_DRAINING || (r->out.watch.fd >= 0 && r->out.drain) || (r->err.watch.fd >= 0 && r->err.drain))
		return;
	r->state = RUN_FINISHED;
	channel_finish(&r->out);
	channel_finish(&r->err);
}

/* Lets the server know: at once when there is much or it is over, else together with what follows in a moment. */
static void run_tell(struct run *r, const struct channel *c)
{
	if (!r->connection)
		return;
	if (r->state == RUN_FINISHED || stream_available(&c->stream) - c->sent >= 4096)
		connection_pump(r->connection);
	else
		connection_pump_soon(r->connection);
}

static void channel_ready(struct watch *w, uint32_t events)
{
	struct channel *c = w->arg;

	channel_read(c);
	run_check(c->run);
	run_tell(c->run, c);
}

void run_continue(struct run *r)
{
	if (r->state != RUN_RUNNING && r->state != RUN_DRAINING)
		return;
	if (r->out.watch.fd >= 0 && !r->out.watched)
		channel_read(&r->out);
	if (r->err.watch.fd >= 0 && !r->err.watched)
		channel_read(&r->err);
	run_check(r);
}

/* The first process has ended, or will not end. The caller lets the connection know. */
static void run_over(struct run *r)
{
	struct channel *both[] = { &r->out, &r->err };

	loop_timer_cancel(r->agent->loop, &r->timer);
	r->ended = now_ns(CLOCK_MONOTONIC);
	r->state = RUN_DRAINING;
	for (size_t i = 0; i < ARRAY_SIZE(both); i++) {
		int n = 0;

		/* Not "until it is empty": a background process could fill it for ever. */
		if (both[i]->watch.fd >= 0 && ioctl(both[i]->watch.fd, FIONREAD, &n) == 0)
			both[i]->drain = (uint64_t)MAX(n, 0);
		if (both[i]->drain)
			channel_read(both[i]);
	}
	run_check(r);
}

/*
 * Without cgroups (outside of a guest) what can be found is killed: the session, and descendants whose parents still
 * live. One that lost its parent and made a session of its own is not found.
 */
static bool descends(const pid_t *parents, pid_t pid, pid_t from, pid_t max)
{
	for (int depth = 0; depth < 1000 && pid > 1 && pid <= max; depth++, pid = parents[pid])
		if (pid == from)
			return true;
	return false;
}

static void kill_by_looking(pid_t root)
{
	enum { MAX_PID = 4194304 };
	pid_t *parents = mmap(NULL, (MAX_PID + 1) * sizeof(*parents), PROT_READ | PROT_WRITE,
			      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	pid_t *sessions = mmap(NULL, (MAX_PID + 1) * sizeof(*sessions), PROT_READ | PROT_WRITE,
			       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	DIR *proc = opendir("/proc");
	struct dirent *d;

	kill(-root, SIGKILL);
	kill(root, SIGKILL);
	for (int pass = 0; pass < 2 && proc && parents != MAP_FAILED && sessions != MAP_FAILED; pass++) {
		rewinddir(proc);
		while ((d = readdir(proc))) {
			long pid = strtol(d->d_name, NULL, 10);
			char path[64], text[512], *s;
			int parent = 0, group = 0, session = 0;
			AUTO_CLOSE int fd = -1;
			ssize_t n;

			if (pid <= 1 || pid > MAX_PID)
				continue;
			if (pass == 1) {
				if (sessions[pid] == root || descends(parents, (pid_t)pid, root, MAX_PID))
					kill((pid_t)pid, SIGKILL);
				continue;
			}
			snprintf(path, sizeof(path), "/proc/%ld/stat", pid);
			fd = open(path, O_RDONLY | O_CLOEXEC);
			n = fd < 0 ? 0 : read(fd, text, sizeof(text) - 1);
			text[MAX(n, 0)] = '\0';
			s = strrchr(text, ')');
			if (s && sscanf(s + 1, " %*c %d %d %d", &parent, &group, &session) == 3) {
				parents[pid] = parent;
				sessions[pid] = session;
			}
		}
	}
	if (proc)
		closedir(proc);
	if (parents != MAP_FAILED)
		munmap(parents, (MAX_PID + 1) * sizeof(*parents));
	if (sessions != MAP_FAILED)
		munmap(sessions, (MAX_PID + 1) * sizeof(*sessions));
}

void run_signal(struct run *r, int signal)
{
	if (r->state == RUN_COLLECTING)
		return;
	if (signal == SIGKILL && r->cgroup >= 0)
		cgroups_kill(&r->agent->cgroups, r->cgroup);
	else if (r->pid > 0 && signal == SIGKILL)
		kill_by_looking(r->pid);
	else if (r->pid > 0 && signal > 0 && signal <= SIGRTMAX)
		kill(-r->pid, signal);
}

static void run_hopeless(struct timer *t)
{
	struct run *r = t->arg;

	r->exit_code = r->timed_out ? 124 : 128 + SIGKILL;
	r->signal = SIGKILL;
	run_over(r);
	if (r->connection)
		connection_pump(r->connection);
}

static void run_deadline(struct timer *t)
{
	struct run *r = t->arg;

	r->timed_out = true;
	run_signal(r, SIGKILL);
	r->timer.fire = run_hopeless;
	loop_timer(r->agent->loop, &r->timer, now_ns(CLOCK_MONOTONIC) + KILL_GRACE_NS);
}

static void run_exited(struct run *r, int code, int status)
{
	r->pid = -1;
	if (r->state != RUN_RUNNING)
		return;
	r->signal = code == CLD_EXITED ? 0 : status;
	r->exit_code = r->timed_out ? 124 : code == CLD_EXITED ? status : 128 + status;
	run_over(r);
	if (r->connection)
		connection_pump(r->connection);
}

bool run_reaped(struct agent *a, pid_t pid, int code, int status)
{
	for (struct run *r = a->runs; r; r = r->next)
		if (r->pid == pid) {
			run_exited(r, code, status);
			return true;
		}
	return false;
}

void runs_lost(struct agent *a)
{
	for (struct run *r = a->runs, *next; r; r = next) {
		next = r->next;
		if (r->state == RUN_RUNNING)
			run_exited(r, CLD_KILLED, SIGKILL);
	}
}

struct run *run_find(struct agent *a, uint64_t number)
{
	for (struct run *r = a->runs; r; r = r->next)
		if (r->request.run == number)
			return r;
	return NULL;
}

/* A run whose server never came back for it gives way to a new one. */
static void make_room(struct agent *a)
{
	struct run *oldest = NULL;

	for (struct run *r = a->runs; r; r = r->next)
		if (r->state == RUN_FINISHED && !r->connection && (!oldest || r->ended < oldest->ended))
			oldest = r;
	if (oldest)
		run_free(oldest);
}

static void forget_before(struct agent *a, uint64_t oldest)
{
	for (struct run *r = a->runs, *next; r; r = next) {
		next = r->next;
		if (r->state == RUN_FINISHED && !r->connection && r->request.run < oldest)
			run_free(r);
	}
}

static void channel_init(struct channel *c, struct run *r)
{
	*c = (struct channel){ .run = r, .watch = { .fd = -1, .ready = channel_ready, .arg = c } };
	stream_init(&c->stream, r->request.output_limit, &r->agent->budget);
}

static int memory_file(const char *name, struct err *e)
{
	int fd = memfd_create(name, MFD_CLOEXEC);

	return fd < 0 ? err_set(e, errno, "a memory file: %s", strerror(errno)) : fd;
}

static int prepare_script(struct run *r, struct err *e)
{
	if (r->request.argv)
		return 0;
	if (r->request.script_bytes >= SCRIPT_ARGUMENT_MAX) {
		r->script_fd = memory_file("script", e);
		return MIN(r->script_fd, 0);
	}
	r->script = malloc(r->request.script_bytes + 1);
	return r->script ? 0 : err_set(e, ENOMEM, "out of memory");
}

/*
 * A little stdin fits a pipe and is one; more is a file, whole before the run starts: so a run that does not read it holds
 * nothing up, least of all the acknowledgements behind it.
 */
static int prepare_input(struct run *r, struct err *e)
{
	struct sysinfo si;
	int p[2];

	if (r->request.stdin_bytes == 0) {
		r->input_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
		return r->input_fd < 0 ? err_set(e, errno, "/dev/null: %s", strerror(errno)) : 0;
	}
	if (r->request.stdin_bytes <= PIPE_SIZE) {
		if (pipe2(p, O_CLOEXEC) < 0)
			return err_set(e, errno, "a pipe: %s", strerror(errno));
		r->input_fd = p[0];
		r->input_feed = p[1];
		fcntl(p[1], F_SETFL, O_NONBLOCK);
		return 0;
	}
	if (sysinfo(&si) == 0 && r->request.stdin_bytes > (uint64_t)si.totalram * si.mem_unit / 4)
		return err_set(e, EFBIG, "stdin of %llu bytes is over a quarter of the machine's memory",
			       (unsigned long long)r->request.stdin_bytes);
	r->input_feed = memory_file("stdin", e);
	return MIN(r->input_feed, 0);
}

int run_new(struct agent *a, struct request *q, struct run **out, struct err *e)
{
	struct run *r;
	int rc;

	if (run_find(a, q->run)) {
		rc = err_set(e, EEXIST, "run %llu is there already", (unsigned long long)q->run);
		request_free(q);
		return rc;
	}
	forget_before(a, q->oldest);
	if (a->run_count == AGENT_RUNS_MAX)
		make_room(a);
	r = a->run_count < AGENT_RUNS_MAX ? calloc(1, sizeof(*r)) : NULL;
	if (!r) {
		request_free(q);
		return err_set(e, EAGAIN, "%d runs are in progress, which is the most there can be", a->run_count);
	}
	r->agent = a;
	r->state = RUN_COLLECTING;
	r->request = *q;
	r->script_fd = r->input_fd = r->input_feed = r->pid = r->cgroup = -1;
	channel_init(&r->out, r);
	channel_init(&r->err, r);
	r->next = a->runs;
	a->runs = r;
	a->run_count++;
	rc = prepare_script(r, e);
	if (rc == 0)
		rc = prepare_input(r, e);
	if (rc < 0)
		run_free(r);
	else
		*out = r;
	return rc;
}

void run_free(struct run *r)
{
	struct agent *a = r->agent;

	for (struct run **p = &a->runs; *p; p = &(*p)->next)
		if (*p == r) {
			*p = r->next;
			break;
		}
	a->run_count--;
	loop_timer_cancel(a->loop, &r->timer);
	channel_close(&r->out);
	channel_close(&r->err);
	stream_free(&r->out.stream);
	stream_free(&r->err.stream);
	if (r->script_fd >= 0)
		close(r->script_fd);
	if (r->input_fd >= 0)
		close(r->input_fd);
	if (r->input_feed >= 0)
		close(r->input_feed);
	free(r->script);
	if (r->cgroup >= 0)
		cgroups_give(&a->cgroups, r->cgroup);
	request_free(&r->request);
	free(r);
}

static int write_whole(int fd, const uint8_t *data, size_t n, struct err *e)
{
	while (n > 0) {
		ssize_t w = write(fd, data, n);

		if (w < 0 && errno == EINTR)
			continue;
		if (w <= 0)
			return err_set(e, w < 0 ? errno : EIO, "keeping the script or stdin: %s", strerror(errno));
		data += w;
		n -= (size_t)w;
	}
	return 0;
}

int run_data(struct run *r, const uint8_t *data, size_t n, struct err *e)
{
	size_t script = (size_t)MIN(n, r->request.script_bytes - r->script_have);
	int rc = 0;

	if (n - script > r->request.stdin_bytes - r->stdin_have)
		return err_set(e, EPROTO, "more bytes than the run announced");
	if (r->script)
		memcpy(r->script + r->script_have, data, script);
	else if (script)
		rc = write_whole(r->script_fd, data, script, e);
	r->script_have += script;
	if (rc == 0 && n > script)
		rc = write_whole(r->input_feed, data + script, n - script, e);
	r->stdin_have += n - script;
	return rc;
}

/* A read-only second opening of a memory file, at its start. */
static int reopen(int fd, struct err *e)
{
	char path[40];
	int again;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	again = open(path, O_RDONLY | O_CLOEXEC);
	return again < 0 ? err_set(e, errno, "%s: %s", path, strerror(errno)) : again;
}

/* What spawn() is to be given, in memory of its own. */
struct plan {
	struct command command;
	struct user user;
	char *arena;        /* strings of env and paths */
	char **env;
	const char **argv, **paths;
};

static void plan_free(struct plan *p)
{
	free(p->arena);
	free(p->env);
	free(p->argv);
	free(p->paths);
}

static int plan_env(struct plan *p, json_t *env, struct err *e)
{
	const struct {
		const char *name, *value;
	} defaults[] = {
		{ "HOME", p->user.home }, { "USER", p->user.name }, { "LOGNAME", p->user.name }, { "SHELL", p->user.shell },
	};
	size_t bytes = 0, n = 0;
	const char *key;
	json_t *value;
	char *at;

	json_object_foreach(env, key, value)
		bytes += strlen(key) + json_string_length(value) + 2;
	for (size_t i = 0; i < ARRAY_SIZE(defaults); i++)
		bytes += strlen(defaults[i].name) + strlen(defaults[i].value) + 2;
	p->arena = at = malloc(bytes);
	p->env = calloc(json_object_size(env) + ARRAY_SIZE(defaults) + 1, sizeof(*p->env));
	if (!p->arena || !p->env)
		return err_set(e, ENOMEM, "out of memory");
	json_object_foreach(env, key, value) {
		p->env[n++] = at;
		at = stpcpy(stpcpy(stpcpy(at, key), "="), json_string_value(value)) + 1;
	}
	for (size_t i = 0; i < ARRAY_SIZE(defaults); i++)
		if (!json_object_get(env, defaults[i].name)) {
			p->env[n++] = at;
			at = stpcpy(stpcpy(stpcpy(at, defaults[i].name), "="), defaults[i].value) + 1;
		}
	return 0;
}

/* The files a command's name may mean: itself if it has a slash, else one in each folder of PATH. */
static int plan_paths(struct plan *p, const char *name, const char *path, struct err *e)
{
	size_t folders = 1, n = 0, length = strlen(name);
	char *at;

	for (const char *s = path; *s; s++)
		folders += *s == ':';
	/* One block: the pointers, then the strings. */
	p->paths = malloc((folders + 1) * sizeof(*p->paths) + strlen(path) + folders * (length + 3));
	if (!p->paths)
		return err_set(e, ENOMEM, "out of memory");
	at = (char *)(p->paths + folders + 1);
	if (strchr(name, '/') || !name[0]) {
		p->paths[n++] = name;
	} else {
		for (const char *s = path;; s++) {
			size_t folder = strcspn(s, ":");

			p->paths[n++] = at;
			at += sprintf(at, "%.*s%s%s", (int)folder, s, folder ? "/" : "./", name) + 1;
			s += folder;
			if (!*s)
				break;
		}
	}
	p->paths[n] = NULL;
	return 0;
}

static int plan_arguments(struct plan *p, struct run *r, struct err *e)
{
	static const char script_path[] = "/proc/self/fd/3";
	const struct request *q = &r->request;
	size_t n = 1;

	_Static_assert(SCRIPT_FD == 3, "script_path names it");
	/* argv[-1] is spawn's; a long script's three words or the command's own. */
	p->argv = calloc(q->argc + 6, sizeof(*p->argv));
	if (!p->argv)
		return err_set(e, ENOMEM, "out of memory");
	p->command.argv = p->argv + 1;
	if (q->argv) {
		memcpy(p->argv + 1, q->argv, q->argc * sizeof(*q->argv));
		return 0;
	}
	p->argv[n++] = "/bin/sh";
	if (r->script_fd >= 0) {
		p->argv[n++] = script_path;
	} else {
		p->argv[n++] = "-c";
		/* A script may begin with a minus. */
		if (r->script[0] == '-' || r->script[0] == '+')
			p->argv[n++] = "--";
		p->argv[n++] = r->script;
	}
	return 0;
}

/* A script with a NUL in it cannot be an argument. */
static int settle_script(struct run *r, struct err *e)
{
	int rc;

	if (!r->script)
		return 0;
	r->script[r->script_have] = '\0';
	if (!memchr(r->script, 0, r->script_have))
		return 0;
	r->script_fd = memory_file("script", e);
	if (r->script_fd < 0)
		return r->script_fd;
	rc = write_whole(r->script_fd, (const uint8_t *)r->script, r->script_have, e);
	free(steal_ptr(&r->script));
	return rc;
}

/* Says on the run's own stderr why it did not run, as a shell would. */
static void explain(struct run *r, const struct plan *p)
{
	const struct command *c = &p->command;
	char text[600];
	int n = 0;

	switch (c->failed) {
	case SPAWN_STARTED:
		return;
	case SPAWN_CWD:
		n = snprintf(text, sizeof(text), "vmenv-agent: cwd %.300s: %s\n", c->cwd, strerror(c->failed_errno));
		break;
	case SPAWN_USER:
		n = snprintf(text, sizeof(text), "vmenv-agent: cannot become user %s: %s\n", p->user.name,
			     strerror(c->failed_errno));
		break;
	case SPAWN_EXEC:
		n = snprintf(text, sizeof(text), "vmenv-agent: %.300s: %s\n", c->argv[0],
			     c->failed_errno == ENOENT && !strchr(c->argv[0], '/') ? "command not found" :
										    strerror(c->failed_errno));
		break;
	case SPAWN_SANDBOX:
	case SPAWN_SETUP:
		n = snprintf(text, sizeof(text), "vmenv-agent: cannot prepare the process: %s\n", strerror(c->failed_errno));
		break;
	}
	if ((size_t)n < sizeof(text) && (size_t)n <= stream_accepts(&r->err.stream))
		stream_put(&r->err.stream, (const uint8_t *)text, (size_t)n);
}

static int open_pipe(struct channel *c, const struct user *u, int *write_end, struct err *e)
{
	int p[2];

	if (pipe2(p, O_CLOEXEC) < 0)
		return err_set(e, errno, "a pipe: %s", strerror(errno));
	fcntl(p[0], F_SETFL, O_NONBLOCK);
	/* Else /dev/stdout could not be opened by anybody but root. */
	if (u && u->uid != 0 && fchown(p[1], u->uid, u->gid) < 0) {
		close(p[0]);
		close(p[1]);
		return err_set(e, errno, "a pipe: %s", strerror(errno));
	}
	c->watch.fd = p[0];
	*write_end = p[1];
	return 0;
}

static int run_spawn(struct run *r, struct plan *p, struct err *e)
{
	struct agent *a = r->agent;
	struct command *c = &p->command;
	AUTO_CLOSE int out = -1, err = -1;
	pid_t pid;
	int rc;

	rc = open_pipe(&r->out, c->user, &out, e);
	if (rc == 0)
		rc = open_pipe(&r->err, c->user, &err, e);
	if (rc < 0)
		return rc;
	r->cgroup = cgroups_take(&a->cgroups);
	if (r->cgroup < 0 && r->cgroup != -ENOTSUP) {
		rc = r->cgroup;
		r->cgroup = -1;
		return err_set(e, -rc, "no cgroup for the run: %s", strerror(-rc));
	}
	r->cgroup = MAX(r->cgroup, -1);
	c->input = r->input_fd;
	c->output = out;
	c->error = err;
	c->script = r->script_fd;
	c->sandbox = a->sandbox.pidfd;
	c->cgroup = r->cgroup >= 0 ? a->cgroups.items[r->cgroup].fd : -1;
	c->sandbox_cgroup = a->cgroups.parent;
	r->started = now_ns(CLOCK_MONOTONIC);
	pid = spawn(c, a->stack, e);
	/* What the kernel says of a PID namespace that has ended. */
	if (pid == -ENOMEM && sandbox_ending(&a->sandbox))
		return err_set(e, EIO, "the guest is going down: nothing can be started in it");
	if (pid < 0)
		return pid;
	r->pid = pid;
	return 0;
}

static int run_start(struct run *r, struct err *e)
{
	struct plan p = { 0 };
	struct request *q = &r->request;
	const char *path;
	struct err why = { 0 };
	int rc;

	rc = user_find(&p.user, r->agent->disk, q->user, &why);
	if (rc < 0) {
		/* As for a command that cannot be run: it is the run that fails, and says so where it would print. */
		stream_put(&r->err.stream, (const uint8_t *)why.text, MIN(strlen(why.text), stream_accepts(&r->err.stream)));
		stream_put(&r->err.stream, (const uint8_t *)"\n", MIN(1, stream_accepts(&r->err.stream)));
		r->exit_code = 126;
		r->started = now_ns(CLOCK_MONOTONIC);
		run_over(r);
		return 0;
	}
	/* Outside of a guest the agent may be an ordinary user, and then is only that. */
	p.command.user = geteuid() == 0 || p.user.uid != geteuid() ? &p.user : NULL;
	p.command.cwd = q->cwd;
	rc = settle_script(r, e);
	if (rc == 0)
		rc = plan_env(&p, q->env, e);
	if (rc == 0)
		rc = plan_arguments(&p, r, e);
	path = json_string_value(json_object_get(q->env, "PATH"));
	if (rc == 0)
		rc = plan_paths(&p, p.command.argv[0], path ? path : DEFAULT_PATH, e);
	p.command.paths = p.paths;
	p.command.envp = p.env;
	if (rc == 0)
		rc = run_spawn(r, &p, e);
	if (rc == 0) {
		r->state = RUN_RUNNING;
		explain(r, &p);
		r->timer = (struct timer){ .fire = run_deadline, .arg = r };
		if (q->timeout_ms)
			loop_timer(r->agent->loop, &r->timer, r->started + q->timeout_ms * 1000000);
		channel_watch(&r->out, true);
		channel_watch(&r->err, true);
	}
	plan_free(&p);
	return rc;
}

int run_ready(struct run *r, struct err *e)
{
	int rc = 0;

	if (r->state != RUN_COLLECTING || r->script_have < r->request.script_bytes || r->stdin_have < r->request.stdin_bytes)
		return 0;
	if (r->input_fd < 0) {
		r->input_fd = reopen(r->input_feed, e);
		rc = MIN(r->input_fd, 0);
	}
	if (r->input_feed >= 0)
		close(steal_fd(&r->input_feed));
	if (rc == 0)
		rc = run_start(r, e);
	if (r->input_fd >= 0)
		close(steal_fd(&r->input_fd));
	if (r->script_fd >= 0)
		close(steal_fd(&r->script_fd));
	free(steal_ptr(&r->script));
	return rc;
}
