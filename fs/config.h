/* SPDX-License-Identifier: Apache-2.0 */
/* A template's config: parsing, defaults, and refusals that name the key, the value and the range. */
#ifndef FS_CONFIG_H
#define FS_CONFIG_H

#include "core.h"

#define CONFIG_MAX (1u << 20) /* bytes of text */

/* The text is hostile. An empty one (or only blanks) means all defaults. *c is untouched on failure. */
int config_parse(const char *text, size_t n, struct config *c, struct err *e);
void config_clear(struct config *c);
/* The guest's wall clock at a restore: *frozen if it is to be left alone, else nanoseconds since the epoch. */
int64_t config_clock(const struct config *c, bool *frozen);

#endif
