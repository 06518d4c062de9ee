#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# quickstart.sh: from a fresh Debian 12 to a machine that is baked, used, forked and reset, by echo and cat alone.
#
# Installs what is missing with apt-get, builds into build/ (a second run finds it there, kernel included), and works
# in a temporary folder that is gone at the end, however it ends. Works with and without /dev/kvm; without it
# everything is slower.
set -eu
if [ $# -gt 0 ]; then
	sed -n '3,7s/^# \{0,1\}//p' "$0"
	[ "$*" = --help ] || [ "$*" = -h ]
	exit
fi
cd "$(dirname "$0")/.."

# --- what it takes ---

as_root=
[ "$(id -u)" = 0 ] || as_root=sudo
missing=
for package in meson ninja-build pkg-config gcc libc6-dev libfuse3-dev fuse3 libkmod-dev libjansson-dev libsqlite3-dev \
	libext2fs-dev comerr-dev libarchive-dev libssl-dev libzstd-dev liblzma-dev e2fsprogs kmod busybox-static \
	qemu-system-x86; do
	dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
[ -e /dev/fuse ] || echo "quickstart: there is no /dev/fuse; if the mount fails, try: modprobe fuse" >&2
if [ -n "$missing" ]; then
	echo "Installing:$missing"
	$as_root apt-get update -qq
	$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi
export PATH="$PATH:/usr/sbin:/sbin"

# --- a place to work, and out of it again ---

work=$(mktemp -d "${TMPDIR:-/tmp}/vmenv-quickstart.XXXXXX")
mount=$work/mnt
is_mounted() { grep -q " $mount fuse" /proc/self/mounts; }
clean_up() {
	status=$?
	trap - EXIT INT TERM HUP
	trap '' PIPE # nobody may be reading any more
	if is_mounted; then
		[ $status = 0 ] || tail -n 1 "$mount/error" >&2 || :
		fusermount3 -u "$mount" 2>/dev/null || umount "$mount" || umount -l "$mount" || :
	fi
	# The server ends with its mount, and the machines with it; their files may only go after them. Nothing is
	# removed through a mount.
	tries=20
	while is_mounted || ! rm -rf --one-file-system "$work" 2>/dev/null; do
		tries=$((tries - 1))
		[ $tries -gt 0 ] || { echo "quickstart: cannot remove $work" >&2; break; }
		sleep 0.5
	done
	exit $status
}
trap clean_up EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 141' PIPE
trap 'exit 143' TERM

# --- telling and timing ---

table=$work/table
now() { date +%s%3N; }
# step NAME COMMAND: shows the command, runs it, notes what it took.
step() {
	printf '\n$ %s\n' "$2"
	began=$(now)
	eval "$2"
	took=$(($(now) - began))
	printf '%-44s %8d ms\n' "$1" "$took" >>"$table"
}
show() {
	printf '\n$ %s\n' "$1"
	eval "$1"
}

# --- build, mount, bake ---

step 'build' '[ -e build/build.ninja ] || meson setup build >"$work/build.log" || { cat "$work/build.log"; exit 1; }
  ninja -C build >"$work/build.log" || { tail -n 40 "$work/build.log"; exit 1; }'
vmenvfs=$(find "$PWD/build" -type f -name vmenvfs -perm -u+x | head -n 1)
PATH=$(dirname "$vmenvfs"):$PATH
mkdir "$mount"
step 'mount (without /dev/kvm: boots a host)' 'vmenvfs --state "$work/state" "$mount"'
cd "$mount"

# A root file system on the spot: one static binary by many names.
root=$work/root
mkdir -p "$root/bin" "$root/etc" "$root/tmp" "$root/work"
cp "$(command -v busybox)" "$root/bin/busybox"
for applet in $(busybox --list); do
	[ -e "$root/bin/$applet" ] || ln -s busybox "$root/bin/$applet"
done
cat >"$root/bin/count" <<'SCRIPT'
#!/bin/sh
n=0 seen=
while sleep 0.05; do
	read -r name </work/name
	case "$seen " in *" $name "*) ;; *) seen="$seen $name" ;; esac
	n=$((n + 1))
	echo "tick $n, seen:$seen" >/work/tick.new
	mv /work/tick.new /work/tick
done
SCRIPT
chmod +x "$root/bin/count"
echo 'root:x:0:0:root:/root:/bin/sh' >"$root/etc/passwd"
echo 'root:x:0:' >"$root/etc/group"
tar -C "$root" --owner=0 --group=0 --numeric-owner -cf "$work/rootfs.tar" .

show 'mkdir templates/base'
config='{"memory_mb": 128, "disk_mb": 128, "setup": ["echo made by setup > /work/notes"]}'
show "echo '$config' > templates/base/config"
step 'upload of the root file system' 'cat "$work/rootfs.tar" > templates/base/rootfs'
step 'bake: boot once, set up, freeze' 'echo bake > templates/base/ctl'
show 'cat templates/base/state'

# --- create, run ---

step 'create a machine' "echo 'create a from=base' > ctl"
step 'its first command' "echo 'uname -sr; cat /work/notes' > sandboxes/a/exec"
show 'cat sandboxes/a/stdout sandboxes/a/exit_code'
step 'another command' "echo 'echo written in a >> /work/notes' > sandboxes/a/exec"

# --- fork in mid-run ---

echo
echo '# In the background, count: at each tick it reads a name and remembers, in its memory, those it has seen.'
show "echo 'echo a > /work/name; count > /dev/null 2>&1 & until [ -e /work/tick ]; do sleep 0.1; done' > sandboxes/a/exec"
step 'fork it 4 ways from one instant' "echo 'fork way count=4' > sandboxes/a/ctl"
step 'a command in each of the 5' 'for s in a way-0 way-1 way-2 way-3; do
  echo "echo $s > /work/name; echo $s was here >> /work/notes; sleep 0.3" > sandboxes/$s/exec & done; wait'
echo
echo '# Each has its own memory, disk, and random numbers from there on:'
show 'for s in a way-0 way-1 way-2 way-3; do
  echo "tail -n 1 /work/notes; cat /work/tick; cat /proc/sys/kernel/random/uuid" > sandboxes/$s/exec
  tr "\n" "\t" < sandboxes/$s/stdout; echo; done'
step 'the 4 at an end' 'for n in 0 1 2 3; do rmdir sandboxes/way-$n; done'

# --- reset ---

step 'reset' 'echo reset > sandboxes/a/ctl'
step 'the first command after it' "echo 'cat /work/notes' > sandboxes/a/exec"
show 'cat sandboxes/a/stdout'
step 'kill' 'rmdir sandboxes/a'

cd "$work/.."
printf '\nWhat each step took:\n\n'
cat "$table"
