/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vmenv-bench: all figures from one run on one KVM host.
 *   vmenv-bench MOUNT SMALL BIG [QEMU KERNEL INITRD DISK WORK]
 * SMALL and BIG are ready templates that differ in memory_mb only. Without QEMU the peer is left out.
 */
#include "ours.h"

#define ROUNDS 100
#define FORK_ROUNDS 20
#define PEER_ROUNDS 10
#define DIRTY_MB 64

static int failed(const char *what, int r)
{
	fprintf(stderr, "bench: %s: %s\n", what, strerror(-r));
	return 1;
}

int main(int argc, char **argv)
{
	struct samples floor = { 0 }, create = { 0 }, first = { 0 }, next = { 0 }, kb = { 0 }, pause = { 0 }, forked = { 0 }, big_pause = { 0 },
		       big_forked = { 0 }, peer = { 0 };
	double per_second = 0, peer_kb = 0, goal;
	int r;

	if (argc != 4 && argc != 9) {
		fprintf(stderr, "usage: vmenv-bench MOUNT SMALL BIG [QEMU KERNEL INITRD DISK WORK]\n");
		return 2;
	}
	r = bench_floor(ROUNDS, 256, &floor);
	if (r)
		return failed("floor", r);
	samples_print("floor: fork + VM + irqchip + vCPU + first exit", &floor);
	r = ours_create(argv[1], argv[2], ROUNDS, &create, &first, &next, &kb);
	if (r)
		return failed("create", r);
	samples_print("create", &create);
	samples_print("create to first exec result", &first);
	samples_print("one exec, machine warm", &next);
	printf("%-52s p50 %9.0f KiB  max %8.0f KiB\n", "private memory of an idle clone", samples_percentile(&kb, 50), samples_percentile(&kb, 100));
	r = ours_at_once(argv[1], argv[2], &per_second);
	if (r)
		return failed("64 creates at once", r);
	printf("%-52s %.1f per second\n", "64 creates asked at once", per_second);
	r = ours_fork(argv[1], argv[2], FORK_ROUNDS, DIRTY_MB, &pause, &forked);
	if (r)
		return failed("fork", r);
	samples_print("fork, 64 MB dirty: parent's pause", &pause);
	samples_print("fork, 64 MB dirty: to child's first exec result", &forked);
	r = ours_fork(argv[1], argv[3], FORK_ROUNDS, DIRTY_MB, &big_pause, &big_forked);
	if (r)
		return failed("fork of the bigger machine", r);
	samples_print("same, 4 times the memory: parent's pause", &big_pause);
	samples_print("same, 4 times the memory: to first exec result", &big_forked);
	goal = 3 * samples_percentile(&floor, 50) + samples_percentile(&next, 50);
	printf("%-52s %.2f\n", "create to first exec / (3 floors + one exec)", samples_percentile(&first, 50) / goal);
	printf("%-52s %.2f\n", "pause, bigger machine / smaller", samples_percentile(&big_pause, 50) / samples_percentile(&pause, 50));
	if (argc == 9) {
		struct peer_options o = { argv[4], argv[5], argv[6], argv[7], argv[8], 256, PEER_ROUNDS };

		r = bench_qemu(&o, &peer, &peer_kb);
		if (r)
			return failed("QEMU", r);
		samples_print("QEMU: restore to first command's result", &peer);
		printf("%-52s %9.0f KiB\n", "QEMU: private memory of an idle clone", peer_kb);
		printf("%-52s %.1f\n", "QEMU restore / our create to first exec", samples_percentile(&peer, 50) / samples_percentile(&first, 50));
	}
	return 0;
}
