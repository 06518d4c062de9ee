/* SPDX-License-Identifier: Apache-2.0 */
/* The object that `exec.json` takes. */
#include "base64.h"
#include "exec.h"
#include "settings.h"

#define TIMEOUT_MOST_S 31536000.0

/* A string without NUL bytes, for what becomes a C string. */
static bool plain_string(const json_t *v)
{
	return json_is_string(v) && strlen(json_string_value(v)) == json_string_length(v);
}

static int take_cmd(struct exec_request *r, json_t *v, struct err *e)
{
	if (!json_is_string(v))
		return err_set(e, EINVAL, "cmd must be a string");
	if (!json_string_length(v))
		return err_set(e, EINVAL, "cmd is empty");
	r->q.script = json_string_value(v);
	r->q.script_bytes = json_string_length(v);
	return 0;
}

static int take_argv(struct exec_request *r, json_t *v, struct err *e)
{
	size_t i;
	json_t *word;

	if (!json_is_array(v) || !json_array_size(v))
		return err_set(e, EINVAL, "argv must be an array of at least one string");
	json_array_foreach(v, i, word)
		if (!plain_string(word))
			return err_set(e, EINVAL, "argv[%zu] must be a string without NUL bytes", i);
	r->q.argv = v;
	return 0;
}

static int take_cwd(struct exec_request *r, json_t *v, struct err *e)
{
	struct settings s = { 0 };

	if (!plain_string(v))
		return err_set(e, EINVAL, "cwd must be a string without NUL bytes");
	r->q.cwd = json_string_value(v);
	return settings_set(&s, "cwd", r->q.cwd, e);
}

static int take_user(struct exec_request *r, json_t *v, struct err *e)
{
	struct settings s = { 0 };

	if (!plain_string(v))
		return err_set(e, EINVAL, "user must be a string without NUL bytes");
	r->q.user = json_string_value(v);
	return settings_set(&s, "user", r->q.user, e);
}

static int take_env(struct exec_request *r, json_t *v, struct err *e)
{
	const char *name;
	json_t *value;

	if (!json_is_object(v))
		return err_set(e, EINVAL, "env must be an object of strings");
	json_object_foreach(v, name, value) {
		if (!*name || strchr(name, '='))
			return err_set(e, EINVAL, "env: '%.80s' cannot be a variable's name", name);
		if (!plain_string(value))
			return err_set(e, EINVAL, "env: %.80s must be a string without NUL bytes", name);
	}
	r->q.env = v;
	return 0;
}

static int take_stdin(struct exec_request *r, json_t *v, struct err *e)
{
	if (!json_is_string(v))
		return err_set(e, EINVAL, "stdin must be a string");
	r->q.input = json_string_value(v);
	r->q.input_bytes = json_string_length(v);
	return 0;
}

static int take_stdin_base64(struct exec_request *r, json_t *v, struct err *e)
{
	int error = -EINVAL;

	if (json_is_string(v))
		r->input = base64_decode(json_string_value(v), json_string_length(v), &r->q.input_bytes, &error);
	if (!r->input)
		return err_set(e, -error, "stdin_base64 must be a string of base64");
	r->q.input = r->input;
	return 0;
}

static int take_timeout(struct exec_request *r, json_t *v, struct err *e)
{
	if (!json_is_number(v))
		return err_set(e, EINVAL, "timeout must be a number of seconds");
	return settings_duration("timeout", json_number_value(v), TIMEOUT_MOST_S, &r->q.timeout_ms, e);
}

static int take_output_limit(struct exec_request *r, json_t *v, struct err *e)
{
	if (!json_is_integer(v))
		return err_set(e, EINVAL, "output_limit must be a number of bytes");
	return settings_output_limit(json_integer_value(v), &r->q.output_limit, e);
}

static const struct key {
	const char *name;
	int (*take)(struct exec_request *r, json_t *v, struct err *e);
} keys[] = {
	{ "cmd", take_cmd },
	{ "argv", take_argv },
	{ "cwd", take_cwd },
	{ "user", take_user },
	{ "env", take_env },
	{ "stdin", take_stdin },
	{ "stdin_base64", take_stdin_base64 },
	{ "timeout", take_timeout },
	{ "output_limit", take_output_limit },
};

static int take_key(struct exec_request *r, const char *name, json_t *v, struct err *e)
{
	for (size_t i = 0; i < ARRAY_SIZE(keys); i++)
		if (!strcmp(name, keys[i].name))
			return keys[i].take(r, v, e);
	return err_set(e, EINVAL,
		       "there is no key '%.80s': cmd, argv, cwd, user, env, stdin, stdin_base64, timeout, output_limit", name);
}

static int take_all(struct exec_request *r, struct err *e)
{
	const char *name;
	json_t *v;

	if (!json_is_object(r->json))
		return err_set(e, EINVAL, "exec.json takes one object");
	json_object_foreach(r->json, name, v) {
		int error = take_key(r, name, v, e);

		if (error < 0)
			return error;
	}
	if (!r->q.script == !r->q.argv)
		return err_set(e, EINVAL, "exec.json takes one of cmd and argv");
	if (json_object_get(r->json, "stdin") && json_object_get(r->json, "stdin_base64"))
		return err_set(e, EINVAL, "exec.json takes one of stdin and stdin_base64");
	return 0;
}

int exec_json_parse(const char *text, size_t n, struct exec_request *r, struct err *e)
{
	json_error_t error;

	*r = (struct exec_request){ .q = { .timeout_ms = UINT64_MAX, .output_limit = UINT64_MAX } };
	r->json = json_loadb(text, n, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &error);
	if (!r->json)
		return err_set(e, EINVAL, "not JSON, line %d: %s", error.line, error.text);
	return take_all(r, e);
}

void exec_request_free(struct exec_request *r)
{
	json_decref(r->json);
	free(r->input);
	r->json = NULL;
	r->input = NULL;
}

char *exec_json_usage(const struct node *n, size_t *bytes)
{
	char *text = strdup("write {\"cmd\": \"...\"} or {\"argv\": [...]} here, with cwd, user, env, stdin or stdin_base64, timeout, "
			    "output_limit; read the result on the same open file\n");

	(void)n;
	*bytes = text ? strlen(text) : 0;
	return text;
}
