/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A machine: memory, disk, vCPUs, devices, and the moves between its states. Everything here runs on the event loop's
 * thread, which is the only one that forks; vCPU threads only run the guest and handle its register accesses.
 */
#ifndef VMM_MACHINE_H
#define VMM_MACHINE_H

#include <vmenv/loop.h>
#include <vmenv/machine.h>
#include <vmenv/util.h>

#include "vsock.h"

struct machine;

/*
 * The console; reboot by ACPI, which Linux avoids with reduced hardware unless asked; a panic reboots at once, which ends
 * the machine; the clock that stands still with the machine, and no watchdog that compares the TSC with it and after every
 * restore prints why it distrusts it (600 exits); no search for PCI and for serial ports that are not there, which takes
 * hundreds of exits.
 */
#define MACHINE_CMDLINE "console=ttyS0 reboot=a panic=-1 clocksource=kvm-clock tsc=nowatchdog pci=off 8250.nr_uarts=1"

struct machine_options {
	/* To boot: all but initrd, disk, cmdline may not be NULL. Without a cmdline it is MACHINE_CMDLINE. */
	const char *kernel, *initrd, *disk, *cmdline;
	uint64_t memory_bytes;
	unsigned vcpus;
	const char *memory_image; /* boot: the file to hold guest memory (made and sized), or NULL for anonymous memory */
	/* To restore: the state file; memory_image and disk as saved. */
	const char *restore;
	/* Disk mapped private instead of shared, for a machine run by hand (--snapshot-disk). */
	bool private_disk;
};

/* Called on the loop when the guest has ended (vCPUs are parked by then). */
typedef void machine_ended(void *arg, enum machine_exit why, const char *sentence);

/* Makes it, paused. A restored machine holds the state and makes no KVM VM until it is first resumed. */
int machine_new(const struct machine_options *o, struct loop *l, struct machine **m, struct err *e);
void machine_on_end(struct machine *m, machine_ended *ended, void *arg);
void machine_free(struct machine *m);

enum machine_state machine_state(const struct machine *m);
int machine_resume(struct machine *m, struct err *e);
int machine_pause(struct machine *m, struct err *e);
/*
 * Forks `count` children from one instant. Returns 0 in the parent (state as before), 1 in a child (*child = its index):
 * there, all threads but this one are gone, every KVM descriptor is closed, streams are forgotten, the loop is empty
 * (loop_forked done), and the machine is paused; building its VM has been started by the time this returns or is done at
 * machine_resume. *still_ns: how long the vCPUs did not run.
 */
int machine_fork(struct machine *m, unsigned count, unsigned *child, uint64_t *still_ns, struct err *e);
/* How readily the kernel ends this process when it is out of memory: a template's machine rather than the server, and a
 * machine that was forked, which is one of many, rather than that. */
#define MACHINE_OOM_FIRST "300"
#define MACHINE_OOM_CHILD "500"
void machine_oom_score(const char *score);
/* Paused only. memory and disk: descriptors for the changed pages, or -1. */
int machine_save(struct machine *m, int state, int memory, int disk, struct err *e);
const struct memory *machine_memory(struct machine *m);
struct machine_use {
	uint64_t private_bytes, resident_bytes, private_memory_bytes, private_disk_bytes;
};
/* pages.c */
void machine_use(struct machine *m, struct machine_use *u);
/* Paused only: 3 x 32 bytes: memory, disk, state. digest.c */
int machine_digest(struct machine *m, uint8_t digest[3][32], struct err *e);
struct vsock *machine_vsock(struct machine *m); /* NULL if it has none */
/* Console: output goes to `fd` (dup'ed; -1: kept in a 64 KiB ring until there is one). */
int machine_console_output(struct machine *m, int fd);
/* Queues input, returns how many bytes fitted. */
unsigned machine_console_input(struct machine *m, const void *bytes, unsigned n);
/* How many bytes would fit now; if none, the room callback will come. */
unsigned machine_console_input_room(struct machine *m);
/* Calls room(arg) on the loop when the guest has read enough of an input that did not fit. */
void machine_console_room(struct machine *m, void (*room)(void *arg), void *arg);

/* control.c: serves vmenv/machine.h on the listening socket, to the end of the machine. Returns the process's exit code. */
int control_serve(struct machine *m, struct loop *l, int listening);

#endif
