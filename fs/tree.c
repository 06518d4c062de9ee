/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tree: one table for each kind of directory, and what its files say. How kinds of files act is in file_*.c, exec.c and
 * ctl.c; how directories are walked in walk.c.
 */
#include <sys/stat.h>

#include "server.h"

#ifndef VMENVFS_VERSION
#define VMENVFS_VERSION "unknown"
#endif

static char *copied(const char *text, size_t *bytes)
{
	char *copy = strdup(text);

	*bytes = copy ? strlen(copy) : 0;
	return copy;
}

static char *taken(char *text, size_t *bytes)
{
	*bytes = text ? strlen(text) : 0;
	return text;
}

static char *line(size_t *bytes, const char *value)
{
	char *text;
	int n = asprintf(&text, "%s\n", value);

	*bytes = n < 0 ? 0 : (size_t)n;
	return n < 0 ? NULL : text;
}

static char *number(size_t *bytes, uint64_t value)
{
	char text[24];

	snprintf(text, sizeof(text), "%llu", (unsigned long long)value);
	return line(bytes, text);
}

/* Milliseconds as seconds, with no more decimals than it takes. */
static char *seconds(size_t *bytes, uint64_t ms)
{
	char text[40];
	size_t n = (size_t)snprintf(text, sizeof(text), "%llu.%03u", (unsigned long long)(ms / 1000), (unsigned)(ms % 1000));

	while (text[n - 1] == '0')
		text[--n] = '\0';
	if (text[n - 1] == '.')
		text[--n] = '\0';
	return line(bytes, text);
}

/* The root. */

static char *version_text(const struct node *n, size_t *bytes)
{
	(void)n;
	return copied("vmenvfs " VMENVFS_VERSION "\n", bytes);
}

static char *stats_text(const struct node *n, size_t *bytes)
{
	return taken(core_stats(n->server->core), bytes);
}

extern const struct directory templates_directory, template_directory, sandboxes_directory, sandbox_directory;
extern const struct directory runs_directory, run_directory, metadata_directory, value_directory, machine_directory;

static const struct entry root_entries[] = {
	{ "README", 0444, &rendered_file, .text = readme_text },
	{ "ctl", 0644, &ctl_file, .apart = true, .text = verbs_text, .verbs = root_verbs },
	{ "error", 0444, &journal_file, .journal = core_errors },
	{ "events", 0444, &journal_file, .journal = core_events },
	{ "version", 0444, &rendered_file, .text = version_text },
	{ "stats", 0444, &rendered_file, .text = stats_text },
	{ "templates", .inside = &templates_directory },
	{ "sandboxes", .inside = &sandboxes_directory },
};
const struct directory root_directory = {
	.first = 1, .last = 31, .entries = root_entries, .count = ARRAY_SIZE(root_entries),
};

/* templates/ */

static void template_node(const struct node *n, struct template *t, struct node *child)
{
	*child = (struct node){ .server = n->server, .directory = &template_directory, .template = t };
}

static void templates_list(const struct node *n, node_fn *each, void *arg)
{
	struct node child;

	for (struct template *t = template_list(n->server->core); t; t = t->next) {
		template_node(n, t, &child);
		each(arg, t->name, &child);
	}
}

static int templates_find(const struct node *n, const char *name, struct node *child)
{
	struct template *t = template_find(n->server->core, name);

	if (!t)
		return -ENOENT;
	template_node(n, t, child);
	return 0;
}

static int templates_mkdir(const struct node *n, const char *name, struct op *op, struct err *e)
{
	struct template *t;

	(void)op;
	return template_make(n->server->core, name, &t, e);
}

static int templates_rmdir(const struct node *child, struct op *op, struct err *e)
{
	(void)op;
	return template_remove(child->template, e);
}

const struct directory templates_directory = {
	.first = 32, .last = 32, .child = &template_directory, .list = templates_list, .find = templates_find,
	.mkdir = templates_mkdir, .rmdir = templates_rmdir,
};

static char *config_text(const struct node *n, size_t *bytes)
{
	const char *text = n->template->config_text;

	return copied(text ? text : "", bytes);
}

static char *template_state_text(const struct node *n, size_t *bytes)
{
	return line(bytes, template_state_names[n->template->state]);
}

static char *template_info_text(const struct node *n, size_t *bytes)
{
	return taken(template_info(n->template), bytes);
}

static int growing(int fd, uint64_t *size)
{
	struct stat st;

	if (fd < 0 || fstat(fd, &st) < 0)
		return -1;
	*size = (uint64_t)st.st_size;
	return fd;
}

static int log_source(const struct node *n, uint64_t *size)
{
	return growing(n->template->log_fd, size);
}

static const struct entry template_entries[] = {
	{ "config", 0644, &config_file, .text = config_text },
	{ "rootfs", 0644, &upload_file, .which = UPLOAD_ROOTFS },
	{ "kernel", 0644, &upload_file, .which = UPLOAD_KERNEL },
	{ "ctl", 0644, &ctl_file, .apart = true, .text = verbs_text, .verbs = template_verbs },
	{ "state", 0444, &rendered_file, .text = template_state_text },
	{ "log", 0444, &grown_file, .source = log_source },
	{ "info", 0444, &rendered_file, .text = template_info_text },
};
const struct directory template_directory = {
	.first = 33, .last = 63, .of = OF_TEMPLATE, .entries = template_entries, .count = ARRAY_SIZE(template_entries),
};

/* sandboxes/ */

static void sandbox_node(const struct node *n, struct sandbox *s, struct node *child)
{
	*child = (struct node){ .server = n->server, .directory = &sandbox_directory, .sandbox = s };
}

static void sandboxes_list(const struct node *n, node_fn *each, void *arg)
{
	struct node child;

	for (struct sandbox *s = sandbox_list(n->server->core); s; s = s->next) {
		sandbox_node(n, s, &child);
		each(arg, s->name, &child);
	}
}

static int sandboxes_find(const struct node *n, const char *name, struct node *child)
{
	struct sandbox *s = sandbox_find(n->server->core, name);

	if (!s)
		return -ENOENT;
	sandbox_node(n, s, child);
	return 0;
}

static int sandboxes_mkdir(const struct node *n, const char *name, struct op *op, struct err *e)
{
	struct create how = { .source = "default" };

	snprintf(how.name, sizeof(how.name), "%s", name);
	return sandbox_create(n->server->core, &how, op, e);
}

static int sandboxes_rmdir(const struct node *child, struct op *op, struct err *e)
{
	return sandbox_forget(child->sandbox, op, e);
}

const struct directory sandboxes_directory = {
	.first = 64, .last = 64, .child = &sandbox_directory, .list = sandboxes_list, .find = sandboxes_find,
	.mkdir = sandboxes_mkdir, .rmdir = sandboxes_rmdir,
};

static char *sandbox_state_text(const struct node *n, size_t *bytes)
{
	return line(bytes, sandbox_state_names[n->sandbox->state]);
}

static char *sandbox_info_text(const struct node *n, size_t *bytes)
{
	return taken(sandbox_info(n->sandbox), bytes);
}

/* Of a run's directory its run; of the sandbox the newest. */
static struct run *run_of(const struct node *n)
{
	return n->run || !n->sandbox ? n->run : n->sandbox->runs;
}

static int output_source(const struct node *n, uint64_t *size)
{
	enum stream which = (enum stream)n->entry->which;
	struct run *r = run_of(n);

	if (!r || !r->stored[which])
		return -1;
	*size = r->stored[which];
	return run_output_fd(r, which);
}

static bool ended(const struct run *r)
{
	return r && (r->state == RUN_EXITED || r->state == RUN_TIMEOUT || r->state == RUN_KILLED);
}

static char *exit_code_text(const struct node *n, size_t *bytes)
{
	struct run *r = run_of(n);

	return ended(r) ? number(bytes, (uint64_t)r->exit_code) : copied("", bytes);
}

static char *duration_text(const struct node *n, size_t *bytes)
{
	struct run *r = run_of(n);

	return ended(r) ? number(bytes, r->duration_ns / 1000000u) : copied("", bytes);
}

static int console_source(const struct node *n, uint64_t *size)
{
	return growing(n->sandbox->console_fd, size);
}

static char *ttl_text(const struct node *n, size_t *bytes)
{
	return seconds(bytes, n->sandbox->settings.ttl_ms);
}

static char *timeout_text(const struct node *n, size_t *bytes)
{
	return seconds(bytes, n->sandbox->settings.timeout_ms);
}

static char *user_text(const struct node *n, size_t *bytes)
{
	return line(bytes, n->sandbox->settings.user);
}

static char *cwd_text(const struct node *n, size_t *bytes)
{
	return line(bytes, n->sandbox->settings.cwd);
}

static int setting_store(const struct node *n, const char *text, size_t bytes, struct err *e)
{
	AUTO_FREE char *value = strndup(text, bytes);

	if (!value)
		return err_set(e, ENOMEM, "no memory for %s", n->entry->key);
	return sandbox_set(n->sandbox, n->entry->key, value, e);
}

static const struct entry sandbox_entries[] = {
	{ "ctl", 0644, &ctl_file, .apart = true, .text = verbs_text, .verbs = sandbox_verbs },
	{ "state", 0444, &rendered_file, .text = sandbox_state_text },
	{ "info", 0444, &rendered_file, .text = sandbox_info_text },
	{ "exec", 0644, &exec_file, .text = exec_usage },
	{ "exec.json", 0644, &exec_json_file, .text = exec_json_usage },
	{ "stdout", 0444, &result_file, .source = output_source, .which = STREAM_STDOUT, .newest = true },
	{ "stderr", 0444, &result_file, .source = output_source, .which = STREAM_STDERR, .newest = true },
	{ "exit_code", 0444, &rendered_file, .text = exit_code_text, .newest = true },
	{ "duration_ms", 0444, &rendered_file, .text = duration_text, .newest = true },
	{ "wait", 0444, &wait_file },
	{ "ttl", 0644, &value_file, .text = ttl_text, .store = setting_store, .key = "ttl" },
	{ "timeout", 0644, &value_file, .text = timeout_text, .store = setting_store, .key = "timeout" },
	{ "user", 0644, &value_file, .text = user_text, .store = setting_store, .key = "user" },
	{ "cwd", 0644, &value_file, .text = cwd_text, .store = setting_store, .key = "cwd" },
	{ "console", 0644, &console_file, .apart = true, .source = console_source },
	{ "runs", .inside = &runs_directory },
	{ "metadata", .inside = &metadata_directory },
	{ "machine", .inside = &machine_directory },
};
const struct directory sandbox_directory = {
	.first = 65, .last = 127, .of = OF_SANDBOX, .entries = sandbox_entries, .count = ARRAY_SIZE(sandbox_entries),
};

/* sandboxes/NAME/runs/ */

static void run_node(const struct node *n, struct run *r, struct node *child)
{
	*child = *n;
	child->directory = &run_directory;
	child->run = r;
}

static void runs_list(const struct node *n, node_fn *each, void *arg)
{
	struct node child;
	char name[24];

	for (struct run *r = n->sandbox->runs; r; r = r->next) {
		snprintf(name, sizeof(name), "%llu", (unsigned long long)r->number);
		run_node(n, r, &child);
		each(arg, name, &child);
	}
}

static int runs_find(const struct node *n, const char *name, struct node *child)
{
	unsigned long long wanted;
	char again[24];
	struct run *r;

	if (sscanf(name, "%20llu", &wanted) != 1)
		return -ENOENT;
	snprintf(again, sizeof(again), "%llu", wanted);
	r = strcmp(name, again) ? NULL : run_find(n->sandbox, wanted);
	if (!r)
		return -ENOENT;
	run_node(n, r, child);
	return 0;
}

const struct directory runs_directory = {
	.first = 128, .last = 128, .of = OF_SANDBOX, .child = &run_directory, .list = runs_list, .find = runs_find,
};

static char *run_state_text(const struct node *n, size_t *bytes)
{
	return line(bytes, run_state_names[n->run->state]);
}

static const struct entry run_entries[] = {
	{ "command", 0444, &command_file },
	{ "stdout", 0444, &result_file, .source = output_source, .which = STREAM_STDOUT },
	{ "stderr", 0444, &result_file, .source = output_source, .which = STREAM_STDERR },
	{ "exit_code", 0444, &rendered_file, .text = exit_code_text },
	{ "duration_ms", 0444, &rendered_file, .text = duration_text },
	{ "state", 0444, &rendered_file, .text = run_state_text },
	{ "ctl", 0644, &ctl_file, .apart = true, .text = verbs_text, .verbs = run_verbs },
};
const struct directory run_directory = {
	.first = 129, .last = 159, .of = OF_RUN, .entries = run_entries, .count = ARRAY_SIZE(run_entries),
};

/* sandboxes/NAME/metadata/: its values are files whose numbers are the values' own. */

static const struct entry value_entries[] = {
	{ NULL, 0644, &metadata_file },
};
const struct directory value_directory = {
	.first = 161, .last = 162, .of = OF_METADATA, .entries = value_entries, .count = ARRAY_SIZE(value_entries),
};

static void value_node(const struct node *n, const struct metadata *m, struct node *child)
{
	*child = *n;
	child->directory = &value_directory;
	child->entry = &value_entries[0];
	child->key_id = m->id;
	memcpy(child->key, m->key, sizeof(child->key));
}

static void metadata_list(const struct node *n, node_fn *each, void *arg)
{
	struct node child;

	for (struct metadata *m = n->sandbox->metadata; m; m = m->next) {
		value_node(n, m, &child);
		each(arg, m->key, &child);
	}
}

static int metadata_lookup(const struct node *n, const char *name, struct node *child)
{
	struct metadata *m = metadata_find(n->sandbox, name);

	if (!m)
		return -ENOENT;
	value_node(n, m, child);
	return 0;
}

static int metadata_create(const struct node *n, const char *name, struct err *e)
{
	if (metadata_find(n->sandbox, name))
		return 0;
	return metadata_set(n->sandbox, name, "", 0, e);
}

static int metadata_unlink(const struct node *n, const char *name, struct err *e)
{
	return metadata_remove(n->sandbox, name, e);
}

const struct directory metadata_directory = {
	.first = 160, .last = 160, .of = OF_SANDBOX, .list = metadata_list, .find = metadata_lookup,
	.create = metadata_create, .unlink = metadata_unlink,
};

/* sandboxes/NAME/machine/ */

static const struct entry machine_entries[] = {
	{ "digest", 0444, &digest_file },
};
const struct directory machine_directory = {
	.first = 163, .last = 175, .of = OF_SANDBOX, .entries = machine_entries, .count = ARRAY_SIZE(machine_entries),
};

const struct directory *const directories[] = {
	&root_directory,  &templates_directory, &template_directory, &sandboxes_directory, &sandbox_directory,
	&runs_directory,  &run_directory,       &metadata_directory, &value_directory,     &machine_directory,
	NULL,
};
