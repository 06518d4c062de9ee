/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the parts that make objects look like files share: nodes (what an inode number names), handles (open files),
 * behaviours (how a kind of file acts) and pending requests. One thread, the event loop's.
 *
 * There is no table of inodes: a number is an object's id and the place of a name in tree.c's tables, so that it can be
 * looked up at any time, forgetting is nothing, and a number is never used again.
 */
#ifndef FS_SERVER_H
#define FS_SERVER_H

#define FUSE_USE_VERSION 312
#include <fuse_lowlevel.h>

#include "core.h"

struct server;
struct node;
struct handle;
struct verb;

/* How a kind of file acts. A missing function means what is said at it. */
struct behaviour {
	/* Makes the handle ready. 0, -errno and a sentence; VMENV_PENDING: it answers itself, by handle_opened or
	 * request_fail and handle_put. Missing: 0. */
	int (*open)(struct handle *h, fuse_req_t req, struct err *e);
	/* The next ones answer the request, at once or later. */
	void (*read)(struct handle *h, fuse_req_t req, size_t size, uint64_t offset);                     /* end of file */
	void (*write)(struct handle *h, fuse_req_t req, const char *bytes, size_t size, uint64_t offset); /* EACCES */
	void (*flush)(struct handle *h, fuse_req_t req);                                                  /* success */
	void (*fsync)(struct handle *h, fuse_req_t req);                                                  /* success */
	void (*release)(struct handle *h);   /* the last close */
	unsigned (*poll)(struct handle *h);  /* the events that are there; missing: readable and writable */
	void (*grown)(struct handle *h, struct run *r); /* a run that is watched has printed more */
	uint64_t (*size)(const struct node *n);
	int (*resize)(const struct node *n, uint64_t size, struct err *e); /* EACCES; files that are commands take and ignore it */
};

/* One name in a directory. */
struct entry {
	const char *name; /* NULL: any name, the directory finds it */
	mode_t mode;      /* permissions; without writing ones the file is a result */
	const struct behaviour *behaviour;
	const struct directory *inside; /* a directory: what it holds; nothing else is set then */

	char *(*text)(const struct node *n, size_t *bytes); /* rendered: the whole of it, malloc'ed; NULL without memory */
	/* A value: sets it from all that was written by this opening. */
	int (*store)(const struct node *n, const char *text, size_t bytes, struct err *e);
	const char *key;                             /* a value: its name as in `set` */
	int (*source)(const struct node *n, uint64_t *size); /* grown: the descriptor it is read from and its size; -1: empty */
	struct journal *(*journal)(struct core *c);
	const struct verb *const *verbs;             /* ctl: NULL-terminated */
	int which;                                   /* uploads: enum template_upload; results: enum stream */
	/* Every lookup gives a number of its own. The kernel holds an inode's lock over a write, and others that write or
	 * truncate then sit where no signal reaches them: with an inode each, commands to one file do not wait in line. */
	bool apart;
	bool newest;                                 /* is about the newest run at the time of opening */
};

enum object_kind { OF_NOTHING, OF_TEMPLATE, OF_SANDBOX, OF_RUN, OF_METADATA };

/* Calls it for every child that is not in the table. */
typedef void node_fn(void *arg, const char *name, const struct node *child);

struct directory {
	uint8_t first, last; /* the range of places its inode numbers have: itself, then its entries */
	enum object_kind of;
	const struct entry *entries;
	unsigned count;
	/* Children that come and go. All may be missing. */
	const struct directory *child;
	void (*list)(const struct node *n, node_fn *each, void *arg);
	int (*find)(const struct node *n, const char *name, struct node *child); /* 0 or -ENOENT */
	/* These end as core.h's operations do; missing: EACCES or EPERM. */
	int (*mkdir)(const struct node *n, const char *name, struct op *op, struct err *e);
	int (*rmdir)(const struct node *child, struct op *op, struct err *e);
	int (*create)(const struct node *n, const char *name, struct err *e);
	int (*unlink)(const struct node *n, const char *name, struct err *e);
};

/* A file or directory. What its directory is of is set; its objects live while something is looked up, or are held. */
struct node {
	struct server *server;
	const struct directory *directory;
	const struct entry *entry; /* NULL: the directory itself */
	struct template *template;
	struct sandbox *sandbox;
	struct run *run;
	char key[NAME_LIMIT + 1]; /* of metadata */
	uint64_t key_id;
};

struct buffer {
	char *bytes;
	size_t n, room;
};
int buffer_add(struct buffer *b, const void *bytes, size_t n); /* 0 or -ENOMEM */
void buffer_free(struct buffer *b);
/* Whether a writer of JSON may be expected to go on: shells write a text of several lines in several writes. */
bool json_incomplete(const struct buffer *b);

struct handle {
	struct handle *next, **link; /* in server->handles */
	struct server *server;
	struct node node; /* its objects are held */
	unsigned references; /* the kernel's, and one of each pending request */
	bool nonblock, writes, reads;
	bool unapplied; /* text was written and has not taken effect yet */
	bool overfull;  /* more was written than fits: the kernel may send the rest of it still, which is refused too */
	struct fuse_pollhandle *poll; /* the newest; whoever polls is woken by it once */
	uint64_t seen;                /* the end of what was read, for poll */
	struct buffer text;           /* rendered at open, or written so far */
	void *own;                    /* the behaviour's */
};

struct server {
	struct core *core;
	struct loop *loop;
	struct fuse_session *session;
	const char *state; /* the state directory, for statfs */
	uid_t uid;         /* of every file; (uid_t)-1: whoever asks */
	gid_t gid;
	bool local;        /* the processes that ask are of this machine */
	uint64_t started_ns;
	struct handle *handles;
	struct pending *pending;
	bool interrupted; /* some pending request is */
	struct timer doubt;
	bool doubting;
	uint64_t lookups;    /* of files that are apart */
	uint64_t journal_ns; /* when a journal last grew */
};

/*
 * A request that waits. Allocate it (in a struct of one's own, first), give &p->op to the operation, and if that is
 * pending call pending_start; then either op.done comes, which calls pending_end and answers, or stop comes once: it must
 * end the operation (op_cancel), call pending_end, answer with `error`, and free.
 */
struct pending {
	struct pending *next, **link;
	struct server *server;
	fuse_req_t req;
	struct handle *handle; /* held; may be NULL */
	struct op op;
	bool interrupted, doubtful;
	void (*stop)(struct pending *p, int error);
};
void pending_start(struct pending *p, struct server *s, fuse_req_t req, struct handle *h);
/* Takes it out of the list and its interrupt off; the request may then be answered. */
void pending_end(struct pending *p);
/* After each message: stops what was interrupted meanwhile. */
void pending_interrupts(struct server *s);
/* Ends everything that waits: the server goes. */
void pending_stop_all(struct server *s, int error);

/*
 * For operations whose answer is nothing but success: runs as op's. Used as
 *     struct simple *w = simple_new(...); r = operation(..., &w->pending.op, &e); simple_end(w, r, &e);
 */
struct simple {
	struct pending pending;
	struct node node; /* its objects are held */
	char what[96];    /* for the line in `error` */
	char name[NAME_LIMIT + 1]; /* of what mkdir makes */
	void (*answer)(struct simple *w); /* after success */
	size_t bytes;
};
/* NULL: no memory, the request is answered. */
struct simple *simple_new(struct server *s, fuse_req_t req, struct handle *h, const struct node *n, const char *what,
			  void (*answer)(struct simple *w));
void simple_end(struct simple *w, int status, struct err *e);

/* Nodes: tree.c's tables, and the way between them and numbers. nodes.c */
extern const struct directory root_directory;
extern const struct directory *const directories[];
int node_resolve(struct server *s, uint64_t ino, struct node *n); /* 0 or -ENOENT */
int node_child(const struct node *n, const char *name, struct node *child); /* 0 or -errno */
void node_children(const struct node *n, node_fn *each, void *arg);
uint64_t node_ino(const struct node *n); /* st_ino */
uint64_t node_number(const struct node *n); /* what the kernel is to ask by */
void node_stat(const struct node *n, fuse_req_t req, struct stat *st);
struct object *node_object(const struct node *n); /* NULL for the fixed ones */
bool node_gone(const struct node *n);
void node_hold(struct node *n);
void node_drop(struct node *n);
/* What `error` calls it: the sandbox, or templates/NAME, or NULL. */
const char *node_subject(const struct node *n, char *buffer, size_t n_buffer);

/* Answers with the errno, and has the sentence written to `error`. */
void request_fail(struct server *s, fuse_req_t req, const struct node *n, const char *what, const struct err *e);
/* Of files that have a text: its size, and a read that renders it anew. file_text.c */
uint64_t text_size(const struct node *n);
void text_read(struct handle *h, fuse_req_t req, size_t size, uint64_t offset);
/* Truncating a file that is a command, or input, means nothing. */
int resize_nothing(const struct node *n, uint64_t size, struct err *e);
/* The part of a text that a read asks for. */
void reply_slice(fuse_req_t req, const char *text, size_t n, size_t size, uint64_t offset);
void reply_file(fuse_req_t req, int fd, uint64_t end, size_t size, uint64_t offset);

/* Open files. handle.c */
void handle_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi);
void handle_create(fuse_req_t req, const struct node *n, const struct fuse_entry_param *entry, struct fuse_file_info *fi);
void handle_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset, struct fuse_file_info *fi);
void handle_write(fuse_req_t req, fuse_ino_t ino, const char *bytes, size_t size, off_t offset, struct fuse_file_info *fi);
void handle_flush(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi);
void handle_fsync(fuse_req_t req, fuse_ino_t ino, int data_only, struct fuse_file_info *fi);
void handle_release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi);
void handle_poll(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi, struct fuse_pollhandle *ph);
void server_close_handles(struct server *s);
void handle_opened(struct handle *h, fuse_req_t req);
void handle_put(struct handle *h);
/* Something has grown or ended: wakes whoever polls for it. */
void server_wake(struct server *s);
/* Has what the run prints wake its readers. */
void server_watch_run(struct server *s, struct run *r);
extern const struct fuse_lowlevel_ops server_ops; /* walk.c */

/* The behaviours. */
extern const struct behaviour rendered_file, command_file, value_file, config_file, metadata_file; /* file_text.c */
extern const struct behaviour grown_file, result_file, upload_file, console_file;    /* file_grown.c */
extern const struct behaviour journal_file;                                          /* file_journal.c */
extern const struct behaviour wait_file, digest_file;                                /* file_wait.c */
extern const struct behaviour exec_file, exec_json_file;                             /* exec.c, exec_json.c */
extern const struct behaviour ctl_file;                                              /* ctl.c */
extern const struct verb *const root_verbs[], *const template_verbs[], *const sandbox_verbs[], *const run_verbs[];
char *verbs_text(const struct node *n, size_t *bytes);
char *exec_usage(const struct node *n, size_t *bytes);
char *exec_json_usage(const struct node *n, size_t *bytes);
char *readme_text(const struct node *n, size_t *bytes);

#endif
