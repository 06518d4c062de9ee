/* SPDX-License-Identifier: Apache-2.0 */
/* Where things are in the guest's address spaces: what ACPI describes, boot fills in and the bus answers. */
#ifndef VMM_LAYOUT_H
#define VMM_LAYOUT_H

/* Low memory, used while booting only; the kernel treats it as free afterwards (ACPI tables excepted). */
#define BOOT_GDT 0x500ull
#define BOOT_ZERO_PAGE 0x7000ull
#define BOOT_PAGE_TABLES 0x9000ull /* PML4, PDPT, 4 page directories: 6 pages */
#define BOOT_CMDLINE 0x20000ull
#define BOOT_CMDLINE_MAX 4096u
#define LOW_RAM_END 0x9fc00ull
#define ACPI_START 0xe0000ull /* the RSDP is first; 16-byte aligned in 0xe0000..0xfffff, where kernels look for it */
#define ACPI_BYTES 0x10000u
#define BIOS_ENTRY 0xffff0ull /* where a processor starts, and a kernel jumps to reboot "by the BIOS" */
#define HIGH_RAM_START 0x100000ull

/* In the hole between RAM_HOLE_START and 4 GiB. */
#define MMIO_START 0xd0000000ull
#define MMIO_STRIDE 0x1000u
#define IOAPIC_ADDRESS 0xfec00000u
#define LAPIC_ADDRESS 0xfee00000u
#define KVM_IDENTITY_MAP 0xfffbc000ull /* 1 page, and 3 pages of TSS after it: Intel's real mode needs them */
#define KVM_TSS 0xfffbd000ull

#define PORT_SERIAL 0x3f8u /* 8 ports */
#define PORT_KEYBOARD 0x64u /* only its reset command */
#define PORT_PANIC 0x505u
#define PORT_SLEEP_CONTROL 0x600u
#define PORT_SLEEP_STATUS 0x601u
#define PORT_RESET 0x602u
#define RESET_VALUE 0x1u
#define SLEEP_TYPE_S5 5u

#define GSI_SERIAL 4u
#define GSI_VIRTIO 16u /* and up to 23: I/O APIC pins that no legacy PIC shares */

#define VCPUS_MAX 8u
#define VIRTIO_DEVICES_MAX 4u /* pmem, vsock, rng, net */

#endif
