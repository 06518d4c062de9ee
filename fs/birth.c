/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Births: create, fork and reset. All three fork a machine (a template's zygote, or a running one) and bring each child
 * to where its agent takes commands. The children's sockets are made here and connected to before the fork is even
 * asked for, and everything each child is to do waits in them; so the server sleeps until the work is done.
 *
 * All or none: the first failure unmakes every child, and what was asked fails with its sentence.
 */
#include "back.h"

#define PATIENCE_MS 30000u     /* for one child to answer, in an emulated host as well */
#define PATIENCE_MORE_MS 2000u /* for each further one */

enum birth_kind { BIRTH_CREATE, BIRTH_FORK, BIRTH_RESET };

struct newborn {
	struct birth *birth;
	struct sandbox *s;
	struct machine_client *machine; /* until the sandbox takes it over */
	struct awaken awaken;
	struct op attach;
	bool attaching, ready;
};

struct birth {
	struct core *core;
	struct op *op;
	enum birth_kind kind;
	bool frozen, forked, over;
	bool goes_on; /* the mother was awake */
	struct machine_call fork;
	struct timer deadline;
	uint64_t started_ns, pause_ns;
	unsigned count, ready;
	struct err child_err; /* a child ended before the fork was answered */
	struct newborn child[];
};

static void birth_free(void *arg)
{
	free(arg);
}

static void child_clear(struct newborn *n)
{
	if (n->attaching)
		op_cancel(&n->attach);
	n->attaching = false;
	awaken_cancel(&n->awaken);
	if (n->machine) {
		struct machine_client *m = n->machine;

		n->machine = NULL;
		machine_quit(m);
	}
}

static void birth_end(struct birth *b, int status, const struct err *e)
{
	b->over = true;
	machine_call_drop(&b->fork);
	loop_timer_cancel(b->core->loop, &b->deadline);
	op_finish(b->core, steal_ptr(&b->op), status, e);
	core_later(b->core, birth_free, b);
}

void birth_abandon(struct birth *b, const struct err *e)
{
	struct err why = *e;

	if (b->over)
		return;
	b->over = true;
	for (unsigned i = 0; i < b->count; i++) {
		struct newborn *n = &b->child[i];

		child_clear(n);
		if (!n->s)
			continue;
		n->s->p->birth = NULL;
		if (b->kind != BIRTH_RESET) {
			sandbox_release_machine(n->s, why.text);
			sandbox_unmake(n->s);
		}
	}
	if (b->kind == BIRTH_CREATE)
		b->core->count.create_failures++;
	else if (b->kind == BIRTH_FORK)
		b->core->count.fork_failures++;
	birth_end(b, -why.code, &why);
}

static void cancel(struct op *op)
{
	struct birth *b = op->callee;
	struct err e = { 0 };

	b->op = NULL;
	err_set(&e, ECANCELED, "interrupted");
	birth_abandon(b, &e);
}

static void announce(struct newborn *n)
{
	static const char *const names[] = {[BIRTH_CREATE] = "create", [BIRTH_FORK] = "fork", [BIRTH_RESET] = "reset"};
	struct sandbox *s = n->s;

	core_event(s->core, names[n->birth->kind], s->name,
		   json_pack("{s:s, s:s, s:f}", "source", s->source->name, "parent", s->parent, "ready_ms",
			     (double)(s->p->ready_ns / 1000) / 1000.0));
}

/* The old machine goes only now that the new one works. */
static void replace(struct newborn *n)
{
	struct sandbox *s = n->s;

	sandbox_release_machine(s, "the sandbox was reset");
	runs_end(s, RUN_LOST, "the sandbox was reset");
	runs_forget(s);
	s->p->next_run = 1;
}

static void finish(struct birth *b)
{
	for (unsigned i = 0; i < b->count; i++) {
		struct newborn *n = &b->child[i];
		struct sandbox *s = n->s;

		s->p->birth = NULL;
		if (b->kind == BIRTH_RESET)
			replace(n);
		if (n->machine)
			sandbox_take_machine(s, steal_ptr(&n->machine));
		spare_put(s, steal_ptr(&n->awaken.agent));
		s->p->console_given = s->p->was_awake = !b->frozen;
		s->p->pause_ns = b->pause_ns;
		if (b->kind == BIRTH_RESET) {
			s->p->forked = false;
			s->parent[0] = 0;
			/* A frozen one runs again: reset gives what create gives. */
			sandbox_move(s, SANDBOX_RUNNING, NULL);
		} else {
			sandbox_move(s, b->frozen ? SANDBOX_FROZEN : SANDBOX_RUNNING, NULL);
		}
		sandbox_ttl(s);
		sandbox_save(s);
		if (b->kind == BIRTH_FORK)
			runs_save(s);
		announce(n);
	}
	if (b->kind == BIRTH_CREATE)
		b->core->count.creates += b->count;
	else if (b->kind == BIRTH_FORK)
		b->core->count.forks += b->count;
	else
		b->core->count.resets++;
	birth_end(b, 0, NULL);
}

static void child_ready(struct newborn *n)
{
	struct birth *b = n->birth;

	n->ready = true;
	n->s->p->ready_ns = now_ns(CLOCK_MONOTONIC) - b->started_ns;
	b->ready++;
	if (b->forked && b->ready == b->count)
		finish(b);
}

static void child_failed(struct newborn *n, const struct err *e)
{
	struct err why = { 0 };

	err_set(&why, e->code, "%.80s: %.380s", n->s->name, e->text);
	birth_abandon(n->birth, &why);
}

static void on_attached(struct op *op, int status, const struct err *e)
{
	struct newborn *n = op->arg;

	n->attaching = false;
	if (status < 0)
		child_failed(n, e);
	else
		child_ready(n);
}

static void on_awake(struct awaken *a, int status, const struct err *e)
{
	struct newborn *n = a->arg;
	struct err why = { 0 };
	int r;

	if (status < 0) {
		/* The end of a child that never was: the fork's own answer says why. */
		if (!n->birth->forked && status == -EIO)
			n->birth->child_err = *e;
		else
			child_failed(n, e);
		return;
	}
	if (n->birth->kind != BIRTH_FORK || n->s->running == 0) {
		child_ready(n);
		return;
	}
	/* Runs that go on in the copy are attached to through its own machine. */
	sandbox_take_machine(n->s, steal_ptr(&n->machine));
	n->attach = (struct op){ .done = on_attached, .arg = n };
	n->attaching = true;
	r = runs_attach(n->s, &n->attach, &why);
	if (r == VMENV_PENDING)
		return;
	n->attaching = false;
	if (r < 0)
		child_failed(n, &why);
	else
		child_ready(n);
}

static void on_greeted(struct machine_client *m)
{
	struct newborn *n = m->arg;

	n->s->p->create_ns = m->hello_ns - n->birth->started_ns;
	if (n->birth->frozen)
		child_ready(n);
}

static void on_child_ended(struct machine_client *m, const char *sentence)
{
	struct newborn *n = m->arg;
	struct err e = { 0 };

	n->machine = NULL;
	err_set(&e, EIO, "%.470s", sentence);
	if (n->birth->forked)
		child_failed(n, &e);
	else
		n->birth->child_err = e;
}

static void on_forked(struct machine_call *call, int status, const struct machine_msg *m, const struct err *e)
{
	struct birth *b = call->arg;

	if (status < 0) {
		struct err why = *e;

		/* No answer: the one that was to be forked has ended. Of a template the next create starts another. */
		if (!m && b->kind != BIRTH_FORK)
			err_set(&why, e->code, "the machine of template %.64s ended before it was forked: %.300s",
				b->child[0].s->source->name, e->text);
		birth_abandon(b, &why);
		return;
	}
	b->forked = true;
	b->pause_ns = m->value[0];
	if (b->child_err.code)
		birth_abandon(b, &b->child_err);
	else if (b->ready == b->count)
		finish(b);
}

static void on_deadline(struct timer *t)
{
	struct birth *b = t->arg;
	struct err e = { 0 };

	err_set(&e, ETIMEDOUT,
		b->forked ? "%u of %u machines did not start in time"
			  : "the machine was not forked in time: %u of %u wait",
		b->count - b->ready, b->count);
	birth_abandon(b, &e);
}

/* The child's socket, its client, and what it is to do first. *listening is for the machine. */
static int child_begin(struct newborn *n, uint64_t patience_ms, int *listening, struct err *e)
{
	struct birth *b = n->birth;
	struct core *c = b->core;
	uint64_t id = store_id(c->store);
	int r;

	r = machine_listen(&c->machines, id, e);
	if (r < 0)
		return r;
	*listening = r;
	r = machine_connect(&c->machines, id, &n->machine, e);
	if (r < 0)
		return r;
	n->machine->arg = n;
	n->machine->greeted = on_greeted;
	n->machine->ended = on_child_ended;
	if (b->frozen)
		return 0;
	n->awaken = (struct awaken){ .done = on_awake, .arg = n, .goes_on = b->goes_on };
	return awaken_start(&n->awaken, c->loop, n->machine, &n->s->source->config, n->s->console_fd, patience_ms, e);
}

/* Everything is there but the fork. Fails as a whole; VMENV_PENDING otherwise. */
static int birth_go(struct birth *b, struct machine_client *mother, struct err *e)
{
	uint64_t patience = PATIENCE_MS + (uint64_t)PATIENCE_MORE_MS * b->count;
	int fds[MACHINE_FORK_MAX], r = 0;
	unsigned n;

	for (n = 0; n < b->count && r == 0; n++) {
		fds[n] = -1;
		r = child_begin(&b->child[n], patience, &fds[n], e);
	}
	if (r < 0) {
		while (n--)
			if (fds[n] >= 0)
				close(fds[n]);
		return r;
	}
	b->fork.done = on_forked;
	b->fork.arg = b;
	r = machine_request(mother, &b->fork, MACHINE_FORK, b->count, NULL, 0, fds, b->count, 0, e);
	if (r < 0)
		return r;
	b->deadline = (struct timer){ .fire = on_deadline, .arg = b };
	loop_timer(b->core->loop, &b->deadline, deadline_ms(patience));
	return VMENV_PENDING;
}

static struct birth *birth_new(struct core *c, enum birth_kind kind, unsigned count, struct op *op)
{
	struct birth *b = calloc(1, sizeof(*b) + count * sizeof(b->child[0]));

	if (!b)
		return NULL;
	b->core = c;
	b->kind = kind;
	b->count = count;
	b->op = op;
	b->started_ns = now_ns(CLOCK_MONOTONIC);
	for (unsigned i = 0; i < count; i++)
		b->child[i].birth = b;
	return b;
}

/* A failure before anything is pending: the caller gets it as its return value, not through the op. */
static int birth_refuse(struct birth *b, int r, const struct err *e)
{
	struct err why = *e;

	b->op = NULL;
	if (!why.code)
		err_set(&why, -r, "%s", strerror(-r));
	birth_abandon(b, &why);
	return r;
}

static int birth_pending(struct birth *b, struct op *op)
{
	if (!op)
		return 0;
	op->callee = b;
	op->cancel = cancel;
	return VMENV_PENDING;
}

static int check_names(struct core *c, const char *name, unsigned count, struct err *e)
{
	char text[NAME_LIMIT + 16];

	if (!name_valid(name, strlen(name)))
		return err_set(
			e, EINVAL,
			"'%.80s' cannot be a sandbox's name: letters, digits, and . _ - after the first, at most %d",
			name, NAME_LIMIT);
	if (count > MACHINE_FORK_MAX)
		return err_set(e, EINVAL, "count must be between 1 and %u, not %u", MACHINE_FORK_MAX, count);
	for (unsigned i = 0; i < MAX(count, 1u); i++) {
		if (count)
			snprintf(text, sizeof(text), "%s-%u", name, i);
		else
			snprintf(text, sizeof(text), "%s", name);
		if (!name_valid(text, strlen(text)))
			return err_set(e, EINVAL, "'%s' would be longer than %d bytes", text, NAME_LIMIT);
		if (sandbox_find(c, text))
			return err_set(e, EEXIST, "there is a sandbox %s already", text);
	}
	return 0;
}

static int make_child(struct birth *b, unsigned i, const char *name, bool numbered, struct template *t, struct err *e)
{
	char text[NAME_LIMIT + 16];
	int r;

	if (numbered)
		snprintf(text, sizeof(text), "%s-%u", name, i);
	else
		snprintf(text, sizeof(text), "%s", name);
	r = sandbox_make(b->core, text, t, &b->child[i].s, e);
	if (r == 0)
		b->child[i].s->p->birth = b;
	return r;
}

static int find_template(struct core *c, const char *source, struct template **t, struct err *e)
{
	const char *name = strncmp(source, "templates/", 10) == 0 ? source + 10 : source;

	if (strncmp(source, "snapshots/", 10) == 0)
		return err_set(e, ENOENT, "there is no snapshot %.80s: snapshots are not supported in this version",
			       source + 10);
	*t = template_find(c, name);
	if (!*t)
		return err_set(e, ENOENT, "there is no template %.80s", name);
	if ((*t)->state != TEMPLATE_READY)
		return err_set(e, EBUSY, "template %s is %s, not ready%s%.300s", name,
			       template_state_names[(*t)->state], (*t)->reason[0] ? ": " : "", (*t)->reason);
	return 0;
}

static int apply_settings(struct sandbox *s, const struct create *how, struct err *e)
{
	for (unsigned i = 0; i < how->settings; i++) {
		const char *key = how->setting[i].key, *value = how->setting[i].value;
		int r = strncmp(key, "meta.", 5) == 0 ? metadata_set(s, key + 5, value, strlen(value), e) :
							settings_set(&s->settings, key, value, e);

		if (r < 0)
			return r;
	}
	return 0;
}

int sandbox_create(struct core *c, const struct create *how, struct op *op, struct err *e)
{
	struct machine_client *mother;
	struct err why = { 0 };
	struct template *t = NULL;
	struct birth *b;
	int r;

	r = check_names(c, how->name, how->count, e);
	if (r == 0)
		r = find_template(c, how->source, &t, e);
	if (r == 0)
		r = core_admit(c, MAX(how->count, 1u), e);
	if (r == 0)
		r = template_zygote(t, &mother, e);
	if (r < 0)
		return r;
	b = birth_new(c, BIRTH_CREATE, MAX(how->count, 1u), op);
	if (!b)
		return err_set(e, ENOMEM, "out of memory");
	b->frozen = how->frozen;
	for (unsigned i = 0; i < b->count && r == 0; i++) {
		r = make_child(b, i, how->name, how->count > 0, t, &why);
		if (r == 0)
			r = apply_settings(b->child[i].s, how, &why);
		if (r == 0)
			r = sandbox_console_open(b->child[i].s, -1, &why);
	}
	if (r == 0)
		r = birth_go(b, mother, &why);
	if (r < 0) {
		if (e)
			*e = why;
		return birth_refuse(b, r, &why);
	}
	return birth_pending(b, op);
}

static int inherit(struct sandbox *to, struct sandbox *from, struct err *e)
{
	int r;

	snprintf(to->parent, sizeof(to->parent), "%s", from->name);
	to->settings = from->settings;
	to->p->forked = true;
	r = metadata_copy(to, from, e);
	if (r == 0)
		r = sandbox_console_open(to, from->console_fd, e);
	if (r == 0)
		r = runs_inherit(to, from, e);
	return r;
}

int sandbox_fork(struct sandbox *s, const char *name, unsigned count, struct op *op, struct err *e)
{
	struct core *c = s->core;
	struct err why = { 0 };
	struct birth *b;
	int r = 0;

	if (s->object.gone)
		return err_set(e, ENOENT, "the sandbox is gone");
	if (s->state == SANDBOX_DEAD)
		return err_set(e, EIO, "sandbox %s is dead: %.380s", s->name, s->reason);
	if (s->state == SANDBOX_CREATING)
		return err_set(e, EBUSY, "sandbox %s is being created", s->name);
	r = check_names(c, name, count, e);
	if (r == 0)
		r = core_admit(c, MAX(count, 1u), e);
	if (r < 0)
		return r;
	b = birth_new(c, BIRTH_FORK, MAX(count, 1u), op);
	if (!b)
		return err_set(e, ENOMEM, "out of memory");
	b->goes_on = s->p->was_awake;
	for (unsigned i = 0; i < b->count && r == 0; i++) {
		r = make_child(b, i, name, count > 0, s->source, &why);
		if (r == 0)
			r = inherit(b->child[i].s, s, &why);
	}
	if (r == 0)
		r = birth_go(b, s->p->machine, &why);
	if (r < 0) {
		if (e)
			*e = why;
		return birth_refuse(b, r, &why);
	}
	return birth_pending(b, op);
}

int sandbox_reset(struct sandbox *s, struct op *op, struct err *e)
{
	struct core *c = s->core;
	struct machine_client *mother;
	struct err why = { 0 };
	struct birth *b;
	int r;

	if (s->object.gone)
		return err_set(e, ENOENT, "the sandbox is gone");
	if (s->state == SANDBOX_CREATING)
		return err_set(e, EBUSY, "sandbox %s is being created", s->name);
	if (s->p->birth)
		return err_set(e, EBUSY, "sandbox %s is being reset already", s->name);
	if (s->p->change)
		return err_set(e, EBUSY, "sandbox %s is being frozen or thawed", s->name);
	r = core_admit(c, 1, e);
	if (r == 0)
		r = template_zygote(s->source, &mother, e);
	if (r < 0)
		return r;
	b = birth_new(c, BIRTH_RESET, 1, op);
	if (!b)
		return err_set(e, ENOMEM, "out of memory");
	b->child[0].s = s;
	s->p->birth = b;
	r = birth_go(b, mother, &why);
	if (r < 0) {
		if (e)
			*e = why;
		return birth_refuse(b, r, &why);
	}
	return birth_pending(b, op);
}
