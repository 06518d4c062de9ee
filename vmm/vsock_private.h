/* SPDX-License-Identifier: Apache-2.0 */
/* The vsock device's own structures; vsock.c has the theory. */
#ifndef VMM_VSOCK_PRIVATE_H
#define VMM_VSOCK_PRIVATE_H

#include <linux/virtio_config.h>
#include <linux/virtio_vsock.h>
#include <sys/queue.h>

#include "vsock.h"
#include <vmenv/util.h>

#define HOST_CID 2
#define HDR sizeof(struct virtio_vsock_hdr)
#define VSOCK_BUFFER (256u << 10)
#define FIRST_PORT (1u << 30)
#define GATHER 16                      /* chains filled by one read */
#define GATHER_IOV 512
#define READ_MAX (1u << 20)            /* bytes of one read */
#define TURN_CHAINS VIRTIO_QUEUE_SIZE_MAX /* most chains of a queue in a turn of the loop, then others have theirs */
#define RST_MAX 1024
#define TX_GIVEN_MAX 16
#define TX_DELAY_NS 5000000u
#define CLOSE_NS 8000000000u /* for the guest to take the end of a stream whose host end is gone */
#define ASK_NS 50000000u     /* out of credit for this long: ask for it, once */

enum { RX, TX, EVENT };
enum { SHUT_R = VIRTIO_VSOCK_SHUTDOWN_RCV, SHUT_W = VIRTIO_VSOCK_SHUTDOWN_SEND, SHUT_BOTH = SHUT_R | SHUT_W };

enum stream_state {
	CONNECTING, /* REQUEST waits or is out; next OPEN or gone */
	OPEN,       /* next DRAINING or gone */
	DRAINING,   /* the guest has no such stream any more; what it sent goes to the host; next gone */
};

enum say { SAY_REQUEST = 1, SAY_CREDIT = 2, SAY_ASK = 4, SAY_SHUT = 8 };

struct stream {
	struct vsock *s;
	enum stream_state state;
	uint32_t port, guest_port;
	struct watch watch; /* fd owned */
	bool watched, want_out;

	/* Host to guest. */
	bool readable;            /* not read dry since the last edge */
	bool eof, hup;            /* read to the end; the host's end is closed */
	bool asked;               /* for credit, since it ran out */
	bool requested;           /* REQUEST is out */
	uint32_t sent;            /* bytes, modulo 2^32 */
	uint32_t peer_alloc, peer_taken;
	uint8_t host_shut, told_shut; /* what the host will do no more; and what of it the guest knows */

	/* Guest to host. */
	uint8_t *buffer;          /* a ring of VSOCK_BUFFER, or NULL while nothing waits */
	uint32_t head, used;
	uint32_t taken, told_taken; /* bytes passed on to the host; and as last said to the guest */
	uint8_t guest_shut;

	uint8_t say; /* enum say: packets owed to the guest */
	bool in_ready, in_talk, in_finished;
	TAILQ_ENTRY(stream) ready, talk, finished;

	struct timer timer; /* connect, or close */
	void (*done)(void *arg, int status);
	void *arg;
	int status;
	bool gone; /* freed once `done` has been called */
};

struct rst {
	uint64_t dst_cid, src_cid;
	uint32_t src_port, dst_port;
	uint16_t type;
};

struct vsock {
	struct virtio v;
	struct loop *loop;
	struct watch wake; /* eventfd: reset by the guest, or more to do */
	struct timer turn, tx_timer, ask_timer;
	bool turn_set, tx_timer_set, ask_timer_set;
	bool held;       /* between vsock_drain and vsock_go */
	bool was_reset;  /* set on a vCPU thread */
	bool starved;    /* out of receive chains, waiting for a kick */
	bool tx_left;    /* transmit chains were there when the turn ended */
	unsigned tx_given; /* transmit chains given since the last interrupt */
	bool rx_given;

	TAILQ_HEAD(, stream) ready, talk, finished;
	struct stream *slot[VSOCK_STREAMS_MAX]; /* by port modulo VSOCK_STREAMS_MAX */
	unsigned streams;

	struct rst rst[RST_MAX];
	unsigned rst_head, rst_count;

	struct virtio_vsock_config config;
	struct vsock_saved {
		uint32_t next_port;
		uint32_t reset_due;   /* a transport reset event is to be given */
		uint32_t events_owed; /* given and not yet handled by the guest */
		uint32_t event_posted; /* avail->idx of the event queue when last looked at */
	} saved;

	struct chain chain;
	struct chain gather[GATHER];
	struct iovec iov[GATHER_IOV];
};

/* vsock.c */

/* A turn at the end of this round of the event loop. */
void vsock_turn_soon(struct vsock *s);
/* Another turn after the loop has looked at its descriptors; safe from any thread. */
void vsock_wake(struct vsock *s);

/* vsock_stream.c */

/* The stream that a packet from the guest is for, or NULL. */
struct stream *stream_find(struct vsock *s, uint32_t port, uint32_t guest_port);
/* Queues it to be read, if there may be something to read. */
void stream_ready(struct stream *st);
/* Queues a packet for the guest (enum say). */
void stream_say(struct stream *st, uint8_t what);
/* Result of the connect: `done` is called at the end of the turn, without the lock. */
void stream_finish(struct stream *st, int status);
void stream_free(struct stream *st);
/* Closes and forgets it; it may be freed at once. */
void stream_drop(struct stream *st, int status);
void stream_rst(struct stream *st);
/* All streams, or those that the guest has heard of. */
void vsock_drop_all(struct vsock *s, bool requested_only);
void vsock_queue_rst(struct vsock *s, const struct rst *r);
/* The guest's side is over: hands on what it sent, then closes. The stream may be freed at once. */
void stream_guest_gone(struct stream *st);
/* The guest sent something impossible: RST. The stream may be freed at once. */
void stream_offend(struct stream *st);
/* The host's side is over in both directions: tells the guest, which has a while to agree. */
void stream_host_gone(struct stream *st);
/* The `len` bytes after a packet's header, from the guest to the host. The stream may be freed at once. */
void stream_take_bytes(struct stream *st, const struct chain *c, uint32_t len);
void stream_guest_shutdown(struct stream *st, uint32_t flags);
/* A watched socket's event. */
void stream_socket(struct stream *st, uint32_t events);
/* Bytes that the guest can take. */
uint32_t stream_credit(const struct stream *st);

/* vsock_packet.c */

/* To the guest: what is owed, and what the host's sockets have. */
void vsock_talk(struct vsock *s);
void vsock_pump(struct vsock *s);
/* From the guest: what is in the transmit queue. */
void vsock_take_tx(struct vsock *s);

#endif
