"""Proves that an unmodified DeepSpeed trains with Spillway under ZeRO 2 and 3, bit for bit as with its compiled op;
that it does so on a machine without a compiler, with two ranks; and that the weights depend on the run."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
SMALL = ["--dim", "64", "--layers", "2", "--context", "64", "--batch", "4", "--steps", "8"]


def train(python, folder, *arguments, launcher=(), **extra):
    """One run of the demo's script; its report."""
    report = folder / "report.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **extra}
    environment.pop("SPILLWAY_LIBRARY")
    done = subprocess.run([python, *launcher, HERE / "train.py", *SMALL, *arguments, "--json", report], env=environment,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(report.read_text())


@pytest.fixture
def with_spillway(overlay, tmp_path):
    def run(*arguments, **extra):
        extensions = tmp_path / "extensions"
        extensions.mkdir(exist_ok=True)
        report = train(overlay, tmp_path, *arguments, SPILLWAY_DEEPSPEED="1", TORCH_EXTENSIONS_DIR=str(extensions),
                       **extra)
        assert not list(extensions.iterdir()) and not report["compiled_ops"]
        assert report["active"]["cpu_adam"]["calls"] >= report["steps"] == 8
        return report
    return run


@pytest.mark.parametrize("stage", ["2", "3"])
def test_the_weights_are_those_of_the_compiled_op(with_spillway, compiled, overlay, tmp_path, stage):
    compiled("cpu_adam")
    ours = with_spillway("--stage", stage)
    theirs = train(overlay, tmp_path, "--native", "--stage", stage)
    assert "cpu_adam.so" in theirs["compiled_ops"]
    assert (ours["sha256"], ours["losses"]) == (theirs["sha256"], theirs["losses"])


def test_another_seed_gives_other_weights(with_spillway):
    assert with_spillway()["sha256"] != with_spillway("--seed", "1")["sha256"]


def test_two_ranks_on_a_machine_without_a_compiler(with_spillway, overlay):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    report = with_spillway(launcher=launcher, PATH=os.path.dirname(overlay))
    assert report["active"]["cpu_adam"]["elements"] == pytest.approx(8 * report["parameters"] / 2, rel=0.01)
