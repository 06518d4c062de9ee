/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of a machine that need no KVM: ACPI tables, boot, the serial port, and saved state that is not believed. */
#include <assert.h>
#include <sys/mman.h>

#include "../../vmm/acpi.h"
#include "../../vmm/boot.h"
#include "../../vmm/serial.h"
#include "../../vmm/state.h"

static uint8_t sum(const uint8_t *p, size_t n)
{
	uint8_t s = 0;

	while (n--)
		s = (uint8_t)(s + *p++);
	return s;
}

static void check_table(const uint8_t *base, uint64_t gpa, uint64_t at, const char *signature)
{
	uint32_t n;

	assert(at >= gpa && at % 16 == 0);
	memcpy(&n, base + (at - gpa) + 4, 4);
	assert(memcmp(base + (at - gpa), signature, 4) == 0);
	assert(n >= 36 && sum(base + (at - gpa), n) == 0);
}

static void test_acpi(void)
{
	struct acpi_config c = { .vcpus = 8, .devices = 4 };
	static uint8_t tables[ACPI_BYTES];
	uint64_t xsdt, entry[2], dsdt;
	size_t n;

	for (unsigned i = 0; i < 4; i++) {
		c.device[i].mmio = MMIO_START + i * MMIO_STRIDE;
		c.device[i].gsi = GSI_VIRTIO + i;
	}
	n = acpi_build(&c, tables, sizeof(tables), ACPI_START);
	assert(n > 0 && n <= sizeof(tables));
	assert(memcmp(tables, "RSD PTR ", 8) == 0 && sum(tables, 20) == 0 && sum(tables, 36) == 0);
	memcpy(&xsdt, tables + 24, 8);
	check_table(tables, ACPI_START, xsdt, "XSDT");
	memcpy(entry, tables + (xsdt - ACPI_START) + 36, sizeof(entry));
	check_table(tables, ACPI_START, entry[0], "FACP");
	check_table(tables, ACPI_START, entry[1], "APIC");
	memcpy(&dsdt, tables + (entry[0] - ACPI_START) + 140, 8);
	check_table(tables, ACPI_START, dsdt, "DSDT");
	/* Too little room is said, wherever it ends. */
	for (size_t room = 0; room < n; room++)
		assert(acpi_build(&c, tables, room, ACPI_START) == 0);
}

static void write_file(const char *path, const void *bytes, size_t n)
{
	AUTO_CLOSE int fd = open(path, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);

	assert(fd >= 0 && write(fd, bytes, n) == (ssize_t)n);
}

static void put32(uint8_t *at, uint32_t v)
{
	memcpy(at, &v, 4);
}

/* The smallest thing that passes for a kernel. */
static void make_kernel(uint8_t k[8192])
{
	memset(k, 0, 8192);
	k[0x1f1] = 1; /* setup sectors */
	k[0x1fe] = 0x55;
	k[0x1ff] = 0xaa;
	k[0x200] = 0xeb;
	k[0x201] = 0x6a; /* the header's end */
	memcpy(k + 0x202, "HdrS", 4);
	k[0x206] = 0x0f;
	k[0x207] = 0x02;
	k[0x211] = 1;                 /* loaded high */
	put32(k + 0x22c, 0x7fffffff); /* initrd_addr_max */
	put32(k + 0x230, 0x200000);   /* alignment */
	k[0x236] = 3;                 /* 64-bit, above 4 GiB */
	put32(k + 0x238, 2047);       /* command line */
	put32(k + 0x258, 0x1000000);  /* preferred address */
	put32(k + 0x260, 0x400000);   /* memory to start */
	memset(k + 1024, 0x5a, 8192 - 1024);
}

static int try_kernel(const struct memory *m, const char *path, const uint8_t *k, size_t n, struct err *e)
{
	struct boot b = { 0 };
	int r;

	write_file(path, k, n);
	r = boot_load(m, path, NULL, "console=ttyS0", &b, e);
	assert(r == 0 || (r == -e->code && e->text[0]));
	assert(r < 0 || b.entry == 0x1000200);
	return r;
}

static void test_boot(const char *path)
{
	struct memory m = { .ram_bytes = 64u << 20 };
	struct err e = { 0 };
	struct boot b;
	uint8_t k[8192];
	char longest[BOOT_CMDLINE_MAX];

	m.ram = mmap(NULL, m.ram_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	assert(m.ram != MAP_FAILED);
	make_kernel(k);
	assert(try_kernel(&m, path, k, sizeof(k), &e) == 0);
	assert(m.ram[0x1000000] == 0x5a && m.ram[BOOT_ZERO_PAGE + 0x1e8] == 3);
	assert(strcmp((char *)m.ram + BOOT_CMDLINE, "console=ttyS0") == 0);

	memset(longest, 'a', sizeof(longest));
	longest[2047] = 0;
	assert(boot_load(&m, path, path, longest, &b, &e) == 0);
	longest[2047] = 'a';
	longest[2048] = 0;
	assert(boot_load(&m, path, NULL, longest, &b, &e) == -EINVAL);

	assert(try_kernel(&m, path, k, 100, &e) == -EINVAL);
	k[0x1f1] = 0xff; /* more set-up than file */
	assert(try_kernel(&m, path, k, sizeof(k), &e) == -EINVAL);
	make_kernel(k);
	put32(k + 0x260, 0xffffffff);
	assert(try_kernel(&m, path, k, sizeof(k), &e) == -ENOMEM);
	make_kernel(k);
	memset(k + 0x258, 0xff, 8); /* prefers the end of the address space */
	assert(try_kernel(&m, path, k, sizeof(k), &e) < 0);
	make_kernel(k);
	put32(k + 0x230, 3);
	assert(try_kernel(&m, path, k, sizeof(k), &e) == -EINVAL);
	make_kernel(k);
	k[0x236] = 0;
	assert(try_kernel(&m, path, k, sizeof(k), &e) == -EINVAL);
	/* Every header of nonsense is refused or loaded, and nothing else. */
	srand(1);
	for (int i = 0; i < 2000; i++) {
		make_kernel(k);
		for (int n = 0; n < 4; n++)
			k[0x1f1 + rand() % 0x80] = (uint8_t)rand();
		write_file(path, k, sizeof(k));
		boot_load(&m, path, path, "", &b, &e);
	}
	assert(boot_load(&m, "/nonexistent", NULL, "", &b, &e) == -ENOENT);
	munmap(m.ram, m.ram_bytes);
}

static void test_serial(void)
{
	static struct serial p;
	struct serial_saved bad;
	char out[64];

	serial_init(&p);
	serial_write(&p, 3, 0x80);
	serial_write(&p, 0, 1);
	assert(serial_read(&p, 0) == 1);
	serial_write(&p, 3, 3);
	for (const char *c = "hello"; *c; c++)
		serial_write(&p, 0, (uint8_t)*c);
	assert(serial_take(&p, out, sizeof(out)) == 5 && memcmp(out, "hello", 5) == 0);
	/* The transmitter's interrupt is there when it is switched on, and gone once read. */
	serial_write(&p, 1, 2);
	assert((serial_read(&p, 2) & 0xf) == 2 && (serial_read(&p, 2) & 0xf) == 1);
	/* Input, bounded. */
	serial_write(&p, 1, 1);
	assert(serial_input(&p, "ab", 2) == 2);
	assert((serial_read(&p, 2) & 0xf) == 4 && (serial_read(&p, 5) & 1));
	assert(serial_read(&p, 0) == 'a' && serial_read(&p, 0) == 'b' && !(serial_read(&p, 5) & 1));
	for (unsigned i = 0; i < SERIAL_INPUT_MAX; i++)
		assert(serial_input(&p, "x", 1) == 1);
	assert(serial_input(&p, "y", 1) == 0 && serial_input_room(&p) == 0);
	/* Loopback, which drivers test with. */
	serial_write(&p, 4, 0x1a);
	assert((serial_read(&p, 6) & 0xf0) == 0x90);
	serial_write(&p, 4, 0);
	/* With a reader that does not read, the transmitter says it is busy; without any, the newest output is kept. */
	serial_keep(&p, false);
	for (unsigned i = 0; i < 2 * SERIAL_OUTPUT_MAX; i++)
		serial_write(&p, 0, '.');
	assert(!(serial_read(&p, 5) & 0x20));
	serial_drop(&p, 1000);
	assert(serial_read(&p, 5) & 0x20);
	serial_keep(&p, true);
	assert(!serial_panicked(&p));
	for (const char *c = "[ 1.0] KKernel panic - not syncing: x"; *c; c++)
		serial_write(&p, 0, (uint8_t)*c);
	assert(serial_panicked(&p));
	bad = p.s;
	assert(serial_load(&p, &bad) == 0);
	bad.in_head = SERIAL_INPUT_MAX;
	assert(serial_load(&p, &bad) < 0);
	bad = p.s;
	bad.in_bytes = SERIAL_INPUT_MAX + 1;
	assert(serial_load(&p, &bad) < 0);
}

static void make_state(struct state *s, const struct fingerprint *cpu)
{
	uint8_t bytes[100];

	memset(bytes, 7, sizeof(bytes));
	assert(state_begin(s, NULL) == 0);
	state_header(s)->cpu = *cpu;
	state_header(s)->memory_bytes = 256u << 20;
	state_header(s)->vcpus = 1;
	for (uint32_t i = 0; i < 5; i++)
		assert(state_add(s, STATE_MSRS, i, bytes, 20 * i + 1, NULL) == 0);
	assert(state_end(s, NULL) == 0);
}

static void test_state(const char *path)
{
	struct fingerprint cpu = { .text = "GenuineTest family 6" }, other = cpu;
	struct state s = { 0 }, again = { 0 }, read_back = { 0 };
	struct err e = { 0 };
	const void *p;
	size_t n = 0;
	AUTO_CLOSE int fd = open(path, O_CREAT | O_TRUNC | O_RDWR | O_CLOEXEC, 0600);

	make_state(&s, &cpu);
	make_state(&again, &cpu);
	assert(s.used == again.used && memcmp(s.bytes, again.bytes, s.used) == 0);
	assert(state_find(&s, STATE_MSRS, 3, &n) && n == 61 && !state_find(&s, STATE_MSRS, 5, &n));
	assert(state_get(&s, STATE_MSRS, 4, &p, 81, &e) == 0 && state_get(&s, STATE_MSRS, 4, &p, 80, &e) == -EINVAL);
	assert(state_write(&s, fd, &e) == 0 && state_load(&read_back, path, &cpu, &e) == 0);
	assert(read_back.used == s.used && memcmp(read_back.bytes, s.bytes, s.used) == 0);
	other.digest[0] = 1;
	assert(state_check(s.bytes, s.used, &other, &e) == -ENOTSUP && strstr(e.text, "processor"));
	/* Every cut and every flipped byte is found. */
	for (size_t i = 0; i < s.used; i++) {
		assert(state_check(s.bytes, i, &cpu, &e) < 0);
		s.bytes[i] ^= 0x40;
		assert(state_check(s.bytes, s.used, &cpu, &e) < 0);
		s.bytes[i] ^= 0x40;
	}
	/* So are lengths that lie under a digest that is right. */
	for (size_t at = sizeof(struct state_header); at < s.used; at += 4) {
		uint32_t before;

		memcpy(&before, s.bytes + at, 4);
		put32(s.bytes + at, 0xfffffff0);
		assert(state_end(&s, NULL) == 0);
		if (state_check(s.bytes, s.used, &cpu, &e) == 0)
			for (uint32_t i = 0; i < 6; i++)
				state_find(&s, STATE_MSRS, i, &n);
		memcpy(s.bytes + at, &before, 4);
	}
	state_header(&s)->vcpus = 9;
	assert(state_end(&s, NULL) == 0 && state_check(s.bytes, s.used, &cpu, &e) == -EINVAL);
	state_free(&s);
	state_free(&again);
	state_free(&read_back);
}

int main(void)
{
	char path[] = "/tmp/vmenv-test-parts-XXXXXX";
	int fd = mkstemp(path);

	assert(fd >= 0);
	close(fd);
	test_acpi();
	test_boot(path);
	test_serial();
	test_state(path);
	unlink(path);
	return 0;
}
