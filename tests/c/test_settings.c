/* SPDX-License-Identifier: Apache-2.0 */
/* Settings as text: what is taken, and what a refusal says. */
#undef NDEBUG
#include <assert.h>

#include "../../fs/core.h"

static void takes(const char *key, const char *value)
{
	struct settings s = { 0 };
	struct err e = { 0 };

	if (settings_set(&s, key, value, &e) < 0) {
		fprintf(stderr, "%s=%s: %s\n", key, value, e.text);
		assert(false);
	}
	assert(e.code == 0);
}

static void refuses(const char *key, const char *value, const char *names)
{
	struct settings s, before;
	struct err e = { 0 };

	memset(&s, 0x5a, sizeof(s));
	s.on_expire_hibernate = false;
	before = s;
	if (settings_set(&s, key, value, &e) != -EINVAL || e.code != EINVAL || !strstr(e.text, names)) {
		fprintf(stderr, "%s=%s: '%s' does not say '%s'\n", key, value, e.text, names);
		assert(false);
	}
	assert(memcmp(&s, &before, sizeof(s)) == 0); /* untouched */
}

int main(void)
{
	struct settings s = { 0 };
	char long_path[2000];

	memset(long_path, 'a', sizeof(long_path));
	long_path[0] = '/';
	long_path[sizeof(long_path) - 1] = 0;

	assert(settings_set(&s, "ttl", "1.5", NULL) == 0 && s.ttl_ms == 1500);
	assert(settings_set(&s, "ttl", "0.0001", NULL) == 0 && s.ttl_ms == 1); /* not none */
	assert(settings_set(&s, "ttl", "0", NULL) == 0 && s.ttl_ms == 0);
	assert(settings_set(&s, "timeout", "31536000", NULL) == 0 && s.timeout_ms == 31536000000ull);
	assert(settings_set(&s, "output_limit", "1", NULL) == 0 && s.output_limit == 1);
	assert(settings_set(&s, "user", "1000", NULL) == 0 && strcmp(s.user, "1000") == 0);
	assert(settings_set(&s, "cwd", "/a b", NULL) == 0 && strcmp(s.cwd, "/a b") == 0);
	assert(settings_set(&s, "user", "", NULL) == -EINVAL); /* e may be NULL */
	takes("on_expire", "kill");
	takes("output_limit", "17179869184");

	refuses("ttl", "", "ttl");
	refuses("ttl", "-1", "-1");
	refuses("ttl", "1e3", "1e3");
	refuses("ttl", "0x10", "0x10");
	refuses("ttl", "inf", "inf");
	refuses("ttl", "1.2.3", "1.2.3");
	refuses("ttl", " 1", " 1");
	refuses("ttl", "31536001", "31536000");
	refuses("timeout", "99999999999999999999999999", "timeout");
	refuses("output_limit", "0", "between 1 and 17179869184");
	refuses("output_limit", "17179869185", "17179869185");
	refuses("output_limit", "99999999999999999999", "output_limit");
	refuses("output_limit", "1.5", "1.5");
	refuses("user", "a:b", "a:b");
	refuses("user", "a b", "a b");
	refuses("user", "../x", "../x");
	refuses("user", "0123456789012345678901234567890123456789012345678901234567890123456789", "63");
	refuses("cwd", "tmp", "absolute");
	refuses("cwd", "", "absolute");
	refuses("cwd", "/a\nb", "absolute");
	refuses("cwd", long_path, "1023");
	refuses("on_expire", "hibernate", "not supported in this version");
	refuses("on_expire", "x", "must be kill");
	refuses("network", "none", "not supported in this version");
	refuses("colour", "red", "'colour'");
	return 0;
}
