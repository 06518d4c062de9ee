/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ACPI tables (ACPI 6.4): RSDP, XSDT, a hardware-reduced FADT, MADT, and a DSDT in AML that names the virtio-mmio devices,
 * the serial port and the panic port. No PCI, no legacy PIC or PIT, no power-management timer.
 */
#ifndef VMM_ACPI_H
#define VMM_ACPI_H

#include <stddef.h>
#include <stdint.h>

#include "layout.h"

struct acpi_config {
	unsigned vcpus;
	unsigned devices;
	struct {
		uint64_t mmio;
		unsigned gsi;
	} device[VIRTIO_DEVICES_MAX];
};

/*
 * Writes the tables to `to`, which the guest sees at address `gpa` (below 4 GiB). The RSDP is at its start. Returns the
 * bytes used, 0 if they do not fit.
 */
size_t acpi_build(const struct acpi_config *c, uint8_t *to, size_t room, uint64_t gpa);

#endif
