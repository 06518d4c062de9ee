# SPDX-License-Identifier: Apache-2.0
"""vmenv-machine alone, with the serial console on stdio: how it boots, how it exits, what it refuses."""
import os
import pathlib
import re
import shutil
import struct
import subprocess

import pytest
from vmenv import BUILD, TESTS

INIT = b'''#!/busybox sh
/busybox mount -t proc proc /proc
echo "in the guest: $(/busybox nproc) processors, $(/busybox awk '/MemTotal/ {print int($2 / 1024)}' /proc/meminfo) MB"
case "$(/busybox cat /proc/cmdline)" in
*do=poweroff*) /busybox poweroff -f ;;
*do=reboot*) /busybox reboot -f ;;
*do=panic*) echo c > /proc/sysrq-trigger ;;
*do=exit*) exit 7 ;; # the kernel panics when its init ends
esac
'''

CASES = {  # name: (arguments, exit code)
    'poweroff': ('--kernel /vmlinuz --initrd /test.img --cmdline "quiet do=poweroff"', 0),
    'reboot': ('--kernel /vmlinuz --initrd /test.img --cmdline "quiet do=reboot"', 3),
    'panic': ('--kernel /vmlinuz --initrd /test.img --cmdline "quiet do=panic"', 4),
    'init-ends': ('--kernel /vmlinuz --initrd /test.img --cmdline "quiet do=exit" --vcpus 4 --memory 512', 4),
    'triple-fault': ('--kernel /fault.bin', 5),
    'no-such-kernel': ('--kernel /nowhere', 1),
    'garbage-kernel': ('--kernel /bin/busybox', 1),
    'short-kernel': ('--kernel /short.bin', 1),
    'no-such-initrd': ('--kernel /vmlinuz --initrd /nowhere', 1),
    'no-kernel': ('--memory 256', 2),
    'vcpus-9': ('--kernel /vmlinuz --vcpus 9', 1),
    'memory-text': ('--kernel /vmlinuz --memory lots', 2),
    'unknown-option': ('--kernel /vmlinuz --colour red', 2),
}


def cpio(files):
    """An initramfs: newc, as the kernel's initramfs-buffer-format.rst has it."""
    out = b''
    for n, (name, mode, data) in enumerate([*files, ('TRAILER!!!', 0, b'')]):
        fields = [n + 1, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0]
        out += b'070701' + ''.join(f'{field:08x}' for field in fields).encode() + name.encode() + b'\0'
        out += b'\0' * (-len(out) % 4)
        out += data
        out += b'\0' * (-len(out) % 4)
    return out


def tiny_kernel():
    """A bzImage whose 64-bit entry reads a port where nothing is, says OK on the console if it gets ones, and triple-faults."""
    code = bytes.fromhex('66ba9999 ec 3cff 750d'           # in al, 0x9999; anything but ff: to the fault
                         '66baf803 b04fee b04bee b00aee'  # "OK\n" to COM1
                         '0f011d02000000 0f0b') + bytes(10)  # an empty IDT, then an invalid instruction
    image = bytearray(1024 + 0x200 + len(code))
    image[0x1f1] = 1
    struct.pack_into('<I', image, 0x1f4, (0x200 + len(code) + 15) // 16)
    struct.pack_into('<HH4sH', image, 0x1fe, 0xaa55, 0x66eb, b'HdrS', 0x20f)
    image[0x211] = 1  # loaded high
    struct.pack_into('<I', image, 0x214, 0x100000)
    struct.pack_into('<IBBHI', image, 0x230, 0x200000, 1, 21, 1, 2047)  # alignment, relocatable, 64-bit entry, command line
    struct.pack_into('<QI', image, 0x258, 0x1000000, 0x100000)
    image[1024 + 0x200:] = code
    return bytes(image)


@pytest.fixture(scope='module')
def exits(tmp_path_factory):
    """All cases in one KVM host: {name: (exit code, output)}."""
    folder = tmp_path_factory.mktemp('vmm')
    busybox = pathlib.Path(shutil.which('busybox')).read_bytes()
    (folder / 'test.img').write_bytes(cpio([('proc', 0o40755, b''), ('dev', 0o40755, b''), ('busybox', 0o100755, busybox),
                                            ('init', 0o100755, INIT)]))
    (folder / 'fault.bin').write_bytes(tiny_kernel())
    (folder / 'short.bin').write_bytes(tiny_kernel()[:700])
    script = 'dmesg -n 1\n' + ''.join(
        f'echo "=== {name}"; vmenv-machine {arguments}; code=$?; echo; echo "=== exit $code"\n'
        for name, (arguments, _) in CASES.items())
    done = subprocess.run(
        [TESTS / 'kvmhost', '--build', BUILD, '--timeout', '240',
         *(word for name in ('test.img', 'fault.bin', 'short.bin') for word in ('--file', f'{folder / name}:/{name}')), script],
        stdin=subprocess.DEVNULL, capture_output=True, timeout=270, check=False, env={**os.environ, 'VMENV_BUILD': str(BUILD)})
    text = (done.stdout + done.stderr).decode(errors='replace').replace('\r', '')
    found = re.findall(r'^=== (\S+)\n(.*?)^=== exit (\d+)$', text, re.M | re.S)
    assert found, text[-3000:]
    return {name: (int(code), output) for name, output, code in found}


@pytest.mark.timeout(300)
@pytest.mark.parametrize('name', CASES)
def test_exit_code(exits, name):
    assert name in exits, list(exits)
    code, output = exits[name]
    assert code == CASES[name][1], output[-2000:]
    if code in (1, 2):
        assert 0 < len(output) < 4000, output


@pytest.mark.timeout(300)
def test_guest_sees_its_processors_and_memory(exits):
    found = re.search(r'in the guest: (\d+) processors, (\d+) MB', exits['poweroff'][1])
    assert found and found[1] == '1' and 150 < int(found[2]) <= 256, exits['poweroff']
    found = re.search(r'in the guest: (\d+) processors, (\d+) MB', exits['init-ends'][1])
    assert found and found[1] == '4' and 350 < int(found[2]) <= 512, exits['init-ends']


@pytest.mark.timeout(300)
def test_reads_from_nowhere_are_ones(exits):
    assert 'OK' in exits['triple-fault'][1], exits['triple-fault']
