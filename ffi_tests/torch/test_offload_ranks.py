"""spillway.torch.offload over 2 and 4 processes, on the CPU with gloo: FSDP2, HSDP and other placements of DTensors. The bits are those of
a step without overlap, norms those of torch, and a process that refuses or is killed ends the step of the others. offload_worker.py has
the cases; SPILLWAY_TRAININGS=100 runs 100 random trainings instead of 6."""

import pathlib

import processes
import pytest

torch = pytest.importorskip("torch")
WORKER = pathlib.Path(__file__).with_name("offload_worker.py")
# The last case kills a process.
CASES = ("trainings", "overlaps", "norms", "refusals", "groups", "checkpoints", "lost")


@pytest.fixture(scope="module", params=[2, 4])
def done(request, tmp_path_factory):
    """The end of the processes that run all cases. Their start takes longer than a case."""
    return request.param, processes.run(WORKER, request.param, tmp_path_factory.mktemp("cases"), *CASES)


@pytest.mark.parametrize("case", CASES)
def test_the_case_holds_in_every_process(done, case):
    count, end = done
    assert end.stdout.count(f"{case} holds\n") == count, end
