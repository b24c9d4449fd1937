"""Two processes train with FSDP2 and its CPU offload policy, whose parameters, gradients and states are DTensors: with spillway.torch
and with torch's AdamW, the same; a checkpoint of one by torch.distributed.checkpoint resumes with the other. The
states may be on tiers, which resume at one commit."""

import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
WORKER = pathlib.Path(__file__).with_name("fsdp_worker.py")


def run(case, folder):
    """What the two processes of a case print."""
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", WORKER, case, folder],
                          capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("case", ["train", "clip", "checkpoint", "tier"])
def test_two_processes_train_alike(case, tmp_path):
    assert run(case, tmp_path).count("same weights") == 2


def test_a_bad_gradient_of_one_process_is_skipped_and_rolled_back_by_both(tmp_path):
    assert run("one rank", tmp_path).count("skipped together") == 2
