#!/bin/sh
# Builds the release of both architectures into dist/: a wheel and an archive each, as package.sh makes them.
#
#   packaging/dist.sh [DIST]      DIST is dist/ of the repository unless named
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
dist=${1:-$root/dist}
target=${CARGO_TARGET_DIR:-$root/target}/dist

settings=$("$root/packaging/arm_env.sh" --export) || exit $?
cd "$root"
mkdir -p "$dist"
rm -f "$dist"/spillway-*
cargo build --release --lib --no-default-features -p spillway -p spillway-preload --target-dir "$target"
packaging/package.sh x86_64 "$target/release/libspillway.so" "$dist"
(eval "$settings" &&
    cargo build --release --lib --no-default-features -p spillway -p spillway-preload --target-dir "$target")
packaging/package.sh aarch64 "$target/aarch64-unknown-linux-gnu/release/libspillway.so" "$dist"
(cd "$dist" && sha256sum spillway-* | tee SHA256SUMS)
