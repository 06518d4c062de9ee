/* SPDX-License-Identifier: Apache-2.0 */
/* virtio-rng (virtio 1.2, 5.4): the guest's entropy is the host's getrandom(2). */
#ifndef VMM_RNG_H
#define VMM_RNG_H

#include "virtio.h"

struct rng;

struct rng *rng_new(const struct memory *m);
void rng_free(struct rng *r);
struct virtio *rng_virtio(struct rng *r);

#endif
