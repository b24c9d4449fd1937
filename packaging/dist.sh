#!/bin/sh
# Builds the release of both architectures into dist/: a wheel each, and an archive (library, header, pkg-config, CMake) to
# unpack over /.
#
#   packaging/dist.sh [DIST]      DIST is dist/ of the repository unless named
#
# Wheels are tagged with the glibc that their library really needs. PYTHON names an interpreter with pip.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
dist=${1:-$root/dist}
target=${CARGO_TARGET_DIR:-$root/target}
python=${PYTHON:-python3}
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/Cargo.toml" | head -n 1)

main() {
    settings=$("$root/packaging/arm_env.sh" --export) || exit $?
    cd "$root"
    mkdir -p "$dist"
    rm -f "$dist/spillway-$version"*
    cargo build --release --lib --no-default-features --target-dir "$target/dist"
    package x86_64 "$target/dist/release" objdump
    (eval "$settings" && cargo build --release --lib --no-default-features --target-dir "$target/dist")
    package aarch64 "$target/dist/aarch64-unknown-linux-gnu/release" aarch64-linux-gnu-objdump
    (cd "$dist" && sha256sum "spillway-$version"* | tee SHA256SUMS)
}

# package ARCHITECTURE FOLDER OBJDUMP
package() {
    library=$2/libspillway.so
    "$3" -f "$library" | grep -q "architecture: $(objdump_name "$1")" || fail "$library is not for $1"
    if [ "$1" = aarch64 ] && ! "$3" -d "$library" | grep -q bfcvt; then
        fail "$library lacks the SVE kernels"
    fi
    stage=$target/dist/stage
    rm -rf "$stage"
    DESTDIR=$stage "$root/packaging/install.sh" /usr/local "$library"
    tar -C "$stage" --owner=0 --group=0 --sort=name -czf "$dist/spillway-$version-linux-$1.tar.gz" usr
    glibc=$("$3" -T "$library" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -n 1 | tr . _)
    _PYTHON_HOST_PLATFORM=manylinux_${glibc#GLIBC_}_$1 SPILLWAY_PREBUILT_LIB=$library \
        "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps -w "$dist" "$root/packaging/python"
}

objdump_name() {
    if [ "$1" = x86_64 ]; then echo i386:x86-64; else echo aarch64; fi
}

fail() {
    echo "dist: $*" >&2
    exit 1
}

main
