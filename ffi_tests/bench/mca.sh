#!/bin/sh
# Static throughput of the Arm kernels on Neoverse V2 (Grace): llvm-mca analyses the loops that a step executes.
#
#   ffi_tests/bench/mca.sh            prints the table and fails above 2.4 cycles per element for AdamW in f32
#
# ffi_tests/arm/run.sh builds the programs. A step under qemu finds its hottest loop, objdump disassembles the
# loop, and llvm-mca simulates the loop on its model of the core. The model has no caches, so the result is the
# limit of the core alone.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
settings=$("$root/packaging/arm_env.sh" --export)
tools=$("$root/packaging/arm_env.sh")
eval "$settings"
work=${CARGO_TARGET_DIR:-$root/target}/arm
export QEMU_CPU=max,sve-default-vector-length=16
rounds=400

main() {
    "$tools/bin/llvm-mca" --version | sed -n 's/.*LLVM version/LLVM/p' | sed 's/^/# /'
    echo "# kernel: param state grad copy decay work | instructions, micro-operations, cycles per element; floor"
    while IFS=: read -r kernel case; do
        row "$kernel" "$case"
    done <<END
sve_bf16:f32 f32 f32 none none step
sve_bf16:f32 f32 f32 none l2 step
sve_bf16:f32 f32 f32 none decoupled step
sve_bf16:f32 f32 bf16 bf16 decoupled step
sve_bf16:f32 f32 f16 f16 decoupled step
sve_bf16:f32 f32 bf16 bf16 decoupled squares
sve:f32 f32 bf16 bf16 decoupled step
neon:f32 f32 f32 none decoupled step
neon:f32 f32 bf16 bf16 decoupled step
END
}

row() {
    SPILLWAY_KERNEL=$1
    export SPILLWAY_KERNEL
    case $1 in
        sve*) word=spillway_adam_$1 lanes=16 ;;
        neon) word=neon lanes=16 ;;
    esac
    # shellcheck disable=SC2086 # the case is words
    qemu-aarch64 -plugin "$work/icount.so,in=$word,out=$work/count" "$work/one_step" $2 12288 >"$work/name"
    read -r _ start end <"$work/count"
    loop "$start" "$end" >"$work/loop.s"
    "$tools/bin/llvm-mca" -mtriple=aarch64-linux-gnu -mcpu=neoverse-v2 -iterations=$rounds "$work/loop.s" \
        >"$work/mca.txt" 2>"$work/mca.err" || { cat "$work/mca.err"; exit 1; }
    awk -v name="$1: $2" -v elements=$((rounds * lanes)) -v lanes=$lanes '
        /^Instructions:/ { instructions = $2 } /^Total Cycles:/ { cycles = $3 } /^Total uOps:/ { uops = $3 }
        /^Block RThroughput:/ { floor = $3 }
        END {
            printf "%-46s %6.2f %6.2f %6.2f %6.2f\n", name, instructions / elements, uops / elements,
                cycles / elements, floor / lanes
            exit name ~ /^sve.*: f32 f32 f32 none decoupled step/ && cycles / elements > 2.4
        }' "$work/mca.txt" || { echo "over 2.4 cycles per element"; exit 1; }
}

# Prints the loop as assembly; the target of every branch becomes the next instruction.
loop() {
    aarch64-linux-gnu-objdump -d --no-show-raw-insn --start-address="$1" --stop-address="$2" "$work/one_step" |
        sed -n 's/^ *[0-9a-f]*:\t//p' |
        sed 's/\/\/.*//; s/<[^>]*>//; s/^\(b[.a-z]*\)\t[0-9a-f]* *$/\1\t./; s/^\([ct]bn*z\)\t\([a-z0-9]*\), [0-9a-f]* *$/\1\t\2, ./
             s/^\(tbn*z\)\t\([a-z0-9]*\), \(#[0-9a-z]*\), [0-9a-f]* *$/\1\t\2, \3, ./'
}

main
