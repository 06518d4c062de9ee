/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The protocol between the filesystem server (fs/) and a machine process (vmm/): the one place where they meet.
 *
 * A machine process serves a *listening* AF_UNIX SOCK_SEQPACKET socket, made and named by the server, so that a new
 * server finds running machines by name. It serves one connection at a time; when that connection ends the machine goes
 * on and waits for the next one. End of file on the connection without MACHINE_EXITED before it means the process died.
 *
 * Every message is exactly one struct machine_msg, with descriptors in SCM_RIGHTS. The first message after connect is
 * MACHINE_HELLO from the machine. Then the server asks and the machine answers each request once, with the same op and
 * id; answers may come in another order than the requests (CONNECT waits for the guest). MACHINE_EXITED comes unasked.
 *
 * A machine is born paused: booted, restored or forked, its vCPUs first run at MACHINE_RESUME. A template's machine (the
 * zygote) is one that is never resumed, and so never needs a KVM VM of its own.
 *
 * Processes:
 *   vmenv-machine --control FD --kernel K --initrd I --disk D --memory MB --vcpus N [--cmdline S] [--memory-image F]
 *       boots. Disk and memory image are mapped shared: what the guest writes is in the files, which with the state of
 *       MACHINE_SAVE make a template.
 *   vmenv-machine --control FD --restore STATE --memory-image F --disk D
 *       maps both files private and holds the state: a zygote, or a single restored machine.
 *   FD is the listening socket. Without --control the machine runs at once, with its serial console on stdio.
 */
#ifndef VMENV_MACHINE_H
#define VMENV_MACHINE_H

#include <stdint.h>

#define MACHINE_PROTOCOL 1u
#define MACHINE_FORK_MAX 250u /* children of one fork: SCM_MAX_FD is 253 */
#define MACHINE_AGENT_PORT 1024u

enum machine_op {
	MACHINE_HELLO = 1, /* count = MACHINE_PROTOCOL, value[0] = pid as the machine sees it, value[1] = enum machine_state */
	MACHINE_RESUME,    /* start or continue the vCPUs. Optional fd: file (O_APPEND) that gets the console's output */
	MACHINE_PAUSE,     /* park the vCPUs; answered when all are parked and the queues are drained */
	MACHINE_FORK,      /* count children (1..MACHINE_FORK_MAX), one fd each: the child's listening socket. All from one
	                    * instant. Runs from any state and returns to it. Answered when the parent is as before:
	                    * value[0] = ns the vCPUs stood still, value[1] = ns in all. A failure makes no child. */
	MACHINE_CONNECT,   /* count = guest vsock port, fd: a stream socket whose other end the caller keeps; value[0] = most
	                    * milliseconds to wait for the guest (0: 30 s; a paused guest does not answer). Status 0 when the
	                    * guest accepted; -ECONNREFUSED, -ETIMEDOUT (guest did not answer in time), -EIO */
	MACHINE_SAVE,      /* paused only. fd 0: file that gets CPU and device state (versioned, with digest and CPU
	                    * fingerprint). Optional fds 1, 2: files that get the changed pages of memory and disk */
	MACHINE_CONSOLE,   /* input for the serial console: count bytes (1..sizeof text) in text. Answer: count = bytes taken,
	                    * -EAGAIN if none fitted */
	MACHINE_INFO,      /* value[0] private bytes (memory and disk), [1] resident bytes, [2] of [0] guest memory, [3] of [0] disk,
	                    * [4] enum machine_state */
	MACHINE_DIGEST,    /* paused only. text = "MEMORY DISK STATE", three hex SHA-256 as defined below */
	MACHINE_QUIT,      /* answered, then the process ends at once; the guest is not asked */
	MACHINE_EXITED,    /* event, before the process ends: count = enum machine_exit, text = a sentence */
};

enum machine_state {
	MACHINE_PAUSED = 1,
	MACHINE_RUNNING,
	MACHINE_ENDED, /* the guest ended; only MACHINE_QUIT and MACHINE_INFO are answered */
};

enum machine_exit {
	MACHINE_EXIT_POWEROFF = 1,
	MACHINE_EXIT_REBOOT,
	MACHINE_EXIT_PANIC,  /* the guest kernel wrote to the panic port, or rebooted after a panic */
	MACHINE_EXIT_FAULT,  /* triple fault, KVM_EXIT_FAIL_ENTRY, internal error */
	MACHINE_EXIT_DEVICE, /* a device found the guest's behaviour impossible */
	MACHINE_EXIT_HOST,   /* SIGBUS on a mapped file, out of memory, a failed ioctl: not the guest's doing */
};

struct machine_msg {
	uint32_t op;    /* enum machine_op */
	uint32_t id;    /* of the request, echoed; 0 in events */
	int32_t status; /* of an answer: 0 or -errno; text then holds the sentence */
	uint32_t count; /* by op */
	uint64_t value[6];
	char text[448]; /* NUL-terminated except for MACHINE_CONSOLE */
};

_Static_assert(sizeof(struct machine_msg) == 512, "machine_msg is its wire form");

/*
 * Digest of memory or disk: SHA-256 over, for every 4096-byte page that is not all zero, in order, its index as a
 * little-endian 64-bit number and its 4096 bytes. So it does not depend on which pages are holes.
 */

#endif
