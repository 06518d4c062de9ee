/* SPDX-License-Identifier: Apache-2.0 */
/*
 * virtio-pmem (virtio 1.2, 5.19): the disk is a memory slot that the guest mounts with DAX; what the guest writes is in
 * the mapping at once, so a flush has nothing to wait for and is answered at once.
 */
#ifndef VMM_PMEM_H
#define VMM_PMEM_H

#include "virtio.h"

struct pmem;

struct pmem *pmem_new(const struct memory *m);
void pmem_free(struct pmem *p);
struct virtio *pmem_virtio(struct pmem *p);

#endif
