/* SPDX-License-Identifier: Apache-2.0 */
/* A virtio driver for tests: it lives in a piece of memory that a device takes for the guest's. */
#ifndef TESTS_DRIVER_H
#define TESTS_DRIVER_H

#include <assert.h>
#include <linux/virtio_config.h>
#include <linux/virtio_mmio.h>
#include <linux/virtio_ring.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "../../vmm/virtio.h"

#undef NDEBUG
#define CHECK(what)                                                                                  \
	do {                                                                                         \
		if (!(what)) {                                                                       \
			fprintf(stderr, "%s:%d: %s: not so: %s\n", __FILE__, __LINE__, __func__, #what); \
			abort();                                                                     \
		}                                                                                    \
	} while (0)

#define GUEST_BYTES (4u << 20)
#define DRIVER_SIZE 64 /* descriptors a queue */
#define BUFFERS_AT 0x100000u

struct driver_queue {
	struct vring_desc *desc;
	struct vring_avail *avail;
	struct vring_used *used;
	uint16_t seen; /* used entries */
};

struct driver {
	struct memory memory;
	struct virtio *v;
	struct driver_queue q[VIRTIO_QUEUES_MAX];
	bool edge; /* an interrupt came */
};

static inline void driver_memory(struct driver *d)
{
	memset(d, 0, sizeof(*d));
	d->memory.ram_bytes = GUEST_BYTES;
	d->memory.ram = mmap(NULL, GUEST_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(d->memory.ram != MAP_FAILED);
}

static inline void driver_edge(void *arg, unsigned gsi)
{
	((struct driver *)arg)->edge = true;
}

static inline uint32_t driver_read(struct driver *d, unsigned reg)
{
	uint32_t x;

	virtio_mmio_read(d->v, reg, &x, sizeof(x));
	return x;
}

static inline int driver_write(struct driver *d, unsigned reg, uint32_t x)
{
	return virtio_mmio_write(d->v, reg, &x, sizeof(x));
}

static inline uint64_t queue_at(unsigned q)
{
	return 0x10000u * (q + 1);
}

static inline void driver_queue_up(struct driver *d, unsigned q, unsigned size)
{
	uint64_t at = queue_at(q);

	driver_write(d, VIRTIO_MMIO_QUEUE_SEL, q);
	CHECK(driver_read(d, VIRTIO_MMIO_QUEUE_NUM_MAX) >= size);
	driver_write(d, VIRTIO_MMIO_QUEUE_NUM, size);
	driver_write(d, VIRTIO_MMIO_QUEUE_DESC_LOW, (uint32_t)at);
	driver_write(d, VIRTIO_MMIO_QUEUE_AVAIL_LOW, (uint32_t)at + 0x2000);
	driver_write(d, VIRTIO_MMIO_QUEUE_USED_LOW, (uint32_t)at + 0x4000);
	memset(d->memory.ram + at, 0, 0x6000);
	d->q[q] = (struct driver_queue){ (void *)(d->memory.ram + at), (void *)(d->memory.ram + at + 0x2000),
					 (void *)(d->memory.ram + at + 0x4000), 0 };
	driver_write(d, VIRTIO_MMIO_QUEUE_READY, 1);
	CHECK(driver_read(d, VIRTIO_MMIO_QUEUE_READY) == 1);
}

/* Reset, negotiation, queues, DRIVER_OK. */
static inline void driver_up(struct driver *d, struct virtio *v)
{
	d->v = v;
	v->irq = (struct irq){ driver_edge, d };
	driver_write(d, VIRTIO_MMIO_STATUS, 0);
	driver_write(d, VIRTIO_MMIO_STATUS, VIRTIO_CONFIG_S_ACKNOWLEDGE);
	driver_write(d, VIRTIO_MMIO_STATUS, VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER);
	driver_write(d, VIRTIO_MMIO_DRIVER_FEATURES_SEL, 1);
	driver_write(d, VIRTIO_MMIO_DRIVER_FEATURES, 1);
	driver_write(d, VIRTIO_MMIO_STATUS, 11);
	CHECK(driver_read(d, VIRTIO_MMIO_STATUS) == 11);
	for (unsigned q = 0; q < v->ops->queues; q++)
		driver_queue_up(d, q, DRIVER_SIZE);
	driver_write(d, VIRTIO_MMIO_STATUS, 15);
	CHECK(driver_read(d, VIRTIO_MMIO_STATUS) == 15);
}

static inline void driver_desc(struct driver *d, unsigned q, unsigned i, uint64_t addr, uint32_t len, unsigned flags, unsigned next)
{
	d->q[q].desc[i] = (struct vring_desc){ addr, len, (uint16_t)flags, (uint16_t)next };
}

static inline void driver_post(struct driver *d, unsigned q, unsigned head)
{
	struct vring_avail *a = d->q[q].avail;

	a->ring[a->idx % DRIVER_SIZE] = (uint16_t)head;
	__atomic_store_n(&a->idx, (uint16_t)(a->idx + 1), __ATOMIC_RELEASE);
}

/* The next used element, or false. */
static inline bool driver_used(struct driver *d, unsigned q, struct vring_used_elem *e)
{
	struct driver_queue *dq = &d->q[q];

	if (__atomic_load_n(&dq->used->idx, __ATOMIC_ACQUIRE) == dq->seen)
		return false;
	*e = dq->used->ring[dq->seen++ % DRIVER_SIZE];
	return true;
}

static inline bool driver_interrupted(struct driver *d)
{
	bool was = d->edge;

	d->edge = false;
	if (was)
		driver_write(d, VIRTIO_MMIO_INTERRUPT_ACK, driver_read(d, VIRTIO_MMIO_INTERRUPT_STATUS));
	return was;
}

static inline bool driver_broken(struct driver *d)
{
	return driver_read(d, VIRTIO_MMIO_STATUS) & VIRTIO_CONFIG_S_NEEDS_RESET;
}

#endif
