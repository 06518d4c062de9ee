/* SPDX-License-Identifier: Apache-2.0 */
/* What a struct machine is made of; for machine.c, fork.c and save.c. */
#ifndef VMM_MACHINE_PRIVATE_H
#define VMM_MACHINE_PRIVATE_H

#include "cpuid.h"
#include "cpustate.h"
#include "devices.h"
#include "machine.h"
#include "mapping.h"
#include "trace.h"
#include "vcpu.h"
#include "workset.h"

/*
 * Where a machine's CPU and device state is: in KVM (`vm.fd` >= 0), in `saved`, or in both and equal (`saved_valid`: it
 * has not run since). MACHINE_PAUSED -> MACHINE_RUNNING and back; MACHINE_ENDED is final.
 *
 * Everything belongs to the event loop's thread, but for `ending`, `crew` and what devices.h says.
 */
struct machine {
	struct loop *loop;
	enum machine_state state;
	struct mapping ram, disk;
	struct memory memory;
	unsigned vcpus;
	struct fingerprint cpu;
	struct kvm kvm;
	struct vm vm;
	struct bus bus;
	struct crew crew;
	struct devices devices;
	struct msr_list msrs; /* count 0: not known yet */
	struct state saved;
	bool saved_valid;
	bool restored; /* restored or forked, and has not run since */
	uint64_t stood_clock; /* kvmclock at machine_pause, to go on from; 0: let it be */

	/* The console's output, and the watch for when it can take more. */
	int console_fd;
	bool console_waits;
	struct watch console_watch;
	void (*console_room)(void *arg); /* the guest has read: there is room for input */
	void *console_room_arg;

	/* Something happened on another thread: output, the guest's end, SIGBUS. */
	int notice_fd;
	struct watch notice_watch;
	struct {
		atomic_uint claimed; /* the first end counts */
		atomic_uint why;     /* enum machine_exit; set after the sentence */
		char sentence[256];
	} ending;
	machine_ended *ended;
	void *ended_arg;
	struct workset workset;
	bool of_zygote; /* forked from a machine that never ran */
	struct trace trace;
};

/* The guest has ended: parks it, says so. True if it has (now or before). */
bool machine_check_end(struct machine *m);
/* Makes the VM and loads the saved state into it. */
int machine_build(struct machine *m, struct err *e);
/* Brings m->saved up to date. Paused. */
int machine_capture(struct machine *m, struct err *e);
/* Stops the vCPUs and the devices, without a change of state. */
void machine_stand(struct machine *m);
void machine_go(struct machine *m);
/* Passes on what the guest has printed. */
void machine_flush_console(struct machine *m);
/* A new eventfd for notices, watched. */
int machine_watch_notices(struct machine *m, struct err *e);

#endif
