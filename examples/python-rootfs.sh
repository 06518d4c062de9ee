#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# python-rootfs.sh OUT.tar: a Debian root file system with Python, pytest, gcc and git, to be written to a template:
#
#     examples/python-rootfs.sh python.tar
#     mkdir MOUNT/templates/python
#     echo '{"memory_mb":512,"disk_mb":2048}' > MOUNT/templates/python/config
#     cat python.tar > MOUNT/templates/python/rootfs
#     echo bake > MOUNT/templates/python/ctl
#
# Environment: SUITE (bookworm), MIRROR (mmdebstrap's default), PACKAGES (more of them, by commas). As root it uses a
# chroot, as anybody else a user namespace.
set -eu

case ${1-} in
'' | -*)
	echo "usage: $0 OUT.tar" >&2
	exit 2
	;;
esac
out=$1
suite=${SUITE:-bookworm}
packages=python3,python3-pytest,python3-venv,gcc,libc6-dev,make,git,ca-certificates${PACKAGES:+,$PACKAGES}

missing=
command -v mmdebstrap >/dev/null || missing=mmdebstrap
if [ "$(id -u)" = 0 ]; then
	mode=root
	as_root=
else
	mode=unshare
	as_root=sudo
	command -v newuidmap >/dev/null || missing="$missing uidmap"
fi
if [ -n "$missing" ]; then
	$as_root apt-get update -q
	$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $missing
fi

# One date for all that mmdebstrap itself writes, so that one state of the mirror gives one tar.
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-1577836800}"

# Into a file beside it first: an interrupted run leaves no half of a root file system under the name asked for.
part=$out.part.$$
trap 'rm -f "$part"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
mmdebstrap --mode="$mode" --variant=minbase --format=tar --include="$packages" \
	--aptopt='APT::Install-Recommends "false"' \
	--dpkgopt='path-exclude=/usr/share/man/*' \
	--dpkgopt='path-exclude=/usr/share/doc/*' \
	--dpkgopt='path-include=/usr/share/doc/*/copyright' \
	--dpkgopt='path-exclude=/usr/share/info/*' \
	--dpkgopt='path-exclude=/usr/share/locale/*' \
	--customize-hook='echo sandbox > "$1/etc/hostname"' \
	--customize-hook='echo "127.0.0.1 localhost sandbox" > "$1/etc/hosts"' \
	--customize-hook='rm -rf "$1"/var/cache/debconf/*-old "$1"/var/log/*.log "$1"/var/log/apt' \
	"$suite" "$part" ${MIRROR:+"$MIRROR"}
mv "$part" "$out"
trap - EXIT
echo "$out: $(($(stat -c %s "$out") >> 20)) MiB"
