# SPDX-License-Identifier: Apache-2.0
"""Waiting for runs: interrupts, time limits, background children, many at once."""
import errno
import os
import signal
import subprocess
import time

import pytest
from vmenv import Background, read_fd, until, write_file

PIDS = {
    'bash': ['bash', '-c', 'echo "$1" > exec', 'bash'],
    'dash': ['dash', '-c', 'echo "$1" > exec', 'dash'],
    'python': ['/usr/bin/python3', '-c', 'import sys; open("exec", "w").write(sys.argv[1])'],
    'cat': ['bash', '-c', 'exec cat > exec <<< "$1"', 'bash'],
    'reader': ['/usr/bin/python3', '-c', 'import sys\nf = open("exec", "r+b", buffering=0)\n'
               'f.write(sys.argv[1].encode())\nf.read()'],
}


def waiter(sandbox, how, script):
    return subprocess.Popen([*PIDS[how], script], cwd=sandbox.path, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


def sleeping(sandbox):
    """The descendants, which are told by how long they sleep; the shell that started them has them in its arguments."""
    return sorted(line for line in sandbox.processes() if line.startswith('sleep 432'))


def gone(sandbox):
    until(lambda: not any('sleep 432' in line for line in sandbox.processes()), 30, 'the descendants are gone from the guest')


DESCENDANTS = 'trap "" TERM INT HUP; (setsid sleep 4321 &); sleep 4322 & sleep 4323'


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGKILL, signal.SIGTERM], ids=['SIGINT', 'SIGKILL', 'SIGTERM'])
@pytest.mark.parametrize('how', PIDS)
def test_interrupted_waiter_kills_the_run(sandbox, how, number):
    child = waiter(sandbox, how, DESCENDANTS)
    sandbox.started(1)
    until(lambda: sleeping(sandbox) == ['sleep 4321', 'sleep 4322', 'sleep 4323'], 30, 'the descendants run')
    child.send_signal(number)
    child.wait(30)
    assert sandbox.ended(1, 30) == 'killed'
    gone(sandbox)
    assert sandbox.exec('echo usable') == b'usable\n'


def test_nonblocking_write_starts_and_does_not_wait(sandbox):
    fd = os.open(sandbox.path / 'exec', os.O_WRONLY | os.O_NONBLOCK)
    os.write(fd, b'until [ -e /tmp/go ]; do sleep 0.05; done; echo went')
    os.close(fd)
    sandbox.started(1)
    assert sandbox.read('exit_code') == b''
    sandbox.sh('touch /tmp/go')
    assert sandbox.ended(1) == 'exited'
    assert sandbox.text('runs/1/stdout') == 'went\n'


def test_nonblocking_read_says_eagain(sandbox):
    fd = os.open(sandbox.path / 'exec', os.O_RDWR | os.O_NONBLOCK)
    try:
        os.write(fd, b'until [ -e /tmp/go ]; do sleep 0.05; done; echo went')
        with pytest.raises(BlockingIOError):
            os.read(fd, 100)
        sandbox.started(1)
        with pytest.raises(BlockingIOError):
            os.read(fd, 100)
        sandbox.sh('touch /tmp/go')

        def read():
            try:
                return os.read(fd, 100)
            except BlockingIOError:
                return b''
        assert until(read, 30) == b'went\n'
    finally:
        os.close(fd)
    assert sandbox.text('runs/1/stdout') == 'went\n'


def test_output_streams_to_the_reader_while_the_run_goes_on(sandbox):
    fd = os.open(sandbox.path / 'exec', os.O_RDWR)
    try:
        os.write(fd, b'echo early; until [ -e /tmp/go ]; do sleep 0.05; done; echo late')
        assert os.read(fd, 6) == b'early\n'
        sandbox.sh('touch /tmp/go')
        assert read_fd(fd) == b'late\n'
    finally:
        os.close(fd)


def test_wait_blocks_until_no_run_is_in_progress(sandbox):
    run = Background(write_file, sandbox.path / 'exec', 'until [ -e /tmp/go ]; do sleep 0.05; done\n')
    sandbox.started(1)
    wait = Background(sandbox.text, 'wait')
    fd = os.open(sandbox.path / 'wait', os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(BlockingIOError):
            os.read(fd, 10)
    finally:
        os.close(fd)
    assert wait.running() and run.running()
    sandbox.sh('touch /tmp/go')
    assert wait.result() == 'done\n'
    run.result()


def test_interrupted_wait_file_does_not_kill_the_run(sandbox):
    run = Background(write_file, sandbox.path / 'exec', 'until [ -e /tmp/go ]; do sleep 0.05; done\n')
    sandbox.started(1)
    for number in (signal.SIGINT, signal.SIGKILL):
        child = subprocess.Popen(['cat', sandbox.path / 'wait'], stdout=subprocess.DEVNULL,
                                 preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        time.sleep(0.1)
        child.send_signal(number)
        child.wait(30)
    assert sandbox.word('runs/1/state') == 'running'
    sandbox.sh('touch /tmp/go')
    run.result()


def test_timeout_kills_every_descendant_and_keeps_the_output(sandbox):
    sandbox.write('timeout', '1\n')
    assert sandbox.word('timeout') == '1'
    sandbox.write('exec', f'echo before; echo complaint >&2; {DESCENDANTS}\n')
    assert (sandbox.word('exit_code'), sandbox.word('runs/1/state')) == ('124', 'timeout')
    assert (sandbox.text('stdout'), sandbox.text('stderr')) == ('before\n', 'complaint\n')
    sandbox.write('timeout', '60\n')
    gone(sandbox)


def test_background_child_does_not_hold_the_run(sandbox):
    sandbox.write('exec', 'sleep 4324 & echo started\n')
    assert (sandbox.text('stdout'), sandbox.word('exit_code')) == ('started\n', '0')
    assert 'sleep 4324' in sandbox.processes()


def test_ctl_of_a_run_kills_it(sandbox):
    run = Background(write_file, sandbox.path / 'exec', 'trap "echo caught; exit 9" TERM; while :; do sleep 0.05; done\n')
    sandbox.started(1)
    until(lambda: 'sleep 0.05' in sandbox.processes(), 30)
    sandbox.write('runs/1/ctl', 'kill TERM\n')
    run.result()
    assert (sandbox.text('runs/1/stdout'), sandbox.word('runs/1/exit_code')) == ('caught\n', '9')
    run = Background(write_file, sandbox.path / 'exec', DESCENDANTS)
    number = until(lambda: next((n for n in reversed(sandbox.runs()) if sandbox.word(f'runs/{n}/state') == 'running'), 0), 30)
    sandbox.write(f'runs/{number}/ctl', 'kill\n')
    run.result()
    assert sandbox.ended(number) == 'killed'
    assert sandbox.word(f'runs/{number}/exit_code') == '137'
    gone(sandbox)


def test_wrong_signal_is_refused(sandbox):
    sandbox.write('exec', ':\n')
    for line in ('kill NOSUCH', 'kill 99', 'kill TERM KILL', 'murder'):
        with sandbox.server.refused(errno.EINVAL, says=line.split()[-1] if line != 'kill TERM KILL' else 'kill'):
            sandbox.write('runs/1/ctl', line + '\n')


def test_thirty_at_once_in_one_sandbox(sandbox):
    users = [Background(sandbox.exec, f'echo {n}; sleep 0.2; seq {n}000 {n}999') for n in range(1, 31)]
    for n, user in enumerate(users, 1):
        assert user.result() == f'{n}\n'.encode() + b''.join(b'%d\n' % k for k in range(n * 1000, n * 1000 + 1000))
    assert len(sandbox.runs()) == 30
    assert {sandbox.word(f'runs/{n}/state') for n in sandbox.runs()} == {'exited'}
    assert sorted(int(sandbox.text(f'runs/{n}/stdout').split()[0]) for n in sandbox.runs()) == list(range(1, 31))


@pytest.mark.timeout(240)
def test_thirty_over_sixteen_sandboxes(mount):
    name = mount.fresh_name()
    mount.ctl(f'create {name} from=base count=16')
    sandboxes = [mount.sandbox(f'{name}-{n}') for n in range(16)]
    for n, sandbox in enumerate(sandboxes):
        sandbox.sh(f'echo box {n} > /etc/who')
    users = [Background(sandboxes[n % 16].exec, f'cat /etc/who; sleep 0.2; echo run {n}') for n in range(30)]
    assert [user.result() for user in users] == [f'box {n % 16}\nrun {n}\n'.encode() for n in range(30)]


def test_a_hundred_waiters_do_not_stop_the_mount(sandbox):
    run = Background(write_file, sandbox.path / 'exec', 'until [ -e /tmp/go ]; do sleep 0.1; done\n')
    sandbox.started(1)
    waiters = [Background(sandbox.text, 'wait') for _ in range(100)]
    assert sandbox.word('state') == 'running'
    assert sandbox.exec('echo still here') == b'still here\n'
    sandbox.sh('touch /tmp/go')
    assert {w.result() for w in waiters} == {'done\n'}
    run.result()


def test_fork_bomb_and_output_flood_end_at_the_deadline(sandbox):
    sandbox.write('timeout', '2\n')
    sandbox.write('output_limit' if (sandbox.path / 'output_limit').exists() else 'ctl',
                  '100000\n' if (sandbox.path / 'output_limit').exists() else 'set output_limit=100000\n')
    sandbox.write('exec', 'yes | cat\n')
    assert sandbox.word('exit_code') == '124'
    assert os.stat(sandbox.path / 'stdout').st_size < 200000
    sandbox.write('exec', 'bomb() { bomb | bomb & }; bomb; sleep 100\n')
    sandbox.write('timeout', '60\n')
    assert sandbox.exec('echo survived') == b'survived\n'
