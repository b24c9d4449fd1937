#!/bin/sh
# Runs the tests that need an NVIDIA GPU: first checks of the driver and the kernels, then the measurements, which are
# written to ffi_tests/bench/records/gpu_*.json. Without a GPU the script reports that and exits 77.
#
#   ffi_tests/gpu/run.sh [--minutes N] [STEP...]     runs the steps, by default all, the most important first
#   ffi_tests/gpu/run.sh pack ARCHIVE [WHEELS]       packs what travels to a machine with a GPU: programs, package, library,
#                                                    and a folder of wheels, which are installed there without a network
#
# Steps: check bits uses iteration kernels waiting adam transfer update train interleave-example sanitize
# --minutes: no step begins after this time, and the one that runs is ended then.
#
#   SPILLWAY_LIBRARY=FILE   the release library of another machine (target/release/libspillway.so), if this
#                           one has no cargo
#   SPILLWAY_PYTHON=FILE    a Python with torch for CUDA; default: python3
#   BENCH=DIRECTORY         folder of the records; default: ffi_tests/bench/records
#   LOGS=DIRECTORY          folder of the output of every step; default: target/gpu
#   QUICK=1                 small sizes, to see that every step works
#
# After a failed step the others still run; the exit status is 1 if any failed. If a step lacks a tool (torch,
# DeepSpeed, compute-sanitizer, a C compiler), its line says "skipped" and names the tool.
set -u

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
root=$(CDPATH='' cd -- "$here/../.." && pwd)
logs=${LOGS:-$root/target/gpu}
python=${SPILLWAY_PYTHON:-python3}
failed=0

main() {
    deadline=
    if [ "${1:-}" = --minutes ]; then
        deadline=$(($(date +%s) + 60 * $2))
        shift 2
    fi
    if [ "${1:-}" = pack ]; then
        find_library
        shift
        pack "$@"
        exit
    fi
    mkdir -p "$logs"
    find_library
    install_wheels
    export LOGS="$logs" BENCH="${BENCH:-$root/ffi_tests/bench/records}" QUICK="${QUICK:-}"
    export PYTHONPATH="$root/packaging/python:$here${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
    # The update uses seven streams, and torch uses more. With the default of 8 queues they would wait for each other.
    export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-32}"
    # Ignores rates of earlier runs, so that they are measured again.
    export SPILLWAY_PROFILE="$logs/profile"
    find_gpu
    [ $# -gt 0 ] || set -- check bits uses iteration kernels waiting adam transfer update train interleave-example sanitize
    for step in "$@"; do
        case $step in
        check) run check "$python" "$here/check.py" ;;
        bits) run bits "$python" "$here/offload_bits.py" ;;
        uses) run uses "$python" "$here/offload_uses.py" ;;
        iteration) run iteration "$python" "$here/iteration.py" ;;
        kernels) run kernels "$python" "$here/bench_tensors.py" ;;
        waiting) run waiting "$python" "$here/waiting.py" ;;
        sanitize) sanitize ;;
        transfer) run transfer "$python" "$here/bench_transfer.py" ;;
        adam) run adam "$python" "$here/bench_adam.py" ;;
        update) run update "$python" "$here/bench_update.py" ;;
        interleave-example) example ;;
        train) train ;;
        *) echo "gpu: unknown step $step" >&2; exit 2 ;;
        esac
    done
    exit $failed
}

# pack ARCHIVE [WHEELS]
pack() {
    [ $# -ge 1 ] || fatal "pack needs the name of an archive"
    staged=$(mktemp -d)
    trap 'rm -rf "$staged"' EXIT
    mkdir -p "$staged/spillway/lib"
    (cd "$root" && tar cf - --exclude __pycache__ Cargo.toml include examples_c packaging/python/spillway ffi_tests/gpu ffi_tests/deepspeed) |
        tar xf - -C "$staged/spillway" || fatal "the programs cannot be packed"
    cp "$SPILLWAY_LIBRARY" "$staged/spillway/lib/" || fatal "$SPILLWAY_LIBRARY cannot be packed"
    [ $# -lt 2 ] || cp -r "$2" "$staged/spillway/wheels" || fatal "$2 cannot be packed"
    tar czf "$1" -C "$staged" spillway || fatal "$1 cannot be written"
    echo "gpu: $1: $(du -k "$1" | cut -f 1) KiB; unpack it there, and run spillway/ffi_tests/gpu/run.sh --minutes 12"
}

# Installs the wheels of an archive into a folder beside the logs. No network is asked.
install_wheels() {
    [ -d "$root/wheels" ] || return 0
    "$python" -m pip install --quiet --no-index --no-deps --no-build-isolation --find-links "$root/wheels" \
        --target "$logs/packages" "$root"/wheels/* >"$logs/wheels.log" 2>&1 || echo "gpu: some wheels were not installed: $logs/wheels.log"
    export PYTHONPATH="$logs/packages${PYTHONPATH:+:$PYTHONPATH}"
}

find_library() {
    [ -n "${SPILLWAY_LIBRARY:-}" ] || [ ! -e "$root/lib/libspillway.so" ] || SPILLWAY_LIBRARY=$root/lib/libspillway.so
    if [ -z "${SPILLWAY_LIBRARY:-}" ]; then
        command -v cargo >/dev/null || fatal "there is no cargo; name a release library in SPILLWAY_LIBRARY"
        (cd "$root" && cargo build --quiet --release --lib) || fatal "the library does not build"
        SPILLWAY_LIBRARY=${CARGO_TARGET_DIR:-$root/target}/release/libspillway.so
    fi
    [ -e "$SPILLWAY_LIBRARY" ] || fatal "$SPILLWAY_LIBRARY does not exist"
    export SPILLWAY_LIBRARY
}

# Returns 77 if there is no GPU; any other fault of the driver is a failure.
find_gpu() {
    # On the CPU the programs show that they run; the test driver is the GPU of those that need one.
    if [ "${DEV:-}" = cpu ]; then
        export SPILLWAY_CUDA_LIBRARY="${SPILLWAY_CUDA_LIBRARY:-$(dirname "$SPILLWAY_LIBRARY")/libfakecuda.so}"
    fi
    "$python" - <<'END'
import sys
import spillway
try:
    count = spillway.gpu_count()
except spillway.NoDeviceError as error:
    print(f"gpu: skipped: {error}")
    sys.exit(77)
print(f"gpu: {count} GPU(s), the first is {spillway.Gpu(0).info()}")
END
    status=$?
    [ $status = 0 ] || exit $status
}

# run NAME COMMAND...: prints one line and writes the output to a log; status 77 means skipped.
run() {
    name=$1
    shift
    start=$(date +%s)
    if [ -n "$deadline" ]; then
        left=$((deadline - start))
        if [ "$left" -le 0 ]; then
            echo "gpu: $name: not run: the time is over"
            return 0
        fi
        set -- timeout "$left" "$@"
    fi
    "$@" >"$logs/$name.log" 2>&1
    status=$?
    if [ -n "$deadline" ] && [ $status = 124 ]; then
        echo "gpu: $name: ended, because the time is over"
        return 0
    fi
    took=$(($(date +%s) - start))
    case $status in
    0) echo "gpu: $name: ok ($took s)" ;;
    77) echo "gpu: $name: skipped: $(tail -n 1 "$logs/$name.log")" ;;
    *)
        echo "gpu: $name: FAILED with $status ($took s); the end of $logs/$name.log:"
        tail -n 25 "$logs/$name.log"
        failed=1
        ;;
    esac
    return 0
}

# Runs the kernels under the memory checker and the race checker. The small check launches every kernel.
sanitize() {
    if ! command -v compute-sanitizer >/dev/null; then
        echo "gpu: sanitize: skipped: there is no compute-sanitizer"
        return
    fi
    for tool in memcheck racecheck; do
        QUICK=1 run "sanitize-$tool" compute-sanitizer --tool "$tool" --error-exitcode 1 "$python" "$here/check.py" --kernels
    done
}

# Runs the C example, which compares bits itself. With threads instead of the GPU it runs on any machine.
example() {
    if ! command -v cc >/dev/null; then
        echo "gpu: interleave-example: skipped: there is no C compiler"
        return
    fi
    folder=$(dirname "$SPILLWAY_LIBRARY")
    run interleave-build cc -O1 -I "$root/include" "$root/examples_c/interleave.c" -o "$logs/interleave" \
        -L "$folder" -lspillway -lm "-Wl,-rpath,$folder"
    run interleave-example "$logs/interleave" "$logs/interleave-trace.json"
}

# ZeRO-3 with offloaded states on the GPU, with Spillway's op and then with DeepSpeed's own; the losses must be equal.
train() {
    if ! "$python" -c 'import deepspeed' >"$logs/train.log" 2>&1; then
        echo "gpu: train: skipped: this Python has no DeepSpeed: $(tail -n 1 "$logs/train.log")"
        return
    fi
    size="--stage 3 --steps 60 --dim 1024 --layers 8"
    [ -z "$QUICK" ] || size="--stage 3 --steps 20 --dim 128 --layers 2"
    # Equal bits require the same number of OpenMP threads.
    export DS_ACCELERATOR=cuda OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
    # shellcheck disable=SC2086
    SPILLWAY_DEEPSPEED=1 run train-spillway "$python" "$root/ffi_tests/deepspeed/train.py" $size --json "$logs/spillway.json"
    # shellcheck disable=SC2086
    run train-deepspeed "$python" "$root/ffi_tests/deepspeed/train.py" $size --native --json "$logs/deepspeed.json"
    run train "$python" "$here/compare_training.py" "$logs/spillway.json" "$logs/deepspeed.json"
}

fatal() {
    echo "gpu: $*" >&2
    exit 1
}

main "$@"
