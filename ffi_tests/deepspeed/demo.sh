#!/bin/sh
# Trains a small GPT under unmodified DeepSpeed, ZeRO stages 2 and 3, with Spillway's optimizer, and proves it.
#
#   STEPS=150      steps per run
#   SECONDS=60     stop a run after this time
#   COMPARE=1      repeat each run with DeepSpeed's compiled op and compare the final weights (needs a C++ compiler)
#   SPILLWAY_PREBUILT_LIB   package this library instead of building it
set -eu

limit=${SECONDS:-0}
[ "$limit" != 0 ] || limit=60
steps=${STEPS:-150}
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
root=$(CDPATH='' cd -- "$here/../.." && pwd)
work=${CARGO_TARGET_DIR:-$root/target}/demo

main() {
    mkdir -p "$work"
    exports=$("$root/packaging/python_env.sh" --export)
    eval "$exports"
    compiled_cache=$TORCH_EXTENSIONS_DIR
    python=$("$root/packaging/python_overlay.sh" "$work/python")
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(cores)}" DS_ACCELERATOR=cpu
    for stage in 2 3; do
        with_spillway "$stage"
        [ "${COMPARE:-0}" = 0 ] || with_deepspeed "$stage"
    done
    speculation
    echo "demo: ok"
}

# Sub-groups step during backward, with gradients that have to be clipped and gradients that are infinite forced in
# between; then the same run that waits for the norm.
speculation() {
    echo "SuperOffload on Spillway: every 5th gradient 1000 times as large, every 7th infinite"
    for mode in super serial; do
        SPILLWAY_DEEPSPEED=1 TORCH_EXTENSIONS_DIR=$work/extensions \
            "$python" "$here/superoffload.py" --mode "$mode" --spikes --clip 2.5 --steps 24 --json "$work/$mode-gpt.json"
    done
    [ "$(field gpt super sha256)" = "$(field gpt serial sha256)" ] || fail "speculation changed the final weights"
    echo "  final weights equal, to the bit, to those of the run that waits for the norm"
}

with_spillway() {
    rm -rf "$work/extensions"
    mkdir -p "$work/extensions"
    SPILLWAY_DEEPSPEED=1 TORCH_EXTENSIONS_DIR=$work/extensions \
        "$python" "$here/train.py" --stage "$1" --steps "$steps" --seconds "$limit" --json "$work/spillway-$1.json"
    if [ -n "$(ls -A "$work/extensions")" ]; then
        fail "DeepSpeed compiled something: $(ls "$work/extensions")"
    fi
    echo "  DeepSpeed compiled nothing: its extension folder is empty"
}

with_deepspeed() {
    command -v c++ >/dev/null || fail "COMPARE=1 needs a C++ compiler; run: apt-get install g++"
    env -u SPILLWAY_DEEPSPEED TORCH_EXTENSIONS_DIR="$compiled_cache" \
        "$python" "$here/train.py" --native --stage "$1" --steps "$(field "$1" spillway steps)" \
        --json "$work/native-$1.json"
    ours=$(field "$1" spillway sha256)
    theirs=$(field "$1" native sha256)
    [ "$ours" = "$theirs" ] || fail "stage $1: the final weights differ: $ours, compiled op $theirs"
    echo "  stage $1: final weights equal to those of DeepSpeed's compiled op"
}

field() {
    "$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$work/$2-$1.json" "$3"
}

# Two runs are bit-identical only for the same number of OpenMP threads.
cores() {
    count=$(nproc)
    if [ "$count" -gt 8 ]; then count=8; fi
    echo "$count"
}

fail() {
    echo "demo: $*" >&2
    exit 1
}

main
