#!/usr/bin/env python3
"""Speed of a tier's path on another file system against fio on the same mount, in alternation.

    ffi_tests/pfs/run.sh --bench NAME [MEBIBYTES [ROUNDS]]     a name in ffi_tests/pfs/filesystems.py

Both read and write with O_DIRECT without a sync, fio in blocks of 1 MiB at its fastest of four settings. The ratios (tier over fio)
are medians over the rounds."""

import pathlib
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "packaging" / "python"), str(ROOT / "ffi_tests" / "pfs")]

import numpy as np
from filesystems import FILE_SYSTEMS, WORK

import spillway
from spillway.bench._io_contenders import Ceiling

EXTENTS = 8


def main(name, mebibytes="128", rounds="5"):
    if reason := FILE_SYSTEMS[name].reason():
        sys.exit(f"ignored: {name}: {reason}")
    folder, size = WORK / "bench", int(mebibytes) << 20
    folder.mkdir()
    mount = FILE_SYSTEMS[name](folder).mounts[0]
    file, place = mount / "fio", mount / "tier"
    place.mkdir()
    file.write_bytes(bytes(size))
    fio = Ceiling(file)
    arrays = [np.random.default_rng(number).integers(0, 255, size // EXTENTS, np.uint8) for number in range(EXTENTS)]
    ways = {"write": ("put", fio.write), "read": ("get", fio.read)}
    seconds = {way: ([], []) for way in ways}
    with spillway.Tier([place], job="bench", host="bench") as tier:
        extents = [tier.define(f"extent-{number}", [array.nbytes]) for number, array in enumerate(arrays)]

        def transfer(call):
            began = time.monotonic()
            for ticket in [getattr(tier, call)(extent, [array]) for extent, array in zip(extents, arrays)]:
                tier.wait(ticket)
            return time.monotonic() - began

        # The first commits allocate the space that later ones use in turn.
        for step in range(3):
            transfer("put")
            tier.commit(step)
        for step in range(int(rounds)):
            for way, (call, reference) in ways.items():
                seconds[way][0].append(reference())
                seconds[way][1].append(transfer(call))
            tier.commit(3 + step)
    print(f"{name}: {mebibytes} MiB, {rounds} rounds in alternation, fio with {fio.setting}")
    for way, (reference, own) in seconds.items():
        ratios = [theirs / ours for theirs, ours in zip(reference, own)]
        speeds = [size / statistics.median(each) / 1e6 for each in (reference, own)]
        print(
            f"{way:5} fio {speeds[0]:6.0f} MB/s, tier {speeds[1]:6.0f} MB/s, ratio {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
