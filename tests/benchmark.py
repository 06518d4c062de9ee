#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a user of the mount waits for: create, fork, many at once, and what an idle clone costs. Prints figures, judges nothing."""
import argparse
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / 'tools'))
from vmenv import Background, Server  # noqa: E402 pylint: disable=wrong-import-position


def milliseconds(function):
    started = time.perf_counter()
    function()
    return (time.perf_counter() - started) * 1000


def show(what, values, unit='ms'):
    values = sorted(values)

    def percentile(p):
        return values[min(len(values) - 1, int(len(values) * p / 100))]
    print(f'{what:58} p50 {percentile(50):8.2f}  p90 {percentile(90):8.2f}  p99 {percentile(99):8.2f} {unit}  n={len(values)}',
          flush=True)


def exec_true(sandbox):
    assert sandbox.exec('echo x') == b'x\n'


def creates(server, times):
    create, first, whole, second = [], [], [], []
    for n in range(times):
        started = time.perf_counter()
        sandbox = server.create()
        made = time.perf_counter()
        exec_true(sandbox)
        answered = time.perf_counter()
        create.append((made - started) * 1000)
        first.append((answered - made) * 1000)
        whole.append((answered - started) * 1000)
        second.append(milliseconds(lambda s=sandbox: exec_true(s)))
        sandbox.remove()
    show('create', create)
    show('first exec after a create', first)
    show('create to first exec result', whole)
    show('second exec', second)


def forks(server, times, megabytes):
    sandbox = server.create(ttl=0)
    sandbox.sh('i=0; while :; do i=$((i + 1)); sleep 0.05; done > /dev/null 2>&1 &')
    call, pause, first = [], [], []
    for _ in range(times):
        sandbox.sh(f'dd if=/dev/zero of=/dev/shm/dirty bs=1M count={megabytes} 2> /dev/null')
        started = time.perf_counter()
        child = sandbox.fork()
        call.append((time.perf_counter() - started) * 1000)
        first.append(milliseconds(lambda c=child: exec_true(c)))
        pause.append(child.info()['pause_ms'])
        child.remove()
    show(f'fork of a running machine, {megabytes} MB dirty', call)
    show("  the parent's pause", pause)
    show("  the child's first exec result, after the fork", first)
    sandbox.remove()


def at_once(server, number):
    seconds = milliseconds(lambda: server.ctl(f'create burst from=base count={number}')) / 1000
    print(f'{f"{number} creates asked at once (count={number})":58} {number / seconds:8.1f} per second', flush=True)
    clones = [server.sandbox(f'burst-{n}') for n in range(number)]

    def everyone():
        for answer in [Background(exec_true, clone) for clone in clones]:
            answer.result(300)
    print(f'{"  and a first exec in each of them":58} {number / (milliseconds(everyone) / 1000):8.1f} per second', flush=True)
    for clone in clones:
        clone.remove()

    def separate():
        for creation in [Background(server.create, 'base', f'solo-{n}') for n in range(number)]:
            creation.result(300)
    print(f'{f"{number} creates from {number} callers":58} {number / (milliseconds(separate) / 1000):8.1f} per second', flush=True)
    for n in range(number):
        server.sandbox(f'solo-{n}').remove()


def idle(server, number):
    clones = [server.create() for _ in range(number)]
    show('private memory of an idle clone', [clone.info()['private_kb'] for clone in clones], 'kB')
    for clone in clones:
        exec_true(clone)
    show('  after one exec', [clone.info()['private_kb'] for clone in clones], 'kB')
    for clone in clones:
        clone.remove()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--creates', type=int, default=100)
    parser.add_argument('--forks', type=int, default=20)
    parser.add_argument('--dirty', type=int, default=64, help='megabytes')
    parser.add_argument('--burst', type=int, default=64)
    parser.add_argument('--idle', type=int, default=10)
    options = parser.parse_args()
    server = Server()
    try:
        print(f'start of the server{"":39} {milliseconds(server.start):8.0f} ms')
        print('emulated host' if server.qemu() else 'kvm of this host', f'load {os.getloadavg()[0]:.1f}', flush=True)
        print(f'bake{"":54} {milliseconds(lambda: server.bake("base", config={"disk_mb": 128})):8.0f} ms', flush=True)
        creates(server, options.creates)
        forks(server, options.forks, options.dirty)
        at_once(server, options.burst)
        idle(server, options.idle)
    finally:
        server.close()


if __name__ == '__main__':
    main()
