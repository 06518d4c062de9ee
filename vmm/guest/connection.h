/* SPDX-License-Identifier: Apache-2.0 */
/* A stream to the server: frames in and out, for the one purpose that its first frame names. */
#ifndef VMENV_GUEST_CONNECTION_H
#define VMENV_GUEST_CONNECTION_H

#include "agent.h"

/* Takes the descriptor, non-blocking. */
void connection_new(struct agent *a, int fd);
/* Sends what there is to send. It may end the connection: do not touch it afterwards. */
void connection_pump(struct connection *c);
/* Soon: so that a short run's start, output and end leave in one packet. */
void connection_pump_soon(struct connection *c);
/* Ends it. A run that was under way goes on. */
void connection_close(struct connection *c);

#endif
