#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing, builds with warnings as errors, runs the unit tests and then pytest against a real mount.
# Arguments go to pytest, and the unit tests are left out then:  tests/run.sh -k fork    tests/run.sh test_exec.py -x
set -eu
cd "$(dirname "$0")/.."

missing=
for package in meson ninja-build pkg-config gcc libc6-dev libfuse3-dev fuse3 libkmod-dev libjansson-dev libsqlite3-dev \
	libext2fs-dev comerr-dev libarchive-dev libssl-dev libzstd-dev liblzma-dev e2fsprogs qemu-system-x86 busybox-static kmod \
	dash procps mount python3 python3-pytest python3-pytest-timeout; do
	dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
command -v node >/dev/null || missing="$missing nodejs"
if [ -n "$missing" ]; then
	root=; [ "$(id -u)" = 0 ] || root=sudo
	echo "installing:$missing"
	$root apt-get update -qq
	DEBIAN_FRONTEND=noninteractive $root apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi

build=$PWD/build-test
export PATH="/usr/bin:/bin:/usr/sbin:/sbin:$PATH" # Debian's own python3, meson and pytest before any other
[ -f "$build/build.ninja" ] || meson setup -Dwerror=true "$build"
ninja -C "$build"

units=0
[ $# -gt 0 ] || meson test -C "$build" --print-errorlogs --timeout-multiplier 3 || units=$?

for argument; do # names as seen from the top folder mean the same
	shift
	set -- "$@" "${argument#tests/}"
done
export VMENV_BUILD="$build" PYTHONDONTWRITEBYTECODE=1
cd tests
status=0
/usr/bin/python3 -m pytest "$@" </dev/null || status=$?
[ $units = 0 ] || echo "unit tests failed, see above" >&2
[ $status != 0 ] || status=$units
exit $status
