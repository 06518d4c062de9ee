# SPDX-License-Identifier: Apache-2.0
"""exec.json: every key in, every key out, and everything wrong refused by name."""
import base64
import errno
import json
import os
import select
import time

import pytest
from vmenv import Background, read_fd, write_file

ANSWER = {'run', 'exit_code', 'signal', 'timed_out', 'duration_ms', 'stdout_bytes', 'truncated'}


def test_answer(sandbox):
    result = sandbox.run('echo out; echo err >&2; exit 4')
    assert ANSWER | {'stdout', 'stderr'} <= set(result.answer)
    assert (result.run, result.exit_code, result.timed_out, result.truncated) == (1, 4, False, False)
    assert (result.answer['stdout'], result.answer['stderr'], result.answer['stdout_bytes']) == ('out\n', 'err\n', 4)
    assert not result.signal
    assert result.answer['duration_ms'] >= 0


def test_close_runs_it_too(sandbox):
    sandbox.write('exec.json', '{"cmd": "echo closed"}')
    assert sandbox.text('stdout') == 'closed\n'


def test_argv_is_exact(sandbox):
    words = ['/bin/printf', '[%s]', 'a b', '', "it's", '$HOME', '*', 'ünï\n', '\\']
    assert sandbox.run(argv=words).stdout.decode() == "[a b][][it's][$HOME][*][ünï\n][\\]"
    assert sandbox.run(argv=['echo', 'found in PATH']).stdout == b'found in PATH\n'
    assert json.loads(sandbox.text('runs/1/command')) == words


def test_cwd_user_env(sandbox):
    result = sandbox.run('pwd; id -u; echo "$A|$B|$TZ"', cwd='/work', user='user', env={'A': 'x y', 'B': '', 'TZ': 'X'})
    assert result.answer['stdout'].endswith('1000\nx y||X\n') or result.exit_code, result
    assert result.stdout == b'/work\n1000\nx y||X\n'
    assert sandbox.run('id -u', user='1000').stdout == b'1000\n'
    assert sandbox.exec('pwd; id -u; echo "$A"') == b'/\n0\n\n'


def test_stdin(sandbox):
    text = 'one\ntwo ü\n'
    assert sandbox.run('cat', stdin=text).stdout == text.encode()
    raw = bytes(range(256)) * 5
    result = sandbox.run('cat', stdin_base64=base64.b64encode(raw).decode())
    assert result.stdout == raw
    assert 'stdout_base64' in result.answer and 'stdout' not in result.answer


def test_large_stdin(sandbox):
    raw = os.urandom(3 << 20)
    result = sandbox.run('cat', stdin_base64=base64.b64encode(raw).decode())
    assert result.stdout == raw


def test_stdin_that_nobody_reads_does_not_hold_the_run(sandbox):
    assert sandbox.run('echo done', stdin='x' * (2 << 20)).stdout == b'done\n'


def test_nul_and_all_bytes_by_base64(sandbox):
    result = sandbox.run(argv=['printf', ''.join(f'\\{n:03o}' for n in range(256))])
    assert base64.b64decode(result.answer['stdout_base64']) == bytes(range(256))
    assert result.answer['stdout_bytes'] == 256


def test_timeout(sandbox):
    result = sandbox.run('echo before; sleep 100; echo after', timeout=0.5)
    assert (result.exit_code, result.timed_out, result.stdout) == (124, True, b'before\n')


@pytest.mark.parametrize('limit', [1000, 65536])
def test_truncation_keeps_head_and_tail(sandbox, limit):
    result = sandbox.run('seq 1 40000', output_limit=limit)
    whole = ''.join(f'{n}\n' for n in range(1, 40001)).encode()
    assert result.truncated is True and result.exit_code == 0
    assert result.answer['stdout_bytes'] == len(whole)
    assert len(result.stdout) < limit + 500
    head = os.path.commonprefix([result.stdout, whole])
    tail = os.path.commonprefix([result.stdout[::-1], whole[::-1]])
    assert len(head) >= limit // 4 and len(tail) >= limit // 8
    assert len(head) + len(tail) > limit - 500


def test_output_at_the_limit_is_not_truncated(sandbox):
    result = sandbox.run("printf '%01000d' 7", output_limit=1000)
    assert (result.truncated, len(result.stdout)) == (False, 1000)
    assert sandbox.run("printf '%01001d' 7", output_limit=1000).truncated is True


def test_read_without_a_write_runs_nothing(sandbox):
    sandbox.read('exec.json')
    assert sandbox.runs() == []


WRONG = {
    'not json': ('echo hello', 'exec.json'),
    'half': ('{"cmd": "x"', 'exec.json'),
    'two objects': ('{"cmd": "x"}{"cmd": "y"}', 'exec.json'),
    'an array': ('["x"]', 'exec.json'),
    'unknown key': ('{"cmd": "x", "comand": "y"}', 'comand'),
    'unknown nested look-alike': ('{"cmd": "x", "Timeout": 3}', 'Timeout'),
    'neither cmd nor argv': ('{"cwd": "/"}', 'cmd'),
    'both cmd and argv': ('{"cmd": "x", "argv": ["y"]}', 'argv'),
    'cmd a number': ('{"cmd": 5}', 'cmd'),
    'argv a string': ('{"argv": "x"}', 'argv'),
    'argv empty': ('{"argv": []}', 'argv'),
    'argv of numbers': ('{"argv": [1]}', 'argv'),
    'env a list': ('{"cmd": "x", "env": ["A=b"]}', 'env'),
    'env of numbers': ('{"cmd": "x", "env": {"A": 1}}', 'env'),
    'env name with =': ('{"cmd": "x", "env": {"A=B": "1"}}', 'env'),
    'timeout text': ('{"cmd": "x", "timeout": "soon"}', 'timeout'),
    'timeout negative': ('{"cmd": "x", "timeout": -1}', 'timeout'),
    'output_limit text': ('{"cmd": "x", "output_limit": "all"}', 'output_limit'),
    'output_limit negative': ('{"cmd": "x", "output_limit": -5}', 'output_limit'),
    'stdin twice': ('{"cmd": "x", "stdin": "a", "stdin_base64": "YQ=="}', 'stdin'),
    'stdin not base64': ('{"cmd": "x", "stdin_base64": "%%%"}', 'stdin_base64'),
    'duplicate key': ('{"cmd": "x", "cmd": "y"}', 'cmd'),
    'invalid utf-8': (b'{"cmd": "\xff"}', 'exec.json'),
    'relative cwd': ('{"cmd": "x", "cwd": "tmp"}', 'cwd'),
}


@pytest.mark.parametrize('case', WRONG)
def test_wrong_request_is_refused(sandbox, case):
    text, word = WRONG[case]
    with sandbox.server.refused(errno.EINVAL, says=[word, sandbox.name]):
        write_file(sandbox.path / 'exec.json', text)
    assert sandbox.runs() == []


@pytest.mark.parametrize('request_', [{'user': 'nobody-here'}, {'cwd': '/no/such/folder'}])
def test_user_or_folder_that_is_not_there(sandbox, request_):
    """Either the call is refused or the run says 126 or 127; never a run as somebody else or elsewhere."""
    try:
        result = sandbox.run('echo ran', **request_)
    except OSError as failure:
        assert failure.errno in (errno.EINVAL, errno.ENOENT)
    else:
        assert result.exit_code in (126, 127) and result.stdout == b'', result


BIG = {
    'nul': ("head -c 3000001 /dev/zero", b'\0' * 3000001, 'stdout'),
    'text over pieces': ("yes 'aä€😀\"\\' | head -n 60000", 'aä€😀"\\\n'.encode() * 60000, 'stdout'),
    'a cut character at the end': ("yes ä | head -c 600001", 'ä\n'.encode() * 200000 + b'\xc3', 'stdout_base64'),
    'not text near the end': ("head -c 500000 /dev/zero; printf '\\355\\240\\200z'", b'\0' * 500000 + b'\xed\xa0\x80z',
                              'stdout_base64'),
}


@pytest.mark.parametrize('case', BIG)
def test_big_answer(sandbox, case):
    cmd, expected, key = BIG[case]
    result = sandbox.run(f'({cmd}) 2>/dev/null')
    assert key in result.answer, result
    assert len(result.stdout) == len(expected) and result.stdout == expected
    assert result.stderr == b'' and result.answer['stdout_bytes'] == len(expected)


CHARACTERS = {
    'controls': bytes(range(32)) + b'"\\/\x7f',
    'largest': '\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff'.encode(),
    'overlong': b'\xc0\x80', 'overlong of three': b'\xe0\x9f\xbf', 'overlong of four': b'\xf0\x8f\xbf\xbf',
    'surrogate': b'\xed\xa0\x80', 'past the last': b'\xf4\x90\x80\x80', 'alone': b'a\x80', 'cut': b'a\xe2\x82',
    'cut and going on': b'\xe2\x82a',
}


@pytest.mark.parametrize('case', CHARACTERS)
def test_text_or_base64(sandbox, case):
    data = CHARACTERS[case]
    result = sandbox.run('cat; cat /etc/ready >&2', stdin_base64=base64.b64encode(data).decode())
    try:
        text = data.decode()
    except UnicodeDecodeError:
        assert 'stdout' not in result.answer
    else:
        assert result.answer['stdout'] == text
    assert result.stdout == data and result.answer['stderr'] == 'set up\n'


def test_others_do_not_wait_for_a_big_answer(sandbox):
    """The answer is made apart: from the run's end to the answer's first byte, others are answered."""
    fd = os.open(sandbox.path / 'exec.json', os.O_RDWR)
    try:
        os.write(fd, json.dumps({'cmd': 'head -c 20000000 /dev/zero'}).encode())
        first = Background(os.read, fd, 1)
        sandbox.ended(1)
        times = [time.monotonic()]
        while first.running():
            assert sandbox.server.text('version').startswith('vmenvfs')
            times.append(time.monotonic())
        print(f'{len(times) - 1} reads, the longest {max(b - a for a, b in zip(times, times[1:])):.3f} s, '
              f'of {times[-1] - times[0]:.3f} s')
        assert first.result() == b'{' and len(times) > 3
        assert json.loads(b'{' + read_fd(fd))['stdout'] == '\0' * 20000000
    finally:
        os.close(fd)


def test_reader_that_does_not_wait_for_a_big_answer(sandbox):
    fd = os.open(sandbox.path / 'exec.json', os.O_RDWR | os.O_NONBLOCK)
    try:
        os.write(fd, json.dumps({'cmd': 'head -c 2000000 /dev/zero'}).encode())
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        with pytest.raises(BlockingIOError):
            os.read(fd, 1)
        sandbox.ended(1)
        with pytest.raises(BlockingIOError):
            os.read(fd, 1)
        assert poller.poll(60000), 'no answer'
        assert json.loads(read_fd(fd))['stdout'] == '\0' * 2000000
    finally:
        os.close(fd)


@pytest.mark.parametrize('text', ['[]', 'xyz\n', '{}x', '{"cmd": x\n', '{"cmd": ":"]'])
def test_hopeless_request_is_refused_by_the_write(sandbox, text):
    fd = os.open(sandbox.path / 'exec.json', os.O_WRONLY)
    try:
        with sandbox.server.refused(errno.EINVAL):
            os.write(fd, text.encode())
    finally:
        os.close(fd)
    assert sandbox.runs() == []
