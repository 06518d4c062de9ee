/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Drives vmenv-machine over its control socket, on a host with KVM:
 *   machine-drive MACHINE KERNEL INITRD DIR [quick | speed]
 * INITRD has vsock-guest as /init and the kernel's modules virtio_ring, virtio, virtio_mmio, vsock, and the virtio vsock
 * transport's two as /modules/1-..., /modules/2-... DIR is for sockets and images. quick: small amounts; speed: only the
 * measures of streams. Prints what it measured; exits with 0 if everything was as vmenv/machine.h says.
 */
#include <assert.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <vmenv/machine.h>
#include <vmenv/util.h>

#define CHECK(what)                                                                                  \
	do {                                                                                         \
		if (!(what)) {                                                                       \
			fprintf(stderr, "%s:%d: not so: %s (%s)\n", __FILE__, __LINE__, #what, strerror(errno)); \
			exit(1);                                                                     \
		}                                                                                    \
	} while (0)

#define MEMORY_MB "128"

static const char *dir;

/* One machine: where it listens, and our connection to it. */
struct peer {
	int fd;
	uint32_t id;
	struct machine_msg exited;
};

static double ms_since(uint64_t t)
{
	return (double)(now_ns(CLOCK_MONOTONIC) - t) / 1e6;
}

static int listen_at(const char *name)
{
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);

	snprintf(a.sun_path, sizeof(a.sun_path), "%s/%s", dir, name);
	unlink(a.sun_path);
	CHECK(bind(fd, (struct sockaddr *)&a, sizeof(a)) == 0 && listen(fd, 8) == 0);
	return fd;
}

static void receive(struct peer *p, struct machine_msg *a)
{
	for (;;) {
		struct pollfd f = { .fd = p->fd, .events = POLLIN };

		CHECK(poll(&f, 1, 60000) == 1);
		CHECK(recv(p->fd, a, sizeof(*a), 0) == sizeof(*a));
		if (a->op != MACHINE_EXITED)
			return;
		p->exited = *a;
	}
}

static struct machine_msg dial(struct peer *p, const char *name)
{
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	struct machine_msg hello;

	*p = (struct peer){ .fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0) };
	snprintf(a.sun_path, sizeof(a.sun_path), "%s/%s", dir, name);
	CHECK(connect(p->fd, (struct sockaddr *)&a, sizeof(a)) == 0);
	receive(p, &hello);
	CHECK(hello.op == MACHINE_HELLO && hello.count == MACHINE_PROTOCOL && hello.id == 0);
	return hello;
}

static uint32_t ask(struct peer *p, struct machine_msg q, const int *fds, unsigned count)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int) * MACHINE_FORK_MAX)];
	} control;
	struct iovec io = { &q, sizeof(q) };
	struct msghdr m = { .msg_iov = &io, .msg_iovlen = 1 };

	q.id = ++p->id;
	if (count) {
		struct cmsghdr *h = &control.align;

		m.msg_control = &control;
		m.msg_controllen = CMSG_SPACE(sizeof(int) * count);
		*h = (struct cmsghdr){ CMSG_LEN(sizeof(int) * count), SOL_SOCKET, SCM_RIGHTS };
		memcpy(CMSG_DATA(h), fds, sizeof(int) * count);
	}
	CHECK(sendmsg(p->fd, &m, MSG_NOSIGNAL) == sizeof(q));
	return q.id;
}

static struct machine_msg call(struct peer *p, struct machine_msg q, const int *fds, unsigned count)
{
	struct machine_msg a;
	uint32_t id = ask(p, q, fds, count);

	receive(p, &a);
	CHECK(a.id == id && a.op == q.op);
	return a;
}

static void ok(struct peer *p, uint32_t op)
{
	struct machine_msg a = call(p, (struct machine_msg){ .op = op }, NULL, 0);

	if (a.status)
		fprintf(stderr, "op %u: %s\n", op, a.text);
	CHECK(a.status == 0);
}

static int open_port(struct peer *p, uint32_t port, int status)
{
	struct machine_msg a;
	int pair[2];

	CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
	a = call(p, (struct machine_msg){ .op = MACHINE_CONNECT, .count = port }, &pair[0], 1);
	close(pair[0]);
	if (a.status != status)
		fprintf(stderr, "connect to %u: %d %s\n", port, a.status, a.text);
	CHECK(a.status == status);
	if (status == 0)
		return pair[1];
	close(pair[1]);
	return -1;
}

static void get(int fd, void *to, size_t n)
{
	for (char *p = to; n;) {
		ssize_t got = read(fd, p, n);

		CHECK(got > 0);
		p += got;
		n -= (size_t)got;
	}
}

/* The guest's counter, and 16 random bytes. */
static uint64_t count(struct peer *p, uint8_t *random)
{
	int fd = open_port(p, 1028, 0);
	uint64_t n;
	uint8_t bytes[16];
	char end;

	get(fd, &n, sizeof(n));
	get(fd, bytes, sizeof(bytes));
	CHECK(read(fd, &end, 1) == 0);
	close(fd);
	if (random)
		memcpy(random, bytes, sizeof(bytes));
	return n;
}

static pid_t start(char **argv, int listening)
{
	pid_t pid = fork();

	if (pid == 0) {
		CHECK(dup2(listening, 9) == 9);
		execv(argv[0], argv);
		_exit(127);
	}
	close(listening);
	return pid;
}

static void ready(struct peer *p)
{
	for (int i = 0;; i++) {
		struct machine_msg a;
		int pair[2];

		CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
		a = call(p, (struct machine_msg){ .op = MACHINE_CONNECT, .count = 1028 }, &pair[0], 1);
		close(pair[0]);
		close(pair[1]);
		if (a.status == 0)
			return;
		CHECK((a.status == -ECONNREFUSED || a.status == -ETIMEDOUT) && i < 3000);
		usleep(10000);
	}
}

/* ---- measures ---- */

#define BATCHES 8 /* the best of them is what it takes; the rest is what else the host was doing */

static void round_trips(struct peer *p, unsigned rounds)
{
	int fd = open_port(p, 1024, 0);
	double best = 1e9, best_connect = 1e9;
	char bytes[64] = "ping";

	for (unsigned b = 0; b < BATCHES; b++) {
		uint64_t t = now_ns(CLOCK_MONOTONIC);

		for (unsigned i = 0; i < rounds; i++) {
			CHECK(write(fd, bytes, sizeof(bytes)) == sizeof(bytes));
			get(fd, bytes, sizeof(bytes));
		}
		best = MIN(best, ms_since(t) / rounds);
	}
	close(fd);
	for (unsigned b = 0; b < BATCHES; b++) {
		uint64_t t = now_ns(CLOCK_MONOTONIC);

		for (unsigned i = 0; i < rounds / 4; i++)
			count(p, NULL);
		best_connect = MIN(best_connect, ms_since(t) / (rounds / 4));
	}
	printf("round trip: %.3f ms; connect, answer, end: %.3f ms\n", best, best_connect);
}

static double bulk_in(struct peer *p, size_t megabytes)
{
	static uint8_t bytes[1 << 20];
	int fd = open_port(p, 1025, 0);
	uint64_t t = now_ns(CLOCK_MONOTONIC), answer[2];
	double ms;

	for (size_t i = 0; i < megabytes; i++)
		for (size_t at = 0; at < sizeof(bytes);) {
			ssize_t n = write(fd, bytes + at, MIN(sizeof(bytes) - at, 65536u));

			CHECK(n > 0);
			at += (size_t)n;
		}
	shutdown(fd, SHUT_WR);
	get(fd, answer, sizeof(answer));
	ms = ms_since(t);
	CHECK(answer[0] == megabytes << 20);
	close(fd);
	return (double)megabytes * 1000 / ms;
}

static double bulk_out(struct peer *p, size_t megabytes)
{
	static uint8_t bytes[256 << 10];
	int fd = open_port(p, 1026, 0);
	uint64_t t = now_ns(CLOCK_MONOTONIC), n = megabytes << 20, got = 0;
	ssize_t r;

	CHECK(write(fd, &n, sizeof(n)) == sizeof(n));
	while ((r = read(fd, bytes, sizeof(bytes))) > 0) {
		for (ssize_t i = 0; i < r; i += 4093)
			CHECK(bytes[i] == (uint8_t)(((got + (uint64_t)i) % (256 << 10)) * 7));
		got += (uint64_t)r;
	}
	CHECK(got == n);
	close(fd);
	return (double)megabytes * 1000 / ms_since(t);
}

static void bulk(struct peer *p, size_t megabytes)
{
	double in = 0, out = 0;

	for (unsigned b = 0; b < BATCHES; b++) {
		double mbps = bulk_in(p, megabytes);

		in = MAX(in, mbps);
		mbps = bulk_out(p, megabytes);
		out = MAX(out, mbps);
	}
	printf("to the guest: %.0f MB/s; from the guest: %.0f MB/s\n", in, out);
}

static void many_streams(struct peer *p, unsigned streams, size_t bytes_each)
{
	AUTO_FREE int *fd = calloc(streams, sizeof(*fd));
	AUTO_FREE size_t *sent = calloc(streams, sizeof(*sent)), *got = calloc(streams, sizeof(*got));
	AUTO_FREE struct pollfd *f = calloc(streams, sizeof(*f));
	uint64_t t = now_ns(CLOCK_MONOTONIC);
	unsigned answered = 0, left = streams;
	static uint8_t bytes[4096], back[65536];

	/* All asked at once, answered in whatever order. */
	for (unsigned i = 0; i < streams; i++) {
		int pair[2];

		CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
		ask(p, (struct machine_msg){ .op = MACHINE_CONNECT, .count = 1024 }, &pair[0], 1);
		close(pair[0]);
		fd[i] = pair[1];
		fcntl(fd[i], F_SETFL, O_NONBLOCK);
	}
	while (answered < streams) {
		struct machine_msg a;

		receive(p, &a);
		CHECK(a.op == MACHINE_CONNECT && a.status == 0);
		answered++;
	}
	printf("%u streams open: %.0f ms\n", streams, ms_since(t));
	t = now_ns(CLOCK_MONOTONIC);
	while (left) {
		for (unsigned i = 0; i < streams; i++)
			f[i] = (struct pollfd){ .fd = got[i] < bytes_each ? fd[i] : -1,
						.events = (short)(POLLIN | (sent[i] < bytes_each ? POLLOUT : 0)) };
		CHECK(poll(f, streams, 30000) > 0);
		for (unsigned i = 0; i < streams; i++) {
			ssize_t n;

			if (f[i].revents & POLLOUT) {
				for (size_t k = 0; k < sizeof(bytes); k++)
					bytes[k] = (uint8_t)((sent[i] + k) * (i + 3));
				n = write(fd[i], bytes, MIN(sizeof(bytes), bytes_each - sent[i]));
				sent[i] += n > 0 ? (size_t)n : 0;
			}
			if (!(f[i].revents & POLLIN) || (n = read(fd[i], back, sizeof(back))) < 0)
				continue;
			CHECK(n > 0);
			for (ssize_t k = 0; k < n; k++)
				CHECK(back[k] == (uint8_t)((got[i] + (size_t)k) * (i + 3)));
			got[i] += (size_t)n;
			left -= got[i] == bytes_each;
		}
	}
	printf("%u echoes of %zu KB at once: %.0f ms, %.0f MB/s each way\n", streams, bytes_each >> 10, ms_since(t),
	       (double)streams * (double)bytes_each / 1000 / ms_since(t));
	for (unsigned i = 0; i < streams; i++)
		close(fd[i]);
}

/* ---- the protocol ---- */

static void refusals(struct peer *p, const char *name)
{
	int pair[2], many[3] = { 0, 1, 2 };
	struct machine_msg a;
	char c;

	open_port(p, 9999, -ECONNREFUSED);
	a = call(p, (struct machine_msg){ .op = MACHINE_CONNECT, .count = 1024 }, NULL, 0);
	CHECK(a.status == -EINVAL && a.text[0]);
	a = call(p, (struct machine_msg){ .op = MACHINE_CONNECT, .count = 1024 }, &p->fd, 1);
	CHECK(a.status == -EINVAL);
	a = call(p, (struct machine_msg){ .op = MACHINE_PAUSE }, many, 3);
	CHECK(a.status == -EINVAL);
	a = call(p, (struct machine_msg){ .op = MACHINE_FORK, .count = 2 }, many, 3);
	CHECK(a.status == -EINVAL);
	a = call(p, (struct machine_msg){ .op = MACHINE_FORK }, NULL, 0);
	CHECK(a.status == -EINVAL);
	a = call(p, (struct machine_msg){ .op = MACHINE_CONSOLE, .count = 100000 }, NULL, 0);
	CHECK(a.status == -EINVAL);
	a = call(p, (struct machine_msg){ .op = MACHINE_DIGEST }, NULL, 0);
	CHECK(a.status == -EBUSY);
	a = call(p, (struct machine_msg){ .op = MACHINE_SAVE }, many, 1);
	CHECK(a.status == -EBUSY);

	/* A connection while there is one waits; a message that is none ends the connection, and the machine goes on. */
	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
	CHECK(send(p->fd, "short", 5, 0) == 5 && read(p->fd, &c, 1) == 0);
	close(p->fd);
	close(pair[0]);
	close(pair[1]);
	CHECK(dial(p, name).value[1] == MACHINE_RUNNING);
	ask(p, (struct machine_msg){ .op = 77 }, NULL, 0);
	CHECK(read(p->fd, &c, 1) == 0);
	close(p->fd);
	dial(p, name);
	ok(p, MACHINE_INFO);
}

static void digest(struct peer *p, char text[448])
{
	uint64_t t = now_ns(CLOCK_MONOTONIC);
	struct machine_msg a = call(p, (struct machine_msg){ .op = MACHINE_DIGEST }, NULL, 0);

	CHECK(a.status == 0 && strlen(a.text) == 3 * 64 + 2);
	memcpy(text, a.text, sizeof(a.text));
	printf("digest: %.0f ms %.16s... %.16s... %.16s...\n", ms_since(t), a.text, a.text + 65, a.text + 130);
}

static void info(struct peer *p, const char *who)
{
	uint64_t t = now_ns(CLOCK_MONOTONIC);
	struct machine_msg a = call(p, (struct machine_msg){ .op = MACHINE_INFO }, NULL, 0);

	CHECK(a.status == 0);
	printf("%s: %lu KB private (%lu memory, %lu disk), %lu KB resident; %.1f ms to say so\n", who, a.value[0] >> 10,
	       a.value[2] >> 10, a.value[3] >> 10, a.value[1] >> 10, ms_since(t));
}

static void quit(struct peer *p, pid_t pid)
{
	char c;
	int status;

	ok(p, MACHINE_QUIT);
	CHECK(read(p->fd, &c, 1) == 0);
	close(p->fd);
	if (pid)
		CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void pauses(struct peer *p)
{
	char before[448], after[448];
	uint64_t t;
	int fd = open_port(p, 1024, 0);
	char c = 'x';

	count(p, NULL);
	t = now_ns(CLOCK_MONOTONIC);
	ok(p, MACHINE_PAUSE);
	printf("pause: %.2f ms\n", ms_since(t));
	digest(p, before);
	CHECK(write(fd, &c, 1) == 1); /* nothing of this gets in while it is paused */
	usleep(50000);
	ok(p, MACHINE_PAUSE);
	digest(p, after);
	CHECK(strcmp(before, after) == 0);
	ok(p, MACHINE_RESUME);
	c = 0;
	get(fd, &c, 1);
	CHECK(c == 'x');
	for (int i = 0; i < 10; i++) {
		ok(p, MACHINE_PAUSE);
		ok(p, MACHINE_RESUME);
	}
	count(p, NULL);
	close(fd);
}

/* A template made of a machine that booted into files; its zygote; children of it; children of a child. */
static void template(char **argv, const char *memory, const char *state, bool quick)
{
	char *restore[] = { argv[1], "--control", "9", "--restore", (char *)(uintptr_t)state, "--memory-image",
			    (char *)(uintptr_t)memory, NULL };
	struct peer z, c[4], g;
	char one[448], two[448];
	uint8_t random[4][16];
	struct machine_msg a;
	uint64_t t, n = 0;
	double best = 1e9, sum = 0;
	int fds[4], fd;
	pid_t pid;
	char name[32], x;
	unsigned rounds = quick ? 5 : 30;

	t = now_ns(CLOCK_MONOTONIC);
	pid = start(restore, listen_at("zygote"));
	CHECK(dial(&z, "zygote").value[1] == MACHINE_PAUSED);
	printf("zygote up: %.1f ms\n", ms_since(t));
	for (int i = 0; i < 4; i++) {
		snprintf(name, sizeof(name), "child%d", i);
		fds[i] = listen_at(name);
	}
	t = now_ns(CLOCK_MONOTONIC);
	a = call(&z, (struct machine_msg){ .op = MACHINE_FORK, .count = 4 }, fds, 4);
	printf("fork of 4: %.2f ms\n", ms_since(t));
	CHECK(a.status == 0);
	for (int i = 0; i < 4; i++) {
		close(fds[i]);
		snprintf(name, sizeof(name), "child%d", i);
		CHECK(dial(&c[i], name).value[1] == MACHINE_PAUSED);
	}
	digest(&c[0], one);
	digest(&c[1], two);
	CHECK(strcmp(one, two) == 0);
	for (int i = 0; i < 4; i++) {
		uint64_t k;

		ok(&c[i], MACHINE_RESUME);
		k = count(&c[i], random[i]);
		CHECK(i == 0 || k == n);
		n = k;
	}
	CHECK(count(&c[0], NULL) == n + 1 && count(&c[0], NULL) == n + 2 && count(&c[1], NULL) == n + 1);
	info(&c[3], "a child after one answer");

	/* A running child forks, with a stream open: the stream stays the parent's. */
	fd = open_port(&c[0], 1024, 0);
	fds[0] = listen_at("grandchild");
	a = call(&c[0], (struct machine_msg){ .op = MACHINE_FORK, .count = 1 }, fds, 1);
	CHECK(a.status == 0);
	printf("fork of a running machine: stood still %.2f ms, %.2f in all\n", (double)a.value[0] / 1e6,
	       (double)a.value[1] / 1e6);
	close(fds[0]);
	CHECK(write(fd, "y", 1) == 1);
	get(fd, &x, 1);
	CHECK(x == 'y');
	dial(&g, "grandchild");
	ok(&g, MACHINE_RESUME);
	CHECK(count(&g, NULL) == n + 3 && count(&g, NULL) == n + 4 && count(&c[0], NULL) == n + 3);
	close(fd);
	quit(&g, 0);
	for (int i = 0; i < 4; i++)
		quit(&c[i], 0);

	for (unsigned i = 0; i < rounds; i++) {
		double ms;

		fds[0] = listen_at("fresh");
		t = now_ns(CLOCK_MONOTONIC);
		a = call(&z, (struct machine_msg){ .op = MACHINE_FORK, .count = 1 }, fds, 1);
		CHECK(a.status == 0);
		close(fds[0]);
		dial(&g, "fresh");
		ok(&g, MACHINE_RESUME);
		count(&g, NULL);
		ms = ms_since(t);
		best = MIN(best, ms);
		sum += ms;
		quit(&g, 0);
	}
	printf("fork of the zygote to the first answer: %.1f ms at best, %.1f on average of %u\n", best, sum / rounds, rounds);
	quit(&z, pid);
}

int main(int argc, char **argv)
{
	char memory[200], state[200];
	bool quick = argc > 5 && strcmp(argv[5], "quick") == 0, speed = argc > 5 && !quick;
	struct peer p;
	struct machine_msg a;
	uint64_t t;
	int fd, console;
	pid_t pid;

	if (argc < 5)
		return 2;
	dir = argv[4];
	snprintf(memory, sizeof(memory), "%s/memory", dir);
	snprintf(state, sizeof(state), "%s/state", dir);
	char *boot[] = { argv[1], "--control", "9", "--kernel", argv[2], "--initrd", argv[3], "--memory", MEMORY_MB,
			 "--vcpus", "1", "--memory-image", memory, NULL };

	setvbuf(stdout, NULL, _IOLBF, 0);
	signal(SIGPIPE, SIG_IGN);
	pid = start(boot, listen_at("first"));
	CHECK(dial(&p, "first").value[1] == MACHINE_PAUSED);
	console = open(argc > 5 ? "/dev/null" : "/dev/console", O_WRONLY | O_APPEND);
	t = now_ns(CLOCK_MONOTONIC);
	a = call(&p, (struct machine_msg){ .op = MACHINE_RESUME }, &console, 1);
	CHECK(a.status == 0);
	ready(&p);
	printf("boot to the first answer: %.0f ms\n", ms_since(t));
	if (!speed)
		refusals(&p, "first");
	round_trips(&p, quick ? 8 : 100);
	bulk(&p, quick ? 1 : 16);
	many_streams(&p, 100, quick ? 10000 : 1 << 20);
	if (speed) {
		quit(&p, pid);
		return 0;
	}
	pauses(&p);
	info(&p, "the first machine");

	ok(&p, MACHINE_PAUSE);
	fd = open(state, O_RDWR | O_CREAT | O_TRUNC, 0600);
	t = now_ns(CLOCK_MONOTONIC);
	a = call(&p, (struct machine_msg){ .op = MACHINE_SAVE }, &fd, 1);
	if (a.status)
		fprintf(stderr, "save: %s\n", a.text);
	CHECK(a.status == 0);
	printf("save: %.1f ms\n", ms_since(t));
	close(fd);
	quit(&p, pid);
	template(argv, memory, state, quick);

	/* Powering off is told, also to one who comes later. */
	pid = start(boot, listen_at("first"));
	dial(&p, "first");
	ok(&p, MACHINE_RESUME);
	ready(&p);
	fd = open_port(&p, 1027, 0);
	CHECK(write(fd, "p", 1) == 1);
	while (!p.exited.op) {
		CHECK(recv(p.fd, &a, sizeof(a), 0) == sizeof(a));
		if (a.op == MACHINE_EXITED)
			p.exited = a;
	}
	CHECK(p.exited.count == MACHINE_EXIT_POWEROFF && p.exited.text[0]);
	close(p.fd);
	CHECK(dial(&p, "first").value[1] == MACHINE_ENDED);
	a = call(&p, (struct machine_msg){ .op = MACHINE_RESUME }, NULL, 0);
	CHECK(a.status == -EIO && p.exited.count == MACHINE_EXIT_POWEROFF);
	ok(&p, MACHINE_INFO);
	quit(&p, pid);
	printf("all well\n");
	return 0;
}
