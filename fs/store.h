/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rows of the state folder: SQLite in WAL mode. Files come first, then the row that says they are whole; so a row is
 * true, and files without one are leftovers. Changes are gathered into one transaction, committed a moment later, or at
 * once where a caller says so.
 */
#ifndef FS_STORE_H
#define FS_STORE_H

#include "core.h"

struct store;

int store_open(const char *path, struct loop *l, struct store **s, struct err *e);
void store_close(struct store *s);
/* Never the same twice, not even after a crash. 0 if the store fails. */
uint64_t store_id(struct store *s);
/* Commits what is gathered. -EIO and a sentence. */
int store_commit(struct store *s, struct err *e);
/* Blocks: makes what is committed durable, through a connection of its own. For a worker thread. */
int store_settle(const char *path, struct err *e);

struct store_template {
	uint64_t id;
	const char *name, *state, *reason, *config, *kernel, *digest, *rootfs_kind;
	int64_t baked_ns, bake_ms, changed_ns;
};
int store_template_put(struct store *s, const struct store_template *t, struct err *e);
int store_template_remove(struct store *s, uint64_t id, struct err *e);
/* each: 0 to go on. The strings are valid during the call, never NULL. */
int store_templates(struct store *s, int (*each)(void *arg, const struct store_template *t), void *arg, struct err *e);

struct store_sandbox {
	uint64_t id, template, machine;
	const char *name, *parent, *state, *reason;
	int64_t created_ns, expires_ns;
};
int store_sandbox_put(struct store *s, const struct store_sandbox *b, struct err *e);
int store_sandbox_remove(struct store *s, uint64_t id, struct err *e); /* and its runs */
int store_sandboxes(struct store *s, int (*each)(void *arg, const struct store_sandbox *b), void *arg, struct err *e);

struct store_run {
	uint64_t sandbox, number, output[2], stored[2], printed[2], duration_ns;
	const char *state;
	int exit_code, signal;
};
int store_run_put(struct store *s, const struct store_run *r, struct err *e);
int store_run_remove(struct store *s, uint64_t sandbox, uint64_t number, struct err *e); /* number 0: all of the sandbox's */

#endif
