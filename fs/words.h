/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Splits what is written to a ctl file into commands and words, as rc(1) does: blanks separate words, a newline ends a
 * command, '...' quotes (also newlines), '' inside quotes is a quote, and quoted and unquoted text that touch are one word.
 *
 * The text is hostile. It is bounded by the limits below, a NUL is refused, other bytes are only bytes.
 */
#ifndef FS_WORDS_H
#define FS_WORDS_H

#include <vmenv/util.h>

#define WORDS_TEXT_MAX (1u << 20) /* bytes of one write */
#define WORDS_LINE_MAX (96u << 10) /* bytes of one command; a metadata value of the largest size fits */
#define WORDS_MAX 80u              /* words of one command */
#define WORDS_LINES_MAX 1024u      /* commands of one write */

struct words {
	unsigned count; /* at least 1 */
	char **word;
};

/* All of one write. */
struct lines {
	unsigned count;
	struct words *line;
	char *text; /* what the words point into */
	char **word;
};

/* -EINVAL with a sentence that names the line by number, -ENOMEM. *l is untouched on failure. */
int lines_parse(const char *text, size_t n, struct lines *l, struct err *e);
void lines_free(struct lines *l);

/* The value of "KEY=value", with KEY's length in *n; NULL if there is no = or KEY is empty. */
char *word_value(const char *word, size_t *n);
/* A whole decimal number in min..max, nothing else. */
bool word_number(const char *word, uint64_t min, uint64_t max, uint64_t *number);

#endif
