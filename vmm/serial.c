/* SPDX-License-Identifier: Apache-2.0 */
/* A 16550A (National Semiconductor PC16550D data sheet), as much of it as operating systems look at. */
#include "serial.h"

#include <string.h>
#include <unistd.h>

#include <vmenv/util.h>

#include "layout.h"

enum { DATA = 0, IER = 1, IIR_FCR = 2, LCR = 3, MCR = 4, LSR = 5, MSR = 6, SCR = 7 };

#define IER_RECEIVE 0x01u
#define IER_TRANSMIT 0x02u
#define IIR_NONE 0x01u
#define IIR_TRANSMIT 0x02u
#define IIR_RECEIVE 0x04u
#define IIR_FIFOS 0xc0u
#define FCR_ENABLE 0x01u
#define FCR_CLEAR_RECEIVE 0x02u
#define LCR_DIVISOR 0x80u
#define MCR_LOOP 0x10u
#define LSR_READY 0x01u
#define LSR_TRANSMIT 0x60u /* holding and shift register empty */
#define MSR_CONNECTED 0xb0u /* carrier, data set ready, clear to send */

static const char panic_message[] = "Kernel panic - not syncing";

static void signal_fd(int fd)
{
	uint64_t one = 1;

	if (fd >= 0 && write(fd, &one, sizeof(one)) < 0)
		return; /* an eventfd that is full is one that is signalled */
}

void serial_init(struct serial *p)
{
	memset(p, 0, sizeof(*p));
	pthread_mutex_init(&p->lock, NULL);
	p->notice_fd = -1;
	p->keep = true;
	p->s.dll = 12;
}

static bool transmitter_free(const struct serial *p)
{
	return p->keep || p->out_bytes < SERIAL_OUTPUT_MAX - 64;
}

static uint8_t pending(const struct serial *p)
{
	if ((p->s.ier & IER_RECEIVE) && p->s.in_bytes)
		return IIR_RECEIVE;
	if ((p->s.ier & IER_TRANSMIT) && p->s.transmit_irq)
		return IIR_TRANSMIT;
	return IIR_NONE;
}

/* The line is an edge: it is pulsed when there is a reason, and spurious ones are harmless to every driver. */
static void interrupt(struct serial *p)
{
	if (pending(p) != IIR_NONE)
		irq_edge(&p->irq, GSI_SERIAL);
}

static void watch_for_panic(struct serial *p, uint8_t c)
{
	if (c == (uint8_t)panic_message[p->panic_match])
		p->panic_match++;
	else
		p->panic_match = c == (uint8_t)panic_message[0];
	if (p->panic_match == sizeof(panic_message) - 1) {
		p->panicked = true;
		p->panic_match = 0;
	}
}

static void transmit(struct serial *p, uint8_t c)
{
	watch_for_panic(p, c);
	if (p->out_bytes == SERIAL_OUTPUT_MAX) {
		if (!p->keep)
			return; /* written although the transmitter was busy */
		p->out_head = (p->out_head + 1) % SERIAL_OUTPUT_MAX;
		p->out_bytes--;
	}
	p->out[(p->out_head + p->out_bytes++) % SERIAL_OUTPUT_MAX] = c;
	if (p->out_bytes == 1)
		signal_fd(p->notice_fd);
}

static uint8_t receive(struct serial *p)
{
	uint8_t c;

	if (!p->s.in_bytes)
		return 0;
	c = p->s.in[p->s.in_head];
	p->s.in_head = (p->s.in_head + 1) % SERIAL_INPUT_MAX;
	p->s.in_bytes--;
	if (p->input_was_full && p->s.in_bytes <= SERIAL_INPUT_MAX / 2) {
		p->input_was_full = false;
		signal_fd(p->notice_fd);
	}
	return c;
}

static void queue_input(struct serial *p, uint8_t c)
{
	if (p->s.in_bytes < SERIAL_INPUT_MAX)
		p->s.in[(p->s.in_head + p->s.in_bytes++) % SERIAL_INPUT_MAX] = c;
}

static uint8_t modem_status(const struct serial *p)
{
	uint8_t m = p->s.mcr;

	if (!(m & MCR_LOOP))
		return MSR_CONNECTED;
	/* Looped back: request to send, data terminal ready, and the two outputs come in again. */
	return (uint8_t)((m & 0x02) << 3 | (m & 0x01) << 5 | (m & 0x04) << 4 | (m & 0x08) << 4);
}

static uint8_t read_register(struct serial *p, unsigned offset)
{
	uint8_t v;

	switch (offset) {
	case DATA:
		return p->s.lcr & LCR_DIVISOR ? p->s.dll : receive(p);
	case IER:
		return p->s.lcr & LCR_DIVISOR ? p->s.dlm : p->s.ier;
	case IIR_FCR:
		v = pending(p);
		if (v == IIR_TRANSMIT)
			p->s.transmit_irq = 0;
		return (uint8_t)(v | (p->s.fcr & FCR_ENABLE ? IIR_FIFOS : 0));
	case LCR:
		return p->s.lcr;
	case MCR:
		return p->s.mcr;
	case LSR:
		return (uint8_t)((p->s.in_bytes ? LSR_READY : 0) | (transmitter_free(p) ? LSR_TRANSMIT : 0));
	case MSR:
		return modem_status(p);
	default:
		return p->s.scr;
	}
}

static void write_register(struct serial *p, unsigned offset, uint8_t value)
{
	uint8_t risen;

	switch (offset) {
	case DATA:
		if (p->s.lcr & LCR_DIVISOR) {
			p->s.dll = value;
			break;
		}
		if (p->s.mcr & MCR_LOOP)
			queue_input(p, value);
		else
			transmit(p, value);
		p->s.transmit_irq = transmitter_free(p);
		interrupt(p);
		break;
	case IER:
		if (p->s.lcr & LCR_DIVISOR) {
			p->s.dlm = value;
			break;
		}
		risen = (uint8_t)(value & ~p->s.ier);
		p->s.ier = value & 0xf;
		if ((risen & IER_TRANSMIT) && transmitter_free(p))
			p->s.transmit_irq = 1;
		if (risen)
			interrupt(p);
		break;
	case IIR_FCR:
		p->s.fcr = value;
		if (value & FCR_CLEAR_RECEIVE)
			p->s.in_bytes = 0;
		break;
	case LCR:
		p->s.lcr = value;
		break;
	case MCR:
		p->s.mcr = value & 0x1f;
		break;
	case SCR:
		p->s.scr = value;
		break;
	default:
		break;
	}
}

uint8_t serial_read(struct serial *p, unsigned offset)
{
	uint8_t v;

	pthread_mutex_lock(&p->lock);
	v = read_register(p, offset);
	pthread_mutex_unlock(&p->lock);
	return v;
}

void serial_write(struct serial *p, unsigned offset, uint8_t value)
{
	pthread_mutex_lock(&p->lock);
	write_register(p, offset, value);
	pthread_mutex_unlock(&p->lock);
}

static size_t peek(struct serial *p, uint8_t *to, size_t n)
{
	n = MIN(n, p->out_bytes);
	for (size_t i = 0; i < n; i++)
		to[i] = p->out[(p->out_head + i) % SERIAL_OUTPUT_MAX];
	return n;
}

static void drop(struct serial *p, size_t n)
{
	bool was_busy = !transmitter_free(p);

	n = MIN(n, p->out_bytes);
	p->out_head = (uint32_t)((p->out_head + n) % SERIAL_OUTPUT_MAX);
	p->out_bytes -= (uint32_t)n;
	if (was_busy && transmitter_free(p)) {
		p->s.transmit_irq = 1;
		interrupt(p);
	}
}

size_t serial_peek(struct serial *p, void *to, size_t n)
{
	pthread_mutex_lock(&p->lock);
	n = peek(p, to, n);
	pthread_mutex_unlock(&p->lock);
	return n;
}

void serial_drop(struct serial *p, size_t n)
{
	pthread_mutex_lock(&p->lock);
	drop(p, n);
	pthread_mutex_unlock(&p->lock);
}

size_t serial_take(struct serial *p, void *to, size_t n)
{
	pthread_mutex_lock(&p->lock);
	n = peek(p, to, n);
	drop(p, n);
	pthread_mutex_unlock(&p->lock);
	return n;
}

size_t serial_input(struct serial *p, const void *bytes, size_t n)
{
	const uint8_t *b = bytes;
	size_t room;

	pthread_mutex_lock(&p->lock);
	room = SERIAL_INPUT_MAX - p->s.in_bytes;
	if (n >= room) {
		n = room;
		p->input_was_full = true;
	}
	for (size_t i = 0; i < n; i++)
		queue_input(p, b[i]);
	if (n)
		interrupt(p);
	pthread_mutex_unlock(&p->lock);
	return n;
}

size_t serial_input_room(struct serial *p)
{
	size_t room;

	pthread_mutex_lock(&p->lock);
	room = SERIAL_INPUT_MAX - p->s.in_bytes;
	if (!room)
		p->input_was_full = true;
	pthread_mutex_unlock(&p->lock);
	return room;
}

void serial_keep(struct serial *p, bool keep)
{
	pthread_mutex_lock(&p->lock);
	p->keep = keep;
	pthread_mutex_unlock(&p->lock);
}

int serial_load(struct serial *p, const struct serial_saved *s)
{
	if (s->in_head >= SERIAL_INPUT_MAX || s->in_bytes > SERIAL_INPUT_MAX)
		return -1;
	p->s = *s;
	return 0;
}

void serial_restored(struct serial *p)
{
	pthread_mutex_lock(&p->lock);
	if (p->s.ier & IER_TRANSMIT)
		p->s.transmit_irq = 1;
	interrupt(p);
	pthread_mutex_unlock(&p->lock);
}

bool serial_panicked(struct serial *p)
{
	bool v;

	pthread_mutex_lock(&p->lock);
	v = p->panicked;
	pthread_mutex_unlock(&p->lock);
	return v;
}
