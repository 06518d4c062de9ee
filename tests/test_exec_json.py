# SPDX-License-Identifier: Apache-2.0
"""exec.json: every key in, every key out, and everything wrong refused by name."""
import base64
import errno
import json
import os

import pytest
from vmenv import write_file

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
