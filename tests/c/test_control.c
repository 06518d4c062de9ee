/* SPDX-License-Identifier: Apache-2.0 */
/*
 * control.c against clients that keep to vmenv/machine.h and clients that do not, and the digests and page accounts, with a
 * machine that is only what machine.h says of one.
 */
#undef NDEBUG
#include <openssl/sha.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "../../vmm/digest.h"
#include "../../vmm/machine.h"
#include "../../vmm/pages.h"

#define CHECK(what)                                                                                  \
	do {                                                                                         \
		if (!(what)) {                                                                       \
			fprintf(stderr, "%s:%d: %s: not so: %s\n", __FILE__, __LINE__, __func__, #what); \
			abort();                                                                     \
		}                                                                                    \
	} while (0)

/* ---- the machine ---- */

struct machine {
	struct loop *loop;
	enum machine_state state;
	struct memory memory;
	machine_ended *ended;
	void *ended_arg;
	int console;
	struct {
		int fd;
		void (*done)(void *arg, int status);
		void *arg;
	} waiting[8]; /* connects to port 7; others are refused at once */
	unsigned connects;
};

void machine_on_end(struct machine *m, machine_ended *ended, void *arg)
{
	m->ended = ended;
	m->ended_arg = arg;
}
enum machine_state machine_state(const struct machine *m)
{
	return m->state;
}
int machine_resume(struct machine *m, struct err *e)
{
	m->state = MACHINE_RUNNING;
	return 0;
}
int machine_pause(struct machine *m, struct err *e)
{
	if (m->state == MACHINE_PAUSED)
		return err_set(e, EALREADY, "paused already");
	m->state = MACHINE_PAUSED;
	return 0;
}
int machine_fork(struct machine *m, unsigned count, unsigned *child, uint64_t *still_ns, struct err *e)
{
	for (unsigned i = 0; i < count; i++) {
		pid_t pid = fork();

		CHECK(pid >= 0);
		if (pid == 0) {
			loop_forked(m->loop);
			m->connects = 0;
			*child = i;
			return 1;
		}
	}
	*still_ns = 5;
	return 0;
}
int machine_save(struct machine *m, int state, int memory, int disk, struct err *e)
{
	CHECK(write(state, "state", 5) == 5);
	CHECK(memory < 0 || write(memory, "memory", 6) == 6);
	CHECK(disk < 0 || write(disk, "disk", 4) == 4);
	return 0;
}
const struct memory *machine_memory(struct machine *m)
{
	return &m->memory;
}
struct vsock *machine_vsock(struct machine *m)
{
	return (struct vsock *)m;
}
int machine_console_output(struct machine *m, int fd)
{
	if (m->console >= 0)
		close(m->console);
	m->console = fd >= 0 ? dup(fd) : -1;
	return 0;
}
unsigned machine_console_input(struct machine *m, const void *bytes, unsigned n)
{
	return n > 100 ? 100 : memcmp(bytes, "full", 4) == 0 ? 0 : n;
}
void vsock_connect(struct vsock *s, uint32_t port, int fd, unsigned timeout_ms,
		   void (*done)(void *arg, int status), void *arg)
{
	struct machine *m = (struct machine *)s;

	if (port != 7) {
		close(fd);
		done(arg, port == 8 ? -EMFILE : -ECONNREFUSED);
		return;
	}
	CHECK(m->connects < 8 && timeout_ms == 30000);
	m->waiting[m->connects].fd = fd;
	m->waiting[m->connects].done = done;
	m->waiting[m->connects++].arg = arg;
	if (m->connects == 3) /* in another order than asked */
		for (; m->connects; m->connects--)
			m->waiting[m->connects - 1].done(m->waiting[m->connects - 1].arg, 0);
}

/* ---- the machine's process ---- */

static int listen_somewhere(struct sockaddr_un *a)
{
	socklen_t n = sizeof(*a);
	int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);

	*a = (struct sockaddr_un){ .sun_family = AF_UNIX };
	/* Autobind: an abstract name of the kernel's choice. */
	CHECK(fd >= 0 && bind(fd, (struct sockaddr *)a, sizeof(sa_family_t)) == 0 && listen(fd, 5) == 0);
	CHECK(getsockname(fd, (struct sockaddr *)a, &n) == 0);
	return fd;
}

static void on_alarm_end(struct timer *t)
{
	struct machine *m = t->arg;

	m->state = MACHINE_ENDED;
	if (m->ended)
		m->ended(m->ended_arg, MACHINE_EXIT_PANIC, "the guest's kernel panicked");
}

static pid_t serve(struct sockaddr_un *a, unsigned end_after_ms)
{
	int fd = listen_somewhere(a);
	pid_t pid = fork();

	if (pid == 0) {
		struct machine m = { .loop = loop_new(), .state = MACHINE_PAUSED, .console = -1 };
		struct timer t = { .fire = on_alarm_end, .arg = &m };

		alarm(20);
		m.memory.ram_bytes = 8 * PAGE_BYTES;
		m.memory.ram = mmap(NULL, m.memory.ram_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		memset(m.memory.ram + PAGE_BYTES, 1, 1);
		if (end_after_ms)
			loop_timer(m.loop, &t, now_ns(CLOCK_MONOTONIC) + end_after_ms * 1000000ull);
		_exit(control_serve(&m, m.loop, fd));
	}
	close(fd);
	return pid;
}

/* ---- the client ---- */

static struct machine_msg receive(int fd)
{
	struct machine_msg a;

	CHECK(recv(fd, &a, sizeof(a), 0) == sizeof(a));
	return a;
}

static int dial(const struct sockaddr_un *a, unsigned state)
{
	int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
	struct machine_msg h;
	socklen_t n = (socklen_t)(sizeof(sa_family_t) + 6); /* what autobind makes */

	CHECK(connect(fd, (const struct sockaddr *)a, n) == 0);
	h = receive(fd);
	CHECK(h.op == MACHINE_HELLO && h.count == MACHINE_PROTOCOL && h.value[0] > 0 && h.value[1] == state && !h.id);
	return fd;
}

static void ask(int to, struct machine_msg q, size_t bytes, const int *fds, unsigned count)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int) * 253)];
	} control;
	struct iovec io = { &q, bytes };
	struct msghdr m = { .msg_iov = &io, .msg_iovlen = 1 };

	if (count) {
		m.msg_control = &control;
		m.msg_controllen = CMSG_SPACE(sizeof(int) * count);
		control.align = (struct cmsghdr){ CMSG_LEN(sizeof(int) * count), SOL_SOCKET, SCM_RIGHTS };
		memcpy(CMSG_DATA(&control.align), fds, sizeof(int) * count);
	}
	CHECK(sendmsg(to, &m, MSG_NOSIGNAL) == (ssize_t)bytes);
}

static struct machine_msg call(int to, struct machine_msg q, const int *fds, unsigned count)
{
	struct machine_msg a;

	q.id = 4711;
	ask(to, q, sizeof(q), fds, count);
	a = receive(to);
	CHECK(a.op == q.op && a.id == q.id && (a.status == 0 || a.text[0]));
	return a;
}

static bool ended(int fd)
{
	char c;

	return recv(fd, &c, 1, 0) == 0;
}

static void reap(pid_t pid)
{
	int status;

	CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* How many descriptors a process has: what it was sent and did not want must be closed. */
static unsigned open_files(pid_t pid)
{
	char path[64];
	unsigned n = 0;

	for (int i = 0; i < 1024; i++) {
		snprintf(path, sizeof(path), "/proc/%d/fd/%d", pid, i);
		n += faccessat(AT_FDCWD, path, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
	}
	return n;
}

/* An answer goes out before what came with its request is closed: soon. */
static bool files_are(pid_t pid, unsigned n)
{
	for (unsigned i = 0; i < 1000 && open_files(pid) != n; i++)
		usleep(1000);
	return open_files(pid) == n;
}

static void test_requests(void)
{
	struct sockaddr_un at;
	pid_t pid = serve(&at, 0);
	int fd = dial(&at, MACHINE_PAUSED), some[4] = { 0, 1, 2, 0 }, pair[2], pipes[2];
	struct machine_msg a;
	char text[16];
	unsigned files = open_files(pid);

	a = call(fd, (struct machine_msg){ .op = MACHINE_PAUSE }, NULL, 0);
	CHECK(a.status == -EALREADY && strcmp(a.text, "paused already") == 0);
	CHECK(call(fd, (struct machine_msg){ .op = MACHINE_RESUME }, NULL, 0).status == 0);
	CHECK(call(fd, (struct machine_msg){ .op = MACHINE_DIGEST }, NULL, 0).status == -EBUSY);
	CHECK(call(fd, (struct machine_msg){ .op = MACHINE_SAVE }, some, 1).status == -EBUSY);
	CHECK(call(fd, (struct machine_msg){ .op = MACHINE_PAUSE }, NULL, 0).status == 0);
	a = call(fd, (struct machine_msg){ .op = MACHINE_DIGEST }, NULL, 0);
	CHECK(a.status == 0 && strlen(a.text) == 194 && a.text[64] == ' ' && a.text[129] == ' ');
	a = call(fd, (struct machine_msg){ .op = MACHINE_INFO }, NULL, 0);
	CHECK(a.status == 0 && a.value[0] == PAGE_BYTES && a.value[2] == PAGE_BYTES && !a.value[3] && a.value[4] == MACHINE_PAUSED);
	CHECK(pipe(pipes) == 0);
	some[0] = some[1] = some[2] = pipes[1];
	CHECK(call(fd, (struct machine_msg){ .op = MACHINE_SAVE }, some, 3).status == 0);
	CHECK(read(pipes[0], text, sizeof(text)) == 15 && memcmp(text, "statememorydisk", 15) == 0);

	/* Too many and too few descriptors. */
	CHECK(call(fd, (struct machine_msg){ .op = MACHINE_SAVE }, some, 4).status == -EINVAL);
	CHECK(call(fd, (struct machine_msg){ .op = MACHINE_SAVE }, NULL, 0).status == -EINVAL);
	CHECK(call(fd, (struct machine_msg){ .op = MACHINE_INFO }, some, 1).status == -EINVAL);
	CHECK(call(fd, (struct machine_msg){ .op = MACHINE_CONNECT, .count = 7 }, NULL, 0).status == -EINVAL);
	CHECK(call(fd, (struct machine_msg){ .op = MACHINE_CONNECT, .count = 7 }, some, 1).status == -EINVAL); /* a pipe */
	CHECK(call(fd, (struct machine_msg){ .op = MACHINE_FORK, .count = 3 }, some, 2).status == -EINVAL);
	CHECK(call(fd, (struct machine_msg){ .op = MACHINE_FORK, .count = 0 }, NULL, 0).status == -EINVAL);
	CHECK(call(fd, (struct machine_msg){ .op = MACHINE_FORK, .count = UINT32_MAX }, some, 2).status == -EINVAL);
	CHECK(files_are(pid, files));

	a = (struct machine_msg){ .op = MACHINE_CONSOLE, .count = sizeof(a.text) };
	CHECK(call(fd, a, NULL, 0).count == 100);
	a.count = 0;
	CHECK(call(fd, a, NULL, 0).status == -EINVAL);
	a.count = sizeof(a.text) + 1;
	CHECK(call(fd, a, NULL, 0).status == -EINVAL);
	strcpy(a.text, "full");
	a.count = 4;
	CHECK(call(fd, a, NULL, 0).status == -EAGAIN);

	/* Three connects at once, answered in another order; and refusals. */
	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
	CHECK(call(fd, (struct machine_msg){ .op = MACHINE_CONNECT, .count = 9 }, pair, 1).status == -ECONNREFUSED);
	CHECK(call(fd, (struct machine_msg){ .op = MACHINE_CONNECT, .count = 8 }, pair, 1).status == -EMFILE);
	for (unsigned i = 1; i <= 3; i++)
		ask(fd, (struct machine_msg){ .op = MACHINE_CONNECT, .count = 7, .id = i }, sizeof(a), pair, 1);
	for (unsigned i = 3; i; i--)
		CHECK(receive(fd).id == i);
	close(pair[0]);
	close(pair[1]);
	close(pipes[0]);
	close(pipes[1]);
	CHECK(call(fd, (struct machine_msg){ .op = MACHINE_QUIT }, NULL, 0).status == 0 && ended(fd));
	close(fd);
	reap(pid);
}

static void test_bad_clients(void)
{
	struct sockaddr_un at;
	pid_t pid = serve(&at, 0);
	struct machine_msg q = { .op = MACHINE_INFO };
	int fd, other, pair[2], many[253];
	unsigned files;
	socklen_t n = (socklen_t)(sizeof(sa_family_t) + 6);
	char big[600] = { 0 };

	fd = dial(&at, MACHINE_PAUSED);
	files = open_files(pid);
	close(fd);
	for (unsigned op = 0; op < 300; op++) { /* ops that are not requests */
		if (op >= MACHINE_RESUME && op <= MACHINE_QUIT)
			continue;
		fd = dial(&at, MACHINE_PAUSED);
		q.op = op == 299 ? UINT32_MAX : op;
		ask(fd, q, sizeof(q), NULL, 0);
		CHECK(ended(fd));
		close(fd);
	}
	q.op = MACHINE_INFO;
	for (unsigned bytes = 1; bytes < sizeof(q); bytes += 73) { /* short ones, with descriptors */
		fd = dial(&at, MACHINE_PAUSED);
		ask(fd, q, bytes, (int[]){ 0, 1 }, 2);
		CHECK(ended(fd));
		close(fd);
	}
	fd = dial(&at, MACHINE_PAUSED);
	CHECK(send(fd, big, sizeof(big), 0) == sizeof(big) && ended(fd));
	close(fd);
	for (unsigned i = 0; i < 253; i++)
		many[i] = 1;
	fd = dial(&at, MACHINE_PAUSED);
	CHECK(call(fd, (struct machine_msg){ .op = MACHINE_RESUME }, many, 253).status == -EINVAL);
	CHECK(files_are(pid, files));

	/* A second client waits for the first one's end. */
	other = socket(AF_UNIX, SOCK_SEQPACKET, 0);
	CHECK(connect(other, (struct sockaddr *)&at, n) == 0 && recv(other, big, 1, MSG_DONTWAIT) == -1);
	/* A client that goes away in mid-connect: its answer goes to nobody, not to the next one. */
	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
	ask(fd, (struct machine_msg){ .op = MACHINE_CONNECT, .count = 7, .id = 1 }, sizeof(q), pair, 1);
	close(fd);
	CHECK(receive(other).op == MACHINE_HELLO);
	ask(other, (struct machine_msg){ .op = MACHINE_CONNECT, .count = 7, .id = 2 }, sizeof(q), pair, 1);
	ask(other, (struct machine_msg){ .op = MACHINE_CONNECT, .count = 7, .id = 3 }, sizeof(q), pair, 1);
	CHECK(receive(other).id == 3 && receive(other).id == 2);
	CHECK(call(other, (struct machine_msg){ .op = MACHINE_INFO }, NULL, 0).status == 0);

	/* One that asks and does not read: it is not served more than fits, and then gets all its answers. */
	for (unsigned i = 0; i < 2000; i++) {
		struct machine_msg s = { .op = MACHINE_INFO, .id = i };

		if (send(other, &s, sizeof(s), MSG_DONTWAIT) < 0) {
			for (unsigned k = 0; k < i; k++)
				CHECK(receive(other).id == k);
			break;
		}
		CHECK(i < 1999);
	}
	CHECK(call(other, (struct machine_msg){ .op = MACHINE_QUIT }, NULL, 0).status == 0);
	close(other);
	reap(pid);
}

static void test_fork(void)
{
	struct sockaddr_un at, child_at[3];
	pid_t pid = serve(&at, 0);
	int fd = dial(&at, MACHINE_PAUSED), fds[3], child[3], pair[2];
	struct machine_msg a;

	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
	ask(fd, (struct machine_msg){ .op = MACHINE_CONNECT, .count = 7, .id = 1 }, sizeof(a), pair, 1); /* stays the parent's */
	for (unsigned i = 0; i < 3; i++)
		fds[i] = listen_somewhere(&child_at[i]);
	a = call(fd, (struct machine_msg){ .op = MACHINE_FORK, .count = 3 }, fds, 3);
	CHECK(a.status == 0 && a.value[0] == 5 && a.value[1] > 0);
	for (unsigned i = 0; i < 3; i++) {
		close(fds[i]);
		child[i] = dial(&child_at[i], MACHINE_PAUSED);
		CHECK(call(child[i], (struct machine_msg){ .op = MACHINE_RESUME }, NULL, 0).status == 0);
	}
	CHECK(call(fd, (struct machine_msg){ .op = MACHINE_INFO }, NULL, 0).value[4] == MACHINE_PAUSED);
	/* The parent ends; its children hold none of its sockets, so that its peer sees the end. */
	CHECK(call(fd, (struct machine_msg){ .op = MACHINE_QUIT }, NULL, 0).status == 0 && ended(fd));
	reap(pid);
	CHECK(connect(socket(AF_UNIX, SOCK_SEQPACKET, 0), (struct sockaddr *)&at, (socklen_t)(sizeof(sa_family_t) + 6)) < 0);
	for (unsigned i = 0; i < 3; i++) {
		CHECK(call(child[i], (struct machine_msg){ .op = MACHINE_INFO }, NULL, 0).value[4] == MACHINE_RUNNING);
		CHECK(call(child[i], (struct machine_msg){ .op = MACHINE_QUIT }, NULL, 0).status == 0 && ended(child[i]));
		close(child[i]);
	}
	close(fd);
	close(pair[0]);
	close(pair[1]);
}

static void test_end(void)
{
	struct sockaddr_un at;
	pid_t pid = serve(&at, 100);
	int fd = dial(&at, MACHINE_PAUSED), pair[2];
	struct machine_msg a;

	CHECK(call(fd, (struct machine_msg){ .op = MACHINE_RESUME }, NULL, 0).status == 0);
	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
	ask(fd, (struct machine_msg){ .op = MACHINE_CONNECT, .count = 7, .id = 12 }, sizeof(a), pair, 1);
	a = receive(fd); /* what was asked of the guest fails, then its end is told */
	CHECK(a.op == MACHINE_CONNECT && a.id == 12 && a.status == -EIO);
	a = receive(fd);
	CHECK(a.op == MACHINE_EXITED && a.id == 0 && a.count == MACHINE_EXIT_PANIC && strcmp(a.text, "the guest's kernel panicked") == 0);
	CHECK(call(fd, (struct machine_msg){ .op = MACHINE_RESUME }, NULL, 0).status == -EIO);
	close(fd);
	fd = dial(&at, MACHINE_ENDED);
	CHECK(receive(fd).count == MACHINE_EXIT_PANIC);
	CHECK(call(fd, (struct machine_msg){ .op = MACHINE_INFO }, NULL, 0).value[4] == MACHINE_ENDED);
	CHECK(call(fd, (struct machine_msg){ .op = MACHINE_QUIT }, NULL, 0).status == 0 && ended(fd));
	close(fd);
	close(pair[0]);
	close(pair[1]);
	reap(pid);
}

/* ---- digests ---- */

static void plain_digest(const uint8_t *at, uint64_t bytes, uint8_t out[DIGEST_BYTES])
{
	static const uint8_t zero[PAGE_BYTES];
	AUTO_FREE uint8_t *all = malloc(bytes / PAGE_BYTES * (PAGE_BYTES + 8));
	size_t n = 0;

	for (uint64_t i = 0; i < bytes / PAGE_BYTES; i++) {
		if (memcmp(at + i * PAGE_BYTES, zero, PAGE_BYTES) == 0)
			continue;
		memcpy(all + n, &i, 8);
		memcpy(all + n + 8, at + i * PAGE_BYTES, PAGE_BYTES);
		n += PAGE_BYTES + 8;
	}
	SHA256(all, n, out);
}

static void test_digest(void)
{
	char path[] = "/tmp/vmenv-test-XXXXXX";
	int fd = mkstemp(path);
	uint64_t bytes = 5000 * PAGE_BYTES, whole = bytes + 300 * PAGE_BYTES;
	uint8_t *at, page[PAGE_BYTES], got[DIGEST_BYTES], want[DIGEST_BYTES], empty[DIGEST_BYTES];
	struct page_use use;
	struct pages *p = malloc(sizeof(*p));
	struct err e = { 0 };

	CHECK(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
	/* A file with holes, and anonymous memory behind it, as a padded disk is. */
	for (unsigned i = 0; i < 5000; i += 1 + i % 700) {
		memset(page, (int)i, sizeof(page));
		CHECK(pwrite(fd, page, sizeof(page), (off_t)(i * (uint64_t)PAGE_BYTES)) == sizeof(page));
	}
	at = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	CHECK(mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd, 0) == at);
	for (unsigned round = 0; round < 2; round++) {
		CHECK(digest_pages(at, whole, got, &e) == 0);
		CHECK(pages_open(p, &e) == 0 && pages_use(p, at, whole, &use) == 0);
		pages_close(p);
		if (round == 0)
			CHECK(use.resident_bytes == 0 && use.private_bytes == 0); /* looking changed nothing */
		else
			/* Five changed, and the zero page where anonymous memory has been read. */
			CHECK(use.private_bytes >= 5 * PAGE_BYTES && use.private_bytes <= 305 * PAGE_BYTES);
		plain_digest(at, whole, want);
		CHECK(memcmp(got, want, sizeof(got)) == 0);
		/* Changed pages: in a hole, over data, to zero, behind the file. */
		at[3 * PAGE_BYTES + 7] = 1;
		at[0] = 99;
		memset(at + PAGE_BYTES, 0, PAGE_BYTES);
		at[whole - 1] = 5;
		at[bytes] = 6;
		madvise(at + 4 * PAGE_BYTES, 4000 * PAGE_BYTES, MADV_RANDOM);
	}
	CHECK(digest_pages(at, whole, got, &e) == 0 && memcmp(got, want, sizeof(got)) == 0);
	/* Another mapping with the same bytes has the same digest; none at all has that of nothing. */
	SHA256(NULL, 0, empty);
	CHECK(digest_pages(NULL, 0, got, &e) == 0 && memcmp(got, empty, sizeof(got)) == 0);
	munmap(at, whole);
	/* The file is no longer there by its name. */
	at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	unlink(path);
	CHECK(digest_pages(at, bytes, got, &e) == 0);
	plain_digest(at, bytes, want);
	CHECK(memcmp(got, want, sizeof(got)) == 0);
	CHECK(digest_file(fd, got, &e) == 0);
	SHA256(at, bytes, want);
	CHECK(memcmp(got, want, sizeof(got)) == 0);
	munmap(at, bytes);
	close(fd);
	free(p);
}

int main(void)
{
	signal(SIGPIPE, SIG_IGN);
	test_requests();
	test_bad_clients();
	test_fork();
	test_end();
	test_digest();
	return 0;
}
