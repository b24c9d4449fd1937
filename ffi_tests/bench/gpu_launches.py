"""Launches, uploads and instructions of Adam on a GPU over few large and many small tensors, on the driver of ffi_tests/fakecuda.

    python ffi_tests/bench/gpu_launches.py FAKE_DRIVER [--kernels ADAM_PTX PTXAS]

FAKE_DRIVER is libfakecuda.so. A row has the counts of the first step, of the second one, and of one with the norm; instructions are
those of PTX, of all threads, per element. A warp steps up to 4096 elements of one tensor. `--kernels` counts registers and warps of a
multiprocessor for sm_90: PTXAS assembles the kernels of ADAM_PTX. Nothing is timed."""

import argparse
import ctypes
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "packaging" / "python" / "tests"))

#: Tensors and elements. Large tensors are fewer than in records/gpu_adam_tensors.json.
SHAPES = [(1, 1 << 20), (8, 1 << 20), (60, 1 << 16), (2000, 4096), (10000, 1000)]
TILE = 4096
COUNTS = ("launches", "uploaded", "instructions")
#: Registers and warps of a multiprocessor, threads of a block of the kernels, and the unit of registers of a thread.
REGISTERS, WARPS, THREADS, UNIT = 65536, 64, 256, 8


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("driver")
    parser.add_argument("--kernels", nargs=2, metavar=("ADAM_PTX", "PTXAS"))
    arguments = parser.parse_args()
    os.environ["SPILLWAY_CUDA_LIBRARY"] = arguments.driver
    lines = [_row(arguments.driver, tensors, elements) for tensors, elements in SHAPES]
    if arguments.kernels:
        lines += _kernels(*arguments.kernels)
    for line in lines:
        print(json.dumps(line), flush=True)


def _row(path, tensors, elements):
    from fake_cuda import FakeDriver

    import spillway

    library, driver = ctypes.CDLL(path), FakeDriver(path, 0)
    gpu, stream, adam = spillway.Gpu(0), driver.stream(), spillway.Adam(lr=1e-3)
    values = np.full(elements, 0.5, np.float32)
    rows = [[driver.device(values) for _ in range(4)] for _ in range(tensors)]

    def counted(**options):
        before = _counts(library)
        gpu.step(adam, rows, stream=stream, **options)
        driver.synchronize(stream)
        return [after - earlier for after, earlier in zip(_counts(library), before)]

    first, second, with_norm = counted(), counted(), counted(return_stats=True)
    gpu.close()
    driver.free(*(array for row in rows for array in row))
    everything = tensors * elements
    return {
        "case": {"tensors": tensors, "elements": elements},
        "figures": {
            "launches": second[0],
            "launches_with_norm": with_norm[0],
            "warps_of_a_launch": tensors * -(-elements // TILE) // second[0],
            "table_bytes": first[1],
            "table_bytes_of_later_steps": second[1],
            "instructions": round(second[2] / everything, 2),
            "instructions_with_norm": round(with_norm[2] / everything, 2),
        },
        "headline": "launches",
        "better": "lower",
    }


def _counts(library):
    counts = []
    for name in COUNTS:
        function = getattr(library, f"fakecuda_{name}")
        function.restype, function.argtypes = ctypes.c_uint64, [ctypes.c_uint32]
        counts.append(function(0))
    return counts


def _kernels(ptx, ptxas):
    with tempfile.TemporaryDirectory() as folder:
        command = [ptxas, "-v", "-arch=sm_90", ptx, "-o", str(pathlib.Path(folder) / "adam.cubin")]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.findall(r"properties for (\w+)\n.*?(\d+) bytes spill stores.*?\n.*?Used (\d+) registers", text)
    rows = []
    for name, spilled, registers in sorted(found):
        each = -(-int(registers) // UNIT) * UNIT * THREADS
        warps = min(REGISTERS // each * THREADS // 32, WARPS)
        figures = {"registers": int(registers), "spilled_bytes": int(spilled), "warps": warps}
        rows.append({"case": {"kernel": name}, "figures": figures})
    return rows


if __name__ == "__main__":
    main()
