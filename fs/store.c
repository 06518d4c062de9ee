/* SPDX-License-Identifier: Apache-2.0 */
#include "store.h"

#include <sqlite3.h>

#define SCHEMA 1
#define COMMIT_AFTER_NS 200000000ull
/* Ids are given out from a range that was made durable first; a start takes a new range, so that nothing lost in a
 * crash of the host can bring one back. */
#define ID_RANGE (1ull << 20)

enum statement {
	TEMPLATE_PUT, TEMPLATE_DELETE, TEMPLATE_ALL, SANDBOX_PUT, SANDBOX_DELETE, SANDBOX_ALL, RUN_PUT, RUN_DELETE,
	RUN_DELETE_ALL, COUNTER_PUT, COUNTER_GET, STATEMENTS,
};

static const char *const sql[STATEMENTS] = {
	[TEMPLATE_PUT] =
		"INSERT INTO template (id, name, state, reason, config, kernel, digest, rootfs_kind, baked_ns, bake_ms,"
		" changed_ns) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11) ON CONFLICT (id) DO UPDATE SET"
		" name = ?2, state = ?3, reason = ?4, config = ?5, kernel = ?6, digest = ?7, rootfs_kind = ?8,"
		" baked_ns = ?9, bake_ms = ?10, changed_ns = ?11",
	[TEMPLATE_DELETE] = "DELETE FROM template WHERE id = ?1",
	[TEMPLATE_ALL] =
		"SELECT id, name, state, reason, config, kernel, digest, rootfs_kind, baked_ns, bake_ms, changed_ns"
		" FROM template ORDER BY id",
	[SANDBOX_PUT] =
		"INSERT INTO sandbox (id, name, template, parent, machine, state, reason, created_ns, expires_ns)"
		" VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9) ON CONFLICT (id) DO UPDATE SET"
		" machine = ?5, state = ?6, reason = ?7, expires_ns = ?9",
	[SANDBOX_DELETE] = "DELETE FROM sandbox WHERE id = ?1",
	[SANDBOX_ALL] = "SELECT id, name, template, parent, machine, state, reason, created_ns, expires_ns FROM "
			"sandbox ORDER BY id",
	[RUN_PUT] = "INSERT OR REPLACE INTO run (sandbox, number, state, exit_code, signal, duration_ns, stdout_id, "
		    "stderr_id,"
		    " stdout_stored, stderr_stored, stdout_printed, stderr_printed)"
		    " VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)",
	[RUN_DELETE] = "DELETE FROM run WHERE sandbox = ?1 AND number = ?2",
	[RUN_DELETE_ALL] = "DELETE FROM run WHERE sandbox = ?1",
	[COUNTER_PUT] = "INSERT OR REPLACE INTO counter (name, value) VALUES ('id', ?1)",
	[COUNTER_GET] = "SELECT value FROM counter WHERE name = 'id'",
};

static const char schema[] =
	"CREATE TABLE counter (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;"
	"CREATE TABLE template (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, state TEXT NOT NULL, reason TEXT "
	"NOT NULL,"
	" config TEXT NOT NULL, kernel TEXT NOT NULL, digest TEXT NOT NULL, rootfs_kind TEXT NOT NULL,"
	" baked_ns INTEGER NOT NULL, bake_ms INTEGER NOT NULL, changed_ns INTEGER NOT NULL);"
	"CREATE TABLE sandbox (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, template INTEGER NOT NULL, parent "
	"TEXT NOT NULL,"
	" machine INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL, created_ns INTEGER NOT NULL,"
	" expires_ns INTEGER NOT NULL);"
	"CREATE TABLE run (sandbox INTEGER NOT NULL REFERENCES sandbox (id) ON DELETE CASCADE, number INTEGER NOT NULL,"
	" state TEXT NOT NULL, exit_code INTEGER NOT NULL, signal INTEGER NOT NULL, duration_ns INTEGER NOT NULL,"
	" stdout_id INTEGER NOT NULL, stderr_id INTEGER NOT NULL, stdout_stored INTEGER NOT NULL,"
	" stderr_stored INTEGER NOT NULL, stdout_printed INTEGER NOT NULL, stderr_printed INTEGER NOT NULL,"
	" PRIMARY KEY (sandbox, number)) WITHOUT ROWID;";

struct store {
	sqlite3 *db;
	sqlite3_stmt *statements[STATEMENTS];
	struct loop *loop;
	struct timer commit;
	bool open; /* a transaction */
	bool durable; /* what commits are now: synchronous is FULL */
	uint64_t next_id, last_id;
};

static int failed(struct store *s, struct err *e)
{
	int code = sqlite3_errcode(s->db);

	return err_set(e, code == SQLITE_FULL ? ENOSPC : code == SQLITE_NOMEM ? ENOMEM : EIO, "the store: %s",
		       sqlite3_errmsg(s->db));
}

static int run(struct store *s, const char *text, struct err *e)
{
	return sqlite3_exec(s->db, text, NULL, NULL, NULL) == SQLITE_OK ? 0 : failed(s, e);
}

int store_commit(struct store *s, struct err *e)
{
	int r;

	if (!s->open)
		return 0;
	loop_timer_cancel(s->loop, &s->commit);
	r = run(s, "COMMIT", e);
	if (r == 0)
		s->open = false;
	return r;
}

static void commit_due(struct timer *t)
{
	struct store *s = t->arg;

	/* A full disk may be less full later: what is gathered is kept and tried again. */
	if (store_commit(s, NULL) < 0)
		loop_timer(s->loop, t, now_ns(CLOCK_MONOTONIC) + 10 * COMMIT_AFTER_NS);
}

/* A durable one is of its own: what was gathered before does not wait for the disk with the next commit. */
static int begin(struct store *s, bool durable, struct err *e)
{
	int r = 0;

	if (s->open && durable && !s->durable)
		r = store_commit(s, e);
	if (r < 0 || s->open)
		return r;
	if (s->durable != durable) {
		/* Not possible within a transaction. */
		r = run(s, durable ? "PRAGMA synchronous = FULL" : "PRAGMA synchronous = NORMAL", e);
		if (r < 0)
			return r;
		s->durable = durable;
	}
	r = run(s, "BEGIN IMMEDIATE", e);
	if (r < 0)
		return r;
	s->open = true;
	loop_timer(s->loop, &s->commit, now_ns(CLOCK_MONOTONIC) + COMMIT_AFTER_NS);
	return 0;
}

static int step(struct store *s, sqlite3_stmt *q, struct err *e)
{
	int r = sqlite3_step(q) == SQLITE_DONE ? 0 : failed(s, e);

	sqlite3_reset(q);
	sqlite3_clear_bindings(q);
	return r;
}

static void bind_text(sqlite3_stmt *q, int i, const char *text)
{
	sqlite3_bind_text(q, i, text ? text : "", -1, SQLITE_TRANSIENT);
}

static void bind_int(sqlite3_stmt *q, int i, uint64_t n)
{
	sqlite3_bind_int64(q, i, (sqlite3_int64)n);
}

static const char *text_of(sqlite3_stmt *q, int i)
{
	const char *text = (const char *)sqlite3_column_text(q, i);

	return text ? text : "";
}

static int check_schema(struct store *s, struct err *e)
{
	sqlite3_stmt *q;
	int version = -1, r;

	if (sqlite3_prepare_v2(s->db, "PRAGMA user_version", -1, &q, NULL) != SQLITE_OK)
		return failed(s, e);
	if (sqlite3_step(q) == SQLITE_ROW)
		version = sqlite3_column_int(q, 0);
	sqlite3_finalize(q);
	if (version == SCHEMA)
		return 0;
	if (version != 0)
		return err_set(e, EINVAL, "the store is of version %d, this vmenvfs is for version %d", version,
			       SCHEMA);
	r = run(s, "BEGIN IMMEDIATE", e);
	if (r == 0)
		r = run(s, schema, e);
	if (r == 0)
		r = run(s, "PRAGMA user_version = 1", e);
	return r == 0 ? run(s, "COMMIT", e) : r;
}

static int reserve_ids(struct store *s, struct err *e)
{
	sqlite3_stmt *get = s->statements[COUNTER_GET], *put = s->statements[COUNTER_PUT];
	uint64_t from = 1;
	int r;

	if (sqlite3_step(get) == SQLITE_ROW)
		from = (uint64_t)sqlite3_column_int64(get, 0);
	sqlite3_reset(get);
	bind_int(put, 1, from + ID_RANGE);
	r = step(s, put, e);
	if (r == 0)
		r = store_commit(s, e);
	if (r < 0)
		return r;
	s->next_id = from;
	s->last_id = from + ID_RANGE;
	return 0;
}

static int prepare(struct store *s, struct err *e)
{
	for (int i = 0; i < STATEMENTS; i++)
		if (sqlite3_prepare_v3(s->db, sql[i], -1, SQLITE_PREPARE_PERSISTENT, &s->statements[i], NULL) !=
		    SQLITE_OK)
			return failed(s, e);
	return 0;
}

static int open_all(struct store *s, const char *path, struct err *e)
{
	int r;

	if (sqlite3_open_v2(path, &s->db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX, NULL) !=
	    SQLITE_OK)
		return s->db ? failed(s, e) : err_set(e, ENOMEM, "out of memory");
	sqlite3_busy_timeout(s->db, 5000);
	/*
	 * NORMAL: a commit is a write without an fsync, so it does not hold up the loop. Templates are few, and people
	 * uploaded what they are made of: theirs are FULL.
	 */
	r = run(s, "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA foreign_keys = ON", e);
	if (r == 0)
		r = check_schema(s, e);
	if (r == 0)
		r = prepare(s, e);
	if (r == 0)
		r = reserve_ids(s, e);
	if (r == 0)
		r = run(s, "PRAGMA wal_checkpoint(TRUNCATE)", e);
	return r;
}

int store_open(const char *path, struct loop *l, struct store **out, struct err *e)
{
	struct store *s = calloc(1, sizeof(*s));
	int r;

	if (!s)
		return err_set(e, ENOMEM, "out of memory");
	s->loop = l;
	s->commit = (struct timer){ .fire = commit_due, .arg = s };
	r = open_all(s, path, e);
	if (r < 0) {
		store_close(s);
		return r;
	}
	*out = s;
	return 0;
}

void store_close(struct store *s)
{
	if (!s)
		return;
	store_commit(s, NULL);
	loop_timer_cancel(s->loop, &s->commit);
	for (int i = 0; i < STATEMENTS; i++)
		sqlite3_finalize(s->statements[i]);
	sqlite3_close(s->db);
	free(s);
}

uint64_t store_id(struct store *s)
{
	if (s->next_id == s->last_id && (store_commit(s, NULL) < 0 || reserve_ids(s, NULL) < 0))
		return 0;
	return s->next_id++;
}

int store_settle(const char *path, struct err *e)
{
	struct store s = { 0 };
	int r;

	if (sqlite3_open_v2(path, &s.db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX, NULL) != SQLITE_OK) {
		r = s.db ? failed(&s, e) : err_set(e, ENOMEM, "out of memory");
		sqlite3_close(s.db);
		return r;
	}
	sqlite3_busy_timeout(s.db, 5000);
	/* A connection that has not read yet does not know that there is a log, and its checkpoint does nothing. */
	r = run(&s, "SELECT 1 FROM sqlite_schema LIMIT 1", e);
	/* PASSIVE never makes the server's own connection wait; it syncs the log before it copies. */
	if (r == 0 && sqlite3_wal_checkpoint_v2(s.db, NULL, SQLITE_CHECKPOINT_PASSIVE, NULL, NULL) != SQLITE_OK)
		r = failed(&s, e);
	sqlite3_close(s.db);
	return r;
}

int store_template_put(struct store *s, const struct store_template *t, struct err *e)
{
	sqlite3_stmt *q = s->statements[TEMPLATE_PUT];
	int r = begin(s, true, e);

	if (r < 0)
		return r;
	bind_int(q, 1, t->id);
	bind_text(q, 2, t->name);
	bind_text(q, 3, t->state);
	bind_text(q, 4, t->reason);
	bind_text(q, 5, t->config);
	bind_text(q, 6, t->kernel);
	bind_text(q, 7, t->digest);
	bind_text(q, 8, t->rootfs_kind);
	bind_int(q, 9, (uint64_t)t->baked_ns);
	bind_int(q, 10, (uint64_t)t->bake_ms);
	bind_int(q, 11, (uint64_t)t->changed_ns);
	r = step(s, q, e);
	return r == 0 ? store_commit(s, e) : r;
}

static int delete_by_id(struct store *s, enum statement which, uint64_t id, uint64_t number, struct err *e)
{
	sqlite3_stmt *q = s->statements[which];
	int r = begin(s, which == TEMPLATE_DELETE, e);

	if (r < 0)
		return r;
	bind_int(q, 1, id);
	if (which == RUN_DELETE)
		bind_int(q, 2, number);
	return step(s, q, e);
}

int store_template_remove(struct store *s, uint64_t id, struct err *e)
{
	int r = delete_by_id(s, TEMPLATE_DELETE, id, 0, e);

	return r == 0 ? store_commit(s, e) : r;
}

int store_templates(struct store *s, int (*each)(void *arg, const struct store_template *t), void *arg, struct err *e)
{
	sqlite3_stmt *q = s->statements[TEMPLATE_ALL];
	int r = 0, status;

	while ((status = sqlite3_step(q)) == SQLITE_ROW && r == 0) {
		struct store_template t = {
			.id = (uint64_t)sqlite3_column_int64(q, 0),
			.name = text_of(q, 1),
			.state = text_of(q, 2),
			.reason = text_of(q, 3),
			.config = text_of(q, 4),
			.kernel = text_of(q, 5),
			.digest = text_of(q, 6),
			.rootfs_kind = text_of(q, 7),
			.baked_ns = sqlite3_column_int64(q, 8),
			.bake_ms = sqlite3_column_int64(q, 9),
			.changed_ns = sqlite3_column_int64(q, 10),
		};

		r = each(arg, &t);
	}
	if (r == 0 && status != SQLITE_DONE)
		r = failed(s, e);
	sqlite3_reset(q);
	return r;
}

int store_sandbox_put(struct store *s, const struct store_sandbox *b, struct err *e)
{
	sqlite3_stmt *q = s->statements[SANDBOX_PUT];
	int r = begin(s, false, e);

	if (r < 0)
		return r;
	bind_int(q, 1, b->id);
	bind_text(q, 2, b->name);
	bind_int(q, 3, b->template);
	bind_text(q, 4, b->parent);
	bind_int(q, 5, b->machine);
	bind_text(q, 6, b->state);
	bind_text(q, 7, b->reason);
	bind_int(q, 8, (uint64_t)b->created_ns);
	bind_int(q, 9, (uint64_t)b->expires_ns);
	return step(s, q, e);
}

int store_sandbox_remove(struct store *s, uint64_t id, struct err *e)
{
	return delete_by_id(s, SANDBOX_DELETE, id, 0, e);
}

int store_sandboxes(struct store *s, int (*each)(void *arg, const struct store_sandbox *b), void *arg, struct err *e)
{
	sqlite3_stmt *q = s->statements[SANDBOX_ALL];
	int r = 0, status;

	while ((status = sqlite3_step(q)) == SQLITE_ROW && r == 0) {
		struct store_sandbox b = {
			.id = (uint64_t)sqlite3_column_int64(q, 0),
			.name = text_of(q, 1),
			.template = (uint64_t)sqlite3_column_int64(q, 2),
			.parent = text_of(q, 3),
			.machine = (uint64_t)sqlite3_column_int64(q, 4),
			.state = text_of(q, 5),
			.reason = text_of(q, 6),
			.created_ns = sqlite3_column_int64(q, 7),
			.expires_ns = sqlite3_column_int64(q, 8),
		};

		r = each(arg, &b);
	}
	if (r == 0 && status != SQLITE_DONE)
		r = failed(s, e);
	sqlite3_reset(q);
	return r;
}

int store_run_put(struct store *s, const struct store_run *b, struct err *e)
{
	sqlite3_stmt *q = s->statements[RUN_PUT];
	int r = begin(s, false, e);

	if (r < 0)
		return r;
	bind_int(q, 1, b->sandbox);
	bind_int(q, 2, b->number);
	bind_text(q, 3, b->state);
	sqlite3_bind_int(q, 4, b->exit_code);
	sqlite3_bind_int(q, 5, b->signal);
	bind_int(q, 6, b->duration_ns);
	bind_int(q, 7, b->output[0]);
	bind_int(q, 8, b->output[1]);
	bind_int(q, 9, b->stored[0]);
	bind_int(q, 10, b->stored[1]);
	bind_int(q, 11, b->printed[0]);
	bind_int(q, 12, b->printed[1]);
	return step(s, q, e);
}

int store_run_remove(struct store *s, uint64_t sandbox, uint64_t number, struct err *e)
{
	return delete_by_id(s, number ? RUN_DELETE : RUN_DELETE_ALL, sandbox, number, e);
}
