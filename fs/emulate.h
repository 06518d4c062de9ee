/* SPDX-License-Identifier: Apache-2.0 */
/* What the emulated host needs of this one: emulate.c decides, check.c says it. */
#ifndef FS_EMULATE_H
#define FS_EMULATE_H

#include <vmenv/util.h>

/* The path of qemu-system-x86_64, malloc'ed, or NULL. */
char *emulate_find_qemu(void);
/* The memory it would get, by what is available; 0: too little. */
uint64_t emulate_memory_mb(uint64_t *available);

#endif
