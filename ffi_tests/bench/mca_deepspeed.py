"""Static throughput of DeepSpeed's Adam loops (f32) on Neoverse V2, for comparison with mca.sh. The script
cross-compiles the installed DeepSpeed with each of its Arm paths, and runs llvm-mca over the loops that contain the
square root and the division.

    eval "$(packaging/python_env.sh --export)"; python ffi_tests/bench/mca_deepspeed.py

Needs g++-aarch64-linux-gnu. If a loop branches on a flag, its row counts the instructions of both branches."""

import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile

import deepspeed
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = pathlib.Path(deepspeed.__file__).parent / "ops" / "csrc"
TORCH = pathlib.Path(torch.__file__).parent / "include"
ROUNDS = 400
CONVERSIONS = re.compile(r"\b(fcvtl?|fcvtn|ushll|uxtl|shl|lsl)2?\s+[vdzs]")
BRANCH = re.compile(r"\s+(?:b|b\.?[a-z]{2}|cbn?z|tbn?z)\s.*?(\.L\w+)\s*$")
PATHS = {"SVE": r"fsqrt\s+z\d+\.s", "NEON": r"fsqrt\s+v\d+\.4s"}


def main():
    print(f"# DeepSpeed {deepspeed.__version__}, vectors of 128 bits")
    print("# path: unrolled elements | instructions, micro-operations, cycles per element; floor")
    for path, square_root in PATHS.items():
        for elements, body in sorted(loops(assembly(path), square_root))[-2:]:
            print(f"{path:5} {elements:3} " + figures(body, elements))


def assembly(path):
    with tempfile.NamedTemporaryFile(suffix=".s") as out:
        subprocess.run(
            [
                "aarch64-linux-gnu-g++",
                "-S",
                "-O3",
                "-std=c++20",
                "-fopenmp",
                "-march=armv9-a",
                f"-D__{path}__",
                "-D__DISABLE_CUDA__",
                "-DTORCH_EXTENSION_NAME=cpu_adam",
                "-I",
                SOURCES / "includes",
                "-I",
                TORCH,
                "-I",
                TORCH / "torch/csrc/api/include",
                "-I",
                sysconfig.get_paths()["include"],
                SOURCES / "adam" / "cpu_adam_impl.cpp",
                "-o",
                out.name,
            ],
            check=True,
        )
        return pathlib.Path(out.name).read_text().splitlines()


def loops(lines, square_root):
    """(elements, instructions) of the loops in f32; a loop extends from a label to the branch back to that label."""
    labels = {line[:-1]: number for number, line in enumerate(lines) if re.fullmatch(r"\.L\w+:", line)}
    for number, line in enumerate(lines):
        jump = BRANCH.match(line)
        start = labels.get(jump[1], number) if jump else number
        if not 0 < number - start < 400:
            continue
        body = [text for text in lines[start : number + 1] if re.match(r"\s+[a-z]", text)]
        text = "\n".join(body)
        roots = len(re.findall(square_root, text))
        if roots == len(re.findall(r"\bfdivr?\s+[zv]", text)) > 0 and not CONVERSIONS.search(text) and "ret" not in text:
            yield 4 * roots, body


def figures(body, elements):
    tools = subprocess.run([ROOT / "packaging/arm_env.sh"], check=True, capture_output=True, text=True).stdout.strip()
    # The target of every branch becomes the next instruction.
    code = "\n".join(re.sub(r"\.L\w+", ".", line) for line in body)
    said = subprocess.run(
        [f"{tools}/bin/llvm-mca", "-mtriple=aarch64-linux-gnu", "-mcpu=neoverse-v2", f"-iterations={ROUNDS}"],
        input=code,
        capture_output=True,
        text=True,
    )
    if said.returncode != 0:
        sys.exit(said.stderr)
    total = {
        name: float(re.search(rf"^{name}: +([\d.]+)", said.stdout, re.MULTILINE)[1])
        for name in ("Instructions", "Total uOps", "Total Cycles", "Block RThroughput")
    }
    each = [total[name] / ROUNDS / elements for name in ("Instructions", "Total uOps", "Total Cycles")]
    return " ".join(f"{value:6.2f}" for value in (*each, total["Block RThroughput"] / elements))


main()
