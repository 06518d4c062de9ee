/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A bake: from what was uploaded to a template that machines are forked from. One step after the other, each begun by
 * the end of the one before:
 *
 *   import (worker) -> boot -> setup commands -> sync, caches dropped -> warm-up command -> sync -> pause -> digest ->
 * save
 *   -> quit -> fsync (worker) -> zygote -> its digest, which must be the same -> one child that runs a command -> row
 * -> ready
 *
 * Caches are dropped before the warm-up, so that what set-up read is not in the image, and not after it: what the first
 * command of a clone touches is then in memory already, and shared by all clones.
 */
#include "back.h"

#include <sys/stat.h>

#include "import.h"

/* A boot gets what set-up would, within these. */
#define BOOT_MIN_S 90u /* an emulated host may be that slow */
#define BOOT_MAX_S 180u
#define ANSWER_MS 60000u
#define DIGEST_MS 1800000u
#define PROGRESS_MS 2000u
#define WARM_UP ":"
/*
 * What is run in the machine whose working set is recorded. Its pages are mapped in every later one before it starts:
 * in an emulated host this makes a create 15 ms longer and the first Python 300 ms shorter.
 */
#define TYPICAL "{ command -v python3 && python3 -c pass; } >/dev/null 2>&1"

struct bake {
	struct template *t; /* referenced */
	struct core *core;
	struct op *op;
	uint64_t started_ns;
	bool failed, ready;
	/* the worker's while job_running */
	struct job job;
	bool job_running;
	int job_status;
	struct err job_err;
	struct import import;
	int files[3];
	char *store_path;
	void (*job_next)(struct bake *b);
	struct timer progress;
	off_t import_bytes;
	/* a machine: the booted one, then the child of the zygote */
	struct machine_client *machine;
	struct awaken awaken;
	struct machine_call call, zygote_call;
	/* a conversation with the agent: a command or a sync */
	struct agent *agent;
	struct machine_call connect;
	struct timer deadline;
	void (*agent_next)(struct bake *b, const struct agent_result *r); /* r NULL after a sync */
	uint64_t output[2], acknowledged;
	uint64_t runs;
	size_t setup;         /* the command that runs */
	uint64_t setup_until; /* for all of them */
	char digest[200];
};

static unsigned boot_seconds(const struct bake *b)
{
	return MIN(MAX(b->t->config.setup_timeout_s, BOOT_MIN_S), BOOT_MAX_S);
}

static void close_files(struct bake *b)
{
	for (size_t i = 0; i < ARRAY_SIZE(b->files); i++) {
		if (b->files[i] >= 0)
			close(b->files[i]);
		b->files[i] = -1;
	}
}

static void agent_done(struct bake *b)
{
	machine_call_drop(&b->connect);
	agent_close(b->agent);
	b->agent = NULL;
	loop_timer_cancel(b->core->loop, &b->deadline);
}

static void bake_free(void *arg)
{
	struct bake *b = arg;

	close_files(b);
	free(b->store_path);
	object_put(&b->t->object);
	free(b);
}

/* Lets go of all but the worker's job, and frees when that is over. */
static void tear_down(struct bake *b)
{
	agent_done(b);
	awaken_cancel(&b->awaken);
	machine_call_drop(&b->call);
	machine_call_drop(&b->zygote_call);
	loop_timer_cancel(b->core->loop, &b->progress);
	if (b->machine) {
		b->machine->gone = NULL;
		machine_quit(b->machine);
		b->machine = NULL;
	}
	if (b->job_running) {
		atomic_store(&b->import.cancel, true);
		return;
	}
	b->t->p->bake = NULL;
	core_later(b->core, bake_free, b);
}

static void zygote_end(struct bake *b)
{
	struct machine_client *m = b->t->p->zygote;

	b->t->p->zygote = NULL;
	if (m)
		machine_quit(m);
}

static void fail(struct bake *b, const struct err *e)
{
	struct err why = { 0 }, row = { 0 };

	if (b->failed)
		return;
	b->failed = true;
	why = *e;
	template_say(b->t, "failed: %s", why.text);
	zygote_end(b);
	if (template_move(b->t, TEMPLATE_FAILED, why.text, &row) < 0)
		core_fail(b->core, NULL, "bake", &row);
	op_finish(b->core, steal_ptr(&b->op), -why.code, &why);
	tear_down(b);
}

__attribute__((format(printf, 3, 4))) static void fail_with(struct bake *b, int code, const char *fmt, ...)
{
	struct err e = { .code = code };
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(e.text, sizeof(e.text), fmt, ap);
	va_end(ap);
	fail(b, &e);
}

void bake_abandon(struct bake *b, const char *why)
{
	if (b->ready)
		return; /* what is left is to wait for the disk */
	fail_with(b, ECANCELED, "%s", why);
}

static void cancel(struct op *op)
{
	struct bake *b = op->callee;

	b->op = NULL;
	bake_abandon(b, "the bake was abandoned");
}

/* ---- work on the worker ---- */

static void job_done(struct job *j)
{
	struct bake *b = j->arg;

	b->job_running = false;
	close_files(b);
	if (b->failed) {
		tear_down(b);
		return;
	}
	if (b->job_status < 0)
		fail(b, &b->job_err);
	else
		b->job_next(b);
}

static void job_go(struct bake *b, void (*work)(struct job *j), void (*next)(struct bake *b))
{
	struct err e = { 0 };

	b->job = (struct job){ .work = work, .done = job_done, .arg = b };
	b->job_next = next;
	b->job_status = 0;
	if (job_start(b->core->workers, &b->job, &e) < 0)
		fail(b, &e);
	else
		b->job_running = true;
}

static int open_file(struct bake *b, unsigned i, const char *name, int flags)
{
	b->files[i] = openat(b->t->p->folder, name, flags | O_CLOEXEC, 0600);
	if (b->files[i] >= 0)
		return 0;
	fail_with(b, errno, "cannot open the template's %s: %s", name, strerror(errno));
	return -1;
}

static void import_work(struct job *j)
{
	struct bake *b = j->arg;

	/* A host that dies in mid-bake leaves a template that can be baked again: with all that was uploaded. */
	if (fsync(b->import.source) < 0 || (b->files[2] >= 0 && fsync(b->files[2]) < 0) || fsync(b->t->p->folder) < 0)
		b->job_status = err_set(&b->job_err, errno, "cannot write the upload to disk: %s", strerror(errno));
	else
		b->job_status = import_rootfs(&b->import, &b->job_err);
}

static void fsync_work(struct job *j)
{
	struct bake *b = j->arg;

	for (size_t i = 0; i < ARRAY_SIZE(b->files) && b->job_status == 0; i++)
		if (fsync(b->files[i]) < 0)
			b->job_status = err_set(&b->job_err, errno, "cannot write the template to disk: %s",
						strerror(errno));
	if (b->job_status == 0 && fsync(b->t->p->folder) < 0)
		b->job_status = err_set(&b->job_err, errno, "cannot write the template's folder to disk: %s",
					strerror(errno));
}

static void settle_work(struct job *j)
{
	struct bake *b = j->arg;

	b->job_status = store_settle(b->store_path, &b->job_err);
}

/* ---- talking to the agent ---- */

static void agent_fail(struct bake *b, const struct err *e)
{
	agent_done(b);
	fail(b, e);
}

static void on_frame(struct agent *a, uint32_t type, const uint8_t *payload, uint32_t n)
{
	struct bake *b = a->arg;
	void (*next)(struct bake *, const struct agent_result *) = b->agent_next;
	struct agent_result result;
	struct err e = { 0 };

	switch (type) {
	case AGENT_STARTED:
		return;
	case AGENT_OK:
		agent_done(b);
		next(b, NULL);
		return;
	case AGENT_EXIT:
		if (agent_read_exit(payload, n, &result, &e) < 0) {
			agent_fail(b, &e);
			return;
		}
		agent_send(a, AGENT_RELEASE, NULL, 0);
		agent_done(b);
		next(b, &result);
		return;
	case AGENT_FAILED:
		agent_read_failed(payload, n, &e);
		agent_fail(b, &e);
		return;
	default:
		err_set(&e, EPROTO, "the guest's agent sent a frame of type %u", type);
		agent_fail(b, &e);
	}
}

static void on_output(struct agent *a, unsigned which, const uint8_t *bytes, uint32_t n)
{
	struct bake *b = a->arg;
	uint64_t all;

	if (write(b->t->log_fd, bytes, n) < 0) {
		fail_with(b, errno, "cannot write the log: %s", strerror(errno));
		return;
	}
	b->output[which] += n;
	all = b->output[0] + b->output[1];
	if (all - b->acknowledged >= 65536) {
		agent_send_offsets(a, b->output[0], b->output[1]);
		b->acknowledged = all;
	}
}

static void on_ended(struct agent *a, const struct err *e)
{
	agent_fail(a->arg, e);
}

static void on_connect(struct machine_call *call, int status, const struct machine_msg *m, const struct err *e)
{
	if (status < 0)
		agent_fail(call->arg, e);
}

static void on_deadline(struct timer *t)
{
	fail_with(t->arg, ETIMEDOUT, "the guest did not finish in time");
}

static struct agent *agent_begin(struct bake *b, uint64_t patience_ms,
				 void (*next)(struct bake *b, const struct agent_result *r))
{
	struct err e = { 0 };
	int fd, r;

	b->agent_next = next;
	b->output[0] = b->output[1] = b->acknowledged = 0;
	b->connect.done = on_connect;
	b->connect.arg = b;
	b->deadline = (struct timer){ .fire = on_deadline, .arg = b };
	r = machine_stream(b->machine, &b->connect, MACHINE_AGENT_PORT, 0, &fd, &e);
	if (r == 0)
		r = agent_open(b->core->loop, fd, &b->agent, &e);
	if (r < 0) {
		fail(b, &e);
		return NULL;
	}
	b->agent->frame = on_frame;
	b->agent->output = on_output;
	b->agent->ended = on_ended;
	b->agent->arg = b;
	loop_timer(b->core->loop, &b->deadline, deadline_ms(patience_ms));
	return b->agent;
}

static void command(struct bake *b, const char *script, const char *user, const char *cwd, uint64_t timeout_ms,
		    void (*next)(struct bake *b, const struct agent_result *r))
{
	struct agent *a = agent_begin(b, timeout_ms + ANSWER_MS, next);
	int r;

	if (!a)
		return;
	r = agent_send_run(a, &(struct agent_run){.number = ++b->runs,
						  .script = script,
						  .script_bytes = strlen(script),
						  .cwd = cwd,
						  .user = user,
						  .env = b->t->config.env,
						  .timeout_ms = timeout_ms,
						  .output_limit = b->t->config.settings.output_limit});
	if (r < 0)
		fail_with(b, -r, "cannot send the command to the guest: %s", strerror(-r));
}

static void sync_disk(struct bake *b, bool drop, void (*next)(struct bake *b, const struct agent_result *r))
{
	struct agent *a = agent_begin(b, ANSWER_MS, next);
	const char *text = drop ? "{\"drop_caches\":true}" : "{\"drop_caches\":false}";

	if (a && agent_send(a, AGENT_SYNC, text, strlen(text)) < 0)
		fail_with(b, ENOMEM, "out of memory");
}

/* ---- the steps, last one first ---- */

static void step_ready(struct bake *b)
{
	struct template *t = b->t;

	template_say(t, "ready after %lld ms", (long long)t->p->bake_ms);
	object_changed(&t->object);
	op_finish(b->core, steal_ptr(&b->op), 0, NULL);
	tear_down(b);
}

static void step_row(struct bake *b)
{
	struct template *t = b->t;
	struct template_private *p = t->p;
	struct err e = { 0 };

	free(p->digest);
	p->digest = strdup(b->digest);
	free(p->rootfs_kind);
	p->rootfs_kind = strdup(b->import.kind);
	p->baked_ns = (int64_t)now_ns(CLOCK_REALTIME);
	p->bake_ms = (int64_t)((now_ns(CLOCK_MONOTONIC) - b->started_ns) / MS);
	if (template_move(t, TEMPLATE_READY, NULL, &e) < 0) {
		t->state = TEMPLATE_BAKING;
		fail(b, &e);
		return;
	}
	b->ready = true;
	/* From here on it is ready; that a crash of the host keeps it so is worth the last wait. */
	if (asprintf(&b->store_path, "%s/store.db", b->core->state) < 0) {
		b->store_path = NULL;
		step_ready(b);
		return;
	}
	b->job = (struct job){ .work = settle_work, .done = job_done, .arg = b };
	b->job_next = step_ready;
	b->job_status = 0;
	if (job_start(b->core->workers, &b->job, NULL) < 0)
		step_ready(b);
	else
		b->job_running = true;
}

static void child_gone(struct machine_client *m)
{
	struct bake *b = m->arg;

	b->machine = NULL;
	step_row(b);
}

static void child_ran(struct bake *b, const struct agent_result *r)
{
	struct machine_client *m = b->machine;

	m->gone = child_gone;
	machine_quit(m);
}

static void child_awake(struct awaken *a, int status, const struct err *e)
{
	struct bake *b = a->arg;

	agent_close(steal_ptr(&a->agent));
	if (status < 0)
		fail_with(b, -status, "a machine restored from the template does not work: %.380s", e->text);
	else
		command(b, TYPICAL, b->t->config.settings.user, "/", ANSWER_MS, child_ran);
}

/* With what the agent last said, if anything: that is nearer to the cause. */
static void machine_failed(struct bake *b, const char *what, int code, const char *sentence)
{
	char line[240];

	template_agent_line(b->t, line, sizeof(line));
	if (line[0] && !strstr(line, "vmenv-agent: ready in "))
		fail_with(b, code, "%s: %.200s: %s", what, sentence, line);
	else
		fail_with(b, code, "%s: %.380s", what, sentence);
}

static void on_machine_ended(struct machine_client *m, const char *sentence)
{
	struct bake *b = m->arg;
	char line[200];

	template_last_line(b->t, line, sizeof(line));
	b->machine = NULL;
	m->gone = NULL;
	if (m->hello)
		machine_failed(b, "the machine ended during the bake", EIO, sentence);
	else
		fail_with(b, EIO, "the machine did not start: %.200s: %.180s", sentence, line);
}

static void on_fork(struct machine_call *call, int status, const struct machine_msg *m, const struct err *e)
{
	if (status < 0)
		fail_with(call->arg, -status, "the template's machine cannot be forked: %.380s", e->text);
}

static void step_child(struct bake *b)
{
	struct core *c = b->core;
	struct err e = { 0 };
	uint64_t id = store_id(c->store);
	int listening = machine_listen(&c->machines, id, &e), r;

	if (listening < 0) {
		fail(b, &e);
		return;
	}
	r = machine_connect(&c->machines, id, &b->machine, &e);
	if (r < 0) {
		close(listening);
		fail(b, &e);
		return;
	}
	b->machine->arg = b;
	b->zygote_call.done = on_fork;
	b->zygote_call.arg = b;
	r = machine_request(b->t->p->zygote, &b->zygote_call, MACHINE_FORK, 1, NULL, 0, &listening, 1, ANSWER_MS, &e);
	if (r == 0) {
		b->machine->ended = on_machine_ended;
		b->awaken = (struct awaken){ .done = child_awake, .arg = b };
		r = awaken_start(&b->awaken, c->loop, b->machine, &b->t->config, -1, ANSWER_MS, &e);
	}
	if (r < 0)
		fail(b, &e);
}

static bool digest_valid(const char *text)
{
	if (strlen(text) != 194 || text[64] != ' ' || text[129] != ' ')
		return false;
	return strspn(text, "0123456789abcdef ") == 194;
}

static void on_zygote_digest(struct machine_call *call, int status, const struct machine_msg *m, const struct err *e)
{
	struct bake *b = call->arg;

	if (status < 0) {
		char line[200];

		template_last_line(b->t, line, sizeof(line));
		fail_with(b, -status, "the template cannot be read back: %.200s: %.180s", e->text, line);
		return;
	}
	if (!digest_valid(m->text) || memcmp(m->text, b->digest, 129) != 0) {
		fail_with(b, EIO,
			  "the template read back is not what was written: memory and disk are %.129s, not %.129s",
			  m->text, b->digest);
		return;
	}
	snprintf(b->digest, sizeof(b->digest), "%.199s", m->text);
	template_say(b->t, "read back: memory, disk, state are %s", b->digest);
	step_child(b);
}

static void step_zygote(struct bake *b)
{
	struct machine_client *m;
	struct err e = { 0 };
	int r;

	/* Earlier failed bakes do not count against this one. */
	memset(b->t->p->zygote_started, 0, sizeof(b->t->p->zygote_started));
	r = template_zygote(b->t, &m, &e);
	b->zygote_call.done = on_zygote_digest;
	b->zygote_call.arg = b;
	if (r == 0)
		r = machine_request(m, &b->zygote_call, MACHINE_DIGEST, 0, NULL, 0, NULL, 0, DIGEST_MS, &e);
	if (r < 0)
		fail(b, &e);
}

static void booted_gone(struct machine_client *m)
{
	struct bake *b = m->arg;

	b->machine = NULL;
	if (open_file(b, 0, "disk.img", O_RDWR) < 0 || open_file(b, 1, "memory.img", O_RDWR) < 0 ||
	    open_file(b, 2, "state", O_RDWR) < 0)
		return;
	job_go(b, fsync_work, step_zygote);
}

static void on_saved(struct machine_call *call, int status, const struct machine_msg *m, const struct err *e)
{
	struct bake *b = call->arg;

	if (status < 0) {
		fail_with(b, -status, "the machine's state cannot be saved: %.380s", e->text);
		return;
	}
	b->machine->gone = booted_gone;
	machine_quit(b->machine);
}

static void on_digest(struct machine_call *call, int status, const struct machine_msg *m, const struct err *e)
{
	struct bake *b = call->arg;
	struct err why = { 0 };
	int fd;

	if (status < 0 || !digest_valid(m->text)) {
		fail_with(b, status < 0 ? -status : EPROTO, "the machine gives no digest: %.380s",
			  status < 0 ? e->text : m->text);
		return;
	}
	snprintf(b->digest, sizeof(b->digest), "%.199s", m->text);
	fd = openat(b->t->p->folder, "state", O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (fd < 0) {
		fail_with(b, errno, "cannot make the template's state: %s", strerror(errno));
		return;
	}
	b->call.done = on_saved;
	if (machine_request(b->machine, &b->call, MACHINE_SAVE, 0, NULL, 0, &fd, 1, DIGEST_MS, &why) < 0)
		fail(b, &why);
}

static void on_paused(struct machine_call *call, int status, const struct machine_msg *m, const struct err *e)
{
	struct bake *b = call->arg;
	struct err why = { 0 };

	if (status < 0) {
		fail_with(b, -status, "the machine cannot be paused: %.380s", e->text);
		return;
	}
	b->call.done = on_digest;
	if (machine_request(b->machine, &b->call, MACHINE_DIGEST, 0, NULL, 0, NULL, 0, DIGEST_MS, &why) < 0)
		fail(b, &why);
}

static void step_pause(struct bake *b, const struct agent_result *r)
{
	struct err e = { 0 };

	template_say(b->t, "freezing");
	b->call.done = on_paused;
	b->call.arg = b;
	if (machine_request(b->machine, &b->call, MACHINE_PAUSE, 0, NULL, 0, NULL, 0, ANSWER_MS, &e) < 0)
		fail(b, &e);
}

static void warmed_up(struct bake *b, const struct agent_result *r)
{
	/* 126: there is no such user or folder, so nothing would ever run. 127: a disk may have no shell, and its
	 * machines can still run what they have by exec.json. */
	if (r->exit_code == 126) {
		fail_with(b, EINVAL, "commands cannot run as user '%.63s' in '%.200s': see the log",
			  b->t->config.settings.user, b->t->config.settings.cwd);
		return;
	}
	if (r->exit_code)
		template_say(b->t, "the warm-up command '%s' ended with exit code %d", WARM_UP, r->exit_code);
	sync_disk(b, false, step_pause);
}

static void step_warm_up(struct bake *b, const struct agent_result *r)
{
	command(b, WARM_UP, b->t->config.settings.user, b->t->config.settings.cwd, ANSWER_MS, warmed_up);
}

static void setup_next(struct bake *b);

static void setup_ran(struct bake *b, const struct agent_result *r)
{
	const char *script = json_string_value(json_array_get(b->t->config.setup, b->setup));

	if (r->timed_out) {
		fail_with(b, ETIMEDOUT, "setup did not end within its %u seconds; it was in '%.200s'",
			  b->t->config.setup_timeout_s, script);
		return;
	}
	if (r->exit_code) {
		fail_with(b, EINVAL, "setup command '%.200s' failed with exit code %d: see the log", script,
			  r->exit_code);
		return;
	}
	b->setup++;
	setup_next(b);
}

static void setup_next(struct bake *b)
{
	const char *script = json_string_value(json_array_get(b->t->config.setup, b->setup));
	uint64_t now = now_ns(CLOCK_MONOTONIC);

	if (!script) {
		template_say(b->t, "syncing");
		sync_disk(b, true, step_warm_up);
		return;
	}
	if (now >= b->setup_until) {
		fail_with(b, ETIMEDOUT, "setup did not end within its %u seconds; '%.200s' was next",
			  b->t->config.setup_timeout_s, script);
		return;
	}
	template_say(b->t, "setup: %s", script);
	command(b, script, "root", "/", (b->setup_until - now) / MS + 1, setup_ran);
}

static void on_awake(struct awaken *a, int status, const struct err *e)
{
	struct bake *b = a->arg;
	char text[80];

	agent_close(steal_ptr(&a->agent));
	if (status == -ETIMEDOUT) {
		snprintf(text, sizeof(text), "the machine does not boot within %u seconds", boot_seconds(b));
		machine_failed(b, text, ETIMEDOUT, e->text);
		return;
	}
	if (status < 0) {
		machine_failed(b, "the machine does not boot", -status, e->text);
		return;
	}
	template_say(b->t, "booted after %llu ms",
		     (unsigned long long)((now_ns(CLOCK_MONOTONIC) - b->started_ns) / MS));
	b->setup = 0;
	b->setup_until = deadline_ms(b->t->config.setup_timeout_s * 1000ull);
	setup_next(b);
}

/*
 * The version text of a bzImage (Documentation/arch/x86/boot.rst: "HdrS" at 0x202, at 0x20e where the text is, less
 * 0x200).
 */
static int kernel_version(const char *path, char **version, struct err *e)
{
	AUTO_CLOSE int fd = open(path, O_RDONLY | O_CLOEXEC);
	uint8_t header[0x210];
	char text[128] = { 0 };

	if (fd < 0)
		return err_set(e, errno, "cannot open the guest kernel %.300s: %s", path, strerror(errno));
	if (pread(fd, header, sizeof(header), 0) != sizeof(header) || memcmp(header + 0x202, "HdrS", 4) != 0)
		return err_set(e, EINVAL, "the guest kernel is not a bzImage (a vmlinuz as distributions have it)");
	if (pread(fd, text, sizeof(text) - 1, 0x200 + (header[0x20e] | header[0x20f] << 8)) <= 0)
		text[0] = 0;
	text[strcspn(text, " ")] = 0;
	for (char *p = text; *p; p++)
		if (*p < ' ' || *p > '~')
			*p = '?';
	*version = strdup(text);
	return *version ? 0 : err_set(e, ENOMEM, "out of memory");
}

static int spawn(struct bake *b, const char *kernel, int listening, struct err *e)
{
	struct core *c = b->core;
	const struct config *f = &b->t->config;
	AUTO_FREE char *disk = NULL, *image = NULL;
	char memory[16], vcpus[16];
	pid_t pid;
	int r;

	snprintf(memory, sizeof(memory), "%llu", (unsigned long long)f->memory_mb);
	snprintf(vcpus, sizeof(vcpus), "%u", f->vcpus);
	if (asprintf(&disk, "%s/disk.img", b->t->p->path) < 0 || asprintf(&image, "%s/memory.img", b->t->p->path) < 0)
		return err_set(e, ENOMEM, "out of memory");
	{
		const char *argv[] = {c->machine, "--control",
				      "3",	  "--kernel",
				      kernel,	  "--initrd",
				      c->initrd,  "--disk",
				      disk,	  "--memory-image",
				      image,	  "--memory",
				      memory,	  "--vcpus",
				      vcpus,	  *f->cmdline ? "--cmdline" : NULL,
				      f->cmdline, NULL};

		r = machine_spawn(c->machine, (char *const *)argv, listening, b->t->log_fd, &pid, e);
	}
	if (r == 0)
		machine_is_child(b->machine, pid);
	return r;
}

static int boot(struct bake *b, struct err *e)
{
	struct core *c = b->core;
	struct template_private *p = b->t->p;
	AUTO_FREE char *kernel = NULL;
	AUTO_CLOSE int listening = -1;
	uint64_t id = store_id(c->store);
	int r;

	if (template_upload_size(b->t, UPLOAD_KERNEL) > 0 ? asprintf(&kernel, "%s/kernel", p->path) < 0 :
							     !(kernel = strdup(c->kernel)))
		return err_set(e, ENOMEM, "out of memory");
	free(p->kernel_version);
	p->kernel_version = NULL;
	r = kernel_version(kernel, &p->kernel_version, e);
	if (r < 0)
		return r;
	unlinkat(p->folder, "memory.img", 0);
	template_say(b->t, "booting %s, for at most %u seconds", p->kernel_version, boot_seconds(b));
	listening = machine_listen(&c->machines, id, e);
	if (listening < 0)
		return listening;
	r = machine_connect(&c->machines, id, &b->machine, e);
	if (r < 0)
		return r;
	b->machine->ended = on_machine_ended;
	b->machine->arg = b;
	r = spawn(b, kernel, listening, e);
	if (r < 0)
		return r;
	b->awaken = (struct awaken){ .done = on_awake, .arg = b };
	return awaken_start(&b->awaken, c->loop, b->machine, &b->t->config, b->t->log_fd, boot_seconds(b) * 1000ull, e);
}

static void step_boot(struct bake *b)
{
	struct err e = { 0 };

	loop_timer_cancel(b->core->loop, &b->progress);
	template_say(b->t, "imported %s: %llu entries, %llu ms", b->import.kind, (unsigned long long)b->import.files,
		     (unsigned long long)((now_ns(CLOCK_MONOTONIC) - b->started_ns) / MS));
	if (core_admit(b->core, 1, &e) < 0 || boot(b, &e) < 0)
		fail(b, &e);
}

static void on_progress(struct timer *t)
{
	struct bake *b = t->arg;

	template_say(b->t, "importing rootfs: %llu of %lld MB",
		     (unsigned long long)(atomic_load(&b->import.done_bytes) >> 20),
		     (long long)(b->import_bytes >> 20));
	loop_timer(b->core->loop, t, deadline_ms(PROGRESS_MS));
}

static void step_import(void *arg)
{
	struct bake *b = arg;

	if (b->failed)
		return;
	/* A descriptor of its own for the source: the upload's has a position that readers do not use, but still. */
	if (open_file(b, 0, "rootfs", O_RDONLY) < 0 || open_file(b, 1, "disk.img", O_RDWR | O_CREAT | O_TRUNC) < 0)
		return;
	if (template_upload_size(b->t, UPLOAD_KERNEL) > 0 && open_file(b, 2, "kernel", O_RDONLY) < 0)
		return;
	b->import.source = b->files[0];
	b->import.image = b->files[1];
	b->import.disk_bytes = b->t->config.disk_mb << 20;
	b->progress = (struct timer){ .fire = on_progress, .arg = b };
	loop_timer(b->core->loop, &b->progress, deadline_ms(PROGRESS_MS));
	job_go(b, import_work, step_boot);
}

int template_bake(struct template *t, struct op *op, struct err *e)
{
	struct bake *b;
	int r;

	if (t->object.gone)
		return err_set(e, ENOENT, "the template is gone");
	if (t->state == TEMPLATE_READY)
		return err_set(e, EBUSY, "template %s is baked already", t->name);
	if (t->state == TEMPLATE_BAKING || t->p->bake)
		return err_set(e, EBUSY, "template %s is baking already", t->name);
	if (template_upload_size(t, UPLOAD_ROOTFS) == 0)
		return err_set(e, EINVAL, "write an ext4 image or a tar to rootfs first");
	b = calloc(1, sizeof(*b));
	if (!b)
		return err_set(e, ENOMEM, "out of memory");
	if (t->log_fd < 0)
		t->log_fd = openat(t->p->folder, "log", O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
	if (t->log_fd < 0 || ftruncate(t->log_fd, 0) < 0) {
		r = err_set(e, errno, "cannot make the template's log: %s", strerror(errno));
		free(b);
		return r;
	}
	r = template_move(t, TEMPLATE_BAKING, NULL, e);
	if (r < 0) {
		free(b);
		return r;
	}
	b->t = t;
	object_get(&t->object);
	b->core = t->core;
	b->started_ns = now_ns(CLOCK_MONOTONIC);
	b->import_bytes = template_upload_size(t, UPLOAD_ROOTFS);
	b->files[0] = b->files[1] = b->files[2] = -1;
	b->op = op;
	t->p->bake = b;
	if (op) {
		op->callee = b;
		op->cancel = cancel;
	}
	template_say(t, "importing rootfs: %lld bytes", (long long)b->import_bytes);
	core_later(b->core, step_import, b);
	return VMENV_PENDING;
}
