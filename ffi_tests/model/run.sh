#!/bin/sh
# The model for so many seconds: run.sh [SECONDS [more arguments of python -m model]]. The library is that of SPILLWAY_LIBRARY,
# or of target/release.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
seconds=${1:-3600}
[ $# -eq 0 ] || shift
export PYTHONPATH="$root/packaging/python:$root/ffi_tests" PYTHONDONTWRITEBYTECODE=1
export SPILLWAY_LIBRARY="${SPILLWAY_LIBRARY:-${CARGO_TARGET_DIR:-$root/target}/release/libspillway.so}"
exec "${SPILLWAY_PYTHON:-python3}" -m model --seconds "$seconds" --totals "$@"
