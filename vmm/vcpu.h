/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vCPUs: a thread each, which only runs the guest and answers its register accesses.
 *
 * A thread that is not running the guest is parked: asleep in a futex, outside malloc and outside every lock, so that the
 * event loop can read and write the vCPU's state and can fork. Only `crew` is shared between threads.
 */
#ifndef VMM_VCPU_H
#define VMM_VCPU_H

#include <pthread.h>
#include <stdatomic.h>

#include <vmenv/machine.h>
#include <vmenv/util.h>

#include "cpuid.h"
#include "layout.h"
#include "vm.h"

struct vcpu;

/* What a vCPU thread does with the guest's accesses; called on vCPU threads. */
struct bus {
	void *arg;
	void (*in)(void *arg, uint16_t port, void *data, unsigned n);
	void (*out)(void *arg, uint16_t port, const void *data, unsigned n);
	void (*read)(void *arg, uint64_t gpa, void *data, unsigned n);
	void (*write)(void *arg, uint64_t gpa, const void *data, unsigned n);
	/* The guest has ended, or cannot go on. The vCPU does not run any more. Only the first call counts. */
	void (*end)(void *arg, enum machine_exit why, const char *sentence);
};

struct crew {
	atomic_uint gate;   /* enum gate; futex */
	atomic_uint parked; /* how many threads are; futex */
	const struct bus *bus;
	size_t run_bytes;
	unsigned vcpus;
	struct vcpu {
		struct crew *crew;
		unsigned index;
		int fd;
		struct kvm_run *run;
		pthread_t thread;
		bool started;
	} vcpu[VCPUS_MAX];
};

void crew_init(struct crew *c, const struct bus *bus);
/* Makes the vCPUs, without their state and threads. */
int crew_make(struct crew *c, const struct kvm *k, const struct vm *m, unsigned vcpus, struct err *e);
/* Starts the threads, parked. */
int crew_start(struct crew *c, struct err *e);
void crew_run(struct crew *c);
/* Returns when every thread is parked. */
void crew_park(struct crew *c);
/* Ends the threads (which are parked) and closes everything. */
void crew_close(struct crew *c);
/* In a forked child, where the threads are not: closes everything. */
void crew_forked(struct crew *c);

int vcpu_set_cpuid(const struct vcpu *v, const struct cpuid *c, struct err *e);

#endif
