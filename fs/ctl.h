/* SPDX-License-Identifier: Apache-2.0 */
/* The commands that ctl files take: a table of verbs for each kind. */
#ifndef FS_CTL_H
#define FS_CTL_H

#include "server.h"
#include "words.h"

/* One command, parsed. */
struct command {
	const struct verb *verb;
	struct words words;    /* word[0] is the verb */
	struct create *create; /* create */
	const char *name;      /* fork */
	unsigned count;
	int signal;            /* kill of a run */
};

struct verb {
	const char *name, *usage, *what; /* usage: the arguments; what: a line for who reads ctl */
	unsigned min, max;               /* arguments */
	bool slow;                       /* may wait: refused when opened O_NONBLOCK */
	/* Checks all that can be checked without doing anything. May be missing. */
	int (*parse)(const struct node *n, struct command *c, struct err *e);
	/* Ends as core.h's operations do. */
	int (*run)(const struct node *n, struct command *c, struct op *op, struct err *e);
};

/* Finds the verb of c->words and parses its arguments. -EINVAL and a sentence that lists what there is. */
int command_parse(const struct node *n, struct command *c, struct err *e);

#endif
