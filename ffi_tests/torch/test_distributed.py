"""Two processes train with FSDP2 and its CPU offload policy, whose parameters, gradients and states are DTensors: with spillway.torch
and with torch's AdamW, the same; a checkpoint of one by torch.distributed.checkpoint resumes with the other. The
states may be on tiers, which resume at one commit."""

import pathlib

import processes
import pytest

torch = pytest.importorskip("torch")
WORKER = pathlib.Path(__file__).with_name("fsdp_worker.py")
ALIKE = ("train", "clip", "checkpoint", "tier")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The end of two processes that run all cases. Their start takes longer than a case."""
    folder = tmp_path_factory.mktemp("cases")
    for case in ALIKE:
        (folder / case).mkdir()
    return processes.run(WORKER, 2, folder, *ALIKE, "one rank")


@pytest.mark.parametrize("case", ALIKE)
def test_two_processes_train_alike(case, done):
    assert done.stdout.count(f"{case} holds\n") == 2, done


def test_a_bad_gradient_of_one_process_is_skipped_and_rolled_back_by_both(done):
    assert done.stdout.count("one rank holds\n") == 2 and done.returncode == 0, done
