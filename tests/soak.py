#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Keeps a server of its own as busy as it can be, and watches for what should never happen.

    tests/soak.py [--minutes N] [--guests N]

Some guests compute, sleep a millisecond at a time, fork and exec without pause, and are reset, frozen and thawed meanwhile; beside
them others are created, forked from busy ones, used and killed. What counts as a failure: a request that fails or takes
longer than --patience seconds, output that is not what was asked for, an emulated host that was started again, and any
complaint of a kernel, in the emulated host's log or on a guest's console. Prints what was done and how long it took; exits
with 1 if anything failed. It is not part of the tests: it takes minutes, and all of the processor.
"""
import argparse
import contextlib
import pathlib
import random
import re
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / 'tools'))
from vmenv import Server  # noqa: E402  pylint: disable=wrong-import-position

CONFIG = {'disk_mb': 64, 'memory_mb': 128, 'timeout': 600, 'ttl': 0}
LOADS = {
    'compute': 'while :; do :; done',
    'timer': 'while :; do usleep 1000; done',
    'timers': 'for i in 1 2 3 4; do timeout 2 sh -c "while :; do usleep 1000; done" & done; wait',
    'fork': 'while :; do (:); done',
    'exec': 'while :; do /bin/busybox true; done',
    'pipe': 'while :; do dd if=/dev/zero bs=64k count=4 2>/dev/null | cat | wc -c >/dev/null; done',
    'file': 'while :; do dd if=/dev/zero of=/tmp/f bs=64k count=16 2>/dev/null; sync; rm /tmp/f; done',
}
COMPLAINTS = re.compile(r'BUG|[Oo]ops|WARNING|panic|general protection|hung task|unexpected|Unhandled|unable to handle|segfault|'
                        r'Out of memory|double fault')
STARVED = re.compile(r'stall|lockup')  # on a guest's console: it got no processor for long, which is no wonder here


class Soak:
    """The server, the clocks and the tallies; a failure is a sentence."""

    def __init__(self, args):
        self.args = args
        self.server = Server()
        self.lock = threading.Lock()
        self.times = {}
        self.failures = []
        self.under_way = {}  # thread: (what, since)
        self.told = set()
        self.end = 0

    def over(self):
        return time.monotonic() > self.end

    def fail(self, text):
        with self.lock:
            self.failures.append(text)
        print(f'FAILED at {time.strftime("%H:%M:%S")}: {text}', flush=True)

    @contextlib.contextmanager
    def timed(self, what):
        start = time.monotonic()
        self.under_way[threading.get_ident()] = (what, start)
        try:
            yield
        except (OSError, AssertionError) as failure:
            self.fail(f'{what}: {failure!r}')
            raise
        finally:
            del self.under_way[threading.get_ident()]
            with self.lock:
                self.times.setdefault(what, []).append(time.monotonic() - start)

    def say(self, sandbox, what, script, expected):
        with self.timed(what):
            output = sandbox.exec(script)
            if output != expected:
                self.fail(f'{what} in {sandbox.name} said {output[-200:]!r} instead of {expected!r}')

    def busy(self, sandbox, load):
        """One guest's life."""
        count = 0
        while not self.over():
            with contextlib.suppress(OSError):
                count += 1
                seconds = random.choice((2, 4, 8))
                self.say(sandbox, f'{load} for some seconds', f"timeout {seconds} sh -c '{LOADS[load]}'; echo alive {count}\n",
                         f'alive {count}\n'.encode())
                if count % 5 == 0:
                    with self.timed('freeze'):
                        sandbox.ctl('freeze')
                    with self.timed('thaw'):
                        sandbox.ctl('thaw')
                if count % 11 == 0:
                    self.look_at_console(sandbox)
                    with self.timed('reset'):
                        sandbox.ctl('reset')

    def come_and_go(self, sandboxes):
        """Machines that live for a moment."""
        while not self.over():
            children = []
            try:
                with self.timed('create'):
                    children = [self.server.create()]
                self.say(children[0], 'first exec of a new one', 'echo new; grep -c processor /proc/cpuinfo\n', b'new\n1\n')
                parent = random.choice(sandboxes)
                with self.timed('fork of a busy one'):
                    children += parent.fork(count=2)
                for child in children[1:]:
                    self.say(child, 'first exec of a fork', 'echo fork\n', b'fork\n')
                with self.timed('kill'):
                    children[1].ctl('kill')
            except OSError:
                pass
            for child in children:
                with contextlib.suppress(OSError), self.timed('rmdir'):
                    child.remove()

    def look_at_console(self, sandbox):
        try:
            text = sandbox.read('console').decode(errors='replace')
        except OSError:
            return
        for line in text.splitlines():
            if (sandbox.name, line) in self.told:
                continue
            if COMPLAINTS.search(line):
                self.told.add((sandbox.name, line))
                self.fail(f"{sandbox.name}'s kernel: {line}")
            elif STARVED.search(line):
                self.told.add((sandbox.name, line))
                print(f"noted: {sandbox.name}'s kernel: {line}", flush=True)

    def watch(self):
        """Until the end: hangs, restarts, complaints of the emulated host's kernel."""
        log, seen, qemu = self.server.state / 'emulated.log', 0, self.server.qemu()
        while not self.over():
            time.sleep(1)
            if qemu and self.server.qemu() != qemu:
                self.fail('the emulated host was started again')
                qemu = self.server.qemu()
            for thread, (what, since) in list(self.under_way.items()):
                if time.monotonic() - since > self.args.patience and (thread, since) not in self.told:
                    self.told.add((thread, since))
                    self.fail(f'{what} has taken {self.args.patience} s and goes on')
            if log.exists():
                lines = log.read_text(errors='replace').splitlines()
                for line in lines[seen:]:
                    if COMPLAINTS.search(line) or STARVED.search(line):
                        self.fail(f'emulated host: {line}')
                seen = len(lines)

    def run(self):
        self.server.start()
        self.server.bake('base', config=CONFIG)
        loads = list(LOADS)
        sandboxes = [self.server.create() for _ in range(self.args.guests)]
        self.end = time.monotonic() + self.args.minutes * 60
        threads = [threading.Thread(target=self.busy, args=(s, loads[i % len(loads)]), daemon=True) for i, s in enumerate(sandboxes)]
        threads += [threading.Thread(target=self.come_and_go, args=(sandboxes,), daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        self.watch()
        for thread in threads:
            thread.join(self.args.patience)
        if any(thread.is_alive() for thread in threads):
            self.fail(f'still under way: {sorted(what for what, _ in self.under_way.values())}')
        for sandbox in sandboxes:
            self.look_at_console(sandbox)
        print(self.server.text('stats'), end='')

    def report(self):
        for what, times in sorted(self.times.items()):
            times.sort()
            print(f'{what:28} {len(times):5} times   median {times[len(times) // 2]:7.3f} s   longest {times[-1]:7.3f} s')
        print(f'{len(self.failures)} failures')
        for text in self.failures[:20]:
            print(f'  {text}')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--minutes', type=float, default=10)
    parser.add_argument('--guests', type=int, default=14)
    parser.add_argument('--patience', type=float, default=120, metavar='SECONDS')
    soak = Soak(parser.parse_args())
    try:
        soak.run()
        soak.report()
        soak.server.stop()
    except Exception as failure:  # pylint: disable=broad-except
        soak.fail(repr(failure))
    finally:
        soak.server.kill()
        log = soak.server.state / 'emulated.log'
        if soak.failures and log.exists():
            print(log.read_text(errors='replace')[-3000:])
        soak.server.close()
    return bool(soak.failures)


if __name__ == '__main__':
    sys.exit(main())
