# SPDX-License-Identifier: Apache-2.0
"""A vmenvfs server under test: started, used through its mount like any folder, stopped, and checked for leftovers."""
import contextlib
import errno
import io
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tarfile
import tempfile
import threading
import time
import uuid

TESTS = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get('VMENV_BUILD') or TESTS.parent / 'build-test').resolve()


def program(name):
    """A built program, by name."""
    for found in sorted(BUILD.glob(f'**/{name}')):
        if found.is_file() and os.access(found, os.X_OK):
            return str(found)
    raise FileNotFoundError(f'{name} is not built under {BUILD} (VMENV_BUILD says where to look)')


def until(condition, seconds=60, what=None):
    """Polls until the condition is true and returns what it returned."""
    end = time.monotonic() + seconds
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() > end:
            raise AssertionError(f'not within {seconds} s: {what or condition}')
        time.sleep(0.02)


def write_file(path, data, flags=os.O_WRONLY | os.O_TRUNC):
    """open, write, close, each of which may raise: a server may refuse at any of the three."""
    data = data.encode() if isinstance(data, str) else data
    fd = os.open(path, flags)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view):]
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise
    os.close(fd)


def read_file(path):
    """All bytes of a file."""
    with open(path, 'rb', buffering=0) as f:
        return f.readall()


def read_fd(fd):
    """All bytes from the descriptor's position to the end."""
    parts = []
    while part := os.read(fd, 1 << 20):
        parts.append(part)
    return b''.join(parts)


def busybox_tar(extra=None):
    """A small root file system: static busybox, its applets, two users. extra: {path: bytes}."""
    busybox = shutil.which('busybox')
    applets = subprocess.run([busybox, '--list'], capture_output=True, text=True, check=True).stdout.split()
    files = {
        'etc/passwd': b'root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:User:/home/user:/bin/sh\n',
        'etc/group': b'root:x:0:\nuser:x:1000:\nextra:x:2000:user\n',
        **(extra or {}),
    }
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode='w', format=tarfile.GNU_FORMAT) as tar:
        def add(name, kind, mode, data=b'', link='', owner=0):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode, entry.linkname, entry.size = kind, mode, link, len(data)
            entry.uid = entry.gid = owner
            tar.addfile(entry, io.BytesIO(data))
        for folder in 'bin dev etc home proc root sbin sys usr work'.split():
            add(folder, tarfile.DIRTYPE, 0o755)
        add('home/user', tarfile.DIRTYPE, 0o755, owner=1000)
        add('tmp', tarfile.DIRTYPE, 0o1777)
        add('bin/busybox', tarfile.REGTYPE, 0o755, pathlib.Path(busybox).read_bytes())
        for applet in applets:
            if applet != 'busybox':
                add(f'bin/{applet}', tarfile.SYMTYPE, 0o777, link='busybox')
        for name, data in files.items():
            add(name, tarfile.REGTYPE, 0o644, data)
    return out.getvalue()


def environment(pid):
    """The environment a process was started with, as bytes; empty when it cannot be read."""
    try:
        return pathlib.Path(f'/proc/{pid}/environ').read_bytes()
    except OSError:
        return b''


def command_line(pid):
    """The command line of a process; empty when it is gone or a zombie."""
    try:
        return pathlib.Path(f'/proc/{pid}/cmdline').read_bytes()
    except OSError:
        return b''


def remove_folder(folder):
    """Removes a temporary folder, but never through a mount: what is still mounted below it is a failure, not rubbish."""
    folder = os.path.realpath(folder)
    mounts = [line.split()[4] for line in pathlib.Path('/proc/self/mountinfo').read_text().splitlines()]
    below = [m for m in mounts if m == folder or m.startswith(folder + '/')]
    assert not below, f'still mounted, so not removed: {below}'
    shutil.rmtree(folder)


class Result:
    """What exec.json read back, with the output as bytes."""

    def __init__(self, answer):
        import base64
        self.answer = answer
        self.run, self.exit_code, self.signal = answer['run'], answer['exit_code'], answer['signal']
        self.timed_out, self.truncated = answer['timed_out'], answer['truncated']
        self.stdout, self.stderr = (
            answer[name].encode() if name in answer else base64.b64decode(answer[f'{name}_base64'])
            for name in ('stdout', 'stderr'))

    def __repr__(self):
        return f'Result({json.dumps(self.answer)[:2000]})'


class Sandbox:
    """One folder of sandboxes/."""

    def __init__(self, server, name):
        self.server, self.name = server, name
        self.path = server.mount / 'sandboxes' / name

    def read(self, name):
        return read_file(self.path / name)

    def text(self, name):
        return self.read(name).decode()

    def word(self, name):
        return self.text(name).strip()

    def write(self, name, data):
        write_file(self.path / name, data)

    def ctl(self, line):
        write_file(self.path / 'ctl', line + '\n')

    def exec(self, script):
        """Writes the script and reads its stdout on the same descriptor."""
        fd = os.open(self.path / 'exec', os.O_RDWR)
        try:
            data = script.encode() if isinstance(script, str) else script
            while data:
                data = data[os.write(fd, data):]
            return read_fd(fd)
        finally:
            os.close(fd)

    def run(self, cmd=None, **request):
        """One exec.json request."""
        if cmd is not None:
            request['cmd'] = cmd
        fd = os.open(self.path / 'exec.json', os.O_RDWR)
        try:
            data = json.dumps(request).encode()
            while data:
                data = data[os.write(fd, data):]
            return Result(json.loads(read_fd(fd)))
        finally:
            os.close(fd)

    def sh(self, cmd, **request):
        """Stdout of a command that must succeed, as text without the last newline."""
        result = self.run(cmd, **request)
        assert result.exit_code == 0, result
        return result.stdout.decode().rstrip('\n')

    def runs(self):
        return sorted(int(name) for name in os.listdir(self.path / 'runs'))

    def info(self):
        return json.loads(self.read('info'))

    def exists(self):
        return self.path.is_dir()

    def processes(self):
        """The command lines of all that runs in the guest, one each."""
        return [line.strip() for line in self.sh('ps -o args').splitlines()[1:]]

    def started(self, number, seconds=60):
        """Waits for run N to be in progress."""
        def running():
            try:
                return self.word(f'runs/{number}/state') == 'running'
            except FileNotFoundError:
                return False
        return until(running, seconds, f'run {number} of {self.name} is running')

    def ended(self, number, seconds=60):
        """Waits for run N to end and returns its state."""
        def state():
            state = self.word(f'runs/{number}/state')
            return state not in ('starting', 'running') and state
        return until(state, seconds, f'run {number} of {self.name} has ended')

    def fork(self, name=None, count=None):
        """One child, or with a count a list of them."""
        name = name or self.server.fresh_name()
        self.ctl(f'fork {name}' + (f' count={count}' if count is not None else ''))
        if count is None:
            return Sandbox(self.server, name)
        return [Sandbox(self.server, f'{name}-{n}') for n in range(count)]

    def remove(self):
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(self.path)


class Server:
    """A vmenvfs process, its mount and its state folder, all in one temporary folder."""

    live = set()  # what the watchdog ends when a test hangs
    rootfs = None

    def __init__(self, arguments=(), command=None):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix='vmenv-test-'))
        self.mount, self.state, self.log = self.folder / 'mnt', self.folder / 'state', self.folder / 'stderr'
        self.mount.mkdir()
        self.arguments, self.command = list(arguments), command
        self.mark = f'VMENV_TEST={uuid.uuid4()}'
        self.names = itertools.count(1)
        self.process = None

    def fresh_name(self):
        return f's{next(self.names)}'

    def environment(self):
        key, value = self.mark.split('=')
        return {**os.environ, key: value}

    def argv(self):
        if self.command:
            return self.command(self)
        return [program('vmenvfs'), '--foreground', '--state', str(self.state), *self.arguments, str(self.mount)]

    def start(self, seconds=180):
        with open(self.log, 'ab') as log:
            self.process = subprocess.Popen(self.argv(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                            env=self.environment(), start_new_session=True)
        Server.live.add(self)

        def mounted():
            if self.process.poll() is not None:
                raise AssertionError(f'vmenvfs ended with {self.process.returncode}: {self.log.read_text()[-2000:]}')
            return os.path.ismount(self.mount)
        until(mounted, seconds, f'{self.mount} is mounted')
        read_file(self.mount / 'version')
        return self

    def alive(self):
        return self.process is not None and self.process.poll() is None and os.path.ismount(self.mount)

    def processes(self):
        """{pid: command line} of the server and all that it started."""
        found = {}
        for entry in os.listdir('/proc'):
            if entry.isdigit() and int(entry) != os.getpid():
                line = command_line(entry)
                if line and (self.mark.encode() in environment(entry) or str(self.folder).encode() in line):
                    found[int(entry)] = line.replace(b'\0', b' ').decode(errors='replace').strip()
        return found

    def qemu(self):
        """The pid of the emulated host, or None on a host with KVM."""
        for pid, line in self.processes().items():
            if 'qemu-system' in line.split(' ')[0]:
                return pid
        return None

    def unmount(self):
        subprocess.run(['fusermount3', '-u', self.mount], check=True, capture_output=True, timeout=60)

    def stop(self, seconds=60):
        """Unmounts, and checks that the server ended well and left nothing running."""
        self.unmount()
        code = self.process.wait(seconds)
        Server.live.discard(self)
        self.process = None
        assert code == 0, f'vmenvfs ended with {code}: {self.log.read_text()[-2000:]}'
        self.nothing_left()

    def nothing_left(self, seconds=10):
        end = time.monotonic() + seconds
        while left := self.processes():
            assert time.monotonic() < end, f'left running: {left}'
            time.sleep(0.05)
        assert not os.path.ismount(self.mount), 'left mounted'

    def kill(self):
        """Ends everything without asking, also when it hangs."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process:
            self.process.wait()
            self.process = None
        Server.live.discard(self)
        subprocess.run(['umount', '-l', self.mount], capture_output=True, timeout=60)

    def close(self):
        """The end of it: stopped if it still runs, nothing left, no folder left."""
        try:
            if self.alive():
                self.stop()
        finally:
            self.kill()
            remove_folder(self.folder)

    def read(self, name):
        return read_file(self.mount / name)

    def text(self, name):
        return self.read(name).decode()

    def word(self, name):
        return self.text(name).strip()

    def write(self, name, data):
        write_file(self.mount / name, data)

    def ctl(self, line):
        write_file(self.mount / 'ctl', line + '\n')

    def stats(self):
        return dict(line.split(None, 1) for line in self.text('stats').splitlines())

    def events(self):
        return [json.loads(line) for line in self.text('events').splitlines()]

    def create(self, source='base', name=None, **keys):
        name = name or self.fresh_name()
        self.ctl(' '.join([f'create {name} from={source}', *(f'{k}={v}' for k, v in keys.items())]))
        return Sandbox(self, name)

    def sandbox(self, name):
        return Sandbox(self, name)

    def declare(self, name, rootfs=None, config=None, kernel=None):
        """A template that is not baked yet."""
        folder = f'templates/{name}'
        os.mkdir(self.mount / folder)
        if config is not None:
            self.write(f'{folder}/config', config if isinstance(config, (str, bytes)) else json.dumps(config))
        if rootfs is not None:
            self.write(f'{folder}/rootfs', rootfs)
        if kernel is not None:
            self.write(f'{folder}/kernel', kernel)

    def bake(self, name, rootfs=None, config=None, kernel=None):
        """A template from nothing to ready."""
        if Server.rootfs is None:
            Server.rootfs = busybox_tar()
        self.declare(name, Server.rootfs if rootfs is None else rootfs, config, kernel)
        self.write(f'templates/{name}/ctl', 'bake\n')
        assert self.word(f'templates/{name}/state') == 'ready'

    def template_info(self, name):
        return json.loads(self.read(f'templates/{name}/info'))

    @contextlib.contextmanager
    def refused(self, *numbers, says=(), line=True):
        """The block must fail with one of the errnos, and `error` must say so with the given words."""
        before = self.text('error')
        try:
            yield
        except OSError as failure:
            names = [errno.errorcode[n] for n in numbers]
            assert failure.errno in numbers, f'{failure!r} instead of {names}'
            number = failure.errno
        else:
            raise AssertionError('accepted: no error at all')
        if not line:
            return
        after = self.text('error')
        new = after[len(before):] if after.startswith(before) else after
        assert new.strip(), 'no line in error'
        assert errno.errorcode[number] in new, f'{errno.errorcode[number]} is not in error: {new!r}'
        for word in [says] if isinstance(says, str) else says:
            assert word in new, f'{word!r} is not in error: {new!r}'


class Watchdog:
    """Ends the servers when a test hangs in one of them: a request that nobody answers cannot be interrupted."""

    def __init__(self, seconds):
        self.timer = threading.Timer(seconds, self.bite)
        self.timer.daemon = True
        self.timer.start()

    @staticmethod
    def bite():
        for server in list(Server.live):
            if server.process:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(server.process.pid, signal.SIGKILL)

    def cancel(self):
        self.timer.cancel()


def tail(path, lines=25, seconds=5):
    """The last lines of a file that may be on a mount that hangs."""
    with tempfile.TemporaryFile() as out:
        child = subprocess.Popen(['tail', '-n', str(lines), str(path)], stdin=subprocess.DEVNULL, stdout=out,
                                 stderr=subprocess.STDOUT)
        end = time.monotonic() + seconds
        while child.poll() is None:
            if time.monotonic() > end:
                child.kill()
                return f'(no answer from {path})'
            time.sleep(0.02)
        out.seek(0)
        return out.read().decode(errors='replace')


class Background:
    """A call in a thread of its own; result() gives what it returned or raises what it raised."""

    def __init__(self, function, *arguments, **keywords):
        self.value = self.failure = None

        def call():
            try:
                self.value = function(*arguments, **keywords)
            except BaseException as failure:  # pylint: disable=broad-except
                self.failure = failure
        self.thread = threading.Thread(target=call, daemon=True)
        self.thread.start()

    def running(self):
        return self.thread.is_alive()

    def result(self, seconds=90):
        self.thread.join(seconds)
        assert not self.thread.is_alive(), f'still not back after {seconds} s'
        if self.failure is not None:
            raise self.failure
        return self.value
