/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What vmenvfs does about the host it runs on: whether KVM is usable, --check, and mounting a server that runs
 * elsewhere
 * (--via COMMAND, and the emulated KVM host). These functions block; each has its own event loop.
 */
#ifndef FS_HOST_H
#define FS_HOST_H

#include <vmenv/util.h>

struct host_options {
	const char *mountpoint;
	const char *mount_options;   /* for fuse_session_new's -o: "fsname=...,allow_other"; NULL for the defaults */
	const char *state;	     /* the state folder, made if missing (emulation) */
	const char *kernel;	     /* vmlinuz of the emulated host; NULL: found, see host_file */
	uint64_t emulated_memory_mb; /* 0: by what is free */
	/* Called once, when the mount answers: the moment for a daemon to let its parent go. May be NULL. After it,
	 * what is to be said also goes to syslog. */
	void (*ready)(void *arg);
	void *arg;
};

enum finding_level { FINDING_OK, FINDING_WARN, FINDING_MISSING };

/* One line of --check. */
struct finding {
	const char *name; /* what was looked at, one or two words */
	enum finding_level level;
	char text[320];	  /* what was found */
	char remedy[320]; /* what to do about it; empty if nothing */
};

/*
 * Is there a KVM that runs what we need? Loads its modules if need be, makes a VM and runs a few instructions of 64-bit
 * code in it. 0 and f->level FINDING_OK, or -errno, with the reason in *f and *e (either may be NULL).
 */
int accel_probe(struct finding *f, struct err *e);

/* `vmenvfs --check`: prints a table; 0 if vmenvfs can run here (with KVM or emulated), 1 otherwise: the exit status. */
int check_run(const struct host_options *o, FILE *out);

/*
 * Mounts what `sh -c COMMAND` serves on its stdin and stdout, until it is unmounted or a SIGINT, SIGTERM or SIGHUP
 * comes; the command is stopped then and waited for. When the command ends by itself, every request in progress fails
 * with EIO, the mount goes away and this is -EIO with a sentence.
 */
int via_run(const struct host_options *o, const char *command, struct err *e);

/*
 * The same with an emulated KVM host, which is started again when it dies or hangs: its machines are gone then,
 * requests in progress fail with EIO, files that were open answer EIO, all else goes on. Says nothing but what went
 * wrong.
 */
int emulate_run(const struct host_options *o, struct err *e);

/*
 * The path of one of the files vmenvfs comes with: beside the running binary in a build tree, else in the library
 * folder. malloc'ed; NULL if it is in neither place.
 */
enum host_file {
	HOST_KERNEL,	      /* vmlinuz, for guests and the emulated host */
	HOST_GUEST_INITRD,    /* initramfs with the agent */
	HOST_EMULATED_INITRD, /* initramfs of the emulated host */
	HOST_MACHINE,	      /* vmenv-machine */
};
char *host_file(enum host_file which);

#endif
