/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Trusts: nothing that comes in; the agent's kernel may belong to the guest's user. A frame longer than
 * AGENT_FRAME_MAX, a small frame longer than SMALL_MAX, JSON of another form, a number out of range: the stream ends
 * with a sentence.
 */
#include "agent_client.h"

#include <sys/random.h>
#include <sys/socket.h>

#define SMALL_MAX 65536u /* bytes of a frame that is not output */
#define READ_BYTES (192u << 10) /* about what a socket holds */

static void want(struct agent *a)
{
	loop_change(a->loop, &a->watch, EPOLLIN | (a->writing ? EPOLLOUT : 0));
}

static void agent_free(struct agent *a)
{
	free(a->payload);
	free(a->out);
	free(a);
}

void agent_close(struct agent *a)
{
	if (!a || a->closed)
		return;
	a->closed = true;
	loop_remove(a->loop, &a->watch);
	close(a->watch.fd);
	if (!a->busy)
		agent_free(a);
}

__attribute__((format(printf, 3, 4))) static void fail(struct agent *a, int code, const char *fmt, ...)
{
	struct err e = { .code = code };
	va_list ap;

	if (a->closed || a->failed)
		return;
	va_start(ap, fmt);
	vsnprintf(e.text, sizeof(e.text), fmt, ap);
	va_end(ap);
	/* Not called again whatever is in the socket. */
	a->failed = true;
	loop_change(a->loop, &a->watch, 0);
	a->ended(a, &e);
}

static bool is_output(uint32_t type)
{
	return type == AGENT_STDOUT || type == AGENT_STDERR;
}

/* The header is complete: may the payload come? */
static bool begin_frame(struct agent *a)
{
	uint32_t length = a->header.length;

	if (length > AGENT_FRAME_MAX || (!is_output(a->header.type) && length > SMALL_MAX)) {
		fail(a, EPROTO, "the guest's agent sent a frame of %u bytes", length);
		return false;
	}
	a->left = length;
	if (is_output(a->header.type))
		return true;
	a->payload = malloc(length + 1);
	a->payload_bytes = 0;
	if (!a->payload) {
		fail(a, ENOMEM, "out of memory");
		return false;
	}
	return true;
}

static void end_frame(struct agent *a)
{
	uint8_t *payload = a->payload;

	a->header_bytes = 0;
	a->payload = NULL;
	if (payload) {
		payload[a->payload_bytes] = 0;
		a->frame(a, a->header.type, payload, a->payload_bytes);
	}
	free(payload);
}

/* Consumes bytes until they are used up, or the owner closed the stream. */
static void consume(struct agent *a, const uint8_t *p, size_t n)
{
	while (n && !a->closed && !a->failed) {
		size_t take;

		if (a->header_bytes < sizeof(a->header)) {
			take = MIN(n, sizeof(a->header) - a->header_bytes);
			memcpy((uint8_t *)&a->header + a->header_bytes, p, take);
			a->header_bytes += (unsigned)take;
			p += take;
			n -= take;
			if (a->header_bytes < sizeof(a->header))
				return;
			if (!begin_frame(a))
				return;
			if (a->left == 0)
				end_frame(a);
			continue;
		}
		take = MIN(n, a->left);
		a->left -= (uint32_t)take;
		if (a->payload) {
			memcpy(a->payload + a->payload_bytes, p, take);
			a->payload_bytes += (uint32_t)take;
		} else {
			a->output(a, a->header.type == AGENT_STDERR, p, (uint32_t)take);
		}
		p += take;
		n -= take;
		if (a->left == 0 && !a->closed && !a->failed)
			end_frame(a);
	}
}

static void receive(struct agent *a)
{
	uint8_t buffer[READ_BYTES];
	ssize_t n = recv(a->watch.fd, buffer, sizeof(buffer), MSG_DONTWAIT);

	if (n > 0)
		consume(a, buffer, (size_t)n);
	else if (n == 0)
		fail(a, EIO, "the guest's agent ended the connection");
	else if (errno != EAGAIN && errno != EINTR)
		fail(a, EIO, "the connection to the guest's agent broke: %s", strerror(errno));
}

static void transmit(struct agent *a)
{
	while (a->out_start < a->out_end) {
		ssize_t n = send(a->watch.fd, a->out + a->out_start, a->out_end - a->out_start,
				 MSG_DONTWAIT | MSG_NOSIGNAL);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			break;
		if (n < 0) {
			/* Reading tells why, after what the other side said before it hung up. */
			a->out_start = a->out_end;
			break;
		}
		a->out_start += (size_t)n;
	}
	if (a->out_start == a->out_end) {
		a->out_start = a->out_end = 0;
		/* A script of megabytes is sent once; its room is not kept for the run's lifetime. */
		if (a->out_room > 4096) {
			free(a->out);
			a->out = NULL;
			a->out_room = 0;
		}
	}
	if (a->writing != (a->out_end > 0)) {
		a->writing = a->out_end > 0;
		want(a);
	}
}

static void ready(struct watch *w, uint32_t events)
{
	struct agent *a = w->arg;

	a->busy = true;
	if (events & EPOLLOUT)
		transmit(a);
	if (events & (EPOLLIN | EPOLLHUP | EPOLLERR))
		receive(a);
	a->busy = false;
	if (a->closed)
		agent_free(a);
}

int agent_open(struct loop *l, int fd, struct agent **out, struct err *e)
{
	struct agent *a = calloc(1, sizeof(*a));
	int r;

	if (!a) {
		close(fd);
		return err_set(e, ENOMEM, "out of memory");
	}
	a->loop = l;
	a->watch = (struct watch){ .fd = fd, .ready = ready, .arg = a };
	r = loop_add(l, &a->watch, EPOLLIN);
	if (r < 0) {
		close(fd);
		free(a);
		return err_set(e, -r, "cannot watch a stream: %s", strerror(-r));
	}
	*out = a;
	return 0;
}

static int reserve(struct agent *a, size_t n)
{
	size_t room = MAX(a->out_room, 1024u);
	uint8_t *p;

	while (room - a->out_end < n)
		room *= 2;
	if (room == a->out_room)
		return 0;
	p = realloc(a->out, room);
	if (!p)
		return -ENOMEM;
	a->out = p;
	a->out_room = room;
	return 0;
}

int agent_queue(struct agent *a, uint32_t type, const void *payload, size_t n)
{
	struct agent_frame f = { .length = (uint32_t)n, .type = type };

	if (a->closed || a->failed)
		return 0;
	if (reserve(a, sizeof(f) + n) < 0)
		return -ENOMEM;
	memcpy(a->out + a->out_end, &f, sizeof(f));
	memcpy(a->out + a->out_end + sizeof(f), n ? payload : "", n);
	a->out_end += sizeof(f) + n;
	return 0;
}

void agent_flush(struct agent *a)
{
	if (!a->closed && !a->failed)
		transmit(a);
}

int agent_send(struct agent *a, uint32_t type, const void *payload, size_t n)
{
	int r = agent_queue(a, type, payload, n);

	if (r == 0)
		agent_flush(a);
	return r;
}

int agent_send_setup(struct agent *a, int64_t unix_ns, bool frozen)
{
	uint8_t entropy[64];
	char hex[2 * sizeof(entropy) + 1], text[320], time[32];

	if (getrandom(entropy, sizeof(entropy), 0) != sizeof(entropy))
		return -EIO;
	for (size_t i = 0; i < sizeof(entropy); i++)
		snprintf(hex + 2 * i, 3, "%02x", entropy[i]);
	snprintf(time, sizeof(time), "%lld", (long long)unix_ns);
	snprintf(text, sizeof(text), "{\"unix_ns\":%s,\"entropy\":\"%s\",\"hostname\":null,\"machine_id\":null}",
		 frozen ? "null" : time, hex);
	return agent_send(a, AGENT_SETUP, text, strlen(text));
}

static int put_data(struct agent *a, const void *bytes, size_t n)
{
	const uint8_t *p = bytes;
	int r = 0;

	for (size_t done = 0, take; r == 0 && done < n; done += take) {
		take = MIN(n - done, AGENT_FRAME_MAX);
		r = agent_queue(a, AGENT_DATA, p + done, take);
	}
	return r;
}

int agent_send_run(struct agent *a, const struct agent_run *r)
{
	AUTO_FREE char *text = NULL;
	json_t *j = json_pack("{s:I, s:I, s:O*, s:I, s:I, s:s, s:s, s:O, s:I, s:I}", "run", (json_int_t)r->number,
			      "oldest", (json_int_t)r->oldest, "argv",
			      r->argv, "script_bytes", (json_int_t)(r->argv ? 0 : r->script_bytes), "stdin_bytes",
			      (json_int_t)r->input_bytes, "cwd", r->cwd, "user", r->user, "env", r->env, "timeout_ms",
			      (json_int_t)r->timeout_ms, "output_limit", (json_int_t)r->output_limit);
	size_t n;

	if (!j)
		return -ENOMEM;
	if (!r->argv)
		json_object_set_new(j, "argv", json_null());
	text = json_dumps(j, JSON_COMPACT);
	json_decref(j);
	if (!text)
		return -ENOMEM;
	n = strlen(text);
	if (n > AGENT_FRAME_MAX)
		return -E2BIG;
	if (agent_queue(a, AGENT_RUN, text, n) < 0 || (!r->argv && put_data(a, r->script, r->script_bytes) < 0) ||
	    put_data(a, r->input, r->input_bytes) < 0)
		return -ENOMEM;
	transmit(a);
	return 0;
}

int agent_send_attach(struct agent *a, uint64_t number)
{
	char text[48];

	snprintf(text, sizeof(text), "{\"run\":%llu}", (unsigned long long)number);
	return agent_send(a, AGENT_ATTACH, text, strlen(text));
}

int agent_send_offsets(struct agent *a, uint64_t out, uint64_t err)
{
	struct agent_offsets o = { out, err };

	return agent_send(a, AGENT_ACK, &o, sizeof(o));
}

int agent_send_signal(struct agent *a, int signal)
{
	uint32_t n = (uint32_t)signal;

	return agent_send(a, AGENT_SIGNAL, &n, sizeof(n));
}

int agent_read_offsets(const uint8_t *payload, uint32_t n, uint64_t offsets[2], struct err *e)
{
	struct agent_offsets o;

	if (n != sizeof(o))
		return err_set(e, EPROTO, "the guest's agent sent offsets of %u bytes", n);
	memcpy(&o, payload, sizeof(o));
	offsets[0] = o.out;
	offsets[1] = o.err;
	return 0;
}

static int take(const json_t *j, const char *key, int64_t most, int64_t *n, struct err *e)
{
	const json_t *v = json_object_get(j, key);

	if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) > most)
		return err_set(e, EPROTO, "the guest's agent ended a run with an unsound %s", key);
	*n = json_integer_value(v);
	return 0;
}

int agent_read_exit(const uint8_t *payload, uint32_t n, struct agent_result *r, struct err *e)
{
	int64_t code = 0, sig = 0, ns = 0, out = 0, err = 0, out_head = 0, err_head = 0;
	json_t *j = json_loadb((const char *)payload, n, JSON_REJECT_DUPLICATES, NULL);
	int status;

	if (!json_is_object(j)) {
		json_decref(j);
		return err_set(e, EPROTO, "the guest's agent ended a run with something that is not a JSON object");
	}
	status = take(j, "exit_code", 255, &code, e);
	if (status == 0)
		status = take(j, "signal", 64, &sig, e);
	if (status == 0)
		status = take(j, "duration_ns", INT64_MAX, &ns, e);
	if (status == 0)
		status = take(j, "stdout_bytes", INT64_MAX, &out, e);
	if (status == 0)
		status = take(j, "stderr_bytes", INT64_MAX, &err, e);
	if (status == 0)
		status = take(j, "stdout_head", out, &out_head, e);
	if (status == 0)
		status = take(j, "stderr_head", err, &err_head, e);
	if (status == 0)
		*r = (struct agent_result){ .exit_code = (int)code, .signal = (int)sig,
					    .timed_out = json_is_true(json_object_get(j, "timed_out")),
					    .duration_ns = (uint64_t)ns,
					    .printed = { (uint64_t)out, (uint64_t)err },
					    .head = { (uint64_t)out_head, (uint64_t)err_head } };
	json_decref(j);
	return status;
}

int agent_read_failed(const uint8_t *payload, uint32_t n, struct err *e)
{
	json_t *j = json_loadb((const char *)payload, n, JSON_REJECT_DUPLICATES, NULL);
	json_int_t code = json_integer_value(json_object_get(j, "errno"));
	const char *text = json_string_value(json_object_get(j, "text"));

	err_set(e, code > 0 && code < 4096 ? (int)code : EIO, "the guest's agent: %.300s", text ? text : "it failed");
	/* One line, whatever the guest wrote. */
	for (char *p = e->text; *p; p++)
		if ((unsigned char)*p < ' ' || *p == 0x7f)
			*p = '?';
	json_decref(j);
	return -e->code;
}
