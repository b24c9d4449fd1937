#!/bin/bash
# Runs guest.c in a virtual machine with three NUMA nodes: real mbind and move_pages on a Debian kernel under qemu.
#
#   ffi_tests/numa/run.sh [LIBRARY]      LIBRARY: libspillway.so; default: that of target/release
#
# The kernel comes from Debian, unpacked below SPILLWAY_CACHE; nothing of it is installed. Exit 77 where it cannot run.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
root=$(CDPATH='' cd -- "$here/../.." && pwd)
library=$(realpath "${1:-${CARGO_TARGET_DIR:-$root/target}/release/libspillway.so}")
cache=${SPILLWAY_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/spillway}/numa
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cannot() {
    echo "$1"
    exit 77
}

[ "$(uname -m)" = x86_64 ] || cannot "needs x86-64"
[ "$(id -u)" != 0 ] || "$root/packaging/system_packages.sh" qemu-system-x86 cpio
command -v qemu-system-x86_64 cpio apt-get >/dev/null || cannot "needs qemu-system-x86, cpio and apt-get"

# The kernel, once.
if [ -z "$(ls "$cache"/vmlinuz-* 2>/dev/null)" ]; then
    package=$(apt-cache depends linux-image-cloud-amd64 2>/dev/null | sed -n 's/ *Depends: \(linux-image-[^ ]*\)$/\1/p' | head -1)
    [ -n "$package" ] || cannot "needs a Debian package linux-image-cloud-amd64"
    mkdir -p "$cache"
    (cd "$work" && apt-get download -qq "$package" 2>/dev/null && dpkg-deb -x ./*.deb kernel) || cannot "cannot download $package"
    cp "$work"/kernel/boot/vmlinuz-* "$cache/"
fi
kernel=$(ls "$cache"/vmlinuz-* | tail -1)

# The program is the first process; beside it there are the shared libraries and nothing else.
mkdir -p "$work/tree/lib"
gcc -std=c11 -O1 -Wall -Wextra -Werror -I "$root/include" "$here/guest.c" -o "$work/tree/init" "$library" \
    -Wl,-rpath,/lib -Wl,--dynamic-linker=/lib/ld-linux-x86-64.so.2
cp "$library" "$work/tree/lib/$(objdump -p "$library" | sed -n 's/ *SONAME *//p')"
ldd "$library" | sed -n 's|^[^/]*\(/[^ ]*\) (0x.*|\1|p' | sort -u | xargs -I '{}' cp -L '{}' "$work/tree/lib/"
(cd "$work/tree" && find . | cpio -o -H newc --quiet | gzip -1) >"$work/initramfs"

timeout 300 qemu-system-x86_64 -accel tcg,thread=multi -cpu max -machine q35 -nodefaults -no-reboot -display none -serial stdio \
    -smp 4,sockets=2,cores=2 -m 1024 \
    -object memory-backend-ram,id=m0,size=384M -object memory-backend-ram,id=m1,size=384M \
    -object memory-backend-ram,id=m2,size=256M \
    -numa node,nodeid=0,memdev=m0,cpus=0-1 -numa node,nodeid=1,memdev=m1,cpus=2-3 -numa node,nodeid=2,memdev=m2 \
    -numa dist,src=0,dst=1,val=21 -numa dist,src=0,dst=2,val=31 -numa dist,src=1,dst=2,val=14 \
    -kernel "$kernel" -initrd "$work/initramfs" -append "console=ttyS0 quiet panic=-1" </dev/null | tr -d '\r' >"$work/log" || true
if grep -qx passed "$work/log"; then
    echo "three NUMA nodes under $(basename "$kernel"): passed"
else
    tail -n 40 "$work/log"
    exit 1
fi
