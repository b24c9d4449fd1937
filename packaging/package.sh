#!/bin/sh
# Makes the packages of one architecture from a built library: a wheel, an archive to unpack over / (libraries, header,
# tool, pkg-config, CMake), and two Debian packages of the same files. The preload library and the tool must lie beside
# LIBRARY; with SPILLWAY_WHEEL_WITHOUT_TOOL=1 the tool may be missing.
#
#   packaging/package.sh ARCHITECTURE LIBRARY DIST      ARCHITECTURE: x86_64 or aarch64
#
# The wheel's tag names the glibc version that the binaries require, and auditwheel must find the same version. PYTHON
# names an interpreter with pip and auditwheel.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
architecture=$1
library=$(realpath "$2")
dist=$3
python=${PYTHON:-python3}
preload=${library%.so}_preload.so
tool=$(dirname "$library")/spillway
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
    [ -f "$tool" ] || [ "${SPILLWAY_WHEEL_WITHOUT_TOOL:-0}" != 1 ] || tool=
    glibc=$(for file in "$library" "$preload" $tool; do "$objdump" -T "$file"; done |
        grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -n 1 | cut -d_ -f2)
    mkdir -p "$dist"
    stage=$(mktemp -d)
    trap 'rm -rf "$stage"' EXIT
    archive
    wheel
    if command -v dpkg-deb >/dev/null; then
        "$root/packaging/deb.sh" "$architecture" "$glibc" "$dist" "$library" "$preload" $tool
    else
        echo "package: no Debian packages, because dpkg-deb is missing" >&2
    fi
}

archive() {
    DESTDIR=$stage/archive "$root/packaging/install.sh" /usr/local "$library" "$preload" $tool
    tar -C "$stage/archive" --owner=0 --group=0 --sort=name -czf "$dist/spillway-$version-linux-$architecture.tar.gz" usr
}

wheel() {
    tag=manylinux_$(echo "$glibc" | tr . _)_$architecture
    _PYTHON_HOST_PLATFORM=$tag SPILLWAY_PREBUILT_LIB=$library \
        "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps -w "$stage/wheel" "$root/packaging/python"
    file=$(ls "$stage"/wheel/*.whl)
    # auditwheel also checks that no library besides those of every system is required. It does not know every version of
    # glibc, and then names the next one.
    case $glibc in
        2.29 | 2.30) known=2_31 ;;
        2.32 | 2.33) known=2_34 ;;
        *) known=$(echo "$glibc" | tr . _) ;;
    esac
    found=$("$python" -m auditwheel show "$file" | tr '\n' ' ')
    case $found in
        *"\"manylinux_${known}_$architecture\""*) ;;
        *) fail "auditwheel disagrees with the tag $tag: $found" ;;
    esac
    mv "$file" "$dist/"
}

fail() {
    echo "package: $*" >&2
    exit 1
}

main
