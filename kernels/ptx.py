#!/usr/bin/env python3
"""Compiles the GPU kernels to the PTX that is committed beside them.

    kernels/ptx.py            writes cast.ptx, adam.ptx and narrow.ptx
    kernels/ptx.py --check    exits with 1 if they differ from what the compiler makes of the sources, with 77 if
                              the compiler cannot be loaded

The compiler is NVRTC 12.0 from PyPI (its licence forbids redistribution), kept in SPILLWAY_CACHE. It writes PTX 8.0 for
compute capability 7.0, which drivers from 525 accept; the same sources give the same bytes.
"""

import ctypes
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

KERNELS = Path(__file__).resolve().parent
#: The sources of each module, in their order.
MODULES = {
    "cast": ["spw_gpu.cuh", "cast.cu"],
    "adam": ["spw_gpu.cuh", "spw_adam.cuh", "adam.cu"],
    "narrow": ["spw_gpu.cuh", "spw_adam.cuh", "narrow.cu"],
}
WHEEL = "nvidia-cuda-nvrtc-cu12==12.0.140"
LIBRARY = "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"
# No contraction: the kernels write every fma explicitly.
OPTIONS = [b"--gpu-architecture=compute_70", b"--std=c++17", b"--fmad=false"]
NO_COMPILER = 77


def main():
    try:
        nvrtc = ctypes.CDLL(str(compiler()))
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"cannot load NVRTC, the compiler of the GPU kernels: {error}; the first run downloads it from PyPI")
        return NO_COMPILER
    stale = []
    for name, files in MODULES.items():
        target = KERNELS / f"{name}.ptx"
        text = compile_module(nvrtc, files)
        if "--check" not in sys.argv[1:]:
            target.write_text(text)
        elif target.read_text() != text:
            stale.append(target.name)
    if stale:
        print(
            f"{', '.join(stale)} in kernels/ differ from what the compiler makes of their sources; run kernels/ptx.py, which "
            "writes them, and commit the result"
        )
    return 1 if stale else 0


def compiler():
    """The compiler's library, fetched once."""
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "spillway"
    cache = Path(os.environ.get("SPILLWAY_CACHE", home)) / WHEEL.replace("==", "-")
    library = cache / LIBRARY
    if not library.exists():
        part = cache.with_suffix(f".{os.getpid()}")
        part.mkdir(parents=True, exist_ok=True)
        python = home / "venv/bin/python"
        pip = [str(python) if python.exists() else sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        fetch = ["download", "--no-deps", "--only-binary", ":all:", "--dest", str(part), WHEEL]
        subprocess.run(pip + fetch, check=True, stdout=sys.stderr)
        for wheel in part.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(part)
            wheel.unlink()
        if not library.exists():
            os.rename(part, cache)
    return library


def compile_module(nvrtc, files):
    source = b"".join((KERNELS / name).read_bytes() for name in files)
    program = ctypes.c_void_p()
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, files[-1].encode(), 0, None, None))
    options = (ctypes.c_char_p * len(OPTIONS))(*OPTIONS)
    if nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options):
        sys.exit(read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program))
    ptx = read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    # Comments, empty lines, and constants of the compiler that nothing uses.
    dropped = ("//", ".global .align 8")
    lines = [line.strip() for line in ptx.splitlines()]
    lines = [line for line in lines if line and not line.startswith(dropped)]
    digest = hashlib.sha256(source).hexdigest()
    head = f"// Made by kernels/ptx.py with {WHEEL} of {', '.join(files)}\n// sha256 {digest}\n"
    return head + "\n".join(lines) + "\n"


def read(size_of, text_of, program):
    size = ctypes.c_size_t()
    check(size_of(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    check(text_of(program, text))
    return text.value.decode()


def check(result):
    if result:
        sys.exit(f"NVRTC, the compiler of the GPU kernels, failed with its error {result}")


if __name__ == "__main__":
    sys.exit(main())
