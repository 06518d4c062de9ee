/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The serial port: a 16550A whose output goes to a ring that the event loop empties, and whose input comes from one.
 *
 * Registers are handled on vCPU threads, the rings' other ends on the event loop; `lock` guards everything. While the
 * output ring is full the transmitter says it is busy, so a slow reader of the console slows the guest's output down.
 */
#ifndef VMM_SERIAL_H
#define VMM_SERIAL_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "irq.h"

#define SERIAL_INPUT_MAX 1024u
#define SERIAL_OUTPUT_MAX 65536u

struct serial {
	pthread_mutex_t lock;
	struct irq irq;
	int notice_fd; /* eventfd: the event loop has output to take, or room for input */
	bool keep;     /* nobody reads: the ring drops its oldest bytes instead of filling up */
	bool input_was_full;
	uint32_t out_head, out_bytes;
	uint8_t out[SERIAL_OUTPUT_MAX];
	unsigned panic_match; /* characters of the kernel's panic message seen */
	bool panicked;
	/* Saved. */
	struct serial_saved {
		uint8_t ier, lcr, mcr, scr, dll, dlm, fcr;
		uint8_t transmit_irq; /* the "transmitter empty" interrupt is pending */
		uint32_t in_head, in_bytes;
		uint8_t in[SERIAL_INPUT_MAX];
	} s;
};

void serial_init(struct serial *p);
/* vCPU threads. offset 0..7. */
uint8_t serial_read(struct serial *p, unsigned offset);
void serial_write(struct serial *p, unsigned offset, uint8_t value);
/* Event loop. Takes up to n bytes of output. */
size_t serial_take(struct serial *p, void *to, size_t n);
/* Looks at up to n bytes of output; serial_drop removes what could be passed on. */
size_t serial_peek(struct serial *p, void *to, size_t n);
void serial_drop(struct serial *p, size_t n);
/* Queues input; returns how many bytes fitted. */
size_t serial_input(struct serial *p, const void *bytes, size_t n);
size_t serial_input_room(struct serial *p);
/* Whether output that nobody takes is kept (the newest) or holds the guest up. */
void serial_keep(struct serial *p, bool keep);
/* Restores saved state; -1 if it is none that a serial port can be in. */
int serial_load(struct serial *p, const struct serial_saved *s);
/* After a restore: an interrupt that was on its way is raised again. */
void serial_restored(struct serial *p);
/* True once the kernel's panic message has gone by. */
bool serial_panicked(struct serial *p);

#endif
