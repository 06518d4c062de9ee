/* SPDX-License-Identifier: Apache-2.0 */
/* Loads a bzImage by the 64-bit boot protocol (Linux, Documentation/arch/x86/boot.rst). */
#include "boot.h"

#include <asm/bootparam.h>
#include <linux/kvm.h>
#include <sys/stat.h>

#include "layout.h"

#define HEADER_END 0x290u /* no version of the protocol has a longer header than the zero page has room for */
#define PROTOCOL_64BIT 0x20cu

#define E820_RAM 1u
#define E820_RESERVED 2u

#define CR0_PE 0x1ull
#define CR0_ET 0x10ull
#define CR0_NE 0x20ull
#define CR0_PG 0x80000000ull
#define CR4_PAE 0x20ull
#define EFER_LME 0x100ull
#define EFER_LMA 0x400ull
#define PTE_PRESENT_WRITE 0x3ull
#define PTE_HUGE 0x80ull

#define GDT_CODE 0x10u
#define GDT_DATA 0x18u

/* Reads exactly `bytes` at `offset` of the file into guest memory. */
static int read_into(const char *path, int fd, void *to, uint64_t bytes, uint64_t offset, struct err *e)
{
	uint8_t *p = to;

	while (bytes) {
		ssize_t n = pread(fd, p, MIN(bytes, 1u << 30), (off_t)offset);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return err_set(e, errno, "cannot read %s: %s", path, strerror(errno));
		if (n == 0)
			return err_set(e, EINVAL, "%s ends early", path);
		p += n;
		bytes -= (uint64_t)n;
		offset += (uint64_t)n;
	}
	return 0;
}

static int open_sized(const char *path, uint64_t *bytes, struct err *e)
{
	struct stat st;
	AUTO_CLOSE int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (fd < 0 || fstat(fd, &st) < 0)
		return err_set(e, errno, "cannot open %s: %s", path, strerror(errno));
	if (!S_ISREG(st.st_mode))
		return err_set(e, EINVAL, "%s is not a regular file", path);
	*bytes = (uint64_t)st.st_size;
	return steal_fd(&fd);
}

static uint64_t low_ram_end(const struct memory *m)
{
	return MIN(m->ram_bytes, RAM_HOLE_START);
}

static void e820_add(struct boot_params *p, uint64_t start, uint64_t end, uint32_t type)
{
	struct boot_e820_entry entry = { .addr = start, .size = end - start, .type = type };

	memcpy(&p->e820_table[p->e820_entries++], &entry, sizeof(entry));
}

static int load_kernel(const struct memory *m, const char *path, struct boot_params *p, uint64_t *start, uint64_t *end,
		       struct err *e)
{
	struct setup_header *h = &p->hdr;
	uint64_t bytes, setup, align;
	AUTO_CLOSE int fd = open_sized(path, &bytes, e);
	uint8_t head[HEADER_END];
	size_t header;
	int r;

	if (fd < 0)
		return fd;
	if (bytes < sizeof(head))
		return err_set(e, EINVAL, "%s is too short for a Linux kernel (bzImage)", path);
	r = read_into(path, fd, head, sizeof(head), 0, e);
	if (r < 0)
		return r;
	memcpy(h, head + 0x1f1, sizeof(*h));
	if (h->boot_flag != 0xaa55 || memcmp(&h->header, "HdrS", 4))
		return err_set(e, EINVAL, "%s is not a Linux kernel (bzImage)", path);
	if (h->version < PROTOCOL_64BIT || !(h->xloadflags & XLF_KERNEL_64) || !(h->loadflags & LOADED_HIGH))
		return err_set(e, EINVAL, "%s has no 64-bit entry point", path);
	/* The header's own length (the target of its jump) says how much of it is meant: newer fields are then zero. */
	header = 0x202u + head[0x201] - 0x1f1u;
	if (header < sizeof(*h))
		memset((uint8_t *)h + header, 0, sizeof(*h) - header);

	setup = ((uint64_t)(h->setup_sects ? h->setup_sects : 4) + 1) * 512;
	if (setup >= bytes)
		return err_set(e, EINVAL, "%s ends early", path);
	align = h->kernel_alignment ? h->kernel_alignment : 0x200000;
	if (align & (align - 1))
		return err_set(e, EINVAL, "%s wants an impossible alignment", path);
	*start = h->pref_address >= HIGH_RAM_START ? h->pref_address : 0x1000000;
	*end = *start + MAX((uint64_t)h->init_size, bytes - setup);
	if (*start % align || *end < *start || *end > low_ram_end(m))
		return err_set(e, ENOMEM, "%llu MB of memory are too little for this kernel, which needs %llu MB to start",
			       (unsigned long long)(m->ram_bytes >> 20), (unsigned long long)((*end + 0xfffff) >> 20));
	return read_into(path, fd, memory_at(m, *start, bytes - setup), bytes - setup, setup, e);
}

/* As high as the kernel allows, so that it is out of the way of the decompression. */
static int load_initrd(const struct memory *m, const char *path, struct boot_params *p, uint64_t kernel_end, struct err *e)
{
	uint64_t bytes, top = low_ram_end(m), start;
	AUTO_CLOSE int fd = open_sized(path, &bytes, e);

	if (fd < 0)
		return fd;
	if (bytes == 0)
		return 0;
	if (!(p->hdr.xloadflags & XLF_CAN_BE_LOADED_ABOVE_4G))
		top = MIN(top, (uint64_t)p->hdr.initrd_addr_max + 1);
	if (bytes > top || ((top - bytes) & ~(PAGE_BYTES - 1ull)) < kernel_end)
		return err_set(e, ENOMEM, "%llu MB of memory are too little for kernel and initramfs (%llu MB)",
			       (unsigned long long)(m->ram_bytes >> 20), (unsigned long long)(bytes >> 20));
	start = (top - bytes) & ~(PAGE_BYTES - 1ull);
	p->hdr.ramdisk_image = (uint32_t)start;
	p->hdr.ramdisk_size = (uint32_t)bytes;
	return read_into(path, fd, memory_at(m, start, bytes), bytes, 0, e);
}

static void write_gdt(const struct memory *m)
{
	uint64_t gdt[4] = {
		[GDT_CODE / 8] = 0x00af9b000000ffff, /* 64-bit code */
		[GDT_DATA / 8] = 0x00cf93000000ffff,
	};

	memcpy(memory_at(m, BOOT_GDT, sizeof(gdt)), gdt, sizeof(gdt));
}

static void write_page_tables(const struct memory *m)
{
	uint64_t *table = memory_at(m, BOOT_PAGE_TABLES, 6 * PAGE_BYTES);

	memset(table, 0, 6 * PAGE_BYTES);
	table[0] = (BOOT_PAGE_TABLES + PAGE_BYTES) | PTE_PRESENT_WRITE;
	for (uint64_t i = 0; i < 4; i++)
		table[512 + i] = (BOOT_PAGE_TABLES + (2 + i) * PAGE_BYTES) | PTE_PRESENT_WRITE;
	for (uint64_t i = 0; i < 4 * 512; i++)
		table[2 * 512 + i] = i << 21 | PTE_HUGE | PTE_PRESENT_WRITE;
}

/* All the BIOS there is: a write to the reset port. 16-bit code. */
static void write_bios(const struct memory *m)
{
	static const uint8_t code[] = {
		0xba, PORT_RESET & 0xff, PORT_RESET >> 8, /* mov dx, PORT_RESET */
		0xb0, RESET_VALUE,                        /* mov al, RESET_VALUE */
		0xee,                                     /* out dx, al */
		0xf4,                                     /* hlt */
		0xeb, 0xfd,                               /* jmp to the hlt */
	};

	memcpy(memory_at(m, BIOS_ENTRY, sizeof(code)), code, sizeof(code));
}

int boot_load(const struct memory *m, const char *kernel, const char *initrd, const char *cmdline, struct boot *b,
	      struct err *e)
{
	AUTO_FREE struct boot_params *p = calloc(1, sizeof(*p));
	size_t cmdline_bytes = strlen(cmdline) + 1;
	uint64_t start = 0, end = 0, limit;
	int r;

	if (!p)
		return err_set(e, ENOMEM, "out of memory");
	if (m->ram_bytes < 16u << 20)
		return err_set(e, EINVAL, "a machine needs at least 16 MB of memory");
	r = load_kernel(m, kernel, p, &start, &end, e);
	if (r < 0)
		return r;
	limit = p->hdr.cmdline_size ? p->hdr.cmdline_size : 255;
	if (cmdline_bytes > MIN(limit + 1, BOOT_CMDLINE_MAX))
		return err_set(e, EINVAL, "the kernel's command line is longer than %llu bytes",
			       (unsigned long long)MIN(limit, BOOT_CMDLINE_MAX - 1));
	if (initrd) {
		r = load_initrd(m, initrd, p, end, e);
		if (r < 0)
			return r;
	}

	p->hdr.type_of_loader = 0xff; /* no assigned number */
	p->hdr.cmd_line_ptr = (uint32_t)BOOT_CMDLINE;
	p->acpi_rsdp_addr = ACPI_START;
	e820_add(p, 0, LOW_RAM_END, E820_RAM);
	e820_add(p, LOW_RAM_END, HIGH_RAM_START, E820_RESERVED);
	e820_add(p, HIGH_RAM_START, low_ram_end(m), E820_RAM);
	if (m->ram_bytes > RAM_HOLE_START)
		e820_add(p, RAM_HIGH_START, RAM_HIGH_START + m->ram_bytes - RAM_HOLE_START, E820_RAM);
	memcpy(memory_at(m, BOOT_ZERO_PAGE, sizeof(*p)), p, sizeof(*p));
	memcpy(memory_at(m, BOOT_CMDLINE, cmdline_bytes), cmdline, cmdline_bytes);
	write_gdt(m);
	write_page_tables(m);
	write_bios(m);
	b->entry = start + 0x200;
	return 0;
}

void boot_registers(const struct boot *b, struct kvm_regs *r, struct kvm_sregs *s)
{
	struct kvm_segment code = {
		.limit = 0xffffffff, .selector = GDT_CODE, .type = 0xb, .present = 1, .s = 1, .l = 1, .g = 1,
	};
	struct kvm_segment data = {
		.limit = 0xffffffff, .selector = GDT_DATA, .type = 0x3, .present = 1, .s = 1, .db = 1, .g = 1,
	};

	memset(r, 0, sizeof(*r));
	r->rip = b->entry;
	r->rsi = BOOT_ZERO_PAGE;
	r->rflags = 2;
	s->cs = code;
	s->ds = s->es = s->ss = s->fs = s->gs = data;
	s->gdt.base = BOOT_GDT;
	s->gdt.limit = 4 * 8 - 1;
	s->idt.base = 0;
	s->idt.limit = 0;
	s->cr0 = CR0_PE | CR0_ET | CR0_NE | CR0_PG;
	s->cr3 = BOOT_PAGE_TABLES;
	s->cr4 = CR4_PAE;
	s->efer = EFER_LME | EFER_LMA;
}
