/* SPDX-License-Identifier: Apache-2.0 */
#include <linux/random.h>
#include <malloc.h>
#include <sys/ioctl.h>

#include <jansson.h>

#include <vmenv/util.h>

#include "setup.h"
#include "users.h"

#define ENTROPY_MIN 32
#define ENTROPY_MAX 512

/* As struct rand_pool_info, with its bytes. */
struct entropy {
	int bits, size;
	uint8_t bytes[ENTROPY_MAX];
};

static int hex_digit(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	if (c >= 'a' && c <= 'f')
		return c - 'a' + 10;
	if (c >= 'A' && c <= 'F')
		return c - 'A' + 10;
	return -1;
}

/* Credited and then taken up: merely writing to /dev/urandom would leave clones with the same generator for a while. */
static int add_entropy(const char *hex, struct err *e)
{
	AUTO_CLOSE int fd = -1;
	size_t n = strlen(hex);
	struct entropy pool = { 0 };

	if (n % 2 || n < 2 * ENTROPY_MIN || n > 2 * ENTROPY_MAX)
		return err_set(e, EINVAL, "entropy is not %d to %d bytes of hex", ENTROPY_MIN, ENTROPY_MAX);
	n /= 2;
	for (size_t i = 0; i < n; i++) {
		int high = hex_digit(hex[2 * i]), low = hex_digit(hex[2 * i + 1]);

		if (high < 0 || low < 0)
			return err_set(e, EINVAL, "entropy is not hex");
		pool.bytes[i] = (uint8_t)(high << 4 | low);
	}
	pool.bits = (int)n * 8;
	pool.size = (int)n;
	fd = open("/dev/urandom", O_RDWR | O_CLOEXEC);
	if (fd < 0 || ioctl(fd, RNDADDENTROPY, &pool) < 0 || ioctl(fd, RNDRESEEDCRNG) < 0)
		return err_set(e, errno, "adding entropy: %s", strerror(errno));
	explicit_bzero(&pool, sizeof(pool));
	return 0;
}

static int set_clock(int64_t ns, struct err *e)
{
	struct timespec ts = { .tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000 };

	return clock_settime(CLOCK_REALTIME, &ts) < 0 ? err_set(e, errno, "setting the clock: %s", strerror(errno)) : 0;
}

static int set_machine_id(int disk, const char *id, struct err *e)
{
	AUTO_CLOSE int fd = -1;
	char line[34];

	if (strlen(id) != 32 || strspn(id, "0123456789abcdef") != 32)
		return err_set(e, EINVAL, "machine_id is not 32 hexadecimal digits");
	fd = open_inside(disk, "etc/machine-id", O_WRONLY | O_CREAT | O_TRUNC, 0444);
	snprintf(line, sizeof(line), "%s\n", id);
	if (fd < 0 || write(fd, line, 33) != 33)
		return err_set(e, fd < 0 ? -fd : errno, "/etc/machine-id: %s", strerror(fd < 0 ? -fd : errno));
	return 0;
}

static int apply(struct agent *a, json_t *o, struct err *e)
{
	const char *key, *s;
	json_t *v;
	int r = 0;

	json_object_foreach(o, key, v) {
		s = json_string_value(v);
		if (strcmp(key, "entropy") == 0)
			r = s ? add_entropy(s, e) : err_set(e, EINVAL, "entropy is not a string");
		else if (strcmp(key, "unix_ns") != 0 && strcmp(key, "hostname") != 0 && strcmp(key, "machine_id") != 0)
			r = err_set(e, EINVAL, "unknown key '%.100s'", key);
		else if (json_is_null(v))
			continue;
		else if (strcmp(key, "unix_ns") == 0)
			r = !json_is_integer(v) || json_integer_value(v) < 0 ? err_set(e, EINVAL, "unix_ns is not a time") :
			    a->guest ? set_clock(json_integer_value(v), e) : 0;
		else if (!s)
			r = err_set(e, EINVAL, "%s is not a string", key);
		else if (!a->guest)
			continue;
		else if (strcmp(key, "machine_id") == 0)
			r = set_machine_id(a->disk, s, e);
		else if (sethostname(s, strlen(s)) < 0)
			r = err_set(e, errno, "hostname '%.64s': %s", s, strerror(errno));
		if (r < 0)
			return r;
	}
	return json_object_get(o, "entropy") ? 0 : err_set(e, EINVAL, "entropy is missing");
}

static json_t *object(const char *text, size_t length, struct err *e)
{
	json_error_t je;
	json_t *o = json_loadb(text, length, JSON_REJECT_DUPLICATES, &je);

	if (o && json_is_object(o))
		return o;
	err_set(e, EINVAL, "%s", o ? "not a JSON object" : je.text);
	json_decref(o);
	return NULL;
}

int setup(struct agent *a, const char *text, size_t length, struct err *e)
{
	json_t *o = object(text, length, e);
	int r = o ? apply(a, o, e) : -EINVAL;

	json_decref(o);
	return r;
}

static int drop_caches(struct err *e)
{
	AUTO_CLOSE int fd = open("/proc/sys/vm/drop_caches", O_WRONLY | O_CLOEXEC);

	if (fd < 0 || write(fd, "3", 1) < 0)
		return err_set(e, errno, "/proc/sys/vm/drop_caches: %s", strerror(errno));
	return 0;
}

int setup_sync(struct agent *a, const char *text, size_t length, struct err *e)
{
	json_t *o = object(text, length, e), *v;
	const char *key;
	bool drop = false;
	int r = o ? 0 : -EINVAL;

	if (o)
		json_object_foreach(o, key, v) {
			if (strcmp(key, "drop_caches") != 0 || !json_is_boolean(v))
				r = err_set(e, EINVAL, "'%.100s' is not drop_caches, true or false", key);
			drop = json_is_true(v);
		}
	json_decref(o);
	if (r < 0)
		return r;
	if (syncfs(a->disk) < 0)
		return err_set(e, errno, "syncfs: %s", strerror(errno));
	if (!a->guest)
		return 0;
	cgroups_prepare(&a->cgroups, CGROUPS_SPARE);
	malloc_trim(0);
	return drop ? drop_caches(e) : 0;
}
