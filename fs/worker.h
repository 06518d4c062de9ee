/* SPDX-License-Identifier: Apache-2.0 */
/* Work that blocks: a thread per job, which owns the job's data until it is reported back on the event loop. */
#ifndef FS_WORKER_H
#define FS_WORKER_H

#include <vmenv/loop.h>
#include <vmenv/util.h>

struct workers;

struct job {
	void (*work)(struct job *j); /* on the thread: touches the job's own data only */
	void (*done)(struct job *j); /* on the loop, exactly once; may free the job */
	void *arg;
	struct job *next; /* the workers' */
	struct workers *workers;
};

struct workers *workers_new(struct loop *l);
int job_start(struct workers *w, struct job *j, struct err *e);
/* Waits for every job and reports it. No job may be started by a report. */
void workers_free(struct workers *w);

#endif
