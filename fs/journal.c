/* SPDX-License-Identifier: Apache-2.0 */
#include "core.h"

/* Drops whole lines from the front until `room` bytes are free, and some more, so that not every line moves the text. */
static void make_room(struct journal *j, size_t room)
{
	size_t keep = j->limit - room, drop;
	const char *end;

	if (j->bytes <= keep)
		return;
	drop = MIN(j->bytes, j->bytes - keep + j->limit / 8);
	end = memchr(j->text + drop - 1, '\n', j->bytes - drop + 1);
	drop = end ? (size_t)(end - j->text) + 1 : j->bytes;
	memmove(j->text, j->text + drop, j->bytes - drop);
	j->bytes -= drop;
	j->dropped += drop;
}

void journal_add(struct journal *j, const char *line, size_t n)
{
	char *end;

	if (j->limit < 2)
		return;
	if (!j->text)
		j->text = malloc(j->limit);
	if (!j->text)
		return;
	n = MIN(n, j->limit - 1);
	make_room(j, n + 1);
	end = j->text + j->bytes;
	/* A line is a line, whatever names and sentences are in it. */
	for (size_t i = 0; i < n; i++)
		end[i] = line[i] == '\n' || !line[i] ? ' ' : line[i];
	end[n] = '\n';
	j->bytes += n + 1;
	if (j->grown)
		j->grown(j);
}
