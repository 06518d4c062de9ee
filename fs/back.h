/* SPDX-License-Identifier: Apache-2.0 */
/* What the modules behind core.h share: the core itself, the private halves of its objects, and small helpers. */
#ifndef FS_BACK_H
#define FS_BACK_H

#include "core.h"

#include "agent_client.h"
#include "config.h"
#include "index.h"
#include "machine_client.h"
#include "store.h"
#include "worker.h"

#define MEMORY_RESERVE_KB (256u << 10) /* never given to machines */
#define MEMORY_MARGIN_KB (64u << 10)   /* between the last machine let in and the first that must go */
#define MEMORY_PER_MACHINE_KB (16u << 10)
#define MEMORY_YOUNG_KB (8u << 10) /* kept for a machine that is just starting */
#define YOUNG_NS (1000 * MS)
#define RUNS_KEPT 1000      /* of a sandbox; the oldest ended ones go first */
#define DEAD_KEPT 1024      /* dead sandboxes; the oldest go first */
#define CONSOLE_MAX (64u << 20)
#define MS 1000000ull

enum kind { KIND_TEMPLATE = 1, KIND_SANDBOX, KIND_RUN };

/* Called from the loop, after everything that is on the stack now has returned. */
struct later {
	struct later *next;
	void (*fn)(void *arg);
	void *arg;
};

/* pressure.c: how much memory there is, and who must go when there is none. */
struct pressure {
	struct timer timer;
	uint64_t available_kb, floor_kb, looked_ns; /* MemAvailable; what must stay of it; when that was */
	uint64_t stall_us, stall_ns;
	struct sandbox *victim; /* referenced: on its way out */
	uint64_t victim_until;
};

struct core {
	char *state, *kernel, *initrd, *machine; /* absolute paths */
	int state_fd, lock_fd, templates_fd, consoles_fd, outputs_fd;
	struct loop *loop;
	struct store *store;
	struct workers *workers;
	struct machines machines;
	struct index index;
	struct template *templates; /* oldest first */
	struct sandbox *sandboxes;  /* newest first */
	unsigned dead;
	struct journal errors, events;
	uint64_t generation, started_ns;
	struct later *later, **later_tail;
	struct timer later_timer, sweep;
	struct reaper *reapers; /* run.c's */
	struct pressure pressure;
	bool closing;
	struct {
		uint64_t creates, create_failures, forks, fork_failures, resets, kills, expired, runs, deaths, out_of_memory;
	} count;
};

void core_later(struct core *c, void (*fn)(void *arg), void *arg);
/* Runs what core_later has gathered. */
void core_settle(struct core *c);
/* Ends an op, from core_later: so the caller's structures may be in any state. op NULL is fine. */
void op_finish(struct core *c, struct op *op, int status, const struct err *e);
void ops_finish(struct core *c, struct op **list, int status, const struct err *e);
void op_unlink(struct op **list, struct op *op);
/* An op that only waits in a list: cancelling takes it out. */
void op_wait(struct op **list, struct op *op);

int object_init(struct core *c, struct object *o, enum kind kind, void *self, void (*free)(struct object *o), struct err *e);
void object_changed(struct object *o);
/* Out of the index; freed when the last reference goes, at the earliest from core_later. */
void object_remove(struct core *c, struct object *o);
static inline uint64_t deadline_ms(uint64_t ms)
{
	return now_ns(CLOCK_MONOTONIC) + ms * MS;
}
/* -ENOMEM and a sentence if the host cannot take n more machines. */
int core_admit(struct core *c, unsigned n, struct err *e);
uint64_t core_available_kb(struct core *c);
void pressure_look(struct pressure *p); /* brings the figures up to date */
void pressure_start(struct core *c);
void pressure_stop(struct core *c);
void journal_clear(struct journal *j);
/* Removes a folder's files and, one level down, its folders. */
void folder_clear(int folder);

/* template.c, bake.c */
struct template_private {
	char folder_name[24];
	int folder;         /* of its files */
	char *path;         /* the same, as text */
	int upload_fd[2];
	bool upload_written[2];
	char *kernel_version, *digest, *rootfs_kind;
	int64_t baked_ns, bake_ms;
	struct machine_client *zygote;
	uint64_t zygote_started[4]; /* CLOCK_MONOTONIC: of the last starts */
	struct bake *bake;
};
int templates_load(struct core *c, struct err *e);
void templates_close(struct core *c);
int template_save(struct template *t, struct err *e);
/* The machine to fork from: running, or just started. */
int template_zygote(struct template *t, struct machine_client **m, struct err *e);
void template_say(struct template *t, const char *fmt, ...) __attribute__((format(printf, 2, 3))); /* a line in the log */
/* The last line of the log that is not ours. */
void template_last_line(struct template *t, char *line, size_t n);
/* The last that the guest's agent said on the console, "" for nothing: a guest that gives up says why there. */
void template_agent_line(struct template *t, char *line, size_t n);
int template_move(struct template *t, enum template_state state, const char *reason, struct err *e);
void bake_abandon(struct bake *b, const char *why);

/* awaken.c: from a paused machine to one whose agent takes commands. */
struct awaken {
	void (*done)(struct awaken *a, int status, const struct err *e);
	void *arg;
	bool goes_on; /* it was awake before: a pinned clock is not pinned again */
	/* private */
	struct loop *loop;
	struct machine_client *machine;
	struct machine_call resume, connect;
	struct agent *agent; /* at done, and then: the owner may take it; else awaken_cancel closes it */
	struct timer retry, deadline;
	const struct config *config;
	bool active, resumed, greeted;
	char last[320];
};
/* console: given to the machine for its output, or -1. The caller's struct, zeroed, with done and arg. */
int awaken_start(struct awaken *a, struct loop *l, struct machine_client *m, const struct config *config, int console,
		 uint64_t patience_ms, struct err *e);
void awaken_cancel(struct awaken *a);

/* spare.c: a stream to a sandbox's agent that waits for the next run, which so need not open one. */
struct spare {
	struct agent *agent; /* or NULL */
	struct loop *loop;
	struct timer flush;
};
/* Takes a stream over whose purpose is done; NULL is fine. */
void spare_put(struct sandbox *s, struct agent *a);
struct agent *spare_take(struct sandbox *s); /* or NULL */
void spare_close(struct sandbox *s);

/* sandbox.c, birth.c */
struct sandbox_private {
	struct machine_client *machine; /* NULL: none (yet, or any more) */
	struct spare spare;             /* to that machine's agent */
	struct birth *birth;            /* that makes it, or makes its next machine (reset) */
	struct change *change;          /* freeze or thaw in progress */
	struct timer ttl;
	uint64_t next_run;
	struct op *waiters, *enders; /* for no run in progress; for its processes to be gone */
	unsigned ending;             /* processes on their way out */
	bool console_given, forked;
	bool was_awake; /* since it came from the template */
	unsigned attaching; /* runs that are being attached to; op: who waits for that */
	struct op *attacher;
	uint64_t create_ns, ready_ns, pause_ns;
	uint64_t private_kb, private_when;
};
int sandbox_make(struct core *c, const char *name, struct template *t, struct sandbox **s, struct err *e);
void sandbox_unmake(struct sandbox *s); /* one that never was: no event */
void sandbox_move(struct sandbox *s, enum sandbox_state state, const char *reason);
/* It has a machine now, which it watches from here on. */
void sandbox_take_machine(struct sandbox *s, struct machine_client *m);
void sandbox_release_machine(struct sandbox *s, const char *why);
void sandbox_save(struct sandbox *s);
bool sandbox_alive(const struct sandbox *s);
/* 0, or why nothing can be asked of its machine now. */
int sandbox_need_machine(struct sandbox *s, struct err *e);
void sandbox_ttl(struct sandbox *s); /* counts from now */
void sandboxes_close(struct core *c);
void birth_abandon(struct birth *b, const struct err *e);
int sandbox_console_open(struct sandbox *s, int copy_from, struct err *e);
void metadata_clear(struct sandbox *s);
int metadata_copy(struct sandbox *to, const struct sandbox *from, struct err *e);

/* run.c */
/* What was stored of a stream: shared by the runs of forks. */
struct output {
	unsigned references;
	uint64_t id; /* names the file */
	struct core *core;
};
/* Ends all that are in progress: `state`, and waiters get -EIO with the sentence. */
void runs_end(struct sandbox *s, enum run_state state, const char *why);
void runs_forget(struct sandbox *s);
void runs_save(struct sandbox *s);
void runs_freeze(struct sandbox *s);
void runs_thaw(struct sandbox *s);
/* To a fork: ended runs are shared, those in progress wait for runs_attach. */
int runs_inherit(struct sandbox *to, struct sandbox *from, struct err *e);
/* Attaches to what is in progress in the guest; op ends when each is known to go on, to have ended, or to be none. */
int runs_attach(struct sandbox *s, struct op *op, struct err *e);
void reapers_close(struct core *c);

/* recover.c: ends what an earlier server left, and removes its files. */
int recover(struct core *c, struct err *e);

#endif
