"""How fast `spillway tier export` and `import` are, against the bandwidth with which fio reads the same files, and their memory.

    python ffi_tests/bench/tier_export.py TOOL [--rounds N] [--mi MI_PARAMETERS] [--ratio A:B...] [--to DIRECTORY] [--export-only]
        DIRECTORY...

TOOL is the command line tool, built for release. A tier of 12 MiB for each MI_PARAMETERS is made over the directories. In each round
fio reads the data files of all paths at once, with direct I/O, and the tool exports the tier and imports it into a new one. The byte
model is the longest of fio's times: no export can be shorter. Limit the speed of the directories from outside. Exports go to another
directory."""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time

import numpy as np

import spillway


def run(*command):
    """Seconds and peak memory in MB of a command."""
    begun = time.perf_counter()
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, command
    return time.perf_counter() - begun, usage.ru_maxrss / 1024


def fio_seconds(files):
    jobs = [
        f"--name=path{number}" if word == "name" else f"--filename={file}" for number, file in enumerate(files) for word in ("name", "file")
    ]
    common = ["--readonly", "--rw=read", "--bs=1016k", "--iodepth=16", "--ioengine=io_uring", "--direct=1", "--output-format=json"]
    made = subprocess.run(["fio", *common, *jobs], capture_output=True, text=True, check=True)
    return max(job["read"]["runtime"] for job in json.loads(made.stdout)["jobs"]) / 1e3


def make(directories, count, ratio):
    elements = [1 << 20] * count
    values = np.random.default_rng(7).random(1 << 20, np.float32)
    with spillway.Tier(directories, job="tier-export", host="here", mode="create") as tier:
        with spillway.Swap(tier, elements, ratio=ratio) as swap:
            swap.fill([(values, values, values)] * count)
            swap.commit(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tool")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mi", type=int, default=64)
    parser.add_argument("--ratio", help="shares of the paths, such as 400:240")
    parser.add_argument("--export-only", action="store_true", help="no imports, which need the space twice")
    parser.add_argument("--to", help="where exports go")
    parser.add_argument("directories", nargs="+")
    given = parser.parse_args()
    make(given.directories, given.mi, [float(part) for part in given.ratio.split(":")] if given.ratio else None)
    files = [pathlib.Path(path) / "tier-export/here/rank-0/data" for path in given.directories]
    size = sum(file.stat().st_size for file in files) / 1e9
    rows = []
    with tempfile.TemporaryDirectory(dir=given.to) as folder:
        for _ in range(given.rounds):
            out = pathlib.Path(folder) / "out.safetensors"
            model = fio_seconds(files)
            export, memory = run(given.tool, "tier", "export", out, *given.directories)
            verify, _ = run(given.tool, "tier", "verify", *given.directories)
            rows.append((model / export, memory))
            said = f"fio {size / model:.3f} GB/s, export {size / export:.3f} GB/s ({model / export:.2f} of fio), {memory:.0f} MB; "
            if not given.export_only:
                load, memory = run(given.tool, "tier", "import", out, "--create", "--job", "tier-import", *given.directories)
                run(given.tool, "tier", "rm", "--job", "tier-import", "--yes", *given.directories)
                said += f"import {size / load:.3f} GB/s, {memory:.0f} MB; "
            out.unlink()
            print(f"{said}verify {size / verify:.3f} GB/s", flush=True)
    ratios, memories = zip(*rows, strict=True)
    print(f"{size:.2f} GB, median of {given.rounds}: export at {statistics.median(ratios):.2f} of fio, at most {max(memories):.0f} MB")
    subprocess.run([given.tool, "tier", "rm", "--yes", *given.directories], check=True)


if __name__ == "__main__":
    main()
