# SPDX-License-Identifier: Apache-2.0
"""ctl: words, several lines, verbs and arguments, all refusals."""
import errno
import os

import pytest
from vmenv import write_file


def test_reading_ctl_lists_the_verbs(mount, sandbox):
    sandbox.write('exec', ':\n')
    for path, verbs in (('ctl', ['create']), ('templates/base/ctl', ['bake']),
                        (f'sandboxes/{sandbox.name}/ctl', ['fork', 'reset', 'freeze', 'thaw', 'kill', 'set']),
                        (f'sandboxes/{sandbox.name}/runs/1/ctl', ['kill'])):
        lines = mount.text(path).splitlines()
        assert [verb for verb in verbs if not any(line.split()[0].rstrip(':') == verb for line in lines)] == [], (path, lines)


def test_create_with_everything(mount):
    mount.ctl("create full from=templates/base ttl=500 timeout=33 user=user cwd=/tmp meta.task='it''s a task' meta.n=1")
    sandbox = mount.sandbox('full')
    assert [sandbox.word(name) for name in ('ttl', 'timeout', 'user', 'cwd')] == ['500', '33', 'user', '/tmp']
    assert {key: sandbox.text(f'metadata/{key}') for key in os.listdir(sandbox.path / 'metadata')} == {
        'task': "it's a task", 'n': '1'}
    assert sandbox.exec('id -u; pwd') == b'1000\n/tmp\n'


def test_quoting(mount):
    sandbox = mount.create()
    sandbox.ctl("  set   'cwd=/a b'\t user=user  ")
    assert (sandbox.word('cwd'), sandbox.word('user')) == ('/a b', 'user')
    sandbox.ctl("set cwd='/it''s'")
    assert sandbox.word('cwd') == "/it's"
    sandbox.ctl("set cwd=/'x y'/z")
    assert sandbox.word('cwd') == '/x y/z'


def test_several_lines_in_one_write(mount):
    write_file(mount.mount / 'ctl', 'create two-a from=base\ncreate two-b from=base')
    assert sorted(os.listdir(mount.mount / 'sandboxes')) == ['two-a', 'two-b']
    sandbox = mount.sandbox('two-a')
    sandbox.ctl('set timeout=7\nfreeze\nthaw\nset ttl=70')
    assert (sandbox.word('timeout'), sandbox.word('ttl'), sandbox.word('state')) == ('7', '70', 'running')


def test_all_lines_are_parsed_before_the_first_runs(mount):
    with mount.refused(errno.EINVAL, says='conjure'):
        write_file(mount.mount / 'ctl', 'create early from=base\nconjure late from=base\n')
    assert os.listdir(mount.mount / 'sandboxes') == []
    sandbox = mount.create()
    before = sandbox.word('timeout')
    with mount.refused(errno.EINVAL):
        sandbox.ctl("set timeout=9\nset cwd='unfinished")
    assert sandbox.word('timeout') == before


def test_set_is_all_or_nothing(mount):
    sandbox = mount.create()
    before = [sandbox.read(name) for name in ('timeout', 'cwd')]
    with mount.refused(errno.EINVAL, says='colour'):
        sandbox.ctl('set timeout=9 cwd=/tmp colour=red')
    assert [sandbox.read(name) for name in ('timeout', 'cwd')] == before


def test_an_empty_write_or_line_does_nothing(mount):
    write_file(mount.mount / 'ctl', '\n')
    write_file(mount.mount / 'ctl', '\n  \n\n')
    assert os.listdir(mount.mount / 'sandboxes') == []


ROOT_WRONG = {
    'unknown verb': ('conjure x', errno.EINVAL, ['conjure', 'create']),
    'no name': ('create', errno.EINVAL, ['create']),
    'no source': ('create x', errno.EINVAL, ['from']),
    'source not there': ('create x from=nosuch', errno.ENOENT, ['nosuch']),
    'source with a path': ('create x from=../base', errno.ENOENT, ['../base']),
    'source of another kind': ('create x from=snapshots/base', errno.ENOENT, ['snapshots/base']),
    'wrong name': ('create a/b from=base', errno.EINVAL, ['a/b']),
    'dot name': ('create .. from=base', errno.EINVAL, ['..']),
    'long name': (f'create {"n" * 65} from=base', errno.EINVAL, ['n' * 65]),
    'name too long with its number': (f'create {"n" * 64} from=base count=3', errno.EINVAL, ['n' * 64]),
    'unknown key': ('create x from=base colour=red', errno.EINVAL, ['colour']),
    'not a pair': ('create x from=base quickly', errno.EINVAL, ['quickly']),
    'count 0': ('create x from=base count=0', errno.EINVAL, ['count']),
    'count text': ('create x from=base count=many', errno.EINVAL, ['count']),
    'count negative': ('create x from=base count=-1', errno.EINVAL, ['count']),
    'count huge': ('create x from=base count=100000', errno.EINVAL, ['count']),
    'bad ttl': ('create x from=base ttl=never', errno.EINVAL, ['ttl']),
    'bad user': ("create x from=base user='a b'", errno.EINVAL, ['user']),
    'bad metadata key': ('create x from=base meta..x=1', errno.EINVAL, ['meta.']),
    'on_expire not there': ('create x from=base on_expire=hibernate', errno.EINVAL, ['hibernate']),
    'open quote': ("create 'x from=base", errno.EINVAL, ['quote']),
    'nul': ('create x from=base\0', errno.EINVAL, []),
    'huge line': ('create x from=base meta.a=' + 'x' * 200000, errno.EINVAL, []),
}


@pytest.mark.parametrize('case', ROOT_WRONG)
def test_wrong_root_command(mount, case):
    text, number, words = ROOT_WRONG[case]
    with mount.refused(number, *([errno.E2BIG, errno.EFBIG] if case == 'huge line' else []), says=words):
        write_file(mount.mount / 'ctl', text)
    assert os.listdir(mount.mount / 'sandboxes') == []


def test_name_taken(mount, sandbox):
    with mount.refused(errno.EEXIST, says=sandbox.name):
        mount.create(name=sandbox.name)
    with mount.refused(errno.EEXIST, says='many-1'):
        mount.create(name='many-1')
        mount.create(name='many', count=3)
    assert sorted(os.listdir(mount.mount / 'sandboxes')) == sorted(['many-1', sandbox.name])  # all or none
    with mount.refused(errno.EEXIST, says=sandbox.name):
        mount.sandbox('many-1').ctl(f'fork {sandbox.name}')
    assert mount.sandbox('many-1').exec('echo fine') == b'fine\n'


SANDBOX_WRONG = {
    'unknown verb': ('hover', ['hover', 'fork']),
    'verb of another folder': ('create x from=base', ['create']),
    'fork without a name': ('fork', ['fork']),
    'fork with a wrong name': ('fork a/b', ['a/b']),
    'fork count 0': ('fork x count=0', ['count']),
    'fork unknown key': ('fork x speed=9', ['speed']),
    'freeze with an argument': ('freeze now', ['freeze']),
    'set nothing': ('set', ['set']),
    'set without =': ('set ttl', ['ttl']),
    'set unknown': ('set colour=red', ['colour']),
    'set text for a number': ('set timeout=long', ['timeout']),
    'set overflow': ('set ttl=99999999999999999999999', ['ttl']),
    'set a relative cwd': ('set cwd=tmp', ['cwd']),
}


@pytest.mark.parametrize('case', SANDBOX_WRONG)
def test_wrong_sandbox_command(sandbox, case):
    text, words = SANDBOX_WRONG[case]
    with sandbox.server.refused(errno.EINVAL, says=[sandbox.name, *words]):
        sandbox.ctl(text)
    assert os.listdir(sandbox.server.mount / 'sandboxes') == [sandbox.name]
    assert sandbox.word('state') == 'running'


def test_error_lines(mount):
    """time, sandbox, command, errno name, sentence."""
    sandbox = mount.create()
    with mount.refused(errno.EINVAL):
        sandbox.ctl('hover over')
    line = mount.text('error').splitlines()[-1]
    assert all(word in line for word in (sandbox.name, 'hover over', 'EINVAL')), line
    assert line[:4].isdigit() and len(line) > 60, line


def test_default_template(mount):
    """mkdir in sandboxes/ makes one from the template called default."""
    mount.bake('default', config={'disk_mb': 64})
    try:
        os.mkdir(mount.mount / 'sandboxes' / 'plain')
        sandbox = mount.sandbox('plain')
        assert sandbox.exec('echo made by mkdir') == b'made by mkdir\n'
        assert sandbox.info()['source'] == 'default'
        with mount.refused(errno.EBUSY, says='default'):
            os.rmdir(mount.mount / 'templates' / 'default')
        with pytest.raises(FileExistsError):
            os.mkdir(mount.mount / 'sandboxes' / 'plain')
        os.rmdir(sandbox.path)
        assert not sandbox.exists()
    finally:
        for name in os.listdir(mount.mount / 'sandboxes'):
            mount.sandbox(name).remove()
        os.rmdir(mount.mount / 'templates' / 'default')
    assert os.listdir(mount.mount / 'templates') == ['base']


def test_control_characters_are_shown(mount):
    """A line from a file with DOS line ends."""
    for line in (b'create x from=base\r\n', b'create x from=base ttl=5\r\n', b'create x\r from=base\n'):
        with mount.refused(errno.EINVAL, errno.ENOENT, says='\\r'):
            write_file(mount.mount / 'ctl', line)
    with mount.refused(errno.EINVAL, says=['\\x1b', '\\x7f', '\\t']):
        write_file(mount.mount / 'ctl', b"'\x1b\x7f\t' x\n")
