/* SPDX-License-Identifier: Apache-2.0 */
/*
 * virtio-vsock (virtio 1.2, 5.10) in user space: a stream to a guest port is a host socket. The host only connects; a
 * guest that connects to the host is refused (RST). Guest CID 3, host CID 2, SOCK_STREAM only.
 */
#ifndef VMM_VSOCK_H
#define VMM_VSOCK_H

#include <vmenv/loop.h>
#include "virtio.h"

#define VSOCK_GUEST_CID 3
#define VSOCK_STREAMS_MAX 512

struct vsock;

struct vsock *vsock_new(struct loop *l, const struct memory *m);
void vsock_free(struct vsock *s);
struct virtio *vsock_virtio(struct vsock *s);

/*
 * Opens a stream to guest `port` carried by `fd` (a stream socket; taken over, success or not). Event loop. `done` is
 * called once, perhaps before vsock_connect returns: 0, -ECONNREFUSED, -ETIMEDOUT (timeout_ms), -EIO (device broken or
 * being torn down), -EMFILE (VSOCK_STREAMS_MAX). Before the guest's driver is up, or while it has not yet taken a
 * transport reset, or while the device holds still, requests wait.
 */
void vsock_connect(struct vsock *s, uint32_t port, int fd, unsigned timeout_ms,
		   void (*done)(void *arg, int status), void *arg);

/*
 * At a pause, vCPUs parked, event loop: takes what the guest has sent, then holds still: until vsock_go nothing touches
 * guest memory or device state, whatever the host's sockets and timers do. Repeating it changes nothing.
 */
void vsock_drain(struct vsock *s);
/* At every resume (first, after a pause, after a fork or restore), before the vCPUs run: ends what vsock_drain began. */
void vsock_go(struct vsock *s);

/*
 * In a forked child, first thing, before or after loop_forked (it does not touch the loop): forgets every stream without
 * touching the guest (descriptors closed, `done` not called). The device holds still until vsock_go. The transport
 * reset event then goes out in ops->restored: the guest ends its connections. Host ports are not reused after a restore:
 * the port counter is saved state.
 */
void vsock_forget(struct vsock *s);

#endif
