"""No kernel has a masked load of a constant.

If all lanes of a masked load are off and its page is not mapped yet, the processor handles the load in microcode, and the page stays
unmapped: a step that writes bf16 copies then took 30 times as long. The compiler makes such loads of masked moves whose source is
a constant."""

import os
import pathlib
import platform
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIBRARY = os.environ.setdefault(
    "SPILLWAY_LIBRARY", str(pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target") / "release" / "libspillway.so")
)
MASKED_LOAD = re.compile(r"\(%rip\).*\{%k[1-7]\}|\bvp?maskmov\w* .*\(%rip\)")


def masked_loads(code):
    return [line for line in code if MASKED_LOAD.search(line)]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="masked loads that need microcode are of x86-64 processors")
def test_no_kernel_has_a_masked_load_of_a_constant():
    with subprocess.Popen(["objdump", "-d", "--no-show-raw-insn", LIBRARY], stdout=subprocess.PIPE, text=True) as objdump:
        seen = 0

        def lines():
            nonlocal seen
            for line in objdump.stdout:
                seen += "{%k" in line
                yield line

        found = masked_loads(lines())
    assert objdump.returncode == 0 and seen > 100, "the library has AVX-512 kernels with masks"
    assert not found, found[:5]


@pytest.mark.parametrize(
    "line",
    [
        "7e7c8c: vmovdqu16 -0x797576(%rip),%ymm0{%k1}  # 50720",
        "1: vbroadcastss 0x10(%rip),%zmm1{%k2}",
        "2: vmaskmovps 0x20(%rip),%ymm1,%ymm2",
    ],
)
def test_the_check_finds_masked_loads(line):
    assert masked_loads([line]) == [line]


@pytest.mark.parametrize("line", ["3: vpmovdw %zmm0,%ymm1{%k1}", "4: vmovaps 0x10(%rip),%zmm3  # 50740", "5: vmovups (%rax),%zmm1{%k1}{z}"])
def test_the_check_passes_other_instructions(line):
    assert not masked_loads([line])
