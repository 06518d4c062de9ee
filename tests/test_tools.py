# SPDX-License-Identifier: Apache-2.0
"""Every kind of file, read by every kind of tool: all must read the same bytes, and as many as stat says there are."""
import os
import pathlib
import shutil
import subprocess
import tempfile
import time

import pytest
from vmenv import Background, Server, until, write_file

OUTPUT = ''.join(f'line {n}\n' for n in range(20000))  # beyond what one FUSE read carries


def output_of(*argv, **keywords):
    done = subprocess.run([str(a) for a in argv], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, **keywords)
    assert done.returncode == 0, done
    return done.stdout


def copied_by(copy):
    def read(path):
        with tempfile.TemporaryDirectory() as folder:
            target = pathlib.Path(folder) / 'copy'
            copy(path, target)
            return target.read_bytes()
    return read


def tarred_by(*tar):
    def read(path):
        with tempfile.TemporaryDirectory() as folder:
            archive = output_of(*tar, 'cf', '-', '-C', path.parent, path.name)
            subprocess.run(['tar', 'xf', '-', '-C', folder], input=archive, check=True, timeout=60)
            return (pathlib.Path(folder) / path.name).read_bytes()
    return read


def followed_by(*argv):
    """tail -f does not end: it is read until it has printed as much as the file has, and a little longer."""
    def read(path):
        size = os.stat(path).st_size
        with tempfile.TemporaryFile() as out:
            child = subprocess.Popen([*argv, '-c', '+1', '-f', str(path)], stdin=subprocess.DEVNULL, stdout=out)
            try:
                until(lambda: os.fstat(out.fileno()).st_size >= size, 30, f'{argv} has printed {size} bytes of {path}')
                time.sleep(0.05)
            finally:
                child.terminate()
                child.wait(30)
            out.seek(0)
            return out.read()
    return read


def by_sendfile(path):
    with open(path, 'rb', buffering=0) as source, tempfile.TemporaryFile() as out:
        at, size = 0, os.fstat(source.fileno()).st_size
        while at < size and (sent := os.sendfile(out.fileno(), source.fileno(), at, size - at)):
            at += sent
        out.seek(0)
        return out.read()


def by_pread(path):
    """Small reads at offsets, as `dd`, databases and editors do."""
    fd = os.open(path, os.O_RDONLY)
    try:
        parts, at = [], 0
        while part := os.pread(fd, 30011, at):
            parts.append(part)
            at += len(part)
        return b''.join(parts)
    finally:
        os.close(fd)


def node(path):
    if not shutil.which('node'):
        pytest.skip('node is not installed')
    return output_of('node', '-e', 'process.stdout.write(require("fs").readFileSync(process.argv[1]))', path)


READERS = {
    'gnu-cat': lambda path: output_of('cat', path),
    'gnu-cp': copied_by(lambda path, to: output_of('cp', path, to)),
    'gnu-tail-f': followed_by('tail'),
    'gnu-tar': tarred_by('tar'),
    'busybox-cat': lambda path: output_of('busybox', 'cat', path),
    'busybox-cp': copied_by(lambda path, to: output_of('busybox', 'cp', path, to)),
    'busybox-tail-f': followed_by('busybox', 'tail'),
    'busybox-tar': tarred_by('busybox', 'tar'),
    'python-open': lambda path: pathlib.Path(path).read_bytes(),
    'python-text': lambda path: open(path, encoding='latin-1', newline='').read().encode('latin-1'),
    'node-readFileSync': node,
    'sendfile': by_sendfile,
    'copyfile': copied_by(shutil.copyfile),
    'pread': by_pread,
    'head-c': lambda path: output_of('head', '-c', '100000000', path),
    'dd': lambda path: output_of('dd', 'status=none', f'if={path}', 'bs=5000'),
    'shell-cat': lambda path: output_of('sh', '-c', 'cat < "$1"', 'sh', path),
}


@pytest.fixture(scope='module')
def quiet(session):
    """A sandbox that has run something, and files of every kind with what they must read as (None: anything)."""
    server = session.get()
    sandbox = server.create(ttl=0)
    write_file(sandbox.path / 'exec', 'cat <<EOF\n' + OUTPUT + 'EOF\necho warning >&2\nexit 3\n')
    dead = server.create()  # a live guest's kernel may print at any time
    dead.sh('echo printed by the test > /dev/kmsg')
    dead.ctl('kill')
    metadata = sandbox.path / 'metadata' / 'note'
    write_file(metadata, 'remember\nthis', os.O_WRONLY | os.O_CREAT)
    template = server.mount / 'templates' / 'base'
    files = {
        'rendered': (template / 'info', None),
        'readme': (server.mount / 'README', None),
        'version': (server.mount / 'version', None),
        'state': (sandbox.path / 'state', b'running\n'),
        'grown': (sandbox.path / 'stdout', OUTPUT.encode()),
        'grown-stderr': (sandbox.path / 'runs' / '1' / 'stderr', b'warning\n'),
        'result': (sandbox.path / 'exit_code', b'3\n'),
        'result-duration': (sandbox.path / 'duration_ms', None),
        'run-command': (sandbox.path / 'runs' / '1' / 'command', None),
        'command': (sandbox.path / 'exec', None),
        'command-json': (sandbox.path / 'exec.json', None),
        'ctl': (sandbox.path / 'ctl', None),
        'metadata': (metadata, b'remember\nthis'),
        'log': (template / 'log', None),
        'config': (template / 'config', None),
        'upload': (template / 'rootfs', Server.rootfs),
        'console': (dead.path / 'console', ...),  # may be empty
        'error': (server.mount / 'error', ...),
    }
    yield {kind: (path, path.read_bytes() if what is None or what is ... else what, what is not ...)
           for kind, (path, what) in files.items()}
    sandbox.remove()
    dead.remove()


@pytest.mark.parametrize('tool', READERS)
def test_reads_every_file(quiet, tool):
    wrong = {}
    for kind, (path, expected, substantial) in quiet.items():
        if substantial:
            assert expected, f'{path} is empty'
        got = READERS[tool](path)
        if got != expected:
            wrong[kind] = f'{len(got)} bytes instead of {len(expected)}: {got[:60]!r}'
    assert not wrong


def test_stat_tells_the_size(quiet):
    wrong = {kind: (path.stat().st_size, len(expected)) for kind, (path, expected, _) in quiet.items()
             if path.stat().st_size != len(expected)}
    assert not wrong


def test_grep_reads_every_file(quiet):
    """grep adds a newline to an unfinished last line."""
    for kind, (path, expected, _) in quiet.items():
        for grep in (['grep', '-a', ''], ['busybox', 'grep', '']):
            if kind == 'upload' and grep[0] == 'busybox' or not expected:
                continue  # busybox grep reads lines as C strings
            whole = expected if expected.endswith(b'\n') else expected + b'\n'
            assert output_of(*grep, path) == whole, (kind, grep)


def test_sandbox_files_read_while_others_change(mount):
    """info changes from one read to the next, yet each open reads one whole rendering."""
    import json
    sandbox = mount.create()
    for _ in range(5):
        assert json.loads(sandbox.read('info'))['state'] == 'running'
        assert output_of('cat', sandbox.path / 'info').endswith(b'\n')
        sandbox.sh(':')


@pytest.mark.parametrize('name', ['stdout', 'runs/1/stdout'])
@pytest.mark.parametrize('tail', [('tail',), ('busybox', 'tail')], ids=['gnu', 'busybox'])
def test_tail_follows_output_as_it_grows(sandbox, tail, name):
    run = Background(write_file, sandbox.path / 'exec', 'echo one; sleep 3; echo two\n')
    sandbox.started(1)
    with tempfile.TemporaryFile() as out:
        child = subprocess.Popen([*tail, '-c', '+1', '-f', str(sandbox.path / name)], stdout=out)
        try:
            until(lambda: os.pread(out.fileno(), 100, 0).startswith(b'one\n'), 30, 'tail has printed the first line')
            run.result()
            until(lambda: os.pread(out.fileno(), 100, 0) == b'one\ntwo\n', 30, 'tail has printed the second line')
        finally:
            child.terminate()
            child.wait(30)
