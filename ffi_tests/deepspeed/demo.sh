#!/bin/sh
# Trains small GPTs under DeepSpeed with Spillway's ops, and prints a table of what the runs prove; see demo.py.
#
#   STEPS=40       steps of the first two runs
#   NVME=DIRECTORY where the files of the run on files go, about 160 MB; default: the target directory
#   COMPARE=       1: repeat the runs on DeepSpeed's own compiled ops and compare the final weights, with files too (needs
#                  libaio-dev); 0: no such run; default: one such run, if there is a C++ compiler
#   SPILLWAY_PREBUILT_LIB   package this library instead of building it
#
# Packages and the library are set up side by side. Where pip is told of an index with CPU builds of torch
# (PIP_EXTRA_INDEX_URL), it loads a tenth of the bytes.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
root=$(CDPATH='' cd -- "$here/../.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
work=$target/demo
began=$(date +%s)

main() {
    mkdir -p "$work"
    trap 'stop' EXIT
    trap 'exit 130' INT TERM
    build=
    if [ -z "${SPILLWAY_PREBUILT_LIB:-}" ]; then
        build_library >"$work/build.log" 2>&1 &
        build=$!
    fi
    exports=$("$root/packaging/python_env.sh" --demo)
    eval "$exports"
    compile= compare=0
    if [ "${COMPARE:-auto}" != 0 ] && command -v c++ >/dev/null; then
        nice "$SPILLWAY_PYTHON" "$here/demo.py" --compile >"$work/compile.log" 2>&1 &
        compile=$!
    fi
    if [ -n "$build" ]; then
        say "building the library (cargo; output in $work/build.log)"
        wait "$build" || fail "the build failed: $(tail -n 5 "$work/build.log")"
        build=
        export SPILLWAY_PREBUILT_LIB="$target/release/libspillway.so"
    fi
    python=$("$root/packaging/python_overlay.sh" "$work/python" "$SPILLWAY_PYTHON")
    if [ -n "$compile" ]; then
        say "waiting for DeepSpeed's own op, to compare with (a C++ compiler; output in $work/compile.log)"
        wait "$compile" || fail "DeepSpeed's op was not compiled (COMPARE=0 leaves it out): $(tail -n 5 "$work/compile.log")"
        compile=
        compare=${COMPARE:-auto}
    fi
    say "set up in $(($(date +%s) - began)) s"
    trap - EXIT INT TERM
    exec "$python" "$here/demo.py" --work "$work" --steps "${STEPS:-40}" --files "${NVME:-$work}" --compare "$compare"
}

# The features of `pip install`: no object stores.
build_library() {
    cd "$root"
    exec cargo build --release --locked --package spillway --package spillway-cli --package spillway-preload --target-dir "$target"
}

# Ends what runs in the background.
stop() {
    for process in $build $compile; do kill "$process" 2>/dev/null || true; done
}

say() {
    echo "demo: $*"
}

fail() {
    echo "demo: $*" >&2
    exit 1
}

main
