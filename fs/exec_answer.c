/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The text that exec.json answers with.
 *
 * A guest chooses its output, up to the run's output_limit for each stream, and may choose what becomes six times as long
 * when escaped. So past HERE_BYTES it is made on a worker and kept in a file, and memory for it is a few pieces.
 */
#include "exec_answer.h"

#include "base64.h"

#define HERE_BYTES (256u << 10)
#define PIECE 49152u /* a multiple of 3, so that base64 of the pieces is base64 of the whole */

/* Where a text has come to. Zeroed, it is at the beginning of a character. */
struct utf8 {
	unsigned more;           /* bytes to come in this character */
	unsigned char low, high; /* what the next of them must be between */
};

/* RFC 3629: nothing longer than need be, no surrogates, nothing past U+10FFFF. */
static bool utf8_first(struct utf8 *u, unsigned char c)
{
	*u = (struct utf8){ .low = 0x80, .high = 0xbf };
	if (c < 0x80)
		return true;
	if (c < 0xc2 || c > 0xf4)
		return false;
	u->more = c < 0xe0 ? 1 : c < 0xf0 ? 2 : 3;
	if (c == 0xe0)
		u->low = 0xa0;
	else if (c == 0xed)
		u->high = 0x9f;
	else if (c == 0xf0)
		u->low = 0x90;
	else if (c == 0xf4)
		u->high = 0x8f;
	return true;
}

static bool utf8_take(struct utf8 *u, const char *bytes, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		unsigned char c = (unsigned char)bytes[i];

		if (!u->more) {
			if (c >= 0x80 && !utf8_first(u, c))
				return false;
		} else {
			if (c < u->low || c > u->high)
				return false;
			*u = (struct utf8){ .more = u->more - 1, .low = 0x80, .high = 0xbf };
		}
	}
	return true;
}

/* What is kept in memory of a text that goes to a file. */
static int settle(struct exec_answer *a)
{
	for (size_t at = 0; at < a->text.n;) {
		ssize_t k = pwrite(a->fd, a->text.bytes + at, a->text.n - at, (off_t)(a->bytes - a->text.n + at));

		if (k < 0 && errno == EINTR)
			continue;
		if (k <= 0)
			return err_set(&a->err, k < 0 ? errno : EIO, "cannot store the answer: %s", strerror(k < 0 ? errno : EIO));
		at += (size_t)k;
	}
	a->text.n = 0;
	return 0;
}

static int put(struct exec_answer *a, const char *bytes, size_t n)
{
	if (buffer_add(&a->text, bytes, n) < 0)
		return err_set(&a->err, ENOMEM, "no memory for the answer");
	a->bytes += n;
	return a->fd >= 0 && a->text.n >= PIECE ? settle(a) : 0;
}

static int put_text(struct exec_answer *a, const char *s)
{
	return put(a, s, strlen(s));
}

/* The inside of a JSON string; at most six bytes for one. */
static size_t escape(const char *bytes, size_t n, char *out)
{
	static const char hex[] = "0123456789ABCDEF";
	static const char names[32] = { ['\b'] = 'b', ['\t'] = 't', ['\n'] = 'n', ['\f'] = 'f', ['\r'] = 'r' };
	char *o = out;

	for (size_t i = 0; i < n; i++) {
		unsigned char c = (unsigned char)bytes[i];

		if (c >= 0x20 && c != '"' && c != '\\') {
			*o++ = (char)c;
			continue;
		}
		*o++ = '\\';
		if (c >= 0x20 || names[c]) {
			*o++ = c >= 0x20 ? (char)c : names[c];
			continue;
		}
		*o++ = 'u';
		*o++ = '0';
		*o++ = '0';
		*o++ = hex[c >> 4];
		*o++ = hex[c & 15];
	}
	return (size_t)(o - out);
}

static int read_piece(struct exec_answer *a, int which, uint64_t at, char *bytes, size_t *n)
{
	size_t wanted = (size_t)MIN(PIECE, a->stored[which] - at), have = 0;

	while (have < wanted) {
		ssize_t k = pread(a->output[which], bytes + have, wanted - have, (off_t)(at + have));

		if (k < 0 && errno == EINTR)
			continue;
		if (k <= 0)
			return err_set(&a->err, k < 0 ? errno : EIO, "cannot read the run's output");
		have += (size_t)k;
	}
	*n = wanted;
	return 0;
}

/* 1: it is text. 0: it is not. */
static int is_text(struct exec_answer *a, int which, char *bytes)
{
	struct utf8 u = { 0 };
	size_t n;

	for (uint64_t at = 0; at < a->stored[which]; at += n) {
		int r = read_piece(a, which, at, bytes, &n);

		if (r < 0)
			return r;
		if (!utf8_take(&u, bytes, n))
			return 0;
	}
	return !u.more;
}

static int put_piece(struct exec_answer *a, bool text, const char *bytes, size_t n, char *escaped)
{
	AUTO_FREE char *encoded = NULL;

	if (text)
		return put(a, escaped, escape(bytes, n, escaped));
	encoded = base64_encode(bytes, n);
	return encoded ? put_text(a, encoded) : err_set(&a->err, ENOMEM, "no memory for the answer");
}

/* Text as it is, anything else as base64 under another key. */
static int put_output(struct exec_answer *a, int which, char *bytes, char *escaped)
{
	static const char *const keys_of[2][2] = { { "stdout_base64", "stdout" }, { "stderr_base64", "stderr" } };
	int text = is_text(a, which, bytes), r;
	size_t n;

	if (text < 0)
		return text;
	r = put_text(a, ", \"");
	if (r == 0)
		r = put_text(a, keys_of[which][text]);
	if (r == 0)
		r = put_text(a, "\": \"");
	for (uint64_t at = 0; r == 0 && at < a->stored[which]; at += n) {
		r = read_piece(a, which, at, bytes, &n);
		if (r == 0)
			r = put_piece(a, text, bytes, n, escaped);
	}
	return r == 0 ? put_text(a, "\"") : r;
}

static void let_go(struct exec_answer *a)
{
	for (int w = 0; w < 2; w++) {
		if (a->output[w] >= 0)
			close(a->output[w]);
		a->output[w] = -1;
	}
	free(a->head);
	a->head = NULL;
}

static void work(struct job *j)
{
	struct exec_answer *a = (struct exec_answer *)j;
	AUTO_FREE char *bytes = malloc(PIECE), *escaped = malloc(6 * PIECE);
	int r = bytes && escaped ? 0 : err_set(&a->err, ENOMEM, "no memory for the answer");

	if (r == 0)
		r = put_text(a, a->head);
	for (int w = STREAM_STDOUT; r == 0 && w <= STREAM_STDERR; w++)
		r = put_output(a, w, bytes, escaped);
	if (r == 0)
		r = put_text(a, "}\n");
	if (r == 0 && a->fd >= 0)
		r = settle(a);
	if (r < 0 || a->fd >= 0)
		buffer_free(&a->text);
	let_go(a);
}

/* All but the output and the brace at the end. */
static char *head(const struct run *r)
{
	json_t *j = json_pack("{s:I, s:i, s:o, s:b, s:I, s:I, s:I, s:b}", "run", (json_int_t)r->number, "exit_code",
			      r->exit_code, "signal", r->signal ? json_integer(r->signal) : json_null(), "timed_out",
			      r->timed_out, "duration_ms", (json_int_t)(r->duration_ns / 1000000u), "stdout_bytes",
			      (json_int_t)r->printed[STREAM_STDOUT], "stderr_bytes", (json_int_t)r->printed[STREAM_STDERR],
			      "truncated", r->truncated[STREAM_STDOUT] || r->truncated[STREAM_STDERR]);
	char *text = j ? json_dumps(j, 0) : NULL;

	json_decref(j);
	if (text)
		text[strlen(text) - 1] = '\0';
	return text;
}

bool exec_answer_long(const struct exec_answer *a)
{
	return a->stored[STREAM_STDOUT] + a->stored[STREAM_STDERR] > HERE_BYTES;
}

static int take_output(struct exec_answer *a, struct run *r, enum stream which, struct err *e)
{
	int fd;

	a->stored[which] = r->stored[which];
	if (!a->stored[which])
		return 0;
	fd = run_output_fd(r, which);
	a->output[which] = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 3);
	if (a->output[which] < 0)
		return err_set(e, fd < 0 ? -fd : errno, "cannot open the run's output: %s", strerror(fd < 0 ? -fd : errno));
	return 0;
}

int exec_answer_new(struct run *r, struct exec_answer **out, struct err *e)
{
	struct exec_answer *a = calloc(1, sizeof(*a));
	int status;

	if (!a)
		return err_set(e, ENOMEM, "no memory for the answer");
	a->job.work = work;
	a->fd = a->output[STREAM_STDOUT] = a->output[STREAM_STDERR] = -1;
	a->head = head(r);
	status = a->head ? 0 : err_set(e, ENOMEM, "no memory for the answer");
	for (int w = STREAM_STDOUT; status == 0 && w <= STREAM_STDERR; w++)
		status = take_output(a, r, (enum stream)w, e);
	if (status == 0 && exec_answer_long(a)) {
		a->fd = core_scratch(r->sandbox->core, e);
		status = a->fd < 0 ? a->fd : 0;
	}
	if (status < 0) {
		exec_answer_free(a);
		return status;
	}
	*out = a;
	return 0;
}

void exec_answer_read(const struct exec_answer *a, fuse_req_t req, size_t size, uint64_t offset)
{
	if (a->fd >= 0)
		reply_file(req, a->fd, a->bytes, size, offset);
	else
		reply_slice(req, a->text.bytes, a->text.n, size, offset);
}

void exec_answer_free(struct exec_answer *a)
{
	if (!a)
		return;
	let_go(a);
	if (a->fd >= 0)
		close(a->fd);
	buffer_free(&a->text);
	free(a);
}
