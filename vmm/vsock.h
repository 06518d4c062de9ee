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
 * Opens a stream to guest `port` carried by `fd` (a stream socket, made non-blocking; taken over, success or not). Event
 * loop. `done` is called once: 0, -ECONNREFUSED, -ETIMEDOUT (timeout_ms), -EIO (device not up, machine being torn down),
 * -EMFILE (VSOCK_STREAMS_MAX). Before the guest's driver is up, or while it has not yet taken a transport reset, requests wait.
 */
void vsock_connect(struct vsock *s, uint32_t port, int fd, unsigned timeout_ms, void (*done)(void *arg, int status), void *arg);

/* Before a save or fork, vCPUs parked, event loop: moves what is in the queues so that saved state is whole. */
void vsock_drain(struct vsock *s);

/*
 * In a forked child, first thing: forgets every stream without touching the guest (descriptors closed). The transport
 * reset event then goes out in ops->restored: the guest ends its connections. Host ports are not reused after a restore:
 * the port counter is saved state.
 */
void vsock_forget(struct vsock *s);

#endif
