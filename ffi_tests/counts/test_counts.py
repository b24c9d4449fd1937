"""Instructions and cache lines per element of the x86 kernels, and per tensor of a call of many small tensors.

callgrind counts both, so the figures do not depend on the machine's load. They must not exceed counts.txt by more than
5 %. After a change that is worth more instructions, or that saves some:

    SPILLWAY_BLESS=1 make py T=ffi_tests/counts

valgrind has no AVX-512, so the guard covers AVX2 and scalar."""

import os
import pathlib
import re
import subprocess

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TABLE = HERE / "counts.txt"
LIBRARY = os.environ.setdefault(
    "SPILLWAY_LIBRARY", str(pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target") / "release" / "libspillway.so")
)
ROOM = 1.05
KERNELS = "avx2", "scalar"
ELEMENTS, TENSORS, SMALL = 4096, 100, 32
HEADER = """# Instructions and cache lines of a step: per element for one tensor, per tensor for a call of small tensors.
# The cache of the model has 32 KiB; the tensors are larger, so each array is read from behind it.
# kernel case instructions lines
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("counts")
    abi = re.search(r"#define SPW_ABI_VERSION (\d+)", (ROOT / "include/spillway/base.h").read_text())[1]
    for name in ("libspillway.so", f"libspillway.so.{abi}"):
        (folder / name).symlink_to(LIBRARY)
    subprocess.run(
        [
            "cc",
            "-std=c11",
            "-D_POSIX_C_SOURCE=200809L",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            str(HERE / "steps.c"),
            f"-I{ROOT / 'include'}",
            f"-L{folder}",
            f"-Wl,-rpath,{folder}",
            "-lspillway",
            "-o",
            str(folder / "steps"),
        ],
        check=True,
    )
    return folder / "steps"


def totals(program, kernel, case, elements, tensors):
    """Instructions, and lines that the first cache lacked, of one call."""
    result = program.with_name("callgrind.out")
    subprocess.run(
        [
            "valgrind",
            "--tool=callgrind",
            "--collect-atstart=no",
            "--cache-sim=yes",
            "--D1=32768,8,64",
            "--LL=8388608,16,64",
            f"--callgrind-out-file={result}",
            str(program),
            case,
            str(elements),
            str(tensors),
        ],
        env={**os.environ, "SPILLWAY_KERNEL": kernel, "SPILLWAY_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    text = result.read_text()
    names = re.search(r"^events: (.*)$", text, re.M).group(1).split()
    counts = dict(zip(names, map(int, re.search(r"^totals: (.*)$", text, re.M).group(1).split())))
    return counts["Ir"], counts["D1mr"] + counts["D1mw"]


def measured(program, kernel):
    """Rows of the table. The difference of two sizes leaves out what a call costs whatever its size."""
    rows = {}
    for case in ("f32", "fused", "undo"):
        one, two = (totals(program, kernel, case, factor * ELEMENTS, 1) for factor in (1, 2))
        rows[kernel, case] = [(b - a) / ELEMENTS for a, b in zip(one, two)]
    one, two = (totals(program, kernel, "f32", SMALL, factor * TENSORS) for factor in (1, 2))
    rows[kernel, f"tensors-of-{SMALL}"] = [(b - a) / TENSORS for a, b in zip(one, two)]
    return rows


def table():
    lines = [line.split() for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    return {(kernel, case): [float(instructions), float(lines)] for kernel, case, instructions, lines in lines}


def excess(rows, limits):
    """What exceeds its limit, as text."""
    names = "instructions", "cache lines"
    return [
        f"{' '.join(key)}: {found:.3f} {name}, the table has {limit:.3f}"
        for key, values in rows.items()
        for name, found, limit in zip(names, values, limits[key])
        if found > limit * ROOM
    ]


def test_no_kernel_and_no_call_needs_more_than_the_table_says(program):
    if " avx2 " not in pathlib.Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    rows = {key: values for kernel in KERNELS for key, values in measured(program, kernel).items()}
    if os.environ.get("SPILLWAY_BLESS"):
        TABLE.write_text(
            HEADER + "".join(f"{kernel} {case} {instructions:.3f} {lines:.3f}\n" for (kernel, case), (instructions, lines) in rows.items())
        )
    assert set(rows) == set(table())
    assert not excess(rows, table())


def test_a_second_pass_over_the_memory_would_be_seen():
    limits = table()
    assert not excess(limits, limits)
    for key, values in limits.items():
        for index, name in enumerate(("instructions", "cache lines")):
            more = {key: [value * (1.2 if at == index else 1) for at, value in enumerate(values)]}
            assert [name in line and key[1] in line for line in excess(more, limits)] == [True]
