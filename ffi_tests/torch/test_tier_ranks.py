"""If one of several processes with states on a tier fails, all raise an error in that call, and none continues with states of
another step. tier_ranks_worker.py has the cases."""

import pathlib

import processes
import pytest

WORKER = pathlib.Path(__file__).with_name("tier_ranks_worker.py")
CASES = ("steps", "left_behind", "commits", "without_gradients", "opens")


@pytest.fixture(scope="module", params=[2, 4])
def done(request, tmp_path_factory):
    """The end of the processes that run all cases. Their start takes longer than a case."""
    return request.param, processes.run(WORKER, request.param, tmp_path_factory.mktemp("states"), *CASES)


def held(done, case):
    count, end = done
    assert end.stdout.count(f"{case} holds\n") == count, end


def test_a_step_that_fails_in_one_process_is_an_error_of_all(done):
    held(done, "steps")


def test_a_process_that_returns_alone_is_found_at_the_next_step_and_commit(done):
    held(done, "left_behind")


def test_a_commit_that_fails_in_one_process_is_an_error_of_all(done):
    held(done, "commits")


def test_a_process_without_gradients_counts_the_steps_of_the_others(done):
    held(done, "without_gradients")


def test_a_process_that_cannot_begin_is_an_error_of_all(done):
    held(done, "opens")
