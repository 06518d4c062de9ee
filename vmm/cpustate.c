/* SPDX-License-Identifier: Apache-2.0 */
/*
 * KVM's state, in the order that KVM wants it: processor state first when saving (reading it settles pending INITs),
 * events last; and when loading CPUID before MSRs, the APIC base (in SREGS) before the APIC, the APIC before its deadline
 * (in the MSRs), the TSC before the deadline, events last, because setting registers clears them.
 */
#include "cpustate.h"

#include <asm/kvm.h>
#include <linux/kvm.h>
#include <stddef.h>
#include <sys/ioctl.h>

#include "layout.h"

#define MSR_TSC 0x10u
#define MSR_TSC_DEADLINE 0x6e0u
#define MSR_KVM_WALL_CLOCK 0x4b564d00u

#ifndef KVM_VCPU_TSC_CTRL
#define KVM_VCPU_TSC_CTRL 0
#define KVM_VCPU_TSC_OFFSET 0
#endif

/* struct kvm_msrs, with room for the entries. */
struct msr_block {
	uint32_t nmsrs, padding;
	struct kvm_msr_entry entry[MSRS_MAX];
};
_Static_assert(offsetof(struct msr_block, entry) == sizeof(struct kvm_msrs), "as KVM has it");

struct one_msr {
	uint32_t nmsrs, padding;
	struct kvm_msr_entry entry;
};

struct xsave {
	uint8_t bytes[16384]; /* every feature that KVM enables unasked fits; larger ones are asked for, and are not */
} __attribute__((aligned(64)));

static int refused(const struct vcpu *v, const char *what, struct err *e)
{
	return err_set(e, errno, "KVM refuses the %s of vCPU %u: %s", what, v->index, strerror(errno));
}

/* MSRs. */

/* The list is KVM's own, less what is of no use to this guest, plus what KVM leaves out of it. */
static bool msr_left_out(uint32_t index)
{
	return index == MSR_TSC || /* apart */
	       index == 0x11u || index == 0x12u || /* kvmclock's old numbers */
	       index == MSR_KVM_WALL_CLOCK || /* writing it makes KVM write to guest memory; guests write it before they read */
	       (index >= 0x40000000u && index <= 0x400001ffu) || /* Hyper-V's */
	       (index >= 0x480u && index <= 0x491u) ||           /* what VMX can do */
	       (index >= 0xc1u && index <= 0xc8u) || (index >= 0x186u && index <= 0x18du) ||
	       (index >= 0x309u && index <= 0x30bu) || (index >= 0x38du && index <= 0x390u) ||
	       (index >= 0xc0010000u && index <= 0xc0010007u) || (index >= 0xc0010200u && index <= 0xc001020bu) ||
	       (index >= 0xc0000300u && index <= 0xc0000302u); /* performance counters */
}

static void msr_add(struct msr_list *l, uint32_t index)
{
	for (unsigned i = 0; i < l->count; i++)
		if (l->index[i] == index)
			return;
	if (l->count < MSRS_MAX)
		l->index[l->count++] = index;
}

static void msr_add_unlisted(struct msr_list *l)
{
	static const uint32_t fixed[] = { 0x250, 0x258, 0x259, 0x268, 0x269, 0x26a, 0x26b, 0x26c, 0x26d, 0x26e, 0x26f, 0x2ff };
	static const uint32_t others[] = { 0x1a0 /* MISC_ENABLE */, 0x277 /* PAT */, 0xda0 /* XSS */, 0x1d9 /* DEBUGCTL */ };

	for (uint32_t i = MSR_KVM_WALL_CLOCK + 1; i <= MSR_KVM_WALL_CLOCK + 8; i++)
		msr_add(l, i);
	for (uint32_t i = 0x200; i < 0x210; i++) /* variable MTRRs */
		msr_add(l, i);
	for (unsigned i = 0; i < ARRAY_SIZE(fixed); i++)
		msr_add(l, fixed[i]);
	for (unsigned i = 0; i < ARRAY_SIZE(others); i++)
		msr_add(l, others[i]);
}

/* Moves the TSC deadline to the end: what it means depends on the others. */
static void msr_order(struct msr_list *l)
{
	for (unsigned i = 0; i + 1 < l->count; i++)
		if (l->index[i] == MSR_TSC_DEADLINE) {
			uint32_t last = l->index[l->count - 1];

			l->index[l->count - 1] = MSR_TSC_DEADLINE;
			l->index[i] = last;
		}
}

static void fill(struct msr_block *b, const struct msr_list *l, unsigned from)
{
	memset(b, 0, sizeof(*b));
	b->nmsrs = l->count - from;
	for (unsigned i = from; i < l->count; i++)
		b->entry[i - from].index = l->index[i];
}

int cpustate_msrs(const struct kvm *k, const struct vcpu *v, struct msr_list *l, struct err *e)
{
	AUTO_FREE struct kvm_msr_list *all = calloc(1, sizeof(*all) + 1024 * sizeof(uint32_t));
	AUTO_FREE struct msr_block *b = calloc(1, sizeof(*b));
	unsigned from = 0;

	if (!all || !b)
		return err_set(e, ENOMEM, "out of memory");
	all->nmsrs = 1024;
	if (ioctl(k->fd, KVM_GET_MSR_INDEX_LIST, all) < 0)
		return err_set(e, errno, "KVM does not list its MSRs: %s", strerror(errno));
	l->count = 0;
	for (unsigned i = 0; i < all->nmsrs; i++)
		if (!msr_left_out(all->indices[i]))
			msr_add(l, all->indices[i]);
	msr_add_unlisted(l);
	/* KVM_GET_MSRS stops at one that it cannot read: that one goes. */
	while (from < l->count) {
		int n;

		fill(b, l, from);
		n = ioctl(v->fd, KVM_GET_MSRS, b);
		if (n < 0)
			return refused(v, "MSRs", e);
		from += (unsigned)n;
		if (from < l->count)
			memmove(&l->index[from], &l->index[from + 1], (--l->count - from) * sizeof(l->index[0]));
	}
	msr_order(l);
	return 0;
}

int cpustate_msrs_of(const struct state *s, struct msr_list *l, struct err *e)
{
	size_t n = 0;
	const struct kvm_msr_entry *m = state_find(s, STATE_MSRS, 0, &n);

	if (!m || n % sizeof(*m) || n / sizeof(*m) > MSRS_MAX)
		return err_set(e, EINVAL, "the saved state is damaged: its MSRs");
	l->count = (unsigned)(n / sizeof(*m));
	for (unsigned i = 0; i < l->count; i++)
		l->index[i] = m[i].index;
	return 0;
}

static int save_msrs(struct state *s, const struct vcpu *v, const struct msr_list *l, struct err *e)
{
	AUTO_FREE struct msr_block *b = malloc(sizeof(*b));
	int n;

	if (!b)
		return err_set(e, ENOMEM, "out of memory");
	fill(b, l, 0);
	n = ioctl(v->fd, KVM_GET_MSRS, b);
	if (n < 0)
		return refused(v, "MSRs", e);
	if ((unsigned)n != l->count)
		return err_set(e, EIO, "KVM cannot read MSR %#x of vCPU %u any more", b->entry[n].index, v->index);
	return state_add(s, STATE_MSRS, v->index, b->entry, l->count * sizeof(b->entry[0]), e);
}

/*
 * A zero deadline may be one that has passed, its interrupt not yet in the APIC: such a guest would wait forever. It is set
 * to now; a guest that waits for no timer ignores the interrupt.
 */
static void fire_lost_deadline(const struct state *s, const struct vcpu *v, struct msr_block *b)
{
	size_t n = 0;
	const uint64_t *tsc = state_find(s, STATE_TSC, v->index, &n);

	for (unsigned i = 0; i < b->nmsrs; i++)
		if (b->entry[i].index == MSR_TSC_DEADLINE && b->entry[i].data == 0 && n == sizeof(*tsc))
			b->entry[i].data = *tsc;
}

/*
 * Drops the entries that the vCPU has already: to write them is work for nothing, and of some that a guest does not use
 * KVM complains on the host's console. Those that it cannot read stay.
 */
static void drop_equal(const struct vcpu *v, struct msr_block *b)
{
	AUTO_FREE struct msr_block *now = malloc(sizeof(*now));
	uint32_t kept = 0;
	int n;

	if (!now)
		return;
	memcpy(now, b, offsetof(struct msr_block, entry) + b->nmsrs * sizeof(b->entry[0]));
	n = ioctl(v->fd, KVM_GET_MSRS, now);
	for (uint32_t i = 0; n > 0 && i < b->nmsrs; i++)
		if ((int)i >= n || now->entry[i].data != b->entry[i].data)
			b->entry[kept++] = b->entry[i];
	if (n > 0)
		b->nmsrs = kept;
}

static int load_msrs(const struct state *s, const struct vcpu *v, struct err *e)
{
	AUTO_FREE struct msr_block *b = NULL;
	size_t bytes = 0;
	const struct kvm_msr_entry *m = state_find(s, STATE_MSRS, v->index, &bytes);
	int n;

	if (!m || bytes % sizeof(*m) || bytes / sizeof(*m) > MSRS_MAX)
		return err_set(e, EINVAL, "the saved state is damaged: the MSRs of vCPU %u", v->index);
	b = malloc(sizeof(*b));
	if (!b)
		return err_set(e, ENOMEM, "out of memory");
	b->nmsrs = (uint32_t)(bytes / sizeof(*m));
	b->padding = 0;
	memcpy(b->entry, m, bytes);
	fire_lost_deadline(s, v, b);
	drop_equal(v, b);
	n = ioctl(v->fd, KVM_SET_MSRS, b);
	if (n < 0)
		return refused(v, "MSRs", e);
	if ((unsigned)n != b->nmsrs)
		return err_set(e, ENOTSUP, "this host's KVM refuses value %#llx of MSR %#x", b->entry[n].data, b->entry[n].index);
	return 0;
}

/* The TSC. Its value runs on between two reads, so that writing values makes vCPUs differ; offsets do not. */

static int tsc_read(const struct vcpu *v, uint64_t *tsc, struct err *e)
{
	struct one_msr m = { .nmsrs = 1, .entry.index = MSR_TSC };

	if (ioctl(v->fd, KVM_GET_MSRS, &m) != 1)
		return refused(v, "TSC", e);
	*tsc = m.entry.data;
	return 0;
}

static int tsc_offset(const struct vcpu *v, unsigned long request, uint64_t *offset)
{
	struct kvm_device_attr a = {
		.group = KVM_VCPU_TSC_CTRL, .attr = KVM_VCPU_TSC_OFFSET, .addr = (uintptr_t)offset,
	};

	return ioctl(v->fd, request, &a) < 0 ? -errno : 0;
}

/* All as of one instant: the first one's value, and the others' distance from it. */
static int save_tsc(struct state *s, const struct vcpu *v, unsigned vcpus, struct err *e)
{
	uint64_t first = 0, first_offset = 0;
	int r = tsc_read(&v[0], &first, e);
	bool offsets = tsc_offset(&v[0], KVM_GET_DEVICE_ATTR, &first_offset) == 0;

	for (unsigned i = 0; i < vcpus && r == 0; i++) {
		uint64_t tsc = first, offset = 0;

		if (offsets && i > 0 && tsc_offset(&v[i], KVM_GET_DEVICE_ATTR, &offset) == 0)
			tsc = first + (offset - first_offset);
		r = state_add(s, STATE_TSC, i, &tsc, sizeof(tsc), e);
	}
	return r;
}

static int write_tsc(const struct vcpu *v, uint64_t tsc, struct err *e)
{
	struct one_msr m = { .nmsrs = 1, .entry = { .index = MSR_TSC, .data = tsc } };

	return ioctl(v->fd, KVM_SET_MSRS, &m) == 1 ? 0 : refused(v, "TSC", e);
}

static int load_tsc(const struct state *s, const struct vcpu *v, unsigned vcpus, struct err *e)
{
	uint64_t now = 0, base = 0;
	bool offsets = tsc_offset(&v[0], KVM_GET_DEVICE_ATTR, &base) == 0 && tsc_read(&v[0], &now, NULL) == 0;

	for (unsigned i = 0; i < vcpus; i++) {
		const void *p;
		uint64_t tsc, offset;
		int r = state_get(s, STATE_TSC, i, &p, sizeof(tsc), e);

		if (r < 0)
			return r;
		memcpy(&tsc, p, sizeof(tsc));
		offset = base + (tsc - now);
		if (offsets && tsc_offset(&v[i], KVM_SET_DEVICE_ATTR, &offset) == 0)
			continue;
		r = write_tsc(&v[i], tsc, e);
		if (r < 0)
			return r;
	}
	return 0;
}

static int tsc_frequency(const struct vcpu *v, uint32_t *khz)
{
	int n = ioctl(v->fd, KVM_GET_TSC_KHZ, 0);

	*khz = n > 0 ? (uint32_t)n : 0;
	return n;
}

/* A guest that was told another frequency: scaled where the processor can, tolerated where the difference is small. */
static int load_tsc_frequency(const struct state *s, const struct kvm *k, const struct vcpu *v, unsigned vcpus, struct err *e)
{
	uint32_t saved = state_header(s)->tsc_khz, here = 0;
	uint64_t off;

	if (!saved || tsc_frequency(&v[0], &here) <= 0)
		return 0;
	off = saved > here ? saved - here : here - saved;
	if (off * 1000000 <= (uint64_t)here * 250)
		return 0;
	for (unsigned i = 0; k->tsc_control && i < vcpus; i++)
		if (ioctl(v[i].fd, KVM_SET_TSC_KHZ, saved) < 0)
			return refused(&v[i], "TSC frequency", e);
	if (!k->tsc_control && off * 20 > here)
		return err_set(e, ENOTSUP, "the saved state is of a machine with a TSC of %u kHz; this host has %u and cannot scale it",
			       saved, here);
	return 0;
}

/* One vCPU. */

static int save_xsave(struct state *s, const struct kvm *k, const struct vcpu *v, struct err *e)
{
	size_t bytes = k->xsave_bytes ? k->xsave_bytes : sizeof(struct kvm_xsave);
	AUTO_FREE struct xsave *x = aligned_alloc(64, sizeof(*x));

	if (!x || bytes > sizeof(*x))
		return err_set(e, ENOMEM, "no memory for %zu bytes of XSAVE state", bytes);
	memset(x, 0, sizeof(*x));
	if (ioctl(v->fd, k->xsave_bytes ? KVM_GET_XSAVE2 : KVM_GET_XSAVE, x) < 0)
		return refused(v, "XSAVE state", e);
	return state_add(s, STATE_XSAVE, v->index, x, bytes, e);
}

static int load_xsave(const struct state *s, const struct kvm *k, const struct vcpu *v, struct err *e)
{
	size_t bytes = k->xsave_bytes ? k->xsave_bytes : sizeof(struct kvm_xsave);
	AUTO_FREE struct xsave *x = NULL;
	const void *p;
	int r = state_get(s, STATE_XSAVE, v->index, &p, bytes, e);

	if (r < 0)
		return r;
	/* KVM reads as much as it wants to, which is not to be past the end of the section. */
	x = aligned_alloc(64, sizeof(*x));
	if (!x || bytes > sizeof(*x))
		return err_set(e, ENOMEM, "no memory for %zu bytes of XSAVE state", bytes);
	memset((uint8_t *)x + bytes, 0, sizeof(*x) - bytes);
	memcpy(x, p, bytes);
	return ioctl(v->fd, KVM_SET_XSAVE, x) < 0 ? refused(v, "XSAVE state", e) : 0;
}

static int save_cpuid(struct state *s, const struct vcpu *v, struct err *e)
{
	AUTO_FREE struct cpuid *c = calloc(1, sizeof(*c));

	if (!c)
		return err_set(e, ENOMEM, "out of memory");
	c->nent = CPUID_ENTRIES_MAX;
	if (ioctl(v->fd, KVM_GET_CPUID2, c) < 0)
		return refused(v, "CPUID", e);
	return state_add(s, STATE_CPUID, v->index, c->entry, c->nent * sizeof(c->entry[0]), e);
}

static int load_cpuid(const struct state *s, const struct vcpu *v, struct err *e)
{
	AUTO_FREE struct cpuid *c = NULL;
	size_t bytes = 0;
	const struct kvm_cpuid_entry2 *x = state_find(s, STATE_CPUID, v->index, &bytes);

	if (!x || bytes % sizeof(*x) || bytes / sizeof(*x) > CPUID_ENTRIES_MAX)
		return err_set(e, EINVAL, "the saved state is damaged: the CPUID of vCPU %u", v->index);
	c = malloc(sizeof(*c));
	if (!c)
		return err_set(e, ENOMEM, "out of memory");
	c->nent = (uint32_t)(bytes / sizeof(*x));
	c->padding = 0;
	memcpy(c->entry, x, bytes);
	return vcpu_set_cpuid(v, c, e);
}

/* What is one struct and two ioctls. */
static const struct part {
	enum state_tag tag;
	unsigned long get, set;
	size_t bytes;
	const char *name;
} mp = { STATE_MP, KVM_GET_MP_STATE, KVM_SET_MP_STATE, sizeof(struct kvm_mp_state), "processor state" },
  regs = { STATE_REGS, KVM_GET_REGS, KVM_SET_REGS, sizeof(struct kvm_regs), "registers" },
  sregs = { STATE_SREGS, KVM_GET_SREGS, KVM_SET_SREGS, sizeof(struct kvm_sregs), "system registers" },
  xcrs = { STATE_XCRS, KVM_GET_XCRS, KVM_SET_XCRS, sizeof(struct kvm_xcrs), "extended control registers" },
  debugregs = { STATE_DEBUGREGS, KVM_GET_DEBUGREGS, KVM_SET_DEBUGREGS, sizeof(struct kvm_debugregs), "debug registers" },
  lapic = { STATE_LAPIC, KVM_GET_LAPIC, KVM_SET_LAPIC, sizeof(struct kvm_lapic_state), "local APIC" },
  events = { STATE_EVENTS, KVM_GET_VCPU_EVENTS, KVM_SET_VCPU_EVENTS, sizeof(struct kvm_vcpu_events), "events" };

#define PART_MAX 2048u

static int save_part(struct state *s, const struct vcpu *v, const struct part *p, struct err *e)
{
	uint64_t bytes[PART_MAX / 8] = { 0 };

	if (ioctl(v->fd, p->get, bytes) < 0)
		return refused(v, p->name, e);
	return state_add(s, p->tag, v->index, bytes, p->bytes, e);
}

static int load_part(const struct state *s, const struct vcpu *v, const struct part *p, struct err *e)
{
	uint64_t bytes[PART_MAX / 8];
	const void *at;
	int r = state_get(s, p->tag, v->index, &at, p->bytes, e);

	if (r < 0)
		return r;
	memcpy(bytes, at, p->bytes);
	return ioctl(v->fd, p->set, bytes) < 0 ? refused(v, p->name, e) : 0;
}

_Static_assert(sizeof(struct kvm_lapic_state) <= PART_MAX && sizeof(struct kvm_sregs) <= PART_MAX, "a part fits its buffer");

static int save_vcpu(struct state *s, const struct kvm *k, const struct vcpu *v, const struct msr_list *l, struct err *e)
{
	static const struct part *const plain[] = { &regs, &sregs, &xcrs, &debugregs, &lapic };
	int r = save_part(s, v, &mp, e);

	for (unsigned i = 0; i < ARRAY_SIZE(plain) && r == 0; i++)
		r = save_part(s, v, plain[i], e);
	if (r == 0)
		r = save_cpuid(s, v, e);
	if (r == 0)
		r = save_xsave(s, k, v, e);
	if (r == 0)
		r = save_msrs(s, v, l, e);
	if (r == 0)
		r = save_part(s, v, &events, e);
	return r;
}

static int load_vcpu(const struct state *s, const struct kvm *k, const struct vcpu *v, struct err *e)
{
	static const struct part *const before[] = { &mp, &regs, &sregs }, *const after[] = { &xcrs, &debugregs, &lapic };
	int r = load_cpuid(s, v, e);

	for (unsigned i = 0; i < ARRAY_SIZE(before) && r == 0; i++)
		r = load_part(s, v, before[i], e);
	if (r == 0)
		r = load_xsave(s, k, v, e);
	for (unsigned i = 0; i < ARRAY_SIZE(after) && r == 0; i++)
		r = load_part(s, v, after[i], e);
	if (r == 0)
		r = load_msrs(s, v, e);
	if (r == 0)
		r = load_part(s, v, &events, e);
	return r;
}

/* The VM. */

static int save_irqchip(struct state *s, const struct vm *m, uint32_t id, struct err *e)
{
	struct kvm_irqchip chip = { .chip_id = id };

	if (ioctl(m->fd, KVM_GET_IRQCHIP, &chip) < 0)
		return err_set(e, errno, "KVM does not give interrupt controller %u: %s", id, strerror(errno));
	return state_add(s, STATE_IRQCHIP, id, &chip, sizeof(chip), e);
}

static int load_irqchip(const struct state *s, const struct vm *m, uint32_t id, struct err *e)
{
	struct kvm_irqchip chip;
	const void *p;
	int r = state_get(s, STATE_IRQCHIP, id, &p, sizeof(chip), e);

	if (r < 0)
		return r;
	memcpy(&chip, p, sizeof(chip));
	chip.chip_id = id;
	if (ioctl(m->fd, KVM_SET_IRQCHIP, &chip) < 0)
		return err_set(e, errno, "KVM refuses interrupt controller %u: %s", id, strerror(errno));
	return 0;
}

int cpustate_clock(const struct vm *m, uint64_t *ns, struct err *e)
{
	struct kvm_clock_data c = { 0 };

	if (ioctl(m->fd, KVM_GET_CLOCK, &c) < 0)
		return err_set(e, errno, "KVM does not give the guest's clock: %s", strerror(errno));
	*ns = c.clock;
	return 0;
}

int cpustate_set_clock(const struct vm *m, uint64_t ns, struct err *e)
{
	struct kvm_clock_data c = { .clock = ns }; /* no flags: with the real time in it, KVM would add the time that passed */

	if (ioctl(m->fd, KVM_SET_CLOCK, &c) < 0)
		return err_set(e, errno, "KVM refuses the guest's clock: %s", strerror(errno));
	return 0;
}

void cpustate_continued(const struct vcpu *v)
{
	/* Fails where the guest has no kvmclock, which is its choice. */
	(void)ioctl(v->fd, KVM_KVMCLOCK_CTRL, 0);
}

static const uint32_t irqchips[] = { KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC };

int cpustate_save(struct state *s, const struct kvm *k, const struct vm *m, const struct vcpu *v, unsigned vcpus,
		  const struct msr_list *l, struct err *e)
{
	uint64_t clock = 0;
	uint32_t khz = 0;
	int r = cpustate_clock(m, &clock, e);

	if (r == 0)
		r = save_tsc(s, v, vcpus, e);
	tsc_frequency(&v[0], &khz);
	for (unsigned i = 0; i < vcpus && r == 0; i++)
		r = save_vcpu(s, k, &v[i], l, e);
	for (unsigned i = 0; i < ARRAY_SIZE(irqchips) && r == 0; i++)
		r = save_irqchip(s, m, irqchips[i], e);
	if (r == 0) {
		state_header(s)->clock_ns = clock;
		state_header(s)->tsc_khz = khz;
	}
	return r;
}

int cpustate_load(const struct state *s, const struct kvm *k, const struct vm *m, const struct vcpu *v, unsigned vcpus,
		  struct err *e)
{
	int r = load_tsc_frequency(s, k, v, vcpus, e);

	if (r == 0)
		r = load_tsc(s, v, vcpus, e);
	for (unsigned i = 0; i < vcpus && r == 0; i++)
		r = load_vcpu(s, k, &v[i], e);
	if (r == 0)
		r = cpustate_set_clock(m, state_header(s)->clock_ns, e);
	for (unsigned i = 0; i < vcpus && r == 0; i++)
		cpustate_continued(&v[i]);
	for (unsigned i = 0; i < ARRAY_SIZE(irqchips) && r == 0; i++)
		r = load_irqchip(s, m, irqchips[i], e);
	return r;
}
