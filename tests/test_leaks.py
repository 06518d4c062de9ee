# SPDX-License-Identifier: Apache-2.0
"""What is made and removed again leaves nothing: no process, descriptor, memory, file."""
import errno
import os

import pytest
from vmenv import Background, until, write_file


COUNTS = ('sandboxes', 'sandboxes_creating', 'sandboxes_running', 'sandboxes_frozen', 'sandboxes_dead', 'runs_running', 'runs_kept',
          'machine_processes', 'open_files', 'state_files', 'server_threads')


def descriptors(server):
    return len(os.listdir(f'/proc/{server.process.pid}/fd'))


def used(server):
    """What the server says it uses, of all that must come back to where it was."""
    return {key: int(float(value)) for key, value in server.stats().items()
            if key in COUNTS}


def settled(server, before):
    def same():
        return used(server) == before
    try:
        until(same, 60)
    except AssertionError:
        assert used(server) == before


@pytest.mark.timeout(600)
def test_200_creates_and_removals_leave_nothing(mount):
    def cycle(n):
        sandbox = mount.create()
        if n % 4 == 0:
            assert sandbox.exec(f'echo {n}') == f'{n}\n'.encode()
        if n % 10 == 0:
            sandbox.fork().remove()
        if n % 10 == 5:
            sandbox.ctl('freeze')
        if n % 3 == 0:
            sandbox.ctl('kill')
        os.rmdir(sandbox.path)
        assert not sandbox.exists()
    for n in range(10):
        cycle(n)
    before, memory = used(mount), {k: int(float(v)) for k, v in mount.stats().items()}
    assert set(before) == set(COUNTS)
    open_before, processes = descriptors(mount), len(mount.processes())
    for n in range(120):
        cycle(n)
    for n in range(4):
        mount.ctl(f'create many from=base count=20')
        removals = [Background(os.rmdir, mount.mount / 'sandboxes' / f'many-{k}') for k in range(20)]
        for removal in removals:
            removal.result()
    settled(mount, before)
    assert os.listdir(mount.mount / 'sandboxes') == []
    assert descriptors(mount) <= open_before + 2
    assert len(mount.processes()) == processes
    after = {k: int(float(v)) for k, v in mount.stats().items()}
    assert after['server_rss_kb'] <= memory['server_rss_kb'] + 8192
    assert after['memory_available_kb'] >= memory['memory_available_kb'] - 131072


@pytest.mark.timeout(300)
def test_runs_leave_nothing_in_the_guest_and_the_server(mount):
    sandbox = mount.create()
    sandbox.sh(':')
    before, inside = descriptors(mount), len(sandbox.processes())
    for n in range(60):
        assert sandbox.exec(f'echo {n}') == f'{n}\n'.encode()
    assert len(sandbox.processes()) == inside
    assert descriptors(mount) <= before + 2
    os.rmdir(sandbox.path)


def test_refused_creates_leave_nothing(mount):
    mount.create(name='taken-3')
    before = used(mount)
    for _ in range(5):
        with mount.refused(errno.EEXIST):
            mount.ctl('create taken from=base count=4')
    settled(mount, before)
    assert os.listdir(mount.mount / 'sandboxes') == ['taken-3']


def test_interrupted_create_leaves_nothing(mount):
    import signal
    import subprocess
    before = used(mount)
    for delay in (0.0, 0.05, 0.2):
        child = subprocess.Popen(['sh', '-c', 'echo create cut from=base count=8 > ctl'], cwd=mount.mount,
                                 stderr=subprocess.DEVNULL)
        try:
            child.wait(delay)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
        child.wait(60)
        for name in os.listdir(mount.mount / 'sandboxes'):  # those that were done before the signal
            mount.sandbox(name).remove()
        settled(mount, before)


def test_open_handles_on_removed_objects(mount):
    before = descriptors(mount)
    handles = []
    for _ in range(5):
        sandbox = mount.create()
        write_file(sandbox.path / 'exec', 'echo x\n')
        handles += [os.open(sandbox.path / name, os.O_RDONLY) for name in ('stdout', 'info', 'console', 'exec', 'wait')]
        os.rmdir(sandbox.path)
    for fd in handles:
        os.close(fd)
    until(lambda: descriptors(mount) <= before + 1, 30, 'descriptors are back')
