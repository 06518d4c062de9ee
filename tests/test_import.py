# SPDX-License-Identifier: Apache-2.0
"""Root file systems into disk images: what comes in comes out; what is broken or hostile is refused with its reason.

Drives tests/c/test_import.c, which is fs/import.c and no more, and asks e2fsck, debugfs and the host's kernel about
the result.
"""
import contextlib
import gzip
import hashlib
import io
import lzma
import os
import random
import re
import shutil
import stat
import struct
import subprocess
import tarfile

import pytest
from vmenv import program

NOT_AN_ARCHIVE = r'EINVAL: rootfs is neither an ext4 image nor a tar \(plain, gzip, zstd, xz\)'
NOW = 1700000000


class Import:
    """The outcome: ok and the image, or the refusal as printed."""

    def __init__(self, source, image, megabytes, cancel_ms=None):
        command = [program('test-import'), source, image, str(megabytes)] + ([str(cancel_ms)] if cancel_ms else [])
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)
        self.text = done.stdout.decode(errors='backslashreplace').strip()
        self.ok = done.returncode == 0
        self.image = image
        assert done.returncode in (0, 1), f'{done.returncode}: {self.text}'
        assert self.text.count('\n') == 0, self.text

    def check(self):
        assert self.ok, self.text
        done = subprocess.run(['/sbin/e2fsck', '-fn', self.image], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert done.returncode == 0, done.stdout.decode(errors='backslashreplace')[-2000:]
        return self

    def refused(self, pattern):
        assert not self.ok, 'was not refused: ' + self.text
        assert re.search(pattern, self.text), self.text

    def debugfs(self, request):
        return subprocess.run(['/sbin/debugfs', '-R', request, self.image], stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL).stdout.decode(errors='backslashreplace')

    def dumpe2fs(self):
        return subprocess.run(['/sbin/dumpe2fs', self.image], stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL).stdout.decode()

    @contextlib.contextmanager
    def mounted(self, tmp_path):
        """The host's kernel reads it, where this host lets us."""
        point = tmp_path / 'mounted'
        point.mkdir(exist_ok=True)
        done = subprocess.run(['mount', '-t', 'ext4', '-o', 'loop,ro', self.image, point], stderr=subprocess.PIPE)
        if done.returncode:
            pytest.skip('no loop mount here: ' + done.stderr.decode(errors='backslashreplace').strip())
        try:
            yield os.fsencode(point) + b'/'
        finally:
            subprocess.run(['umount', point], check=True)


@pytest.fixture
def run(tmp_path):
    def run(source, megabytes=32, **more):
        if isinstance(source, bytes):
            (tmp_path / 'source').write_bytes(source)
            source = tmp_path / 'source'
        return Import(source, tmp_path / 'image', megabytes, **more)
    return run


class Tar:
    """A tar in memory, in whatever order and however wrong."""

    def __init__(self, format=tarfile.PAX_FORMAT):
        self.bytes = io.BytesIO()
        self.tar = tarfile.open(fileobj=self.bytes, mode='w', format=format, encoding='utf-8', errors='surrogateescape')

    def add(self, name, data=None, kind=tarfile.REGTYPE, size=None, pax=None, **fields):
        info = tarfile.TarInfo(os.fsdecode(name))
        info.type, info.mtime, info.mode = kind, NOW, 0o755 if kind == tarfile.DIRTYPE else 0o644
        data = b'' if data is None else data
        info.size = len(data) if size is None else size
        info.pax_headers = pax or {}
        for key, value in fields.items():
            setattr(info, key, value)
        self.tar.addfile(info, io.BytesIO(data))
        return self

    def dir(self, name, **fields):
        return self.add(name, kind=tarfile.DIRTYPE, **fields)

    def symlink(self, name, target, **fields):
        return self.add(name, kind=tarfile.SYMTYPE, linkname=os.fsdecode(target), **fields)

    def link(self, name, target, **fields):
        return self.add(name, kind=tarfile.LNKTYPE, linkname=os.fsdecode(target), **fields)

    def end(self):
        self.tar.close()
        return self.bytes.getvalue()


def zstd(data):
    return subprocess.run(['zstd', '-q', '-c'], input=data, stdout=subprocess.PIPE, check=True).stdout


ODD_NAMES = ['plain', ' spaces ', 'new\nline', 'tab\t', 'back\\slash', '-dash', '*?["\'', 'x' * 255, 'ä' * 127,
             'e\u0301 decomposed', '\u00e9 composed', '日本', b'latin1 \xe9\xff', b'\x01\x7f', '...', '.hidden', '#',
             '%s%n']


# --- what comes in comes out ---

@pytest.mark.parametrize('format', [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=['gnu', 'pax'])
def test_names(run, tmp_path, format):
    tar = Tar(format)
    for name in ODD_NAMES:
        tar.add(os.fsdecode(name), os.fsencode(name))
    deep = '/'.join(['directory-%02d' % i for i in range(60)])
    tar.add(deep + '/end', b'deep')
    tar.symlink('long', '/' + 'a/' * 2000 + 'b').symlink('short', 'x' * 59).symlink('just', 'x' * 60)
    result = run(tar.end()).check()
    with result.mounted(tmp_path) as top:
        found = set(os.listdir(top)) - {b'lost+found'}
        expected = {os.fsencode(name) for name in ODD_NAMES}
        assert found == expected | {b'long', b'short', b'just', b'directory-00'}
        for name in expected:
            assert open(top + name, 'rb').read() == name
        assert open(top + deep.encode() + b'/end').read() == 'deep'
        assert os.readlink(top + b'long') == b'/' + b'a/' * 2000 + b'b'
        assert os.readlink(top + b'short') == b'x' * 59
        assert os.readlink(top + b'just') == b'x' * 60


def test_attributes(run, tmp_path):
    capability = struct.pack('<IIIII', 0x02000001, 1 << 13, 0, 0, 0)
    acl = struct.pack('<I', 2) + b''.join(struct.pack('<HHI', *e) for e in (
        (1, 6, 0xffffffff), (2, 5, 1234), (4, 4, 0xffffffff), (16, 5, 0xffffffff), (32, 0, 0xffffffff)))
    tar = Tar()
    tar.add('suid', b's', mode=0o6755, uid=0, gid=42)
    tar.add('big-ids', b'i', uid=3000000000, gid=4294967294)
    tar.add('old', mtime=-1000).add('fraction', pax={'mtime': '1234567890.123456789'}).add('far', mtime=9000000000)
    tar.add('cap', b'c', pax={'SCHILY.xattr.security.capability': capability.decode('latin1')})
    tar.add('attributes', b'x', pax={'SCHILY.xattr.user.one': 'eins', 'SCHILY.xattr.user.two': '2' * 1000,
                                     'SCHILY.xattr.com.apple.quarantine': 'left out'})
    tar.add('acl', b'a', mode=0o650,
            pax={'SCHILY.acl.access': 'user::rw-,user:1234:r-x,group::r--,mask::r-x,other::---'})
    tar.dir('acl-dir', pax={'SCHILY.acl.default': 'user::rwx,group::r-x,other::---'})
    tar.dir('tmp', mode=0o1777).dir('later', mode=0o700, pax={'SCHILY.xattr.user.dir': 'kept'})
    tar.add('null', kind=tarfile.CHRTYPE, devmajor=1, devminor=3)
    tar.add('disk', kind=tarfile.BLKTYPE, devmajor=300, devminor=70000)
    tar.add('fifo', kind=tarfile.FIFOTYPE)
    result = run(tar.end()).check()
    assert 'posix_acl_access' in result.debugfs('ea_list /acl')
    with result.mounted(tmp_path) as top:
        def at(name):
            return os.lstat(top + name)
        assert stat.S_IMODE(at(b'suid').st_mode) == 0o6755 and at(b'suid').st_gid == 42
        assert (at(b'big-ids').st_uid, at(b'big-ids').st_gid) == (3000000000, 4294967294)
        assert at(b'old').st_mtime == -1000 and at(b'far').st_mtime == 9000000000
        assert at(b'fraction').st_mtime_ns == 1234567890123456789
        assert at(b'attributes').st_mtime == NOW
        assert os.getxattr(top + b'cap', 'security.capability')[:4] == capability[:4]
        assert sorted(os.listxattr(top + b'attributes')) == ['user.one', 'user.two']
        assert os.getxattr(top + b'attributes', 'user.two') == b'2' * 1000
        assert os.getxattr(top + b'acl', 'system.posix_acl_access') == acl
        assert 'system.posix_acl_default' in os.listxattr(top + b'acl-dir')
        assert os.getxattr(top + b'later', 'user.dir') == b'kept'
        assert stat.S_IMODE(at(b'tmp').st_mode) == 0o1777
        assert stat.S_ISCHR(at(b'null').st_mode) and at(b'null').st_rdev == os.makedev(1, 3)
        assert stat.S_ISBLK(at(b'disk').st_mode) and at(b'disk').st_rdev == os.makedev(300, 70000)
        assert stat.S_ISFIFO(at(b'fifo').st_mode)


@pytest.mark.parametrize('pack', [bytes, gzip.compress, lzma.compress, zstd], ids=['plain', 'gzip', 'xz', 'zstd'])
def test_content(run, tmp_path, pack):
    sizes = {b'%d' % n: random.Random(n).randbytes(n)
             for n in (0, 1, 511, 4095, 4096, 4097, 65536, (1 << 20) + 1, 5 << 20)}
    tar = Tar()
    for name, data in sizes.items():
        tar.add(name, data)
    result = run(pack(tar.end())).check()
    with result.mounted(tmp_path) as top:
        for name, data in sizes.items():
            assert open(top + name, 'rb').read() == data


def test_sparse(run, tmp_path):
    """As GNU tar writes it: holes stay holes, a file may be larger than the disk."""
    tree = tmp_path / 'tree'
    tree.mkdir()
    pieces = [(0, b'head'), (70000, b'x' * 10), (100 << 20, b'middle' * 1000), ((1 << 30) - 4, b'tail')]
    with open(tree / 'sparse', 'wb') as f:
        for at, data in pieces:
            f.seek(at)
            f.write(data)
    with open(tree / 'hole', 'wb') as f:
        f.truncate(3 << 30)
    for format in ('gnu', 'posix'):
        subprocess.run(['tar', '-S', f'--format={format}', '-cf', tmp_path / 'source', '-C', tree, 'sparse', 'hole'],
                       check=True)
        result = run(tmp_path / 'source').check()
        with result.mounted(tmp_path) as top:
            assert os.stat(top + b'sparse').st_size == 1 << 30 and os.stat(top + b'hole').st_size == 3 << 30
            assert os.stat(top + b'sparse').st_blocks < 200 and os.stat(top + b'hole').st_blocks == 0
            with open(top + b'sparse', 'rb') as f:
                for at, data in pieces:
                    f.seek(at)
                    assert f.read(len(data)) == data


def test_hard_links(run, tmp_path):
    tar = Tar().add('d/first', b'shared').link('second', 'd/first').link('./d/third', '/second')
    tar.link('d/first', 'd/first')
    tar.symlink('s', 'd').link('through', 's/first').symlink('sym', 'nowhere').link('sym2', 'sym')
    # The name goes, the file stays with its others; a link may also replace the directory its target is in.
    tar.add('d/first', b'replaced').dir('e').add('e/inner', b'inner').link('e', 'e/inner')
    result = run(tar.end()).check()
    with result.mounted(tmp_path) as top:
        assert open(top + b'd/first').read() == 'replaced' and os.stat(top + b'd/first').st_nlink == 1
        assert open(top + b'second').read() == 'shared' and os.stat(top + b'second').st_nlink == 3
        assert os.stat(top + b'second').st_ino == os.stat(top + b'd/third').st_ino == os.stat(top + b'through').st_ino
        assert os.readlink(top + b'sym2') == b'nowhere' and os.lstat(top + b'sym').st_nlink == 2
        assert open(top + b'e').read() == 'inner' and os.stat(top + b'e').st_nlink == 1


def test_order(run, tmp_path):
    """Parents that come late or never, absolute paths, doubles, and parents that are symlinks of the image."""
    tar = Tar().add('./a/b/file', b'1').dir('./a/b', mode=0o700).dir('./', mode=0o751).add('/abs/x', b'2')
    tar.add('no/parent/y', b'3')
    tar.add('twice', b'first' * 10000).add('twice', b'second')
    tar.add('was-file', b'').dir('was-file').add('was-file/in', b'4')
    for i in range(3):
        tar.dir('was-dir').dir('was-dir/deep/er').add('was-dir/deep/er/f%d' % i, b'5').add('was-dir/g', b'6')
        tar.add('was-dir', b'file %d' % i)
    tar.symlink('bin', 'usr/bin').dir('usr/bin').add('bin/sh', b'7').symlink('usr/up', '../abs').add('usr/up/z', b'8')
    tar.symlink('root', '/../..').add('root/w', b'9')
    tar.dir('was-file', mode=0o711)
    result = run(tar.end()).check()
    with result.mounted(tmp_path) as top:
        assert open(top + b'a/b/file').read() == '1' and stat.S_IMODE(os.stat(top + b'a/b').st_mode) == 0o700
        assert stat.S_IMODE(os.stat(top).st_mode) == 0o751
        assert stat.S_IMODE(os.stat(top + b'no/parent').st_mode) == 0o755
        assert os.stat(top + b'no').st_mtime == NOW
        assert open(top + b'abs/x').read() == '2' and open(top + b'no/parent/y').read() == '3'
        assert open(top + b'twice').read() == 'second' and open(top + b'was-dir').read() == 'file 2'
        assert open(top + b'was-file/in').read() == '4' and stat.S_IMODE(os.stat(top + b'was-file').st_mode) == 0o711
        assert open(top + b'usr/bin/sh').read() == '7' and open(top + b'abs/z').read() == '8'
        assert open(top + b'w').read() == '9'


def test_same_tar_same_image(run):
    tar = Tar().dir('d', mtime=5)
    for i in range(3000):
        tar.add('d/file-%d' % i, b'%d' % i, pax={'SCHILY.xattr.user.n': str(i)} if i % 7 == 0 else None)
    source = tar.end()
    digests = {hashlib.sha256(run(source).check().image.read_bytes()).hexdigest() for _ in range(2)}
    assert len(digests) == 1


def test_large_directory(run, tmp_path):
    """Each entry costs the same, and the directory comes out indexed, in two levels."""
    tar = Tar(tarfile.GNU_FORMAT)
    for i in range(100000):
        tar.add('many/a-file-with-a-name-of-some-length-%06d' % i)
    result = run(tar.end(), megabytes=1024).check()
    assert re.search(r'Flags: 0x81000', result.debugfs('stat /many'))
    with result.mounted(tmp_path) as top:
        assert len(os.listdir(top + b'many')) == 100000
        for i in (0, 1, 777, 50000, 99999):
            assert os.path.exists(top + b'many/a-file-with-a-name-of-some-length-%06d' % i)
        assert not os.path.exists(top + b'many/a-file-with-a-name-of-some-length-100000')


def test_more_files_than_inodes_at_first(run):
    tar = Tar(tarfile.GNU_FORMAT)
    for i in range(6000):
        tar.add('%d/f' % i)
    assert 'files 6000' in run(tar.end(), megabytes=48).check().text


def test_image_properties(run):
    result = run(Tar().add('x', b'x').end(), megabytes=300).check()
    assert result.image.stat().st_size == 300 << 20
    assert result.image.stat().st_blocks * 512 < 4 << 20
    header = result.dumpe2fs()
    features = re.search(r'Filesystem features: *(.*)', header).group(1).split()
    assert 'has_journal' not in features and 'extent' in features and 'inline_data' not in features
    assert re.search(r'Block size: *4096', header) and re.search(r'Reserved block count: *0\b', header)
    assert int(re.search(r'Free inodes: *(\d+)', header).group(1)) >= 64 * 300
    groups = re.findall(r'^Group \d+:.*(\[.*\])?$', header, re.M)
    assert groups and len(re.findall('ITABLE_ZEROED', header)) == len(groups)


# --- what is refused ---

def bad_checksum():
    data = bytearray(Tar().add('x', b'x').end())
    data[150] ^= 1
    return bytes(data)


def zip_file():
    import zipfile
    out = io.BytesIO()
    with zipfile.ZipFile(out, 'w') as z:
        z.writestr('x', 'x')
    return out.getvalue()


def cpio():
    return subprocess.run(['cpio', '-o', '-H', 'newc', '--quiet'], input=b'/etc/passwd\n', stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, check=True).stdout


TWO = Tar().add('first', b'1' * 2000).add('second', b'2' * 2000).end()

HOSTILE = {
    'empty': (b'', r'EINVAL: rootfs is empty'),
    'garbage': (random.Random(1).randbytes(100000), NOT_AN_ARCHIVE),
    'text': (b'hello\n' * 1000, NOT_AN_ARCHIVE),
    'short': (b'x', NOT_AN_ARCHIVE),
    'zeros': (bytes(10240), r'EINVAL: rootfs is (a tar with nothing in it|neither)'),
    'bad checksum': (bad_checksum, NOT_AN_ARCHIVE),
    'zip': (zip_file, NOT_AN_ARCHIVE),
    'ar': (b'!<arch>\nx/              0           0     0     100644  1         `\nx\n', NOT_AN_ARCHIVE),
    'gzip of text': (gzip.compress(b'hello' * 1000), NOT_AN_ARCHIVE),
    'gzip of nothing': (gzip.compress(b''), NOT_AN_ARCHIVE),
    'cut in data': (TWO[:512 + 1000], r'EINVAL: the tar is broken at or after "first"'),
    'cut in a header': (TWO[:-10240 + 512] if len(TWO) < 10241 else TWO[:512 + 2048 + 200], r'EINVAL: .*"first"'),
    'cut between entries': (TWO[:512 + 2048], r'EINVAL: the tar is cut off after "first": it has no end marker'),
    'cut gzip': (gzip.compress(TWO)[:-20], r'EINVAL: .*(truncated|cut)'),
    'cut xz': (lzma.compress(TWO)[:-20], r'EINVAL: '),
    'cut zstd': (lambda: zstd(random.Random(2).randbytes(300000).join([TWO[:512], TWO[512:]]))[:-2000], r'EINVAL: '),
    'garbage in gzip': (lambda: gzip.compress(TWO)[:30] + b'\xff' * 500, r'EINVAL: '),
    'garbage after entry': (TWO[:512 + 2048] + b'garbage!' * 64, r'EINVAL: the tar is broken at or after "first"'),
    'dot dot': (Tar().add('a/../../etc/passwd').end(), r'EINVAL: "a/\.\./\.\./etc/passwd": "\.\." in its path'),
    'long name': (Tar().add('d/' + 'n' * 256).end(), r'EINVAL: .*longer than 255'),
    'long path': (Tar().add('p/' * 3000 + 'x').end(), r'EINVAL: .*path is longer than 4095'),
    'link to nothing': (Tar().link('l', 'nothing').end(),
                        r'EINVAL: "l": it is a hard link to what is not in the archive'),
    'link to directory': (Tar().dir('d').link('l', 'd').end(), r'EINVAL: "l": it is a hard link to a directory'),
    'link out': (Tar().link('l', '../../etc/passwd').end(), r'EINVAL: "l": "\.\." in its path'),
    'parent is a file': (Tar().add('f').add('f/x').end(), r'EINVAL: "f/x": part of its path is a file'),
    'parent is a loop': (Tar().symlink('a', 'b').symlink('b', 'a').add('a/x').end(), r'EINVAL: "a/x": .*symlinks'),
    'empty symlink': (Tar().symlink('s', '').end(), r'EINVAL: "s": it has no target'),
    'long symlink': (Tar().symlink('s', 't' * 4096).end(), r'EINVAL: "s": its target is longer'),
    'root is a file': (Tar().add('./', b'x').end(), r'EINVAL: '),
    'root is a symlink': (Tar().symlink('.', 'x').end(), r'EINVAL: .*the root is not a directory'),
    'lost+found': (Tar().add('lost+found', b'').end(), r'EINVAL: .*lost\+found is not a directory'),
    'attribute too large': (Tar().add('x', pax={'SCHILY.xattr.user.x': 'x' * 5000}).end(),
                            r'EINVAL: "x": .*more than 4 KiB'),
    'attributes too many': (Tar().add('x', pax={'SCHILY.xattr.user.%d' % i: 'x' * 500 for i in range(20)}).end(),
                            r'EINVAL: "x": its extended attributes take more than 4 KiB'),
    'device': (Tar().add('x', kind=tarfile.CHRTYPE, devmajor=1 << 20, devminor=0).end(), r'EINVAL: "x": device number'),
    'too large': (Tar().add('x', b'', size=0).add('big', b'\0' * (40 << 20)).end(),
                  r'ENOSPC: the root file system does not fit into 32 MiB: it needs about 4\d MiB \(full at "big"\)'),
    'huge header': (gzip.compress(Tar().add('x', pax={'comment': 'x' * (20 << 20)}).end(), 1), r'EINVAL: .*[Hh]eader'),
}


@pytest.mark.parametrize('name', HOSTILE)
def test_refused(run, name):
    data, pattern = HOSTILE[name]
    run(data() if callable(data) else data).refused(pattern)


@pytest.mark.skipif(not shutil.which('cpio'), reason='no cpio')
def test_cpio_refused(run):
    run(cpio()).refused(NOT_AN_ARCHIVE)


def test_claims_more_than_it_has(run):
    """A header that promises 1 TiB, and one that promises 8 EiB, sparse: no memory or time is spent on the promise."""
    header = tarfile.TarInfo('x')
    header.size = 1 << 40
    run(header.tobuf(tarfile.GNU_FORMAT) + b'x' * 1024).refused(r'EINVAL: the tar is broken at or after "x"')
    run(Tar().add('x', b'0\n', pax={'GNU.sparse.major': '1', 'GNU.sparse.minor': '0', 'GNU.sparse.name': 'x',
                                    'GNU.sparse.realsize': str(1 << 62)}).end()).refused('EINVAL: ')


def test_bomb_is_bounded_by_the_disk(run, tmp_path):
    """A gigabyte of zeros in a megabyte."""
    header = tarfile.TarInfo('zeros')
    header.size = 1 << 30
    with gzip.open(tmp_path / 'bomb', 'wb', compresslevel=1) as f:
        f.write(header.tobuf())
        for _ in range(1 << 10):
            f.write(bytes(1 << 20))
        f.write(bytes(1024))
    result = run(tmp_path / 'bomb', megabytes=64)
    result.refused(r'ENOSPC: the root file system does not fit into 64 MiB: it needs (about 1\d\d\d|at least \d+) MiB')
    assert result.image.stat().st_blocks * 512 <= 65 << 20


def test_cancel(run, tmp_path):
    """An archive that would go on for long ends soon after it is cancelled."""
    with open(tmp_path / 'endless', 'wb') as f:
        header = tarfile.TarInfo('x')
        header.size = 1 << 38
        f.write(header.tobuf(tarfile.GNU_FORMAT))
        f.truncate(1 << 38)
    run(tmp_path / 'endless', megabytes=1 << 19, cancel_ms=300).refused(r'ECANCELED: ')


def test_many_replaced_names_are_bounded(run):
    tar = Tar(tarfile.GNU_FORMAT)
    for i in range(10000):
        tar.dir('d').add('d/%d' % i).add('d', b'')
    run(tar.end(), megabytes=16).refused(r'ENOSPC: .*too many for this disk')


# --- ext4 images ---

def mke2fs(path, size, *options, tree):
    options = (() if '-t' in options else ('-t', 'ext4')) + (() if '-b' in options else ('-b', '4096')) + options
    done = subprocess.run(['/sbin/mke2fs', '-q', '-F', *options, '-d', tree, path, size], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout.decode(errors='backslashreplace')
    return path


@pytest.fixture
def tree(tmp_path):
    top = tmp_path / 'tree'
    (top / 'bin').mkdir(parents=True)
    (top / 'bin' / 'sh').write_bytes(random.Random(3).randbytes(1 << 20))
    (top / 'link').symlink_to('bin/sh')
    return top


@pytest.mark.parametrize('options', [
    (), ('-O', '^has_journal'), ('-O', '^metadata_csum,uninit_bg'), ('-O', '^64bit'), ('-O', '^resize_inode'),
    ('-t', 'ext2'), ('-t', 'ext3'), ('-O', 'metadata_csum_seed')],
                         ids=lambda options: ' '.join(options) or 'default')
def test_ext4(run, tmp_path, tree, options):
    result = run(mke2fs(tmp_path / 'source', '24M', *options, tree=tree), megabytes=400).check()
    assert result.text.startswith('kind ext4')
    assert result.image.stat().st_size == 400 << 20 and result.image.stat().st_blocks * 512 < 60 << 20
    header = result.dumpe2fs()
    assert int(re.search(r'^Block count: *(\d+)', header, re.M).group(1)) > 390 << 8
    if 'metadata_csum' in header or 'uninit_bg' in header:
        assert len(re.findall('ITABLE_ZEROED', header)) == len(re.findall(r'^Group \d', header, re.M))
    with result.mounted(tmp_path) as top:
        assert open(top + b'bin/sh', 'rb').read() == (tree / 'bin' / 'sh').read_bytes()
        assert os.readlink(top + b'link') == b'bin/sh'


def test_ext4_of_the_disks_size(run, tmp_path, tree):
    run(mke2fs(tmp_path / 'source', '32M', tree=tree)).check()


def test_ext4_needs_its_journal(run, tmp_path, tree):
    """One that was not unmounted cleanly is played back, not refused."""
    source = mke2fs(tmp_path / 'source', '24M', tree=tree)
    subprocess.run(['/sbin/debugfs', '-w', '-R', 'feature needs_recovery', source], check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run(source).check()


def patch(path, at, data):
    with open(path, 'r+b') as f:
        f.seek(at)
        f.write(data)
    return path


@pytest.mark.parametrize('size,options,change,pattern', [
    ('40M', (), None, r'ENOSPC: the ext4 image is of 40 MiB and the disk of 32 MiB'),
    ('24M', ('-b', '1024'), None, r"EINVAL: the ext4 image's block size is 1024, not 4096"),
    ('24M', ('-O', 'inline_data'), None, r'EINVAL: the ext4 image has the feature inline_data'),
    ('24M', ('-O', 'encrypt'), None, r'EINVAL: the ext4 image has the feature encrypt'),
    ('24M', ('-O', 'casefold'), None, r'EINVAL: the ext4 image has the feature casefold'),
    ('24M', ('-O', 'bigalloc'), None, r'EINVAL: the ext4 image has the feature bigalloc'),
    ('24M', ('-O', 'mmp'), None, r'EINVAL: the ext4 image has the feature mmp'),
    ('24M', (), lambda p: os.truncate(p, 10 << 20), r'EINVAL: the ext4 image is cut off'),
    ('24M', (), lambda p: os.truncate(p, 1500), r'EINVAL: the ext4 image is cut off in its superblock'),
    ('24M', (), lambda p: patch(p, 1024 + 96, b'\xff\xff\xff\xff'), r'EINVAL: the ext4 image has (the|a) feature'),
    ('24M', (), lambda p: patch(p, 1024 + 24, b'\x40'), r"EINVAL: the ext4 image's block size"),
    ('24M', (), lambda p: patch(p, 1024 + 4, bytes(4)), r'EINVAL: '),
    ('24M', ('-O', '^metadata_csum'), lambda p: patch(p, 1024 + 40, b'\xff\xff\xff\x7f'), r'EINVAL: '),
    ('24M', (), lambda p: patch(p, 4096, b'\xff' * 4096), r'EINVAL: the ext4 image has errors \(e2fsck'),
    ('24M', ('-O', '^metadata_csum'), lambda p: patch(p, 8192, random.Random(4).randbytes(400000)), r'EINVAL: '),
], ids=lambda value: value if isinstance(value, str) and 'E' in value else '')
def test_ext4_refused(run, tmp_path, tree, size, options, change, pattern):
    source = mke2fs(tmp_path / 'source', size, *options, tree=tree)
    if change:
        change(source)
    run(source).refused(pattern)


# --- at random ---

def flipped(data, seed):
    r = random.Random(seed)
    data = bytearray(data)
    for _ in range(r.choice((1, 3, 20))):
        at = r.randrange(len(data))
        data[at:at + 1] = r.choice((b'\0', b'\xff', bytes([data[at] ^ 1 << r.randrange(8)]), b'9'))
    return bytes(data)


def test_flipped_tar(run):
    """Whatever happens to an archive's bytes, what comes out is a refusal or a sound image."""
    tar = Tar()
    for i in range(8):
        name = 'd%d/%s' % (i, 'n' * 30 * i)
        if i:
            tar.add(name, b'x' * 300 * i, pax={'SCHILY.xattr.user.a': 'b'}).link('l%d' % i, name)
        tar.symlink('s%d' % i, 'd%d' % i)
    data = tar.end()
    for seed in range(60):
        result = run(flipped(data, seed) if seed % 2 else gzip.compress(flipped(data, seed)), megabytes=16)
        if result.ok:
            result.check()


def test_flipped_ext4(run, tmp_path, tree):
    data = mke2fs(tmp_path / 'small', '8M', '-O', '^has_journal', tree=tree).read_bytes()
    head, rest = data[:200 << 10], data[200 << 10:]
    for seed in range(25):
        result = run(flipped(head, seed) + rest, megabytes=16)
        if result.ok:
            result.check()
