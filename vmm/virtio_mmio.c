/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The virtio MMIO transport, version 2 (virtio 1.2, 4.2.2): registers, feature negotiation, the status machine.
 *
 * Trusted: nothing. Accesses of another width than a register's, to registers that are not there, or in a state in which
 * the driver must not make them, read zero and write nothing.
 */
#include <linux/virtio_config.h>
#include <linux/virtio_mmio.h>
#include <string.h>

#include "virtio.h"
#include <vmenv/util.h>

#define MAGIC 0x74726976u  /* "virt" */
#define VENDOR 0x766e6576u /* "venv" */

void virtio_init(struct virtio *v, const struct virtio_ops *ops, const struct memory *m)
{
	memset(v, 0, sizeof(*v));
	v->ops = ops;
	v->memory = m;
	pthread_mutex_init(&v->lock, NULL);
}

static uint64_t offered(const struct virtio *v)
{
	return v->ops->features | VIRTIO_F_VERSION_1_BIT;
}

static struct virtqueue *selected(struct virtio *v)
{
	return v->s.queue_select < v->ops->queues ? &v->s.queue[v->s.queue_select] : NULL;
}

static void read_config(struct virtio *v, uint64_t at, void *data, unsigned n)
{
	size_t bytes = 0;
	const uint8_t *c = v->ops->config ? v->ops->config(v, &bytes) : NULL;

	if (c && at < bytes)
		memcpy(data, c + at, MIN(n, bytes - at));
}

static uint32_t read_register(struct virtio *v, uint64_t offset)
{
	struct virtqueue *vq = selected(v);

	switch (offset) {
	case VIRTIO_MMIO_MAGIC_VALUE:
		return MAGIC;
	case VIRTIO_MMIO_VERSION:
		return 2;
	case VIRTIO_MMIO_DEVICE_ID:
		return v->ops->id;
	case VIRTIO_MMIO_VENDOR_ID:
		return VENDOR;
	case VIRTIO_MMIO_DEVICE_FEATURES:
		return v->s.features_select < 2 ? (uint32_t)(offered(v) >> (32 * v->s.features_select)) : 0;
	case VIRTIO_MMIO_QUEUE_NUM_MAX:
		return vq ? VIRTIO_QUEUE_SIZE_MAX : 0;
	case VIRTIO_MMIO_QUEUE_READY:
		return vq ? vq->ready : 0;
	case VIRTIO_MMIO_STATUS:
		return v->s.status;
	case VIRTIO_MMIO_CONFIG_GENERATION:
		return v->s.generation;
	case VIRTIO_MMIO_SHM_LEN_LOW: /* no shared memory regions: length and base of all ones (4.2.2) */
	case VIRTIO_MMIO_SHM_LEN_HIGH:
	case VIRTIO_MMIO_SHM_BASE_LOW:
	case VIRTIO_MMIO_SHM_BASE_HIGH:
		return UINT32_MAX;
	}
	return 0;
}

void virtio_mmio_read(struct virtio *v, uint64_t offset, void *data, unsigned n)
{
	uint32_t value;

	memset(data, 0, n);
	if (offset < VIRTIO_MMIO_CONFIG && (n != sizeof(value) || (offset & 3)))
		return;
	/* Without the lock: the interrupt handler's way, and the event loop may hold the lock for a large copy. */
	if (offset == VIRTIO_MMIO_INTERRUPT_STATUS) {
		value = __atomic_load_n(&v->s.interrupt_status, __ATOMIC_SEQ_CST);
		memcpy(data, &value, sizeof(value));
		return;
	}
	pthread_mutex_lock(&v->lock);
	if (offset >= VIRTIO_MMIO_CONFIG) {
		read_config(v, offset - VIRTIO_MMIO_CONFIG, data, n);
	} else {
		value = read_register(v, offset);
		memcpy(data, &value, sizeof(value));
	}
	pthread_mutex_unlock(&v->lock);
}

static void reset(struct virtio *v)
{
	if (v->ops->reset)
		v->ops->reset(v);
	/* The generation stays: it counts over the device's life. */
	v->s.driver_features = 0;
	v->s.status = v->s.features_select = v->s.driver_features_select = v->s.queue_select = 0;
	__atomic_store_n(&v->s.interrupt_status, 0, __ATOMIC_SEQ_CST);
	memset(v->s.queue, 0, sizeof(v->s.queue));
	v->why = NULL;
}

static void write_status(struct virtio *v, uint32_t value)
{
	uint32_t added;

	value &= VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER | VIRTIO_CONFIG_S_DRIVER_OK |
		 VIRTIO_CONFIG_S_FEATURES_OK | VIRTIO_CONFIG_S_FAILED;
	if (value == 0) {
		reset(v);
		return;
	}
	/* Bits are only added (2.1.1); NEEDS_RESET is the device's. */
	if ((v->s.status & ~(uint32_t)VIRTIO_CONFIG_S_NEEDS_RESET) & ~value)
		return;
	added = value & ~v->s.status;
	/* The driver reads FEATURES_OK back: it stays clear when the features do not do (3.1.1). */
	if ((added & VIRTIO_CONFIG_S_FEATURES_OK) &&
	    ((v->s.driver_features & ~offered(v)) || !(v->s.driver_features & VIRTIO_F_VERSION_1_BIT)))
		added &= ~(uint32_t)(VIRTIO_CONFIG_S_FEATURES_OK | VIRTIO_CONFIG_S_DRIVER_OK);
	if ((added & VIRTIO_CONFIG_S_DRIVER_OK) && !((v->s.status | added) & VIRTIO_CONFIG_S_FEATURES_OK))
		added &= ~(uint32_t)VIRTIO_CONFIG_S_DRIVER_OK;
	v->s.status |= added;
}

static void write_ready(struct virtio *v, struct virtqueue *vq, uint32_t value)
{
	if (value == 0) {
		vq->ready = 0;
		return;
	}
	if (vq->ready || (v->s.status & VIRTIO_CONFIG_S_NEEDS_RESET))
		return;
	if (vq->size == 0) {
		virtio_break(v, "a queue was made ready without a valid size");
		return;
	}
	vq->ready = 1;
	vq->broken = 0;
	vq->next_avail = vq->next_used = 0;
}

static void set_half(uint64_t *to, uint32_t value, bool high)
{
	*to = high ? (*to & UINT32_MAX) | (uint64_t)value << 32 : (*to & ~(uint64_t)UINT32_MAX) | value;
}

static void write_queue(struct virtio *v, struct virtqueue *vq, uint64_t offset, uint32_t value)
{
	if (offset == VIRTIO_MMIO_QUEUE_READY) {
		write_ready(v, vq, value);
		return;
	}
	if (vq->ready) /* a live queue does not move */
		return;
	switch (offset) {
	case VIRTIO_MMIO_QUEUE_NUM:
		vq->size = value <= VIRTIO_QUEUE_SIZE_MAX && (value & (value - 1)) == 0 ? (uint16_t)value : 0;
		break;
	case VIRTIO_MMIO_QUEUE_DESC_LOW:
	case VIRTIO_MMIO_QUEUE_DESC_HIGH:
		set_half(&vq->desc, value, offset == VIRTIO_MMIO_QUEUE_DESC_HIGH);
		break;
	case VIRTIO_MMIO_QUEUE_AVAIL_LOW:
	case VIRTIO_MMIO_QUEUE_AVAIL_HIGH:
		set_half(&vq->avail, value, offset == VIRTIO_MMIO_QUEUE_AVAIL_HIGH);
		break;
	case VIRTIO_MMIO_QUEUE_USED_LOW:
	case VIRTIO_MMIO_QUEUE_USED_HIGH:
		set_half(&vq->used, value, offset == VIRTIO_MMIO_QUEUE_USED_HIGH);
		break;
	}
}

static int write_register(struct virtio *v, uint64_t offset, uint32_t value)
{
	struct virtqueue *vq = selected(v);

	switch (offset) {
	case VIRTIO_MMIO_DEVICE_FEATURES_SEL:
		v->s.features_select = value;
		break;
	case VIRTIO_MMIO_DRIVER_FEATURES_SEL:
		v->s.driver_features_select = value;
		break;
	case VIRTIO_MMIO_DRIVER_FEATURES:
		if (!(v->s.status & VIRTIO_CONFIG_S_FEATURES_OK) && v->s.driver_features_select < 2)
			set_half(&v->s.driver_features, value, v->s.driver_features_select == 1);
		break;
	case VIRTIO_MMIO_QUEUE_SEL:
		v->s.queue_select = value;
		break;
	case VIRTIO_MMIO_QUEUE_NOTIFY:
		return value < v->ops->queues ? (int)value : -1;
	case VIRTIO_MMIO_STATUS:
		write_status(v, value);
		break;
	default:
		if (vq)
			write_queue(v, vq, offset, value);
	}
	return -1;
}

int virtio_mmio_write(struct virtio *v, uint64_t offset, const void *data, unsigned n)
{
	uint32_t value;
	int kick;

	/* No device here has configuration that a driver may write. */
	if (offset >= VIRTIO_MMIO_CONFIG || n != sizeof(value) || (offset & 3))
		return -1;
	memcpy(&value, data, sizeof(value));
	if (offset == VIRTIO_MMIO_INTERRUPT_ACK) {
		__atomic_and_fetch(&v->s.interrupt_status, ~value, __ATOMIC_SEQ_CST);
		return -1;
	}
	pthread_mutex_lock(&v->lock);
	kick = write_register(v, offset, value);
	pthread_mutex_unlock(&v->lock);
	return kick;
}

void virtio_kick(struct virtio *v, unsigned q)
{
	pthread_mutex_lock(&v->lock);
	if (q < v->ops->queues && (v->s.status & VIRTIO_CONFIG_S_DRIVER_OK) && v->s.queue[q].ready)
		v->ops->kick(v, q);
	pthread_mutex_unlock(&v->lock);
}

bool virtio_saved_valid(const struct virtio *v, const struct virtio_saved *s)
{
	if (s->driver_features & ~offered(v))
		return false;
	for (unsigned i = 0; i < VIRTIO_QUEUES_MAX; i++) {
		const struct virtqueue *q = &s->queue[i];

		if (q->ready > 1 || q->broken > 1 || q->size > VIRTIO_QUEUE_SIZE_MAX || (q->size & (q->size - 1)))
			return false;
		if (q->ready && (i >= v->ops->queues || q->size == 0))
			return false;
	}
	return true;
}
