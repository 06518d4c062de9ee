/* SPDX-License-Identifier: Apache-2.0 */
#include <limits.h>

#include <vmenv/util.h>

#include "request.h"

static int number(const json_t *v, const char *key, uint64_t max, uint64_t *out, struct err *e)
{
	if (!json_is_integer(v) || json_integer_value(v) < 0 || (uint64_t)json_integer_value(v) > max)
		return err_set(e, EINVAL, "%s is not an integer from 0 to %llu", key, (unsigned long long)max);
	*out = (uint64_t)json_integer_value(v);
	return 0;
}

static int string(const json_t *v, const char *key, const char **out, struct err *e)
{
	if (!json_is_string(v))
		return err_set(e, EINVAL, "%s is not a string", key);
	*out = json_string_value(v);
	return 0;
}

static int arguments(struct request *q, const json_t *v, struct err *e)
{
	const json_t *item;
	size_t i;

	if (json_is_null(v))
		return 0;
	if (!json_is_array(v) || json_array_size(v) == 0 || json_array_size(v) > ARGUMENTS_MAX)
		return err_set(e, EINVAL, "argv is not null or an array of 1 to %d strings", ARGUMENTS_MAX);
	if (q->argv)
		return err_set(e, EINVAL, "argv is there twice");
	q->argc = json_array_size(v);
	q->argv = calloc(q->argc + 1, sizeof(*q->argv));
	if (!q->argv)
		return err_set(e, ENOMEM, "out of memory");
	json_array_foreach(v, i, item) {
		int r = string(item, "an element of argv", &q->argv[i], e);

		if (r < 0)
			return r;
	}
	return 0;
}

static int environment(struct request *q, json_t *v, struct err *e)
{
	const char *key;
	json_t *value;

	if (!json_is_object(v))
		return err_set(e, EINVAL, "env is not an object");
	json_object_foreach(v, key, value)
		if (key[0] == '\0' || strchr(key, '=') || !json_is_string(value))
			return err_set(e, EINVAL, "env: '%.100s' is not a name with a string", key);
	q->env = v;
	return 0;
}

static int one_key(struct request *q, const char *key, json_t *v, struct err *e)
{
	if (strcmp(key, "run") == 0)
		return number(v, key, INT64_MAX, &q->run, e);
	if (strcmp(key, "argv") == 0)
		return arguments(q, v, e);
	if (strcmp(key, "script_bytes") == 0)
		return number(v, key, SCRIPT_LIMIT, &q->script_bytes, e);
	if (strcmp(key, "stdin_bytes") == 0)
		return number(v, key, INT64_MAX, &q->stdin_bytes, e);
	if (strcmp(key, "cwd") == 0)
		return string(v, key, &q->cwd, e);
	if (strcmp(key, "user") == 0)
		return string(v, key, &q->user, e);
	if (strcmp(key, "env") == 0)
		return environment(q, v, e);
	if (strcmp(key, "timeout_ms") == 0)
		return number(v, key, 1000000000000, &q->timeout_ms, e);
	if (strcmp(key, "output_limit") == 0)
		return number(v, key, INT64_MAX, &q->output_limit, e);
	if (strcmp(key, "oldest") == 0)
		return number(v, key, INT64_MAX, &q->oldest, e);
	return err_set(e, EINVAL, "unknown key '%.100s'", key);
}

int request_parse(struct request *q, const char *text, size_t length, struct err *e)
{
	json_error_t je;
	const char *key;
	json_t *value;

	*q = (struct request){ .cwd = "/", .user = "root", .output_limit = UINT64_MAX };
	q->json = json_loadb(text, length, JSON_REJECT_DUPLICATES, &je);
	if (!q->json)
		return err_set(e, EINVAL, "not JSON: %s", je.text);
	if (!json_is_object(q->json))
		return err_set(e, EINVAL, "not a JSON object");
	json_object_foreach(q->json, key, value) {
		int r = one_key(q, key, value, e);

		if (r < 0)
			return r;
	}
	if (q->output_limit == UINT64_MAX)
		return err_set(e, EINVAL, "output_limit is missing");
	if (!json_object_get(q->json, "run"))
		return err_set(e, EINVAL, "run is missing");
	if (q->argv && q->script_bytes)
		return err_set(e, EINVAL, "argv and a script, where it should be one of them");
	return 0;
}

void request_free(struct request *q)
{
	free(q->argv);
	json_decref(q->json);
	*q = (struct request){ 0 };
}
