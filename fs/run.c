/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs: a stream to the guest's agent each, its output to files as it arrives, its end.
 *
 * A stream that breaks is attached to again by the run's number; offsets say what is there already. What the guest says
 * is not believed: output past the limit is cut, and a run that does not end at its deadline has ended all the same,
 * for everyone who waits; what is left of it in the guest is the reaper's.
 */
#include "back.h"

#include "run_private.h"

#define START_MS 60000u  /* for the agent to begin, and at most the run's own time */
#define GRACE_MS 5000u   /* for the guest to see to its own deadline, or to a SIGKILL */
#define RETRY_MS 50u
#define ATTEMPTS 60u
#define ACK_BYTES (AGENT_WINDOW / 4)
#define ARGV_MAX (1u << 19)
#define RECENT 4 /* ended runs whose files stay open */

const char *const run_state_names[] = {
	[RUN_STARTING] = "starting", [RUN_RUNNING] = "running", [RUN_EXITED] = "exited",
	[RUN_TIMEOUT] = "timeout",   [RUN_KILLED] = "killed",   [RUN_LOST] = "lost",
};

struct run *run_find(struct sandbox *s, uint64_t number)
{
	for (struct run *r = s->runs; r; r = r->next)
		if (r->number == number)
			return r;
	return NULL;
}

struct run *run_by_id(struct core *c, uint64_t id)
{
	return index_get(&c->index, id, KIND_RUN);
}

bool run_going(const struct run *r)
{
	return r->state == RUN_STARTING || r->state == RUN_RUNNING;
}

/* ---- the object ---- */

struct shared_text *shared_text_new(const void *bytes, size_t n)
{
	struct shared_text *t = malloc(sizeof(*t) + n + 1);

	if (!t)
		return NULL;
	t->references = 1;
	memcpy(t->bytes, n ? bytes : "", n);
	t->bytes[n] = 0;
	return t;
}

static void shared_text_put(struct shared_text *t)
{
	if (t && --t->references == 0)
		free(t);
}

static void request_clear(struct run_private *p)
{
	json_decref(p->argv);
	json_decref(p->env);
	free(p->input);
	free(p->cwd);
	free(p->user);
	p->argv = p->env = NULL;
	p->input = NULL;
	p->cwd = p->user = NULL;
}

static void run_free(struct object *o)
{
	struct run *r = (struct run *)o;
	struct run_private *p = r->p;

	run_close_outputs(r);
	for (int w = 0; w < 2; w++) {
		output_put(p->output[w]);
		if (p->prefix_fd[w] >= 0)
			close(p->prefix_fd[w]);
	}
	request_clear(p);
	shared_text_put(p->text);
	if (p->origin)
		object_put(&p->origin->object);
	object_put(&r->sandbox->object);
	free(p);
	free(r);
}

static void on_timer(struct timer *t);
static void on_retry(struct timer *t);

/* Listed as the newest. Takes text over. */
struct run *run_new(struct sandbox *s, uint64_t number, struct shared_text *text, size_t text_bytes, struct err *e)
{
	struct run *r = calloc(1, sizeof(*r));
	struct run_private *p = calloc(1, sizeof(*p));

	if (!r || !p || !text || object_init(s->core, &r->object, KIND_RUN, r, run_free, e) < 0) {
		free(r);
		free(p);
		shared_text_put(text);
		if (e && !e->code)
			err_set(e, ENOMEM, "out of memory");
		return NULL;
	}
	r->p = p;
	r->sandbox = s;
	object_get(&s->object);
	r->number = number;
	r->output_fd[0] = r->output_fd[1] = p->prefix_fd[0] = p->prefix_fd[1] = -1;
	p->text = text;
	r->command = text->bytes;
	r->command_bytes = text_bytes;
	p->timer = (struct timer){ .fire = on_timer, .arg = r };
	p->retry = (struct timer){ .fire = on_retry, .arg = r };
	return r;
}

void run_list(struct run *r)
{
	struct sandbox *s = r->sandbox;

	r->next = s->runs;
	s->runs = r;
	s->core->generation++;
}

void run_drop(struct run *r)
{
	for (struct run **p = &r->sandbox->runs; *p; p = &(*p)->next)
		if (*p == r) {
			*p = r->next;
			break;
		}
	object_remove(r->sandbox->core, &r->object);
}

/* Old runs let go of their descriptors, the oldest of all that is theirs. */
static void tidy(struct sandbox *s)
{
	struct run *oldest = NULL;
	unsigned ended = 0, all = 0;

	for (struct run *r = s->runs; r; r = r->next, all++) {
		if (run_going(r))
			continue;
		oldest = r;
		if (++ended > RECENT && r->object.references == 0)
			run_close_outputs(r);
	}
	if (all > RUNS_KEPT && oldest) {
		store_run_remove(s->core->store, s->object.id, oldest->number, NULL);
		run_drop(oldest);
	}
}

/* ---- the end ---- */

void link_close(struct run *r)
{
	machine_call_drop(&r->p->connect);
	agent_close(r->p->agent);
	r->p->agent = NULL;
}

/* The agent may forget the run; the stream waits for the next one. */
static void link_keep(struct run *r)
{
	struct agent *a = steal_ptr(&r->p->agent);

	machine_call_drop(&r->p->connect);
	if (agent_queue(a, AGENT_NEXT, NULL, 0) < 0)
		agent_close(a);
	else
		spare_put(r->sandbox, a);
}

static void save(struct run *r)
{
	struct run_private *p = r->p;
	struct err e = { 0 };

	/* The row of a sandbox that is being made is not there yet; runs_save follows it. */
	if (r->sandbox->state == SANDBOX_CREATING)
		return;
	if (store_run_put(r->sandbox->core->store, &(struct store_run){
		.sandbox = r->sandbox->object.id, .number = r->number, .state = run_state_names[r->state],
		.exit_code = r->exit_code, .signal = r->signal, .duration_ns = r->duration_ns,
		.output = { p->output[0] ? p->output[0]->id : 0, p->output[1] ? p->output[1]->id : 0 },
		.stored = { r->stored[0], r->stored[1] }, .printed = { r->printed[0], r->printed[1] } }, &e) < 0)
		core_fail(r->sandbox->core, r->sandbox->name, "save a run", &e);
}

void attach_settled(struct run *r)
{
	struct sandbox_private *sp = r->sandbox->p;

	if (!r->p->attaching)
		return;
	r->p->attaching = false;
	if (--sp->attaching == 0)
		op_finish(r->sandbox->core, steal_ptr(&sp->attacher), 0, NULL);
}

/* The one way a run ends. status and e are for who waits. */
void run_end(struct run *r, enum run_state state, int status, const struct err *e)
{
	struct sandbox *s = r->sandbox;
	struct run_private *p = r->p;
	struct core *c = s->core;

	if (!run_going(r))
		return;
	link_close(r);
	loop_timer_cancel(c->loop, &p->timer);
	loop_timer_cancel(c->loop, &p->retry);
	request_clear(p);
	r->state = state;
	if (state != RUN_EXITED && !r->duration_ns && p->begun_ns)
		r->duration_ns = now_ns(CLOCK_MONOTONIC) - p->begun_ns;
	for (int w = 0; w < 2; w++) {
		/* What was printed is the guest's word; what is stored is a fact. */
		if (r->printed[w] < r->stored[w])
			r->printed[w] = r->stored[w];
		r->truncated[w] |= r->printed[w] > r->stored[w] && state != RUN_LOST;
	}
	object_changed(&r->object);
	object_changed(&s->object);
	s->running--;
	save(r);
	core_event(c, "run", s->name,
		   json_pack("{s:I, s:s, s:o, s:f}", "run", (json_int_t)r->number, "state", run_state_names[state],
			     "exit_code", state == RUN_LOST ? json_null() : json_integer(r->exit_code), "duration_ms",
			     (double)(r->duration_ns / 1000) / 1000.0));
	for (int w = 0; w < 2; w++)
		if (r->grown)
			r->grown(r, (enum stream)w);
	op_finish(c, steal_ptr(&p->op), status, e);
	attach_settled(r);
	if (s->running == 0)
		ops_finish(c, &s->p->waiters, 0, NULL);
	tidy(s);
}

__attribute__((format(printf, 3, 4))) void run_lost(struct run *r, int code, const char *fmt, ...)
{
	struct err e = { .code = code };
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(e.text, sizeof(e.text), fmt, ap);
	va_end(ap);
	run_end(r, RUN_LOST, -code, &e);
}

static void finish(struct run *r)
{
	struct run_private *p = r->p;
	const struct agent_result *x = &p->result;
	enum run_state state = RUN_EXITED;

	if (p->copying[0] || p->copying[1]) {
		p->finished = true;
		return;
	}
	r->exit_code = x->exit_code;
	r->signal = x->signal;
	r->timed_out = x->timed_out;
	r->duration_ns = x->duration_ns;
	for (int w = 0; w < 2; w++)
		r->printed[w] = x->printed[w];
	if (x->timed_out) {
		state = RUN_TIMEOUT;
		r->exit_code = 124;
	} else if ((p->killed || p->killed_softly) && x->signal) {
		state = RUN_KILLED;
	}
	run_end(r, state, 0, NULL);
}

/* Ends it for everyone here; what goes on in the guest is killed there, without anybody waiting. */
static void cut_off(struct run *r, enum run_state state)
{
	struct run_private *p = r->p;

	if (p->agent) {
		struct agent *a = steal_ptr(&p->agent);

		machine_call_drop(&p->connect);
		agent_send_signal(a, SIGKILL);
		reaper_take(r->sandbox->core, a, p->got);
	}
	r->timed_out = state == RUN_TIMEOUT;
	r->exit_code = state == RUN_TIMEOUT ? 124 : 128 + SIGKILL;
	r->signal = SIGKILL;
	run_end(r, state, 0, NULL);
}

static void on_timer(struct timer *t)
{
	struct run *r = t->arg;

	if (r->p->killed)
		cut_off(r, RUN_KILLED);
	else if (r->state == RUN_RUNNING || r->p->may_time_out)
		cut_off(r, RUN_TIMEOUT);
	else
		run_lost(r, ETIMEDOUT, "the guest's agent did not start run %llu within %u seconds",
			 (unsigned long long)r->number, START_MS / 1000);
}

/* ---- the stream ---- */

static void link_broken(struct run *r, const struct err *e)
{
	struct run_private *p = r->p;

	link_close(r);
	/* A frozen guest answers nobody: that says nothing about its agent. */
	p->attempts += r->sandbox->state != SANDBOX_FROZEN;
	if (p->attempts > ATTEMPTS || !r->sandbox->p->machine)
		run_lost(r, EIO, "run %llu is lost: %.380s", (unsigned long long)r->number, e->text);
	else
		loop_timer(r->sandbox->core->loop, &p->retry, deadline_ms(RETRY_MS));
}

static void on_started(struct run *r, const uint64_t offsets[2])
{
	struct run_private *p = r->p;

	for (int w = 0; w < 2; w++)
		p->got[w] = offsets[w];
	p->acknowledged = p->got[0] + p->got[1];
	if (r->state == RUN_STARTING) {
		r->state = RUN_RUNNING;
		object_changed(&r->object);
	}
	if (!p->begun_ns)
		p->begun_ns = now_ns(CLOCK_MONOTONIC);
	p->sent = p->attach = true; /* from here on a broken stream is attached to again */
	request_clear(p);
	if (p->killed)
		return;
	loop_timer_cancel(r->sandbox->core->loop, &p->timer);
	if (p->timeout_ms)
		loop_timer(r->sandbox->core->loop, &p->timer, deadline_ms(p->timeout_ms + GRACE_MS));
}

static void on_failed(struct run *r, const uint8_t *payload, uint32_t n)
{
	struct err e = { 0 };

	agent_read_failed(payload, n, &e);
	if (r->p->origin) {
		run_not_in_fork(r);
		return;
	}
	/* A guest that says that something does not exist does not mean the sandbox. */
	if (e.code == ENOENT || e.code == ESRCH)
		e.code = r->p->attach ? EIO : EINVAL;
	run_end(r, RUN_LOST, -e.code, &e);
}

static void on_frame(struct agent *a, uint32_t type, const uint8_t *payload, uint32_t n)
{
	struct run *r = a->arg;
	struct run_private *p = r->p;
	uint64_t offsets[2];
	struct err e = { 0 };

	switch (type) {
	case AGENT_STARTED:
		if (agent_read_offsets(payload, n, offsets, &e) < 0)
			break;
		if (p->origin) {
			if (run_copy_beginning(r, offsets, &e) < 0)
				break;
		} else if (offsets[0] > p->have[0] || offsets[1] > p->have[1]) {
			err_set(&e, EPROTO, "the guest's agent goes on past what it has sent");
			break;
		}
		on_started(r, offsets);
		if (!p->copying[0] && !p->copying[1])
			attach_settled(r);
		return;
	case AGENT_EXIT:
		if (r->state != RUN_RUNNING) {
			err_set(&e, EPROTO, "the guest's agent ended a run that it had not started");
			break;
		}
		if (agent_read_exit(payload, n, &p->result, &e) < 0)
			break;
		link_keep(r);
		finish(r);
		return;
	case AGENT_FAILED:
		on_failed(r, payload, n);
		return;
	default:
		err_set(&e, EPROTO, "the guest's agent sent a frame of type %u", type);
	}
	run_end(r, RUN_LOST, -EIO, &e);
}

static void on_output(struct agent *a, unsigned which, const uint8_t *bytes, uint32_t n)
{
	struct run *r = a->arg;
	struct run_private *p = r->p;
	struct err e = { 0 };

	if (r->state != RUN_RUNNING) {
		run_lost(r, EIO, "the guest's agent sent output of a run that it had not started");
		return;
	}
	if (run_store(r, (enum stream)which, bytes, n, &e) < 0) {
		struct agent *rest = steal_ptr(&p->agent);

		agent_send_signal(rest, SIGKILL);
		reaper_take(r->sandbox->core, rest, p->got);
		run_end(r, RUN_LOST, -e.code, &e);
		return;
	}
	if (p->got[0] + p->got[1] - p->acknowledged >= ACK_BYTES) {
		agent_send_offsets(a, p->got[0], p->got[1]);
		p->acknowledged = p->got[0] + p->got[1];
	}
}

static void on_ended(struct agent *a, const struct err *e)
{
	struct run *r = a->arg;

	/* Whether it was delivered is not known: ask. */
	if (r->p->sent)
		r->p->attach = true;
	link_broken(r, e);
}

static void on_connect(struct machine_call *call, int status, const struct machine_msg *m, const struct err *e)
{
	struct run *r = call->arg;

	if (status == 0)
		r->p->sent = true;
	else if (m || status == -ETIMEDOUT)
		link_broken(r, e); /* else the machine is no more, which its sandbox is about to hear */
}

static uint64_t oldest(const struct sandbox *s, uint64_t number)
{
	for (const struct run *r = s->runs; r; r = r->next)
		if (run_going(r) && r->number < number)
			number = r->number;
	return number;
}

static int link_open(struct run *r, struct err *e)
{
	struct run_private *p = r->p;
	struct sandbox *s = r->sandbox;
	int fd, status = 0;

	if (!p->attach)
		p->agent = spare_take(s);
	p->sent = p->agent;
	p->connect.done = on_connect;
	p->connect.arg = r;
	if (!p->agent)
		status = machine_stream(s->p->machine, &p->connect, MACHINE_AGENT_PORT, 0, &fd, e);
	if (!p->agent && status == 0)
		status = agent_open(s->core->loop, fd, &p->agent, e);
	if (status < 0) {
		machine_call_drop(&p->connect);
		return status;
	}
	p->agent->frame = on_frame;
	p->agent->output = on_output;
	p->agent->ended = on_ended;
	p->agent->arg = r;
	if (p->attach)
		status = agent_send_attach(p->agent, r->number);
	else
		status = agent_send_run(p->agent, &(struct agent_run){
			.number = r->number, .oldest = oldest(s, r->number), .argv = p->argv, .script = r->command, .script_bytes = r->command_bytes,
			.input = p->input, .input_bytes = p->input_bytes, .cwd = p->cwd, .user = p->user, .env = p->env,
			.timeout_ms = p->timeout_ms, .output_limit = p->limit });
	if (status < 0) {
		link_close(r);
		return err_set(e, -status, "cannot send the command to the guest: %s", strerror(-status));
	}
	return 0;
}

static void on_retry(struct timer *t)
{
	struct run *r = t->arg;
	struct err e = { 0 };

	if (!r->sandbox->p->machine || link_open(r, &e) < 0)
		run_lost(r, EIO, "run %llu is lost: %.380s", (unsigned long long)r->number, e.text);
}

/* ---- start and kill ---- */

static int check_strings(const json_t *j, const char *what, struct err *e)
{
	const char *key;
	json_t *v;
	size_t i, bytes = 0;

	if (json_is_array(j)) {
		json_array_foreach((json_t *)j, i, v) {
			if (!json_is_string(v))
				return err_set(e, EINVAL, "%s must be strings", what);
			bytes += json_string_length(v) + 1;
		}
		if (json_array_size(j) == 0)
			return err_set(e, EINVAL, "%s must not be empty", what);
	} else if (json_is_object(j)) {
		json_object_foreach((json_t *)j, key, v) {
			if (!*key || strchr(key, '=') || !json_is_string(v))
				return err_set(e, EINVAL,
					       "%s: '%.80s' must be a variable's name, and its value a string", what,
					       key);
			bytes += strlen(key) + json_string_length(v) + 2;
		}
	} else {
		return err_set(e, EINVAL, "%s is of the wrong form", what);
	}
	return bytes > ARGV_MAX ? err_set(e, E2BIG, "%s is %zu bytes: at most %u", what, bytes, ARGV_MAX) : 0;
}

int sandbox_takes_runs(struct sandbox *s, struct err *e)
{
	if (s->object.gone)
		return err_set(e, ENOENT, "the sandbox is gone");
	if (s->state == SANDBOX_DEAD)
		return err_set(e, EIO, "sandbox %s is dead: %.380s", s->name, s->reason);
	if (s->state != SANDBOX_RUNNING)
		return err_set(e, EBUSY, "sandbox %s is %s: commands need it running", s->name,
			       sandbox_state_names[s->state]);
	if (s->p->change)
		return err_set(e, EBUSY, "sandbox %s is being frozen", s->name);
	return 0;
}

static int check_request(struct sandbox *s, const struct run_request *q, struct err *e)
{
	int r = sandbox_takes_runs(s, e);

	if (r < 0)
		return r;
	if (s->running >= AGENT_RUNS_MAX)
		return err_set(e, EBUSY, "sandbox %s has %u runs in progress: no more at once", s->name, s->running);
	if (!q->argv && !q->script)
		return err_set(e, EINVAL, "there is nothing to run");
	if (q->script_bytes > SCRIPT_MAX || q->input_bytes > SCRIPT_MAX)
		return err_set(e, EFBIG, "a script and its input are at most %u bytes each", SCRIPT_MAX);
	if (q->argv)
		r = check_strings(q->argv, "argv", e);
	if (r == 0 && q->env)
		r = check_strings(q->env, "env", e);
	return r;
}

static int keep_request(struct run *r, const struct run_request *q, struct err *e)
{
	struct sandbox *s = r->sandbox;
	struct run_private *p = r->p;

	p->timeout_ms = q->timeout_ms == UINT64_MAX ? s->settings.timeout_ms : q->timeout_ms;
	p->limit = q->output_limit == UINT64_MAX ? s->settings.output_limit : q->output_limit;
	p->argv = json_incref(q->argv);
	p->env = q->env ? json_copy(s->source->config.env) : json_incref(s->source->config.env);
	p->cwd = strdup(q->cwd ? q->cwd : s->settings.cwd);
	p->user = strdup(q->user ? q->user : s->settings.user);
	p->input_bytes = q->input_bytes;
	p->input = malloc(q->input_bytes + 1);
	if (!p->env || !p->cwd || !p->user || !p->input || (q->env && json_object_update(p->env, q->env) < 0))
		return err_set(e, ENOMEM, "out of memory");
	memcpy(p->input, q->input_bytes ? q->input : "", q->input_bytes);
	return 0;
}

static void kill_run(struct run *r)
{
	struct run_private *p = r->p;

	p->killed = true;
	if (!p->agent) {
		cut_off(r, RUN_KILLED); /* between two attempts to reach the agent */
		return;
	}
	agent_send_signal(p->agent, SIGKILL);
	loop_timer(r->sandbox->core->loop, &p->timer, deadline_ms(GRACE_MS));
}

static void cancel(struct op *op)
{
	struct run *r = op->callee;

	r->p->op = NULL;
	kill_run(r);
}

int run_start(struct sandbox *s, const struct run_request *q, struct run **out, struct op *op, struct err *e)
{
	AUTO_FREE char *line = NULL;
	const char *text = q->script;
	size_t n = q->script_bytes;
	struct run *r;
	int status = check_request(s, q, e);

	if (status < 0)
		return status;
	if (q->argv) {
		text = line = json_dumps(q->argv, JSON_COMPACT);
		n = line ? strlen(line) : 0;
		if (!line)
			return err_set(e, ENOMEM, "out of memory");
	}
	r = run_new(s, s->p->next_run, shared_text_new(text, n), n, e);
	if (!r)
		return -ENOMEM;
	status = keep_request(r, q, e);
	if (status == 0)
		status = link_open(r, e);
	if (status < 0) {
		object_remove(s->core, &r->object);
		return status;
	}
	r->p->may_time_out = r->p->timeout_ms && r->p->timeout_ms <= START_MS;
	s->p->next_run++;
	s->running++;
	s->core->count.runs++;
	run_list(r);
	object_changed(&s->object);
	r->p->op = op;
	if (op) {
		op->callee = r;
		op->cancel = cancel;
	}
	loop_timer(s->core->loop, &r->p->timer,
		   deadline_ms(r->p->may_time_out ? r->p->timeout_ms + GRACE_MS : START_MS));
	*out = r;
	return op ? VMENV_PENDING : 0;
}

int run_kill(struct run *r, int signal, struct err *e)
{
	if (r->object.gone)
		return err_set(e, ENOENT, "the run is gone");
	if (signal < 1 || signal > 64)
		return err_set(e, EINVAL, "there is no signal %d", signal);
	if (!run_going(r))
		return err_set(e, ESRCH, "run %llu has ended", (unsigned long long)r->number);
	if (signal == SIGKILL) {
		kill_run(r);
		return 0;
	}
	if (!r->p->agent)
		return err_set(e, EBUSY, "run %llu cannot be reached just now", (unsigned long long)r->number);
	/* A run that ends by the signal it was sent was killed. */
	r->p->killed_softly = true;
	return agent_send_signal(r->p->agent, signal) < 0 ? err_set(e, ENOMEM, "out of memory") : 0;
}

int run_attach(struct run *r, struct err *e)
{
	r->p->attach = true;
	loop_timer(r->sandbox->core->loop, &r->p->timer, deadline_ms(START_MS));
	return link_open(r, e);
}

void run_finish_if_due(struct run *r)
{
	if (r->p->finished && run_going(r))
		finish(r);
}

/* ---- all of a sandbox ---- */

void runs_end(struct sandbox *s, enum run_state state, const char *why)
{
	struct run *r, *next;
	struct err e = { 0 };

	err_set(&e, EIO, "%.470s", why);
	for (r = s->runs; r; r = next) {
		next = r->next;
		run_end(r, state, -EIO, &e);
	}
}

void runs_save(struct sandbox *s)
{
	for (struct run *r = s->runs; r; r = r->next)
		if (!run_going(r))
			save(r);
}

void runs_forget(struct sandbox *s)
{
	while (s->runs)
		run_drop(s->runs);
	store_run_remove(s->core->store, s->object.id, 0, NULL);
}

/* A frozen guest's clock for its deadlines stands still, so the host's does too. */
void runs_freeze(struct sandbox *s)
{
	uint64_t now = now_ns(CLOCK_MONOTONIC);

	for (struct run *r = s->runs; r; r = r->next) {
		if (!run_going(r) || !r->p->timer.deadline)
			continue;
		r->p->left_ns = r->p->timer.deadline > now ? r->p->timer.deadline - now : 1;
		loop_timer_cancel(s->core->loop, &r->p->timer);
	}
}

void runs_thaw(struct sandbox *s)
{
	for (struct run *r = s->runs; r; r = r->next) {
		if (run_going(r) && r->p->left_ns)
			loop_timer(s->core->loop, &r->p->timer, now_ns(CLOCK_MONOTONIC) + r->p->left_ns);
		r->p->left_ns = 0;
	}
}
