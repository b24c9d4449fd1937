#!/bin/sh
# Builds the release of both architectures into dist/: one wheel and one archive each, made by package.sh.
#
#   packaging/dist.sh [DIST]      default: dist/ of the repository
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
dist=${1:-$root/dist}
target=${CARGO_TARGET_DIR:-$root/target}/dist

settings=$("$root/packaging/arm_env.sh" --export) || exit $?
cd "$root"
mkdir -p "$dist"
rm -f "$dist"/spillway-*
cargo build --release -p spillway -p spillway-preload --features spillway/s3 --target-dir "$target"
packaging/package.sh x86_64 "$target/release/libspillway.so" "$dist"
(eval "$settings" &&
    cargo build --release -p spillway -p spillway-preload --features spillway/s3 --target-dir "$target")
packaging/package.sh aarch64 "$target/aarch64-unknown-linux-gnu/release/libspillway.so" "$dist"
(cd "$dist" && sha256sum spillway-* | tee SHA256SUMS)
