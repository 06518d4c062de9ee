# SPDX-License-Identifier: Apache-2.0
"""Going into the background and coming to an end: Ctrl-C, questions on the terminal, unmounting in all its ways."""
import contextlib
import os
import pty
import select
import signal
import socket
import subprocess
import time

import pytest
from vmenv import Background, Server, program, until, write_file

SMALL = {'disk_mb': 64}


@pytest.fixture
def server():
    """One that is not started yet."""
    one = Server()
    yield one
    one.close()


def on_terminal(server, *arguments):
    """vmenvfs started, not in the foreground, as from a terminal of its own: its pid and the terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(program('vmenvfs'), ['vmenvfs', *arguments, str(server.mount)], server.environment())
    return pid, terminal


def shown(terminal, text, seconds=20):
    """Reads the terminal until it shows the text."""
    output, end = b'', time.monotonic() + seconds
    while text not in output:
        assert time.monotonic() < end, output
        if select.select([terminal], [], [], 0.1)[0]:
            with contextlib.suppress(OSError):
                output += os.read(terminal, 4096)
    return output


def background(server):
    """Started in the background; server.process stays None."""
    done = subprocess.run([program('vmenvfs'), '--state', str(server.state), *server.arguments, str(server.mount)], check=False,
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, env=server.environment(), timeout=150)
    assert done.returncode == 0, done.stderr


def server_pid(server):
    return next(pid for pid, line in server.processes().items() if line.split()[0].endswith('vmenvfs') and 'qemu' not in line)


@pytest.mark.parametrize('moment', [0.2, 1])
def test_ctrl_c_during_the_start_ends_everything(server, moment):
    pid, terminal = on_terminal(server, '--state', str(server.state))
    time.sleep(moment)  # whatever it is doing then
    if os.waitpid(pid, os.WNOHANG)[0]:
        os.close(terminal)
        server.unmount()
        pytest.skip('it has started already')
    os.write(terminal, b'\x03')
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    assert code == 128 + signal.SIGINT
    server.nothing_left()


def test_sigterm_during_the_start_is_passed_on(server):
    pid, terminal = on_terminal(server, '--via', 'sleep 4340')
    until(lambda: any(line.startswith('sleep') for line in server.processes().values()), 20)
    os.kill(pid, signal.SIGTERM)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    assert code == 128 + signal.SIGTERM
    server.nothing_left()


def test_a_command_can_ask_for_a_password(server):
    pid, terminal = on_terminal(server, '--via', 'printf "password: " >/dev/tty; read x </dev/tty; echo "got $x" >/dev/tty; sleep 4341')
    shown(terminal, b'password: ')
    os.write(terminal, b'secret\n')
    shown(terminal, b'got secret')
    os.write(terminal, b'\x03')
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGINT
    os.close(terminal)
    server.nothing_left()


@pytest.mark.timeout(300)
def test_a_second_mount_on_the_same_folder_is_refused(server):
    server.start()
    for place in (server.mount, server.mount / 'sandboxes'):
        done = subprocess.run([program('vmenvfs'), '--state', str(server.folder / 'other'), str(place)], check=False,
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        assert done.returncode != 0 and 'already' in done.stderr, done.stderr
    assert server.text('version')
    server.stop()


@pytest.mark.timeout(400)
@pytest.mark.parametrize('how', ['umount -l', 'SIGTERM'])
def test_it_ends_while_a_request_hangs(server, how):
    """Nobody's request holds the server up: whoever unmounts it wants it to end. Nor does a host that hangs."""
    background(server)
    server.bake('small', config=SMALL)
    sandbox = server.create('small')
    run = Background(write_file, sandbox.path / 'exec', 'while :; do :; done\n')
    sandbox.started(1)
    if server.qemu():
        os.kill(server.qemu(), signal.SIGSTOP)
    if how == 'SIGTERM':
        os.kill(server_pid(server), signal.SIGTERM)
    else:
        subprocess.run(['umount', '-l', server.mount], check=True, timeout=60)
    with pytest.raises(OSError):
        run.result(20)
    server.nothing_left(60)


@pytest.mark.timeout(300)
def test_a_copy_of_the_mount_elsewhere_does_not_keep_it_alive(server):
    if os.geteuid() != 0:
        pytest.skip('needs root')
    background(server)
    with subprocess.Popen(['unshare', '-m', '--propagation', 'private', 'sleep', '4342']) as copy:
        until(lambda: b'sleep' in open(f'/proc/{copy.pid}/cmdline', 'rb').read(), 10)
        try:
            server.unmount()
            server.nothing_left(60)
        finally:
            copy.kill()


@pytest.mark.timeout(400)
def test_giving_up_is_in_the_system_log(server):
    """In the background nobody sees stderr."""
    if os.geteuid() != 0 or os.path.lexists('/dev/log'):
        pytest.skip('needs root and a host without a system log, to be one')
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind('/dev/log')
        try:
            log.settimeout(120)
            background(server)
            if not server.qemu():
                pytest.skip('there is no emulated host here')
            said, killed = b'', set()
            while b'giving up' not in said:
                until(lambda: server.qemu() and server.qemu() not in killed, 60, 'there is a new emulated host')
                pid = server.qemu()
                killed.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                said = log.recv(2000)
            assert b'too often' in said
        finally:
            os.unlink('/dev/log')
    server.nothing_left(60)
