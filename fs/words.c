/* SPDX-License-Identifier: Apache-2.0 */
#include "words.h"

enum token { TOKEN_WORD, TOKEN_NEWLINE, TOKEN_END, TOKEN_BAD_QUOTE, TOKEN_NUL };

/* Takes the next token from p, copying a word's bytes to *out, which never get ahead of what was read. */
static enum token take(const char **p, const char *end, char **out)
{
	const char *s = *p;
	char *o = *out;
	enum token t = TOKEN_WORD;
	bool quoted = false;

	while (s < end && (*s == ' ' || *s == '\t'))
		s++;
	if (s == end) {
		t = TOKEN_END;
	} else if (*s == '\n') {
		s++;
		t = TOKEN_NEWLINE;
	}
	for (; t == TOKEN_WORD && s < end; s++) {
		if (!*s) {
			t = TOKEN_NUL;
		} else if (quoted) {
			if (*s != '\'')
				*o++ = *s;
			else if (s + 1 < end && s[1] == '\'')
				*o++ = *s++;
			else
				quoted = false;
		} else if (*s == '\'') {
			quoted = true;
		} else if (*s == ' ' || *s == '\t' || *s == '\n') {
			break;
		} else {
			*o++ = *s;
		}
	}
	if (t == TOKEN_WORD && quoted)
		t = TOKEN_BAD_QUOTE;
	*p = s;
	*out = o;
	return t;
}

/* Room for everything at once: a word takes at least one byte of text and what separates it, and ends in a NUL. */
static int room(struct lines *l, size_t n)
{
	l->text = malloc(2 * n + 2);
	l->word = malloc((n / 2 + 1) * sizeof(*l->word));
	l->line = malloc(WORDS_LINES_MAX * sizeof(*l->line));
	return l->text && l->word && l->line ? 0 : -ENOMEM;
}

static int split(const char *text, size_t n, struct lines *l, struct err *e)
{
	const char *p = text, *end = text + n, *start = text;
	char *out = l->text, **word = l->word;
	unsigned number = 1, count = 0;

	for (;;) {
		char *begin = out;
		enum token t = take(&p, end, &out);

		if (t == TOKEN_NUL)
			return err_set(e, EINVAL, "line %u: a NUL byte", number);
		if (t == TOKEN_BAD_QUOTE)
			return err_set(e, EINVAL, "line %u: a quote is not closed", number);
		if ((size_t)(p - start) > WORDS_LINE_MAX)
			return err_set(e, EINVAL, "line %u: longer than %u bytes", number, WORDS_LINE_MAX);
		if (t == TOKEN_WORD) {
			if (count == WORDS_MAX)
				return err_set(e, EINVAL, "line %u: more than %u words", number, WORDS_MAX);
			*out++ = '\0';
			word[count++] = begin;
			continue;
		}
		if (count) {
			if (l->count == WORDS_LINES_MAX)
				return err_set(e, EINVAL, "more than %u commands in one write", WORDS_LINES_MAX);
			l->line[l->count++] = (struct words){ count, word };
			word += count;
			count = 0;
		}
		if (t == TOKEN_END)
			return 0;
		number++;
		start = p;
	}
}

int lines_parse(const char *text, size_t n, struct lines *l, struct err *e)
{
	struct lines made = { 0 };
	int r;

	if (n > WORDS_TEXT_MAX)
		return err_set(e, EINVAL, "more than %u bytes in one write", WORDS_TEXT_MAX);
	r = room(&made, n);
	if (r < 0)
		err_set(e, ENOMEM, "no memory for %zu bytes of commands", n);
	else
		r = split(text, n, &made, e);
	if (r < 0)
		lines_free(&made);
	else
		*l = made;
	return r;
}

void lines_free(struct lines *l)
{
	free(l->text);
	free(l->word);
	free(l->line);
	*l = (struct lines){ 0 };
}

char *word_value(const char *word, size_t *n)
{
	const char *equals = strchr(word, '=');

	if (!equals || equals == word)
		return NULL;
	*n = (size_t)(equals - word);
	return (char *)equals + 1;
}

bool word_number(const char *word, uint64_t min, uint64_t max, uint64_t *number)
{
	uint64_t v = 0;

	if (!*word || strlen(word) > 18)
		return false;
	for (const char *p = word; *p; p++) {
		if (*p < '0' || *p > '9')
			return false;
		v = v * 10 + (uint64_t)(*p - '0');
	}
	if (v < min || v > max)
		return false;
	*number = v;
	return true;
}
