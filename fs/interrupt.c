/* SPDX-License-Identifier: Apache-2.0 */
#include "interrupt.h"

#include <signal.h>

#define BIT(signal) (1ull << ((signal) - 1))
#define HOUSEKEEPING (BIT(SIGCHLD) | BIT(SIGURG) | BIT(SIGWINCH) | BIT(SIGCONT) | BIT(SIGPROF) | BIT(SIGVTALRM) | BIT(SIGIO))

bool interrupt_meant(pid_t thread)
{
	unsigned long long value, pending = 0, blocked = 0;
	AUTO_FILE FILE *f = NULL;
	char path[32], line[256], key[16];

	snprintf(path, sizeof(path), "/proc/%d/status", (int)thread);
	f = fopen(path, "re");
	if (!f)
		return true;
	while (fgets(line, sizeof(line), f)) {
		if (sscanf(line, "%15[A-Za-z]: %llx", key, &value) != 2)
			continue;
		if (!strcmp(key, "SigPnd") || !strcmp(key, "ShdPnd"))
			pending |= value;
		else if (!strcmp(key, "SigBlk"))
			blocked = value;
	}
	pending &= ~blocked;
	return !pending || (pending & ~HOUSEKEEPING);
}
