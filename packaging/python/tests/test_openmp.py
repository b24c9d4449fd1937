"""While torch's OpenMP threads are awake, they do the steps instead of the library's workers: with the same bits, in the main thread
alone, and never in a forked child, which has none of its parent's threads."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

PROGRAM = """
import os, pathlib, sys, threading
import torch, spillway
torch.set_num_threads(2)
spillway.set_num_threads(2)
CASE = sys.argv[1]
N = 3_000_000
arrays = [torch.randn(N, generator=torch.Generator().manual_seed(seed)) for seed in range(2)] + [torch.zeros(N), torch.zeros(N)]
adam = spillway.Adam(lr=1e-3).prepare([tuple(arrays)])

def busy():
    # Longer than a sample of the activity.
    for _ in range(30):
        torch.ones(1_000_000).mul_(2)

def work_of_workers():
    nanoseconds = []
    for task in pathlib.Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().startswith("spillway-"):
                nanoseconds.append(int((task / "schedstat").read_text().split()[0]))
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended since it was listed
            pass
    assert nanoseconds
    return sum(nanoseconds)

def steps(count):
    for _ in range(count):
        busy()
        adam.step()

steps(5)
before = work_of_workers()
if CASE == "thread":
    # Other programs may keep the workers from a few steps.
    for _ in range(20):
        worker = threading.Thread(target=steps, args=[20])
        worker.start()
        worker.join()
        if work_of_workers() - before > 1_000_000:
            break
elif CASE == "fork":
    child = os.fork()
    if child == 0:
        [adam.step() for _ in range(20)]
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    [adam.step() for _ in range(20)]
else:
    steps(20)
by = "by workers" if work_of_workers() - before > 1_000_000 else "by OpenMP"
print(by, arrays[0].double().sum().item(), arrays[3].double().sum().item())
"""


def run(case, value, environment):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, case],
        capture_output=True,
        text=True,
        timeout=120,
        env={**environment, **({} if value is None else {"SPILLWAY_OPENMP": value})},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_openmp_threads_do_the_steps_with_the_same_bits(child_environment):
    workers, openmp = run("main", "0", child_environment), run("main", "1", child_environment)
    assert workers.startswith("by workers") and openmp.startswith("by OpenMP")
    assert workers.removeprefix("by workers") == openmp.removeprefix("by OpenMP")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_other_threads_and_forked_children_use_workers(child_environment):
    assert run("thread", "1", child_environment).startswith("by workers")
    # The child would hang in a region of its parent's threads.
    run("fork", "1", child_environment)


def test_without_a_setting_the_results_are_the_same(child_environment):
    assert run("main", None, child_environment).split()[2:] == run("main", "0", child_environment).split()[2:]


def test_a_wrong_value_is_an_error_that_names_the_variable(child_environment):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "main"], capture_output=True, text=True, env={**child_environment, "SPILLWAY_OPENMP": "maybe"}
    )
    assert done.returncode != 0 and "SPILLWAY_OPENMP" in done.stderr
