#!/bin/sh
# The Python tests: the package alone, and under DeepSpeed and torch; two at a time, for most of their time is the start of
# processes that import both. Arguments go to pytest.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root"
# With object stores, which their tests need; nothing else depends on the feature.
cargo build --quiet --release --lib --package spillway --package fakecuda --features spillway/s3
exports=$(packaging/python_env.sh --export)
eval "$exports"
exec "$SPILLWAY_PYTHON" -m pytest -q -p no:cacheprovider -n 2 --dist worksteal packaging/python/tests ffi_tests/deepspeed ffi_tests/model "$@"
