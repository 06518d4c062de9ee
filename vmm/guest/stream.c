/* SPDX-License-Identifier: Apache-2.0 */
#include <vmenv/agent.h>
#include <vmenv/util.h>

#include "stream.h"

#define FIRST_SIZE 4096u /* one page: most runs print less, and a restored guest pays for each page it touches */

void stream_init(struct stream *s, uint64_t limit, struct budget *b)
{
	*s = (struct stream){ .budget = b, .tail_limit = (uint32_t)MIN(limit / 4, AGENT_TAIL_MAX) };
	s->head_limit = limit - s->tail_limit;
}

static void release(struct stream *s, uint8_t **data, uint32_t *size)
{
	free(*data);
	s->budget->used -= *size;
	*data = NULL;
	*size = 0;
}

void stream_free(struct stream *s)
{
	if (!s->budget)
		return;
	release(s, &s->window, &s->window_size);
	release(s, &s->tail, &s->tail_size);
}

/* A bigger buffer, or NULL where the budget or memory is at its end. The first page is always allowed. */
static uint8_t *bigger(struct stream *s, uint32_t size, uint32_t limit, uint32_t *new_size)
{
	uint32_t want = MIN(size ? size * 2 : FIRST_SIZE, limit);

	if (want <= size || (size > 0 && s->budget->used + want > s->budget->limit))
		return NULL;
	*new_size = want;
	return malloc(want);
}

static bool grow_window(struct stream *s)
{
	uint32_t size = 0;
	uint8_t *data = bigger(s, s->window_size, AGENT_WINDOW, &size);

	if (!data)
		return false;
	for (uint64_t at = s->acked; at < s->head;) {
		const uint8_t *from;
		size_t n = stream_peek(s, at, &from);

		n = MIN(n, size - (at & (size - 1)));
		memcpy(data + (at & (size - 1)), from, n);
		at += n;
	}
	release(s, &s->window, &s->window_size);
	s->window = data;
	s->window_size = size;
	s->budget->used += size;
	return true;
}

static bool grow_tail(struct stream *s)
{
	uint32_t size = 0, first = MIN(s->tail_length, s->tail_size - s->tail_start);
	uint8_t *data = bigger(s, s->tail_size, s->tail_limit, &size);

	if (!data)
		return false;
	if (s->tail_length) {
		memcpy(data, s->tail + s->tail_start, first);
		memcpy(data + first, s->tail, s->tail_length - first);
	}
	release(s, &s->tail, &s->tail_size);
	s->tail = data;
	s->tail_size = size;
	s->tail_start = 0;
	s->budget->used += size;
	return true;
}

size_t stream_accepts(struct stream *s)
{
	if (s->head == s->head_limit)
		return SIZE_MAX;
	if (s->head - s->acked == s->window_size && !grow_window(s))
		return 0;
	return MIN(s->window_size - (s->head - s->acked), s->head_limit - s->head);
}

static void put_tail(struct stream *s, const uint8_t *data, size_t n)
{
	while (s->tail_length + n > s->tail_size && grow_tail(s))
		;
	if (n > s->tail_size) {
		data += n - s->tail_size;
		n = s->tail_size;
	}
	if (s->tail_length + n > s->tail_size) {
		uint32_t drop = (uint32_t)(s->tail_length + n - s->tail_size);

		s->tail_start = (s->tail_start + drop) % s->tail_size;
		s->tail_length -= drop;
	}
	while (n > 0) {
		uint32_t at = (s->tail_start + s->tail_length) % s->tail_size;
		uint32_t piece = (uint32_t)MIN(n, s->tail_size - at);

		memcpy(s->tail + at, data, piece);
		s->tail_length += piece;
		data += piece;
		n -= piece;
	}
}

void stream_put(struct stream *s, const uint8_t *data, size_t n)
{
	s->total += n;
	while (n > 0 && s->head < s->head_limit) {
		size_t room = stream_accepts(s), at = s->head & (s->window_size - 1);
		size_t piece = MIN(MIN(n, room), s->window_size - at);

		if (room == 0)
			return; /* not what the caller was told it may do */
		memcpy(s->window + at, data, piece);
		s->head += piece;
		data += piece;
		n -= piece;
	}
	if (n > 0)
		put_tail(s, data, n);
}

void stream_end(struct stream *s)
{
	s->ended = true;
}

uint64_t stream_available(const struct stream *s)
{
	return s->ended ? s->head + s->tail_length : s->head;
}

size_t stream_peek(const struct stream *s, uint64_t offset, const uint8_t **data)
{
	uint64_t at;

	if (offset < s->head) {
		at = offset & (s->window_size - 1);
		*data = s->window + at;
		return MIN(s->head - offset, s->window_size - at);
	}
	at = (s->tail_start + (offset - s->head)) % s->tail_size;
	*data = s->tail + at;
	return MIN(s->head + s->tail_length - offset, s->tail_size - at);
}

void stream_acknowledge(struct stream *s, uint64_t offset)
{
	s->acked = offset;
}

uint64_t stream_head_end(const struct stream *s)
{
	return s->total > s->head + s->tail_length ? s->head : s->total;
}
