/* SPDX-License-Identifier: Apache-2.0 */
/* A template's config: one table of keys; what is not in it is refused by name. */
#include "config.h"

#include "settings.h"

#define SETUP_MAX 1024
#define GUEST_LEAST_MB 48u /* besides what the disk takes */
#define ENV_MAX 1024

static const char *const default_env[][2] = {
	{ "PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" },
	{ "PYTHONHASHSEED", "0" },
	{ "OMP_NUM_THREADS", "1" },
	{ "MKL_NUM_THREADS", "1" },
	{ "TZ", "UTC" },
	{ "LC_ALL", "C.UTF-8" },
};

static const char *type_name(const json_t *v)
{
	static const char *const names[] = {
		[JSON_OBJECT] = "an object", [JSON_ARRAY] = "an array",  [JSON_STRING] = "a string",
		[JSON_INTEGER] = "a number", [JSON_REAL] = "a number",   [JSON_TRUE] = "true",
		[JSON_FALSE] = "false",      [JSON_NULL] = "null",
	};

	return names[json_typeof(v)];
}

static int take_integer(const char *key, const json_t *v, int64_t least, int64_t most, int64_t *n, struct err *e)
{
	if (!json_is_integer(v))
		return err_set(e, EINVAL, "config: %s must be a whole number between %lld and %lld, not %s", key,
			       (long long)least, (long long)most, json_is_real(v) ? "a fraction" : type_name(v));
	if (json_integer_value(v) < least || json_integer_value(v) > most)
		return err_set(e, EINVAL, "config: %s must be between %lld and %lld, not %lld", key, (long long)least,
			       (long long)most, (long long)json_integer_value(v));
	*n = json_integer_value(v);
	return 0;
}

static int take_vcpus(struct config *c, const char *key, const json_t *v, struct err *e)
{
	int64_t n = 0;
	int r = take_integer(key, v, 1, 8, &n, e);

	if (r == 0)
		c->vcpus = (unsigned)n;
	return r;
}

static int take_memory(struct config *c, const char *key, const json_t *v, struct err *e)
{
	int64_t n = 0;
	int r = take_integer(key, v, 64, 65536, &n, e);

	if (r == 0)
		c->memory_mb = (uint64_t)n;
	return r;
}

static int take_disk(struct config *c, const char *key, const json_t *v, struct err *e)
{
	int64_t n = 0;
	int r = take_integer(key, v, 16, 1048576, &n, e);

	if (r == 0)
		c->disk_mb = ((uint64_t)n + 1) & ~(uint64_t)1; /* the image is a multiple of 2 MiB */
	return r;
}

static int take_cmdline(struct config *c, const char *key, const json_t *v, struct err *e)
{
	const char *s = json_string_value(v);

	if (!s)
		return err_set(e, EINVAL, "config: %s must be a string, not %s", key, type_name(v));
	if (strlen(s) >= sizeof(c->cmdline))
		return err_set(e, EINVAL, "config: %s must be at most %zu bytes, not %zu", key, sizeof(c->cmdline) - 1,
			       strlen(s));
	for (const char *p = s; *p; p++)
		if (*p < ' ' || *p > '~')
			return err_set(e, EINVAL, "config: %s must be printable ASCII", key);
	strcpy(c->cmdline, s);
	return 0;
}

static int take_env(struct config *c, const char *key, const json_t *v, struct err *e)
{
	const char *name;
	json_t *value;

	if (!json_is_object(v))
		return err_set(e, EINVAL, "config: %s must be an object of strings, not %s", key, type_name(v));
	if (json_object_size(v) > ENV_MAX)
		return err_set(e, EINVAL, "config: %s has %zu variables, more than %d", key, json_object_size(v),
			       ENV_MAX);
	json_object_foreach((json_t *)v, name, value) {
		if (!*name || strchr(name, '='))
			return err_set(e, EINVAL, "config: %s: '%.80s' cannot be a variable's name", key, name);
		if (!json_is_string(value))
			return err_set(e, EINVAL, "config: %s: %.80s must be a string, not %s", key, name,
				       type_name(value));
		if (json_object_set(c->env, name, value) < 0)
			return err_set(e, ENOMEM, "out of memory");
	}
	return 0;
}

static int take_setup(struct config *c, const char *key, const json_t *v, struct err *e)
{
	size_t i;
	json_t *command;

	if (!json_is_array(v))
		return err_set(e, EINVAL, "config: %s must be an array of commands, not %s", key, type_name(v));
	if (json_array_size(v) > SETUP_MAX)
		return err_set(e, EINVAL, "config: %s has %zu commands, more than %d", key, json_array_size(v),
			       SETUP_MAX);
	json_array_foreach((json_t *)v, i, command) if (!json_is_string(command)) return err_set(
		e, EINVAL, "config: %s[%zu] must be a string, not %s", key, i, type_name(command));
	json_decref(c->setup);
	c->setup = json_deep_copy(v);
	return c->setup ? 0 : err_set(e, ENOMEM, "out of memory");
}

static int take_setup_timeout(struct config *c, const char *key, const json_t *v, struct err *e)
{
	int64_t n = 0;
	int r = take_integer(key, v, 1, 86400, &n, e);

	if (r == 0)
		c->setup_timeout_s = (unsigned)n;
	return r;
}

static int take_seconds(const char *key, const json_t *v, uint64_t *ms, struct err *e)
{
	struct err inner = { 0 };

	if (!json_is_number(v))
		return err_set(e, EINVAL, "config: %s must be a number of seconds, not %s", key, type_name(v));
	if (settings_duration(key, json_number_value(v), 31536000.0, ms, &inner) < 0)
		return err_set(e, EINVAL, "config: %.400s", inner.text);
	return 0;
}

static int take_ttl(struct config *c, const char *key, const json_t *v, struct err *e)
{
	return take_seconds(key, v, &c->settings.ttl_ms, e);
}

static int take_timeout(struct config *c, const char *key, const json_t *v, struct err *e)
{
	return take_seconds(key, v, &c->settings.timeout_ms, e);
}

static int take_output_limit(struct config *c, const char *key, const json_t *v, struct err *e)
{
	int64_t n = 0;
	int r = take_integer(key, v, 1, OUTPUT_LIMIT_MAX, &n, e);

	if (r == 0)
		c->settings.output_limit = (uint64_t)n;
	return r;
}

/* user, cwd, on_expire: as settings_set says. */
static int take_setting(struct config *c, const char *key, const json_t *v, struct err *e)
{
	struct err inner = { 0 };
	int r;

	if (!json_is_string(v))
		return err_set(e, EINVAL, "config: %s must be a string, not %s", key, type_name(v));
	r = settings_set(&c->settings, key, json_string_value(v), &inner);
	return r < 0 ? err_set(e, -r, "config: %.400s", inner.text) : 0;
}

static int take_clock(struct config *c, const char *key, const json_t *v, struct err *e)
{
	const char *s = json_string_value(v);
	struct tm tm = { 0 }, check;
	int end = 0;
	time_t t;

	if (!s)
		return err_set(e, EINVAL, "config: %s must be \"resync\", \"frozen\" or a time, not %s", key,
			       type_name(v));
	if (strcmp(s, "resync") == 0) {
		c->clock = CLOCK_RESYNC;
		return 0;
	}
	if (strcmp(s, "frozen") == 0) {
		c->clock = CLOCK_FROZEN;
		return 0;
	}
	if (sscanf(s, "%4d-%2d-%2dT%2d:%2d:%2dZ%n", &tm.tm_year, &tm.tm_mon, &tm.tm_mday, &tm.tm_hour, &tm.tm_min,
		   &tm.tm_sec, &end) != 6 || end != 20 || s[20])
		return err_set(
			e, EINVAL,
			"config: %s must be \"resync\", \"frozen\" or like \"2026-01-01T00:00:00Z\", not '%.80s'", key,
			s);
	tm.tm_year -= 1900;
	tm.tm_mon -= 1;
	check = tm;
	t = timegm(&check);
	if (check.tm_year != tm.tm_year || check.tm_mon != tm.tm_mon || check.tm_mday != tm.tm_mday ||
	    check.tm_hour != tm.tm_hour || check.tm_min != tm.tm_min || check.tm_sec != tm.tm_sec)
		return err_set(e, EINVAL, "config: %s: there is no such time as '%.80s'", key, s);
	if (tm.tm_year < 70 || tm.tm_year > 337)
		return err_set(e, EINVAL, "config: %s must be between the years 1970 and 2237, not '%.80s'", key, s);
	c->clock = CLOCK_PINNED;
	c->clock_pinned_ns = (int64_t)t * 1000000000;
	return 0;
}

static int take_network(struct config *c, const char *key, const json_t *v, struct err *e)
{
	const char *mode;
	json_t *value;
	const char *k;

	if (!json_is_object(v))
		return err_set(e, EINVAL, "config: %s must be an object, not %s", key, type_name(v));
	mode = json_string_value(json_object_get(v, "mode"));
	if (!mode)
		return err_set(e, EINVAL, "config: %s must have a \"mode\", a string", key);
	if (strcmp(mode, "none") != 0)
		return err_set(e, EINVAL, "config: %s mode '%.80s' is not supported in this version: only \"none\" is",
			       key, mode);
	json_object_foreach((json_t *)v, k, value)
		if (strcmp(k, "mode") != 0)
			return err_set(e, EINVAL, "config: %s: unknown key '%.80s'", key, k);
	return 0;
}

static int take_pool(struct config *c, const char *key, const json_t *v, struct err *e)
{
	if (!json_is_integer(v))
		return err_set(e, EINVAL, "config: %s must be a number, not %s", key, type_name(v));
	if (json_integer_value(v) != 0)
		return err_set(e, EINVAL, "config: %s other than 0 is not supported in this version", key);
	return 0;
}

static int take_unsupported(struct config *c, const char *key, const json_t *v, struct err *e)
{
	return err_set(e, EINVAL, "config: %s is not supported in this version", key);
}

static const struct config_key {
	const char *key;
	int (*take)(struct config *c, const char *key, const json_t *v, struct err *e);
} table[] = {
	{ "vcpus", take_vcpus },
	{ "memory_mb", take_memory },
	{ "disk_mb", take_disk },
	{ "cmdline", take_cmdline },
	{ "env", take_env },
	{ "user", take_setting },
	{ "cwd", take_setting },
	{ "setup", take_setup },
	{ "setup_timeout", take_setup_timeout },
	{ "timeout", take_timeout },
	{ "ttl", take_ttl },
	{ "on_expire", take_setting },
	{ "output_limit", take_output_limit },
	{ "clock", take_clock },
	{ "network", take_network },
	{ "pool", take_pool },
	{ "grader", take_unsupported },
	{ "tripwire", take_unsupported },
};

static int defaults(struct config *c, struct err *e)
{
	*c = (struct config){
		.vcpus = 1,
		.memory_mb = 256,
		.disk_mb = 1024,
		.setup_timeout_s = 900,
		.settings =
			{.ttl_ms = 900000, .timeout_ms = 60000, .output_limit = 67108864, .user = "root", .cwd = "/"},
		.env = json_object(),
		.setup = json_array(),
	};
	if (!c->env || !c->setup)
		return err_set(e, ENOMEM, "out of memory");
	for (size_t i = 0; i < ARRAY_SIZE(default_env); i++)
		if (json_object_set_new(c->env, default_env[i][0], json_string(default_env[i][1])) < 0)
			return err_set(e, ENOMEM, "out of memory");
	return 0;
}

static int take_key(struct config *c, const char *key, const json_t *v, struct err *e)
{
	for (size_t i = 0; i < ARRAY_SIZE(table); i++)
		if (strcmp(key, table[i].key) == 0)
			return table[i].take(c, key, v, e);
	return err_set(e, EINVAL, "config: unknown key '%.80s'", key);
}

static int take_all(struct config *c, const char *text, size_t n, struct err *e)
{
	json_error_t je;
	json_t *root, *v;
	const char *key;
	int r = 0;

	root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &je);
	if (!root)
		return err_set(e, EINVAL, "config: not JSON: %.160s at line %d, column %d", je.text, je.line,
			       je.column);
	if (!json_is_object(root))
		r = err_set(e, EINVAL, "config: must be one JSON object, not %s", type_name(root));
	else
		json_object_foreach(root, key, v) {
			r = take_key(c, key, v, e);
			if (r < 0)
				break;
		}
	json_decref(root);
	return r;
}

/* The kernel has a struct page of 64 bytes for each 4 KiB of the disk, which is memory to it. */
static int check_sizes(const struct config *c, struct err *e)
{
	uint64_t pages_mb = (c->disk_mb + 63) / 64;

	if (pages_mb + GUEST_LEAST_MB <= c->memory_mb)
		return 0;
	return err_set(e, EINVAL,
		       "config: a disk_mb of %llu takes %llu MB of the machine's memory, and the rest of it needs %u: "
		       "memory_mb must be at least %llu, not %llu", (unsigned long long)c->disk_mb,
		       (unsigned long long)pages_mb, GUEST_LEAST_MB, (unsigned long long)(pages_mb + GUEST_LEAST_MB),
		       (unsigned long long)c->memory_mb);
}

int config_parse(const char *text, size_t n, struct config *c, struct err *e)
{
	struct config made = { 0 };
	size_t blank = 0;
	int r;

	if (n > CONFIG_MAX)
		return err_set(e, EFBIG, "config: %zu bytes is more than %u", n, CONFIG_MAX);
	while (blank < n && strchr(" \t\r\n", text[blank]) && text[blank])
		blank++;
	r = defaults(&made, e);
	if (r == 0 && blank < n)
		r = take_all(&made, text, n, e);
	if (r == 0)
		r = check_sizes(&made, e);
	if (r < 0) {
		config_clear(&made);
		return r;
	}
	*c = made;
	return 0;
}

void config_clear(struct config *c)
{
	json_decref(c->env);
	json_decref(c->setup);
	c->env = c->setup = NULL;
}

int64_t config_clock(const struct config *c, bool *frozen)
{
	*frozen = c->clock == CLOCK_FROZEN;
	if (c->clock == CLOCK_PINNED)
		return c->clock_pinned_ns;
	return (int64_t)now_ns(CLOCK_REALTIME);
}
