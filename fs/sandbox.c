/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sandboxes: their states and moves, freeze and thaw, their end. How they come to be is birth.c, what can be asked of a
 * living one sandbox_ask.c.
 *
 *   creating -> running | frozen      birth.c
 *   running <-> frozen                freeze, thaw
 *   running | frozen -> dead          kill, ttl, the machine's own end
 *   dead -> running                   reset
 */
#include "back.h"

#include <sys/stat.h>

#define ANSWER_MS 30000u /* in an emulated host as well */

const char *const sandbox_state_names[] = {
	[SANDBOX_CREATING] = "creating", [SANDBOX_RUNNING] = "running", [SANDBOX_FROZEN] = "frozen",
	[SANDBOX_HIBERNATED] = "hibernated", [SANDBOX_DEAD] = "dead",
};

/* A freeze or thaw that is on its way. */
struct change {
	struct sandbox *s;
	struct op *op; /* NULL: nobody waits any more */
	struct machine_call pause;
	struct awaken awaken;
};

struct sandbox *sandbox_list(struct core *c)
{
	return c->sandboxes;
}

struct sandbox *sandbox_find(struct core *c, const char *name)
{
	for (struct sandbox *s = c->sandboxes; s; s = s->next)
		if (strcmp(s->name, name) == 0)
			return s;
	return NULL;
}

struct sandbox *sandbox_by_id(struct core *c, uint64_t id)
{
	return index_get(&c->index, id, KIND_SANDBOX);
}

static void sandbox_free(struct object *o)
{
	struct sandbox *s = (struct sandbox *)o;

	metadata_clear(s);
	if (s->console_fd >= 0)
		close(s->console_fd);
	object_put(&s->source->object);
	free(s->p);
	free(s);
}

bool sandbox_alive(const struct sandbox *s)
{
	return s->state != SANDBOX_DEAD && !s->object.gone;
}

static void on_ttl(struct timer *t)
{
	struct sandbox *s = t->arg;

	s->core->count.expired++;
	sandbox_kill(s, "ttl expired", NULL, NULL);
}

int sandbox_make(struct core *c, const char *name, struct template *t, struct sandbox **out, struct err *e)
{
	struct sandbox *s = calloc(1, sizeof(*s));
	struct sandbox_private *p = calloc(1, sizeof(*p));
	int r;

	if (!s || !p) {
		free(s);
		free(p);
		return err_set(e, ENOMEM, "out of memory");
	}
	s->core = c;
	s->p = p;
	s->console_fd = -1;
	s->state = SANDBOX_CREATING;
	snprintf(s->name, sizeof(s->name), "%s", name);
	s->settings = t->config.settings;
	s->created_ns = now_ns(CLOCK_REALTIME);
	p->next_run = 1;
	p->ttl = (struct timer){ .fire = on_ttl, .arg = s };
	r = object_init(c, &s->object, KIND_SANDBOX, s, sandbox_free, e);
	if (r < 0) {
		free(p);
		free(s);
		return r;
	}
	s->source = t;
	object_get(&t->object);
	t->users++;
	s->next = c->sandboxes;
	c->sandboxes = s;
	c->generation++;
	*out = s;
	return 0;
}

static void console_name(const struct sandbox *s, char name[24])
{
	snprintf(name, 24, "%llu", (unsigned long long)s->object.id);
}

static void unlist(struct sandbox *s)
{
	struct core *c = s->core;
	struct sandbox **p;
	char name[24];

	for (p = &c->sandboxes; *p != s; p = &(*p)->next)
		;
	*p = s->next;
	if (s->state == SANDBOX_DEAD)
		c->dead--;
	else
		s->source->users--;
	loop_timer_cancel(c->loop, &s->p->ttl);
	runs_forget(s);
	if (s->console_fd >= 0) {
		console_name(s, name);
		unlinkat(c->consoles_fd, name, 0);
	}
	object_remove(c, &s->object);
}

void sandbox_unmake(struct sandbox *s)
{
	unlist(s);
}

int sandbox_console_open(struct sandbox *s, int copy_from, struct err *e)
{
	struct stat st;
	char name[24];

	console_name(s, name);
	s->console_fd = openat(s->core->consoles_fd, name, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	if (s->console_fd < 0)
		return err_set(e, errno, "cannot make the console's log: %s", strerror(errno));
	if (copy_from >= 0 && fstat(copy_from, &st) == 0 && st.st_size > 0) {
		char buffer[16384];
		off_t at = MAX(st.st_size - (off_t)(256 << 10), 0); /* the newest part of a long one */
		ssize_t n;

		while ((n = pread(copy_from, buffer, sizeof(buffer), at)) > 0 && at < st.st_size) {
			if (write(s->console_fd, buffer, (size_t)n) != n)
				return err_set(e, errno, "cannot copy the console's log: %s", strerror(errno));
			at += n;
		}
	}
	return 0;
}

void sandbox_save(struct sandbox *s)
{
	struct err e = { 0 };

	if (store_sandbox_put(s->core->store, &(struct store_sandbox){
		.id = s->object.id, .template = s->source->object.id, .machine = s->p->machine ? s->p->machine->id : 0,
		.name = s->name, .parent = s->parent, .state = sandbox_state_names[s->state], .reason = s->reason,
		.created_ns = (int64_t)s->created_ns, .expires_ns = (int64_t)s->expires_ns }, &e) < 0)
		core_fail(s->core, s->name, "save", &e);
}

static void retire_oldest(struct core *c)
{
	struct sandbox *oldest = NULL;

	for (struct sandbox *s = c->sandboxes; s; s = s->next)
		if (s->state == SANDBOX_DEAD && (!oldest || s->object.changed_ns < oldest->object.changed_ns))
			oldest = s;
	if (oldest)
		sandbox_forget(oldest, NULL, NULL);
}

void sandbox_move(struct sandbox *s, enum sandbox_state state, const char *reason)
{
	static const bool legal[][SANDBOX_DEAD + 1] = {
		[SANDBOX_CREATING] = { [SANDBOX_RUNNING] = true, [SANDBOX_FROZEN] = true, [SANDBOX_DEAD] = true },
		[SANDBOX_RUNNING] = { [SANDBOX_FROZEN] = true, [SANDBOX_DEAD] = true },
		[SANDBOX_FROZEN] = { [SANDBOX_RUNNING] = true, [SANDBOX_DEAD] = true },
		[SANDBOX_DEAD] = { [SANDBOX_RUNNING] = true },
	};
	struct core *c = s->core;
	json_t *more;

	if (s->state == state || !legal[s->state][state])
		return;
	if (state == SANDBOX_DEAD) {
		s->source->users--;
		if (++c->dead > DEAD_KEPT)
			retire_oldest(c);
	} else if (s->state == SANDBOX_DEAD) {
		s->source->users++;
		c->dead--;
	}
	s->state = state;
	snprintf(s->reason, sizeof(s->reason), "%s", reason ? reason : "");
	object_changed(&s->object);
	more = json_pack("{s:s}", "state", sandbox_state_names[state]);
	if (more && reason)
		json_object_set_new(more, "reason", json_string(reason));
	core_event(c, "state", s->name, more);
	sandbox_save(s);
}

void sandbox_ttl(struct sandbox *s)
{
	if (s->settings.ttl_ms == 0) {
		s->expires_ns = 0;
		loop_timer_cancel(s->core->loop, &s->p->ttl);
		return;
	}
	s->expires_ns = now_ns(CLOCK_REALTIME) + s->settings.ttl_ms * MS;
	loop_timer(s->core->loop, &s->p->ttl, deadline_ms(s->settings.ttl_ms));
}

/* ---- the machine ---- */

static void change_end(struct sandbox *s, int status, const struct err *e)
{
	struct change *ch = s->p->change;

	if (!ch)
		return;
	s->p->change = NULL;
	machine_call_drop(&ch->pause);
	awaken_cancel(&ch->awaken);
	op_finish(s->core, ch->op, status, e);
	core_later(s->core, free, ch);
}

static void process_gone(struct machine_client *m)
{
	struct sandbox *s = m->arg;

	if (--s->p->ending == 0)
		ops_finish(s->core, &s->p->enders, 0, NULL);
	object_put(&s->object);
}

static void machine_ended(struct machine_client *m, const char *sentence)
{
	struct sandbox *s = m->arg;
	struct err e = { 0 };

	s->core->count.deaths++;
	s->p->machine = NULL;
	spare_close(s);
	err_set(&e, EIO, "sandbox %s is dead: %.380s", s->name, sentence);
	change_end(s, -EIO, &e);
	/* A reset goes on: its machine is another one. */
	if (s->state == SANDBOX_CREATING) {
		birth_abandon(s->p->birth, &e);
		return;
	}
	loop_timer_cancel(s->core->loop, &s->p->ttl);
	runs_end(s, RUN_LOST, e.text);
	sandbox_move(s, SANDBOX_DEAD, sentence);
}

void sandbox_take_machine(struct sandbox *s, struct machine_client *m)
{
	s->p->machine = m;
	m->ended = machine_ended;
	m->greeted = NULL;
	m->gone = process_gone;
	m->arg = s;
	s->p->ending++;
	object_get(&s->object);
}

void sandbox_release_machine(struct sandbox *s, const char *why)
{
	struct machine_client *m = s->p->machine;

	if (!m)
		return;
	s->p->machine = NULL;
	spare_close(s);
	s->p->console_given = false;
	if (!m->sentence[0])
		snprintf(m->sentence, sizeof(m->sentence), "%.470s", why);
	machine_quit(m);
}

int sandbox_need_machine(struct sandbox *s, struct err *e)
{
	if (s->object.gone)
		return err_set(e, ENOENT, "the sandbox is gone");
	if (s->state == SANDBOX_DEAD)
		return err_set(e, EIO, "sandbox %s is dead: %.380s", s->name, s->reason);
	if (s->state == SANDBOX_CREATING)
		return err_set(e, EBUSY, "sandbox %s is being created", s->name);
	if (s->p->change)
		return err_set(e, EBUSY, "sandbox %s is being frozen or thawed", s->name);
	return 0;
}

static void change_cancel(struct op *op)
{
	((struct change *)op->callee)->op = NULL;
}

static struct change *change_begin(struct sandbox *s, struct op *op, struct err *e)
{
	struct change *ch = calloc(1, sizeof(*ch));

	if (!ch) {
		err_set(e, ENOMEM, "out of memory");
		return NULL;
	}
	ch->s = s;
	ch->op = op;
	s->p->change = ch;
	return ch;
}

static int change_allowed(struct sandbox *s, struct err *e)
{
	int r = sandbox_need_machine(s, e);

	if (r == 0 && s->p->birth)
		r = err_set(e, EBUSY, "sandbox %s is being reset", s->name);
	return r;
}

/* What freeze and thaw answer once the machine was asked (r: how that went). */
static int change_begun(struct change *ch, struct op *op, int r)
{
	if (r < 0) {
		ch->op = NULL;
		change_end(ch->s, r, NULL);
		return r;
	}
	if (!op)
		return 0;
	op->callee = ch;
	op->cancel = change_cancel;
	return VMENV_PENDING;
}

static void on_paused(struct machine_call *call, int status, const struct machine_msg *m, const struct err *e)
{
	struct change *ch = call->arg;
	struct sandbox *s = ch->s;

	/* The machine's end is told by machine_ended; nothing is to be done here then. */
	if (status < 0 && !m && status != -ETIMEDOUT)
		return;
	if (status == 0) {
		runs_freeze(s);
		sandbox_move(s, SANDBOX_FROZEN, NULL);
	}
	change_end(s, status, e);
}

int sandbox_freeze(struct sandbox *s, struct op *op, struct err *e)
{
	struct change *ch;
	int r = change_allowed(s, e);

	if (r < 0)
		return r;
	if (s->state == SANDBOX_FROZEN)
		return 0;
	ch = change_begin(s, op, e);
	if (!ch)
		return -ENOMEM;
	ch->pause.done = on_paused;
	ch->pause.arg = ch;
	r = machine_request(s->p->machine, &ch->pause, MACHINE_PAUSE, 0, NULL, 0, NULL, 0, ANSWER_MS, e);
	return change_begun(ch, op, r);
}

static void on_awake(struct awaken *a, int status, const struct err *e)
{
	struct sandbox *s = ((struct change *)a->arg)->s;

	/* An agent that does not answer leaves a machine that runs all the same. */
	if (status == 0 || a->resumed) {
		s->p->console_given = s->p->was_awake = true;
		runs_thaw(s);
		spare_put(s, steal_ptr(&a->agent));
		sandbox_move(s, SANDBOX_RUNNING, NULL);
	}
	change_end(s, status, e);
}

int sandbox_thaw(struct sandbox *s, struct op *op, struct err *e)
{
	struct change *ch;
	int r = change_allowed(s, e);

	if (r < 0)
		return r;
	if (s->state == SANDBOX_RUNNING)
		return 0;
	ch = change_begin(s, op, e);
	if (!ch)
		return -ENOMEM;
	ch->awaken.done = on_awake;
	ch->awaken.arg = ch;
	ch->awaken.goes_on = s->p->was_awake;
	/* The guest is set up again: its clock has stood still, and its randomness may have been copied meanwhile. */
	r = awaken_start(&ch->awaken, s->core->loop, s->p->machine, &s->source->config,
			 s->p->console_given ? -1 : s->console_fd, ANSWER_MS, e);
	return change_begun(ch, op, r);
}

/* ---- the end ---- */

static int await_processes(struct sandbox *s, struct op *op)
{
	if (s->p->ending == 0 || !op)
		return 0;
	op_wait(&s->p->enders, op);
	return VMENV_PENDING;
}

int sandbox_kill(struct sandbox *s, const char *reason, struct op *op, struct err *e)
{
	struct err why = { 0 };

	if (s->object.gone)
		return err_set(e, ENOENT, "the sandbox is gone");
	if (s->state == SANDBOX_DEAD && !s->p->birth)
		return await_processes(s, op);
	err_set(&why, EIO, "sandbox %s is dead: %.380s", s->name, reason);
	if (s->p->birth)
		birth_abandon(s->p->birth, &why);
	if (s->object.gone)
		return 0; /* it was being created, and never was */
	if (s->state == SANDBOX_DEAD)
		return await_processes(s, op);
	s->core->count.kills++;
	change_end(s, -EIO, &why);
	loop_timer_cancel(s->core->loop, &s->p->ttl);
	sandbox_release_machine(s, why.text);
	runs_end(s, RUN_LOST, why.text);
	sandbox_move(s, SANDBOX_DEAD, reason);
	return await_processes(s, op);
}

int sandbox_forget(struct sandbox *s, struct op *op, struct err *e)
{
	struct core *c = s->core;
	int r;

	if (s->object.gone)
		return err_set(e, ENOENT, "the sandbox is gone");
	sandbox_kill(s, "removed", NULL, NULL);
	if (s->object.gone)
		return 0;
	r = store_sandbox_remove(c->store, s->object.id, e);
	if (r < 0)
		return r;
	core_event(c, "removed", s->name, NULL);
	/* The name is free at once; the object lives on until its processes are gone. */
	unlist(s);
	return await_processes(s, op);
}

void sandboxes_close(struct core *c)
{
	struct err e = { 0 };

	err_set(&e, EIO, "the server is being stopped");
	while (c->sandboxes) {
		struct sandbox *s = c->sandboxes;

		sandbox_kill(s, "the server was stopped", NULL, NULL);
		if (!s->object.gone) {
			ops_finish(c, &s->p->waiters, 0, NULL);
			ops_finish(c, &s->p->enders, 0, NULL);
			store_sandbox_remove(c->store, s->object.id, NULL);
			unlist(s);
		}
	}
	/* Their processes' end is waited for by machines_close, which tells nobody. */
	for (struct machine_client *m = c->machines.list; m; m = m->next)
		if (m->gone == process_gone) {
			m->gone = NULL;
			process_gone(m);
		}
}

/* ---- settings and waiting ---- */


int sandbox_set(struct sandbox *s, const char *key, const char *value, struct err *e)
{
	int r;

	if (s->object.gone)
		return err_set(e, ENOENT, "the sandbox is gone");
	r = settings_set(&s->settings, key, value, e);
	if (r < 0)
		return r;
	/* The timer is moved here and now, in the thread that would fire it: renewal and expiry cannot cross. */
	if (strcmp(key, "ttl") == 0 && sandbox_alive(s) && s->state != SANDBOX_CREATING) {
		sandbox_ttl(s);
		sandbox_save(s);
	}
	object_changed(&s->object);
	return 0;
}

int sandbox_wait(struct sandbox *s, struct op *op, struct err *e)
{
	if (s->object.gone)
		return err_set(e, ENOENT, "the sandbox is gone");
	if (s->running == 0)
		return 0;
	op_wait(&s->p->waiters, op);
	return VMENV_PENDING;
}
