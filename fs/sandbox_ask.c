/* SPDX-License-Identifier: Apache-2.0 */
/* What can be asked of a sandbox: typing on its console, its digest, its info. */
#include "back.h"

#define ANSWER_MS 60000u

struct typing {
	struct sandbox *s; /* referenced */
	struct op *op;
	struct machine_call call;
	struct timer retry;
	size_t done, bytes;
	unsigned sent;
	char text[];
};

static void typing_free(void *arg)
{
	struct typing *t = arg;

	object_put(&t->s->object);
	free(t);
}

static void typing_end(struct typing *t, int status, const struct err *e)
{
	machine_call_drop(&t->call);
	loop_timer_cancel(t->s->core->loop, &t->retry);
	op_finish(t->s->core, steal_ptr(&t->op), status, e);
	core_later(t->s->core, typing_free, t);
}

static void typing_cancel(struct op *op)
{
	struct typing *t = op->callee;

	t->op = NULL;
	typing_end(t, 0, NULL);
}

static void type_next(struct typing *t);

static void on_typed(struct machine_call *call, int status, const struct machine_msg *m, const struct err *e)
{
	struct typing *t = call->arg;

	/* How much fitted is in count; a full input queue drains as the guest reads. */
	if (status < 0 && status != -EAGAIN) {
		typing_end(t, status, e);
		return;
	}
	t->done += status == 0 ? MIN(m->count, t->sent) : 0;
	if (t->done == t->bytes)
		typing_end(t, 0, NULL);
	else if (status == 0 && m->count)
		type_next(t);
	else
		loop_timer(t->s->core->loop, &t->retry, deadline_ms(5));
}

static void on_type_again(struct timer *timer)
{
	type_next(timer->arg);
}

static void type_next(struct typing *t)
{
	struct machine_client *m = t->s->p->machine;
	struct err e = { 0 };

	t->sent = (unsigned)MIN(t->bytes - t->done, sizeof(((struct machine_msg *)0)->text));
	t->call.done = on_typed;
	t->call.arg = t;
	if (!m)
		err_set(&e, EIO, "sandbox %s is dead: %.380s", t->s->name, t->s->reason);
	if (!m || machine_request(m, &t->call, MACHINE_CONSOLE, t->sent, t->text + t->done, t->sent, NULL, 0, ANSWER_MS,
				  &e) < 0)
		typing_end(t, -e.code, &e);
}

int sandbox_console_write(struct sandbox *s, const char *bytes, size_t n, struct op *op, struct err *e)
{
	struct typing *t;
	int r = sandbox_need_machine(s, e);

	if (r < 0)
		return r;
	if (s->state != SANDBOX_RUNNING)
		return err_set(e, EBUSY, "sandbox %s is frozen: thaw it to type on its console", s->name);
	if (n == 0)
		return 0;
	t = calloc(1, sizeof(*t) + n);
	if (!t)
		return err_set(e, ENOMEM, "out of memory");
	t->s = s;
	object_get(&s->object);
	memcpy(t->text, bytes, n);
	t->bytes = n;
	t->op = op;
	t->retry = (struct timer){ .fire = on_type_again, .arg = t };
	if (op) {
		op->callee = t;
		op->cancel = typing_cancel;
	}
	type_next(t);
	return op ? VMENV_PENDING : 0;
}

struct asking {
	struct sandbox *s; /* referenced */
	struct op *op;
	char **text;
	struct machine_call call;
};

static void asking_free(void *arg)
{
	struct asking *a = arg;

	object_put(&a->s->object);
	free(a);
}

static void asking_cancel(struct op *op)
{
	struct asking *a = op->callee;

	machine_call_drop(&a->call);
	core_later(a->s->core, asking_free, a);
}

static void on_digest(struct machine_call *call, int status, const struct machine_msg *m, const struct err *e)
{
	struct asking *a = call->arg;
	char memory[65], disk[65], state[65];
	struct err why = { 0 };

	if (e)
		why = *e;
	if (status == 0 && sscanf(m->text, "%64s %64s %64s", memory, disk, state) != 3)
		status = err_set(&why, EPROTO, "the machine gave an unsound digest");
	if (status == 0 && asprintf(a->text, "memory %s\ndisk %s\nstate %s\n", memory, disk, state) < 0)
		status = err_set(&why, ENOMEM, "out of memory");
	op_finish(a->s->core, a->op, status, &why);
	core_later(a->s->core, asking_free, a);
}

int sandbox_digest(struct sandbox *s, char **text, struct op *op, struct err *e)
{
	struct asking *a;
	int r = sandbox_need_machine(s, e);

	if (r < 0)
		return r;
	if (s->state != SANDBOX_FROZEN)
		return err_set(e, EBUSY, "sandbox %s is running: freeze it first", s->name);
	a = calloc(1, sizeof(*a));
	if (!a)
		return err_set(e, ENOMEM, "out of memory");
	a->s = s;
	a->op = op;
	a->text = text;
	a->call.done = on_digest;
	a->call.arg = a;
	r = machine_request(s->p->machine, &a->call, MACHINE_DIGEST, 0, NULL, 0, NULL, 0, 1800000, e);
	if (r < 0) {
		free(a);
		return r;
	}
	object_get(&s->object);
	op->callee = a;
	op->cancel = asking_cancel;
	return VMENV_PENDING;
}

/* Pages of its own: anonymous ones that no other process maps (a fork shares the rest with its parent). */
static uint64_t private_kb(struct sandbox *s)
{
	struct sandbox_private *p = s->p;
	uint64_t now = now_ns(CLOCK_MONOTONIC), kb = 0;
	char path[48], line[256];

	if (!p->machine || !p->machine->pid)
		return 0;
	if (p->private_when && now - p->private_when < 1000 * MS)
		return p->private_kb;
	snprintf(path, sizeof(path), "/proc/%d/smaps_rollup", (int)p->machine->pid);
	{
		AUTO_FILE FILE *f = fopen(path, "re");

		while (f && fgets(line, sizeof(line), f))
			if (strncmp(line, "Private_Dirty:", 14) == 0)
				kb = strtoull(line + 14, NULL, 10);
	}
	p->private_kb = kb;
	p->private_when = now;
	return kb;
}

static void set_time(json_t *j, const char *key, uint64_t ns)
{
	time_t t = (time_t)(ns / 1000000000);
	char text[40];
	struct tm tm;
	size_t n;

	if (!ns) {
		json_object_set_new(j, key, json_null());
		return;
	}
	gmtime_r(&t, &tm);
	n = strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%S", &tm);
	snprintf(text + n, sizeof(text) - n, ".%03uZ", (unsigned)(ns / 1000000 % 1000));
	json_object_set_new(j, key, json_string(text));
}

static void set_ms(json_t *j, const char *key, uint64_t ns)
{
	/* Microseconds are what there is to say; a double of them prints as such. */
	json_object_set_new(j, key, json_real((double)(ns / 1000) / 1000.0));
}

char *sandbox_info(struct sandbox *s)
{
	struct sandbox_private *p = s->p;
	const struct config *f = &s->source->config;
	json_t *j = json_object();
	char *text, *line = NULL;

	json_object_set_new(j, "id", json_integer((json_int_t)s->object.id));
	json_object_set_new(j, "source", json_string(s->source->name));
	json_object_set_new(j, "parent", s->parent[0] ? json_string(s->parent) : json_null());
	set_time(j, "created", s->created_ns);
	set_time(j, "expires", sandbox_alive(s) ? s->expires_ns : 0);
	json_object_set_new(j, "state", json_string(sandbox_state_names[s->state]));
	json_object_set_new(j, "reason", s->reason[0] ? json_string(s->reason) : json_null());
	json_object_set_new(j, "memory_mb", json_integer((json_int_t)f->memory_mb));
	json_object_set_new(j, "private_kb", json_integer((json_int_t)private_kb(s)));
	set_ms(j, p->forked ? "fork_ms" : "create_ms", p->create_ns);
	if (p->forked)
		set_ms(j, "pause_ms", p->pause_ns);
	set_ms(j, "ready_ms", p->ready_ns);
	json_object_set_new(j, "limits",
			    json_pack("{s:i, s:I, s:f, s:f, s:I}", "vcpus", (int)f->vcpus, "disk_mb",
				      (json_int_t)f->disk_mb, "ttl", (double)s->settings.ttl_ms / 1000.0, "timeout",
				      (double)s->settings.timeout_ms / 1000.0, "output_limit",
				      (json_int_t)s->settings.output_limit));
	text = json_dumps(j, JSON_INDENT(2) | JSON_REAL_PRECISION(12));
	json_decref(j);
	if (text && asprintf(&line, "%s\n", text) < 0)
		line = NULL;
	free(text);
	return line;
}
