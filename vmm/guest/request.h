/* SPDX-License-Identifier: Apache-2.0 */
/* What a run is to be: AGENT_RUN's JSON, checked. */
#ifndef VMENV_GUEST_REQUEST_H
#define VMENV_GUEST_REQUEST_H

#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

#define SCRIPT_LIMIT (64u << 20)
#define ARGUMENTS_MAX 65536

struct err;

struct request {
	json_t *json; /* owns the strings below */
	uint64_t run, oldest;
	const char **argv; /* NULL-terminated; NULL for a script */
	size_t argc;
	uint64_t script_bytes, stdin_bytes;
	const char *cwd, *user;
	json_t *env;
	uint64_t timeout_ms; /* 0: none */
	uint64_t output_limit;
};

int request_parse(struct request *q, const char *text, size_t length, struct err *e);
void request_free(struct request *q);

#endif
