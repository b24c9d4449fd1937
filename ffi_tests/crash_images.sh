#!/bin/bash
# Simulates power cuts on a real file system. A process steps a tier on an ext4 image, and the script copies the image
# at single moments (reflinks on XFS). It mounts each copy, which replays the journal. The tier must then open with all
# its bytes, at a step that was acknowledged before the copy began or at a later step that had begun by then.
#
#   ffi_tests/crash_images.sh BINARY DIR [IMAGES]     BINARY: tier_kill of ffi_tests/c, built; DIR: scratch; 100 images
#
# Needs root and loop devices; installs mkfs.xfs. Exit 77 where it cannot run.
set -eu

binary=$(realpath "$1") dir=$2 images=${3:-100}
[ "$(id -u)" != 0 ] || "$(dirname "$0")/../packaging/system_packages.sh" xfsprogs
[ "$(id -u)" = 0 ] && command -v mkfs.xfs mkfs.ext4 losetup >/dev/null || { echo "needs root, mkfs.xfs, mkfs.ext4"; exit 77; }
mkdir -p "$dir/xfs" "$dir/live" "$dir/copy"
# The page of an earlier run holds acknowledged steps that this run has not made.
rm -f "$dir/page"
truncate -s 4g "$dir/xfs.img"
mkfs.xfs -qf -m reflink=1 "$dir/xfs.img"
writer=
cleanup() {
    [ -z "$writer" ] || kill -9 "$writer" 2>/dev/null || true
    sleep 0.2
    for mounted in copy live xfs; do
        for _ in 1 2 3 4 5 6 7 8 9 10; do umount "$dir/$mounted" 2>/dev/null && break; sleep 0.1; done
    done
    rm -rf "$dir/xfs.img"
}
trap cleanup EXIT
mount -o loop "$dir/xfs.img" "$dir/xfs"
truncate -s 512m "$dir/xfs/live.img"
mkfs.ext4 -qF "$dir/xfs/live.img"
mount -o loop "$dir/xfs/live.img" "$dir/live"
mkdir "$dir/live/a" "$dir/live/b"

"$binary" write "$dir/page" "$dir/live/a" "$dir/live/b" &
writer=$!
# Reads the page that the writer shares: the step that began, and the step that was acknowledged.
number() { od -An -t u8 -j "$1" -N 8 "$dir/page" | tr -d ' '; }
while [ ! -s "$dir/page" ] || [ "$(number 8)" -lt 3 ]; do sleep 0.05; kill -0 "$writer"; done

checked=0
for ((n = 0; n < images; n++)); do
    acknowledged=$(number 8)
    cp --reflink=always "$dir/xfs/live.img" "$dir/xfs/copy.img"
    begun=$(number 0)
    mount -o loop "$dir/xfs/copy.img" "$dir/copy"
    "$binary" check "$acknowledged" "$begun" "$dir/copy/a" "$dir/copy/b"
    for _ in 1 2 3 4 5 6 7 8 9 10; do umount "$dir/copy" && break; sleep 0.1; done
    rm "$dir/xfs/copy.img"
    kill -0 "$writer"
    checked=$((checked + 1))
done
echo "$checked images, each whole"
