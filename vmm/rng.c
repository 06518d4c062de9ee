/* SPDX-License-Identifier: Apache-2.0 */
/*
 * virtio-rng. Trusted: nothing. A chain gets at most RNG_CHAIN_MAX bytes whatever its length (the device may use less than
 * it was offered, 5.4.6.1), and a kick serves at most a queue's worth of chains. Readable buffers are ignored.
 */
#include <stdlib.h>
#include <sys/random.h>

#include "rng.h"
#include <vmenv/util.h>

#define RNG_CHAIN_MAX 4096

struct rng {
	struct virtio v;
	struct chain chain; /* the one in hand; too large for a small stack */
};

static void rng_kick(struct virtio *v, unsigned q)
{
	struct rng *r = (struct rng *)v;
	struct chain *c = &r->chain;
	bool given = false;

	for (unsigned i = 0; i < VIRTIO_QUEUE_SIZE_MAX && virtqueue_take(v, q, c) == 1; i++) {
		uint32_t filled = 0;

		for (unsigned b = 0; b < c->writable && filled < RNG_CHAIN_MAX; b++) {
			struct iovec *io = &c->iov[c->readable + b];
			ssize_t n = getrandom(io->iov_base, MIN(io->iov_len, RNG_CHAIN_MAX - filled), 0);

			if (n <= 0)
				break;
			filled += (uint32_t)n;
			if ((size_t)n < io->iov_len) /* the used length counts from the front, without gaps */
				break;
		}
		virtqueue_give(v, q, c, filled);
		given = true;
	}
	if (given)
		virtqueue_interrupt(v, q);
}

static const struct virtio_ops rng_ops = {
	.name = "rng",
	.id = VIRTIO_ID_RNG,
	.queues = 1,
	.kick = rng_kick,
};

struct rng *rng_new(const struct memory *m)
{
	struct rng *r = calloc(1, sizeof(*r));

	if (r)
		virtio_init(&r->v, &rng_ops, m);
	return r;
}

void rng_free(struct rng *r)
{
	if (!r)
		return;
	pthread_mutex_destroy(&r->v.lock);
	free(r);
}

struct virtio *rng_virtio(struct rng *r)
{
	return &r->v;
}
