/* SPDX-License-Identifier: Apache-2.0 */
/* The device table and the bus. */
#include "devices.h"

#include <linux/virtio_mmio.h>
#include <sys/eventfd.h>

#define SLEEP_ENABLE 0x20u
#define SLEEP_TYPE(v) ((v) >> 2 & 7u)
#define KEYBOARD_RESET 0xfeu
#define PANIC_PANICKED 0x01u

static void on_kick(struct watch *w, uint32_t events)
{
	struct virtio *v = w->arg;
	uint64_t n;

	if (read(w->fd, &n, sizeof(n)) < 0)
		return;
	for (unsigned q = 0; q < v->ops->queues; q++)
		virtio_kick(v, q);
}

static int add(struct devices *d, struct virtio *v, struct err *e)
{
	struct device *x = &d->device[d->count];

	if (!v)
		return err_set(e, ENOMEM, "out of memory");
	v->mmio = MMIO_START + d->count * MMIO_STRIDE;
	v->gsi = GSI_VIRTIO + d->count;
	x->v = v;
	x->kick_fd = -1;
	x->watch = (struct watch){ .fd = -1, .ready = on_kick, .arg = v };
	d->count++;
	return 0;
}

int devices_make(struct devices *d, struct loop *l, struct memory *m, struct err *e)
{
	int r = 0;

	memset(d, 0, sizeof(*d));
	d->loop = l;
	d->memory = m;
	serial_init(&d->serial);
	if (m->disk) {
		d->pmem = pmem_new(m);
		r = add(d, d->pmem ? pmem_virtio(d->pmem) : NULL, e);
	}
	if (r == 0) {
		d->vsock = vsock_new(l, m);
		r = add(d, d->vsock ? vsock_virtio(d->vsock) : NULL, e);
	}
	if (r == 0) {
		d->rng = rng_new(m);
		r = add(d, d->rng ? rng_virtio(d->rng) : NULL, e);
	}
	if (r < 0)
		devices_free(d);
	return r;
}

static void close_fd(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

static void disconnect(struct devices *d)
{
	for (unsigned i = 0; i < d->count; i++) {
		struct device *x = &d->device[i];

		pthread_mutex_lock(&x->v->lock);
		x->v->irq = (struct irq){ 0 };
		pthread_mutex_unlock(&x->v->lock);
		close_fd(&x->kick_fd);
		x->watch.fd = -1;
	}
	d->serial.irq = (struct irq){ 0 };
}

void devices_disconnect(struct devices *d)
{
	for (unsigned i = 0; i < d->count; i++)
		if (d->device[i].watch.fd >= 0)
			loop_remove(d->loop, &d->device[i].watch);
	disconnect(d);
}

void devices_free(struct devices *d)
{
	devices_disconnect(d);
	pmem_free(d->pmem);
	vsock_free(d->vsock);
	rng_free(d->rng);
	d->pmem = NULL;
	d->vsock = NULL;
	d->rng = NULL;
	d->count = 0;
}

static int event_fd(int *fd, struct err *e)
{
	*fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	return *fd < 0 ? err_set(e, errno, "cannot make an eventfd: %s", strerror(errno)) : 0;
}

static int connect_one(struct devices *d, struct device *x, struct vm *v, struct err *e)
{
	int r = event_fd(&x->kick_fd, e);

	x->v->irq = (struct irq){ vm_edge, v };
	if (r == 0)
		r = vm_signal_at(v, x->kick_fd, x->v->mmio + VIRTIO_MMIO_QUEUE_NOTIFY, e);
	if (r < 0)
		return r;
	x->watch.fd = x->kick_fd;
	r = loop_add(d->loop, &x->watch, EPOLLIN);
	return r < 0 ? err_set(e, -r, "cannot watch an eventfd: %s", strerror(-r)) : 0;
}

int devices_connect(struct devices *d, struct vm *v, struct err *e)
{
	int r = 0;

	d->serial.irq = (struct irq){ vm_edge, v };
	for (unsigned i = 0; i < d->count && r == 0; i++)
		r = connect_one(d, &d->device[i], v, e);
	return r;
}

void devices_forked(struct devices *d)
{
	if (d->vsock)
		vsock_forget(d->vsock);
	disconnect(d);
	d->serial.out_bytes = d->serial.out_head = 0;
}

static void kick_all(struct devices *d)
{
	for (unsigned i = 0; i < d->count; i++)
		for (unsigned q = 0; q < d->device[i].v->ops->queues; q++)
			virtio_kick(d->device[i].v, q);
}

void devices_drain(struct devices *d)
{
	kick_all(d);
	if (d->vsock)
		vsock_drain(d->vsock);
}

void devices_go(struct devices *d)
{
	if (d->vsock)
		vsock_go(d->vsock);
}

struct saved_virtio {
	uint32_t id, reserved;
	struct virtio_saved s;
};

int devices_save(struct devices *d, struct state *s, struct err *e)
{
	int r = state_add(s, STATE_SERIAL, 0, &d->serial.s, sizeof(d->serial.s), e);

	for (unsigned i = 0; i < d->count && r == 0; i++) {
		struct virtio *v = d->device[i].v;
		struct saved_virtio x;
		size_t n = 0;
		const void *own;

		memset(&x, 0, sizeof(x));
		x.id = v->ops->id;
		memcpy(&x.s, &v->s, sizeof(x.s));
		r = state_add(s, STATE_VIRTIO, i, &x, sizeof(x), e);
		own = v->ops->saved ? v->ops->saved(v, &n) : NULL;
		if (r == 0 && own)
			r = state_add(s, STATE_DEVICE, i, own, n, e);
	}
	state_header(s)->devices = d->count;
	return r;
}

static int load_one(struct virtio *v, const struct state *s, unsigned i, struct err *e)
{
	struct saved_virtio x;
	const void *p;
	size_t n = 0;
	void *own;
	int r = state_get(s, STATE_VIRTIO, i, &p, sizeof(x), e);

	if (r < 0)
		return r;
	memcpy(&x, p, sizeof(x));
	if (x.id != v->ops->id || !virtio_saved_valid(v, &x.s))
		return err_set(e, EINVAL, "the saved state is damaged: device %s", v->ops->name);
	own = v->ops->saved ? v->ops->saved(v, &n) : NULL;
	if (own) {
		r = state_get(s, STATE_DEVICE, i, &p, n, e);
		if (r < 0)
			return r;
		memcpy(own, p, n);
	}
	v->s = x.s;
	return 0;
}

int devices_load(struct devices *d, const struct state *s, struct err *e)
{
	struct serial_saved serial;
	const void *p;
	int r = state_get(s, STATE_SERIAL, 0, &p, sizeof(serial), e);

	if (r < 0)
		return r;
	memcpy(&serial, p, sizeof(serial));
	if (serial_load(&d->serial, &serial) < 0 || state_header(s)->devices != d->count)
		return err_set(e, EINVAL, "the saved state is damaged: its devices");
	for (unsigned i = 0; i < d->count && r == 0; i++)
		r = load_one(d->device[i].v, s, i, e);
	return r;
}

void devices_restored(struct devices *d)
{
	serial_restored(&d->serial);
	for (unsigned i = 0; i < d->count; i++) {
		struct virtio *v = d->device[i].v;

		pthread_mutex_lock(&v->lock);
		if (v->ops->restored)
			v->ops->restored(v);
		/* An interrupt may have been on its way; one more does no harm. */
		if (v->s.interrupt_status)
			irq_edge(&v->irq, v->gsi);
		pthread_mutex_unlock(&v->lock);
	}
	kick_all(d);
}

/* Ports. */

void devices_in(void *arg, uint16_t port, void *data, unsigned n)
{
	struct devices *d = arg;
	uint8_t value = 0xff;

	memset(data, 0xff, n);
	if (port >= PORT_SERIAL && port < PORT_SERIAL + 8)
		value = serial_read(&d->serial, port - PORT_SERIAL);
	else if (port == PORT_KEYBOARD || port == PORT_SLEEP_STATUS || port == PORT_SLEEP_CONTROL)
		value = 0;
	else if (port == PORT_PANIC)
		value = PANIC_PANICKED; /* the events that it takes */
	memcpy(data, &value, 1);
}

static void rebooted(struct devices *d)
{
	if (serial_panicked(&d->serial))
		d->end(d->end_arg, MACHINE_EXIT_PANIC, "the guest's kernel panicked and rebooted");
	else
		d->end(d->end_arg, MACHINE_EXIT_REBOOT, "the guest rebooted");
}

void devices_out(void *arg, uint16_t port, const void *data, unsigned n)
{
	struct devices *d = arg;
	uint8_t value;

	memcpy(&value, data, 1);
	if (port >= PORT_SERIAL && port < PORT_SERIAL + 8)
		serial_write(&d->serial, port - PORT_SERIAL, value);
	else if (port == PORT_SLEEP_CONTROL && (value & SLEEP_ENABLE) && SLEEP_TYPE(value) == SLEEP_TYPE_S5)
		d->end(d->end_arg, MACHINE_EXIT_POWEROFF, "the guest powered off");
	else if ((port == PORT_RESET && value == RESET_VALUE) || (port == PORT_KEYBOARD && value == KEYBOARD_RESET))
		rebooted(d);
	else if (port == PORT_PANIC && (value & PANIC_PANICKED))
		d->end(d->end_arg, MACHINE_EXIT_PANIC, "the guest's kernel panicked");
}

static struct device *at(struct devices *d, uint64_t gpa, unsigned n, uint64_t *offset)
{
	uint64_t i = (gpa - MMIO_START) / MMIO_STRIDE;

	if (gpa < MMIO_START || i >= d->count)
		return NULL;
	*offset = (gpa - MMIO_START) % MMIO_STRIDE;
	return *offset + n <= MMIO_STRIDE ? &d->device[i] : NULL;
}

void devices_read(void *arg, uint64_t gpa, void *data, unsigned n)
{
	uint64_t offset = 0;
	struct device *x = at(arg, gpa, n, &offset);

	if (x)
		virtio_mmio_read(x->v, offset, data, n);
	else
		memset(data, 0xff, n);
}

void devices_write(void *arg, uint64_t gpa, const void *data, unsigned n)
{
	uint64_t offset = 0, one = 1;
	struct device *x = at(arg, gpa, n, &offset);

	/* Kicks come by ioeventfd, but for those that KVM could not decode: the event loop serves them all the same. */
	if (x && virtio_mmio_write(x->v, offset, data, n) >= 0 && write(x->kick_fd, &one, sizeof(one)) < 0)
		return; /* full: it is signalled */
}

void devices_end(void *arg, enum machine_exit why, const char *sentence)
{
	struct devices *d = arg;

	d->end(d->end_arg, why, sentence);
}
