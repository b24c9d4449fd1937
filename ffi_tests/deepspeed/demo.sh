#!/bin/sh
# Trains a small GPT under unmodified DeepSpeed with Spillway's ops, and checks that Spillway served them. The first
# runs use ZeRO stages 2 and 3 with states in CPU memory. Then stage 3 runs with states, gradients and parameters in
# files. Then it runs with states on a tier of two paths, and is killed and restarted. At last a GPT runs in a pipeline of
# two processes, without DeepSpeed.
#
#   STEPS=150      steps per run; the run with files has a larger model and at most 20
#   SECONDS=60     stop a run after this time
#   NVME=DIRECTORY where the files go, about 260 MB; default: the target directory
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
    for run in 2 3 nvme; do
        with_spillway "$run" "$steps"
        [ "${COMPARE:-0}" = 0 ] || with_deepspeed "$run"
    done
    speculation
    tier
    pipelined
    echo "demo: ok"
}

# Sub-groups step during backward. The run forces some gradients to be clipped and some to be infinite. A second run
# with the same data waits for the norm.
speculation() {
    echo "SuperOffload on Spillway: every 5th gradient 1000 times as large, every 7th infinite"
    for mode in super serial; do
        SPILLWAY_DEEPSPEED=1 TORCH_EXTENSIONS_DIR=$work/extensions \
            "$python" "$here/superoffload.py" --mode "$mode" --spikes --clip 2.5 --steps 24 --json "$work/$mode-gpt.json"
    done
    [ "$(field gpt super sha256)" = "$(field gpt serial sha256)" ] || fail "speculation changed the final weights"
    echo "  final weights equal, to the bit, to those of the run that waits for the norm"
}

# The same run in host memory and on two directories, the first of which holds two thirds of the state. The second run
# is killed with SIGKILL after step 9, and restarted.
tier() {
    echo "ZeRO-3 with its optimizer states on a tier of two paths, each step committed"
    rm -rf "$work/tier"
    mkdir -p "$work/tier/nvme" "$work/tier/pfs"
    tiered host
    set -- --paths "$work/tier/nvme" "$work/tier/pfs" \
        --block '{"ratio": [2, 1], "resume": true, "cache_bytes": 20000000, "job": "demo"}'
    tiered killed "$@" --progress >"$work/tier/steps" 2>&1 &
    until grep -qx "step 9" "$work/tier/steps" 2>/dev/null; do
        kill -0 $! 2>/dev/null || fail "the run on the tier ended: $(tail -n 3 "$work/tier/steps")"
        sleep 0.05
    done
    kill -9 "$(cat "$work/tier/pid")"
    wait $! || echo "  killed with SIGKILL after step 9"
    tiered again "$@"
    [ "$(field gpt again sha256)" = "$(field gpt host sha256)" ] || fail "the run that was killed has other weights"
    echo "  went on at step $(field gpt again began_at); final weights equal, to the bit, to the run in host memory"
    rm -rf "$work/tier"
}

# Two processes with forward and backward passes of a stage in different ones, and one of them killed. DeepSpeed is not used.
pipelined() {
    echo "SysX's decoupled pipeline schedule"
    env -u SPILLWAY_DEEPSPEED "$python" "$here/pipelined.py" --json "$work/pipelined.json"
}

# NAME ARGUMENTS...
tiered() {
    name=$1
    shift
    SPILLWAY_DEEPSPEED=1 TORCH_EXTENSIONS_DIR=$work/extensions sh -c 'echo $$ >"$0"; exec "$@"' "$work/tier/pid" \
        "$python" "$here/tiered.py" --dim 256 --layers 3 --sub_group 400000 --steps 16 --json "$work/$name-gpt.json" "$@"
}

with_spillway() {
    rm -rf "$work/extensions"
    mkdir -p "$work/extensions"
    export SPILLWAY_DEEPSPEED=1 TORCH_EXTENSIONS_DIR="$work/extensions"
    train "$1" "$2" --seconds "$limit" --json "$work/spillway-$1.json"
    if [ -n "$(ls -A "$work/extensions")" ]; then
        fail "DeepSpeed compiled something: $(ls "$work/extensions")"
    fi
    echo "  DeepSpeed compiled nothing: its extension folder is empty"
}

with_deepspeed() {
    command -v c++ >/dev/null || fail "COMPARE=1 needs a C++ compiler; run: apt-get install g++"
    [ "$1" != nvme ] || [ -e /usr/include/libaio.h ] || fail "COMPARE=1 needs libaio; run: apt-get install libaio-dev"
    unset SPILLWAY_DEEPSPEED
    export TORCH_EXTENSIONS_DIR="$compiled_cache"
    train "$1" "$(field "$1" spillway steps)" --native --json "$work/native-$1.json"
    ours=$(field "$1" spillway sha256)
    theirs=$(field "$1" native sha256)
    [ "$ours" = "$theirs" ] || fail "run $1: the final weights differ: $ours, compiled op $theirs"
    echo "  final weights equal to those of DeepSpeed's compiled op"
}

# RUN STEPS ARGUMENTS...
train() {
    run=$1 count=$2
    shift 2
    if [ "$run" != nvme ]; then
        "$python" "$here/train.py" --stage "$run" --steps "$count" "$@"
        return
    fi
    if [ "$count" -gt 20 ]; then count=20; fi
    files=${NVME:-$work}/spillway-files
    rm -rf "$files"
    mkdir -p "$files"
    # Matrices above 1 MiB, the size from which DeepSpeed moves them to files.
    "$python" "$here/train.py" --nvme "$files" --dim 768 --layers 2 --steps "$count" "$@"
    rm -rf "$files"
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
