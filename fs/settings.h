/* SPDX-License-Identifier: Apache-2.0 */
/* Ranges shared by settings given as text and as JSON. */
#ifndef FS_SETTINGS_H
#define FS_SETTINGS_H

#include <vmenv/util.h>

#define OUTPUT_LIMIT_MAX ((int64_t)16 << 30)

/* Seconds, 0..most, to milliseconds; a positive value never becomes 0 (which means none). */
int settings_duration(const char *key, double seconds, double most, uint64_t *ms, struct err *e);
int settings_output_limit(int64_t n, uint64_t *limit, struct err *e);

#endif
