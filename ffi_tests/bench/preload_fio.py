#!/usr/bin/env python3
"""Runs fio through libaio, alternately with and without the preload, on one file: requests per
second and processor time.

    preload_fio.py LIBRARY DIRECTORY [ROUNDS]

Processor time is that of the whole fio process, including its start, per request. The ratios (preload over libaio)
are medians over the rounds."""

import json
import os
import statistics
import subprocess
import sys

JOBS = [("randread", "4k", 1), ("randread", "4k", 32), ("randwrite", "4k", 32), ("read", "1m", 32), ("write", "1m", 32)]
SECONDS = 2
SIZE = "1g"


def main():
    library, directory = sys.argv[1:3]
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    file = os.path.join(directory, f"preload-fio-{os.getpid()}")
    fio(file, "write", "1m", 32, {}, ["--end_fsync=1"])
    print(f"{rounds} rounds in alternation; requests per second, processor microseconds per request")
    print("job        block depth   libaio    cpu us   preload    cpu us   speed     cpu")
    try:
        for way, block, depth in JOBS:
            plain, served = [], []
            for _ in range(rounds):
                plain.append(fio(file, way, block, depth, {}, timed()))
                served.append(fio(file, way, block, depth, {"LD_PRELOAD": library}, timed()))
            print_row(way, block, depth, plain, served)
    finally:
        os.unlink(file)


def timed():
    return ["--time_based", f"--runtime={SECONDS}"]


def fio(file, way, block, depth, environment, more):
    """(requests per second, processor seconds per request)"""
    command = [
        "fio",
        "--name=job",
        f"--filename={file}",
        "--ioengine=libaio",
        "--direct=1",
        f"--rw={way}",
        f"--bs={block}",
        f"--iodepth={depth}",
        f"--size={SIZE}",
        "--output-format=json",
        "--invalidate=0",
        *more,
    ]
    before = os.times()
    output = subprocess.run(command, env={**os.environ, **environment}, check=True, capture_output=True).stdout
    after = os.times()
    job = json.loads(output[output.index(b"{") :])["jobs"][0]
    found = job["read" if "read" in way else "write"]
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return found["iops"], spent / found["total_ios"]


def print_row(way, block, depth, plain, served):
    middle = statistics.median
    rates = [middle(rate for rate, _ in passes) for passes in (plain, served)]
    costs = [middle(cost for _, cost in passes) * 1e6 for passes in (plain, served)]
    speed, cost = (middle(b[at] / a[at] for a, b in zip(plain, served)) for at in (0, 1))
    print(
        f"{way:<10} {block:>5} {depth:>5} {rates[0]:>8.0f} {costs[0]:>9.2f} {rates[1]:>9.0f} {costs[1]:>9.2f} {speed:>7.2f} {cost:>7.2f}",
        flush=True,
    )


main()
