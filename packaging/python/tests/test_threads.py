"""Proves that the affinity mask, LOCAL_WORLD_SIZE and SPILLWAY_NUM_THREADS set the number of workers;
OMP_NUM_THREADS does not."""

import os
import subprocess
import sys

import pytest

USABLE = len(os.sched_getaffinity(0))


def workers(environment, before="", **variables):
    program = f"{before}\nimport spillway\nprint(spillway.num_threads())"
    clean = {
        name: value for name, value in environment.items() if name not in ("LOCAL_WORLD_SIZE", "SPILLWAY_NUM_THREADS", "OMP_NUM_THREADS")
    }
    return subprocess.run([sys.executable, "-c", program], env={**clean, **variables}, capture_output=True, text=True)


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({}, USABLE),
        ({"OMP_NUM_THREADS": "1"}, USABLE),
        ({"LOCAL_WORLD_SIZE": "2"}, max(1, USABLE // 2)),
        ({"LOCAL_WORLD_SIZE": "64"}, max(1, USABLE // 64)),
        ({"SPILLWAY_NUM_THREADS": "3", "LOCAL_WORLD_SIZE": "2"}, 3),
    ],
)
def test_settings_decide(child_environment, variables, expected):
    assert workers(child_environment, **variables).stdout == f"{expected}\n"


def test_the_affinity_mask_limits(child_environment):
    pinned = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    assert workers(child_environment, before=pinned).stdout == "1\n"


def test_the_reason_is_logged_once(child_environment):
    large = """
import spillway, numpy
p, g, m, v = (numpy.zeros(70000, numpy.float32) for _ in range(4))
for _ in range(3):
    spillway.Adam().step([(p, g, m, v)])
"""
    pytest.importorskip("numpy")
    seen = workers(child_environment, before=large, SPILLWAY_LOG="info", LOCAL_WORLD_SIZE="2")
    assert seen.stderr.count("worker threads") == 1 and "2 local ranks" in seen.stderr, seen.stderr


@pytest.mark.parametrize("value", ["0", "two", "-1", "99999"])
def test_a_wrong_number_is_an_error_that_names_the_variable(child_environment, value):
    seen = workers(child_environment, SPILLWAY_NUM_THREADS=value)
    assert seen.returncode != 0 and "SPILLWAY_NUM_THREADS" in seen.stderr
