#!/bin/sh
# Runs the Python tests: of the package alone, and under DeepSpeed, Megatron and torch.
#
#   packaging/python_tests.sh [OPTION...]               all files, three at a time; options go to pytest
#   packaging/python_tests.sh --only FILE [OPTION...]   one file, in one process
#
# Three processes share two processors: the tests of many processes wait for each other.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root"
# Builds the contents of a wheel, like `make lib`. Cargo builds only crates that changed.
cargo build --quiet --release --package spillway --package spillway-cli --package spillway-preload --package fakecuda --features spillway/s3
exports=$(packaging/python_env.sh --export)
eval "$exports"
# OpenMP's threads spin while they wait by default. With processes of several threads on two processors, most of the time was spinning.
export OMP_WAIT_POLICY=passive
if [ "${1:-}" = --only ]; then
    shift
    exec "$SPILLWAY_PYTHON" -m pytest -q -p no:cacheprovider "$@"
fi
exec "$SPILLWAY_PYTHON" -m pytest -p no:cacheprovider -n 3 --dist worksteal packaging/python/tests ffi_tests/deepspeed ffi_tests/megatron ffi_tests/torch ffi_tests/docs ffi_tests/model ffi_tests/counts ffi_tests/gpu "$@"
