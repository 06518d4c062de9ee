/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Split virtqueues, device side (virtio 1.2, 2.7).
 *
 * Trusted: nothing in the rings or in struct virtqueue. The three areas are translated anew at each use, indices are
 * taken modulo a size that is checked, a chain is at most `size` descriptors long, and each descriptor is read once.
 * Past a limit the device breaks: DEVICE_NEEDS_RESET, and no queue of it moves until the driver resets it.
 */
#include <linux/virtio_config.h>
#include <linux/virtio_mmio.h>
#include <linux/virtio_ring.h>
#include <string.h>

#include "virtio.h"
#include <vmenv/util.h>

struct rings {
	const struct vring_desc *desc;
	struct vring_avail *avail;
	struct vring_used *used;
};

/* False if the queue is not to be touched. */
static bool rings_of(struct virtio *v, unsigned q, struct rings *r)
{
	uint32_t up = v->s.status & (VIRTIO_CONFIG_S_DRIVER_OK | VIRTIO_CONFIG_S_NEEDS_RESET);
	struct virtqueue *vq;

	if (q >= VIRTIO_QUEUES_MAX || up != VIRTIO_CONFIG_S_DRIVER_OK)
		return false;
	vq = &v->s.queue[q];
	if (!vq->ready || vq->broken)
		return false;
	if (vq->size == 0 || vq->size > VIRTIO_QUEUE_SIZE_MAX || (vq->size & (vq->size - 1)))
		goto bad;
	/* The rings are read and written as aligned words; the spec asks for this alignment (2.7). */
	if ((vq->desc & 15) || (vq->avail & 1) || (vq->used & 3))
		goto bad;
	r->desc = memory_at(v->memory, vq->desc, sizeof(struct vring_desc) * vq->size);
	r->avail = memory_at(v->memory, vq->avail, sizeof(struct vring_avail) + sizeof(uint16_t) * vq->size);
	r->used = memory_at(v->memory, vq->used, sizeof(struct vring_used) + sizeof(struct vring_used_elem) * vq->size);
	if (!r->desc || !r->avail || !r->used)
		goto bad;
	return true;
bad:
	vq->broken = 1;
	virtio_break(v, "a queue is not in memory");
	return false;
}

static void interrupt(struct virtio *v, uint32_t cause)
{
	__atomic_or_fetch(&v->s.interrupt_status, cause, __ATOMIC_SEQ_CST);
	/* Always an edge, also when the bit was set: a driver may acknowledge after it has looked at its queues. */
	irq_edge(&v->irq, v->gsi);
}

void virtio_break(struct virtio *v, const char *why)
{
	if (v->s.status & VIRTIO_CONFIG_S_NEEDS_RESET)
		return;
	v->why = why;
	v->s.status |= VIRTIO_CONFIG_S_NEEDS_RESET;
	if (v->s.status & VIRTIO_CONFIG_S_DRIVER_OK)
		interrupt(v, VIRTIO_MMIO_INT_CONFIG);
	if (v->ops->broke)
		v->ops->broke(v);
}

static int broken(struct virtio *v, unsigned q, const char *why)
{
	v->s.queue[q].broken = 1;
	virtio_break(v, why);
	return -EINVAL;
}

static int follow(struct virtio *v, unsigned q, const struct rings *r, struct chain *c)
{
	unsigned size = v->s.queue[q].size, at = c->head;

	for (unsigned steps = 0; steps < size; steps++) {
		/* One copy: the guest may be rewriting the table. */
		struct vring_desc d = *(const volatile struct vring_desc *)&r->desc[at];
		struct iovec *io = &c->iov[c->readable + c->writable];

		if (d.flags & ~(VRING_DESC_F_NEXT | VRING_DESC_F_WRITE))
			return broken(v, q, "a descriptor has flags that were not negotiated");
		io->iov_base = memory_at(v->memory, d.addr, d.len);
		io->iov_len = d.len;
		if (!io->iov_base)
			return broken(v, q, "a buffer is empty or not in memory");
		if (d.flags & VRING_DESC_F_WRITE) {
			c->writable++;
			c->writable_bytes += d.len;
		} else if (c->writable) {
			return broken(v, q, "a chain has a readable buffer after a writable one");
		} else {
			c->readable++;
			c->readable_bytes += d.len;
		}
		if (!(d.flags & VRING_DESC_F_NEXT))
			return 1;
		at = d.next;
		if (at >= size)
			return broken(v, q, "a descriptor's next is out of range");
	}
	return broken(v, q, "a chain is longer than its queue");
}

int virtqueue_take(struct virtio *v, unsigned q, struct chain *c)
{
	struct virtqueue *vq;
	struct rings r;
	uint16_t posted;
	int e;

	if (!rings_of(v, q, &r))
		return v->s.status & VIRTIO_CONFIG_S_NEEDS_RESET ? -EINVAL : 0;
	vq = &v->s.queue[q];
	/* Acquire: the ring entry and the descriptors were written before the index. */
	posted = __atomic_load_n(&r.avail->idx, __ATOMIC_ACQUIRE);
	if (posted == vq->next_avail)
		return 0;
	if ((uint16_t)(posted - vq->next_avail) > vq->size)
		return broken(v, q, "more chains are available than the queue holds");
	c->head = __atomic_load_n(&r.avail->ring[vq->next_avail & (vq->size - 1)], __ATOMIC_RELAXED);
	c->readable = c->writable = 0;
	c->readable_bytes = c->writable_bytes = 0;
	if (c->head >= vq->size)
		return broken(v, q, "a chain's head is out of range");
	e = follow(v, q, &r, c);
	if (e == 1)
		vq->next_avail++;
	return e;
}

void virtqueue_give(struct virtio *v, unsigned q, const struct chain *c, uint32_t written)
{
	struct virtqueue *vq;
	struct vring_used_elem *u;
	struct rings r;

	if (!rings_of(v, q, &r))
		return;
	vq = &v->s.queue[q];
	u = &r.used->ring[vq->next_used & (vq->size - 1)];
	u->id = c->head;
	u->len = written;
	vq->next_used++;
	/* Release: buffers and element are there before the index says so. */
	__atomic_store_n(&r.used->idx, vq->next_used, __ATOMIC_RELEASE);
}

void virtqueue_untake(struct virtio *v, unsigned q)
{
	v->s.queue[q].next_avail--;
}

bool virtqueue_interrupt(struct virtio *v, unsigned q)
{
	struct rings r;

	if (!rings_of(v, q, &r))
		return false;
	/*
	 * Full barrier: used->idx is written before the flag is read. The driver writes the flag, then reads used->idx; so
	 * one of the two sees the other and no chain is left unannounced.
	 */
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	if (__atomic_load_n(&r.avail->flags, __ATOMIC_RELAXED) & VRING_AVAIL_F_NO_INTERRUPT)
		return false;
	interrupt(v, VIRTIO_MMIO_INT_VRING);
	return true;
}

bool virtqueue_kicks(struct virtio *v, unsigned q, bool wanted)
{
	struct rings r;

	if (!rings_of(v, q, &r))
		return false;
	__atomic_store_n(&r.used->flags, wanted ? 0 : VRING_USED_F_NO_NOTIFY, __ATOMIC_RELAXED);
	/* As above, the other way round: the flag is written before avail->idx is read. */
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	return __atomic_load_n(&r.avail->idx, __ATOMIC_ACQUIRE) != v->s.queue[q].next_avail;
}

uint16_t virtqueue_posted(struct virtio *v, unsigned q)
{
	struct rings r;

	if (!rings_of(v, q, &r))
		return q < VIRTIO_QUEUES_MAX ? v->s.queue[q].next_avail : 0;
	return __atomic_load_n(&r.avail->idx, __ATOMIC_ACQUIRE);
}

/* Copies n bytes at offset `at` of `count` buffers; out: from the buffers to `flat`, else from it. */
static size_t copy(const struct iovec *iov, unsigned count, size_t at, uint8_t *flat, size_t n, bool out)
{
	size_t done = 0;

	for (unsigned i = 0; i < count && done < n; i++) {
		size_t part;

		if (at >= iov[i].iov_len) {
			at -= iov[i].iov_len;
			continue;
		}
		part = MIN(iov[i].iov_len - at, n - done);
		if (out)
			memcpy(flat + done, (uint8_t *)iov[i].iov_base + at, part);
		else
			memcpy((uint8_t *)iov[i].iov_base + at, flat + done, part);
		done += part;
		at = 0;
	}
	return done;
}

size_t chain_read(const struct chain *c, size_t at, void *to, size_t n)
{
	return copy(c->iov, c->readable, at, to, n, true);
}

size_t chain_write(const struct chain *c, size_t at, const void *from, size_t n)
{
	return copy(c->iov + c->readable, c->writable, at, (uint8_t *)(uintptr_t)from, n, false);
}
