# SPDX-License-Identifier: Apache-2.0
"""vmenvfs as a program: start, stop, restart, --check, --stdio with --via, and a host that dies under it."""
import errno
import os
import signal
import subprocess
import time

import pytest
from vmenv import Background, busybox_tar, program, remove_folder, Server, until, write_file

SMALL = {'disk_mb': 64, 'setup': ['echo here > /etc/here']}


@pytest.fixture(scope='module')
def private():
    """A server of this module's own, that tests may stop and start; its template is `small`."""
    server = Server()
    yield server
    server.close()


@pytest.fixture
def small(private):
    if not private.alive():
        private.kill()
        private.start()
    if 'small' not in os.listdir(private.mount / 'templates'):
        private.bake('small', config=SMALL)
    yield private
    if private.alive():
        for name in os.listdir(private.mount / 'sandboxes'):
            private.sandbox(name).remove()


def vmenvfs(*arguments, **keywords):
    return subprocess.run([program('vmenvfs'), *map(str, arguments)], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=100, check=False, **keywords)


def test_help_and_version():
    done = vmenvfs('--help')
    assert done.returncode == 0 and not done.stderr
    for word in ('--state', '--accel', '--stdio', '--via', '--check'):
        assert word in done.stdout
    done = vmenvfs('--version')
    assert done.returncode == 0 and 'vmenvfs' in done.stdout


@pytest.mark.parametrize('arguments', [[], ['--no-such-option'], ['/no/such/folder'], ['--accel=magic', '/tmp'], ['/tmp', '/tmp', '/tmp'],
                                       ['--via'], ['/etc/passwd']])
def test_wrong_command_lines(arguments, tmp_path):
    done = vmenvfs('--foreground', '--state', tmp_path / 'state', *arguments)
    assert done.returncode not in (0, -signal.SIGSEGV, -signal.SIGABRT) and done.stderr.strip()
    assert len(done.stderr) < 3000


def test_accel_kvm_is_refused_without_one(tmp_path):
    (tmp_path / 'mnt').mkdir()
    check = vmenvfs('--check')
    if 'emulat' not in (check.stdout + check.stderr):
        pytest.skip('this host has KVM')
    done = vmenvfs('--foreground', '--accel=kvm', '--state', tmp_path / 'state', tmp_path / 'mnt')
    if done.returncode == 0:
        pytest.skip('this host has KVM')
    assert 'kvm' in done.stderr.lower()
    assert not os.path.ismount(tmp_path / 'mnt')


def test_check():
    done = vmenvfs('--check')
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    for word in ('kvm', 'fuse', 'memory'):
        assert word in text.lower(), text
    assert len(text.splitlines()) >= 5


@pytest.mark.timeout(400)
def test_templates_survive_a_restart(small):
    sandbox = small.create('small')
    sandbox.ctl('freeze')
    info = small.template_info('small')
    small.create('small', name='frozen', frozen=1)
    digest = small.sandbox('frozen').text('machine/digest')
    small.stop()
    assert not small.processes()
    small.start()
    assert small.word('templates/small/state') == 'ready'
    again = small.template_info('small')
    assert {key: again[key] for key in ('id', 'digests', 'kernel', 'baked')} == {
        key: info[key] for key in ('id', 'digests', 'kernel', 'baked')}
    assert os.listdir(small.mount / 'sandboxes') == []
    assert small.create('small').exec('cat /etc/here') == b'here\n'
    small.create('small', name='frozen', frozen=1)
    assert small.sandbox('frozen').text('machine/digest').split()[:4] == digest.split()[:4]


def test_one_server_to_a_state_folder(small):
    """The second is refused; the first goes on."""
    other = small.folder / 'second'
    other.mkdir(exist_ok=True)
    done = vmenvfs('--foreground', '--state', small.state, other, env=small.environment())
    assert done.returncode != 0 and done.stderr.strip()
    assert not os.path.ismount(other)
    assert small.create('small').exec('echo first') == b'first\n'


@pytest.mark.timeout(300)
@pytest.mark.parametrize('how', ['SIGTERM', 'SIGINT', 'SIGHUP', 'unmount-while-busy'])
def test_stop_ends_everything(small, how):
    sandbox = small.create('small')
    run = Background(write_file, sandbox.path / 'exec', 'sleep 4330\n')
    sandbox.started(1)
    if how == 'unmount-while-busy':
        subprocess.run(['fusermount3', '-u', '-z', small.mount], check=True, capture_output=True, timeout=60)
        if run.running():  # the run holds the file system: a lazy unmount ends when its last user does
            small.process.send_signal(signal.SIGTERM)
    else:
        small.process.send_signal(getattr(signal, how))
    with pytest.raises(OSError):
        run.result()
    assert small.process.wait(60) == 0
    Server.live.discard(small)
    small.process = None
    small.nothing_left()


@pytest.mark.timeout(400)
def test_killed_server_leaves_a_state_that_starts_again(small):
    small.create('small')
    os.kill(small.process.pid, signal.SIGKILL)
    small.process.wait(30)
    with pytest.raises(OSError) as failure:
        os.listdir(small.mount)
    assert failure.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    small.kill()
    small.start()
    assert small.word('templates/small/state') == 'ready'
    assert os.listdir(small.mount / 'sandboxes') == []
    assert small.create('small').exec('echo back') == b'back\n'


@pytest.mark.timeout(400)
def test_killed_emulated_host_comes_back(small):
    if not small.qemu():
        pytest.skip('there is no emulated host here')
    sandbox = small.create('small')
    runs = [Background(write_file, sandbox.path / 'exec', 'sleep 4331\n') for _ in range(3)]
    until(lambda: len(sandbox.runs()) == 3, 30)
    before = small.qemu()
    os.kill(before, signal.SIGKILL)
    for run in runs:
        with pytest.raises(OSError):
            run.result(60)

    def back():
        try:
            return small.word('templates/small/state') == 'ready' and small.qemu() not in (None, before)
        except OSError:
            return False
    until(back, 180, 'the emulated host is back')
    if sandbox.exists():
        assert sandbox.word('state') == 'dead'
    assert small.create('small', name='after').exec('cat /etc/here') == b'here\n'


def outlive(small):
    rootfs = busybox_tar()
    if not small.qemu():
        pytest.skip('there is no emulated host here')
    def die():
        before = small.qemu()
        os.kill(before, signal.SIGKILL)

        def back():
            try:
                return small.text('version') and small.qemu() not in (None, before)
            except OSError:
                return False
        until(back, 180, 'the emulated host is back')
    small.declare('kept', config='{"disk_mb": 64, "setup": ["echo begun; sleep 4335"]}')
    die()
    assert small.word('templates/kept/state') == 'new'
    assert '"echo begun; sleep 4335"' in small.text('templates/kept/config')
    small.write('templates/kept/rootfs', rootfs)
    fd = os.open(small.mount / 'templates/kept/rootfs', os.O_WRONLY)
    os.fsync(fd)
    os.close(fd)
    die()
    assert small.read('templates/kept/rootfs') == rootfs
    small.write('templates/kept/rootfs', rootfs + bytes(10240))
    bake = Background(small.write, 'templates/kept/ctl', 'bake\n')
    until(lambda: 'begun' in small.text('templates/kept/log'), 120)
    die()
    with pytest.raises(OSError):
        bake.result()
    assert small.word('templates/kept/state') == 'failed'
    assert small.template_info('kept')['reason'] == 'interrupted'
    assert small.read('templates/kept/rootfs') == rootfs + bytes(10240)
    assert 'begun' in small.text('templates/kept/config')
    os.rmdir(small.mount / 'templates/kept')


@pytest.mark.timeout(600)
def test_templates_outlive_the_emulated_host():
    """Whenever it dies: what was said to be made is there afterwards."""
    server = Server()  # its own: one that dies a fourth time within a minute is given up
    try:
        server.start()
        outlive(server)
        server.stop()
    finally:
        server.close()


@pytest.mark.timeout(300)
def test_umask_that_allows_nothing():
    server = Server(command=lambda s: ['sh', '-c', 'umask 0777; exec "$@"', 'sh', program('vmenvfs'), '--foreground', '--state',
                                       str(s.state), str(s.mount)])
    try:
        server.start()
        modes = {path.name: path.stat().st_mode & 0o777 for path in [server.state, *server.state.iterdir()]}
        assert {name: oct(mode) for name, mode in modes.items() if mode & 0o600 != 0o600 or mode & 0o077} == {}
        server.declare('small', busybox_tar(), config=SMALL)
        server.stop()
    finally:
        server.close()


@pytest.mark.timeout(400)
def test_stopped_emulated_host_is_noticed(small):
    """A host that does not answer is as good as dead: callers get an error, not a hang."""
    if not small.qemu():
        pytest.skip('there is no emulated host here')
    small.create('small')
    before = small.qemu()
    os.kill(before, signal.SIGSTOP)
    call = Background(os.listdir, small.mount / 'sandboxes')
    try:
        call.result(180)
    except OSError:
        pass

    def back():
        try:
            return small.word('templates/small/state') == 'ready' and small.qemu() not in (None, before)
        except OSError:
            return False
    until(back, 180, 'the emulated host is back')


@pytest.mark.timeout(300)
def test_too_many_machines_are_refused_and_harm_no_one():
    """What the host cannot take is refused whole, with a sentence; what runs goes on."""
    server = Server(arguments=['--emulated-memory', '1024'])
    try:
        server.start()
        if not server.qemu():
            pytest.skip('the memory of this host is not ours to fill')
        server.bake('small', config=SMALL)
        sandbox = server.create('small')
        with server.refused(errno.ENOMEM, says='lots'):
            server.ctl('create lots from=small count=200')
        assert os.listdir(server.mount / 'sandboxes') == [sandbox.name]
        assert server.stats()['machine_processes'] == '2'  # the template's and the sandbox's
        assert sandbox.exec('echo alive') == b'alive\n'
        with server.refused(errno.ENOMEM, says='lots'):
            sandbox.ctl('fork lots count=200')
        assert server.create('small').exec('echo one more') == b'one more\n'
        server.stop()
    finally:
        server.close()


@pytest.mark.timeout(500)
def test_out_of_memory_ends_the_largest_and_harms_no_other():
    """Machines that grow past what the host has: one that grew is ended, with the reason; one that did not goes on."""
    server = Server(arguments=['--emulated-memory', '1200'])
    try:
        server.start()
        if not server.qemu():
            pytest.skip('the memory of this host is not ours to fill')
        server.bake('small', config={'memory_mb': 96, 'disk_mb': 128, 'timeout': 300})
        good = server.create('small', name='good')
        assert good.exec('echo before') == b'before\n'
        greedy = [server.create('small', name=f'h{n}') for n in range(9)]
        runs = [Background(sandbox.run, 'dd if=/dev/zero of=/g bs=1M count=110') for sandbox in greedy]
        while any(run.running() for run in runs):
            assert good.exec('echo during') == b'during\n'  # or ETIMEDOUT
            time.sleep(0.2)
        dead = [sandbox for sandbox in greedy if sandbox.word('state') == 'dead']
        assert 0 < len(dead) < len(greedy), [sandbox.info() for sandbox in greedy]
        said, events = server.text('error'), server.events()
        for sandbox in dead:
            assert 'the host is out of memory: it held' in sandbox.info()['reason']
            assert any(f' {sandbox.name} ' in line and 'ENOMEM' in line for line in said.splitlines())
            assert any(event.get('sandbox') == sandbox.name and 'out of memory' in event.get('reason', '')
                       for event in events)
        for sandbox, run in zip(greedy, runs):
            try:
                assert run.result().exit_code == 0  # of a machine that was ended too, when it was done before
            except OSError:
                assert sandbox in dead
        assert server.stats()['out_of_memory_total'] == str(len(dead))
        for sandbox in greedy:
            sandbox.remove()
        assert server.create('small', name='next').exec('echo after') == b'after\n'
        assert good.exec('echo after') == b'after\n'
        server.stop()
    finally:
        server.close()


@pytest.mark.timeout(300)
def test_daemon(tmp_path):
    """Without --foreground the command ends once the mount answers, and unmounting ends the rest."""
    server = Server()
    try:
        done = subprocess.run([program('vmenvfs'), '--state', str(server.state), str(server.mount)], stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, env=server.environment(), timeout=150, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout == '' and len(done.stderr.splitlines()) <= 1, done.stderr
        assert server.text('version') and os.listdir(server.mount / 'templates') == []
        assert server.processes()
        server.unmount()
        server.nothing_left(30)
    finally:
        server.kill()
        remove_folder(server.folder)


@pytest.mark.timeout(400)
def test_via_serves_what_a_command_serves(tmp_path):
    """--via 'COMMAND': here another vmenvfs --stdio on this machine, elsewhere ssh."""
    done = vmenvfs('--stdio', '--state', tmp_path / 'state')  # ends at once: there is nobody on its standard input
    if done.returncode != 0 and 'no usable /dev/kvm' in done.stderr:
        pytest.skip('--stdio serves the KVM of this host, and there is none')
    server = Server(command=lambda s: [program('vmenvfs'), '--foreground', '--via',
                                       f'{program("vmenvfs")} --stdio --state {s.state}', str(s.mount)])
    try:
        server.start()
        server.bake('small', config=SMALL)
        sandbox = server.create('small')
        assert sandbox.exec('cat /etc/here') == b'here\n'
        run = Background(write_file, sandbox.path / 'exec', 'sleep 4332\n')
        sandbox.started(1)
        sandbox.ctl('kill')
        with pytest.raises(OSError):
            run.result()
        server.stop()
    finally:
        server.close()


def test_via_a_command_that_fails(tmp_path):
    (tmp_path / 'mnt').mkdir()
    started = time.monotonic()
    for command in ('exit 3', 'echo this is no file system', 'true'):
        done = vmenvfs('--foreground', '--via', command, tmp_path / 'mnt')
        assert done.returncode != 0 and done.stderr.strip(), command
        assert not os.path.ismount(tmp_path / 'mnt')
    assert time.monotonic() - started < 100
