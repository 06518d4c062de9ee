/* SPDX-License-Identifier: Apache-2.0 */
/* vmenv-machine: one machine in one process, under control or by hand with its serial console on stdio. */
#include <getopt.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <termios.h>

#include "machine.h"

#define ESCAPE 0x01 /* ^A */

/* Exit codes of a machine run by hand. 1 is a failure to start, 2 bad usage. */
static const int exit_code[] = {
	[MACHINE_EXIT_POWEROFF] = 0, [MACHINE_EXIT_REBOOT] = 3, [MACHINE_EXIT_PANIC] = 4,
	[MACHINE_EXIT_FAULT] = 5,    [MACHINE_EXIT_DEVICE] = 6, [MACHINE_EXIT_HOST] = 7,
};

static const char usage[] =
	"usage: vmenv-machine --kernel K [--initrd I] [--disk D] [--memory MB] [--vcpus N] [--cmdline S]\n"
	"       vmenv-machine --restore STATE --memory-image F [--disk D]\n"
	"Boots (or restores) a KVM virtual machine. Its serial console is stdin and stdout; ^A x ends it.\n"
	"\n"
	"  --kernel K        Linux kernel (bzImage, vmlinuz)\n"
	"  --initrd I        initramfs\n"
	"  --disk D          disk image; /dev/pmem0 in the guest (virtio-pmem). Changed by what the guest writes\n"
	"  --private-disk    leave the image as it is: what the guest writes is forgotten\n"
	"  --memory MB       memory, a multiple of 2 (default 256)\n"
	"  --vcpus N         1 to 8 (default 1)\n"
	"  --cmdline S       kernel command line, after the default one: " MACHINE_CMDLINE "\n"
	"  --bare-cmdline    without the default one\n"
	"  --memory-image F  file that holds the guest's memory\n"
	"  --restore STATE   restore instead of boot; memory image and disk are left as they are\n"
	"  --control FD      serve the control protocol on this listening socket, and run when told to\n"
	"  --help            this text\n"
	"\n"
	"Exit codes: 0 power-off, 1 could not start, 2 usage, 3 reboot, 4 panic, 5 triple fault or internal error,\n"
	"6 device error, 7 host error, 130 ended by ^A x.\n";

struct options {
	struct machine_options machine;
	const char *cmdline;
	bool bare_cmdline;
	int control;
};

static int number(const char *text, uint64_t max, uint64_t *to)
{
	char *end;
	unsigned long long v;

	errno = 0;
	v = strtoull(text, &end, 10);
	if (errno || end == text || *end || text[0] == '-' || v > max)
		return -EINVAL;
	*to = v;
	return 0;
}

/* 0, 1 for --help, -EINVAL with a message printed. */
static int parse(int argc, char **argv, struct options *o)
{
	enum { KERNEL = 1, INITRD, DISK, PRIVATE_DISK, MEMORY, VCPUS, CMDLINE, BARE, IMAGE, RESTORE, CONTROL, HELP };
	static const struct option longs[] = {
		{ "kernel", required_argument, NULL, KERNEL },	   { "initrd", required_argument, NULL, INITRD },
		{ "disk", required_argument, NULL, DISK },	   { "private-disk", no_argument, NULL, PRIVATE_DISK },
		{ "memory", required_argument, NULL, MEMORY },	   { "vcpus", required_argument, NULL, VCPUS },
		{ "cmdline", required_argument, NULL, CMDLINE },   { "bare-cmdline", no_argument, NULL, BARE },
		{ "memory-image", required_argument, NULL, IMAGE }, { "restore", required_argument, NULL, RESTORE },
		{ "control", required_argument, NULL, CONTROL },   { "help", no_argument, NULL, HELP },
		{ 0 },
	};
	uint64_t v = 0;
	int c;

	while ((c = getopt_long(argc, argv, "", longs, NULL)) != -1) {
		int r = 0;

		switch (c) {
		case KERNEL: o->machine.kernel = optarg; break;
		case INITRD: o->machine.initrd = optarg; break;
		case DISK: o->machine.disk = optarg; break;
		case PRIVATE_DISK: o->machine.private_disk = true; break;
		case MEMORY:
			r = number(optarg, 1u << 20, &v);
			o->machine.memory_bytes = v << 20;
			break;
		case VCPUS:
			r = number(optarg, 1024, &v);
			o->machine.vcpus = (unsigned)v;
			break;
		case CMDLINE: o->cmdline = optarg; break;
		case BARE: o->bare_cmdline = true; break;
		case IMAGE: o->machine.memory_image = optarg; break;
		case RESTORE: o->machine.restore = optarg; break;
		case CONTROL:
			r = number(optarg, 1u << 20, &v);
			o->control = (int)v;
			break;
		case HELP: return 1;
		default: return -EINVAL;
		}
		if (r < 0) {
			fprintf(stderr, "vmenv-machine: '%s' is not a number that this option takes\n", optarg);
			return r;
		}
	}
	if (optind < argc) {
		fprintf(stderr, "vmenv-machine: unexpected argument '%s'\n", argv[optind]);
		return -EINVAL;
	}
	if (!o->machine.kernel == !o->machine.restore) {
		fprintf(stderr, "vmenv-machine: either --kernel or --restore is needed\n");
		return -EINVAL;
	}
	return 0;
}

/* A machine run by hand. */

struct hand {
	struct loop *loop;
	struct machine *m;
	struct watch input;
	bool watched, tty, escaped;
	struct termios before;
	struct watch signals;
	int code;
};

static void on_end(void *arg, enum machine_exit why, const char *sentence)
{
	struct hand *h = arg;

	if (why != MACHINE_EXIT_POWEROFF)
		fprintf(stderr, "%svmenv-machine: %s\n", h->tty ? "\r\n" : "", sentence);
	h->code = exit_code[why];
	loop_stop(h->loop);
}

static void stop_input(struct hand *h)
{
	if (h->watched)
		loop_remove(h->loop, &h->input);
	h->watched = false;
}

/* ^A x ends the machine, ^A ^A is one ^A. Returns how many bytes are left for the guest. */
static size_t filter(struct hand *h, uint8_t *b, size_t n)
{
	size_t kept = 0;

	for (size_t i = 0; i < n; i++) {
		if (h->tty && h->escaped) {
			h->escaped = false;
			if (b[i] == 'x') {
				h->code = 130;
				loop_stop(h->loop);
			} else if (b[i] == ESCAPE) {
				b[kept++] = b[i];
			}
		} else if (h->tty && b[i] == ESCAPE) {
			h->escaped = true;
		} else {
			b[kept++] = b[i];
		}
	}
	return kept;
}

/* Reads no more than the guest has room for; goes on in on_room. */
static void on_input(struct watch *w, uint32_t events)
{
	struct hand *h = w->arg;
	size_t room = machine_console_input_room(h->m);
	uint8_t bytes[256];
	ssize_t n;

	if (!room) {
		stop_input(h);
		return;
	}
	n = read(w->fd, bytes, MIN(room, sizeof(bytes)));
	if (n < 0 && (errno == EINTR || errno == EAGAIN))
		return;
	if (n <= 0) {
		stop_input(h);
		machine_console_room(h->m, NULL, NULL);
		return;
	}
	n = (ssize_t)filter(h, bytes, (size_t)n);
	machine_console_input(h->m, bytes, (unsigned)n);
}

static void on_room(void *arg)
{
	struct hand *h = arg;

	if (!h->watched)
		h->watched = loop_add(h->loop, &h->input, EPOLLIN) == 0;
	/* A regular file cannot be watched; it can always be read. */
	if (!h->watched)
		on_input(&h->input, EPOLLIN);
}

static void raw_tty(struct hand *h)
{
	struct termios raw;

	if (!isatty(0) || tcgetattr(0, &h->before) < 0)
		return;
	raw = h->before;
	cfmakeraw(&raw);
	h->tty = tcsetattr(0, TCSANOW, &raw) == 0;
}

static int run_by_hand(struct machine *m, struct loop *l)
{
	struct hand h = { .loop = l, .m = m, .input = { .fd = 0, .ready = on_input, .arg = &h }, .code = 1 };
	struct err e = { 0 };

	raw_tty(&h);
	machine_on_end(m, on_end, &h);
	machine_console_room(m, on_room, &h);
	machine_console_output(m, 1);
	if (machine_resume(m, &e) < 0) {
		fprintf(stderr, "vmenv-machine: %s\n", e.text);
	} else {
		on_room(&h);
		loop_run(l);
	}
	machine_console_room(m, NULL, NULL);
	stop_input(&h);
	if (h.tty)
		tcsetattr(0, TCSANOW, &h.before);
	return h.code;
}

static int start(struct options *o, struct loop *l)
{
	struct machine *m = NULL;
	struct err e = { 0 };
	int code;

	if (machine_new(&o->machine, l, &m, &e) < 0) {
		fprintf(stderr, "vmenv-machine: %s\n", e.text);
		return 1;
	}
	code = o->control >= 0 ? control_serve(m, l, o->control) : run_by_hand(m, l);
	machine_free(m);
	return code;
}

int main(int argc, char **argv)
{
	struct options o = { .machine = { .memory_bytes = 256u << 20, .vcpus = 1 }, .control = -1 };
	AUTO_FREE char *cmdline = NULL;
	struct loop *l;
	int r = parse(argc, argv, &o);

	if (r > 0) {
		fputs(usage, stdout);
		return 0;
	}
	if (r < 0) {
		fprintf(stderr, "Try vmenv-machine --help.\n");
		return 2;
	}
	if (asprintf(&cmdline, "%s%s%s", o.bare_cmdline ? "" : MACHINE_CMDLINE, o.cmdline && !o.bare_cmdline ? " " : "",
		     o.cmdline ? o.cmdline : "") < 0)
		return 1;
	o.machine.cmdline = cmdline;
	signal(SIGPIPE, SIG_IGN);
	/* Forked machines are the server's to watch, by their sockets; nobody waits for them here. */
	signal(SIGCHLD, SIG_IGN);
	l = loop_new();
	if (!l) {
		fprintf(stderr, "vmenv-machine: cannot make an event loop: %s\n", strerror(errno));
		return 1;
	}
	if (o.control >= 0)
		machine_oom_score(MACHINE_OOM_FIRST);
	r = start(&o, l);
	loop_free(l);
	return r;
}
