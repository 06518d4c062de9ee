/* SPDX-License-Identifier: Apache-2.0 */
/* The file README at the root. */
#include "server.h"

static const char text[] =
	"Every directory in sandboxes/ is a virtual machine; echo and cat are the whole client.\n"
	"\n"
	"    mkdir templates/base\n"
	"    cat rootfs.tar > templates/base/rootfs\n"
	"    echo bake > templates/base/ctl\n"
	"    echo 'create a from=base' > ctl\n"
	"    echo 'uname -a' > sandboxes/a/exec; cat sandboxes/a/stdout sandboxes/a/exit_code\n"
	"    echo 'fork b' > sandboxes/a/ctl\n"
	"    rmdir sandboxes/a sandboxes/b\n"
	"\n"
	"When a call fails its errno says what kind of failure it is, and the last line of error says it in a sentence.\n"
	"\n"
	"README            this\n"
	"ctl               create machines; reading any ctl lists its commands\n"
	"error             the last failures, newest last: time, sandbox, command, errno, sentence\n"
	"events            what happens, one JSON object a line; tail -f follows, poll wakes\n"
	"version stats     of this server; stats is a key and a value a line\n"
	"\n"
	"templates/NAME/   mkdir declares one, rmdir deletes it (EBUSY while something alive came from it)\n"
	"  config          JSON: vcpus memory_mb disk_mb cmdline env user cwd setup setup_timeout timeout ttl on_expire\n"
	"                  output_limit clock; empty for the defaults; writable until baked\n"
	"  rootfs          write an ext4 image or a tar (plain, gzip, zstd, xz) here\n"
	"  kernel          optional: a vmlinuz to boot instead of the usual one\n"
	"  ctl             bake: boot once, run setup, freeze\n"
	"  state           new, baking, ready or failed\n"
	"  log info        the bake's console and set-up output; JSON about the result\n"
	"\n"
	"sandboxes/NAME/   mkdir creates from the template called default; rmdir kills and forgets\n"
	"  ctl             fork reset freeze thaw kill set\n"
	"  state info      creating, running, frozen or dead; JSON\n"
	"  exec            what is written is one shell script; it runs when the file is closed, and close returns when it has\n"
	"                  ended. Reading a descriptor that wrote gives that run's output instead, to that reader alone. Ctrl-C\n"
	"                  kills the run. O_NONBLOCK starts and does not wait. Each program that inherits the descriptor closes\n"
	"                  it: { /bin/echo a; /bin/echo b; } > exec is two runs\n"
	"  exec.json       {\"cmd\": S} or {\"argv\": [S...]}, cwd user env stdin stdin_base64 timeout output_limit; the answer is\n"
	"                  read on the same descriptor\n"
	"  stdout stderr   of the newest run, while it prints; empty before the first\n"
	"  exit_code       of the newest run; empty until it has ended. 124 is a timeout, 128+N signal N\n"
	"  duration_ms     likewise\n"
	"  wait            reading it blocks until no run is in progress\n"
	"  runs/N/         every run: command stdout stderr exit_code duration_ms state, and ctl: kill [SIGNAL]\n"
	"  ttl timeout     seconds, 0 for none; ttl counts from when it is written\n"
	"  user cwd        of the runs to come\n"
	"  metadata/KEY    yours: create, write, read, unlink\n"
	"  console         the serial console: a growing file to read, input to write\n"
	"  machine/digest  SHA-256 of memory, disk and device state, of a frozen machine only\n"
	"\n"
	"A command line is split into words at blanks; 'a b' is one word, '' in it a quote. All commands of one write are checked\n"
	"before the first runs, and the write returns when the last has taken effect.\n";

char *readme_text(const struct node *n, size_t *bytes)
{
	char *copy = malloc(sizeof(text));

	(void)n;
	if (copy)
		memcpy(copy, text, sizeof(text));
	*bytes = sizeof(text) - 1;
	return copy;
}
