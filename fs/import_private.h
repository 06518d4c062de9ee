/* SPDX-License-Identifier: Apache-2.0 */
/* The two kinds of source import_rootfs knows. */
#ifndef FS_IMPORT_PRIVATE_H
#define FS_IMPORT_PRIVATE_H

#include "import.h"

/* `inode_ratio`: one inode per so many bytes. *more_inodes: the failure is -ENOSPC because there are too few. */
int import_tar(struct import *i, unsigned inode_ratio, bool *more_inodes, struct err *e);
int import_ext4(struct import *i, struct err *e);

#define IMPORT_PIECE (256u << 10)

/* Reads at an offset of the source, whatever the descriptor's own offset is; counts done_bytes; -ECANCELED. Bytes
 * read, 0 at the end. */
ssize_t import_read(struct import *i, void *to, size_t bytes, uint64_t at, struct err *e);

/* `s` with what is not plain ASCII escaped, shortened, for a sentence. */
const char *import_quote(const char *s, char *out, size_t n);

#endif
