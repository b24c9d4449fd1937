#!/bin/sh
# Runs the measurements under Python, compared with torch and DeepSpeed. Arguments go to `python -m spillway.bench`.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
exports=$("$root/packaging/python_env.sh" --export)
eval "$exports"
export SPILLWAY_LIBRARY="${CARGO_TARGET_DIR:-$root/target}/release/libspillway.so"
export PYTHONPATH="$root/packaging/python"
exec "$SPILLWAY_PYTHON" -m spillway.bench "$@"
