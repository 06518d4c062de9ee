/* SPDX-License-Identifier: Apache-2.0 */
/* What passes between vmenvfs and the emulated host it started: the names of the virtio-serial ports, and the time. */
#ifndef EMULATED_PORT_H
#define EMULATED_PORT_H

#include <stdint.h>

#define PORT_FUSE "vmenv.fuse"	 /* the FUSE stream, framed by its own headers */
#define PORT_CLOCK "vmenv.clock" /* any byte asks for struct port_time; it also comes by itself every few seconds */

#define PORT_TIME_MAGIC 0x314d4954564d56ull

struct port_time {
	uint64_t magic;
	uint64_t realtime_ns;	/* CLOCK_REALTIME outside, now */
	uint32_t entropy_bytes; /* 0 or sizeof entropy */
	uint32_t zero;
	unsigned char entropy[64];
};

#endif
