/* SPDX-License-Identifier: Apache-2.0 */
/* The benchmark: what is measured, and how a series of samples is told. Runs inside one KVM host, on a local mount. */
#ifndef BENCH_H
#define BENCH_H

#include <vmenv/util.h>

struct samples {
	double *ms;
	unsigned count, room;
};
void samples_add(struct samples *s, double ms);
/* The sample below which `percent` of all lie; sorts. 0 without samples. */
double samples_percentile(struct samples *s, double percent);
/* "name  p50 ms  p99 ms  min  max  (n)"; unit is ms unless told. */
void samples_print(const char *name, struct samples *s);
void samples_free(struct samples *s);
static inline double ms_now(void)
{
	return (double)now_ns(CLOCK_MONOTONIC) / 1e6;
}

/* The floor: fork + KVM_CREATE_VM + irqchip + memslot + one vCPU + first exit, over a private mapping of memory_mb. */
int bench_floor(unsigned rounds, unsigned memory_mb, struct samples *s);

struct peer_options {
	const char *qemu, *kernel, *initrd, *disk, *work; /* work: a folder for the state */
	unsigned memory_mb, rounds;
};
/* QEMU: boots once, warms up, saves with x-ignore-shared; then restores `rounds` times to the same first command. */
int bench_qemu(const struct peer_options *o, struct samples *restore, double *private_kb);

#endif
