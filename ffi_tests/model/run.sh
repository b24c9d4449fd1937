#!/bin/sh
# Runs the model for a number of seconds: run.sh [SECONDS [more arguments of python -m model]]. The library is
# SPILLWAY_LIBRARY or the one in target/release.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
seconds=${1:-3600}
[ $# -eq 0 ] || shift
export PYTHONPATH="$root/packaging/python:$root/ffi_tests" PYTHONDONTWRITEBYTECODE=1
export SPILLWAY_LIBRARY="${SPILLWAY_LIBRARY:-${CARGO_TARGET_DIR:-$root/target}/release/libspillway.so}"
exec "${SPILLWAY_PYTHON:-python3}" -m model --seconds "$seconds" --totals "$@"
