/* SPDX-License-Identifier: Apache-2.0 */
/* Files that are a text: rendered ones, single values, a template's config, metadata. */
#include "server.h"

#define VALUE_MAX 65536u
#define CONFIG_MAX (1u << 20)

uint64_t text_size(const struct node *n)
{
	size_t bytes = 0;
	AUTO_FREE char *text = n->entry->text(n, &bytes);

	return text ? bytes : 0;
}

/* A rendered file is made once, at open, and so is one whole however it is read. */
static int rendered_open(struct handle *h, fuse_req_t req, struct err *e)
{
	(void)req;
	h->text.bytes = h->node.entry->text(&h->node, &h->text.n);
	h->text.room = h->text.n;
	return h->text.bytes ? 0 : err_set(e, ENOMEM, "no memory for %s", h->node.entry->name);
}

static void rendered_read(struct handle *h, fuse_req_t req, size_t size, uint64_t offset)
{
	reply_slice(req, h->text.bytes, h->text.n, size, offset);
}

const struct behaviour rendered_file = { .open = rendered_open, .read = rendered_read, .size = text_size };

/* A command may be long: it is read where it is. */
static uint64_t command_size(const struct node *n)
{
	return n->run->command_bytes;
}

static void command_read(struct handle *h, fuse_req_t req, size_t size, uint64_t offset)
{
	reply_slice(req, h->node.run->command, h->node.run->command_bytes, size, offset);
}

const struct behaviour command_file = { .read = command_read, .size = command_size };

void text_read(struct handle *h, fuse_req_t req, size_t size, uint64_t offset)
{
	size_t n = 0;
	AUTO_FREE char *text = h->node.entry->text(&h->node, &n);

	if (text)
		reply_slice(req, text, n, size, offset);
	else
		fuse_reply_err(req, ENOMEM);
}

/* What one opening has written so far is the value: whether it came in one write or in several. */
static void value_write(struct handle *h, fuse_req_t req, const char *bytes, size_t size, uint64_t offset)
{
	size_t before = h->text.n, n;
	struct err e = { 0 };
	int r;

	(void)offset;
	if (size > VALUE_MAX - before)
		r = err_set(&e, EINVAL, "%s takes at most %u bytes", h->node.entry->key, VALUE_MAX);
	else if (memchr(bytes, 0, size))
		r = err_set(&e, EINVAL, "%s: a NUL byte", h->node.entry->key);
	else if (buffer_add(&h->text, bytes, size) < 0)
		r = err_set(&e, ENOMEM, "no memory for %s", h->node.entry->key);
	else {
		for (n = h->text.n; n && h->text.bytes[n - 1] == '\n';)
			n--;
		r = h->node.entry->store(&h->node, h->text.bytes, n, &e);
	}
	if (r < 0) {
		h->text.n = before;
		request_fail(h->server, req, &h->node, h->node.entry->key, &e);
		return;
	}
	fuse_reply_write(req, size);
}

const struct behaviour value_file = {
	.read = text_read, .write = value_write, .size = text_size, .resize = resize_nothing,
};

static int config_apply(struct handle *h, struct err *e)
{
	h->unapplied = false;
	return template_config_write(h->node.template, h->text.bytes, h->text.n, e);
}

/* A text that is complete is judged in the write, where every writer looks; what is left, at close. */
static void config_write(struct handle *h, fuse_req_t req, const char *bytes, size_t size, uint64_t offset)
{
	size_t before = h->text.n;
	struct err e = { 0 };
	int r = 0;

	(void)offset;
	if (size > CONFIG_MAX - before)
		r = err_set(&e, EFBIG, "config is longer than %u bytes", CONFIG_MAX);
	else if (buffer_add(&h->text, bytes, size) < 0)
		r = err_set(&e, ENOMEM, "no memory for config");
	else if (json_incomplete(&h->text))
		h->unapplied = true;
	else
		r = config_apply(h, &e);
	if (r < 0) {
		h->text.n = before;
		request_fail(h->server, req, &h->node, "config", &e);
		return;
	}
	fuse_reply_write(req, size);
}

static void config_flush(struct handle *h, fuse_req_t req)
{
	struct err e = { 0 };

	if (h->unapplied && config_apply(h, &e) < 0)
		request_fail(h->server, req, &h->node, "config", &e);
	else
		fuse_reply_err(req, 0);
}

static int config_resize(const struct node *n, uint64_t size, struct err *e)
{
	if (size)
		return err_set(e, EINVAL, "config is written whole");
	return template_config_write(n->template, "", 0, e);
}

const struct behaviour config_file = {
	.read = text_read, .write = config_write, .flush = config_flush, .size = text_size, .resize = config_resize,
};

static uint64_t metadata_size(const struct node *n)
{
	const struct metadata *m = metadata_find(n->sandbox, n->key);

	return m ? m->bytes : 0;
}

static void metadata_read(struct handle *h, fuse_req_t req, size_t size, uint64_t offset)
{
	const struct metadata *m = metadata_find(h->node.sandbox, h->node.key);

	if (m)
		reply_slice(req, m->value, m->bytes, size, offset);
	else
		fuse_reply_err(req, ENOENT);
}

/* Makes the value `size` bytes long and puts `bytes` into it. */
static int metadata_change(const struct node *n, const char *bytes, size_t count, uint64_t offset, uint64_t size, struct err *e)
{
	const struct metadata *m = metadata_find(n->sandbox, n->key);
	AUTO_FREE char *value = NULL;

	if (!m)
		return err_set(e, ENOENT, "there is no metadata called %s", n->key);
	if (size > METADATA_VALUE_MAX)
		return err_set(e, EFBIG, "metadata/%s: a value is at most %d bytes", n->key, METADATA_VALUE_MAX);
	value = calloc(1, size + 1);
	if (!value)
		return err_set(e, ENOMEM, "no memory for a value of %zu bytes", (size_t)size);
	if (m->bytes)
		memcpy(value, m->value, MIN(m->bytes, (size_t)size));
	if (count)
		memcpy(value + offset, bytes, count);
	return metadata_set(n->sandbox, n->key, value, (size_t)size, e);
}

static void metadata_write(struct handle *h, fuse_req_t req, const char *bytes, size_t size, uint64_t offset)
{
	struct err e = { 0 };
	uint64_t end = MIN(offset, (uint64_t)METADATA_VALUE_MAX + 1) + size;

	if (metadata_change(&h->node, bytes, size, offset, MAX(end, metadata_size(&h->node)), &e) < 0)
		request_fail(h->server, req, &h->node, h->node.key, &e);
	else
		fuse_reply_write(req, size);
}

static int metadata_resize(const struct node *n, uint64_t size, struct err *e)
{
	return metadata_change(n, NULL, 0, 0, size, e);
}

const struct behaviour metadata_file = {
	.read = metadata_read, .write = metadata_write, .size = metadata_size, .resize = metadata_resize,
};
