# SPDX-License-Identifier: Apache-2.0
"""Templates: config and its refusals, uploads, bakes that fail and succeed, what may be deleted when."""
import contextlib
import errno
import gzip
import io
import json
import os
import subprocess
import tarfile
import time

import pytest
from vmenv import Server, busybox_tar, until, write_file


@pytest.fixture
def draft(mount):
    """A template that is not baked yet, by name."""
    mount.declare('draft')
    yield 'draft'
    for name in os.listdir(mount.mount / 'sandboxes'):
        mount.sandbox(name).remove()
    os.rmdir(mount.mount / 'templates' / 'draft')


@contextlib.contextmanager
def failed_bake(mount, name, *words):
    """The block bakes, must be refused, and leaves the template failed with the words in info and log."""
    with pytest.raises(OSError):
        yield
    assert mount.word(f'templates/{name}/state') == 'failed'
    reason = mount.template_info(name)['reason']
    log = mount.text(f'templates/{name}/log')
    for word in words:
        assert word in reason, reason
        assert word in log, log
    assert reason and name in mount.text('error').splitlines()[-1]
    with mount.refused(errno.EBUSY, errno.EINVAL, errno.ENOENT, says=name):
        mount.create(name)


def bake(mount, name):
    mount.write(f'templates/{name}/ctl', 'bake\n')


WRONG = {
    'not json': ('vcpus=1', []),
    'an array': ('[]', []),
    'two objects': ('{}{}', []),
    'trailing text': ('{} x', []),
    'unknown key': ('{"vcpu": 1}', ['vcpu']),
    'unknown key in network': ('{"network": {"mode": "none", "colour": 1}}', ['colour']),
    'duplicate key': ('{"vcpus": 1, "vcpus": 2}', ['vcpus']),
    'vcpus 0': ('{"vcpus": 0}', ['vcpus', '0']),
    'vcpus 9': ('{"vcpus": 9}', ['vcpus', '9']),
    'vcpus text': ('{"vcpus": "two"}', ['vcpus']),
    'vcpus fraction': ('{"vcpus": 1.5}', ['vcpus']),
    'memory small': ('{"memory_mb": 1}', ['memory_mb']),
    'memory huge': ('{"memory_mb": 999999999}', ['memory_mb']),
    'memory negative': ('{"memory_mb": -256}', ['memory_mb']),
    'memory overflow': ('{"memory_mb": 99999999999999999999999}', []),
    'disk too large for the memory': ('{"disk_mb": 1000000, "memory_mb": 96}', ['disk_mb', 'memory_mb', '15673']),
    'disk 0': ('{"disk_mb": 0}', ['disk_mb']),
    'cmdline number': ('{"cmdline": 5}', ['cmdline']),
    'cmdline long': (json.dumps({'cmdline': 'x' * 5000}), ['cmdline']),
    'cmdline newline': ('{"cmdline": "a\\nb"}', ['cmdline']),
    'env list': ('{"env": ["A=b"]}', ['env']),
    'env number': ('{"env": {"A": 1}}', ['env']),
    'env name': ('{"env": {"A=B": "1"}}', ['env']),
    'user space': ('{"user": "a b"}', ['user']),
    'user number': ('{"user": 0}', ['user']),
    'cwd relative': ('{"cwd": "work"}', ['cwd']),
    'setup text': ('{"setup": "echo"}', ['setup']),
    'setup number': ('{"setup": [1]}', ['setup']),
    'setup_timeout': ('{"setup_timeout": -1}', ['setup_timeout']),
    'timeout': ('{"timeout": -1}', ['timeout']),
    'ttl': ('{"ttl": "long"}', ['ttl']),
    'on_expire': ('{"on_expire": "explode"}', ['on_expire', 'explode']),
    'output_limit': ('{"output_limit": -1}', ['output_limit']),
    'clock': ('{"clock": "yesterday"}', ['clock', 'yesterday']),
    'network mode': ('{"network": {"mode": "open"}}', ['network', 'mode']),
    'network allowlist': ('{"network": {"mode": "allowlist", "allow": ["10.1.2.3:443"]}}', ['network']),
    'grader': ('{"grader": {"command": "x"}}', ['grader']),
    'tripwire': ('{"tripwire": ["/x"]}', ['tripwire']),
    'pool': ('{"pool": 3}', ['pool']),
    'nul in text': ('{"cwd": "/a\\u0000b"}', []),
    'invalid utf-8': (b'{"cwd": "/\xff"}', []),
    'nul byte': (b'{}\0', []),
    'huge': (b'{"cmdline": "' + b'x' * (4 << 20) + b'"}', []),
}


@pytest.mark.parametrize('case', WRONG)
def test_wrong_config_is_refused(mount, draft, case):
    text, words = WRONG[case]
    with mount.refused(errno.EINVAL, *([errno.EFBIG, errno.E2BIG] if case == 'huge' else []), says=words):
        mount.write(f'templates/{draft}/config', text)
    assert mount.word(f'templates/{draft}/state') == 'new'


@pytest.mark.parametrize('text', ['[]', 'xyz', '{}x', '{xyz', '{"vcpus":1]', '{"vcpus":,', '{"vcpus": x\n', 'xyz\n', '[1,\n', '{} {'])
def test_hopeless_config_is_refused_by_the_write(mount, draft, text):
    """Shells look at what write returns, and not at close."""
    fd = os.open(mount.mount / 'templates' / draft / 'config', os.O_WRONLY | os.O_TRUNC)
    try:
        with mount.refused(errno.EINVAL, says='config'):
            os.write(fd, text.encode())
    finally:
        os.close(fd)


@pytest.mark.parametrize('text', ['{"vcpus": 2, "memory_mb": 128}\n', '  {"env": {"A": "\\u00e9\\ud83d\\ude00\\n\u00e9\U0001f600"}, "setup": []}',
                                  '{"timeout": 1.5e+1, "pool": 0, "cmdline":\n"a"\n}\n'])
def test_config_in_single_bytes(mount, draft, text):
    fd = os.open(mount.mount / 'templates' / draft / 'config', os.O_WRONLY | os.O_TRUNC)
    try:
        for byte in text.encode():
            assert os.write(fd, bytes([byte])) == 1
    finally:
        os.close(fd)
    assert json.loads(mount.read(f'templates/{draft}/config')) == json.loads(text)


def test_config_reads_back(mount, draft):
    text = json.dumps({'vcpus': 2, 'memory_mb': 512, 'network': {'mode': 'none'}, 'pool': 0, 'clock': 'frozen'})
    mount.write(f'templates/{draft}/config', text)
    assert json.loads(mount.read(f'templates/{draft}/config')) == json.loads(text)
    subprocess.run(['sh', '-c', 'echo \'{"vcpus": 3}\' > config'], cwd=mount.mount / 'templates' / draft, check=True, timeout=30)
    assert json.loads(mount.read(f'templates/{draft}/config'))['vcpus'] == 3


def test_template_life(mount, draft):
    assert mount.word(f'templates/{draft}/state') == 'new'
    assert mount.read(f'templates/{draft}/log') == b''
    with pytest.raises(FileExistsError):
        os.mkdir(mount.mount / 'templates' / draft)
    with mount.refused(errno.EINVAL, errno.ENOENT, errno.EBUSY, says='rootfs'):
        bake(mount, draft)
    with mount.refused(errno.EINVAL, errno.EBUSY, errno.ENOENT, says=draft):
        mount.create(draft)
    with mount.refused(errno.EINVAL, says='roast'):
        mount.write(f'templates/{draft}/ctl', 'roast\n')


@pytest.mark.parametrize('case', ['garbage', 'truncated tar', 'truncated gzip', 'empty tar entry names', 'zip', 'bad ext4'])
def test_broken_rootfs(mount, draft, case):
    tar = Server.rootfs
    data = {
        'garbage': os.urandom(100000),
        'truncated tar': tar[:len(tar) // 2],
        'truncated gzip': gzip.compress(tar, 1)[:300000],
        'empty tar entry names': b'\0' * 257 + b'ustar\x0000' + b'\xff' * 20000,
        'zip': b'PK\x03\x04' + os.urandom(5000),
        'bad ext4': bytes(1080) + b'\x53\xef' + os.urandom(100000),
    }[case]
    mount.write(f'templates/{draft}/rootfs', data)
    with failed_bake(mount, draft):
        bake(mount, draft)


def test_rootfs_that_does_not_fit(mount, draft):
    mount.write(f'templates/{draft}/config', '{"disk_mb": 16}')
    mount.write(f'templates/{draft}/rootfs', busybox_tar({'big': os.urandom(20 << 20)}))
    with failed_bake(mount, draft):
        bake(mount, draft)


def test_rootfs_whose_proc_is_a_file(mount, draft):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode='w') as tar:
        tar.addfile(tarfile.TarInfo('proc'), io.BytesIO())
    mount.write(f'templates/{draft}/rootfs', out.getvalue())
    with failed_bake(mount, draft, "vmenv-agent: the sandbox: the disk's /proc is not a directory"):
        bake(mount, draft)


def test_broken_kernel(mount, draft):
    mount.write(f'templates/{draft}/rootfs', Server.rootfs)
    mount.write(f'templates/{draft}/kernel', os.urandom(1 << 20))
    with failed_bake(mount, draft, 'kernel'):
        bake(mount, draft)


@pytest.mark.timeout(400)
def test_failing_setup_and_a_second_bake(mount, draft):
    mount.write(f'templates/{draft}/config', '{"disk_mb": 64, "setup": ["echo fine", "echo complaint >&2; exit 3", "echo never"]}')
    mount.write(f'templates/{draft}/rootfs', Server.rootfs)
    with failed_bake(mount, draft, 'exit 3'):
        bake(mount, draft)
    log = mount.text(f'templates/{draft}/log')
    assert 'complaint' in log and 'fine\n' in log and '\nnever' not in log
    mount.write(f'templates/{draft}/config', '{"disk_mb": 64, "setup": ["echo better > /etc/better"]}')
    bake(mount, draft)
    assert mount.word(f'templates/{draft}/state') == 'ready'
    assert mount.create(draft).exec('cat /etc/better') == b'better\n'


@pytest.mark.timeout(300)
def test_setup_that_hangs(mount, draft):
    mount.write(f'templates/{draft}/config', '{"disk_mb": 64, "setup_timeout": 2, "setup": ["sleep 1000"]}')
    mount.write(f'templates/{draft}/rootfs', Server.rootfs)
    with failed_bake(mount, draft):
        bake(mount, draft)


@pytest.mark.timeout(300)
def test_log_grows_and_templates_cannot_change_while_baking(mount, draft):
    """And an interrupted bake leaves the template failed."""
    import signal
    mount.write(f'templates/{draft}/config', '{"disk_mb": 64, "setup": ["echo begun", "sleep 1000"]}')
    mount.write(f'templates/{draft}/rootfs', Server.rootfs)
    child = subprocess.Popen(['sh', '-c', 'echo bake > ctl'], cwd=mount.mount / 'templates' / draft,
                             stderr=subprocess.DEVNULL, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    try:
        until(lambda: mount.word(f'templates/{draft}/state') == 'baking', 60)
        until(lambda: 'begun' in mount.text(f'templates/{draft}/log'), 150, 'setup has begun')
        for action in (lambda: mount.write(f'templates/{draft}/config', '{}'),
                       lambda: mount.write(f'templates/{draft}/rootfs', b'x'),
                       lambda: os.rmdir(mount.mount / 'templates' / draft),
                       lambda: bake(mount, draft)):
            with mount.refused(errno.EBUSY, says=draft):
                action()
        sandbox = mount.create()  # others go on
        assert sandbox.exec('echo meanwhile') == b'meanwhile\n'
    finally:
        child.send_signal(signal.SIGINT)
        child.wait(60)
    until(lambda: mount.word(f'templates/{draft}/state') == 'failed', 60)


@pytest.mark.timeout(300)
def test_ext4_image_with_four_processors(mount, draft, tmp_path):
    """Everything a config can say, on an ext4 image instead of a tar."""
    tree, image = tmp_path / 'tree', tmp_path / 'image'
    tree.mkdir()
    subprocess.run(['tar', 'xf', '-', '-C', tree], input=Server.rootfs, check=True, timeout=60)
    (tree / 'etc' / 'only-here').write_text('yes\n')
    subprocess.run(['mke2fs', '-q', '-t', 'ext4', '-b', '4096', '-d', tree, image, '48M'], check=True, timeout=60)
    mount.write(f'templates/{draft}/config', json.dumps({
        'vcpus': 4, 'memory_mb': 320, 'disk_mb': 96, 'env': {'COLOUR': 'red', 'TZ': 'Y'}, 'user': 'user', 'cwd': '/work',
        'timeout': 33, 'ttl': 444, 'clock': '2026-01-01T00:00:00Z', 'setup': ['id -u > /etc/setup-user; chmod 777 /work']}))
    subprocess.run(['cp', image, mount.mount / 'templates' / draft / 'rootfs'], check=True, timeout=60)
    bake(mount, draft)
    sandbox = mount.create(draft)
    assert sandbox.sh('nproc; cat /etc/only-here /etc/setup-user; id -u; pwd; echo $COLOUR $TZ $PYTHONHASHSEED').split() == [
        '4', 'yes', '0', '1000', '/work', 'red', 'Y', '0']
    assert (sandbox.word('timeout'), sandbox.word('ttl'), sandbox.word('user'), sandbox.word('cwd')) == (
        '33', '444', 'user', '/work')
    # the pinned clock starts at the given time in every restore
    assert 0 <= int(sandbox.sh('date -u +%s')) - 1767225600 < 600
    total = int(sandbox.sh("df -m / | awk 'NR == 2 {print $2}'"))
    assert 70 < total <= 96, 'the file system has grown to disk_mb'
    assert 250 < int(sandbox.sh("awk '/MemTotal/ {print $2}' /proc/meminfo")) // 1024 <= 320
    # all four processors work, before and after a fork
    child = sandbox.fork()
    busy = 'for i in 1 2 3 4; do (n=0; while [ $n -lt 3000 ]; do n=$((n + 1)); done; echo $i) & done; wait'
    for s in (sandbox, child):
        assert sorted(s.sh(busy).split()) == ['1', '2', '3', '4']
    assert child.sh('ls /sys/devices/system/cpu | grep -c "cpu[0-9]"') == '4'


def test_baked_template_cannot_change(mount, sandbox):
    folder = mount.mount / 'templates' / 'base'
    for action in (lambda: mount.write('templates/base/config', '{}'), lambda: mount.write('templates/base/rootfs', b'x'),
                   lambda: mount.write('templates/base/kernel', b'x'), lambda: os.rmdir(folder)):
        with mount.refused(errno.EBUSY, says='base'):
            action()
    assert mount.word('templates/base/state') == 'ready'
    assert sandbox.exec('cat /etc/ready') == b'set up\n'


def test_log_of_the_bake(mount):
    log = mount.text('templates/base/log')
    assert 'said by setup' in log
    assert 'Linux version' in log or 'vmenv-agent' in log, 'the console is in it'


def test_upload_in_pieces_and_out_of_order(mount, draft):
    path = mount.mount / 'templates' / draft / 'rootfs'
    data = os.urandom(3_000_000)
    fd = os.open(path, os.O_WRONLY)
    try:
        for at in range(2_900_000, -1, -100_000):
            os.pwrite(fd, data[at:at + 100_000], at)
        os.fsync(fd)
    finally:
        os.close(fd)
    assert path.read_bytes() == data and path.stat().st_size == len(data)
    write_file(path, b'short')
    assert path.read_bytes() == b'short'
    os.truncate(path, 0)
    assert path.stat().st_size == 0


def test_compressed_tars(mount, draft):
    """gzip here; the import of every format has tests of its own."""
    mount.write(f'templates/{draft}/config', '{"disk_mb": 64}')
    mount.write(f'templates/{draft}/rootfs', gzip.compress(Server.rootfs, 1))
    started = time.monotonic()
    bake(mount, draft)
    info = mount.template_info(draft)
    assert 0 < info['bake_ms'] <= (time.monotonic() - started) * 1000 + 1000
    assert mount.create(draft).exec('echo from gzip') == b'from gzip\n'
