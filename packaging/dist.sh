#!/bin/sh
# Builds a release into dist/: for each architecture a wheel, an archive and two Debian packages (package.sh), and one
# source distribution for Python.
#
#   packaging/dist.sh [DIST [ARCHITECTURE...]]      default: dist/ of the repository, x86_64 and aarch64
#
# zig links everything against glibc 2.28 of 2018, so that the files run on systems as old as Debian 10 and RHEL 8. It
# only links: the kernels in C for Arm are compiled by the compiler that the tests use.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
glibc=2.28
dist=${1:-$root/dist}
[ $# = 0 ] || shift
[ $# -gt 0 ] || set -- x86_64 aarch64
target=${CARGO_TARGET_DIR:-$root/target}/dist

main() {
    tools=$("$root/packaging/dist_env.sh")
    PATH=$tools:$PATH
    cd "$root"
    mkdir -p "$dist"
    rm -f "$dist"/spillway[-_]* "$dist"/libspillway-dev_* "$dist/SHA256SUMS"
    for architecture; do
        if [ "$architecture" = aarch64 ]; then
            settings=$(packaging/arm_env.sh --export) || exit $?
            (eval "$settings" && unset CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER &&
                CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc && export CC_aarch64_unknown_linux_gnu && build)
        else
            build
        fi
        PYTHON=$tools/python packaging/package.sh "$architecture" \
            "$target/$architecture-unknown-linux-gnu/release/libspillway.so" "$dist"
    done
    "$tools/python" -m build --sdist --no-isolation --outdir "$dist" packaging/python >/dev/null
    cd "$dist"
    sha256sum ./*spillway* | sed 's|\./||' | tee SHA256SUMS
}

build() {
    cargo-zigbuild zigbuild --release --target "$architecture-unknown-linux-gnu.$glibc" --package spillway \
        --package spillway-cli --package spillway-preload --features spillway/s3 --target-dir "$target"
}

main "$@"
