/* SPDX-License-Identifier: Apache-2.0 */
/* Base64 as in RFC 4648, for the bytes that JSON cannot carry. */
#ifndef FS_BASE64_H
#define FS_BASE64_H

#include <vmenv/util.h>

/* malloc'ed, NUL-terminated; NULL: no memory. */
char *base64_encode(const void *bytes, size_t n);
/* malloc'ed, *n bytes; NULL with -EINVAL or -ENOMEM in *error. Strict: padded, no blanks, unused bits zero. */
void *base64_decode(const char *text, size_t length, size_t *n, int *error);

#endif
