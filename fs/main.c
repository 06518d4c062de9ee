/* SPDX-License-Identifier: Apache-2.0 */
/* vmenvfs: microVM sandboxes as directories. Options, and which of the ways to serve them is taken. */
#include <getopt.h>
#include <limits.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "core.h"
#include "daemon.h"
#include "host.h"
#include "mountpoint.h"
#include "process.h"
#include "session.h"

#ifndef VMENVFS_VERSION
#define VMENVFS_VERSION "unknown"
#endif

#define MOUNT_OPTIONS "fsname=vmenvfs,subtype=vmenvfs,default_permissions"

enum accel { ACCEL_AUTO, ACCEL_KVM, ACCEL_EMULATE };

struct options {
	char *mountpoint, *state; /* absolute; malloc'ed */
	char *kernel, *initrd, *machine;
	const char *via;
	enum accel accel;
	bool stdio, check, allow_other;
	uint64_t emulated_memory_mb;
	struct daemon daemon;
};

static const char usage[] =
	"usage: vmenvfs [OPTION]... MOUNTPOINT             serve at MOUNTPOINT\n"
	"       vmenvfs [OPTION]... --stdio                serve on standard input and output\n"
	"       vmenvfs [OPTION]... --via COMMAND MOUNTPOINT\n"
	"                                                  mount what COMMAND serves, e.g. 'ssh host vmenvfs --stdio'\n"
	"       vmenvfs --check                            what this host has and lacks, and what to do about it\n"
	"\n"
	"  --state DIR          where templates and machines are kept; default /var/lib/vmenv for root,\n"
	"                       else $XDG_STATE_HOME/vmenv or ~/.local/state/vmenv\n"
	"  --accel=auto         KVM, or an emulated KVM host where there is none (slower)\n"
	"  --accel=kvm          KVM, or fail\n"
	"  --accel=emulate      the emulated KVM host in any case\n"
	"  --emulated-memory MB the memory of the emulated host; default half of what is free\n"
	"  --allow-other        let other users in; files stay the mounting user's\n"
	"  -f, --foreground     do not go into the background when the mount answers\n"
	"  --kernel FILE        the guests' kernel, a vmlinuz\n"
	"  --initrd FILE        the guests' initramfs, with the agent\n"
	"  --machine FILE       vmenv-machine\n"
	"  --version, --help\n"
	"\n"
	"It ends when MOUNTPOINT is unmounted (umount, fusermount3 -u), or by SIGINT, SIGTERM or SIGHUP; the machines end with it.\n"
	"The first thing to read then is MOUNTPOINT/README.\n";

static int say(const struct options *o, const struct err *e)
{
	host_say(o->daemon.detached, "%s", e->text);
	return EXIT_FAILURE;
}

static void refuse(const char *why, const char *what)
{
	fprintf(stderr, "vmenvfs: %s%s\nTry 'vmenvfs --help'.\n", why, what);
	exit(2);
}

static char *absolute(const char *path)
{
	AUTO_FREE char *here = *path == '/' ? NULL : getcwd(NULL, 0);
	char *joined;

	return asprintf(&joined, "%s%s%s", here ? here : "", here ? "/" : "", path) < 0 ? NULL : joined;
}

static char *default_state(void)
{
	const char *xdg = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
	char *path;
	int n;

	if (geteuid() == 0)
		return strdup("/var/lib/vmenv");
	if (xdg && *xdg == '/')
		n = asprintf(&path, "%s/vmenv", xdg);
	else
		n = asprintf(&path, "%s/.local/state/vmenv", home && *home == '/' ? home : "/tmp");
	return n < 0 ? NULL : path;
}

static void parse_accel(struct options *o, const char *value)
{
	static const char *const names[] = { "auto", "kvm", "emulate" };

	for (size_t i = 0; i < ARRAY_SIZE(names); i++)
		if (!strcmp(value, names[i])) {
			o->accel = (enum accel)i;
			return;
		}
	refuse("--accel is auto, kvm or emulate, not ", value);
}

static void parse_memory(struct options *o, const char *value)
{
	char *end;

	errno = 0;
	o->emulated_memory_mb = strtoull(value, &end, 10);
	if (errno || *end || end == value || *value == '-' || o->emulated_memory_mb < 512)
		refuse("--emulated-memory is a number of MiB, 512 or more, not ", value);
}

enum { OPT_STATE = 256, OPT_ACCEL, OPT_MEMORY, OPT_STDIO, OPT_VIA, OPT_CHECK, OPT_OTHER, OPT_KERNEL, OPT_INITRD, OPT_MACHINE, OPT_VERSION };

static void parse_option(struct options *o, int option)
{
	switch (option) {
	case OPT_STATE:
		o->state = absolute(optarg);
		break;
	case OPT_ACCEL:
		parse_accel(o, optarg);
		break;
	case OPT_MEMORY:
		parse_memory(o, optarg);
		break;
	case OPT_STDIO:
		o->stdio = true;
		break;
	case OPT_VIA:
		o->via = optarg;
		break;
	case OPT_CHECK:
		o->check = true;
		break;
	case OPT_OTHER:
		o->allow_other = true;
		break;
	case OPT_KERNEL:
		o->kernel = absolute(optarg);
		break;
	case OPT_INITRD:
		o->initrd = absolute(optarg);
		break;
	case OPT_MACHINE:
		o->machine = absolute(optarg);
		break;
	case 'f':
		o->daemon.foreground = true;
		break;
	case OPT_VERSION:
		puts("vmenvfs " VMENVFS_VERSION);
		exit(EXIT_SUCCESS);
	case 'h':
		fputs(usage, stdout);
		exit(EXIT_SUCCESS);
	default:
		fputs("Try 'vmenvfs --help'.\n", stderr);
		exit(2);
	}
}

static void parse(int argc, char **argv, struct options *o)
{
	static const struct option table[] = {
		{ "state", required_argument, NULL, OPT_STATE },
		{ "accel", required_argument, NULL, OPT_ACCEL },
		{ "emulated-memory", required_argument, NULL, OPT_MEMORY },
		{ "stdio", no_argument, NULL, OPT_STDIO },
		{ "via", required_argument, NULL, OPT_VIA },
		{ "check", no_argument, NULL, OPT_CHECK },
		{ "allow-other", no_argument, NULL, OPT_OTHER },
		{ "kernel", required_argument, NULL, OPT_KERNEL },
		{ "initrd", required_argument, NULL, OPT_INITRD },
		{ "machine", required_argument, NULL, OPT_MACHINE },
		{ "foreground", no_argument, NULL, 'f' },
		{ "version", no_argument, NULL, OPT_VERSION },
		{ "help", no_argument, NULL, 'h' },
		{ 0 },
	};
	int option;

	while ((option = getopt_long(argc, argv, "fh", table, NULL)) != -1)
		parse_option(o, option);
	if (!o->state)
		o->state = default_state();
	if (o->stdio && o->via)
		refuse("--stdio and --via exclude each other", "");
	if (argc - optind != (o->stdio || o->check ? 0 : 1))
		refuse(argc == optind ? "where to mount is missing" : "too many arguments: ", argc == optind ? "" : argv[argc - 1]);
	if (optind < argc)
		o->mountpoint = absolute(argv[optind]);
	o->daemon.foreground |= o->stdio || o->check;
}

static void ready(void *arg)
{
	daemon_ready(arg);
}

/* The whole server is this process. */
static int serve(struct options *o, const char *mount_options, struct err *e)
{
	struct core_options files = { .state = o->state };
	struct session_options how = {
		.mountpoint = o->mountpoint, .mount_options = mount_options, .state = o->state, .uid = o->stdio ? (uid_t)-1 : getuid(),
		.gid = getgid(), .ready = ready, .arg = &o->daemon,
	};
	struct core *core = NULL;
	struct loop *loop;
	int r;

	files.kernel = o->kernel = o->kernel ? o->kernel : host_file(HOST_KERNEL);
	files.initrd = o->initrd = o->initrd ? o->initrd : host_file(HOST_GUEST_INITRD);
	files.machine = o->machine = o->machine ? o->machine : host_file(HOST_MACHINE);
	if (!files.kernel || !files.initrd || !files.machine)
		return err_set(e, ENOENT, "no %s beside the program or in its library folder: give its path",
			       !files.kernel ? "guest kernel (--kernel)" : !files.initrd ? "guest initramfs (--initrd)" : "vmenv-machine (--machine)");
	umask(077); /* ours would be files that we cannot open again, if it were 0777 */
	loop = loop_new();
	if (!loop)
		return err_set(e, ENOMEM, "no memory");
	session_block_signals();
	r = core_open(&files, loop, &core, e);
	if (r == 0) {
		r = session_run(&how, core, loop, e);
		core_close(core);
	}
	loop_free(loop);
	return r;
}

/* KVM if it is usable, else the emulated host, unless told which. 1: KVM, 0: emulate, -errno: what was asked for cannot be. */
static int choose(const struct options *o, struct err *e)
{
	struct err why = { 0 };

	if (o->accel == ACCEL_EMULATE)
		return o->stdio ? err_set(e, EINVAL, "--stdio serves this host's own KVM: it cannot be emulated") : 0;
	if (accel_probe(NULL, &why) == 0)
		return 1;
	if (o->accel == ACCEL_KVM || o->stdio)
		return err_set(e, ENODEV, "no usable /dev/kvm (%.400s)", why.text);
	fprintf(stderr, "vmenvfs: no usable /dev/kvm (%s): using an emulated KVM host; expect it to be several times slower\n", why.text);
	return 0;
}

/* Machines and templates are many descriptors each. */
static void raise_limits(void)
{
	struct rlimit l;

	if (getrlimit(RLIMIT_NOFILE, &l) == 0 && l.rlim_cur < l.rlim_max) {
		l.rlim_cur = l.rlim_max;
		setrlimit(RLIMIT_NOFILE, &l);
	}
}

/* A server that is killed leaves no dead mount behind where fusermount3 is there to watch it. */
static const char *mount_options_of(const struct options *o)
{
	bool watched = access("/usr/bin/fusermount3", X_OK) == 0 || access("/bin/fusermount3", X_OK) == 0;

	if (watched)
		return o->allow_other ? MOUNT_OPTIONS ",auto_unmount,allow_other" : MOUNT_OPTIONS ",auto_unmount";
	return o->allow_other ? MOUNT_OPTIONS ",allow_other" : MOUNT_OPTIONS;
}

static int run(struct options *o, struct err *e)
{
	const char *mount_options = mount_options_of(o);
	struct host_options host = {
		.mountpoint = o->mountpoint, .mount_options = mount_options, .state = o->state, .kernel = o->kernel,
		.emulated_memory_mb = o->emulated_memory_mb, .ready = ready, .arg = &o->daemon,
	};
	int r = o->mountpoint ? mountpoint_check(o->mountpoint, e) : 0;

	if (r == 0)
		r = daemon_start(&o->daemon, e);
	if (r < 0)
		return r;
	if (o->via)
		return via_run(&host, o->via, e);
	r = choose(o, e);
	if (r == 0)
		return emulate_run(&host, e);
	return r < 0 ? r : serve(o, mount_options, e);
}

int main(int argc, char **argv)
{
	struct options o = { 0 };
	struct err e = { 0 };
	int r;

	parse(argc, argv, &o);
	raise_limits();
	if (o.check)
		return check_run(&(struct host_options){ .state = o.state, .kernel = o.kernel }, stdout);
	r = run(&o, &e);
	free(o.mountpoint);
	free(o.state);
	free(o.kernel);
	free(o.initrd);
	free(o.machine);
	return r < 0 ? say(&o, &e) : EXIT_SUCCESS;
}
