/* SPDX-License-Identifier: Apache-2.0 */
/* What can be set on a sandbox, as text: one table of keys, their ranges and how a refusal is said. */
#include "core.h"

#include <math.h>

#include "settings.h"

#define YEAR_S 31536000.0

int settings_duration(const char *key, double seconds, double most, uint64_t *ms, struct err *e)
{
	if (!isfinite(seconds) || seconds < 0 || seconds > most)
		return err_set(e, EINVAL, "%s must be between 0 (none) and %.0f seconds, not %g", key, most, seconds);
	*ms = (uint64_t)(seconds * 1000.0 + 0.5);
	if (seconds > 0 && *ms == 0)
		*ms = 1;
	return 0;
}

static int parse_duration(const char *key, const char *value, uint64_t *ms, struct err *e)
{
	char *end;
	double d;

	/* strtod also takes hexadecimal, "inf" and leading blanks: digits and a point only. */
	if (!*value || strspn(value, "0123456789.") != strlen(value))
		return err_set(e, EINVAL, "%s must be a number of seconds, not '%.80s'", key, value);
	d = strtod(value, &end);
	if (*end)
		return err_set(e, EINVAL, "%s must be a number of seconds, not '%.80s'", key, value);
	return settings_duration(key, d, YEAR_S, ms, e);
}

static int set_ttl(struct settings *s, const char *key, const char *value, struct err *e)
{
	return parse_duration(key, value, &s->ttl_ms, e);
}

static int set_timeout(struct settings *s, const char *key, const char *value, struct err *e)
{
	return parse_duration(key, value, &s->timeout_ms, e);
}

int settings_output_limit(int64_t n, uint64_t *limit, struct err *e)
{
	if (n < 1 || n > OUTPUT_LIMIT_MAX)
		return err_set(e, EINVAL, "output_limit must be between 1 and %lld bytes, not %lld",
			       (long long)OUTPUT_LIMIT_MAX, (long long)n);
	*limit = (uint64_t)n;
	return 0;
}

static int set_output_limit(struct settings *s, const char *key, const char *value, struct err *e)
{
	size_t n = strlen(value);

	if (n == 0 || n > 18 || strspn(value, "0123456789") != n)
		return err_set(e, EINVAL, "%s must be a number of bytes, not '%.80s'", key, value);
	return settings_output_limit(strtoll(value, NULL, 10), &s->output_limit, e);
}

static int set_user(struct settings *s, const char *key, const char *value, struct err *e)
{
	size_t n = strlen(value);

	if (n == 0 || n >= sizeof(s->user))
		return err_set(e, EINVAL, "%s must be 1 to %zu bytes long", key, sizeof(s->user) - 1);
	for (size_t i = 0; i < n; i++)
		if ((unsigned char)value[i] <= ' ' || value[i] == ':' || value[i] == '/' || value[i] == 0x7f)
			return err_set(e, EINVAL, "%s must be a user's name or number, not '%.63s'", key, value);
	memcpy(s->user, value, n + 1);
	return 0;
}

static int set_cwd(struct settings *s, const char *key, const char *value, struct err *e)
{
	size_t n = strlen(value);

	if (n == 0 || n >= sizeof(s->cwd) || value[0] != '/' || strchr(value, '\n'))
		return err_set(e, EINVAL, "%s must be an absolute path of at most %zu bytes", key, sizeof(s->cwd) - 1);
	memcpy(s->cwd, value, n + 1);
	return 0;
}

static int set_on_expire(struct settings *s, const char *key, const char *value, struct err *e)
{
	if (strcmp(value, "kill") == 0) {
		s->on_expire_hibernate = false;
		return 0;
	}
	if (strcmp(value, "hibernate") == 0)
		return err_set(e, EINVAL, "%s=hibernate is not supported in this version: only kill is", key);
	return err_set(e, EINVAL, "%s must be kill, not '%.80s'", key, value);
}

static const struct setting {
	const char *key;
	int (*set)(struct settings *s, const char *key, const char *value, struct err *e);
} table[] = {
	{ "ttl", set_ttl },
	{ "timeout", set_timeout },
	{ "output_limit", set_output_limit },
	{ "user", set_user },
	{ "cwd", set_cwd },
	{ "on_expire", set_on_expire },
};

int settings_set(struct settings *s, const char *key, const char *value, struct err *e)
{
	for (size_t i = 0; i < ARRAY_SIZE(table); i++)
		if (strcmp(key, table[i].key) == 0)
			return table[i].set(s, key, value, e);
	if (strncmp(key, "network", 7) == 0)
		return err_set(e, EINVAL, "'%.80s': networks are not supported in this version", key);
	return err_set(e, EINVAL, "there is no setting '%.80s': ttl, timeout, output_limit, user, cwd, on_expire", key);
}
