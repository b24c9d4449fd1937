#!/bin/sh
# Runs one Python test file that needs numpy alone, without torch and DeepSpeed and their gigabytes.
#
#   packaging/python_light.sh FILE [OPTION...]     options go to pytest
#
# It uses the library that SPILLWAY_LIBRARY names, else the one in target/release, which it builds only if it is missing.
# A file that needs torch is skipped, or says that torch is missing.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root"
: "${SPILLWAY_LIBRARY:=${CARGO_TARGET_DIR:-target}/release/libspillway.so}"
if [ ! -f "$SPILLWAY_LIBRARY" ]; then
    cargo build --release --package spillway --package spillway-cli --package spillway-preload --package fakecuda --features spillway/s3
fi
SPILLWAY_LIBRARY=$(realpath "$SPILLWAY_LIBRARY")
export SPILLWAY_LIBRARY
python=$(packaging/tool_env.sh light packaging/python/requirements-light.txt 'numpy and pytest')/python
exec "$python" -m pytest -q -p no:cacheprovider "$@"
