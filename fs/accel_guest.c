/* SPDX-License-Identifier: Apache-2.0 */
#include "accel_guest.h"

#include <linux/kvm.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

#define MEMORY (2u << 20)
#define PML4 0x1000u
#define PDPT 0x2000u
#define PAGE_DIRECTORY 0x3000u
#define STACK 0x7000u
#define CODE 0x8000u
#define RESULT 0x9000u
#define PORT 0x42u
#define CPUID_ENTRIES 256

#define EFER_LME (1u << 8)
#define EFER_LMA (1u << 10)
#define EFER_NXE (1u << 11)
#define CR4_PAE (1u << 5)
#define CR4_OSFXSR (1u << 9)
#define CR4_OSXMMEXCPT (1u << 10)
#define CR0_LONG_MODE 0x80010033u /* PG, WP, NE, ET, MP, PE */

static const uint64_t number = 0x1122334455667788;

/* Doubles `number` in an SSE2 register, stores it to memory, writes its low byte to a port, halts. */
static void write_guest(unsigned char *m)
{
	static const unsigned char code[] = {
		0x48, 0xb8, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, /* mov $number, %rax */
		0x66, 0x48, 0x0f, 0x6e, 0xc0,				    /* movq %rax, %xmm0 */
		0x66, 0x0f, 0xd4, 0xc0,					    /* paddq %xmm0, %xmm0 */
		0x66, 0x48, 0x0f, 0x7e, 0xc0,				    /* movq %xmm0, %rax */
		0x48, 0xa3, 0x00, 0x90, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, /* mov %rax, RESULT */
		0xe6, PORT,						    /* out %al, $PORT */
		0xf4,							    /* hlt */
	};
	const uint64_t pml4 = PDPT | 3, pdpt = PAGE_DIRECTORY | 3, large_page = 0x83;

	memcpy(m + PML4, &pml4, sizeof(pml4));
	memcpy(m + PDPT, &pdpt, sizeof(pdpt));
	memcpy(m + PAGE_DIRECTORY, &large_page, sizeof(large_page));
	memcpy(m + CODE, code, sizeof(code));
}

static int set_registers(int kvm, int vcpu, struct err *e)
{
	AUTO_FREE struct kvm_cpuid2 *cpuid = calloc(1, sizeof(*cpuid) + CPUID_ENTRIES * sizeof(cpuid->entries[0]));
	struct kvm_segment code = {
		.limit = 0xffffffff, .selector = 8, .type = 11, .present = 1, .s = 1, .l = 1, .g = 1
	};
	struct kvm_segment data = {
		.limit = 0xffffffff, .selector = 16, .type = 3, .present = 1, .s = 1, .db = 1, .g = 1
	};
	struct kvm_regs regs = { .rip = CODE, .rsp = STACK, .rflags = 2 };
	struct kvm_sregs s;

	if (!cpuid)
		return err_set(e, ENOMEM, "out of memory");
	cpuid->nent = CPUID_ENTRIES;
	if (ioctl(kvm, KVM_GET_SUPPORTED_CPUID, cpuid) < 0 || ioctl(vcpu, KVM_SET_CPUID2, cpuid) < 0)
		return err_set(e, errno, "KVM refuses its own CPUID: %s", strerror(errno));
	if (ioctl(vcpu, KVM_GET_SREGS, &s) < 0)
		return err_set(e, errno, "KVM_GET_SREGS fails: %s", strerror(errno));
	s.cs = code;
	s.ds = s.es = s.fs = s.gs = s.ss = data;
	s.cr3 = PML4;
	s.cr4 = CR4_PAE | CR4_OSFXSR | CR4_OSXMMEXCPT;
	s.efer = EFER_LME | EFER_LMA | EFER_NXE;
	s.cr0 = CR0_LONG_MODE;
	if (ioctl(vcpu, KVM_SET_SREGS, &s) < 0 || ioctl(vcpu, KVM_SET_REGS, &regs) < 0)
		return err_set(e, errno, "KVM refuses a vCPU in 64-bit mode: %s", strerror(errno));
	return 0;
}

static int run(int vcpu, struct kvm_run *run_page, uint32_t expected, struct err *e)
{
	while (ioctl(vcpu, KVM_RUN, 0) < 0)
		if (errno != EINTR)
			return err_set(e, errno, "a vCPU does not run: %s", strerror(errno));
	if (run_page->exit_reason != expected)
		return err_set(e, EIO, "64-bit code in it does not run (KVM exit %u, not %u)", run_page->exit_reason,
			       expected);
	return 0;
}

int accel_guest_run(int kvm, struct err *e)
{
	AUTO_CLOSE int vm = ioctl(kvm, KVM_CREATE_VM, 0), vcpu = -1;
	struct kvm_userspace_memory_region slot = { .memory_size = MEMORY };
	const uint64_t doubled = 2 * number;
	struct kvm_run *run_page;
	unsigned char *memory;
	int size, r;

	if (vm < 0)
		return err_set(e, errno, "KVM_CREATE_VM fails: %s", strerror(errno));
	vcpu = ioctl(vm, KVM_CREATE_VCPU, 0);
	size = ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0);
	if (vcpu < 0 || size < (int)sizeof(*run_page))
		return err_set(e, errno ? errno : EIO, "KVM_CREATE_VCPU fails: %s", strerror(errno));
	/* The mappings go with the process. */
	run_page = mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
	memory = mmap(NULL, MEMORY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (run_page == MAP_FAILED || memory == MAP_FAILED)
		return err_set(e, errno, "cannot map a guest's memory: %s", strerror(errno));
	write_guest(memory);
	slot.userspace_addr = (uintptr_t)memory;
	if (ioctl(vm, KVM_SET_USER_MEMORY_REGION, &slot) < 0)
		return err_set(e, errno, "KVM_SET_USER_MEMORY_REGION fails: %s", strerror(errno));
	r = set_registers(kvm, vcpu, e);
	if (r < 0)
		return r;
	r = run(vcpu, run_page, KVM_EXIT_IO, e);
	if (r < 0)
		return r;
	if (run_page->io.direction != KVM_EXIT_IO_OUT || run_page->io.port != PORT || run_page->io.size != 1 ||
	    ((unsigned char *)run_page)[run_page->io.data_offset] != (doubled & 0xff) ||
	    memcmp(memory + RESULT, &doubled, sizeof(doubled)) != 0)
		return err_set(e, EIO, "64-bit code in it computes something wrong");
	return run(vcpu, run_page, KVM_EXIT_HLT, e);
}
