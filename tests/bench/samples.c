/* SPDX-License-Identifier: Apache-2.0 */
#include "bench.h"

void samples_add(struct samples *s, double ms)
{
	if (s->count == s->room) {
		s->room = s->room ? s->room * 2 : 64;
		s->ms = realloc(s->ms, s->room * sizeof(*s->ms));
		if (!s->ms)
			abort();
	}
	s->ms[s->count++] = ms;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

double samples_percentile(struct samples *s, double percent)
{
	unsigned at;

	if (!s->count)
		return 0;
	qsort(s->ms, s->count, sizeof(*s->ms), by_value);
	at = (unsigned)(percent / 100 * s->count);
	return s->ms[MIN(at, s->count - 1)];
}

void samples_print(const char *name, struct samples *s)
{
	double p50 = samples_percentile(s, 50), p99 = samples_percentile(s, 99);

	printf("%-52s p50 %9.2f ms   p99 %9.2f ms   min %9.2f   max %9.2f   n %u\n", name, p50, p99, samples_percentile(s, 0),
	       samples_percentile(s, 100), s->count);
	fflush(stdout);
}

void samples_free(struct samples *s)
{
	free(s->ms);
	*s = (struct samples){ 0 };
}
