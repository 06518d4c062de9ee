/* SPDX-License-Identifier: Apache-2.0 */
/* The virtio transport and virtqueues against a driver that behaves, and drivers that do not; and the entropy device. */
#include "driver.h"

#include "../../vmm/rng.h"
#include "../../vmm/vsock.h"

static void test_memory(void)
{
	struct memory m = { .ram = (uint8_t *)0x10000000, .ram_bytes = 5ull << 30, .disk = (uint8_t *)0x900000000000,
			    .disk_bytes = 2u << 20, .disk_gpa = 8ull << 30 };

	CHECK(memory_at(&m, 0, 1) == m.ram);
	CHECK(memory_at(&m, 0, 0) == NULL);
	CHECK(memory_at(&m, RAM_HOLE_START - 4096, 4096) == m.ram + RAM_HOLE_START - 4096);
	CHECK(memory_at(&m, RAM_HOLE_START - 4096, 4097) == NULL);
	CHECK(memory_at(&m, RAM_HOLE_START, 1) == NULL);
	CHECK(memory_at(&m, RAM_HIGH_START, 1) == m.ram + RAM_HOLE_START);
	CHECK(memory_at(&m, RAM_HIGH_START + (2ull << 30) - 1, 1) == m.ram + (5ull << 30) - 1);
	CHECK(memory_at(&m, RAM_HIGH_START + (2ull << 30) - 1, 2) == NULL);
	CHECK(memory_at(&m, RAM_HIGH_START - 1, 2) == NULL);
	CHECK(memory_at(&m, UINT64_MAX, 1) == NULL);
	CHECK(memory_at(&m, UINT64_MAX, UINT64_MAX) == NULL);
	CHECK(memory_at(&m, 4096, UINT64_MAX) == NULL);
	CHECK(memory_at(&m, m.disk_gpa, 2u << 20) == m.disk);
	CHECK(memory_at(&m, m.disk_gpa + 1, 2u << 20) == NULL);
	m.ram_bytes = 1u << 20;
	CHECK(memory_at(&m, RAM_HIGH_START, 1) == NULL);
	CHECK(memory_at(&m, (1u << 20) - 1, 2) == NULL);
	m.disk = NULL;
	CHECK(memory_at(&m, m.disk_gpa, 1) == NULL);
}

static void test_registers(void)
{
	struct driver d;
	struct rng *r;
	uint16_t half = 0xffff;
	uint64_t wide = ~0ull;

	driver_memory(&d);
	r = rng_new(&d.memory);
	d.v = rng_virtio(r);
	CHECK(driver_read(&d, VIRTIO_MMIO_MAGIC_VALUE) == 0x74726976);
	CHECK(driver_read(&d, VIRTIO_MMIO_VERSION) == 2);
	CHECK(driver_read(&d, VIRTIO_MMIO_DEVICE_ID) == VIRTIO_ID_RNG);
	driver_write(&d, VIRTIO_MMIO_DEVICE_FEATURES_SEL, 1);
	CHECK(driver_read(&d, VIRTIO_MMIO_DEVICE_FEATURES) == 1); /* VERSION_1 */
	driver_write(&d, VIRTIO_MMIO_DEVICE_FEATURES_SEL, 77);
	CHECK(driver_read(&d, VIRTIO_MMIO_DEVICE_FEATURES) == 0);
	CHECK(driver_read(&d, VIRTIO_MMIO_SHM_LEN_LOW) == UINT32_MAX);

	/* Widths and places that are not registers. */
	virtio_mmio_read(d.v, VIRTIO_MMIO_MAGIC_VALUE, &half, 2);
	CHECK(half == 0);
	virtio_mmio_read(d.v, VIRTIO_MMIO_MAGIC_VALUE, &wide, 8);
	CHECK(wide == 0);
	CHECK(driver_read(&d, 0x104) == 0 && driver_read(&d, 0xffc) == 0);
	CHECK(virtio_mmio_write(d.v, VIRTIO_MMIO_STATUS, &wide, 8) == -1);
	CHECK(driver_read(&d, VIRTIO_MMIO_STATUS) == 0);

	/* Features: without VERSION_1, and with one that was not offered, FEATURES_OK does not stick; nor DRIVER_OK then. */
	driver_write(&d, VIRTIO_MMIO_STATUS, 3);
	driver_write(&d, VIRTIO_MMIO_STATUS, 11);
	CHECK(driver_read(&d, VIRTIO_MMIO_STATUS) == 3);
	driver_write(&d, VIRTIO_MMIO_STATUS, 15);
	CHECK(driver_read(&d, VIRTIO_MMIO_STATUS) == 3);
	driver_write(&d, VIRTIO_MMIO_DRIVER_FEATURES_SEL, 1);
	driver_write(&d, VIRTIO_MMIO_DRIVER_FEATURES, 1);
	driver_write(&d, VIRTIO_MMIO_DRIVER_FEATURES_SEL, 0);
	driver_write(&d, VIRTIO_MMIO_DRIVER_FEATURES, 1u << VIRTIO_RING_F_INDIRECT_DESC);
	driver_write(&d, VIRTIO_MMIO_STATUS, 11);
	CHECK(driver_read(&d, VIRTIO_MMIO_STATUS) == 3);
	driver_write(&d, VIRTIO_MMIO_DRIVER_FEATURES, 0);
	driver_write(&d, VIRTIO_MMIO_STATUS, 11);
	CHECK(driver_read(&d, VIRTIO_MMIO_STATUS) == 11);
	driver_write(&d, VIRTIO_MMIO_DRIVER_FEATURES, 1u << VIRTIO_RING_F_INDIRECT_DESC); /* too late */
	CHECK(d.v->s.driver_features == VIRTIO_F_VERSION_1_BIT);
	driver_write(&d, VIRTIO_MMIO_STATUS, 1); /* bits do not go away */
	CHECK(driver_read(&d, VIRTIO_MMIO_STATUS) == 11);

	/* Queues: one that is not there, sizes that are none, a live queue does not change. */
	driver_write(&d, VIRTIO_MMIO_QUEUE_SEL, 1);
	CHECK(driver_read(&d, VIRTIO_MMIO_QUEUE_NUM_MAX) == 0);
	driver_write(&d, VIRTIO_MMIO_QUEUE_READY, 1);
	driver_write(&d, VIRTIO_MMIO_QUEUE_SEL, 0xffffffff);
	driver_write(&d, VIRTIO_MMIO_QUEUE_READY, 1);
	CHECK(driver_read(&d, VIRTIO_MMIO_QUEUE_READY) == 0);
	driver_queue_up(&d, 0, 64);
	driver_write(&d, VIRTIO_MMIO_QUEUE_NUM, 128);
	driver_write(&d, VIRTIO_MMIO_QUEUE_DESC_LOW, 0);
	CHECK(d.v->s.queue[0].size == 64 && d.v->s.queue[0].desc == queue_at(0));
	CHECK(driver_write(&d, VIRTIO_MMIO_QUEUE_NOTIFY, 0) == 0);
	CHECK(driver_write(&d, VIRTIO_MMIO_QUEUE_NOTIFY, 1) == -1);
	driver_write(&d, VIRTIO_MMIO_STATUS, 0);
	CHECK(driver_read(&d, VIRTIO_MMIO_STATUS) == 0 && driver_read(&d, VIRTIO_MMIO_QUEUE_READY) == 0);
	for (unsigned i = 0; i < 3; i++) {
		static const uint32_t sizes[] = { 0, 3, 512 };

		driver_write(&d, VIRTIO_MMIO_STATUS, 0);
		driver_write(&d, VIRTIO_MMIO_QUEUE_NUM, 64);
		driver_write(&d, VIRTIO_MMIO_QUEUE_NUM, sizes[i]);
		driver_write(&d, VIRTIO_MMIO_QUEUE_READY, 1);
		CHECK(driver_read(&d, VIRTIO_MMIO_QUEUE_READY) == 0 && driver_broken(&d));
	}
	rng_free(r);
	munmap(d.memory.ram, GUEST_BYTES);
}

static void test_rng(void)
{
	struct vring_used_elem u;
	struct driver d;
	struct rng *r;
	uint8_t *b;
	unsigned zeros = 0;

	driver_memory(&d);
	r = rng_new(&d.memory);
	driver_up(&d, rng_virtio(r));
	b = d.memory.ram + BUFFERS_AT;
	driver_desc(&d, 0, 0, BUFFERS_AT, 64, VRING_DESC_F_WRITE, 0);
	driver_post(&d, 0, 0);
	virtio_kick(d.v, 0);
	CHECK(driver_used(&d, 0, &u) && u.id == 0 && u.len == 64 && driver_interrupted(&d) && !driver_interrupted(&d));
	for (unsigned i = 0; i < 64; i++)
		zeros += b[i] == 0;
	CHECK(zeros < 16 && b[64] == 0);

	/* Larger than the bound, over two buffers, with a readable one; and no interrupt where none is wanted. */
	driver_desc(&d, 0, 1, BUFFERS_AT, 16, VRING_DESC_F_NEXT, 2);
	driver_desc(&d, 0, 2, BUFFERS_AT + 0x1000, 100, VRING_DESC_F_WRITE | VRING_DESC_F_NEXT, 3);
	driver_desc(&d, 0, 3, BUFFERS_AT + 0x2000, 1u << 20, VRING_DESC_F_WRITE, 0);
	d.q[0].avail->flags = VRING_AVAIL_F_NO_INTERRUPT;
	driver_post(&d, 0, 1);
	virtio_kick(d.v, 0);
	CHECK(driver_used(&d, 0, &u) && u.id == 1 && u.len == 4096 && !driver_interrupted(&d));
	CHECK(d.memory.ram[BUFFERS_AT + 0x2000 + 3996] == 0);
	CHECK(!driver_used(&d, 0, &u));
	virtio_kick(d.v, 7);
	rng_free(r);
	munmap(d.memory.ram, GUEST_BYTES);
}

typedef void wreck(struct driver *d);

static void loop_of_descriptors(struct driver *d)
{
	driver_desc(d, 0, 0, BUFFERS_AT, 16, VRING_DESC_F_WRITE | VRING_DESC_F_NEXT, 1);
	driver_desc(d, 0, 1, BUFFERS_AT, 16, VRING_DESC_F_WRITE | VRING_DESC_F_NEXT, 0);
	driver_post(d, 0, 0);
}
static void outside_memory(struct driver *d)
{
	driver_desc(d, 0, 0, GUEST_BYTES - 8, 16, VRING_DESC_F_WRITE, 0);
	driver_post(d, 0, 0);
}
static void wrapping_address(struct driver *d)
{
	driver_desc(d, 0, 0, UINT64_MAX - 8, 16, VRING_DESC_F_WRITE, 0);
	driver_post(d, 0, 0);
}
static void zero_length(struct driver *d)
{
	driver_desc(d, 0, 0, BUFFERS_AT, 0, VRING_DESC_F_WRITE, 0);
	driver_post(d, 0, 0);
}
static void huge_length(struct driver *d)
{
	driver_desc(d, 0, 0, BUFFERS_AT, UINT32_MAX, VRING_DESC_F_WRITE, 0);
	driver_post(d, 0, 0);
}
static void next_out_of_range(struct driver *d)
{
	driver_desc(d, 0, 0, BUFFERS_AT, 16, VRING_DESC_F_WRITE | VRING_DESC_F_NEXT, DRIVER_SIZE);
	driver_post(d, 0, 0);
}
static void head_out_of_range(struct driver *d)
{
	driver_post(d, 0, DRIVER_SIZE);
}
static void indirect(struct driver *d)
{
	driver_desc(d, 0, 0, BUFFERS_AT, 16, VRING_DESC_F_INDIRECT, 0);
	driver_post(d, 0, 0);
}
static void readable_after_writable(struct driver *d)
{
	driver_desc(d, 0, 0, BUFFERS_AT, 16, VRING_DESC_F_WRITE | VRING_DESC_F_NEXT, 1);
	driver_desc(d, 0, 1, BUFFERS_AT, 16, 0, 0);
	driver_post(d, 0, 0);
}
static void index_far_ahead(struct driver *d)
{
	d->q[0].avail->idx = (uint16_t)(d->q[0].avail->idx + DRIVER_SIZE + 1);
}
static void index_behind(struct driver *d)
{
	d->q[0].avail->idx--;
}
static void ring_outside_memory(struct driver *d)
{
	d->v->s.queue[0].used = GUEST_BYTES - 4;
}
static void ring_unaligned(struct driver *d)
{
	d->v->s.queue[0].avail++;
}
static void size_from_a_bad_file(struct driver *d)
{
	d->v->s.queue[0].size = 63;
}

static void test_wrecks(void)
{
	static wreck *const wrecks[] = { loop_of_descriptors, outside_memory, wrapping_address, zero_length, huge_length,
					 next_out_of_range, head_out_of_range, indirect, readable_after_writable, index_far_ahead,
					 index_behind, ring_outside_memory, ring_unaligned, size_from_a_bad_file };
	struct vring_used_elem u;
	struct driver d;
	struct rng *r;

	driver_memory(&d);
	r = rng_new(&d.memory);
	for (unsigned i = 0; i < sizeof(wrecks) / sizeof(wrecks[0]); i++) {
		driver_up(&d, rng_virtio(r));
		driver_interrupted(&d);
		wrecks[i](&d);
		virtio_kick(d.v, 0);
		CHECK(driver_broken(&d) && d.v->why && !driver_used(&d, 0, &u));
		CHECK(driver_read(&d, VIRTIO_MMIO_INTERRUPT_STATUS) == VIRTIO_MMIO_INT_CONFIG && driver_interrupted(&d));
		/* Stands still: a good chain is not taken now. */
		driver_desc(&d, 0, 5, BUFFERS_AT, 16, VRING_DESC_F_WRITE, 0);
		driver_post(&d, 0, 5);
		virtio_kick(d.v, 0);
		CHECK(!driver_used(&d, 0, &u) && !driver_interrupted(&d));
	}
	/* And is well again after a reset. */
	driver_up(&d, rng_virtio(r));
	CHECK(!d.v->why);
	driver_desc(&d, 0, 5, BUFFERS_AT, 16, VRING_DESC_F_WRITE, 0);
	driver_post(&d, 0, 5);
	virtio_kick(d.v, 0);
	CHECK(driver_used(&d, 0, &u) && u.len == 16);
	rng_free(r);
	munmap(d.memory.ram, GUEST_BYTES);
}

static void test_queue(void)
{
	struct chain *c = malloc(sizeof(*c));
	struct vring_used_elem u;
	struct driver d;
	struct rng *r;
	char text[32];

	driver_memory(&d);
	r = rng_new(&d.memory);
	driver_up(&d, rng_virtio(r));
	memcpy(d.memory.ram + BUFFERS_AT, "hello, ", 7);
	memcpy(d.memory.ram + BUFFERS_AT + 100, "world", 5);
	driver_desc(&d, 0, 9, BUFFERS_AT, 7, VRING_DESC_F_NEXT, 3);
	driver_desc(&d, 0, 3, BUFFERS_AT + 100, 5, VRING_DESC_F_NEXT, 63);
	driver_desc(&d, 0, 63, BUFFERS_AT + 200, 2, VRING_DESC_F_WRITE | VRING_DESC_F_NEXT, 0);
	driver_desc(&d, 0, 0, BUFFERS_AT + 300, 9, VRING_DESC_F_WRITE, 0);
	for (unsigned round = 0; round < 70000; round++) { /* indices wrap */
		driver_post(&d, 0, 9);
		CHECK(virtqueue_take(d.v, 0, c) == 1 && c->head == 9);
		CHECK(virtqueue_take(d.v, 0, c) == 0);
		virtqueue_untake(d.v, 0);
		CHECK(virtqueue_take(d.v, 0, c) == 1);
		virtqueue_give(d.v, 0, c, round);
		CHECK(driver_used(&d, 0, &u) && u.id == 9 && u.len == round);
	}
	CHECK(c->readable == 2 && c->writable == 2 && c->readable_bytes == 12 && c->writable_bytes == 11);
	CHECK(chain_read(c, 0, text, sizeof(text)) == 12 && memcmp(text, "hello, world", 12) == 0);
	CHECK(chain_read(c, 8, text, 3) == 3 && memcmp(text, "orl", 3) == 0);
	CHECK(chain_read(c, 12, text, 3) == 0 && chain_read(c, SIZE_MAX, text, 3) == 0);
	CHECK(chain_write(c, 1, "abcdefghijklmnop", 16) == 10);
	CHECK(d.memory.ram[BUFFERS_AT + 201] == 'a' && memcmp(d.memory.ram + BUFFERS_AT + 300, "bcdefghij", 9) == 0 &&
	      d.memory.ram[BUFFERS_AT + 309] == 0);

	/* Kick suppression sees what came meanwhile. */
	CHECK(!virtqueue_kicks(d.v, 0, false) && d.q[0].used->flags == VRING_USED_F_NO_NOTIFY);
	driver_post(&d, 0, 9);
	CHECK(virtqueue_kicks(d.v, 0, true) && d.q[0].used->flags == 0);
	free(c);
	rng_free(r);
	munmap(d.memory.ram, GUEST_BYTES);
}

static void test_saved(void)
{
	struct driver d;
	struct rng *r;
	struct virtio_saved s;

	driver_memory(&d);
	r = rng_new(&d.memory);
	driver_up(&d, rng_virtio(r));
	s = d.v->s;
	CHECK(virtio_saved_valid(d.v, &s));
	s.queue[0].size = 48;
	CHECK(!virtio_saved_valid(d.v, &s));
	s = d.v->s;
	s.queue[1] = s.queue[0];
	CHECK(!virtio_saved_valid(d.v, &s));
	s = d.v->s;
	s.queue[0].ready = 7;
	CHECK(!virtio_saved_valid(d.v, &s));
	s = d.v->s;
	s.driver_features |= 1;
	CHECK(!virtio_saved_valid(d.v, &s));
	rng_free(r);
	munmap(d.memory.ram, GUEST_BYTES);
}

int main(void)
{
	test_memory();
	test_registers();
	test_rng();
	test_wrecks();
	test_queue();
	test_saved();
	return 0;
}
