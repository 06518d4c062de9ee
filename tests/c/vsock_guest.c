/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A guest's /init for machine tests: loads the modules in /modules in the order of their names, then serves vsock ports until
 * it is told to stop. 1024 echoes; 1025 counts what it gets to the end and answers with the count (8 bytes) and a checksum
 * (8 bytes); 1026 reads a count (8 bytes) and sends that many bytes; 1027 takes one letter: p powers off, r reboots,
 * c crashes; 1028 answers with a counter in its memory that goes up by one each time, and 16 bytes of getrandom.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/vm_sockets.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/random.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <poll.h>
#include <unistd.h>

#define FIRST_PORT 1024
#define PORTS 5

static uint64_t counter;
static char buffer[256 << 10];

static void load_modules(void)
{
	struct dirent **names;
	int n = scandir("/modules", &names, NULL, alphasort);

	for (int i = 0; i < n; i++) {
		char path[300];
		int fd;

		if (names[i]->d_name[0] == '.')
			continue;
		snprintf(path, sizeof(path), "/modules/%s", names[i]->d_name);
		fd = open(path, O_RDONLY);
		if (syscall(SYS_finit_module, fd, "", 0) < 0)
			printf("guest: %s: %s\n", path, strerror(errno));
		close(fd);
	}
}

static int listen_on(unsigned port)
{
	struct sockaddr_vm a = { .svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_ANY, .svm_port = port };
	int fd = socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (fd < 0 || bind(fd, (struct sockaddr *)&a, sizeof(a)) < 0 || listen(fd, 256) < 0)
		printf("guest: port %u: %s\n", port, strerror(errno));
	return fd;
}

static int put(int fd, const void *from, size_t n)
{
	for (const char *p = from; n;) {
		ssize_t done = write(fd, p, n);

		if (done <= 0)
			return -1;
		p += done;
		n -= (size_t)done;
	}
	return 0;
}

static void serve(int fd, unsigned port)
{
	uint64_t count = 0, sum = 0;
	ssize_t n;

	switch (port) {
	case 1024:
		while ((n = read(fd, buffer, sizeof(buffer))) > 0)
			if (put(fd, buffer, (size_t)n) < 0)
				break;
		break;
	case 1025:
		while ((n = read(fd, buffer, sizeof(buffer))) > 0) {
			for (ssize_t i = 0; i < n; i += 997)
				sum += (uint8_t)buffer[i];
			count += (uint64_t)n;
		}
		put(fd, &count, sizeof(count));
		put(fd, &sum, sizeof(sum));
		break;
	case 1026:
		if (read(fd, &count, sizeof(count)) != sizeof(count))
			break;
		for (size_t i = 0; i < sizeof(buffer); i++)
			buffer[i] = (char)(i * 7);
		while (count) {
			size_t part = count < sizeof(buffer) ? (size_t)count : sizeof(buffer);

			if (put(fd, buffer, part) < 0)
				break;
			count -= part;
		}
		break;
	case 1027:
		if (read(fd, buffer, 1) != 1)
			break;
		if (buffer[0] == 'p')
			reboot(RB_POWER_OFF);
		else if (buffer[0] == 'r')
			reboot(RB_AUTOBOOT);
		else if (buffer[0] == 'c') {
			int t = open("/proc/sysrq-trigger", O_WRONLY);

			put(t, "c", 1);
		}
		break;
	}
}

int main(void)
{
	struct pollfd p[PORTS];

	mkdir("/dev", 0755);
	mkdir("/proc", 0755);
	mount("devtmpfs", "/dev", "devtmpfs", 0, NULL);
	mount("proc", "/proc", "proc", 0, NULL);
	setvbuf(stdout, NULL, _IONBF, 0);
	signal(SIGCHLD, SIG_IGN);
	signal(SIGPIPE, SIG_IGN);
	load_modules();
	for (unsigned i = 0; i < PORTS; i++)
		p[i] = (struct pollfd){ .fd = listen_on(FIRST_PORT + i), .events = POLLIN };
	printf("guest: ready\n");
	for (;;) {
		if (poll(p, PORTS, -1) < 0)
			continue;
		for (unsigned i = 0; i < PORTS; i++) {
			int fd = p[i].revents ? accept(p[i].fd, NULL, NULL) : -1;

			if (fd < 0)
				continue;
			if (FIRST_PORT + i == 1028) {
				char random[16];

				counter++;
				if (getrandom(random, sizeof(random), 0) != sizeof(random))
					memset(random, 0, sizeof(random));
				put(fd, &counter, sizeof(counter));
				put(fd, random, sizeof(random));
			} else if (fork() == 0) {
				serve(fd, FIRST_PORT + i);
				_exit(0);
			}
			close(fd);
		}
	}
}
