/* SPDX-License-Identifier: Apache-2.0 */
/* The container of saved state: building it, and not believing it. */
#include "state.h"

#include <openssl/evp.h>
#include <sys/stat.h>

#include "layout.h"

struct section {
	uint32_t tag, index;
	uint32_t bytes; /* without this head and the padding to 8 */
	uint32_t reserved;
};

#define DIGESTED offsetof(struct state_header, cpu)

static size_t padded(size_t n)
{
	return (n + 7) & ~(size_t)7;
}

static int room_for(struct state *s, size_t n, struct err *e)
{
	size_t room = s->room ? s->room : 32768;
	uint8_t *p;

	while (room < s->used + n)
		room *= 2;
	if (room == s->room)
		return 0;
	p = realloc(s->bytes, room);
	if (!p)
		return err_set(e, ENOMEM, "out of memory");
	memset(p + s->used, 0, room - s->used);
	s->bytes = p;
	s->room = room;
	return 0;
}

int state_begin(struct state *s, struct err *e)
{
	struct state_header *h;
	int r;

	s->used = 0;
	r = room_for(s, sizeof(*h), e);
	if (r < 0)
		return r;
	memset(s->bytes, 0, s->room);
	h = state_header(s);
	memcpy(h->magic, STATE_MAGIC, sizeof(h->magic));
	h->version = STATE_VERSION;
	s->used = sizeof(*h);
	return 0;
}

int state_add(struct state *s, enum state_tag tag, uint32_t index, const void *bytes, size_t n, struct err *e)
{
	struct section head = { .tag = tag, .index = index, .bytes = (uint32_t)n };
	int r = room_for(s, sizeof(head) + padded(n), e);

	if (r < 0)
		return r;
	memcpy(s->bytes + s->used, &head, sizeof(head));
	memcpy(s->bytes + s->used + sizeof(head), bytes, n);
	s->used += sizeof(head) + padded(n);
	return 0;
}

static int digest(const uint8_t *bytes, size_t n, uint8_t to[32], struct err *e)
{
	if (!EVP_Digest(bytes + DIGESTED, n - DIGESTED, to, NULL, EVP_sha256(), NULL))
		return err_set(e, ENOMEM, "cannot compute a SHA-256");
	return 0;
}

int state_end(struct state *s, struct err *e)
{
	state_header(s)->bytes = (uint32_t)s->used;
	return digest(s->bytes, s->used, state_header(s)->digest, e);
}

void state_free(struct state *s)
{
	free(s->bytes);
	*s = (struct state){ 0 };
}

const void *state_find(const struct state *s, enum state_tag tag, uint32_t index, size_t *n)
{
	size_t at = sizeof(struct state_header);

	while (at < s->used) {
		const struct section *x = (const void *)(s->bytes + at);

		if (x->tag == tag && x->index == index) {
			*n = x->bytes;
			return x + 1;
		}
		at += sizeof(*x) + padded(x->bytes);
	}
	return NULL;
}

int state_get(const struct state *s, enum state_tag tag, uint32_t index, const void **at, size_t n, struct err *e)
{
	size_t found = 0;
	const void *p = state_find(s, tag, index, &found);

	if (!p || found != n)
		return err_set(e, EINVAL, "the saved state is damaged: part %u of %u is %s", tag, index,
			       p ? "of the wrong length" : "missing");
	*at = p;
	return 0;
}

int state_write(const struct state *s, int fd, struct err *e)
{
	size_t done = 0;

	if (ftruncate(fd, 0) < 0)
		return err_set(e, errno, "cannot write the saved state: %s", strerror(errno));
	while (done < s->used) {
		ssize_t n = pwrite(fd, s->bytes + done, s->used - done, (off_t)done);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return err_set(e, n < 0 ? errno : EIO, "cannot write the saved state: %s",
				       n < 0 ? strerror(errno) : "nothing was written");
		done += (size_t)n;
	}
	return 0;
}

static int check_sections(const uint8_t *bytes, size_t n, struct err *e)
{
	size_t at = sizeof(struct state_header);

	while (at < n) {
		const struct section *x = (const void *)(bytes + at);

		if (n - at < sizeof(*x) || x->bytes > n - at - sizeof(*x) || padded(x->bytes) > n - at - sizeof(*x))
			return err_set(e, EINVAL, "the saved state is damaged: a part runs past its end");
		at += sizeof(*x) + padded(x->bytes);
	}
	return 0;
}

static int check_header(const struct state_header *h, const struct fingerprint *cpu, struct err *e)
{
	uint64_t disk = h->disk_bytes, ram = h->memory_bytes;

	if (memchr(h->cpu.text, 0, sizeof(h->cpu.text)) == NULL)
		return err_set(e, EINVAL, "the saved state is damaged: it names no processor");
	if (memcmp(h->cpu.digest, cpu->digest, sizeof(cpu->digest)))
		return err_set(e, ENOTSUP,
			       "the saved state is of another processor: it was made on %s, and this host's is %s%s", h->cpu.text,
			       cpu->text,
			       strcmp(h->cpu.text, cpu->text) == 0 ? " with other features (microcode or kernel differ)" : "");
	if (h->vcpus < 1 || h->vcpus > VCPUS_MAX || h->devices > VIRTIO_DEVICES_MAX || h->reserved)
		return err_set(e, EINVAL, "the saved state is damaged: %u vCPUs, %u devices", h->vcpus, h->devices);
	if (ram == 0 || ram > 1ull << 40 || ram % 4096 || disk > 1ull << 40 || disk % (2u << 20) || h->disk_gpa > 1ull << 42 ||
	    h->disk_gpa % (2u << 20))
		return err_set(e, EINVAL, "the saved state is damaged: impossible memory or disk");
	return 0;
}

int state_check(const uint8_t *bytes, size_t n, const struct fingerprint *cpu, struct err *e)
{
	const struct state_header *h = (const void *)bytes;
	uint8_t sum[32];
	int r;

	if (n < sizeof(*h) || memcmp(h->magic, STATE_MAGIC, sizeof(h->magic)))
		return err_set(e, EINVAL, "not a saved machine state");
	if (h->version != STATE_VERSION)
		return err_set(e, ENOTSUP, "the saved state has version %u; this program reads version %u", h->version,
			       STATE_VERSION);
	if (h->bytes != n)
		return err_set(e, EINVAL, "the saved state is cut short or has something behind it");
	r = digest(bytes, n, sum, e);
	if (r < 0)
		return r;
	if (memcmp(sum, h->digest, sizeof(sum)))
		return err_set(e, EINVAL, "the saved state is damaged: its SHA-256 does not match");
	r = check_header(h, cpu, e);
	return r < 0 ? r : check_sections(bytes, n, e);
}

int state_load(struct state *s, const char *path, const struct fingerprint *cpu, struct err *e)
{
	AUTO_CLOSE int fd = open(path, O_RDONLY | O_CLOEXEC);
	AUTO_FREE uint8_t *bytes = NULL;
	struct stat st;
	size_t done = 0;
	int r;

	if (fd < 0 || fstat(fd, &st) < 0)
		return err_set(e, errno, "cannot open %s: %s", path, strerror(errno));
	if (!S_ISREG(st.st_mode) || st.st_size <= 0 || st.st_size > STATE_BYTES_MAX)
		return err_set(e, EINVAL, "%s is not a saved machine state", path);
	bytes = malloc((size_t)st.st_size);
	if (!bytes)
		return err_set(e, ENOMEM, "out of memory");
	while (done < (size_t)st.st_size) {
		ssize_t n = pread(fd, bytes + done, (size_t)st.st_size - done, (off_t)done);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return err_set(e, n < 0 ? errno : EIO, "cannot read %s", path);
		done += (size_t)n;
	}
	r = state_check(bytes, done, cpu, e);
	if (r < 0)
		return r;
	s->room = s->used = done;
	s->bytes = steal_ptr(&bytes);
	return 0;
}
