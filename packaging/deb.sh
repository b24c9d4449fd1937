#!/bin/sh
# Makes two Debian packages: `spillway` with the library, the preload library and the tool, and `libspillway-dev` with
# headers, static library, pkg-config and CMake files.
#
#   packaging/deb.sh ARCHITECTURE GLIBC DIST LIBRARY PRELOAD [TOOL]     ARCHITECTURE: x86_64 or aarch64
#
# GLIBC is the glibc version that the files require.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
machine=$1
glibc=$2
dist=$3
shift 3
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/Cargo.toml" | head -n 1)
summary=$(sed -n 's/^description = "\(.*\)"$/\1/p' "$root/Cargo.toml" | head -n 1)
case $machine in
    x86_64) architecture=amd64 ;;
    aarch64) architecture=arm64 ;;
    *) echo "deb: no architecture is called $machine" >&2; exit 2 ;;
esac
libdir=lib/$machine-linux-gnu

main() {
    stage=$(mktemp -d)
    trap 'rm -rf "$stage"' EXIT
    runtime=$stage/spillway development=$stage/libspillway-dev
    LIBDIR=$libdir DESTDIR=$development "$root/packaging/install.sh" /usr "$@"
    move libspillway.so."$version" libspillway.so.[0-9] libspillway_preload.so
    [ ! -d "$development/usr/bin" ] || mv "$development/usr/bin" "$runtime/usr/bin"
    mkdir -p "$runtime/DEBIAN" "$development/DEBIAN"
    echo 'activate-noawait ldconfig' >"$runtime/DEBIAN/triggers"
    pack spillway "$runtime" "libc6 (>= $glibc)" libs "$summary"
    pack libspillway-dev "$development" "spillway (= $version), libc6-dev" libdevel "$summary (development files)"
}

# Moves files of the folder of libraries to the runtime package.
move() {
    mkdir -p "$runtime/usr/$libdir"
    for name; do
        for file in "$development/usr/$libdir"/$name; do
            mv "$file" "$runtime/usr/$libdir/"
        done
    done
}

# pack NAME FOLDER DEPENDS SECTION SUMMARY
pack() {
    install -d "$2/usr/share/doc/$1"
    install -m 644 "$root/LICENSE" "$2/usr/share/doc/$1/copyright"
    cat >"$2/DEBIAN/control" <<CONTROL
Package: $1
Version: $version
Architecture: $architecture
Maintainer: Spillway developers <spillway@localhost>
Installed-Size: $(du -sk "$2/usr" | cut -f1)
Depends: $3
Section: $4
Priority: optional
Description: $5
CONTROL
    chmod -R u=rwX,go=rX "$2"
    dpkg-deb --root-owner-group -Zxz --build "$2" "$dist/$1_${version}_$architecture.deb" >/dev/null
}

main "$@"
