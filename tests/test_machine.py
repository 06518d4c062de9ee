# SPDX-License-Identifier: Apache-2.0
"""Machines: restores are identical and then are not, forks carry everything, reset, freeze, kill, and how machines die."""
import errno
import os
import re
import signal
import time

import pytest
from vmenv import Background, until, write_file

COUNTER = '''(i=0; while :; do i=$((i + 1)); echo $i > /dev/shm/n.new; mv /dev/shm/n.new /dev/shm/n; sleep 0.02; done) \
> /dev/null 2>&1 & echo $! > /dev/shm/pid
'''


def count(sandbox):
    return int(sandbox.sh('cat /dev/shm/n'))


def counting(sandbox):
    """Starts a counter that lives in a shell variable and /dev/shm: in memory."""
    sandbox.write('exec', COUNTER)
    until(lambda: sandbox.run('test -s /dev/shm/n').exit_code == 0, 30, 'the counter counts')


def digests(sandbox):
    found = dict(line.split() for line in sandbox.text('machine/digest').splitlines())
    assert {'memory', 'disk'} <= set(found) and all(re.fullmatch('[0-9a-f]{64}', value) for value in found.values())
    return found


def test_two_restores_are_the_same_machine(mount):
    one, two = mount.create(frozen=1), mount.create(frozen=1)
    assert one.word('state') == two.word('state') == 'frozen'
    first = digests(one)
    assert first == digests(two)
    assert first == digests(one), 'asking changes nothing'
    kinds = '/dev/urandom /proc/sys/kernel/random/uuid'.split()
    seen = []
    for sandbox in (one, two):
        sandbox.ctl('thaw')
        seen.append([sandbox.sh(f'head -c 16 {kinds[0]} | od -An -tx1'), sandbox.sh(f'cat {kinds[1]}')])
        assert abs(int(sandbox.sh('date +%s')) - time.time()) < 10
    assert seen[0][0] != seen[1][0] and seen[0][1] != seen[1][1]
    one.ctl('freeze')
    two.ctl('freeze')
    assert digests(one)['memory'] != digests(two)['memory']


def test_first_random_bytes_differ_in_every_clone(mount):
    name = mount.fresh_name()
    mount.ctl(f'create {name} from=base count=4')
    clones = [mount.sandbox(f'{name}-{n}') for n in range(4)]
    clones += clones[0].fork(count=3)
    seen = [s.exec('head -c 16 /dev/urandom | od -An -tx1; cat /proc/sys/kernel/random/uuid') for s in clones]
    assert len(set(seen)) == len(clones)
    assert len({line for text in seen for line in text.splitlines()}) == 2 * len(clones)


def test_digest_is_for_frozen_machines(sandbox):
    with sandbox.server.refused(errno.EBUSY, says=sandbox.name):
        sandbox.read('machine/digest')


def test_date_is_right_in_restores_and_forks(sandbox):
    for s in (sandbox, sandbox.fork()):
        assert abs(int(s.sh('date +%s')) - time.time()) < 10


def test_fork_carries_a_running_process(sandbox):
    counting(sandbox)
    identity = 'cat /dev/shm/pid; cut -d" " -f22 /proc/$(cat /dev/shm/pid)/stat'  # number and time of birth
    process = sandbox.sh(identity)
    before = count(sandbox)
    child = sandbox.fork()
    for s in (sandbox, child):
        now = count(s)
        assert now >= before
        until(lambda s=s, now=now: count(s) > now, 30, f'the counter of {s.name} goes on')
    assert child.sh(identity) == process == sandbox.sh(identity)


def test_fork_carries_open_files_and_a_half_written_one(sandbox):
    sandbox.write('exec', '''(exec 3> /work/half 4< /etc/passwd; printf first >&3; rm -f /work/unlinked
exec 5> /work/unlinked; rm /work/unlinked; echo hidden >&5
until [ -e /work/go ]; do sleep 0.05; done
printf -- "-%s" "$(cat /work/go)" >&3; exec 3>&-; read line <&4; echo "$line" > /work/read
cat /proc/self/fd/5 > /work/hidden; touch /work/done) > /dev/null 2>&1 &
''')
    until(lambda: sandbox.sh('cat /work/half 2>/dev/null || true') == 'first', 30)
    until(lambda: sandbox.run('ls -l /proc/*/fd 2>/dev/null | grep -q unlinked').exit_code == 0, 30)
    child = sandbox.fork()
    for s, word in ((sandbox, 'parent'), (child, 'child')):
        s.sh(f'echo {word} > /work/go.new; mv /work/go.new /work/go')
    for s, word in ((sandbox, 'parent'), (child, 'child')):
        until(lambda s=s: s.run('test -e /work/done').exit_code == 0, 30)
        assert s.sh('cat /work/half') == f'first-{word}'
        assert s.sh('cat /work/read') == 'root:x:0:0:root:/root:/bin/sh'
        assert s.sh('cat /work/hidden') == 'hidden'


def test_parent_and_children_do_not_see_each_other(sandbox):
    """Later writes to memory (/dev/shm), to the disk in place, and to the disk's metadata stay where they were made."""
    sandbox.sh('seq 1 50000 > /work/data; seq 1 50000 > /dev/shm/data; sha256sum /work/data > /work/sum')
    children = sandbox.fork(count=2)
    family = [sandbox, *children]
    for n, s in enumerate(family):
        s.sh(f'''echo {n} > /dev/shm/mine; echo {n} > /work/mine; mkdir /work/folder-{n}
                 printf 'XXXX%d' {n} | dd of=/work/data bs=1 seek=100000 conv=notrunc 2>/dev/null
                 printf 'XXXX%d' {n} | dd of=/dev/shm/data bs=1 seek=100000 conv=notrunc 2>/dev/null; sync''')
    for n, s in enumerate(family):
        assert s.sh('cat /dev/shm/mine /work/mine; ls -d /work/folder-*').split() == [str(n), str(n), f'/work/folder-{n}']
        for path in ('/work/data', '/dev/shm/data'):
            assert s.sh(f'dd if={path} bs=1 skip=100000 count=5 2>/dev/null') == f'XXXX{n}'
    grandchild = children[0].fork()
    assert grandchild.sh('cat /work/mine') == '1'
    fresh = sandbox.server.create()
    assert fresh.run('ls /work/data /dev/shm/data').exit_code != 0, 'the template sees nothing of it'


def test_fork_of_many_is_of_one_instant(sandbox):
    """A writer keeps two files in step; every copy sees them in step, and the parent was stopped once for all four."""
    sandbox.write('exec', '''sh -c 'echo $$ > /dev/shm/pid; i=0
while :; do i=$((i + 1)); echo $i > /dev/shm/a; echo $i > /work/b; sleep 0.01; done' > /dev/null 2>&1 &
''')
    until(lambda: sandbox.run('test -s /work/b').exit_code == 0, 30)
    children = sandbox.fork(count=4)
    assert [c.name[-2:] for c in children] == ['-0', '-1', '-2', '-3']
    assert len({c.info()['pause_ms'] for c in children}) == 1
    for child in children:
        memory, disk = map(int, child.sh('kill $(cat /dev/shm/pid); sleep 0.1; cat /dev/shm/a /work/b').split())
        assert memory - disk in (0, 1)
    assert sandbox.exec('echo parent goes on') == b'parent goes on\n'


def test_fork_in_mid_run_ends_in_both_with_the_whole_output(sandbox):
    script = 'i=0; while [ $i -lt 150 ]; do i=$((i + 1)); echo line $i; echo err $i >&2; sleep 0.02; done; echo end\n'
    expected = ''.join(f'line {n}\n' for n in range(1, 151)) + 'end\n'
    run = Background(write_file, sandbox.path / 'exec', script)
    sandbox.started(1)
    until(lambda: b'line 10\n' in sandbox.read('stdout'), 30)
    child = sandbox.fork()
    assert child.runs() == [1]
    assert child.text('wait') == 'done\n'
    run.result()
    for s in (sandbox, child):
        assert s.ended(1) == 'exited'
        assert s.text('runs/1/stdout') == expected
        assert s.text('runs/1/stderr') == ''.join(f'err {n}\n' for n in range(1, 151))
        assert s.word('runs/1/exit_code') == '0'
        assert s.exec('echo next') == b'next\n'
        assert s.runs() == [1, 2]


def test_fork_inherits_settings_metadata_and_runs(mount):
    sandbox = mount.create(**{'timeout': 44, 'cwd': '/tmp', 'meta.task': 'seven'})
    sandbox.write('exec', 'echo before; exit 3\n')
    child = sandbox.fork()
    assert (child.word('timeout'), child.word('cwd'), child.text('metadata/task')) == ('44', '/tmp', 'seven')
    assert (child.text('runs/1/stdout'), child.word('exit_code')) == ('before\n', '3')
    write_file(child.path / 'metadata' / 'task', 'eight')
    assert sandbox.text('metadata/task') == 'seven'
    sandbox.remove()
    assert (child.text('runs/1/stdout'), child.exec('echo alone')) == ('before\n', b'alone\n')


def test_fork_of_a_frozen_machine(sandbox):
    counting(sandbox)
    sandbox.ctl('freeze')
    frozen = digests(sandbox)
    child = sandbox.fork()
    assert (sandbox.word('state'), child.word('state')) == ('frozen', 'running')
    before = count(child)
    until(lambda: count(child) > before, 30)
    assert digests(sandbox) == frozen
    sandbox.ctl('thaw')
    assert count(sandbox) > 0


def test_generations(sandbox):
    """A fork of a fork of a fork, each with what its ancestors left."""
    s = sandbox
    for n in range(4):
        s.sh(f'echo {n} >> /work/line; echo {n} >> /dev/shm/line')
        s = s.fork()
    assert s.sh('cat /work/line /dev/shm/line').split() == ['0', '1', '2', '3'] * 2
    assert sandbox.sh('cat /work/line') == '0'


def test_reset(sandbox):
    counting(sandbox)
    sandbox.sh('echo mess > /work/mess; rm /etc/ready')
    write_file(sandbox.path / 'metadata' / 'kept', 'yes', os.O_WRONLY | os.O_CREAT)
    sandbox.ctl('reset')
    assert sandbox.word('state') == 'running'
    assert sandbox.sh('ls /work; ls /dev/shm; cat /etc/ready') == 'set up'
    assert not [line for line in sandbox.processes() if 'i=$((i' in line]
    assert sandbox.text('metadata/kept') == 'yes'
    assert abs(int(sandbox.sh('date +%s')) - time.time()) < 10


def test_reset_with_a_run_in_progress(sandbox):
    run = Background(write_file, sandbox.path / 'exec', 'sleep 4325\n')
    sandbox.started(1)
    sandbox.ctl('reset')
    with pytest.raises(OSError):
        run.result()
    assert 'sleep 4325' not in sandbox.processes()


def test_reset_again_and_again(sandbox):
    for n in range(5):
        assert sandbox.sh(f'ls /work; echo {n} > /work/n; cat /work/n') == str(n)
        sandbox.ctl('reset')
    assert sandbox.sh('ls /work') == ''


def test_freeze_and_thaw(sandbox):
    counting(sandbox)
    up = float(sandbox.sh('cut -d" " -f1 /proc/uptime'))
    for _ in range(3):
        sandbox.ctl('freeze')
        assert sandbox.word('state') == 'frozen'
        with sandbox.server.refused(errno.EBUSY, says=sandbox.name):
            sandbox.write('exec', 'echo no\n')
        sandbox.ctl('freeze')  # it is so already
        assert sandbox.word('state') == 'frozen'
        sandbox.ctl('thaw')
        assert sandbox.word('state') == 'running'
        now = float(sandbox.sh('cut -d" " -f1 /proc/uptime'))
        assert now >= up
        up = now
        before = count(sandbox)
        until(lambda before=before: count(sandbox) > before, 30)
    sandbox.ctl('thaw')
    assert abs(int(sandbox.sh('date +%s')) - time.time()) < 10


def test_freeze_in_mid_run_loses_nothing(sandbox):
    script = 'i=0; while [ $i -lt 60 ]; do i=$((i + 1)); echo $i; sleep 0.02; done\n'
    run = Background(write_file, sandbox.path / 'exec', script)
    sandbox.started(1)
    for _ in range(3):
        sandbox.ctl('freeze')
        size = len(sandbox.read('runs/1/stdout'))
        time.sleep(0.2)
        assert len(sandbox.read('runs/1/stdout')) <= size + 4096
        sandbox.ctl('thaw')
    run.result()
    assert sandbox.text('stdout') == ''.join(f'{n}\n' for n in range(1, 61))


def test_kill_twice_and_results_stay(sandbox):
    sandbox.write('exec', 'echo result; exit 5\n')
    sandbox.ctl('kill')
    assert sandbox.word('state') == 'dead'
    sandbox.ctl('kill')
    assert (sandbox.text('stdout'), sandbox.word('exit_code'), sandbox.runs()) == ('result\n', '5', [1])
    assert sandbox.text('wait') == 'done\n'
    for action in (lambda: sandbox.write('exec', ':\n'), lambda: sandbox.run(':')):
        with sandbox.server.refused(errno.EIO, says=sandbox.name):
            action()
    for verb in ('freeze', 'thaw', 'fork never'):
        with sandbox.server.refused(errno.EIO, errno.EBUSY):
            sandbox.ctl(verb)
    os.rmdir(sandbox.path)
    assert not sandbox.exists()


def test_kill_with_a_run_in_progress(sandbox):
    run = Background(write_file, sandbox.path / 'exec', 'echo partial; sleep 4326\n')
    sandbox.started(1)
    until(lambda: sandbox.read('stdout') == b'partial\n', 30)
    sandbox.ctl('kill')
    with pytest.raises(OSError) as failure:
        run.result()
    assert failure.value.errno == errno.EIO
    assert (sandbox.word('runs/1/state'), sandbox.text('stdout')) == ('lost', 'partial\n')


def test_kill_of_a_frozen_machine_and_rmdir_of_a_busy_one(mount):
    frozen, busy = mount.create(), mount.create()
    frozen.ctl('freeze')
    frozen.ctl('kill')
    assert frozen.word('state') == 'dead'
    run = Background(write_file, busy.path / 'exec', 'sleep 4327\n')
    busy.started(1)
    os.rmdir(busy.path)
    with pytest.raises(OSError):
        run.result()
    assert not busy.exists()


DEATHS = {
    'poweroff': ('poweroff -f', 'power'),
    'reboot': ('reboot -f', 'reboot'),
    'panic': ('echo c > /proc/sysrq-trigger', 'panic'),
    'sysrq-poweroff': ('echo o > /proc/sysrq-trigger; sleep 30', 'power'),
    'sysrq-reboot': ('echo b > /proc/sysrq-trigger', 'reboot'),
}


@pytest.mark.parametrize('how', DEATHS)
def test_death_of_the_guest(mount, how):
    command, word = DEATHS[how]
    sandbox, other = mount.create(), mount.create()
    other.sh('echo kept > /work/kept')
    sandbox.write('exec', 'echo earlier\n')
    try:
        sandbox.write('exec', f'echo last words; sync; {command}; sleep 100\n')
    except OSError as failure:
        assert failure.errno == errno.EIO
        assert sandbox.word('runs/2/state') == 'lost'
    else:  # poweroff and reboot kill every process first, so the end of the run may be told before the machine's
        assert sandbox.word('runs/2/exit_code') == '137'
    until(lambda: sandbox.word('state') == 'dead', 30, 'the machine is dead')
    assert word in sandbox.info()['reason'].lower(), sandbox.info()['reason']
    assert sandbox.text('runs/1/stdout') == 'earlier\n'
    with mount.refused(errno.EIO, says=sandbox.name):
        sandbox.write('exec', ':\n')
    assert sandbox.text('wait') == 'done\n'
    assert other.sh('cat /work/kept') == 'kept'
    assert mount.create().exec('echo new') == b'new\n'
    sandbox.remove()
    assert not sandbox.exists()


def test_nothing_starts_in_a_guest_that_goes_down(mount):
    """Whatever the moment: never a shortage of memory."""
    sandbox = mount.create()
    end = Background(write_file, sandbox.path / 'exec', 'sleep 0.2; poweroff -f\n')
    failure = None
    while failure is None:
        try:
            sandbox.write('exec', ':\n')
        except OSError as e:
            failure = e
    assert failure.errno == errno.EIO, mount.text('error').splitlines()[-1]
    try:
        end.result()
    except OSError:
        pass


def test_a_guest_that_freezes_its_cgroups(mount):
    sandbox = mount.create()
    sandbox.sh('mkdir /cg; mount -t cgroup2 none /cg')
    sandbox.write('exec', '(sleep 0.2; echo 1 > /cg/cgroup.freeze) > /dev/null 2>&1 & sleep 0.1\n')
    time.sleep(1)  # a frozen guest cannot be asked whether it is
    assert sandbox.sh('echo thawed', timeout=20) == 'thawed'
    assert sandbox.fork().sh('echo forked') == 'forked'


def test_death_while_many_wait(mount):
    sandbox = mount.create()
    runs = [Background(write_file, sandbox.path / 'exec', 'sleep 4328\n') for _ in range(5)]
    waits = [Background(sandbox.text, 'wait') for _ in range(3)]
    until(lambda: len(sandbox.runs()) == 5, 30)
    sandbox.started(5)
    sandbox.ctl('kill')
    for run in runs:
        with pytest.raises(OSError) as failure:
            run.result()
        assert failure.value.errno == errno.EIO
    for wait in waits:
        try:
            assert wait.result() == 'done\n'
        except OSError as failure:
            assert failure.errno == errno.EIO


def test_killed_machine_process(mount):
    """kill -9 of one machine process: its sandbox is dead, nothing else changes."""
    if mount.qemu():
        pytest.skip('machine processes are inside the emulated host')
    before = {pid for pid, line in mount.processes().items() if 'vmenv-machine' in line}
    other = mount.create()
    with_other = {pid for pid, line in mount.processes().items() if 'vmenv-machine' in line}
    sandbox = mount.create()
    mine = {pid for pid, line in mount.processes().items() if 'vmenv-machine' in line} - with_other
    assert len(with_other - before) == len(mine) == 1
    run = Background(write_file, sandbox.path / 'exec', 'sleep 4329\n')
    sandbox.started(1)
    os.kill(mine.pop(), signal.SIGKILL)
    with pytest.raises(OSError) as failure:
        run.result()
    assert failure.value.errno == errno.EIO
    assert sandbox.word('state') == 'dead' and sandbox.info()['reason']
    assert other.exec('echo fine') == b'fine\n'
    assert mount.create().exec('echo new') == b'new\n'


@pytest.mark.timeout(240)
def test_many_created_at_once(mount):
    name = mount.fresh_name()
    mount.ctl(f'create {name} from=base count=24')
    clones = [mount.sandbox(f'{name}-{n}') for n in range(24)]
    assert {s.word('state') for s in clones} == {'running'}
    answers = [Background(s.exec, f'echo I am {n}') for n, s in enumerate(clones)]
    assert [a.result() for a in answers] == [f'I am {n}\n'.encode() for n in range(24)]
    creators = [Background(mount.create) for _ in range(8)]
    assert {c.result().exec('echo up') for c in creators} == {b'up\n'}
