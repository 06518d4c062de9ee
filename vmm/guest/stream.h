/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What one run printed on one stream and the server has not acknowledged: the window, and past the output limit the tail.
 *
 * Offsets count the stream after truncation: first the head, up to limit - tail, and then, known only when the run has
 * ended, the last bytes. The head is bounded by the window, so it takes no more than the server lets go; the tail is a
 * ring that forgets its oldest bytes and so never holds a run up.
 */
#ifndef VMENV_GUEST_STREAM_H
#define VMENV_GUEST_STREAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Memory shared by all streams: past the limit they stop growing and make do with what they have. */
struct budget {
	uint64_t limit, used;
};

struct stream {
	struct budget *budget;
	uint8_t *window, *tail;
	uint32_t window_size, tail_size; /* allocated; the window's a power of two */
	uint32_t tail_start, tail_length;
	uint32_t tail_limit;
	uint64_t head_limit;
	uint64_t acked, head; /* the window holds [acked, head) */
	uint64_t total;       /* bytes printed, before truncation */
	bool ended;
};

void stream_init(struct stream *s, uint64_t limit, struct budget *b);
void stream_free(struct stream *s);
/* How many bytes stream_put takes now. 0: wait for an acknowledgement. */
size_t stream_accepts(struct stream *s);
void stream_put(struct stream *s, const uint8_t *data, size_t n);
/* Nothing more will be put: the tail follows the head. */
void stream_end(struct stream *s);
/* The end of what can be sent now. */
uint64_t stream_available(const struct stream *s);
/* The bytes at an offset in [acked, available): their number in one piece, at least 1. */
size_t stream_peek(const struct stream *s, uint64_t offset, const uint8_t **data);
/* Forgets what is before the offset, which is in [acked, available]. */
void stream_acknowledge(struct stream *s, uint64_t offset);
/* Where the head ended if something was left out, else the total. */
uint64_t stream_head_end(const struct stream *s);

#endif
