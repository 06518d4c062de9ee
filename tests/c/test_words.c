/* SPDX-License-Identifier: Apache-2.0 */
/* Ctl text into commands, journals that drop their front, base64. */
#undef NDEBUG
#include <assert.h>

#include "../../fs/base64.h"
#include "../../fs/core.h"
#include "../../fs/words.h"

/* Joins what was parsed: words by '|', commands by ';'. NULL if it is refused. */
static const char *parsed(const char *text, size_t n, char *out, size_t room)
{
	struct lines l;
	struct err e = { 0 };
	size_t at = 0;

	if (lines_parse(text, n, &l, &e) < 0) {
		assert(e.code && *e.text && !strchr(e.text, '\n'));
		return NULL;
	}
	*out = '\0';
	for (unsigned i = 0; i < l.count; i++)
		for (unsigned w = 0; w < l.line[i].count; w++)
			at += (size_t)snprintf(out + at, room - at, "%s%s", w ? "|" : i ? ";" : "", l.line[i].word[w]);
	lines_free(&l);
	return out;
}

static void is(const char *text, const char *expected)
{
	char out[4096];
	const char *got = parsed(text, strlen(text), out, sizeof(out));

	if (!got != !expected || (got && strcmp(got, expected))) {
		fprintf(stderr, "'%s' is '%s', not '%s'\n", text, got ? got : "refused", expected ? expected : "refused");
		abort();
	}
}

static void test_words(void)
{
	is("", "");
	is("\n \t\n", "");
	is("kill", "kill");
	is("kill\n", "kill");
	is("  create a\tfrom=b  \n", "create|a|from=b");
	is("a b\nc\n\nd e f", "a|b;c;d|e|f");
	is("set 'a b' c", "set|a b|c");
	is("x=''''", "x='");
	is("'it''s' ''", "it's|");
	is("a'b c'd", "ab cd");
	is("''", "");
	is("'two\nlines' x", "two\nlines|x");
	is("a # b", "a|#|b");
	is("\"a b\"", "\"a|b\"");
	is("a\\ b", "a\\|b");
	is("'open", NULL);
	is("ok\n'open\nb", NULL);
	is("'", NULL);
	is("a\r\n", "a\r");
}

static void test_limits(void)
{
	size_t n = WORDS_TEXT_MAX + 1;
	char *text = malloc(n), out[16];
	struct lines l;

	assert(text);
	assert(!parsed("a\0b", 3, out, sizeof(out)));
	assert(!parsed("'a\0b'", 5, out, sizeof(out)));
	memset(text, 'x', n);
	assert(!parsed(text, n, out, sizeof(out)));
	assert(!parsed(text, WORDS_LINE_MAX + 1, out, sizeof(out)));
	assert(lines_parse(text, WORDS_LINE_MAX, &l, NULL) == 0 && l.count == 1);
	lines_free(&l);
	for (size_t i = 0; i < n; i += 2)
		text[i] = ' ';
	assert(!parsed(text, n - 1, out, sizeof(out)));
	for (size_t i = 0; i < n; i += 2)
		text[i] = '\n';
	assert(!parsed(text, n - 1, out, sizeof(out)));
	assert(lines_parse(text, 2 * WORDS_LINES_MAX, &l, NULL) == 0 && l.count == WORDS_LINES_MAX);
	lines_free(&l);
	memset(text, '\'', n);
	assert(lines_parse(text, 65536, &l, NULL) == 0 && l.count == 1 && strlen(l.line[0].word[0]) == 32767);
	lines_free(&l);
	free(text);
}

/* Whatever the bytes, it is parsed or refused with a sentence. */
static void test_noise(void)
{
	static const char bytes[] = "ab= \t\n''''\0\xff";
	char text[64], out[256];
	unsigned seed = 1;

	for (int round = 0; round < 200000; round++) {
		size_t n = (size_t)rand_r(&seed) % sizeof(text);

		for (size_t i = 0; i < n; i++)
			text[i] = bytes[(size_t)rand_r(&seed) % (sizeof(bytes) - 1)];
		parsed(text, n, out, sizeof(out));
	}
}

static void test_pieces(void)
{
	uint64_t v = 7;
	size_t n = 0;

	assert(!strcmp(word_value("a=b=c", &n), "b=c") && n == 1);
	assert(!strcmp(word_value("a=", &n), ""));
	assert(!word_value("=b", &n) && !word_value("ab", &n));
	assert(word_number("250", 1, 250, &v) && v == 250);
	assert(!word_number("251", 1, 250, &v) && !word_number("0", 1, 250, &v) && !word_number("", 0, 9, &v));
	assert(!word_number("+1", 0, 9, &v) && !word_number("1 ", 0, 9, &v) && !word_number("99999999999999999999", 0, UINT64_MAX, &v));
	assert(v == 250);
}

static void test_journal(void)
{
	struct journal j = { .limit = 100 };
	uint64_t last = 0;
	char line[40];

	for (int i = 0; i < 1000; i++) {
		size_t n = (size_t)snprintf(line, sizeof(line), "line %d %.*s", i, i % 20, "xxxxxxxxxxxxxxxxxxxx");

		journal_add(&j, line, n);
		assert(j.bytes <= j.limit && j.dropped + j.bytes == last + n + 1);
		last = j.dropped + j.bytes;
		assert(!strncmp(j.text, "line ", 5) && j.text[j.bytes - 1] == '\n');
		assert(j.bytes >= n + 1 && !memcmp(j.text + j.bytes - n - 1, line, n));
	}
	journal_add(&j, "two\nlines", 9);
	assert(!memcmp(j.text + j.bytes - 10, "two lines\n", 10));
	memset(line, 'y', sizeof(line));
	for (int i = 0; i < 10; i++)
		journal_add(&j, line, 99 > sizeof(line) ? sizeof(line) : 99);
	assert(j.bytes <= j.limit);
	free(j.text);
}

static void test_base64(void)
{
	unsigned char bytes[300];
	unsigned seed = 2;
	int error;
	size_t n;

	for (size_t length = 0; length < sizeof(bytes); length++) {
		for (size_t i = 0; i < length; i++)
			bytes[i] = (unsigned char)rand_r(&seed);
		AUTO_FREE char *text = base64_encode(bytes, length);
		AUTO_FREE char *back = base64_decode(text, strlen(text), &n, &error);

		assert(back && n == length && (!n || !memcmp(back, bytes, n)));
	}
	for (const char *const *bad = (const char *const[]){ "A", "AA", "AAA", "AA=A", "A===", "====", "AB==", "AAB=", "A A=", "AA==AA==", NULL }; *bad; bad++)
		assert(!base64_decode(*bad, strlen(*bad), &n, &error) && error == -EINVAL);
}

int main(void)
{
	test_words();
	test_limits();
	test_noise();
	test_pieces();
	test_journal();
	test_base64();
	return 0;
}
