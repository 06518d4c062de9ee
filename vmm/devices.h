/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The machine's devices, and what answers the guest's port and memory accesses: one table of virtio devices, the serial
 * port, and the ports for reset, sleep and panic. Whatever else the guest accesses reads as all ones and ignores writes.
 *
 * Registers are handled on vCPU threads; each device has its lock. Everything else here runs on the event loop.
 */
#ifndef VMM_DEVICES_H
#define VMM_DEVICES_H

#include <vmenv/loop.h>
#include <vmenv/machine.h>
#include <vmenv/util.h>

#include "layout.h"
#include "pmem.h"
#include "rng.h"
#include "serial.h"
#include "state.h"
#include "vm.h"
#include "vsock.h"

struct devices {
	struct loop *loop;
	struct memory *memory;
	struct serial serial;
	unsigned count;
	struct device {
		struct virtio *v;
		int kick_fd; /* eventfd: the guest kicked one of its queues, or may have */
		struct watch watch;
	} device[VIRTIO_DEVICES_MAX];
	struct pmem *pmem; /* NULL without a disk */
	struct vsock *vsock;
	struct rng *rng;
	/* vCPU threads: the guest has ended. */
	void (*end)(void *arg, enum machine_exit why, const char *sentence);
	void *end_arg;
};

/* Makes the devices, on `memory` (whose disk says whether there is a pmem). */
int devices_make(struct devices *d, struct loop *l, struct memory *m, struct err *e);
void devices_free(struct devices *d);
/* Connects each device with a new VM, which must stay where it is. */
int devices_connect(struct devices *d, struct vm *v, struct err *e);
/* Undoes devices_connect. */
void devices_disconnect(struct devices *d);
/* In a forked child: what they were connected with is the parent's. Streams are forgotten. */
void devices_forked(struct devices *d);
/* vCPUs parked: serves what the guest has asked for, then the devices hold still. */
void devices_drain(struct devices *d);
/* Before the vCPUs run. */
void devices_go(struct devices *d);

int devices_save(struct devices *d, struct state *s, struct err *e);
int devices_load(struct devices *d, const struct state *s, struct err *e);
/* After devices_load and devices_connect, before the vCPUs run: interrupts and kicks that were on their way. */
void devices_restored(struct devices *d);

/* vCPU threads; arg is the struct devices. */
void devices_in(void *arg, uint16_t port, void *data, unsigned n);
void devices_out(void *arg, uint16_t port, const void *data, unsigned n);
void devices_read(void *arg, uint64_t gpa, void *data, unsigned n);
void devices_write(void *arg, uint64_t gpa, const void *data, unsigned n);
void devices_end(void *arg, enum machine_exit why, const char *sentence);

#endif
