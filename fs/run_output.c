/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What runs have printed: a file for each stream that had any output, shared by forks. The guest's word for how much it
 * may print is not taken: past the limit (and some slack for what was under way) it is cut here.
 */
#include "run_private.h"

#define LIMIT_SLACK 65536u

static void output_name(const struct output *o, char name[24])
{
	snprintf(name, 24, "%llu", (unsigned long long)o->id);
}

static int output_new(struct core *c, struct output **out, int *fd, struct err *e)
{
	struct output *o = calloc(1, sizeof(*o));
	char name[24];

	if (!o)
		return err_set(e, ENOMEM, "out of memory");
	o->core = c;
	o->references = 1;
	o->id = store_id(c->store);
	output_name(o, name);
	*fd = o->id ? openat(c->outputs_fd, name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600) : -1;
	if (*fd < 0) {
		free(o);
		return err_set(e, errno, "cannot make a file for a run's output: %s", strerror(errno));
	}
	*out = o;
	return 0;
}

int core_scratch(struct core *c, struct err *e)
{
	struct output *o = NULL;
	int fd = -1, r = output_new(c, &o, &fd, e);

	if (r < 0)
		return r;
	output_put(o); /* its name goes */
	return fd;
}

void output_put(struct output *o)
{
	char name[24];

	if (!o || --o->references)
		return;
	output_name(o, name);
	unlinkat(o->core->outputs_fd, name, 0);
	free(o);
}

void run_share_output(struct run *to, struct run *from)
{
	for (int w = 0; w < 2; w++) {
		to->stored[w] = from->stored[w];
		to->printed[w] = from->printed[w];
		to->truncated[w] = from->truncated[w];
		to->p->have[w] = from->p->have[w];
		to->p->output[w] = from->p->output[w];
		if (to->p->output[w])
			to->p->output[w]->references++;
	}
}

int run_output_fd(struct run *r, enum stream which)
{
	struct output *o = r->p->output[which];
	char name[24];

	if (r->output_fd[which] >= 0)
		return r->output_fd[which];
	if (!o)
		return -ENOENT;
	output_name(o, name);
	r->output_fd[which] = openat(o->core->outputs_fd, name, O_RDWR | O_CLOEXEC);
	return r->output_fd[which] < 0 ? -errno : r->output_fd[which];
}

void run_close_outputs(struct run *r)
{
	for (int w = 0; w < 2; w++) {
		if (r->output_fd[w] >= 0)
			close(r->output_fd[w]);
		r->output_fd[w] = -1;
	}
}

/* Shows what is in the file to readers: nothing of it before a fork's beginning has been copied. */
void run_publish(struct run *r, enum stream w)
{
	if (r->p->copying[w] || r->stored[w] == r->p->have[w])
		return;
	r->stored[w] = r->p->have[w];
	r->object.changed_ns = now_ns(CLOCK_REALTIME);
	if (r->grown)
		r->grown(r, w);
}

int run_need_file(struct run *r, enum stream w, struct err *e)
{
	int fd;

	if (r->p->output[w]) {
		fd = run_output_fd(r, w);
		return fd < 0 ? err_set(e, -fd, "cannot open a run's output: %s", strerror(-fd)) : 0;
	}
	return output_new(r->sandbox->core, &r->p->output[w], &r->output_fd[w], e);
}

/* n bytes that follow on, from the guest: what was sent again is left out, what is too much is cut. */
int run_store(struct run *r, enum stream w, const uint8_t *bytes, uint64_t n, struct err *e)
{
	struct run_private *p = r->p;
	uint64_t at = p->got[w], room = p->limit + LIMIT_SLACK, done = 0;
	int status;

	p->got[w] += n;
	if (p->got[w] <= p->have[w])
		return 0; /* sent again after an attach */
	if (at < p->have[w])
		done = p->have[w] - at;
	if (at + done >= room) {
		r->truncated[w] = true;
		return 0;
	}
	if (at + n > room) {
		n = room - at;
		r->truncated[w] = true;
	}
	status = run_need_file(r, w, e);
	if (status < 0)
		return status;
	while (done < n) {
		ssize_t k = pwrite(r->output_fd[w], bytes + done, n - done, (off_t)(at + done));

		if (k < 0 && errno == EINTR)
			continue;
		if (k < 0)
			return err_set(e, errno, "cannot store the output of run %llu: %s",
				       (unsigned long long)r->number, strerror(errno));
		done += (uint64_t)k;
	}
	p->have[w] = at + n;
	run_publish(r, w);
	return 0;
}
