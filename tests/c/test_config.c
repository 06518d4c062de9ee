/* SPDX-License-Identifier: Apache-2.0 */
/* A template's config: defaults, every key, and refusals that name what is wrong. */
#undef NDEBUG
#include <assert.h>

#include "../../fs/config.h"

static struct config parse(const char *text)
{
	struct config c = { 0 };
	struct err e = { 0 };

	if (config_parse(text, strlen(text), &c, &e) < 0) {
		fprintf(stderr, "%s: %s\n", text, e.text);
		assert(false);
	}
	return c;
}

static void refuses(const char *text, const char *names)
{
	struct config c = { .vcpus = 77 };
	struct err e = { 0 };

	if (config_parse(text, strlen(text), &c, &e) != -EINVAL || !strstr(e.text, names)) {
		fprintf(stderr, "%s: '%s' does not say '%s'\n", text, e.text, names);
		assert(false);
	}
	assert(c.vcpus == 77 && !c.env); /* untouched */
}

static void test_defaults(void)
{
	static const char *const empty[] = { "", "  \n\t", "{}" };

	for (size_t i = 0; i < ARRAY_SIZE(empty); i++) {
		struct config c = parse(empty[i]);
		bool frozen;

		assert(c.vcpus == 1 && c.memory_mb == 256 && c.disk_mb == 1024 && c.cmdline[0] == 0);
		assert(c.setup_timeout_s == 900 && json_array_size(c.setup) == 0);
		assert(c.settings.ttl_ms == 900000 && c.settings.timeout_ms == 60000 && c.settings.output_limit == 67108864);
		assert(strcmp(c.settings.user, "root") == 0 && strcmp(c.settings.cwd, "/") == 0);
		assert(json_object_size(c.env) == 6);
		assert(strcmp(json_string_value(json_object_get(c.env, "PYTHONHASHSEED")), "0") == 0);
		assert(c.clock == CLOCK_RESYNC && config_clock(&c, &frozen) > 0 && !frozen);
		config_clear(&c);
	}
}

static void test_all(void)
{
	struct config c = parse("{\"vcpus\":8,\"memory_mb\":64,\"disk_mb\":17,\"cmdline\":\"quiet\","
				"\"env\":{\"TZ\":\"CET\",\"A\":\"b=c\"},\"user\":\"bob\",\"cwd\":\"/home\",\"setup\":[\"a\",\"b\"],"
				"\"setup_timeout\":5,\"timeout\":1.5,\"ttl\":0,\"on_expire\":\"kill\",\"output_limit\":4096,"
				"\"clock\":\"2026-01-01T00:00:00Z\",\"network\":{\"mode\":\"none\"},\"pool\":0}");
	bool frozen = true;

	assert(c.vcpus == 8 && c.memory_mb == 64 && c.disk_mb == 18 && strcmp(c.cmdline, "quiet") == 0);
	assert(json_object_size(c.env) == 7 && strcmp(json_string_value(json_object_get(c.env, "TZ")), "CET") == 0);
	assert(strcmp(c.settings.user, "bob") == 0 && strcmp(c.settings.cwd, "/home") == 0);
	assert(json_array_size(c.setup) == 2 && c.setup_timeout_s == 5);
	assert(c.settings.timeout_ms == 1500 && c.settings.ttl_ms == 0 && c.settings.output_limit == 4096);
	assert(config_clock(&c, &frozen) == 1767225600ll * 1000000000 && !frozen);
	config_clear(&c);
	c = parse("{\"clock\":\"frozen\"}");
	config_clock(&c, &frozen);
	assert(frozen);
	config_clear(&c);
}

static void test_refusals(void)
{
	static const char *const cases[][2] = {
		{ "{\"vcpu\":1}", "unknown key 'vcpu'" },
		{ "{\"vcpus\":0}", "vcpus must be between 1 and 8, not 0" },
		{ "{\"vcpus\":9}", "not 9" },
		{ "{\"vcpus\":1.5}", "whole number" },
		{ "{\"vcpus\":\"1\"}", "a string" },
		{ "{\"vcpus\":1,\"vcpus\":2}", "duplicate" },
		{ "{\"memory_mb\":63}", "memory_mb must be between 64 and 65536, not 63" },
		{ "{\"memory_mb\":65537}", "65537" },
		{ "{\"memory_mb\":99999999999999999999}", "not JSON" },
		{ "{\"disk_mb\":15}", "disk_mb must be between 16 and 1048576" },
		{ "{\"disk_mb\":1048577}", "1048577" },
		{ "{\"cmdline\":\"a\\nb\"}", "printable" },
		{ "{\"cmdline\":3}", "cmdline must be a string" },
		{ "{\"env\":[]}", "env must be an object" },
		{ "{\"env\":{\"A\":1}}", "env: A must be a string" },
		{ "{\"env\":{\"A=B\":\"\"}}", "'A=B'" },
		{ "{\"env\":{\"\":\"\"}}", "env" },
		{ "{\"env\":{\"A\":\"a\\u0000b\"}}", "not JSON" },
		{ "{\"user\":\"a b\"}", "config: user" },
		{ "{\"user\":0}", "user must be a string" },
		{ "{\"cwd\":\"x\"}", "config: cwd" },
		{ "{\"setup\":\"x\"}", "setup must be an array" },
		{ "{\"setup\":[\"a\",2]}", "setup[1]" },
		{ "{\"setup_timeout\":0}", "setup_timeout must be between 1 and 86400" },
		{ "{\"timeout\":-1}", "timeout" },
		{ "{\"timeout\":\"60\"}", "number of seconds" },
		{ "{\"ttl\":31536001}", "ttl" },
		{ "{\"on_expire\":\"hibernate\"}", "not supported in this version" },
		{ "{\"output_limit\":0}", "output_limit" },
		{ "{\"clock\":\"now\"}", "'now'" },
		{ "{\"clock\":\"2026-02-30T00:00:00Z\"}", "no such time" },
		{ "{\"clock\":\"2026-01-01T00:00:00\"}", "2026-01-01T00:00:00Z" },
		{ "{\"clock\":\"2026-01-01T00:00:00Zx\"}", "Zx" },
		{ "{\"clock\":\"1969-01-01T00:00:00Z\"}", "1970" },
		{ "{\"clock\":1}", "clock" },
		{ "{\"network\":{\"mode\":\"allowlist\",\"allow\":[]}}", "not supported in this version" },
		{ "{\"network\":{\"mode\":\"none\",\"allow\":[]}}", "unknown key 'allow'" },
		{ "{\"network\":{}}", "mode" },
		{ "{\"network\":\"none\"}", "network must be an object" },
		{ "{\"grader\":{}}", "grader is not supported in this version" },
		{ "{\"tripwire\":[]}", "tripwire is not supported in this version" },
		{ "{\"pool\":1}", "pool" },
		{ "[]", "one JSON object" },
		{ "{", "not JSON" },
		{ "{} x", "not JSON" },
		{ "{\"cwd\":\"\xff\"}", "not JSON" },
	};

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
		refuses(cases[i][0], cases[i][1]);
}

static void test_size(void)
{
	struct err e = { 0 };
	struct config c;
	size_t n = CONFIG_MAX + 1;
	char *text = malloc(n);

	memset(text, ' ', n);
	assert(config_parse(text, n, &c, &e) == -EFBIG);
	assert(config_parse("{}\0{}", 5, &c, &e) == -EINVAL);
	assert(config_parse("\0", 1, &c, &e) == -EINVAL);
	free(text);
}

int main(void)
{
	test_defaults();
	test_all();
	test_refusals();
	test_size();
	return 0;
}
