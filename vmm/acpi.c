/* SPDX-License-Identifier: Apache-2.0 */
/* The ACPI tables of a machine, with just enough of an AML writer for its DSDT. */
#include "acpi.h"

#include <stdbool.h>
#include <string.h>

struct buffer {
	uint8_t *at;
	size_t used, room;
	bool full;
};

static void put(struct buffer *b, const void *bytes, size_t n)
{
	if (n > b->room - b->used) {
		b->full = true;
		return;
	}
	memcpy(b->at + b->used, bytes, n);
	b->used += n;
}

/* Everything in ACPI is little-endian, and so are the only machines this runs on. */
static void put8(struct buffer *b, uint8_t v)
{
	put(b, &v, 1);
}

static void put16(struct buffer *b, uint16_t v)
{
	put(b, &v, 2);
}

static void put32(struct buffer *b, uint32_t v)
{
	put(b, &v, 4);
}

static void put64(struct buffer *b, uint64_t v)
{
	put(b, &v, 8);
}

static uint8_t checksum(const uint8_t *bytes, size_t n)
{
	uint8_t sum = 0;

	for (size_t i = 0; i < n; i++)
		sum = (uint8_t)(sum + bytes[i]);
	return (uint8_t)-sum;
}

/* AML (ACPI 6.4, chapter 20). */

enum {
	AML_NAME = 0x08,
	AML_BYTE = 0x0a,
	AML_DWORD = 0x0c,
	AML_STRING = 0x0d,
	AML_SCOPE = 0x10,
	AML_BUFFER = 0x11,
	AML_PACKAGE = 0x12,
	AML_EXTENDED = 0x5b,
	AML_EXT_DEVICE = 0x82,
};

/* A package's length counts itself, and always takes two bytes here: up to 4095. */
static size_t package_open(struct buffer *b)
{
	size_t at = b->used;

	put16(b, 0);
	return at;
}

static void package_close(struct buffer *b, size_t at)
{
	size_t n = b->used - at;

	if (b->full)
		return;
	if (n > 0xfff) {
		b->full = true;
		return;
	}
	b->at[at] = (uint8_t)(0x40 | (n & 0xf));
	b->at[at + 1] = (uint8_t)(n >> 4);
}

static void aml_name(struct buffer *b, const char name[4])
{
	put8(b, AML_NAME);
	put(b, name, 4);
}

static void aml_byte(struct buffer *b, uint8_t v)
{
	put8(b, AML_BYTE);
	put8(b, v);
}

static void aml_string(struct buffer *b, const char *s)
{
	put8(b, AML_STRING);
	put(b, s, strlen(s) + 1);
}

static size_t device_open(struct buffer *b, const char name[4])
{
	size_t at;

	put8(b, AML_EXTENDED);
	put8(b, AML_EXT_DEVICE);
	at = package_open(b);
	put(b, name, 4);
	return at;
}

/* Resource descriptors (6.4), collected apart because a buffer says its length twice. */

static void resource_memory(struct buffer *r, uint32_t base, uint32_t bytes)
{
	put8(r, 0x86);
	put16(r, 9);
	put8(r, 1); /* read-write */
	put32(r, base);
	put32(r, bytes);
}

static void resource_io(struct buffer *r, uint16_t base, uint8_t bytes)
{
	put8(r, 0x47);
	put8(r, 1); /* decodes 16 bits */
	put16(r, base);
	put16(r, base);
	put8(r, 1);
	put8(r, bytes);
}

/* Extended interrupt descriptor: consumer, edge, active high, exclusive. */
static void resource_edge(struct buffer *r, uint32_t gsi)
{
	put8(r, 0x89);
	put16(r, 6);
	put8(r, 0x3);
	put8(r, 1);
	put32(r, gsi);
}

static void aml_resources(struct buffer *b, struct buffer *r)
{
	size_t at;

	put8(r, 0x79); /* end tag, with no checksum to check */
	put8(r, 0);
	aml_name(b, "_CRS");
	put8(b, AML_BUFFER);
	at = package_open(b);
	aml_byte(b, (uint8_t)r->used);
	put(b, r->at, r->used);
	package_close(b, at);
	b->full |= r->full || r->used > 0xff;
}

#define RESOURCES(name) \
	uint8_t name##_bytes[64]; \
	struct buffer name = { .at = name##_bytes, .room = sizeof(name##_bytes) }

static void aml_virtio(struct buffer *b, unsigned i, uint64_t mmio, unsigned gsi)
{
	char name[4] = { 'V', 'R', '0', (char)('0' + i) };
	size_t at = device_open(b, name);
	RESOURCES(r);

	aml_name(b, "_HID");
	aml_string(b, "LNRO0005"); /* what virtio_mmio binds to */
	aml_name(b, "_UID");
	aml_byte(b, (uint8_t)i);
	aml_name(b, "_CCA");
	aml_byte(b, 1);
	resource_memory(&r, (uint32_t)mmio, MMIO_STRIDE);
	resource_edge(&r, gsi);
	aml_resources(b, &r);
	package_close(b, at);
}

static void aml_serial(struct buffer *b)
{
	size_t at = device_open(b, "COM1");
	RESOURCES(r);

	aml_name(b, "_HID");
	put8(b, AML_DWORD);
	put32(b, 0x0105d041); /* EISAID("PNP0501") */
	aml_name(b, "_UID");
	aml_byte(b, 0);
	resource_io(&r, PORT_SERIAL, 8);
	resource_edge(&r, GSI_SERIAL);
	aml_resources(b, &r);
	package_close(b, at);
}

static void aml_panic(struct buffer *b)
{
	size_t at = device_open(b, "PEVT");
	RESOURCES(r);

	aml_name(b, "_HID");
	aml_string(b, "QEMU0001"); /* what the pvpanic driver binds to */
	resource_io(&r, PORT_PANIC, 1);
	aml_resources(b, &r);
	package_close(b, at);
}

static void aml_sleep(struct buffer *b)
{
	size_t at;

	aml_name(b, "_S5_");
	put8(b, AML_PACKAGE);
	at = package_open(b);
	put8(b, 2);
	aml_byte(b, SLEEP_TYPE_S5);
	aml_byte(b, SLEEP_TYPE_S5);
	package_close(b, at);
}

/* Tables. */

static size_t table_open(struct buffer *b, const char signature[4], uint8_t revision)
{
	size_t at;

	while (b->used % 16 && !b->full)
		put8(b, 0);
	at = b->used;
	put(b, signature, 4);
	put32(b, 0);
	put8(b, revision);
	put8(b, 0);
	put(b, "VMENV ", 6);
	put(b, "VMENVFS ", 8);
	put32(b, 1);
	put(b, "VMEN", 4);
	put32(b, 1);
	return at;
}

static void table_close(struct buffer *b, size_t at)
{
	uint32_t n = (uint32_t)(b->used - at);

	if (b->full)
		return;
	memcpy(b->at + at + 4, &n, 4);
	b->at[at + 9] = checksum(b->at + at, n);
}

static void dsdt(struct buffer *b, const struct acpi_config *c)
{
	size_t scope;

	put8(b, AML_SCOPE);
	scope = package_open(b);
	put(b, "\\_SB_", 5);
	for (unsigned i = 0; i < c->devices; i++)
		aml_virtio(b, i, c->device[i].mmio, c->device[i].gsi);
	aml_serial(b);
	aml_panic(b);
	package_close(b, scope);
	aml_sleep(b);
}

static void generic_address(uint8_t *to, uint16_t port)
{
	to[0] = 1; /* system I/O */
	to[1] = 8; /* bits wide */
	to[2] = 0;
	to[3] = 1; /* byte access */
	memset(to + 4, 0, 8);
	memcpy(to + 4, &port, 2);
}

static void fadt(struct buffer *b, uint64_t dsdt_address)
{
	enum { BYTES = 276, HEADER = 36 };
	uint8_t t[BYTES] = { 0 }; /* indexed by the specification's offsets; the header is written already */
	uint32_t dsdt_low = (uint32_t)dsdt_address;
	/* No VGA, no MSI, no CMOS clock; no 8042 by its absence. */
	uint16_t boot = 1u << 2 | 1u << 3 | 1u << 5;
	/* WBINVD works; power and sleep buttons are not fixed hardware; reset register; hardware-reduced. */
	uint32_t flags = 1u << 0 | 1u << 4 | 1u << 5 | 1u << 10 | 1u << 20;

	memcpy(t + 40, &dsdt_low, 4);
	memcpy(t + 109, &boot, 2);
	memcpy(t + 112, &flags, 4);
	generic_address(t + 116, PORT_RESET);
	t[128] = RESET_VALUE;
	t[131] = 4; /* minor version: ACPI 6.4 */
	memcpy(t + 140, &dsdt_address, 8);
	generic_address(t + 244, PORT_SLEEP_CONTROL);
	generic_address(t + 256, PORT_SLEEP_STATUS);
	memcpy(t + 268, "VMENVFS", 8);
	put(b, t + HEADER, BYTES - HEADER);
}

static void madt(struct buffer *b, const struct acpi_config *c)
{
	put32(b, LAPIC_ADDRESS);
	put32(b, 0); /* no 8259s to switch off */
	for (unsigned i = 0; i < c->vcpus; i++) {
		put8(b, 0);
		put8(b, 8);
		put8(b, (uint8_t)i); /* ACPI processor */
		put8(b, (uint8_t)i); /* APIC id */
		put32(b, 1);         /* enabled */
	}
	put8(b, 1);
	put8(b, 12);
	put8(b, 0); /* I/O APIC id, as KVM's answers */
	put8(b, 0);
	put32(b, IOAPIC_ADDRESS);
	put32(b, 0); /* its first GSI */
}

size_t acpi_build(const struct acpi_config *c, uint8_t *to, size_t room, uint64_t gpa)
{
	struct buffer b = { .at = to, .room = room };
	size_t dsdt_at, fadt_at, madt_at, xsdt_at;
	uint8_t rsdp[36] = "RSD PTR ";
	uint32_t rsdp_bytes = sizeof(rsdp);
	uint64_t xsdt;

	put(&b, rsdp, sizeof(rsdp)); /* room for it; filled in last */
	dsdt_at = table_open(&b, "DSDT", 2);
	dsdt(&b, c);
	table_close(&b, dsdt_at);
	fadt_at = table_open(&b, "FACP", 6);
	fadt(&b, gpa + dsdt_at);
	table_close(&b, fadt_at);
	madt_at = table_open(&b, "APIC", 5);
	madt(&b, c);
	table_close(&b, madt_at);
	xsdt_at = table_open(&b, "XSDT", 1);
	put64(&b, gpa + fadt_at);
	put64(&b, gpa + madt_at);
	table_close(&b, xsdt_at);
	if (b.full)
		return 0;

	xsdt = gpa + xsdt_at;
	memcpy(rsdp + 9, "VMENV ", 6);
	rsdp[15] = 2;
	memcpy(rsdp + 20, &rsdp_bytes, 4);
	memcpy(rsdp + 24, &xsdt, 8);
	rsdp[8] = checksum(rsdp, 20); /* ACPI 1.0's part has its own */
	rsdp[32] = checksum(rsdp, sizeof(rsdp));
	memcpy(to, rsdp, sizeof(rsdp));
	return b.used;
}
