/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From a paused machine to one whose agent takes commands: vCPUs run, a stream to the agent, AGENT_SETUP answered. All
 * three are sent at once and wait in the sockets, so that the server is woken when the last is done. A guest that boots
 * refuses the stream until its agent listens: it is tried again until `patience`.
 */
#include "back.h"

#define RETRY_MS 25

static void close_stream(struct awaken *a)
{
	machine_call_drop(&a->connect);
	agent_close(a->agent);
	a->agent = NULL;
}

void awaken_cancel(struct awaken *a)
{
	close_stream(a);
	if (!a->active)
		return;
	a->active = false;
	machine_call_drop(&a->resume);
	loop_timer_cancel(a->loop, &a->retry);
	loop_timer_cancel(a->loop, &a->deadline);
}

static void end(struct awaken *a, int status, const struct err *e)
{
	struct err copy = { 0 };

	struct agent *agent = NULL;

	if (e)
		copy = *e;
	if (status == 0)
		agent = steal_ptr(&a->agent);
	awaken_cancel(a);
	a->agent = agent;
	a->done(a, status, status < 0 ? &copy : NULL);
}

static void maybe_done(struct awaken *a)
{
	if (a->resumed && a->greeted)
		end(a, 0, NULL);
}

static void try_again(struct awaken *a, const struct err *e)
{
	snprintf(a->last, sizeof(a->last), "%.300s", e->text);
	close_stream(a);
	loop_timer(a->loop, &a->retry, deadline_ms(RETRY_MS));
}

static void on_frame(struct agent *agent, uint32_t type, const uint8_t *payload, uint32_t n)
{
	struct awaken *a = agent->arg;
	struct err e = { 0 };

	if (a->greeted) {
		close_stream(a);
		return;
	}
	if (type == AGENT_OK) {
		a->greeted = true;
		maybe_done(a);
		return;
	}
	if (type == AGENT_FAILED)
		agent_read_failed(payload, n, &e);
	else
		err_set(&e, EPROTO, "the guest's agent answered the set-up with a frame of type %u", type);
	end(a, -e.code, &e);
}

static void on_output(struct agent *agent, unsigned which, const uint8_t *bytes, uint32_t n)
{
	struct awaken *a = agent->arg;
	struct err e = { 0 };

	err_set(&e, EPROTO, "the guest's agent answered the set-up with output");
	if (a->greeted)
		close_stream(a);
	else
		end(a, -EPROTO, &e);
}

static void on_ended(struct agent *agent, const struct err *e)
{
	struct awaken *a = agent->arg;

	if (a->greeted)
		close_stream(a);
	else
		try_again(a, e);
}

static void on_connect(struct machine_call *call, int status, const struct machine_msg *m, const struct err *e)
{
	struct awaken *a = call->arg;

	if (status == 0 || a->greeted)
		return; /* what is in the stream is on its way, or was there already */
	if (!m && status != -ETIMEDOUT)
		end(a, status, e); /* the machine is no more */
	else
		try_again(a, e);
}

static void open_stream(struct awaken *a)
{
	struct err e = { 0 };
	bool frozen;
	int64_t now = config_clock(a->config, &frozen);
	int fd, r;

	frozen |= a->goes_on && a->config->clock == CLOCK_PINNED;
	a->connect.done = on_connect;
	a->connect.arg = a;
	r = machine_stream(a->machine, &a->connect, MACHINE_AGENT_PORT, 0, &fd, &e);
	if (r == 0)
		r = agent_open(a->loop, fd, &a->agent, &e);
	if (r < 0) {
		end(a, r, &e);
		return;
	}
	a->agent->frame = on_frame;
	a->agent->output = on_output;
	a->agent->ended = on_ended;
	a->agent->arg = a;
	r = agent_send_setup(a->agent, now, frozen);
	if (r < 0) {
		err_set(&e, -r, "cannot set the guest up: %s", strerror(-r));
		end(a, r, &e);
	}
}

static void on_retry(struct timer *t)
{
	open_stream(t->arg);
}

static void on_resume(struct machine_call *call, int status, const struct machine_msg *m, const struct err *e)
{
	struct awaken *a = call->arg;

	if (status < 0) {
		end(a, status, e);
		return;
	}
	a->resumed = true;
	maybe_done(a);
}

static void on_deadline(struct timer *t)
{
	struct awaken *a = t->arg;
	struct err e = { 0 };

	err_set(&e, ETIMEDOUT, "the guest's agent did not answer in time%s%.300s", a->last[0] ? ": " : "", a->last);
	end(a, -ETIMEDOUT, &e);
}

int awaken_start(struct awaken *a, struct loop *l, struct machine_client *m, const struct config *config, int console,
		 uint64_t patience_ms, struct err *e)
{
	int fds[1] = { -1 }, r;

	a->loop = l;
	a->machine = m;
	a->config = config;
	a->resumed = a->greeted = false;
	a->last[0] = 0;
	a->resume.done = on_resume;
	a->resume.arg = a;
	a->retry = (struct timer){ .fire = on_retry, .arg = a };
	a->deadline = (struct timer){ .fire = on_deadline, .arg = a };
	if (console >= 0) {
		fds[0] = fcntl(console, F_DUPFD_CLOEXEC, 3);
		if (fds[0] < 0)
			return err_set(e, errno, "cannot hand the console's file over: %s", strerror(errno));
	}
	r = machine_request(m, &a->resume, MACHINE_RESUME, 0, NULL, 0, fds, console >= 0, 0, e);
	if (r < 0)
		return r;
	a->active = true;
	loop_timer(l, &a->deadline, deadline_ms(patience_ms));
	/* A failure to open the stream is told like a later one; `end` from here would be before our caller is ready.
	 */
	loop_timer(l, &a->retry, 0);
	return 0;
}
