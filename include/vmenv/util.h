/* SPDX-License-Identifier: Apache-2.0 */
/* Errors that carry a sentence, cleanup attributes, and the limits every part shares. */
#ifndef VMENV_UTIL_H
#define VMENV_UTIL_H

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* A failure: an errno and the sentence a person needs. Untouched on success. */
struct err {
	int code;       /* positive errno, 0 for none */
	char text[480]; /* one sentence, no newline, UTF-8 */
};

/* Fills *e (which may be NULL) and returns -code, so that `return err_set(e, EINVAL, "...")` reads well. */
__attribute__((format(printf, 3, 4))) static inline int err_set(struct err *e, int code, const char *fmt, ...)
{
	if (e) {
		va_list ap;

		va_start(ap, fmt);
		vsnprintf(e->text, sizeof(e->text), fmt, ap);
		va_end(ap);
		e->code = code;
	}
	return -code;
}

static inline void cleanup_free(void *p)
{
	free(*(void **)p);
}
static inline void cleanup_close(int *fd)
{
	if (*fd >= 0)
		close(*fd);
}
static inline void cleanup_file(FILE **f)
{
	if (*f)
		fclose(*f);
}
#define AUTO_FREE __attribute__((cleanup(cleanup_free)))
#define AUTO_CLOSE __attribute__((cleanup(cleanup_close)))
#define AUTO_FILE __attribute__((cleanup(cleanup_file)))

/* Hands the descriptor to a new owner. */
static inline int steal_fd(int *fd)
{
	int f = *fd;

	*fd = -1;
	return f;
}
static inline void *steal_ptr_(void *p)
{
	void **pp = p, *v = *pp;

	*pp = NULL;
	return v;
}
#define steal_ptr(p) ((__typeof__(*(p)))steal_ptr_(p))

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

static inline uint64_t now_ns(clockid_t clock)
{
	struct timespec ts;

	clock_gettime(clock, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

#define NAME_LIMIT 64 /* [A-Za-z0-9][A-Za-z0-9._-]{0,63} */

static inline bool name_valid(const char *s, size_t n)
{
	if (n == 0 || n > NAME_LIMIT)
		return false;
	for (size_t i = 0; i < n; i++) {
		char c = s[i];
		bool alnum = (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');

		if (!alnum && (i == 0 || (c != '.' && c != '_' && c != '-')))
			return false;
	}
	return true;
}

#endif
