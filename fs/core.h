/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The server's state and the life of its objects, apart from how they look as files (that is tree.h).
 *
 * One thread: everything here is called on the event loop. What takes time returns VMENV_PENDING and ends in op->done.
 * What blocks in the kernel for long (importing a root filesystem) runs on a worker thread that owns its data
 * until it reports back through an eventfd.
 *
 * Ids are 64-bit, never reused (also not across restarts), and become inode numbers. Objects are reference counted only
 * by open files: object_get, object_put; a removed object is `gone`, answers ENOENT, and is freed with its last reference.
 */
#ifndef FS_CORE_H
#define FS_CORE_H

#include <jansson.h>
#include <sys/types.h>
#include <vmenv/loop.h>
#include <vmenv/util.h>

#include "worker.h"

struct core;
struct store;

#define VMENV_PENDING 1

/*
 * A request in progress. The caller owns it and sets done and arg. The function it is handed to returns 0 (done, op->done
 * not called), -errno (failed, *e says why, op->done not called), or VMENV_PENDING, after which op->done is called
 * exactly once from the loop unless op_cancel comes first. What cancelling means is said at each function.
 */
struct op {
	void (*done)(struct op *op, int status, const struct err *e); /* status 0 or -errno; e is valid during the call */
	void *arg;
	void (*cancel)(struct op *op); /* set by the callee while pending */
	void *callee;                  /* the callee's */
	struct op *next;               /* the callee's */
};
static inline void op_cancel(struct op *op)
{
	if (op->cancel)
		op->cancel(op);
	op->cancel = NULL;
}

/* A growing text (events, errors): a ring of whole lines, the newest few thousand. */
struct journal {
	char *text;           /* the lines kept */
	size_t bytes, limit;  /* kept; most to keep */
	uint64_t dropped;     /* bytes dropped from the front since the start: text[0] is at offset `dropped` */
	void (*grown)(struct journal *j); /* set by the tree, to wake pollers */
	void *arg;
};
void journal_add(struct journal *j, const char *line, size_t n); /* adds the newline */

struct object {
	uint64_t id;
	unsigned references;
	bool gone;
	uint64_t changed_ns; /* CLOCK_REALTIME: mtime and ctime of its files */
	void (*free)(struct object *o);
};
static inline struct object *object_get(struct object *o)
{
	o->references++;
	return o;
}
void object_put(struct object *o);

/* What `create`, `set`, config and the files ttl, timeout, user, cwd all set. One table in settings.c parses them. */
struct settings {
	uint64_t ttl_ms, timeout_ms; /* 0: none */
	uint64_t output_limit;       /* bytes, per stream */
	char user[64], cwd[1024];    /* user: a name or a number */
	bool on_expire_hibernate;    /* refused with a sentence until hibernate is there */
};
/* Sets one key from text. Unknown key, or a value out of range: -EINVAL with its name. Durations: seconds, fractions allowed. */
int settings_set(struct settings *s, const char *key, const char *value, struct err *e);

enum template_state { TEMPLATE_NEW, TEMPLATE_BAKING, TEMPLATE_READY, TEMPLATE_FAILED };
extern const char *const template_state_names[];

/* 1.5's config, checked. */
struct config {
	unsigned vcpus;     /* 1..8 */
	uint64_t memory_mb; /* 64..65536 */
	uint64_t disk_mb;   /* 16..1048576 */
	char cmdline[512];
	json_t *env;   /* object of strings, defaults merged in */
	json_t *setup; /* array of strings */
	unsigned setup_timeout_s;
	struct settings settings;
	enum { CLOCK_RESYNC, CLOCK_FROZEN, CLOCK_PINNED } clock;
	int64_t clock_pinned_ns; /* since the epoch */
};

struct template {
	struct object object;
	struct core *core;
	struct template *next;
	char name[NAME_LIMIT + 1];
	enum template_state state;
	char *config_text; /* as written; NULL for all defaults */
	struct config config;
	unsigned users;   /* living sandboxes made from it */
	char reason[480]; /* why failed */
	int log_fd;       /* console and set-up output of the bake, grows; -1 until a bake */
	struct template_private *p;
};

struct template *template_list(struct core *c);
struct template *template_find(struct core *c, const char *name);
struct template *template_by_id(struct core *c, uint64_t id);
int template_make(struct core *c, const char *name, struct template **t, struct err *e); /* mkdir */
int template_remove(struct template *t, struct err *e); /* rmdir: -EBUSY while baking or used */
/* Checked by parsing; -EBUSY once baked. An empty text means all defaults. */
int template_config_write(struct template *t, const char *text, size_t n, struct err *e);
/* The upload of rootfs or kernel. -EBUSY once baked or baking. A descriptor to pwrite to and fstat (the template's own). */
enum template_upload { UPLOAD_ROOTFS, UPLOAD_KERNEL };
int template_upload(struct template *t, enum template_upload which, struct err *e);
/* The size of it, 0 if there is none. */
off_t template_upload_size(struct template *t, enum template_upload which);
/* The folder that has the uploads. The template's own. */
int template_folder_fd(struct template *t);
int template_upload_read_fd(struct template *t, enum template_upload which); /* -1 if there is none */
/* Bakes. Cancel: the bake is abandoned, state failed. */
int template_bake(struct template *t, struct op *op, struct err *e);
char *template_info(struct template *t); /* JSON text with newline, malloc'ed */

enum sandbox_state { SANDBOX_CREATING, SANDBOX_RUNNING, SANDBOX_FROZEN, SANDBOX_HIBERNATED, SANDBOX_DEAD };
extern const char *const sandbox_state_names[];

struct metadata {
	struct metadata *next;
	char key[NAME_LIMIT + 1];
	uint64_t id; /* for its inode */
	size_t bytes; /* <= METADATA_VALUE_MAX */
	char *value;
};
#define METADATA_VALUE_MAX 65536
#define METADATA_KEYS_MAX 256

struct sandbox {
	struct object object;
	struct core *core;
	struct sandbox *next;
	char name[NAME_LIMIT + 1];
	enum sandbox_state state;
	char reason[480]; /* why dead */
	struct template *source;
	char parent[NAME_LIMIT + 1]; /* empty for none */
	struct settings settings;
	struct metadata *metadata;
	struct run *runs; /* newest first */
	unsigned running; /* runs in progress */
	uint64_t created_ns, expires_ns; /* CLOCK_REALTIME; 0: never */
	int console_fd; /* the growing console log */
	struct sandbox_private *p;
};

/* create NAME from=SOURCE [count=N] [key=value]... */
struct create {
	char name[NAME_LIMIT + 1];
	char source[NAME_LIMIT + 16]; /* as written: NAME, templates/NAME or snapshots/NAME */
	unsigned count;               /* 0: one machine called NAME; else NAME-0 ... */
	bool frozen;                  /* frozen=1: restored and never run until thaw */
	unsigned settings;            /* key=value pairs, in order */
	struct { char key[80], *value; } setting[64]; /* settings, and meta.KEY; values owned by the caller */
};

struct sandbox *sandbox_list(struct core *c);
struct sandbox *sandbox_find(struct core *c, const char *name);
struct sandbox *sandbox_by_id(struct core *c, uint64_t id);
/* Done when every machine can take a command; all or none. Cancel: what was made is unmade. */
int sandbox_create(struct core *c, const struct create *how, struct op *op, struct err *e);
/* Cancel of fork: the children are unmade. count 0: one child called name. */
int sandbox_fork(struct sandbox *s, const char *name, unsigned count, struct op *op, struct err *e);
/* A new machine from the template takes the old one's place, which goes once the new one works: a reset that fails or is
 * cancelled changes nothing. Name, id, settings, metadata and console log stay; runs and lineage end; ttl counts anew. A
 * dead sandbox comes back, a frozen one runs. */
int sandbox_reset(struct sandbox *s, struct op *op, struct err *e);
int sandbox_freeze(struct sandbox *s, struct op *op, struct err *e);
int sandbox_thaw(struct sandbox *s, struct op *op, struct err *e);
int sandbox_kill(struct sandbox *s, const char *reason, struct op *op, struct err *e); /* twice is fine */
int sandbox_forget(struct sandbox *s, struct op *op, struct err *e); /* rmdir: kill, then no trace */
int sandbox_set(struct sandbox *s, const char *key, const char *value, struct err *e); /* settings; ttl counts from now */
/* Done when no run is in progress. */
int sandbox_wait(struct sandbox *s, struct op *op, struct err *e);
int sandbox_console_write(struct sandbox *s, const char *bytes, size_t n, struct op *op, struct err *e);
char *sandbox_info(struct sandbox *s); /* JSON text with newline, malloc'ed */
/* "memory SHA256\ndisk SHA256\nstate SHA256\n" of a frozen machine; -EBUSY otherwise. *text is malloc'ed when done. */
int sandbox_digest(struct sandbox *s, char **text, struct op *op, struct err *e);
int metadata_set(struct sandbox *s, const char *key, const char *value, size_t n, struct err *e);
int metadata_remove(struct sandbox *s, const char *key, struct err *e);
struct metadata *metadata_find(struct sandbox *s, const char *key);

enum run_state { RUN_STARTING, RUN_RUNNING, RUN_EXITED, RUN_TIMEOUT, RUN_KILLED, RUN_LOST }; /* LOST: machine or agent died */
extern const char *const run_state_names[]; /* "starting" "running" "exited" "timeout" "killed" "lost" */

enum stream { STREAM_STDOUT, STREAM_STDERR };

struct run {
	struct object object;
	struct sandbox *sandbox;
	struct run *next;
	uint64_t number; /* from 1 */
	enum run_state state;
	char *command; /* the script, or argv as JSON */
	size_t command_bytes;
	int exit_code, signal; /* valid once ended; LOST has none */
	bool timed_out;
	uint64_t duration_ns;
	/* By stream: the stored output (a file, grows), bytes stored, bytes the run printed, whether the middle is left out.
	 * output_fd is -1 while nothing is stored, and may be for an ended run nobody reads: run_output_fd opens it. */
	int output_fd[2];
	uint64_t stored[2], printed[2];
	bool truncated[2];
	void (*grown)(struct run *r, enum stream which); /* set by the tree, to wake pollers; may be NULL */
	void *grown_arg;  /* the tree's */
	struct run_private *p;
};

/* What to run. Owned by the caller; copied. */
struct run_request {
	const char *script; /* or argv */
	size_t script_bytes;
	json_t *argv;      /* array of strings, or NULL */
	const char *cwd, *user; /* NULL: the sandbox's */
	json_t *env;       /* added to the template's; NULL for none */
	const void *input; /* stdin */
	size_t input_bytes;
	uint64_t timeout_ms;   /* UINT64_MAX: the sandbox's */
	uint64_t output_limit; /* UINT64_MAX: the sandbox's */
};
#define SCRIPT_MAX (16u << 20)

/* Whether a run could start now: 0, or the errno and sentence with which run_start would refuse. */
int sandbox_takes_runs(struct sandbox *s, struct err *e);
struct run *run_find(struct sandbox *s, uint64_t number);
/* The descriptor to pread stored[which] bytes from, valid until control returns to the loop; -errno (-ENOENT: nothing stored). */
int run_output_fd(struct run *r, enum stream which);
struct run *run_by_id(struct core *c, uint64_t id);
/* Starts. *r is set at once (with a number), unless it fails. Done when the run has ended, status 0 also when it was
 * killed or timed out; -EIO when the machine or agent died. op NULL: nobody waits. Cancel: the run is killed, with
 * its descendants. */
int run_start(struct sandbox *s, const struct run_request *q, struct run **r, struct op *op, struct err *e);
int run_kill(struct run *r, int signal, struct err *e); /* SIGKILL takes every descendant */

struct core_options {
	const char *state;                     /* directory, made if missing */
	const char *kernel, *initrd, *machine; /* the default guest kernel, guest initramfs, and vmenv-machine */
};
int core_open(const struct core_options *o, struct loop *l, struct core **c, struct err *e);
void core_close(struct core *c); /* every machine ended, everything flushed */
struct journal *core_errors(struct core *c);
struct journal *core_events(struct core *c);
/* The line in `error`: time, sandbox ("-" for none), command, errno name, sentence; and the same as an event. */
void core_fail(struct core *c, const char *sandbox, const char *command, const struct err *e);
/* A line in `events`: {"time":..., "event": kind, "sandbox": ..., ...}. Takes over `more` (may be NULL). */
void core_event(struct core *c, const char *kind, const char *sandbox, json_t *more);
char *core_stats(struct core *c);   /* flat keyed lines, malloc'ed */
/* Starts a job on a worker. Its report comes at the latest in core_close. */
int core_job(struct core *c, struct job *j, struct err *e);
/* A descriptor of an empty file without a name, on the state's file system; or -errno. */
int core_scratch(struct core *c, struct err *e);
/* Wakes whoever lists directories: a counter that moves when objects come or go. */
uint64_t core_generation(struct core *c);

#endif
