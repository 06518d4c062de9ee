# SPDX-License-Identifier: Apache-2.0
"""exec: what is written is one script, run when the writer closes, from any program; bytes are exact."""
import hashlib
import os
import pathlib
import subprocess

import pytest
from vmenv import Background, read_fd, write_file

WRITERS = {
    'bash': ['bash', '-c', 'echo "echo a; echo b >&2; exit 7" > exec; cat stdout stderr exit_code'],
    'bash-subshell': ['bash', '-c', '( echo "echo a; echo b >&2; exit 7" ) > exec; cat stdout stderr exit_code'],
    'dash': ['dash', '-c', 'echo "echo a; echo b >&2; exit 7" > exec; cat stdout stderr exit_code'],
    'busybox-sh': ['busybox', 'sh', '-c', 'echo "echo a; echo b >&2; exit 7" > exec; cat stdout stderr exit_code'],
    'printf': ['sh', '-c', '/usr/bin/printf "echo a\\necho b >&2\\nexit 7\\n" > exec; cat stdout stderr exit_code'],
    'bash-printf': ['bash', '-c', 'printf "echo a\\necho b >&2\\nexit 7\\n" > exec; cat stdout stderr exit_code'],
    'append': ['bash', '-c', 'echo "echo a; echo b >&2; exit 7" >> exec; cat stdout stderr exit_code'],
    'cp': ['sh', '-c', 'cp "$SCRIPT" exec; cat stdout stderr exit_code'],
    'busybox-cp': ['sh', '-c', 'busybox cp "$SCRIPT" exec; cat stdout stderr exit_code'],
    'dd': ['sh', '-c', 'dd status=none if="$SCRIPT" of=exec bs=3; cat stdout stderr exit_code'],
    'tee': ['sh', '-c', 'tee exec < "$SCRIPT" > /dev/null; cat stdout stderr exit_code'],
    'cat-heredoc': ['bash', '-c', 'cat > exec <<EOF\necho a\necho b >&2\nexit 7\nEOF\ncat stdout stderr exit_code'],
    'cat-file': ['sh', '-c', 'cat "$SCRIPT" > exec; cat stdout stderr exit_code'],
    'python': ['/usr/bin/python3', '-c', 'open("exec", "w").write("echo a; echo b >&2; exit 7\\n")\n'
               'for n in ("stdout", "stderr", "exit_code"): print(end=open(n).read())'],
}


@pytest.mark.parametrize('writer', WRITERS)
def test_runs_once_from(sandbox, writer, tmp_path):
    script = tmp_path / 'script'
    script.write_text('echo a\necho b >&2\nexit 7\n')
    done = subprocess.run(WRITERS[writer], cwd=sandbox.path, env={**os.environ, 'SCRIPT': str(script)},
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ('a\nb\n7\n', '', 0)
    assert sandbox.runs() == [1]
    assert sandbox.word('runs/1/state') == 'exited'


@pytest.mark.parametrize('shell', ['bash', 'dash', 'busybox sh'])
def test_multi_line_script_is_one_run(sandbox, shell):
    """bash writes a builtin's lines one by one."""
    script = 'x=1\nfor i in 1 2 3; do\n  x=$((x + i))\ndone\necho $x\n'
    subprocess.run([*shell.split(), '-c', 'printf "%s" "$1" > exec', shell, script], cwd=sandbox.path, check=True,
                   timeout=60)
    assert sandbox.text('stdout') == '7\n'
    assert sandbox.runs() == [1]
    assert sandbox.text('runs/1/command') == script


def test_two_programs_of_a_group_are_two_runs(sandbox):
    subprocess.run(['bash', '-c', '{ /bin/echo echo a; /bin/echo echo b; } > exec'], cwd=sandbox.path, check=True, timeout=60)
    assert [sandbox.text(f'runs/{n}/stdout') for n in sandbox.runs()] == ['a\n', 'b\n']


def test_nothing_written_runs_nothing(sandbox):
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
        os.close(os.open(sandbox.path / 'exec', flags))
    assert sandbox.read('exec')  # a line of usage
    assert sandbox.runs() == []


def test_flush_without_new_bytes_runs_nothing(sandbox):
    fd = os.open(sandbox.path / 'exec', os.O_WRONLY)
    os.write(fd, b'echo first\n')
    os.close(os.dup(fd))  # a flush
    assert sandbox.runs() == [1]
    os.close(os.dup(fd))
    os.write(fd, b'echo second\n')
    os.close(fd)
    assert [sandbox.text(f'runs/{n}/stdout') for n in sandbox.runs()] == ['first\n', 'second\n']


def test_read_after_write_returns_that_run(sandbox):
    fd = os.open(sandbox.path / 'exec', os.O_RDWR)
    try:
        os.write(fd, b'echo mine; echo not this >&2')
        assert read_fd(fd) == b'mine\n'
        os.write(fd, b'echo again')
    finally:
        os.close(fd)
    assert sandbox.text('stdout') == 'again\n'
    assert sandbox.runs() == [1, 2]


def test_concurrent_users_see_their_own_output(sandbox):
    users = [Background(sandbox.exec, f'echo start {n}; sleep 0.2; echo end {n}') for n in range(12)]
    assert [user.result() for user in users] == [f'start {n}\nend {n}\n'.encode() for n in range(12)]


def test_before_the_first_run_results_are_empty(sandbox):
    assert [sandbox.read(name) for name in ('stdout', 'stderr', 'exit_code', 'duration_ms')] == [b''] * 4
    assert sandbox.text('wait') == 'done\n'


@pytest.mark.parametrize('code', [0, 1, 2, 126, 127, 255])
def test_exit_code(sandbox, code):
    sandbox.write('exec', f'exit {code}\n')
    assert sandbox.text('exit_code') == f'{code}\n'
    assert float(sandbox.text('duration_ms')) >= 0


@pytest.mark.parametrize('number', [1, 9, 11, 15])
def test_death_by_signal_is_128_plus(sandbox, number):
    result = sandbox.run(f'kill -{number} $$; sleep 5')
    assert (result.exit_code, result.signal, result.timed_out) == (128 + number, number, False)
    assert sandbox.word('exit_code') == str(128 + number)


def test_command_that_is_not_there(sandbox):
    sandbox.write('exec', 'no-such-command-here\n')
    assert sandbox.word('exit_code') == '127'
    assert 'no-such-command-here' in sandbox.text('stderr')
    assert sandbox.run(argv=['/no/such/program']).exit_code == 127
    assert sandbox.run(argv=['/etc/passwd']).exit_code == 126


def test_stdout_and_stderr_are_apart(sandbox):
    sandbox.write('exec', 'for i in 1 2 3; do echo out $i; echo err $i >&2; done\n')
    assert sandbox.text('stdout') == 'out 1\nout 2\nout 3\n'
    assert sandbox.text('stderr') == 'err 1\nerr 2\nerr 3\n'


def test_script_of_a_megabyte(sandbox):
    text = ''.join(f'{n:06d} filler filler filler\n' for n in range(40000))
    assert len(text) > 1 << 20
    script = f"cat > /tmp/big <<'EOF'\n{text}EOF\nsha256sum < /tmp/big\n"
    sandbox.write('exec', script)
    assert sandbox.word('stdout').split()[0] == hashlib.sha256(text.encode()).hexdigest(), sandbox.text('stderr')
    assert sandbox.read('runs/1/command') == script.encode()


def test_script_beyond_the_limit_is_refused(sandbox):
    with sandbox.server.refused(27, says='exec'):  # EFBIG
        write_file(sandbox.path / 'exec', b'# ' + b'x' * (17 << 20))
    assert sandbox.runs() == []


def test_all_byte_values_are_exact(sandbox):
    octal = ''.join(f'\\{n:03o}' for n in range(256))
    sandbox.write('exec', f"printf '{octal}'; printf '{octal}' >&2\n")
    assert sandbox.read('stdout') == sandbox.read('stderr') == bytes(range(256))


def test_invalid_utf8_in_the_script_is_exact(sandbox):
    raw = bytes(n for n in range(1, 256) if n not in b'\n')
    assert sandbox.exec(b"cat <<'EOF'\n" + raw + b'\nEOF\n') == raw + b'\n'


@pytest.mark.timeout(300)
def test_100_mb_of_output_is_exact(mount):
    sandbox = mount.create(output_limit=200 << 20)
    block = ''.join(f'{n}\n' for n in range(1, 150001)).encode()
    expected, size, blocks = hashlib.sha256(), 0, 0
    while size < 100_000_000:
        piece = f'block {blocks}\n'.encode() + block
        expected.update(piece)
        size += len(piece)
        blocks += 1
    fd = os.open(sandbox.path / 'exec', os.O_RDWR)
    got, count = hashlib.sha256(), 0
    try:
        os.write(fd, b'seq 1 150000 > /tmp/block; i=0\n'
                     b'while [ $i -lt %d ]; do echo block $i; cat /tmp/block; i=$((i + 1)); done' % blocks)
        while part := os.read(fd, 1 << 20):
            got.update(part)
            count += len(part)
    finally:
        os.close(fd)
    assert (count, got.hexdigest()) == (size, expected.hexdigest())
    stored = hashlib.sha256()
    with open(sandbox.path / 'stdout', 'rb', buffering=0) as f:
        while part := f.read(1 << 20):
            stored.update(part)
    assert stored.hexdigest() == expected.hexdigest()
    assert os.stat(sandbox.path / 'stdout').st_size == size


def test_output_without_a_newline_and_empty_output(sandbox):
    assert sandbox.exec('printf x') == b'x'
    assert sandbox.exec(':') == b''
    assert sandbox.read('stdout') == b''


def test_default_environment(sandbox):
    lines = dict(line.split('=', 1) for line in sandbox.exec('env').decode().splitlines())
    assert {key: lines.get(key) for key in ('PYTHONHASHSEED', 'OMP_NUM_THREADS', 'MKL_NUM_THREADS', 'TZ', 'LC_ALL')} == {
        'PYTHONHASHSEED': '0', 'OMP_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1', 'TZ': 'UTC', 'LC_ALL': 'C.UTF-8'}
    assert '/bin' in lines['PATH'].split(':')
    assert lines['HOME'] == '/root'


def test_stdin_is_empty_and_there_is_no_terminal(sandbox):
    assert sandbox.exec('cat; tty || true') == b'not a tty\n'


def test_user_and_cwd_files(sandbox):
    sandbox.write('user', 'user\n')
    sandbox.write('cwd', '/tmp\n')
    assert (sandbox.word('user'), sandbox.word('cwd')) == ('user', '/tmp')
    assert sandbox.exec('id -u; id -g; id -G; pwd; echo $HOME').decode().split('\n') == [
        '1000', '1000', '1000 2000', '/tmp', '/home/user', '']
    sandbox.ctl('set user=root cwd=/')
    assert sandbox.exec('id -u; pwd') == b'0\n/\n'


def test_the_guest_is_linux_of_its_own(sandbox):
    assert sandbox.sh('uname -s') == 'Linux'
    assert sandbox.sh('cat /etc/ready') == 'set up'
    assert not [line for line in sandbox.processes() if 'agent' in line]  # out of sight
    assert sandbox.sh('echo still > /dev/null && head -c 4 /dev/zero | wc -c') == '4'
    names = sandbox.sh('ls /dev').split()
    assert {'null', 'zero', 'full', 'random', 'urandom', 'tty', 'ptmx', 'pts', 'shm', 'fd', 'stdin', 'stdout', 'stderr'} <= set(names)


def test_zombies_are_reaped(sandbox):
    sandbox.sh('for i in 1 2 3 4 5; do (sleep 0.01 & ) ; done; sleep 0.5')
    assert 'Z' not in [line.split()[1][0] for line in sandbox.sh('ps -o pid,stat').splitlines()[1:]]


def test_disk_full_is_the_guests_own_problem(sandbox):
    result = sandbox.run('dd if=/dev/zero of=/fill bs=1M count=4096; rm /fill; echo fine')
    assert b'o space left' in result.stderr, result
    assert sandbox.exec('echo alive') == b'alive\n'


def test_runs_folder(sandbox):
    sandbox.write('exec', 'echo one\n')
    sandbox.write('exec', 'echo two; exit 2\n')
    assert sandbox.runs() == [1, 2]
    assert sorted(os.listdir(sandbox.path / 'runs' / '2')) == [
        'command', 'ctl', 'duration_ms', 'exit_code', 'state', 'stderr', 'stdout']
    read = {name: sandbox.text(f'runs/2/{name}') for name in ('command', 'stdout', 'stderr', 'exit_code', 'state')}
    assert read == {'command': 'echo two; exit 2\n', 'stdout': 'two\n', 'stderr': '', 'exit_code': '2\n', 'state': 'exited\n'}
    assert sandbox.text('runs/1/stdout') == 'one\n'
    assert sandbox.text('stdout') == 'two\n'
    assert not pathlib.Path(sandbox.path / 'runs' / '3').exists()
