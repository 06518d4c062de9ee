#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs on the KVM host: mounts vmenvfs, bakes the two templates that the benchmark wants, and runs it.
# inside.sh WORK ROOTFS_TAR [QEMU KERNEL PEER_INITRD]
set -eu
work=$1 rootfs=$2
shift 2
mount=$work/mount
mkdir -p "$mount" "$work/state" "$work/peer"
vmenvfs ${VMENVFS_OPTIONS:-} --state "$work/state" --accel=kvm "$mount"
trap 'umount "$mount"' EXIT
for memory in 256 1024; do
	t=$mount/templates/m$memory
	mkdir "$t"
	echo "{\"memory_mb\": $memory, \"disk_mb\": 256, \"ttl\": 0}" > "$t/config"
	cat "$rootfs" > "$t/rootfs"
	echo "baking a template with $memory MB of memory"
	echo bake > "$t/ctl" || { cat "$t/log"; exit 1; }
done
if [ $# -eq 3 ]; then
	set -- "$@" "$work/state/templates"/*/disk.img
	qemu=$1 kernel=$2 initrd=$3
	cp "$4" "$work/peer/disk"
	vmenv-bench "$mount" m256 m1024 "$qemu" "$kernel" "$initrd" "$work/peer/disk" "$work/peer"
else
	vmenv-bench "$mount" m256 m1024
fi
