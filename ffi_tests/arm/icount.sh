#!/bin/sh
# Counts under qemu the instructions per element of Adam on each Arm kernel. They must not exceed the committed table.
#
# run.sh builds the program and calls this script. SPILLWAY_BLESS=1 rewrites the table. Counts are exact and the same on
# every run; they are valid for the compilers that the table names.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
settings=$("$root/packaging/arm_env.sh" --export)
eval "$settings"
work=${CARGO_TARGET_DIR:-$root/target}/arm
table=$root/ffi_tests/arm/icount.txt
# Vectors of 128 bits, as on Neoverse V2.
export QEMU_CPU=max,sve-default-vector-length=16

main() {
    count_all >"$work/icount.txt"
    if [ -n "${SPILLWAY_BLESS:-}" ]; then
        cp "$work/icount.txt" "$table"
    fi
    cat "$work/icount.txt"
    compare
    limit 'f32 f32 f32 none decoupled step' sve 5.2
    limit 'f32 f32 bf16 bf16 decoupled step' sve_bf16 6.1
    limit 'f32 f32 f32 none decoupled step' neon 4.5
}

count_all() {
    echo "# Instructions per element, vectors of 128 bits."
    echo "# $(aarch64-linux-gnu-gcc --version | head -n 1); $("$RUSTC" --version)"
    echo "# param state grad copy decay work sve_bf16 sve neon"
    while read -r case; do
        types=${case% *} what=${case##* }
        echo "$types $what $(figure sve_bf16) $(figure sve) $(figure neon)"
    done <<END
f32 f32 f32 none none step
f32 f32 f32 none l2 step
f32 f32 f32 none decoupled step
f32 f32 f32 none decoupled squares
f32 f32 f32 f16 decoupled step
f32 f32 f32 bf16 decoupled step
f32 f32 f16 none decoupled step
f32 f32 f16 f16 decoupled step
f32 f32 f16 bf16 decoupled step
f32 f32 bf16 none decoupled step
f32 f32 bf16 f16 decoupled step
f32 f32 bf16 bf16 decoupled step
f32 f32 bf16 bf16 decoupled squares
f16 f32 f16 none decoupled step
f16 f16 f16 none decoupled step
bf16 f32 bf16 none decoupled step
bf16 bf16 bf16 none decoupled step
f32 f32 f32 none decoupled record
f32 f32 bf16 bf16 decoupled record
bf16 bf16 bf16 none decoupled record
f32 f32 f32 none decoupled undo
f32 f32 bf16 bf16 decoupled undo
f32 f32 bf16 bf16 decoupled redo
END
}

# Instructions per element of $types and $what on kernel $1. The difference between two lengths removes the cost of the
# call; for an undo or a redo, the cost of the record before it is subtracted.
figure() {
    others=0
    case $what in *do) others=$(($(executed "$1" "$types record" 12288) - $(executed "$1" "$types record" 4096))) ;; esac
    both=$(($(executed "$1" "$types $what" 12288) - $(executed "$1" "$types $what" 4096)))
    awk "BEGIN { printf \"%.3f\", ($both - $others) / 8192 }"
}

executed() {
    case $1 in
        neon) word=neon ;;
        *) word=spillway_adam_$1 ;;
    esac
    # shellcheck disable=SC2086 # the case is words
    SPILLWAY_KERNEL=$1 qemu-aarch64 -plugin "$work/icount.so,in=$word,out=$work/count" "$work/one_step" $2 "$3" \
        >"$work/name"
    [ "$(cat "$work/name")" = "$1" ]
    cut -d' ' -f1 "$work/count"
}

compare() {
    awk '/^#/ { next }
        { key = $1 " " $2 " " $3 " " $4 " " $5 " " $6 }
        FNR == NR { for (i = 7; i <= 9; i++) limit[key, i] = $i; next }
        { for (i = 7; i <= 9; i++) if (!((key, i) in limit) || $i > limit[key, i]) {
            print "more than the table allows: " key ": " $i " > " limit[key, i]; bad = 1 } }
        END { exit bad }' "$table" "$work/icount.txt"
}

# limit CASE KERNEL MOST
limit() {
    column=$(echo "sve_bf16 sve neon" | tr ' ' '\n' | grep -nx "$2" | cut -d: -f1)
    found=$(sed -n "s/^$1 //p" "$work/icount.txt" | cut -d' ' -f"$column")
    awk "BEGIN { exit !($found <= $3) }" || { echo "$2, $1: $found is over the limit $3"; exit 1; }
}

main
