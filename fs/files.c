/* SPDX-License-Identifier: Apache-2.0 */
/* Finding the files vmenvfs comes with. */
#include <limits.h>
#include <libgen.h>

#include "host.h"

static const struct {
	const char *build, *installed, *multiarch; /* relative to the folder of the running binary */
} places[] = {
	[HOST_KERNEL] = { "../vmm/emulated/vmlinuz", "../lib/vmenv/vmlinuz", "../lib/x86_64-linux-gnu/vmenv/vmlinuz" },
	[HOST_GUEST_INITRD] = { "../vmm/guest/guest-initramfs.cpio", "../lib/vmenv/guest-initramfs.cpio",
				"../lib/x86_64-linux-gnu/vmenv/guest-initramfs.cpio" },
	[HOST_EMULATED_INITRD] = { "../vmm/emulated/host-initramfs.cpio", "../lib/vmenv/host-initramfs.cpio",
				   "../lib/x86_64-linux-gnu/vmenv/host-initramfs.cpio" },
	[HOST_MACHINE] = { "../vmm/vmenv-machine", "vmenv-machine", "../libexec/vmenv/vmenv-machine" },
};

char *host_file(enum host_file which)
{
	const char *const where[] = { places[which].build, places[which].installed, places[which].multiarch };
	char self[PATH_MAX], path[PATH_MAX + 64];
	const char *folder;
	ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);

	if (n < 0)
		return NULL;
	self[n] = 0;
	folder = dirname(self);
	for (size_t k = 0; k < ARRAY_SIZE(where); k++) {
		snprintf(path, sizeof(path), "%s/%s", folder, where[k]);
		if (access(path, R_OK) == 0)
			return realpath(path, NULL);
	}
	return NULL;
}
