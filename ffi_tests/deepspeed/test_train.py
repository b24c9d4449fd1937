"""Proves that an unmodified DeepSpeed with Spillway trains under ZeRO 2 and 3 with the bits of its compiled ops. The
states are in memory, or the states, gradients and parameters are in files. The runs also work without a compiler and
with two ranks, and the weights depend on the run."""

import json
import os
import pathlib
import shutil
import signal
import subprocess

import pytest

HERE = pathlib.Path(__file__).parent
FAILURES = HERE / "io_failures.md"
SMALL = ["--dim", "64", "--layers", "2", "--context", "64", "--batch", "4", "--steps", "8"]
# Matrices above 1 MiB, the size from which DeepSpeed moves them to files.
LARGE = ["--dim", "512", "--layers", "1", "--steps", "4"]


def train(starter, folder, *arguments, **how):
    """One run of the demo's script; returns its report."""
    done, report = attempt(starter, folder, *arguments, **how)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(report.read_text())


def attempt(starter, folder, *arguments, launcher=(), **extra):
    """One run that may fail, forked or started by `launcher`; returns its result and the path of its report."""
    report = folder / "report.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **extra}
    environment.pop("SPILLWAY_LIBRARY")
    command = [HERE / "train.py", *SMALL, *arguments, "--json", report]
    if not launcher:
        return starter.run(command, environment, 300), report
    done = subprocess.run([starter.python, *launcher, *command], env=environment, capture_output=True, text=True, timeout=300)
    return done, report


@pytest.fixture
def with_spillway(starter, tmp_path):
    def run(*arguments, **extra):
        extensions = tmp_path / "extensions"
        extensions.mkdir(exist_ok=True)
        report = train(starter, tmp_path, *arguments, SPILLWAY_DEEPSPEED="1", TORCH_EXTENSIONS_DIR=str(extensions), **extra)
        assert not list(extensions.iterdir()) and not report["compiled_ops"]
        assert report["active"]["cpu_adam"]["calls"] >= report["steps"]
        return report

    return run


@pytest.mark.parametrize("stage", ["2", "3"])
def test_the_weights_are_those_of_the_compiled_op(with_spillway, compiled, native_starter, tmp_path, stage):
    build_all(compiled)
    ours = with_spillway("--stage", stage)
    theirs = train(native_starter, tmp_path, "--native", "--stage", stage)
    assert "cpu_adam.so" in theirs["compiled_ops"]
    assert (ours["sha256"], ours["losses"]) == (theirs["sha256"], theirs["losses"])


def build_all(compiled, *more):
    """Builds the ops before any run with a timeout: an interrupted build leaves a lock behind."""
    for op in ("cpu_adam", "deepspeed_shm_comm", *more):
        compiled(op)


@pytest.mark.parametrize("pipeline", [[], ["--pipeline"]], ids=["", "pipeline"])
def test_the_weights_are_those_of_the_compiled_ops_with_all_states_in_files(with_spillway, compiled, native_starter, tmp_path, pipeline):
    """Runs DeepSpeed's swappers: of parameters, of gradients, and the synchronous or the pipelined one of states."""
    build_all(compiled, "async_io", "pin_memory")
    ours = with_spillway("--nvme", str(tmp_path), *LARGE, *pipeline)
    theirs = train(native_starter, tmp_path, "--native", "--nvme", str(tmp_path), *LARGE, *pipeline)
    assert {"async_io.so", "pin_memory.so"} <= set(theirs["compiled_ops"])
    assert (ours["sha256"], ours["losses"], ours["files"]) == (theirs["sha256"], theirs["losses"], theirs["files"])
    moved = ours["active"]["async_io"]
    assert moved["failed"] == 0 and moved["written_bytes"] > sum(ours["files"].values()) > 20 << 20
    assert ours["files"].keys() == {"bfloat16params", "optimizer"} and ours["active"]["pin_memory"]["high_water"] > 0


def test_files_without_io_uring_give_the_same_weights(with_spillway, tmp_path):
    runs = [with_spillway("--nvme", str(tmp_path), *LARGE, SPILLWAY_IO=backend) for backend in ("uring", "threads")]
    assert runs[0]["sha256"] == runs[1]["sha256"]
    assert [run["active"]["io"] for run in runs] == ["io_uring", "threads"]


@pytest.fixture
def sectors_of_4_kib(tmp_path):
    """A folder on a device that accepts no smaller request."""
    if os.getuid() != 0 or not all(map(shutil.which, ("losetup", "mkfs.ext4", "mount"))):
        pytest.skip("a loop device needs root, losetup and mkfs.ext4")
    image, folder = tmp_path / "image", tmp_path / "sectors"
    with open(image, "wb") as file:
        file.truncate(700 << 20)
    made = subprocess.run(["losetup", "-f", "--show", "-b", "4096", "--direct-io=on", image], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"no loop device: {made.stderr}")
    device = made.stdout.strip()
    try:
        subprocess.run(["mkfs.ext4", "-qF", device], check=True)
        folder.mkdir()
        subprocess.run(["mount", device, folder], check=True)
        try:
            yield folder
        finally:
            subprocess.run(["umount", folder], check=True)
    finally:
        subprocess.run(["losetup", "-d", device], check=True)


def test_a_device_with_4_kib_sectors(with_spillway, compiled, native_starter, tmp_path, sectors_of_4_kib):
    """DeepSpeed aligns to 1 KiB, so it cannot write the end of a tensor: the control stops at its first read."""
    build_all(compiled, "async_io", "pin_memory")
    there = with_spillway("--nvme", str(sectors_of_4_kib), *LARGE)
    here = with_spillway("--nvme", str(tmp_path), *LARGE)
    assert (there["sha256"], there["losses"]) == (here["sha256"], here["losses"])
    shutil.rmtree(sectors_of_4_kib / "zero_stage_3")
    done, _ = attempt(native_starter, tmp_path, "--native", "--nvme", str(sectors_of_4_kib), *LARGE)
    assert done.returncode == -signal.SIGABRT and "file bytes" in done.stdout + done.stderr
    assert "| ZeRO-3 with files on a device with 4 KiB sectors | works | ends the process |" in FAILURES.read_text()


def test_another_seed_gives_other_weights(with_spillway):
    assert with_spillway()["sha256"] != with_spillway("--seed", "1")["sha256"]


def test_two_ranks_on_a_machine_without_a_compiler(with_spillway, overlay):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    report = with_spillway(launcher=launcher, PATH=os.path.dirname(overlay))
    assert report["active"]["cpu_adam"]["elements"] == pytest.approx(8 * report["parameters"] / 2, rel=0.01)


def test_megatrains_use_of_the_cpu_adam(run_forked):
    """MegaTrain has no engine of DeepSpeed: it clips the gradients of bfloat16 parameters in shared host memory, and steps them by
    DeepSpeedCPUAdam with its own arguments. The moments are float32. Compared with the formula over float32, rounded in every step."""
    found = run_forked(
        """
import math, torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
import spillway.deepspeed

torch.manual_seed(0)
params = [torch.nn.Parameter(torch.randn(size).bfloat16()) for size in ((64, 33), (7,), (128, 64))]
for param in params:
    param.data.share_memory_()
plain = [[param.detach().clone(), torch.zeros(param.shape), torch.zeros(param.shape)] for param in params]
optimizer = DeepSpeedCPUAdam(params, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01, adamw_mode=True)
for step in range(1, 6):
    for param in params:
        param.grad = torch.randn(param.shape).bfloat16()
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    for state, param in zip(plain, params):
        weight, grad = state[0].float() * (1 - 1e-2 * 0.01), param.grad.float()
        state[1].lerp_(grad, 0.1), state[2].mul_(0.95).addcmul_(grad, grad, value=0.05)
        weight -= 1e-2 / (1 - 0.9**step) * state[1] / ((state[2] / (1 - 0.95**step)).sqrt() + 1e-8)
        state[0] = weight.bfloat16()
    optimizer.step()
    optimizer.zero_grad()
same = [(param == state[0]).float().mean().item() for param, state in zip(params, plain)]
kinds = {optimizer.state[param]["exp_avg"].dtype for param in params}
print(spillway.deepspeed.active()["cpu_adam"], kinds, min(same) > 0.99, all(param.is_shared() for param in params))
"""
    )
    elements = 5 * (64 * 33 + 7 + 128 * 64)
    assert found == f"{{'calls': 15, 'elements': {elements}}} {{torch.float32}} True True\n"
