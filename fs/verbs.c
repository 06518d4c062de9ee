/* SPDX-License-Identifier: Apache-2.0 */
#include <signal.h>

#include "ctl.h"

#define COUNT_MAX 250 /* machines of one command */

static int parse_name(const char *name, struct err *e)
{
	if (!name_valid(name, strlen(name)))
		return err_set(e, EINVAL, "'%.80s' cannot be a name: letters, digits, . _ -, at most %d, the first a letter or digit",
			       name, NAME_LIMIT);
	return 0;
}

static int parse_count(const char *value, unsigned *count, struct err *e)
{
	uint64_t n = 0;

	if (!word_number(value, 1, COUNT_MAX, &n))
		return err_set(e, EINVAL, "count must be 1 to %d, not '%.80s'", COUNT_MAX, value);
	*count = (unsigned)n;
	return 0;
}

/* Splits KEY=value; the key is cut into `key`. */
static int parse_pair(const char *word, char *key, size_t room, char **value, struct err *e)
{
	size_t n = 0;

	*value = word_value(word, &n);
	if (!*value)
		return err_set(e, EINVAL, "'%.80s' is not KEY=value", word);
	if (n >= room)
		return err_set(e, EINVAL, "'%.80s': the key is too long", word);
	memcpy(key, word, n);
	key[n] = '\0';
	return 0;
}

static int check_metadata(const char *key, const char *value, struct err *e)
{
	if (!name_valid(key, strlen(key)))
		return err_set(e, EINVAL, "meta.%.80s: '%.80s' cannot be a key", key, key);
	if (strlen(value) > METADATA_VALUE_MAX)
		return err_set(e, EINVAL, "meta.%.80s: a value is at most %d bytes", key, METADATA_VALUE_MAX);
	return 0;
}

static int add_setting(struct create *how, const char *key, char *value, struct err *e)
{
	struct settings trial = { 0 };
	int r;

	if (!strncmp(key, "meta.", 5))
		r = check_metadata(key + 5, value, e);
	else
		r = settings_set(&trial, key, value, e);
	if (r < 0)
		return r;
	if (how->settings == ARRAY_SIZE(how->setting))
		return err_set(e, EINVAL, "more than %zu settings", ARRAY_SIZE(how->setting));
	snprintf(how->setting[how->settings].key, sizeof(how->setting[0].key), "%s", key);
	how->setting[how->settings++].value = value;
	return 0;
}

static int create_word(struct create *how, const char *word, struct err *e)
{
	char key[sizeof(how->setting[0].key)], *value;
	int r = parse_pair(word, key, sizeof(key), &value, e);

	if (r < 0)
		return r;
	if (!strcmp(key, "from")) {
		if (!*value || strlen(value) >= sizeof(how->source))
			return err_set(e, EINVAL, "from must be the name of a template, not '%.80s'", value);
		snprintf(how->source, sizeof(how->source), "%s", value);
		return 0;
	}
	if (!strcmp(key, "count"))
		return parse_count(value, &how->count, e);
	if (!strcmp(key, "frozen")) {
		if (strcmp(value, "0") && strcmp(value, "1"))
			return err_set(e, EINVAL, "frozen must be 0 or 1, not '%.80s'", value);
		how->frozen = *value == '1';
		return 0;
	}
	return add_setting(how, key, value, e);
}

static int create_parse(const struct node *n, struct command *c, struct err *e)
{
	int r = parse_name(c->words.word[1], e);

	(void)n;
	if (r < 0)
		return r;
	c->create = calloc(1, sizeof(*c->create));
	if (!c->create)
		return err_set(e, ENOMEM, "no memory for a command");
	snprintf(c->create->name, sizeof(c->create->name), "%s", c->words.word[1]);
	for (unsigned i = 2; i < c->words.count && r == 0; i++)
		r = create_word(c->create, c->words.word[i], e);
	if (r == 0 && !*c->create->source)
		r = err_set(e, EINVAL, "create %s: from=SOURCE is missing", c->create->name);
	return r;
}

static int create_run(const struct node *n, struct command *c, struct op *op, struct err *e)
{
	return sandbox_create(n->server->core, c->create, op, e);
}

static const struct verb create = {
	"create", "NAME from=SOURCE [count=N] [frozen=1] [KEY=value]... [meta.KEY=value]...",
	"a machine restored from a template, or NAME-0 ... NAME-(N-1); keys: ttl timeout output_limit user cwd on_expire",
	1, WORDS_MAX, true, create_parse, create_run,
};

static int bake_run(const struct node *n, struct command *c, struct op *op, struct err *e)
{
	(void)c;
	return template_bake(n->template, op, e);
}

static const struct verb bake = {
	"bake", "", "boot, set up and freeze a machine to create from; returns when the template is ready or has failed",
	0, 0, true, NULL, bake_run,
};

static int fork_parse(const struct node *n, struct command *c, struct err *e)
{
	char key[16], *value;
	int r = parse_name(c->words.word[1], e);

	(void)n;
	c->name = c->words.word[1];
	if (r < 0 || c->words.count < 3)
		return r;
	r = parse_pair(c->words.word[2], key, sizeof(key), &value, e);
	if (r < 0)
		return r;
	if (strcmp(key, "count"))
		return err_set(e, EINVAL, "fork takes count=N, not '%.80s'", c->words.word[2]);
	return parse_count(value, &c->count, e);
}

static int fork_run(const struct node *n, struct command *c, struct op *op, struct err *e)
{
	return sandbox_fork(n->sandbox, c->name, c->count, op, e);
}

static const struct verb fork_verb = {
	"fork", "NAME [count=N]", "a copy of this machine as it is now, or NAME-0 ... NAME-(N-1) of one instant",
	1, 2, true, fork_parse, fork_run,
};

static int reset_run(const struct node *n, struct command *c, struct op *op, struct err *e)
{
	(void)c;
	return sandbox_reset(n->sandbox, op, e);
}

static int freeze_run(const struct node *n, struct command *c, struct op *op, struct err *e)
{
	(void)c;
	return sandbox_freeze(n->sandbox, op, e);
}

static int thaw_run(const struct node *n, struct command *c, struct op *op, struct err *e)
{
	(void)c;
	return sandbox_thaw(n->sandbox, op, e);
}

static int kill_run(const struct node *n, struct command *c, struct op *op, struct err *e)
{
	(void)c;
	return sandbox_kill(n->sandbox, "killed by ctl", op, e);
}

static const struct verb reset = {
	"reset", "", "throw the machine away and restore its source under the same name", 0, 0, true, NULL, reset_run,
};
static const struct verb freeze = { "freeze", "", "stop the virtual CPUs", 0, 0, true, NULL, freeze_run };
static const struct verb thaw = { "thaw", "", "continue them", 0, 0, true, NULL, thaw_run };
static const struct verb kill_verb = {
	"kill", "", "destroy the machine; results stay readable until rmdir", 0, 0, true, NULL, kill_run,
};

/* All pairs are tried on a copy before the first is set. */
static int set_parse(const struct node *n, struct command *c, struct err *e)
{
	struct settings trial = n->sandbox->settings;
	char key[80], *value;
	int r = 0;

	for (unsigned i = 1; i < c->words.count && r == 0; i++) {
		r = parse_pair(c->words.word[i], key, sizeof(key), &value, e);
		if (r == 0 && !strncmp(key, "meta.", 5))
			r = check_metadata(key + 5, value, e);
		else if (r == 0)
			r = settings_set(&trial, key, value, e);
	}
	return r;
}

static int set_run(const struct node *n, struct command *c, struct op *op, struct err *e)
{
	char key[80], *value;
	int r = 0;

	(void)op;
	for (unsigned i = 1; i < c->words.count && r == 0; i++) {
		r = parse_pair(c->words.word[i], key, sizeof(key), &value, e);
		if (r == 0 && !strncmp(key, "meta.", 5))
			r = metadata_set(n->sandbox, key + 5, value, strlen(value), e);
		else if (r == 0)
			r = sandbox_set(n->sandbox, key, value, e);
	}
	return r;
}

static const struct verb set = {
	"set", "KEY=value...", "keys: ttl timeout output_limit user cwd on_expire meta.KEY; ttl counts from now",
	1, WORDS_MAX, false, set_parse, set_run,
};

static const struct signal_name {
	const char *name;
	int number;
} signals[] = {
	{ "HUP", SIGHUP },   { "INT", SIGINT },   { "QUIT", SIGQUIT }, { "ABRT", SIGABRT }, { "KILL", SIGKILL },
	{ "USR1", SIGUSR1 }, { "USR2", SIGUSR2 }, { "ALRM", SIGALRM }, { "TERM", SIGTERM }, { "CONT", SIGCONT },
	{ "STOP", SIGSTOP }, { "TSTP", SIGTSTP }, { "PIPE", SIGPIPE }, { "SEGV", SIGSEGV }, { "WINCH", SIGWINCH },
};

static int run_kill_parse(const struct node *n, struct command *c, struct err *e)
{
	const char *word = c->words.count > 1 ? c->words.word[1] : "KILL";
	const char *name = strncmp(word, "SIG", 3) ? word : word + 3;
	uint64_t number = 0;

	(void)n;
	if (word_number(word, 1, 64, &number)) {
		c->signal = (int)number;
		return 0;
	}
	for (size_t i = 0; i < ARRAY_SIZE(signals); i++)
		if (!strcmp(name, signals[i].name)) {
			c->signal = signals[i].number;
			return 0;
		}
	return err_set(e, EINVAL, "'%.80s' is no signal: a number, or a name such as TERM", word);
}

static int run_kill_run(const struct node *n, struct command *c, struct op *op, struct err *e)
{
	(void)op;
	return run_kill(n->run, c->signal, e);
}

static const struct verb run_kill_verb = {
	"kill", "[SIGNAL]", "signal the run's process group; KILL, the default, takes every descendant",
	0, 1, false, run_kill_parse, run_kill_run,
};

const struct verb *const root_verbs[] = { &create, NULL };
const struct verb *const template_verbs[] = { &bake, NULL };
const struct verb *const sandbox_verbs[] = { &fork_verb, &reset, &freeze, &thaw, &kill_verb, &set, NULL };
const struct verb *const run_verbs[] = { &run_kill_verb, NULL };

static int unknown(const struct verb *const *verbs, const char *word, struct err *e)
{
	char names[200];
	size_t at = 0;

	for (; *verbs; verbs++)
		at += (size_t)snprintf(names + at, sizeof(names) - at, " %s", (*verbs)->name);
	return err_set(e, EINVAL, "there is no command '%.80s' here; there is:%s", word, names);
}

int command_parse(const struct node *n, struct command *c, struct err *e)
{
	const struct verb *const *v = n->entry->verbs;
	unsigned arguments = c->words.count - 1;

	while (*v && strcmp((*v)->name, c->words.word[0]))
		v++;
	if (!*v)
		return unknown(n->entry->verbs, c->words.word[0], e);
	c->verb = *v;
	if (arguments < c->verb->min || arguments > c->verb->max)
		return err_set(e, EINVAL, "it is written: %s%s%s", c->verb->name, *c->verb->usage ? " " : "", c->verb->usage);
	return c->verb->parse ? c->verb->parse(n, c, e) : 0;
}

char *verbs_text(const struct node *n, size_t *bytes)
{
	char *text = NULL;
	FILE *f = open_memstream(&text, bytes);

	if (!f)
		return NULL;
	for (const struct verb *const *v = n->entry->verbs; *v; v++)
		fprintf(f, "%s%s%s: %s\n", (*v)->name, *(*v)->usage ? " " : "", (*v)->usage, (*v)->what);
	return fclose(f) ? NULL : text;
}
