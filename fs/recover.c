/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What an earlier server left: machines that outlived it, by the names of their sockets, and rows and files of
 * sandboxes. The machines are ended and the rows removed. (To go on with a sandbox would mean to connect to its
 * machine, which is in its row, instead of asking it to quit: nothing else is needed of the earlier server.)
 */
#include "back.h"

#include <dirent.h>

static unsigned ask_machines_to_end(struct core *c)
{
	int fd = openat(c->machines.folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *d = fd >= 0 ? fdopendir(fd) : NULL;
	struct dirent *entry;
	unsigned living = 0;

	if (!d) {
		if (fd >= 0)
			close(fd);
		return 0;
	}
	while ((entry = readdir(d)) != NULL) {
		struct machine_client *m;
		uint64_t id;
		char *end;

		if (entry->d_name[0] == '.')
			continue;
		id = strtoull(entry->d_name, &end, 10);
		/* A socket nobody listens on refuses; one that is still listened on is a machine. */
		if (strcmp(end, ".sock") == 0 && machine_connect(&c->machines, id, &m, NULL) == 0) {
			machine_quit(m);
			living++;
		} else {
			unlinkat(c->machines.folder, entry->d_name, 0);
		}
	}
	closedir(d);
	return living;
}

struct row {
	struct row *next;
	uint64_t id;
};

static int note(void *arg, const struct store_sandbox *b)
{
	struct row **rows = arg, *r = malloc(sizeof(*r));

	if (!r)
		return -ENOMEM;
	*r = (struct row){ *rows, b->id };
	*rows = r;
	return 0;
}

static int remove_rows(struct core *c, unsigned *removed, struct err *e)
{
	struct row *rows = NULL, *row;
	int r = store_sandboxes(c->store, note, &rows, e);

	while ((row = rows) != NULL) {
		rows = row->next;
		if (r == 0)
			r = store_sandbox_remove(c->store, row->id, e);
		if (r == 0)
			++*removed;
		free(row);
	}
	return r == 0 ? store_commit(c->store, e) : r;
}

int recover(struct core *c, struct err *e)
{
	unsigned living, removed = 0;
	int r;

	living = ask_machines_to_end(c);
	if (living)
		machines_close(&c->machines);
	r = remove_rows(c, &removed, e);
	if (r < 0)
		return r;
	folder_clear(c->consoles_fd);
	folder_clear(c->outputs_fd);
	if (living || removed)
		core_event(c, "recovered", NULL,
			   json_pack("{s:i, s:i}", "machines_ended", (int)living, "sandboxes_removed", (int)removed));
	return 0;
}
