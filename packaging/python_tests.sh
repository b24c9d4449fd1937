#!/bin/sh
# The Python tests: the package alone, then under DeepSpeed and torch. Arguments go to pytest.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root"
cargo build --quiet --release --lib --package spillway --package fakecuda
exports=$(packaging/python_env.sh --export)
eval "$exports"
exec "$SPILLWAY_PYTHON" -m pytest -q -p no:cacheprovider packaging/python/tests ffi_tests/deepspeed "$@"
