/* SPDX-License-Identifier: Apache-2.0 */
/* Where a device's interrupts go. */
#ifndef VMM_IRQ_H
#define VMM_IRQ_H

struct irq {
	/* An edge on the pin, seen by the interrupt controller when this returns. Any thread. NULL: not connected. */
	void (*edge)(void *arg, unsigned gsi);
	void *arg;
};

static inline void irq_edge(const struct irq *q, unsigned gsi)
{
	if (q->edge)
		q->edge(q->arg, gsi);
}

#endif
