/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Everything read is used up at once (a script and stdin are kept whole, see run.c), so the only thing that ever waits is
 * output: small frames are gathered in `out`, large ones go from a stream's window straight to the socket, one in flight.
 */
#include <inttypes.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <jansson.h>

#include <vmenv/agent.h>
#include <vmenv/util.h>

#include "connection.h"
#include "run.h"
#include "setup.h"

#define OUT_SIZE 4096u
#define SMALL 2048u		/* output up to here is copied, to leave in one packet with its neighbours */
#define LARGE (256u << 10)	/* of one frame */
#define SOON_NS 2000000u
#define LINGER_NS 5000000000u
#define READS_AT_ONCE 8

struct connection {
	struct agent *agent;
	struct connection *next;
	struct watch watch;
	uint32_t events;
	struct run *run; /* or NULL */
	bool begun;      /* the first frame of a purpose has been */
	bool closing;    /* once `out` is sent */
	bool refused;    /* then the server's writes are still taken, so that it gets to read why */
	bool lingering;  /* that is so now */
	bool started, exited; /* those frames are sent or in `out` */
	/* In: a header, then its payload, which for AGENT_DATA is passed on in pieces. */
	struct agent_frame head;
	uint32_t head_have, payload_have;
	uint8_t *payload;
	/* Out. */
	struct timer soon;
	bool soon_set;
	uint32_t out_start, out_end;
	uint8_t out[OUT_SIZE];
	struct channel *flight; /* whose bytes follow */
	uint32_t flight_left;
};

static void soon(struct timer *t)
{
	struct connection *c = t->arg;

	c->soon_set = false;
	if (c->lingering)
		connection_close(c);
	else
		connection_pump(c);
}

void connection_pump_soon(struct connection *c)
{
	if (c->soon_set)
		return;
	c->soon_set = true;
	loop_timer(c->agent->loop, &c->soon, now_ns(CLOCK_MONOTONIC) + SOON_NS);
}

/* Puts a frame into `out`, whole or not at all. */
static bool put(struct connection *c, enum agent_type type, const void *data, uint32_t n)
{
	struct agent_frame f = { .length = n, .type = type };

	if (c->out_start == c->out_end)
		c->out_start = c->out_end = 0;
	if (sizeof(f) + n > OUT_SIZE - c->out_end)
		return false;
	memcpy(c->out + c->out_end, &f, sizeof(f));
	if (n)
		memcpy(c->out + c->out_end + sizeof(f), data, n);
	c->out_end += (uint32_t)sizeof(f) + n;
	return true;
}

static void put_failed(struct connection *c, const struct err *e)
{
	json_t *o = json_pack("{s:i, s:s}", "errno", e->code, "text", e->text);
	AUTO_FREE char *text = o ? json_dumps(o, JSON_COMPACT) : NULL;

	json_decref(o);
	if (text)
		put(c, AGENT_FAILED, text, (uint32_t)strlen(text));
}

static bool put_exit(struct connection *c)
{
	const struct run *r = c->run;
	char text[400];
	int n;

	n = snprintf(text, sizeof(text),
		     "{\"exit_code\":%d,\"signal\":%d,\"timed_out\":%s,\"duration_ns\":%" PRIu64 ",\"stdout_bytes\":%" PRIu64
		     ",\"stderr_bytes\":%" PRIu64 ",\"stdout_head\":%" PRIu64 ",\"stderr_head\":%" PRIu64 "}",
		     r->exit_code, r->signal, r->timed_out ? "true" : "false", r->ended - r->started, r->out.stream.total,
		     r->err.stream.total, stream_head_end(&r->out.stream), stream_head_end(&r->err.stream));
	return put(c, AGENT_EXIT, text, (uint32_t)n);
}

/* A channel's next bytes: copied if few, else into flight. False if `out` has to go first. */
static bool stage_channel(struct connection *c, struct channel *ch, enum agent_type type)
{
	while (!c->flight) {
		uint64_t left = stream_available(&ch->stream) - ch->sent;
		uint8_t small[SMALL];
		uint32_t n = 0;

		if (left == 0)
			return true;
		if (left > SMALL) {
			struct agent_frame f = { .length = (uint32_t)MIN(left, LARGE), .type = type };

			/* Only the header: the bytes follow from the window. */
			if (sizeof(f) > OUT_SIZE - c->out_end)
				return false;
			memcpy(c->out + c->out_end, &f, sizeof(f));
			c->out_end += (uint32_t)sizeof(f);
			c->flight = ch;
			c->flight_left = f.length;
			return false;
		}
		while (n < left) {
			const uint8_t *from;
			size_t piece = stream_peek(&ch->stream, ch->sent + n, &from);

			memcpy(small + n, from, piece);
			n += (uint32_t)piece;
		}
		if (!put(c, type, small, n))
			return false;
		ch->sent += n;
	}
	return false;
}

static void stage(struct connection *c)
{
	struct run *r = c->run;
	struct agent_offsets from;

	if (!r || r->state == RUN_COLLECTING || c->flight || c->closing)
		return;
	if (c->out_start == c->out_end)
		c->out_start = c->out_end = 0;
	if (!c->started) {
		from = (struct agent_offsets){ .out = r->out.stream.acked, .err = r->err.stream.acked };
		c->started = put(c, AGENT_STARTED, &from, sizeof(from));
	}
	if (c->started && stage_channel(c, &r->out, AGENT_STDOUT) && stage_channel(c, &r->err, AGENT_STDERR) &&
	    r->state == RUN_FINISHED && !c->exited)
		c->exited = put_exit(c);
}

static void set_events(struct connection *c, uint32_t events)
{
	if (c->events != events && loop_change(c->agent->loop, &c->watch, events) == 0)
		c->events = events;
}

/* One write of what is ready. >0 written, 0 nothing to do, -EAGAIN, or another error. */
static ssize_t send_some(struct connection *c)
{
	struct iovec v[3];
	int parts = 0;
	uint32_t left = c->out_end - c->out_start, planned = 0, from_flight = 0;
	ssize_t n;

	if (left)
		v[parts++] = (struct iovec){ c->out + c->out_start, left };
	while (c->flight && planned < c->flight_left && parts < 3) {
		const uint8_t *from;
		size_t piece = stream_peek(&c->flight->stream, c->flight->sent + planned, &from);

		piece = MIN(piece, c->flight_left - planned);
		v[parts++] = (struct iovec){ (void *)from, piece };
		planned += (uint32_t)piece;
	}
	if (!parts)
		return 0;
	n = writev(c->watch.fd, v, parts);
	if (n < 0)
		return -errno;
	from_flight = (uint32_t)MAX(n - (ssize_t)left, 0);
	c->out_start += (uint32_t)MIN((size_t)n, left);
	if (c->flight) {
		c->flight->sent += from_flight;
		c->flight_left -= from_flight;
		if (c->flight_left == 0)
			c->flight = NULL;
	}
	return n;
}

/* Nothing more is sent; what comes is thrown away until the server closes, or has had its time. */
static void linger(struct connection *c)
{
	c->lingering = true;
	shutdown(c->watch.fd, SHUT_WR);
	set_events(c, EPOLLIN);
	c->soon_set = true;
	loop_timer(c->agent->loop, &c->soon, now_ns(CLOCK_MONOTONIC) + LINGER_NS);
}

static void lingering_readable(struct connection *c)
{
	for (int i = 0; i < READS_AT_ONCE; i++) {
		ssize_t n = read(c->watch.fd, c->agent->input, SCRATCH_SIZE);

		if (n < 0 && (errno == EAGAIN || errno == EINTR))
			return;
		if (n <= 0) {
			connection_close(c);
			return;
		}
	}
}

/* True if the connection still exists. */
static bool pump(struct connection *c)
{
	ssize_t n;

	if (c->lingering)
		return true;
	if (c->soon_set) {
		loop_timer_cancel(c->agent->loop, &c->soon);
		c->soon_set = false;
	}
	do {
		stage(c);
		n = send_some(c);
	} while (n > 0 || n == -EINTR);
	if (n == -EAGAIN) {
		set_events(c, EPOLLIN | EPOLLOUT);
		return true;
	}
	if (n == 0 && c->refused) {
		linger(c);
		return true;
	}
	if (n < 0 || c->closing) {
		connection_close(c);
		return false;
	}
	set_events(c, EPOLLIN);
	return true;
}

void connection_pump(struct connection *c)
{
	pump(c);
}

void connection_close(struct connection *c)
{
	struct agent *a = c->agent;

	for (struct connection **p = &a->connections; *p; p = &(*p)->next)
		if (*p == c) {
			*p = c->next;
			break;
		}
	a->connection_count--;
	if (c->run) {
		c->run->connection = NULL;
		if (c->run->state == RUN_COLLECTING)
			run_free(c->run);
	}
	loop_timer_cancel(a->loop, &c->soon);
	loop_remove(a->loop, &c->watch);
	close(c->watch.fd);
	free(c->payload);
	free(c);
}

static int frame_run(struct connection *c, struct err *e)
{
	struct request q;
	int r = request_parse(&q, (const char *)c->payload, c->head.length, e);

	if (r < 0) {
		request_free(&q);
		return r;
	}
	r = run_new(c->agent, &q, &c->run, e);
	if (r < 0)
		return r;
	c->run->connection = c;
	r = run_ready(c->run, e);
	return r;
}

static int frame_attach(struct connection *c, struct err *e)
{
	json_error_t je;
	json_t *o = json_loadb((const char *)c->payload, c->head.length, JSON_REJECT_DUPLICATES, &je);
	json_t *v = json_object_get(o, "run");
	struct run *r = json_is_integer(v) && json_object_size(o) == 1 ? run_find(c->agent, (uint64_t)json_integer_value(v)) : NULL;
	bool valid = json_is_integer(v) && json_object_size(o) == 1;

	json_decref(o);
	if (!valid)
		return err_set(e, EINVAL, "not {\"run\": N}");
	if (!r || r->state == RUN_COLLECTING)
		return err_set(e, ENOENT, "there is no such run");
	/* The newest connection has it: an older one is of a server that is gone, or has given it up. */
	if (r->connection)
		connection_close(r->connection);
	c->run = r;
	r->connection = c;
	r->out.sent = r->out.stream.acked;
	r->err.sent = r->err.stream.acked;
	return 0;
}

static int acknowledge(struct channel *ch, uint64_t offset, struct err *e)
{
	if (offset < ch->stream.acked || offset > ch->sent)
		return err_set(e, EPROTO, "an acknowledgement of %" PRIu64 " where %" PRIu64 " to %" PRIu64 " are sent", offset,
			       ch->stream.acked, ch->sent);
	stream_acknowledge(&ch->stream, offset);
	return 0;
}

static int frame_ack(struct connection *c, struct err *e)
{
	struct agent_offsets o;
	int r;

	if (c->head.length != sizeof(o))
		return err_set(e, EPROTO, "an acknowledgement of %u bytes", c->head.length);
	memcpy(&o, c->payload, sizeof(o));
	r = acknowledge(&c->run->out, o.out, e);
	if (r == 0)
		r = acknowledge(&c->run->err, o.err, e);
	if (r == 0)
		run_continue(c->run);
	return r;
}

static int frame_signal(struct connection *c, struct err *e)
{
	uint32_t number;

	if (c->head.length != sizeof(number))
		return err_set(e, EPROTO, "a signal of %u bytes", c->head.length);
	memcpy(&number, c->payload, sizeof(number));
	if (number < 1 || number > 64)
		return err_set(e, EINVAL, "there is no signal %u", number);
	run_signal(c->run, (int)number);
	return 0;
}

static int frame_release(struct connection *c, struct err *e)
{
	struct run *r = c->run;

	if (r->state != RUN_FINISHED || !c->exited)
		return err_set(e, EBUSY, "the run has not ended");
	c->run = NULL;
	c->flight = NULL;
	run_free(r);
	if (c->head.type == AGENT_RELEASE)
		c->closing = true;
	c->begun = c->started = c->exited = false;
	return 0;
}

/* The first frame of a connection. */
static int frame_first(struct connection *c, struct err *e)
{
	const char *text = (const char *)c->payload;
	int r;

	c->begun = true;
	switch (c->head.type) {
	case AGENT_RUN:
		return frame_run(c, e);
	case AGENT_ATTACH:
		return frame_attach(c, e);
	case AGENT_SETUP:
	case AGENT_SYNC:
		r = (c->head.type == AGENT_SETUP ? setup : setup_sync)(c->agent, text, c->head.length, e);
		if (r == 0)
			put(c, AGENT_OK, NULL, 0);
		c->begun = r < 0;
		return r;
	default:
		return err_set(e, EPROTO, "a connection cannot begin with a frame of type %u", c->head.type);
	}
}

/* A whole frame other than AGENT_DATA. */
static int frame(struct connection *c, struct err *e)
{
	if (!c->begun)
		return frame_first(c, e);
	if (c->run && c->run->state != RUN_COLLECTING)
		switch (c->head.type) {
		case AGENT_ACK:
			return frame_ack(c, e);
		case AGENT_SIGNAL:
			return frame_signal(c, e);
		case AGENT_RELEASE:
		case AGENT_NEXT:
			return frame_release(c, e);
		}
	/* Given up before it began: the run ends with the connection. */
	if (c->run && c->head.type == AGENT_SIGNAL)
		return err_set(e, ECANCELED, "the run had not begun");
	return err_set(e, EPROTO, "a frame of type %u is out of place", c->head.type);
}

/* The header is there: is what it announces acceptable? */
static int announce(struct connection *c, struct err *e)
{
	if (c->head.length > AGENT_FRAME_MAX)
		return err_set(e, EMSGSIZE, "a frame of %u bytes is too long", c->head.length);
	if (c->head.type == AGENT_DATA) {
		if (!c->run || c->run->state != RUN_COLLECTING)
			return err_set(e, EPROTO, "data is out of place");
		return 0;
	}
	c->payload = malloc(c->head.length + 1);
	return c->payload ? 0 : err_set(e, ENOMEM, "out of memory");
}

/* Uses up some of the bytes; how many, or -errno. */
static ssize_t feed_some(struct connection *c, const uint8_t *data, size_t n, struct err *e)
{
	size_t take;
	int r = 0;

	if (c->head_have < sizeof(c->head)) {
		take = MIN(n, sizeof(c->head) - c->head_have);
		memcpy((uint8_t *)&c->head + c->head_have, data, take);
		c->head_have += (uint32_t)take;
		if (c->head_have < sizeof(c->head))
			return (ssize_t)take;
		r = announce(c, e);
	} else {
		take = MIN(n, c->head.length - c->payload_have);
		if (c->payload)
			memcpy(c->payload + c->payload_have, data, take);
		else
			r = run_data(c->run, data, take, e);
		c->payload_have += (uint32_t)take;
	}
	if (r == 0 && c->payload_have == c->head.length) {
		if (c->payload)
			r = frame(c, e);
		else
			r = run_ready(c->run, e);
		free(steal_ptr(&c->payload));
		c->head_have = c->payload_have = 0;
	}
	return r < 0 ? r : (ssize_t)take;
}

/* Says why, and lets go of a run that had not begun. */
static void refuse(struct connection *c, const struct err *e)
{
	struct run *r = c->run;

	c->run = NULL;
	if (r) {
		r->connection = NULL;
		if (r->state == RUN_COLLECTING)
			run_free(r);
	}
	/* In the middle of a frame there is no place to say it. */
	if (!c->flight) {
		put_failed(c, e);
		c->refused = true;
	}
	c->closing = true;
	c->out_end = c->flight ? c->out_start : c->out_end;
	c->flight = NULL;
}

static void readable(struct connection *c)
{
	struct agent *a = c->agent;
	struct err e = { 0 };

	for (int i = 0; i < READS_AT_ONCE && !c->closing; i++) {
		ssize_t n = read(c->watch.fd, a->input, SCRATCH_SIZE);
		size_t used = 0;

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			break;
		if (n <= 0) {
			connection_close(c);
			return;
		}
		while (used < (size_t)n && !c->closing) {
			ssize_t took = feed_some(c, a->input + used, (size_t)n - used, &e);

			if (took < 0) {
				refuse(c, &e);
				break;
			}
			used += (size_t)took;
		}
		if ((size_t)n < SCRATCH_SIZE)
			break;
	}
	/* A run that has just begun says so with its first output, or in a moment. */
	if (c->run && !c->started && c->run->state == RUN_RUNNING && !c->closing)
		connection_pump_soon(c);
	else
		pump(c);
}

static void connection_ready(struct watch *w, uint32_t events)
{
	struct connection *c = w->arg;

	if (events & EPOLLOUT && !pump(c))
		return;
	if (c->lingering)
		lingering_readable(c);
	else if (events & (EPOLLIN | EPOLLHUP | EPOLLERR))
		readable(c);
}

void connection_new(struct agent *a, int fd)
{
	struct connection *c = a->connection_count < CONNECTIONS_MAX ? calloc(1, sizeof(*c)) : NULL;

	if (!c) {
		close(fd);
		return;
	}
	c->agent = a;
	c->watch = (struct watch){ .fd = fd, .ready = connection_ready, .arg = c };
	c->soon = (struct timer){ .fire = soon, .arg = c };
	c->events = EPOLLIN;
	if (loop_add(a->loop, &c->watch, EPOLLIN) < 0) {
		close(fd);
		free(c);
		return;
	}
	c->next = a->connections;
	a->connections = c;
	a->connection_count++;
	/* The first frame has mostly come with the connection itself. */
	readable(c);
}
