/* SPDX-License-Identifier: Apache-2.0 */
/* test_import SOURCE IMAGE MEGABYTES [CANCEL_MS]: imports a root file system into an image, for test_import.py to
 * look at. */
#include "../../fs/import.h"

#include <pthread.h>

struct cancel {
	struct import *import;
	unsigned ms;
};

static void *cancel_later(void *arg)
{
	struct cancel *c = arg;

	usleep(c->ms * 1000);
	atomic_store(&c->import->cancel, true);
	return NULL;
}

int main(int argc, char **argv)
{
	struct import i = { 0 };
	struct cancel c = { .import = &i };
	struct err e = { 0 };
	pthread_t thread;
	uint64_t started;
	int r;

	if (argc < 4)
		return 2;
	i.source = open(argv[1], O_RDONLY | O_CLOEXEC);
	i.image = open(argv[2], O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	i.disk_bytes = strtoull(argv[3], NULL, 10) << 20;
	if (i.source < 0 || i.image < 0) {
		perror(argv[1]);
		return 2;
	}
	if (argc > 4) {
		c.ms = (unsigned)atoi(argv[4]);
		if (pthread_create(&thread, NULL, cancel_later, &c))
			return 2;
		pthread_detach(thread);
	}
	started = now_ns(CLOCK_MONOTONIC);
	r = import_rootfs(&i, &e);
	if (r) {
		if (r != -e.code)
			printf("returned %d but said ", r);
		printf("%s: %s\n", strerrorname_np(e.code), e.text);
		return 1;
	}
	printf("kind %s files %llu bytes %llu ms %llu\n", i.kind, (unsigned long long)i.files,
	       (unsigned long long)atomic_load(&i.done_bytes),
	       (unsigned long long)((now_ns(CLOCK_MONOTONIC) - started) / 1000000));
	return 0;
}
