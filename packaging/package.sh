#!/bin/sh
# Makes the two packages of one architecture from a built library: a wheel, and an archive (libraries, header, tool,
# pkg-config, CMake) to unpack over /. The preload library and the tool must lie beside LIBRARY; with
# SPILLWAY_WHEEL_WITHOUT_TOOL=1 the tool may be missing.
#
#   packaging/package.sh ARCHITECTURE LIBRARY DIST      ARCHITECTURE: x86_64 or aarch64
#
# The wheel's tag names the glibc version that the library requires. PYTHON names an interpreter with pip.
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
    tool=$(dirname "$library")/spillway
    [ -f "$tool" ] || [ "${SPILLWAY_WHEEL_WITHOUT_TOOL:-0}" != 1 ] || tool=
    DESTDIR=$stage "$root/packaging/install.sh" /usr/local "$library" "${library%.so}_preload.so" $tool
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
