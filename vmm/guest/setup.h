/* SPDX-License-Identifier: Apache-2.0 */
/* What the server asks for after a restore and before a freeze. */
#ifndef VMENV_GUEST_SETUP_H
#define VMENV_GUEST_SETUP_H

#include "agent.h"

struct err;

/* AGENT_SETUP's JSON: wall clock, entropy, hostname, machine id. Outside of a guest only the entropy is added. */
int setup(struct agent *a, const char *text, size_t length, struct err *e);
/* AGENT_SYNC's JSON. */
int setup_sync(struct agent *a, const char *text, size_t length, struct err *e);

#endif
