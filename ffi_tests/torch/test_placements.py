"""Parameters that are placed on meshes of 2 and of 4 processes: which part counts in the norm, which random bits it gets, and what the
other processes do if one refuses its step. ranks_worker.py has the cases."""

import pathlib

import processes
import pytest

torch = pytest.importorskip("torch")
WORKER = pathlib.Path(__file__).with_name("ranks_worker.py")
# The last case ends the group of its processes.
CASES = ("norms", "own_parts", "replicas", "no_norm", "refusals", "trainings", "hook")


@pytest.fixture(scope="module", params=[2, 4])
def done(request):
    """The end of the processes that run all cases. Their start takes longer than a case."""
    return request.param, processes.run(WORKER, request.param, *CASES)


def held(done, case):
    count, end = done
    assert end.stdout.count(f"{case} holds\n") == count, end


def test_the_norm_is_that_of_torch_for_all_placements(done):
    held(done, "norms")


def test_plain_parameters_alone_are_parts_of_their_own(done):
    held(done, "own_parts")


def test_replicas_have_equal_random_bits_and_parts_have_others(done):
    held(done, "replicas")


def test_gradients_without_a_common_norm_are_an_error(done):
    held(done, "no_norm")


def test_all_processes_refuse_a_step_that_one_refuses(done):
    held(done, "refusals")


def test_random_trainings_are_those_of_torch(done):
    held(done, "trainings")


def test_a_hook_that_raises_in_one_process_ends_the_wait_of_the_others(done):
    held(done, "hook")
