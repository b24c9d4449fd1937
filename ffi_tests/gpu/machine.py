"""Shared by the programs of this folder: the GPU, sizes, alternating timing, and records that describe the machine.

DEV=cpu runs the programs on a machine without a GPU, to find their mistakes before time on a GPU is spent: those of torch's optimizers on
the CPU, and those of spillway.Gpu on the test driver, which SPILLWAY_CUDA_LIBRARY names."""

import datetime
import hashlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

QUICK = bool(os.environ.get("QUICK"))
DEVICE = os.environ.get("DEV", "cuda")
ROUNDS = 3 if QUICK else 7


def torch_on_gpu():
    """Returns torch. Exits with status 77 if torch is missing or sees no GPU."""
    if DEVICE == "cpu":
        import on_driver

        return on_driver.Torch()
    try:
        import torch
    except ImportError as error:
        print(f"cannot run: torch cannot be imported: {error}")
        sys.exit(77)
    if not torch.cuda.is_available():
        print("cannot run: torch finds no GPU")
        sys.exit(77)
    torch.cuda.init()
    torch.empty(1, device="cuda")
    return torch


def torch_on_device():
    """Returns torch for programs whose models and optimizers run on DEVICE, the CPU included."""
    # cuBLAS reads it at its first call; without it, matrix products on several streams differ in bits.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if DEVICE != "cpu":
        return torch_on_gpu()
    import torch

    return torch


def wait(torch):
    """Waits until the device has finished its work."""
    if DEVICE != "cpu":
        torch.cuda.synchronize()


def digest(tensors):
    """A short digest of the bits of tensors."""
    import torch

    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def size(large, small, tiny=None):
    """A number of elements: the small number for a quick run, and the tiny one, if there is one, for a run on the CPU."""
    if DEVICE == "cpu" and tiny is not None:
        return tiny
    return small if QUICK else large


def seconds(torch, work):
    """Wall-clock seconds until the GPU has finished `work`."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def alternating(contenders, measure, rounds=ROUNDS):
    """Median seconds of each contender by name, after one uncounted round."""
    taken = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, work in contenders.items():
            value = measure(work)
            if turn:
                taken[name].append(value)
    return {name: statistics.median(values) for name, values in taken.items()}


def available_bytes():
    """Host memory that is available."""
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def report(name, title, gpu, lines, command):
    """Writes the record ffi_tests/bench/records/gpu_NAME.json and prints it. A line is text, which becomes a note, or a
    row. `gpu`: the Gpu; None: the run was on the CPU."""
    info = None if gpu is None else gpu.info()
    gpu_name = "none" if info is None else f"{info.name} (compute capability {info.capability / 10}, driver {_driver()})"
    record = {
        "format": 1,
        "title": title,
        "command": command,
        "machine": {"processor": _cpu(), "cores": os.cpu_count(), "gpu": gpu_name, "virtual": _hypervisor()},
        "date": str(datetime.date.today()),
        "notes": [f"Times are medians in alternation{' (QUICK=1)' if QUICK else ''}.", *(line for line in lines if isinstance(line, str))],
        "rows": [line for line in lines if not isinstance(line, str)],
    }
    folder = pathlib.Path(os.environ.get("BENCH") or ".")
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=2) + "\n"
    (folder / f"gpu_{name}.json").write_text(text)
    print(text)


def ratio(name, value, wanted):
    """A row with the reached value and the target."""
    return {
        "case": {"comparison": name},
        "figures": {"ratio": round(value, 4), "wanted": wanted},
        "headline": "ratio",
        "better": "higher",
        "note": "reached" if value >= wanted else "MISSED",
    }


def _cpu():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "an unnamed CPU"


def _hypervisor():
    """The name of the hypervisor, or False without one."""
    try:
        found = subprocess.run(["systemd-detect-virt", "--vm"], capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        found = "an unknown hypervisor" if "hypervisor" in pathlib.Path("/proc/cpuinfo").read_text() else "none"
    return False if found in ("", "none") else found


def _driver():
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"
