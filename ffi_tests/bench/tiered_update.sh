#!/bin/bash
# Compares the tiered update with fio's bandwidth on the same directories, in alternation.
#
#   ffi_tests/bench/tiered_update.sh ROUNDS SECONDS BINARY "ARGUMENTS" DIR...
#
# BINARY is tiered_update.c, built; ARGUMENTS are its own without the directories. fio reads and writes the same number
# of bytes with direct I/O, on all directories at once. Its requests have 1016 KiB, the largest size that the disk does
# not split. The sum of its rates is the bandwidth of the byte model.
set -eu

rounds=$1 seconds=$2 binary=$3 arguments=$4
shift 4
jobs=()
for dir; do
    jobs+=(--name="${dir//\//_}" --directory="$dir" --filename=fio.tmp)
done
for ((round = 0; round < rounds; round++)); do
    fio --ioengine=io_uring --iodepth=16 --direct=1 --bs=1016k --rw=rw --size=192M --time_based --runtime="$seconds" \
        --output-format=json "${jobs[@]}" 2>/dev/null |
        python3 -c 'import json, sys
jobs = json.load(sys.stdin)["jobs"]
parts = [(job["read"]["bw_bytes"] / 1e9, job["write"]["bw_bytes"] / 1e9) for job in jobs]
print("fio  " + ", ".join(f"{r:.3f} read {w:.3f} written" for r, w in parts), f"= {sum(map(sum, parts)):.3f} GB/s")'
    for dir; do rm -f "$dir/fio.tmp"; done
    # shellcheck disable=SC2086
    "$binary" $arguments "$@"
done
