/* SPDX-License-Identifier: Apache-2.0 */
/* CPUID of the guest: what KVM supports, less what cannot be saved and restored, plus each vCPU's place in the topology. */
#include "cpuid.h"

#include <linux/kvm_para.h>
#include <openssl/evp.h>
#include <sys/ioctl.h>

#define BIT(n) (1u << (n))

int cpuid_supported(const struct kvm *k, struct cpuid *c, struct err *e)
{
	memset(c, 0, sizeof(*c));
	c->nent = CPUID_ENTRIES_MAX;
	if (ioctl(k->fd, KVM_GET_SUPPORTED_CPUID, c) < 0)
		return err_set(e, errno, "KVM does not say what the processor can do: %s", strerror(errno));
	return 0;
}

static const struct kvm_cpuid_entry2 *find(const struct cpuid *c, uint32_t function, uint32_t index)
{
	for (unsigned i = 0; i < c->nent; i++) {
		const struct kvm_cpuid_entry2 *x = &c->entry[i];

		if (x->function == function && (x->index == index || !(x->flags & KVM_CPUID_FLAG_SIGNIFCANT_INDEX)))
			return x;
	}
	return NULL;
}

static unsigned log2_up(unsigned n)
{
	unsigned bits = 0;

	while ((1u << bits) < n)
		bits++;
	return bits;
}

/* Leaves 0xb and 0x1f: one thread a core, all cores in one package. */
static void topology(struct kvm_cpuid_entry2 *x, unsigned index, unsigned vcpus)
{
	x->edx = index;
	x->ecx = x->index;
	if (x->index == 0) {
		x->eax = 0;
		x->ebx = 1;
		x->ecx |= 1u << 8; /* threads */
	} else if (x->index == 1) {
		x->eax = log2_up(vcpus);
		x->ebx = vcpus;
		x->ecx |= 2u << 8; /* cores */
	} else {
		x->eax = x->ebx = 0;
	}
}

static void kvm_features(struct kvm_cpuid_entry2 *x)
{
	/*
	 * No asynchronous page faults: one that is on its way when the state is saved would leave a guest task waiting for
	 * a completion that never comes. No migration control: there is nobody to tell.
	 */
	x->eax &= ~(BIT(KVM_FEATURE_ASYNC_PF) | BIT(KVM_FEATURE_ASYNC_PF_VMEXIT) | BIT(KVM_FEATURE_ASYNC_PF_INT) |
		    BIT(KVM_FEATURE_MIGRATION_CONTROL));
}

static void adjust(const struct kvm *k, struct kvm_cpuid_entry2 *x, unsigned index, unsigned vcpus)
{
	switch (x->function) {
	case 0x1:
		x->ebx = (x->ebx & 0xffff) | index << 24 | vcpus << 16;
		x->edx = vcpus > 1 ? x->edx | BIT(28) : x->edx & ~BIT(28);
		x->ecx &= ~(BIT(5) | BIT(27)); /* VMX: nested state is not saved. OSXSAVE: KVM's to set */
		x->ecx |= BIT(31);             /* a hypervisor is present */
		if (k->tsc_deadline)
			x->ecx |= BIT(24);
		break;
	case 0x4: /* Intel: cores a package, and which of them share a cache */
		if (x->eax & 0x1f) {
			unsigned level = x->eax >> 5 & 7, sharing = level < 3 ? 1 : 1u << log2_up(vcpus);

			x->eax = (x->eax & 0x3fff) | (sharing - 1) << 14 | ((1u << log2_up(vcpus)) - 1) << 26;
		}
		break;
	case 0xa: /* no performance counters */
		x->eax = x->ebx = x->ecx = x->edx = 0;
		break;
	case 0xb:
	case 0x1f:
		topology(x, index, vcpus);
		break;
	case KVM_CPUID_FEATURES:
		kvm_features(x);
		break;
	case 0x80000001:
		x->ecx &= ~(BIT(2) | BIT(23) | BIT(24) | BIT(28)); /* no SVM, no performance counters */
		break;
	case 0x80000007: /* no invariant TSC: after a restore it is not, and guests are to prefer kvm-clock */
		x->edx &= ~BIT(8);
		break;
	case 0x80000008:
		x->ecx = (x->ecx & ~0xf0ffu) | (vcpus - 1) | log2_up(vcpus) << 12;
		break;
	case 0x8000000a: /* SVM's features */
	case 0x80000022: /* AMD's performance counters */
		x->eax = x->ebx = x->ecx = x->edx = 0;
		break;
	case 0x8000001d: /* AMD: which cores share a cache */
		if (x->eax & 0x1f) {
			unsigned level = x->eax >> 5 & 7, sharing = level < 3 ? 1 : vcpus;

			x->eax = (x->eax & ~0x03ffc000u) | (sharing - 1) << 14;
		}
		break;
	case 0x8000001e: /* AMD: APIC id, core with one thread, node 0 of 1 */
		x->eax = index;
		x->ebx = index;
		x->ecx = 0;
		break;
	default:
		break;
	}
}

/* KVM lists leaf 0xb's subleaves as the host's topology has them; ours are always two and an end. */
static void add_topology(struct cpuid *c, uint32_t function)
{
	const struct kvm_cpuid_entry2 *any = NULL;
	unsigned kept = 0;

	for (unsigned i = 0; i < c->nent; i++) {
		if (c->entry[i].function == function)
			any = &c->entry[i];
		else
			c->entry[kept++] = c->entry[i];
	}
	if (!any || kept + 3 > CPUID_ENTRIES_MAX) {
		c->nent = kept;
		return;
	}
	for (uint32_t i = 0; i < 3; i++)
		c->entry[kept++] = (struct kvm_cpuid_entry2){
			.function = function, .index = i, .flags = KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
		};
	c->nent = kept;
}

void cpuid_for_vcpu(const struct kvm *k, struct cpuid *c, unsigned index, unsigned vcpus)
{
	add_topology(c, 0xb);
	add_topology(c, 0x1f);
	for (unsigned i = 0; i < c->nent; i++)
		adjust(k, &c->entry[i], index, vcpus);
}

unsigned cpuid_address_bits(const struct cpuid *c)
{
	const struct kvm_cpuid_entry2 *x = find(c, 0x80000008, 0);

	return x && (x->eax & 0xff) ? x->eax & 0xff : 36;
}

static void vendor_text(const struct cpuid *c, char vendor[13])
{
	const struct kvm_cpuid_entry2 *x = find(c, 0, 0);

	memset(vendor, 0, 13);
	if (!x)
		return;
	memcpy(vendor, &x->ebx, 4);
	memcpy(vendor + 4, &x->edx, 4);
	memcpy(vendor + 8, &x->ecx, 4);
}

int cpuid_fingerprint(const struct cpuid *supported, struct fingerprint *f, struct err *e)
{
	/* Leaves whose registers (by mask: eax 1, ebx 2, ecx 4, edx 8) say what the processor is and can do. */
	static const struct {
		uint32_t function, index, registers;
	} leaf[] = {
		{ 0x0, 0, 0xe }, { 0x1, 0, 0xd }, { 0x7, 0, 0xe }, { 0x7, 1, 0xf }, { 0xd, 0, 0x9 }, { 0xd, 1, 0x5 },
		{ 0x80000001, 0, 0xc }, { 0x80000008, 0, 0x3 }, { 0x80000021, 0, 0x1 },
	};
	uint32_t words[ARRAY_SIZE(leaf) * 4] = { 0 };
	const struct kvm_cpuid_entry2 *one = find(supported, 1, 0);
	uint32_t version = one ? one->eax : 0, family = version >> 8 & 0xf, model = version >> 4 & 0xf;
	char vendor[13];

	for (unsigned i = 0; i < ARRAY_SIZE(leaf); i++) {
		const struct kvm_cpuid_entry2 *x = find(supported, leaf[i].function, leaf[i].index);

		if (!x)
			continue;
		words[i * 4] = leaf[i].registers & 1 ? x->eax : 0;
		words[i * 4 + 1] = leaf[i].registers & 2 ? x->ebx : 0;
		words[i * 4 + 2] = leaf[i].registers & 4 ? x->ecx : 0;
		words[i * 4 + 3] = leaf[i].registers & 8 ? x->edx : 0;
	}
	words[1 * 4 + 2] &= ~(BIT(27) | BIT(24)); /* OSXSAVE and the TSC deadline come and go with KVM, not the processor */
	if (!EVP_Digest(words, sizeof(words), f->digest, NULL, EVP_sha256(), NULL))
		return err_set(e, ENOMEM, "cannot compute a SHA-256");
	if (family == 0xf)
		family += version >> 20 & 0xff;
	if (family == 6 || family >= 0xf)
		model |= (version >> 16 & 0xf) << 4;
	vendor_text(supported, vendor);
	memset(f->text, 0, sizeof(f->text));
	snprintf(f->text, sizeof(f->text), "%s family %u model %u stepping %u", vendor, family, model, version & 0xf);
	return 0;
}
