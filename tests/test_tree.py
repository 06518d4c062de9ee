# SPDX-License-Identifier: Apache-2.0
"""The tree as a file system: listing, reading it whole, what may not be done, metadata, events."""
import errno
import json
import os
import pathlib
import re
import select
import subprocess
import threading
import time

import pytest
from vmenv import until, write_file

ROOT = {'README', 'ctl', 'error', 'version', 'stats', 'events', 'templates', 'sandboxes'}
TEMPLATE = {'config', 'rootfs', 'kernel', 'ctl', 'state', 'log', 'info'}
SANDBOX = {'ctl', 'state', 'info', 'exec', 'exec.json', 'stdout', 'stderr', 'exit_code', 'duration_ms', 'wait', 'runs',
           'ttl', 'timeout', 'user', 'cwd', 'metadata', 'console'}
MAY_NOT = (errno.EPERM, errno.EACCES, errno.EROFS)


def test_listing(mount, sandbox):
    assert ROOT <= set(os.listdir(mount.mount))
    assert TEMPLATE <= set(os.listdir(mount.mount / 'templates' / 'base'))
    assert SANDBOX <= set(os.listdir(sandbox.path))
    assert os.listdir(mount.mount / 'templates') == ['base']
    assert os.listdir(mount.mount / 'sandboxes') == [sandbox.name]


def test_readme_names_what_is_there(mount):
    text = mount.text('README')
    assert [name for name in ROOT | {'exec', 'exec.json', 'wait', 'metadata'} if name not in text] == []
    assert len(text.splitlines()) < 120


def test_modes_and_kinds(mount, sandbox):
    for path, mode in ((mount.mount / 'version', 0o444), (mount.mount / 'ctl', 0o644), (sandbox.path / 'stdout', 0o444)):
        seen = os.stat(path).st_mode
        assert bool(seen & 0o222) == bool(mode & 0o222), (path, oct(seen))
        assert seen & 0o444
    assert sandbox.path.is_dir() and (sandbox.path / 'stdout').is_file() and (sandbox.path / 'wait').is_file()


def test_inode_numbers_are_not_reused(mount):
    seen = set()
    for _ in range(3):
        os.mkdir(mount.mount / 'templates' / 'short')
        number = os.stat(mount.mount / 'templates' / 'short').st_ino
        assert number not in seen
        seen.add(number)
        os.rmdir(mount.mount / 'templates' / 'short')


@pytest.mark.parametrize('reader', [
    ['grep', '-r', 'no such text anywhere', '.'],
    ['sh', '-c', 'tar cf - . | wc -c'],
    ['sh', '-c', 'find . -type f -exec cat {} + | wc -c'],
    ['sh', '-c', 'busybox tar cf - . | wc -c'],
    ['busybox', 'grep', '-r', 'no such text anywhere', '.'],
    ['du', '-a', '.'],
    ['sh', '-c', 'cp -r . "$COPY"'],
], ids=['grep', 'tar', 'find-cat', 'busybox-tar', 'busybox-grep', 'du', 'cp-r'])
def test_reading_the_whole_tree_is_harmless(mount, reader, tmp_path):
    sandboxes = [mount.create(), mount.create()]
    sandboxes[0].write('exec', 'echo hello; exit 3\n')
    sandboxes[1].ctl('freeze')
    before = [(s.name, s.word('state'), s.runs()) for s in sandboxes]
    subprocess.run(reader, cwd=mount.mount, stdin=subprocess.DEVNULL, capture_output=True, timeout=100, check=False,
                   env={**os.environ, 'COPY': str(tmp_path / 'copy')})
    assert [(s.name, s.word('state'), s.runs()) for s in sandboxes] == before
    assert sorted(os.listdir(mount.mount / 'sandboxes')) == sorted(s.name for s in sandboxes)
    assert os.listdir(mount.mount / 'templates') == ['base']
    sandboxes[1].ctl('thaw')
    assert sandboxes[1].exec('echo fine') == b'fine\n'


def test_listing_while_entries_come_and_go(sandbox):
    folder = sandbox.path / 'metadata'
    stable = {f'stable-{n:03d}' for n in range(150)}
    for name in stable:
        write_file(folder / name, name, os.O_WRONLY | os.O_CREAT)
    end = threading.Event()

    def churn():
        while not end.is_set():
            for n in range(40):
                write_file(folder / f'passing-{n}', 'x', os.O_WRONLY | os.O_CREAT)
            for n in range(40):
                os.unlink(folder / f'passing-{n}')
    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(30):
            names = [name for name in os.listdir(folder) if name.startswith('stable')]
            assert len(names) == len(set(names)) and set(names) == stable
    finally:
        end.set()
        thread.join()


def test_may_not(mount, sandbox):
    for action in (
            lambda: os.unlink(sandbox.path / 'stdout'),
            lambda: os.unlink(mount.mount / 'README'),
            lambda: os.rename(sandbox.path, mount.mount / 'sandboxes' / 'renamed'),
            lambda: os.symlink('x', sandbox.path / 'link'),
            lambda: os.mkdir(mount.mount / 'folder'),
            lambda: os.mkdir(sandbox.path / 'folder'),
            lambda: os.rmdir(mount.mount / 'templates'),
            lambda: os.rmdir(sandbox.path / 'runs'),
            lambda: os.close(os.open(sandbox.path / 'file', os.O_WRONLY | os.O_CREAT)),
            lambda: os.close(os.open(mount.mount / 'sandboxes' / 'file', os.O_WRONLY | os.O_CREAT))):
        with pytest.raises(OSError) as failure:
            action()
        assert failure.value.errno in (*MAY_NOT, errno.EINVAL, errno.ENOTSUP), failure.value
    assert sandbox.exec('echo fine') == b'fine\n'


def test_results_may_not_be_written_or_truncated(mount, sandbox):
    sandbox.write('exec', 'echo kept\n')
    for name in ('stdout', 'exit_code', 'state', 'info', 'runs/1/stdout', 'runs/1/command'):
        for action in (lambda path: os.truncate(path, 0),
                       lambda path: os.close(os.open(path, os.O_WRONLY | os.O_TRUNC)),
                       lambda path: write_file(path, 'x', os.O_WRONLY)):
            with pytest.raises(OSError) as failure:
                action(sandbox.path / name)
            assert failure.value.errno in MAY_NOT, (name, failure.value)
    assert sandbox.text('stdout') == 'kept\n'


def test_truncate_of_command_files_means_nothing(mount, sandbox):
    for path in (mount.mount / 'ctl', sandbox.path / 'ctl', sandbox.path / 'exec', sandbox.path / 'exec.json'):
        os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))
        os.truncate(path, 0)
        subprocess.run(['truncate', '-s0', path], check=True, timeout=30)
    assert sandbox.runs() == []


def test_statfs_and_access(mount, sandbox):
    assert os.statvfs(mount.mount).f_namemax >= 64
    assert os.access(sandbox.path / 'exec', os.W_OK)
    subprocess.run(['df', mount.mount], check=True, capture_output=True, timeout=30)


def test_names_that_are_not_there(mount):
    for name in ('nosuch', 'templates/nosuch', 'sandboxes/nosuch', 'sandboxes/nosuch/exec', 'templates/base/nosuch'):
        with pytest.raises(FileNotFoundError):
            os.stat(mount.mount / name)


@pytest.mark.parametrize('name', ['.hidden', '-dash', 'white space', 'semi;colon', 'ünï', 'x' * 65, '_under', 'tab\there'])
def test_wrong_names(mount, name):
    for folder in ('templates', 'sandboxes'):
        with mount.refused(errno.EINVAL, errno.ENAMETOOLONG, line=len(name) <= 64):
            os.mkdir(mount.mount / folder / name)
    assert os.listdir(mount.mount / 'templates') == ['base']


def test_longest_name(mount):
    name = 'L' + 'o' * 62 + 'g'
    sandbox = mount.create(name=name)
    assert sandbox.exec('echo fine') == b'fine\n'
    sandbox.remove()
    assert not sandbox.exists()


def test_mkdir_without_a_template_called_default(mount):
    with mount.refused(errno.ENOENT, says='default'):
        os.mkdir(mount.mount / 'sandboxes' / 'x')
    assert os.listdir(mount.mount / 'sandboxes') == []


def test_metadata(sandbox):
    folder = sandbox.path / 'metadata'
    key = folder / 'task'
    assert os.listdir(folder) == []
    write_file(key, 'first value\n', os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    assert key.read_bytes() == b'first value\n'
    with pytest.raises(FileExistsError):
        os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    write_file(key, 'second')
    assert key.read_bytes() == b'second'
    assert key.stat().st_size == 6
    subprocess.run(['sh', '-c', 'echo third > task; touch empty'], cwd=folder, check=True, timeout=30)
    assert key.read_bytes() == b'third\n' and (folder / 'empty').read_bytes() == b''
    assert sorted(os.listdir(folder)) == ['empty', 'task']
    raw = bytes(range(256)) * 100
    write_file(key, raw)
    assert key.read_bytes() == raw
    os.truncate(key, 10)
    assert key.read_bytes() == raw[:10]
    os.unlink(key)
    assert os.listdir(folder) == ['empty']
    with pytest.raises(FileNotFoundError):
        os.unlink(key)


def test_metadata_limits(sandbox):
    folder = sandbox.path / 'metadata'
    with pytest.raises(OSError) as failure:
        write_file(folder / 'big', b'x' * (1 << 20), os.O_WRONLY | os.O_CREAT)
    assert failure.value.errno in (errno.EFBIG, errno.ENOSPC, errno.EINVAL)
    with pytest.raises(OSError) as failure:
        write_file(folder / '.dot', b'x', os.O_WRONLY | os.O_CREAT)
    assert failure.value.errno == errno.EINVAL
    with pytest.raises(OSError) as failure:
        for n in range(100000):
            write_file(folder / f'k{n}', b'', os.O_WRONLY | os.O_CREAT)
    assert failure.value.errno in (errno.ENOSPC, errno.E2BIG, errno.EMLINK, errno.EDQUOT)
    assert sandbox.word('state') == 'running'


def test_events_are_json_lines(mount):
    sandbox = mount.create()
    sandbox.ctl('freeze')
    sandbox.remove()
    mine = [event for event in mount.events() if event.get('sandbox') == sandbox.name]
    assert len(mine) >= 2
    assert all('time' in event and 'event' in event for event in mine)


def test_poll_wakes_on_an_event(mount):
    fd = os.open(mount.mount / 'events', os.O_RDONLY)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)

        def drained():
            while os.read(fd, 1 << 16):
                pass
            return not poll.poll(0)
        until(drained, 30, 'events are quiet')
        timer = threading.Timer(0.2, mount.create)
        timer.start()
        assert poll.poll(60000), 'poll did not wake'
        timer.join()
        assert b'"' in os.read(fd, 1 << 16)
    finally:
        os.close(fd)


def test_tail_follows_events(mount):
    import tempfile
    with tempfile.TemporaryFile() as out:
        child = subprocess.Popen(['tail', '-n', '1', '-f', str(mount.mount / 'events')], stdout=out)
        try:
            until(lambda: os.pread(out.fileno(), 10, 0), 30)
            sandbox = mount.create()
            until(lambda: sandbox.name.encode() in os.pread(out.fileno(), 1 << 20, 0), 30, 'the event is followed')
        finally:
            child.terminate()
            child.wait(30)


def test_stats_are_flat_keyed(mount, sandbox):
    for line in mount.text('stats').splitlines():
        assert re.fullmatch(r'[a-z][a-z0-9_.]* -?[0-9]+(\.[0-9]+)?', line), line


def test_sandbox_info(sandbox):
    info = sandbox.info()
    assert {'id', 'source', 'created', 'expires', 'state', 'memory_mb', 'private_kb', 'create_ms', 'ready_ms'} <= set(info)
    assert (info['source'], info['state'], info['memory_mb']) == ('base', 'running', 256)
    assert info['private_kb'] > 0
    child = sandbox.fork()
    info = child.info()
    assert info['parent'] == sandbox.name and info['fork_ms'] >= 0 and info['pause_ms'] >= 0


def test_template_info(mount):
    info = mount.template_info('base')
    assert {'kernel', 'bake_ms'} <= set(info)
    text = json.dumps(info)
    assert len(re.findall(r'\b[0-9a-f]{64}\b', text)) >= 2, 'digests of memory and disk'


def test_console(sandbox):
    """The log grows while the guest prints to it; input goes to the guest."""
    sandbox.run('echo "printed on the console" > /dev/kmsg || echo "printed on the console" > /dev/console')
    write_file(sandbox.path / 'console', 'input\n', os.O_WRONLY)
    assert isinstance(sandbox.read('console'), bytes)


def test_ttl_expires(mount):
    sandbox = mount.create(ttl=1)
    assert sandbox.word('ttl') == '1'
    until(lambda: sandbox.word('state') == 'dead', 30, 'the ttl has ended')
    assert 'ttl' in sandbox.info()['reason']
    with mount.refused(errno.EIO, says=sandbox.name):
        sandbox.write('exec', ':\n')


def test_ttl_is_renewed(mount):
    sandbox = mount.create(ttl=4)
    end = time.monotonic() + 6
    while time.monotonic() < end:
        sandbox.write('ttl', '4\n')
        time.sleep(0.25)
    assert sandbox.word('state') == 'running'
    assert sandbox.exec('echo alive') == b'alive\n'
    sandbox.write('ttl', '0\n')
    assert not sandbox.info()['expires']


def test_ttl_kills_runs_in_progress(mount):
    sandbox = mount.create(ttl=2)
    with pytest.raises(OSError) as failure:
        sandbox.write('exec', 'sleep 100\n')
    assert failure.value.errno == errno.EIO
    assert sandbox.word('state') == 'dead'
    assert sandbox.word('runs/1/state') == 'lost'


@pytest.mark.parametrize('name, value', [('ttl', 'soon'), ('ttl', '-1'), ('timeout', ''), ('timeout', '1x'), ('timeout', '-2'),
                                         ('cwd', 'relative'), ('user', 'a b'), ('user', '')])
def test_wrong_values_are_refused(sandbox, name, value):
    before = sandbox.read(name)
    with sandbox.server.refused(errno.EINVAL, says=name):
        sandbox.write(name, value + '\n')
    assert sandbox.read(name) == before


def test_open_files_of_a_removed_sandbox(mount):
    sandbox = mount.create()
    sandbox.write('exec', 'echo kept\n')
    with open(sandbox.path / 'stdout', 'rb', buffering=0) as stdout, open(sandbox.path / 'exec', 'wb', buffering=0) as script:
        sandbox.remove()
        for action in (lambda: stdout.read(100), lambda: script.write(b'echo x\n') and os.close(os.dup(script.fileno()))):
            try:
                action()
            except OSError as failure:
                assert failure.errno in (errno.ENOENT, errno.ESTALE, errno.EIO)
        try:
            script.close()
        except OSError:
            pass
    assert not pathlib.Path(sandbox.path).exists()
