/* SPDX-License-Identifier: Apache-2.0 */
/* What no machine that is made by fork(2) can be quicker than: the kernel's own part of it, with nothing restored. */
#include <linux/kvm.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "bench.h"

#define DIRTY_PAGES 1024 /* of the parent: page tables that fork has to copy */

/* out 0x10, al; hlt: in real mode at 0x1000. */
static const uint8_t code[] = { 0xe6, 0x10, 0xf4 };

static int first_exit(uint8_t *ram, uint64_t bytes)
{
	AUTO_CLOSE int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);
	struct kvm_userspace_memory_region slot = { .memory_size = bytes, .userspace_addr = (uintptr_t)ram };
	struct kvm_regs regs = { .rip = 0x1000, .rflags = 2 };
	struct kvm_sregs sregs;
	struct kvm_run *run;
	int vm, vcpu, size;

	if (kvm < 0)
		return -errno;
	vm = ioctl(kvm, KVM_CREATE_VM, 0);
	size = ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0);
	if (vm < 0 || ioctl(vm, KVM_CREATE_IRQCHIP, 0) < 0 || ioctl(vm, KVM_SET_USER_MEMORY_REGION, &slot) < 0)
		return -errno;
	vcpu = ioctl(vm, KVM_CREATE_VCPU, 0);
	if (vcpu < 0)
		return -errno;
	run = mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
	if (run == MAP_FAILED || ioctl(vcpu, KVM_GET_SREGS, &sregs) < 0)
		return -errno;
	sregs.cs.base = 0;
	sregs.cs.selector = 0;
	if (ioctl(vcpu, KVM_SET_SREGS, &sregs) < 0 || ioctl(vcpu, KVM_SET_REGS, &regs) < 0 || ioctl(vcpu, KVM_RUN, 0) < 0)
		return -errno;
	return run->exit_reason == KVM_EXIT_IO ? 0 : -EIO;
}

int bench_floor(unsigned rounds, unsigned memory_mb, struct samples *s)
{
	uint64_t bytes = (uint64_t)memory_mb << 20;
	AUTO_CLOSE int file = memfd_create("floor", MFD_CLOEXEC);
	uint8_t *ram;

	if (file < 0 || ftruncate(file, (off_t)bytes) < 0)
		return -errno;
	ram = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
	if (ram == MAP_FAILED)
		return -errno;
	for (unsigned i = 0; i < DIRTY_PAGES; i++)
		ram[(uint64_t)i * 4096] = 1;
	memcpy(ram + 0x1000, code, sizeof(code));
	for (unsigned i = 0; i < rounds; i++) {
		int pipes[2], status = 0;
		double start;
		char done;
		pid_t pid;

		if (pipe2(pipes, O_CLOEXEC) < 0)
			return -errno;
		start = ms_now();
		pid = fork();
		if (pid == 0) {
			int r = first_exit(ram, bytes);

			if (r == 0 && write(pipes[1], "x", 1) != 1)
				r = -EIO;
			_exit(r ? 1 : 0);
		}
		close(pipes[1]);
		if (pid > 0 && read(pipes[0], &done, 1) == 1)
			samples_add(s, ms_now() - start);
		close(pipes[0]);
		if (pid < 0 || waitpid(pid, &status, 0) != pid || status != 0)
			return -EIO;
	}
	munmap(ram, bytes);
	return 0;
}
