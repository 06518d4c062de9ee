# SPDX-License-Identifier: Apache-2.0
"""The guest agent's protocol, with the agent as an ordinary process behind a Unix socket: no machine, no mount."""
import hashlib
import itertools
import json
import os
import pathlib
import shutil
import signal
import socket
import struct
import subprocess
import time

import pytest

BUILD = pathlib.Path(os.environ.get('VMENV_BUILD', pathlib.Path(__file__).parent.parent / 'build'))
AGENT = pathlib.Path(os.environ.get('VMENV_AGENT', BUILD / 'vmm/guest/vmenv-agent'))
SETUP, RUN, ATTACH, SYNC, DATA, SIGNAL, ACK, RELEASE, NEXT = range(1, 10)
OK, FAILED, STARTED, STDOUT, STDERR, EXIT = range(64, 70)
WINDOW = 512 << 10
NUMBERS = itertools.count(1)
PATH = '/usr/sbin:/usr/bin:/sbin:/bin'

pytestmark = pytest.mark.skipif(not AGENT.exists(), reason=f'{AGENT} is not built')
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason='needs root')


class Closed(Exception):
    pass


class Stream:
    """One connection to the agent."""

    def __init__(self, path, connected=None):
        self.socket = connected or socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if not connected:
            self.socket.settimeout(20)
            self.socket.connect(str(path))
        self.buffer = b''
        self.started = None
        self.output = {STDOUT: bytearray(), STDERR: bytearray()}
        self.end = None

    def send(self, kind, payload=b''):
        if isinstance(payload, dict):
            payload = json.dumps(payload).encode()
        self.socket.sendall(struct.pack('<II', len(payload), kind) + payload)

    def exactly(self, n):
        while len(self.buffer) < n:
            piece = self.socket.recv(1 << 16)
            if not piece:
                raise Closed
            self.buffer += piece
        piece, self.buffer = self.buffer[:n], self.buffer[n:]
        return piece

    def frame(self):
        length, kind = struct.unpack('<II', self.exactly(8))
        assert length <= 1 << 20
        return kind, self.exactly(length)

    def failure(self):
        kind, payload = self.frame()
        assert kind == FAILED, kind
        with pytest.raises(Closed):
            self.frame()
        return json.loads(payload)

    def one(self):
        """Takes one frame of a run's; its type."""
        kind, payload = self.frame()
        if kind == FAILED:
            return kind
        if kind == STARTED:
            self.started = struct.unpack('<QQ', payload)
            self.offsets = list(self.started)
        elif kind == EXIT:
            self.end = json.loads(payload)
        else:
            assert kind in self.output, (kind, payload)
            self.output[kind] += payload
            self.offsets[kind - STDOUT] += len(payload)
        return kind

    def ack(self):
        self.send(ACK, struct.pack('<QQ', *self.offsets))

    def finish(self, release=True):
        """Takes and acknowledges all there is."""
        while not self.end:
            kind = self.one()
            assert kind != FAILED
            if kind in self.output:
                self.ack()
        if release:
            self.send(RELEASE)
            with pytest.raises(Closed):
                self.frame()
        return self.end

    @property
    def out(self):
        return bytes(self.output[STDOUT])

    @property
    def err(self):
        return bytes(self.output[STDERR])


class Agent:
    def __init__(self, folder, *options):
        self.path = folder / 'agent.sock'
        self.log = open(folder / 'agent.log', 'wb')
        self.process = subprocess.Popen([AGENT, '--listen-unix', self.path, *options], stdout=self.log, stderr=self.log)
        deadline = time.monotonic() + 10
        while not self.path.exists():
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)

    def start(self, script=None, argv=None, stdin=b'', timeout_ms=20000, output_limit=64 << 20, after=None, **more):
        """after: a run whose end is known, and whose connection is used again."""
        s = Stream(self.path, after and after.socket)
        if after:
            s.send(NEXT)
        data = (script.encode() if isinstance(script, str) else script or b'')
        s.number = next(NUMBERS)
        request = {'run': s.number, 'argv': argv, 'script_bytes': len(data), 'stdin_bytes': len(stdin), 'cwd': '/',
                   'user': str(os.geteuid()), 'env': {'PATH': PATH}, 'timeout_ms': timeout_ms, 'output_limit': output_limit}
        s.send(RUN, {**request, **more})
        data += stdin
        for at in range(0, len(data), 1 << 20):
            s.send(DATA, data[at:at + (1 << 20)])
        return s

    def run(self, *args, **keys):
        s = self.start(*args, **keys)
        s.finish()
        return s

    def attach(self, number):
        s = Stream(self.path)
        s.send(ATTACH, {'run': number})
        return s

    def descriptors(self):
        return len(os.listdir(f'/proc/{self.process.pid}/fd'))

    def stop(self):
        self.process.terminate()
        assert self.process.wait(20) == 0


@pytest.fixture(scope='module')
def agent(tmp_path_factory):
    a = Agent(tmp_path_factory.mktemp('agent'))
    before = a.descriptors()
    try:
        yield a
        deadline = time.monotonic() + 5
        while a.descriptors() > before + 256 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert a.descriptors() <= before + 256  # cgroups are kept for the next run
    finally:
        a.stop()


def alive(pid):
    try:
        state = pathlib.Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()[0]
    except OSError:
        return False
    return state != 'Z'


def gone(pid, seconds=5):
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def test_output_and_exit_code(agent):
    s = agent.run('echo out; echo err >&2; exit 3')
    assert (s.out, s.err, s.started) == (b'out\n', b'err\n', (0, 0))
    assert s.end['exit_code'] == 3 and s.end['signal'] == 0 and not s.end['timed_out']
    assert (s.end['stdout_bytes'], s.end['stdout_head'], s.end['stderr_bytes']) == (4, 4, 4)


def test_signals_and_commands_that_cannot_be(agent):
    s = agent.run('kill -SEGV $$')
    assert (s.end['exit_code'], s.end['signal']) == (128 + 11, 11)
    s = agent.run(argv=['no-such-command'])
    assert s.end['exit_code'] == 127 and b'no-such-command: command not found' in s.err
    s = agent.run(argv=['/etc/passwd'])
    assert s.end['exit_code'] == 126 and b'Permission denied' in s.err
    s = agent.run('true', cwd='/no/such/folder')
    assert s.end['exit_code'] == 126 and b'/no/such/folder' in s.err
    s = agent.run('true', user='nobody-of-that-name')
    assert s.end['exit_code'] == 126 and b'nobody-of-that-name' in s.err


def test_argv_is_exact_and_found_in_path(agent, tmp_path):
    s = agent.run(argv=['printf', '%s|', 'a b', '', '$HOME', "it's"])
    assert s.out == b"a b||$HOME|it's|"
    script = tmp_path / 'plain'
    script.write_text('echo "$0:$1"')
    script.chmod(0o755)
    s = agent.run(argv=['plain', 'x'], env={'PATH': f'/nowhere:{tmp_path}'})
    assert s.out == f'{script}:x\n'.encode()


def test_environment_is_exact(agent):
    s = agent.run(argv=['/usr/bin/env'], env={'A': 'b=c', 'HOME': '/x', 'EMPTY': ''})
    lines = set(s.out.decode().splitlines())
    assert {'A=b=c', 'HOME=/x', 'EMPTY='} <= lines
    assert {line.split('=')[0] for line in lines} == {'A', 'HOME', 'EMPTY', 'USER', 'LOGNAME', 'SHELL'}
    s = agent.run('ulimit -c; umask; pwd; ls /proc/self/fd | wc -l; tty; ps -o pid=,sid= -p $$', cwd='/usr')
    lines = s.out.decode().split('\n')
    assert lines[1:5] == ['0022', '/usr', '4', 'not a tty']
    assert len(set(lines[5].split())) == 1


@pytest.mark.parametrize('size', [0, 1, 65536, 65537, 3_000_000])
def test_stdin_is_exact(agent, size):
    data = os.urandom(size)
    s = agent.run('cat', stdin=data)
    assert s.out == data
    assert agent.run('true', stdin=data).end['exit_code'] == 0


def test_scripts_of_every_size(agent):
    body = '# ' + 'x' * 77 + '\n'
    for lines in (1, 1300, 20000):
        s = agent.run(body * lines + 'read -r x; echo done $x', stdin=b'in\n')
        assert s.out == b'done in\n' and s.end['exit_code'] == 0
    assert agent.run('-x\n').end['exit_code'] == 127
    assert agent.run('').end['exit_code'] == 0
    assert agent.run(b'cat <<E\n\x00\xff\nE\n').end['exit_code'] in (0, 2, 126, 127)


def test_large_output_is_exact(agent):
    s = agent.start('yes | head -c 20000000; head -c 1000000 /dev/zero >&2')
    s.finish()
    assert hashlib.sha256(s.out).digest() == hashlib.sha256(b'y\n' * 10_000_000).digest()
    assert s.err == bytes(1_000_000)
    assert s.end['stdout_bytes'] == s.end['stdout_head'] == 20_000_000


def test_a_run_waits_for_acknowledgements(agent):
    s = agent.start('head -c 2000000 /dev/zero; echo end >&2')
    s.socket.settimeout(0.5)
    with pytest.raises(TimeoutError):
        while True:
            s.one()
    assert len(s.out) == WINDOW and not s.err
    s.socket.settimeout(20)
    s.ack()
    s.finish()
    assert s.out == bytes(2_000_000) and s.err == b'end\n'


@pytest.mark.parametrize('limit', [0, 3, 1000, 100_000, 8 << 20])
def test_head_and_tail_past_the_limit(agent, limit):
    text = b''.join(b'%09d\n' % i for i in range(2_000_000))
    s = agent.run('seq -f %09.0f 0 1999999', output_limit=limit)
    tail = min(limit // 4, 1 << 20)
    head = limit - tail
    assert s.out == text[:head] + (text[-tail:] if tail else b'')
    assert (s.end['stdout_bytes'], s.end['stdout_head']) == (len(text), head)


def test_output_just_within_the_limit_is_whole(agent):
    for size in (999, 1000):
        s = agent.run(f'head -c {size} /dev/zero', output_limit=1000)
        assert len(s.out) == s.end['stdout_head'] == s.end['stdout_bytes'] == size
    s = agent.run('head -c 1001 /dev/zero', output_limit=1000)
    assert len(s.out) == 1000 and s.end['stdout_head'] == 750


@needs_root  # else there are no cgroups, and what lost its parent is not found
def test_timeout_kills_every_descendant_and_keeps_output(agent):
    began = time.monotonic()
    s = agent.run('echo partial; (setsid sh -c "sleep 300 & echo \\$!; wait" &) ; setsid sleep 300 & echo $!; sleep 300',
                  timeout_ms=700)
    assert 0.6 < time.monotonic() - began < 4
    assert s.end['exit_code'] == 124 and s.end['timed_out']
    lines = s.out.decode().split()
    assert lines[0] == 'partial' and len(lines) == 3
    assert all(gone(int(pid)) for pid in lines[1:])


def test_a_background_child_does_not_hold_the_run(agent):
    began = time.monotonic()
    s = agent.run('(while :; do echo noise; sleep 0.05; done) & echo $!')
    assert time.monotonic() - began < 3 and s.end['exit_code'] == 0
    pid = int(s.out.split()[0])
    time.sleep(0.5)
    assert alive(pid)  # its writes go nowhere, and do not kill it
    os.kill(pid, signal.SIGKILL)
    flood = agent.run('yes & echo $! >&2')
    assert flood.end['exit_code'] == 0
    os.kill(int(flood.err), signal.SIGKILL)


def test_a_run_outlives_its_connection(agent):
    s = agent.start('for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.1; done')
    while len(s.out) < 4:
        s.one()
    s.offsets = [2, 0]
    s.ack()
    time.sleep(0.1)
    s.socket.close()
    time.sleep(1)
    again = agent.attach(s.number)
    again.finish(release=False)
    assert again.started == (2, 0) and again.out == b'2\n3\n4\n5\n6\n7\n8\n'
    again.socket.close()
    # Kept until released, also when it has ended.
    third = agent.attach(s.number)
    third.finish()
    assert third.started == (16, 0) and third.out == b'' and third.end['exit_code'] == 0
    assert agent.attach(s.number).failure()['errno'] == 2


def test_a_connection_serves_one_run_after_another(agent):
    s = Stream(agent.path)
    s.send(SETUP, {'entropy': '00' * 32})
    assert s.frame() == (OK, b'')
    s.send(ATTACH, {'run': 987654321})
    assert s.failure()['errno'] == 2
    s = agent.start('echo 1')
    s.finish(release=False)
    for i in range(2, 12):
        last, s = s, agent.start(f'echo {i}; echo x >&2; sleep 0.0{i % 2}', after=s)
        s.finish(release=False)
        assert (s.started, s.out, s.err) == ((0, 0), b'%d\n' % i, b'x\n')
        assert agent.attach(last.number).failure()['errno'] == 2
    s.finish()


def test_next_before_the_end_is_refused(agent):
    s = agent.start('sleep 20')
    assert s.one() == STARTED
    s.send(NEXT)
    assert s.failure()['errno'] == 16


def test_what_is_older_than_the_oldest_is_forgotten(agent):
    ended = agent.start('echo a')
    ended.finish(release=False)
    ended.socket.close()
    followed = agent.start('echo b')
    followed.finish(release=False)
    going = agent.start('sleep 20', oldest=ended.number)
    agent.attach(ended.number).finish(release=False)
    agent.run('echo c', oldest=going.number)
    for s in ended, followed:
        s.socket.close()
    time.sleep(0.2)
    agent.run('echo d', oldest=going.number)
    for s in ended, followed:
        assert agent.attach(s.number).failure()['errno'] == 2
    going.send(SIGNAL, struct.pack('<I', signal.SIGKILL))
    assert going.finish()['signal'] == 9


def test_a_second_attach_takes_over(agent):
    s = agent.start('echo a; sleep 20')
    while not s.out:
        s.one()
    other = agent.attach(s.number)
    with pytest.raises(Closed):
        s.frame()
    other.send(SIGNAL, struct.pack('<I', signal.SIGTERM))
    other.finish()
    assert other.out == b'a\n' and other.end['exit_code'] == 128 + 15


def test_sigkill_reaches_what_detached_itself(agent):
    s = agent.start('setsid sleep 300 & echo $!; wait')
    while not s.out:
        s.one()
    pid = int(s.out)
    s.send(SIGNAL, struct.pack('<I', signal.SIGKILL))
    s.finish()
    assert (s.end['exit_code'], s.end['signal']) == (137, 9) and gone(pid)


def test_many_at_once(agent):
    began = time.monotonic()
    runs = [agent.start(f'sleep 1; echo {i}') for i in range(200)]
    for i, s in enumerate(runs):
        s.finish()
        assert s.out == b'%d\n' % i and s.end['exit_code'] == 0
    assert time.monotonic() - began < 20


def fill_and_overflow(agent):
    runs = [agent.start('cat; sleep 30') for _ in range(256)]
    for s in runs:
        assert s.one() == STARTED
    refused = agent.start('true').failure()
    assert refused['errno'] == 11 and '256' in refused['text']
    for s in runs:
        s.send(SIGNAL, struct.pack('<I', signal.SIGKILL))
    for s in runs:
        s.finish()
    assert agent.run('echo yes').out == b'yes\n'


def test_the_257th_is_refused_and_harms_none(tmp_path):
    agent = Agent(tmp_path)  # its own: runs that another test left behind would count
    try:
        fill_and_overflow(agent)
    finally:
        agent.stop()


@pytest.mark.parametrize('kind,payload,errno', [
    (99, b'', 71), (DATA, b'x', 71), (ACK, bytes(16), 71), (RELEASE, b'', 71), (STARTED, bytes(16), 71),
    (RUN, b'{', 22), (RUN, b'[]', 22), (RUN, b'{"run":1}', 22), (RUN, b'{"run":-1,"output_limit":1}', 22),
    (RUN, b'{"run":1,"output_limit":1,"colour":1}', 22), (RUN, b'{"run":1,"run":1,"output_limit":1}', 22),
    (RUN, b'{"run":1,"output_limit":1,"argv":[]}', 22), (RUN, b'{"run":1,"output_limit":1,"argv":["a\\u0000b"]}', 22),
    (RUN, b'{"run":1,"output_limit":1,"env":{"a=b":"c"}}', 22), (RUN, b'{"run":1,"output_limit":1,"script_bytes":99999999}', 22),
    (ATTACH, b'{"run":987654321}', 2), (ATTACH, b'{}', 22), (SETUP, b'{}', 22), (SETUP, b'{"entropy":"00"}', 22),
    (SYNC, b'{"x":1}', 22),
])
def test_what_makes_no_sense_is_refused_with_a_sentence(agent, kind, payload, errno):
    s = Stream(agent.path)
    s.send(kind, payload)
    said = s.failure()
    assert said['errno'] == errno and len(said['text']) > 5


def test_frames_in_pieces_too_long_and_out_of_place(agent):
    s = Stream(agent.path)
    s.socket.sendall(struct.pack('<II', (1 << 20) + 1, RUN))
    assert s.failure()['errno'] == 90
    s = agent.start('sleep 5')
    s.one()
    s.send(ACK, struct.pack('<QQ', 1, 0))
    assert s.failure()['errno'] == 71
    s = agent.start(stdin=b'', script_bytes=10)
    s.send(DATA, b'x' * 11)
    assert s.failure()['errno'] == 71
    s = Stream(agent.path)
    number = next(NUMBERS)
    payload = json.dumps({'run': number, 'argv': ['cat'], 'user': str(os.geteuid()), 'stdin_bytes': 4, 'output_limit': 100}).encode()
    message = struct.pack('<II', len(payload), RUN) + payload
    message += b''.join(struct.pack('<II', 1, DATA) + bytes([c]) for c in b'abcd')
    for i in range(len(message)):
        s.socket.sendall(message[i:i + 1])
    s.finish()
    assert s.out == b'abcd'


def test_a_number_in_use_is_refused(agent):
    s = agent.start('sleep 5')
    s.one()
    assert agent.start('true', run=s.number).failure()['errno'] == 17
    s.send(SIGNAL, struct.pack('<I', signal.SIGKILL))
    s.finish()


def test_a_run_given_up_before_its_script_is_there(agent):
    s = agent.start('abc', script_bytes=100)
    s.socket.close()
    time.sleep(0.1)
    assert agent.run('echo on', run=s.number).out == b'on\n'


@needs_root
def test_setup_and_sync(agent):
    s = Stream(agent.path)
    s.send(SETUP, {'unix_ns': 0, 'entropy': os.urandom(64).hex(), 'hostname': 'x', 'machine_id': None})
    assert s.frame() == (OK, b'')
    s = Stream(agent.path)
    s.send(SYNC, {'drop_caches': False})
    assert s.frame() == (OK, b'')


@needs_root
def test_users(agent):
    s = agent.run('id -u; id -g; id -G; echo $HOME $USER; echo x > /dev/stderr', user='nobody')
    assert s.out.decode().split('\n')[:4] == ['65534', '65534', '65534', '/nonexistent nobody'] and s.err == b'x\n'
    s = agent.run('echo `id -u` `id -g` $HOME', user='1234:daemon')
    assert s.out == b'1234 1 /\n'
    assert agent.run('kill -9 1; ls /root >/dev/null', user='nobody').end['exit_code'] == 2


@pytest.fixture(scope='module')
def sandboxed(tmp_path_factory):
    folder = tmp_path_factory.mktemp('sandboxed')
    root = folder / 'root'
    (root / 'bin').mkdir(parents=True)
    (root / 'etc').mkdir()
    (root / 'etc/passwd').write_text('root:x:0:0::/root:/bin/sh\nu:x:1000:1000::/home/u:/bin/ash\n')
    (root / 'etc/group').write_text('u:x:1000:\nextra:x:2000:u,v\nother:x:3000:v\n')
    shutil.copy('/bin/busybox', root / 'bin/busybox')
    for applet in ('sh', 'ls', 'id', 'ps', 'cat', 'sleep', 'mount', 'kill', 'tty', 'readlink', 'setsid', 'stat', 'true', 'mkfifo'):
        (root / 'bin' / applet).symlink_to('busybox')
    a = Agent(folder, '--disk', root)
    a.root = root
    try:
        yield a
    finally:
        a.stop()
    assert not [line for line in pathlib.Path('/proc/mounts').read_text().splitlines() if str(folder) in line]


@needs_root
@pytest.mark.skipif(not os.path.exists('/bin/busybox'), reason='needs busybox-static')
class TestSandbox:
    def test_has_a_world_of_its_own(self, sandboxed):
        s = sandboxed.run('ls /; ls /dev; readlink /proc/1/exe; ps -o pid,comm; cat /proc/self/cgroup', user='root')
        assert s.end['exit_code'] == 0, s.err
        words = s.out.decode().split()
        assert {'proc', 'sys', 'dev', 'etc', 'null', 'zero', 'full', 'random', 'urandom', 'tty', 'ptmx', 'pts', 'shm', 'fd', 'stdin',
                'stdout', 'stderr', 'init'} <= set(words)
        assert 'home' not in words and b'vmenv-agent.' not in s.out
        s = sandboxed.run('echo x > /sys/kernel/x; echo $?; echo x > /dev/null; echo y > /dev/shm/y && cat /dev/shm/y', user='root')
        assert s.out == b'1\ny\n'

    def test_users_and_groups_of_the_disk(self, sandboxed):
        s = sandboxed.run('id -u; id -G; echo $HOME $SHELL; echo e > /dev/stderr; echo o > /dev/stdout', user='u')
        assert s.out == b'1000\n1000 2000\n/home/u /bin/ash\no\n' and s.err == b'e\n'

    def test_passwd_may_be_anything(self, sandboxed):
        passwd = sandboxed.root / 'etc/passwd'
        keep = passwd.read_bytes()
        for trick in (lambda: os.mkfifo(passwd), lambda: passwd.symlink_to('/../../../../etc/shadow'), lambda: passwd.mkdir(),
                      lambda: passwd.write_bytes(os.urandom(100_000))):
            passwd.unlink()
            trick()
            assert sandboxed.run('echo $USER', user='root').out == b'root\n'
            assert sandboxed.run('echo $USER', user='u').end['exit_code'] == 126
            passwd.rmdir() if passwd.is_dir() else None
            passwd.touch()
        passwd.write_bytes(keep)

    def test_orphans_are_reaped_and_init_cannot_be_killed(self, sandboxed):
        s = sandboxed.run('(setsid sh -c "sleep 0.1" &) ; (sleep 0.1 &) ; sleep 0.5; kill -9 1; ps -o pid,stat,comm', user='root')
        assert s.end['exit_code'] == 0 and b'Z' not in s.out and b'init' in s.out

    def test_a_dead_init_loses_the_runs_and_is_replaced(self, sandboxed):
        s = sandboxed.start('echo a; sleep 100', user='root')
        while not s.out:
            s.one()
        children = pathlib.Path(f'/proc/{sandboxed.process.pid}/task/{sandboxed.process.pid}/children').read_text().split()
        init = next(int(c) for c in children if pathlib.Path(f'/proc/{c}/comm').read_text() == 'init\n')
        os.kill(init, signal.SIGKILL)
        assert s.finish()['exit_code'] == 137
        # Until the agent has noticed, no process can be born.
        for _ in range(100):
            s = sandboxed.start('echo again', user='root')
            if s.one() != FAILED:
                break
            time.sleep(0.05)
        s.finish()
        assert s.out == b'again\n'

    @pytest.mark.skipif(not os.access('/sys/fs/cgroup/cgroup.procs', os.W_OK), reason='needs cgroup2')
    def test_a_guest_that_freezes_its_cgroups_is_thawed(self, sandboxed):
        folder = sandboxed.root / 'frozen'
        folder.mkdir()
        freeze = 'mount -t cgroup2 none /frozen; for f in /frozen/cgroup.freeze /frozen/*/cgroup.freeze; do echo 1 > $f & done; sleep 9'
        s = sandboxed.start(freeze, user='root')
        parent = pathlib.Path(f'/sys/fs/cgroup/vmenv-agent.{sandboxed.process.pid}')
        deadline = time.monotonic() + 10
        while 'frozen 1' not in (parent / 'cgroup.events').read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert sandboxed.run('echo thawed', user='root').out == b'thawed\n'
        s.send(SIGNAL, struct.pack('<I', signal.SIGKILL))
        assert s.finish()['signal'] == signal.SIGKILL
        sandboxed.run('umount /frozen', user='root')

    def test_no_shell(self, sandboxed):
        shell = sandboxed.root / 'bin/sh'
        shell.rename(shell.with_name('hidden'))
        s = sandboxed.run('true', user='root')
        shell.with_name('hidden').rename(shell)
        assert s.end['exit_code'] == 127 and b'/bin/sh' in s.err


def test_latency(agent):
    times = []
    for _ in range(50):
        began = time.perf_counter()
        agent.run(argv=['/bin/true'])
        times.append(time.perf_counter() - began)
    times.sort()
    print(f'RUN to EXIT and released: p50 {times[25] * 1000:.2f} ms, p90 {times[45] * 1000:.2f} ms')
    assert times[25] < 0.2
