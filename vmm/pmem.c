/* SPDX-License-Identifier: Apache-2.0 */
/*
 * virtio-pmem. Trusted: nothing. A kick serves at most a queue's worth of chains; a request of another type than flush is
 * answered with an error, one without room for the answer breaks the device.
 */
#include "pmem.h"

#include <linux/virtio_pmem.h>
#include <stdlib.h>
#include <string.h>

struct pmem {
	struct virtio v;
	struct virtio_pmem_config config;
	struct chain chain; /* the one in hand; too large for a small stack */
};

static const void *pmem_config(struct virtio *v, size_t *bytes)
{
	struct pmem *p = (struct pmem *)v;

	*bytes = sizeof(p->config);
	return &p->config;
}

static void pmem_kick(struct virtio *v, unsigned q)
{
	struct pmem *p = (struct pmem *)v;
	struct chain *c = &p->chain;
	bool given = false;

	for (unsigned i = 0; i < VIRTIO_QUEUE_SIZE_MAX && virtqueue_take(v, q, c) == 1; i++) {
		struct virtio_pmem_req request = { .type = UINT32_MAX };
		struct virtio_pmem_resp response;

		chain_read(c, 0, &request, sizeof(request));
		response.ret = request.type == VIRTIO_PMEM_REQ_TYPE_FLUSH ? 0 : 1;
		if (chain_write(c, 0, &response, sizeof(response)) != sizeof(response)) {
			virtio_break(v, "a flush request has no room for its answer");
			break;
		}
		virtqueue_give(v, q, c, sizeof(response));
		given = true;
	}
	if (given)
		virtqueue_interrupt(v, q);
}

static const struct virtio_ops pmem_ops = {
	.name = "pmem",
	.id = VIRTIO_ID_PMEM,
	.queues = 1,
	.config = pmem_config,
	.kick = pmem_kick,
};

struct pmem *pmem_new(const struct memory *m)
{
	struct pmem *p = calloc(1, sizeof(*p));

	if (!p)
		return NULL;
	virtio_init(&p->v, &pmem_ops, m);
	p->config.start = m->disk_gpa;
	p->config.size = m->disk_bytes;
	return p;
}

void pmem_free(struct pmem *p)
{
	if (!p)
		return;
	pthread_mutex_destroy(&p->v.lock);
	free(p);
}

struct virtio *pmem_virtio(struct pmem *p)
{
	return &p->v;
}
