#!/bin/sh
# Makes the two packages of one architecture from a library that is built: an archive (libraries, header, pkg-config,
# CMake) to unpack over /, and a wheel.
#
#   packaging/package.sh ARCHITECTURE LIBRARY DIST      ARCHITECTURE: x86_64 or aarch64
#
# The wheel is tagged with the glibc that the library really needs. PYTHON names an interpreter with pip.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
architecture=$1
library=$2
dist=$3
python=${PYTHON:-python3}
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/Cargo.toml" | head -n 1)

main() {
    case $architecture in
        x86_64) objdump=objdump name=i386:x86-64 ;;
        aarch64) objdump=aarch64-linux-gnu-objdump name=aarch64 ;;
        *) fail "no architecture is called $architecture" ;;
    esac
    "$objdump" -f "$library" | grep -q "architecture: $name" || fail "$library is not for $architecture"
    if [ "$architecture" = aarch64 ] && ! "$objdump" -d "$library" | grep -q bfcvt; then
        fail "$library lacks the SVE kernels"
    fi
    mkdir -p "$dist"
    stage=$(mktemp -d)
    trap 'rm -rf "$stage"' EXIT
    DESTDIR=$stage "$root/packaging/install.sh" /usr/local "$library" "${library%.so}_preload.so"
    tar -C "$stage" --owner=0 --group=0 --sort=name -czf "$dist/spillway-$version-linux-$architecture.tar.gz" usr
    glibc=$("$objdump" -T "$library" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -n 1 | tr . _)
    _PYTHON_HOST_PLATFORM=manylinux_${glibc#GLIBC_}_$architecture SPILLWAY_PREBUILT_LIB=$library \
        "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps -w "$dist" "$root/packaging/python"
}

fail() {
    echo "package: $*" >&2
    exit 1
}

main
