"""Proves that DeepSpeed's own compiled optimizers step with Spillway's kernels under the preload library: the same bits as
without it, the calls counted, and what does not fit left to DeepSpeed's functions, exceptions included."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from compiled_ops import vector_width

HERE = pathlib.Path(__file__).parent
PRELOAD = pathlib.Path(os.environ["SPILLWAY_LIBRARY"]).with_name("libspillway_preload.so")


@pytest.fixture(scope="module")
def run(compiled, oldest_deepspeed, processor):
    """Runs a case in a process of its own: its result, and the lines of the preload library. A case without the preload
    library runs once."""
    compiled("cpu_adam")
    kept = {}

    def run(case, preload=True, **extra):
        if preload:
            return start(case, LD_PRELOAD=str(PRELOAD), **extra)
        if case not in kept:
            kept[case] = start(case, **extra)
        return kept[case]

    def start(case, log="warn", **extra):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "2",
            "SPILLWAY_LOG": log,
            "SPILLWAY_OLD_DEEPSPEED": str(oldest_deepspeed),
            "SPILLWAY_TEST_PROCESSOR": json.dumps(processor),
            "PYTHONPATH": str(HERE.parents[1] / "packaging" / "python"),
            "PYTHONWARNINGS": "ignore",
            **extra,
        }
        done = subprocess.run([sys.executable, HERE / "preloaded.py", case], env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
        log = [line for line in done.stderr.splitlines() if line.startswith("spillway: preload: ")]
        return json.loads(done.stdout.splitlines()[-1]), log

    return run


@pytest.fixture
def same_bits():
    if vector_width() != "AVX512":
        pytest.skip(f"DeepSpeed compiles its {vector_width()} body here; only the AVX512 body fixes every rounding")


def test_all_optimizers_have_the_bits_of_deepspeeds_kernels(run, same_bits):
    (ours, log), (theirs, _) = run("optimizers", log="info"), run("optimizers", preload=False)
    assert ours["sha256"] == theirs["sha256"]
    assert ours["counts"] == [ours["calls"], ours["elements"], 0] and theirs["counts"] is None
    assert ours["active"]["preload"]["cpu_adam"] == {"calls": ours["calls"], "elements": ours["elements"], "left_to_deepspeed": 0}
    assert "preload" not in theirs["active"]
    assert len(log) == 1 and log[0].endswith(f"cpu_adam.so: cpu_adam is served by {os.environ['SPILLWAY_LIBRARY']}")


def test_a_spawned_worker_is_served(run, same_bits):
    (ours, _), (theirs, _) = run("spawned"), run("spawned", preload=False)
    assert ours["sha256"] == theirs["sha256"]
    assert ours["worker"] == [ours["calls"], ours["elements"], 0] and ours["counts"] == [0, 0, 0]


def test_a_forked_child_steps_as_its_parent(run, same_bits):
    (ours, _), (theirs, _) = (run("forked", preload, OMP_NUM_THREADS="1", SPILLWAY_NUM_THREADS="2") for preload in (True, False))
    assert ours["sha256"] == ours["child"] == theirs["sha256"]
    assert ours["counts"] == [ours["calls"], ours["elements"], 0]


def test_what_does_not_fit_is_deepspeeds(run):
    """Its exception passes through the preload library, and the log has one line for each reason."""
    (ours, log), (theirs, _) = run("other"), run("other", preload=False)
    results = ("float64", "spread", "beta")
    assert [ours[name] for name in results] == [theirs[name] for name in results]
    assert "not supported" in ours["float64"] and ours["spread"]
    assert ours["counts"] == [1, 64, 3]
    reasons = [line.split("a call of cpu_adam is left to DeepSpeed's function: ")[1] for line in log]
    assert len(set(reasons)) == len(reasons) and any("params has torch's scalar type 7" in reason for reason in reasons)
    assert any("is not contiguous" in reason for reason in reasons), reasons


def test_a_rollback_is_exact_once_steps_are_recorded(run):
    """DeepSpeed's own rollback is not exact, and writes 0 to a parameter with an infinite gradient."""
    result, log = run("rollback")
    assert result["close"] and result["restored"] and result["repaired"] and result["exact"] == 0
    assert result["again"] == -1 and result["untouched"]
    assert any("rolled back by the inverse formula" in line for line in log)
    assert any("is not rolled back, and its tensors are unchanged: Adam optimizer id 77 does not exist" in line for line in log), log
    assert result["unknown"] == -1
    theirs, _ = run("rollback", preload=False)
    assert not theirs["restored"] and not theirs["repaired"] and not theirs["untouched"]


def test_every_step_is_recorded_on_request(run):
    _, log = run("rollback", SPILLWAY_DEEPSPEED_UNDO="always")
    assert not any("inverse formula" in line for line in log)
    assert not any("SPILLWAY_DEEPSPEED_UNDO=always" in line for line in log), "the advice is followed already"


def test_adagrad_and_lion_have_the_results_of_their_papers(run, compiled_oldest):
    for op in ("cpu_adagrad", "cpu_lion"):
        compiled_oldest(op)
    result, _ = run("adagrad_and_lion")
    assert result["adagrad"] and result["lion"]
    assert result["active"]["preload"]["cpu_adagrad"]["calls"] == 3 and result["active"]["preload"]["cpu_lion"]["calls"] == 1
    theirs, _ = run("adagrad_and_lion", preload=False)
    assert not theirs["adagrad"] and not theirs["lion"]


def test_two_compiled_libraries_with_the_same_id_keep_their_own_state(run, same_bits):
    theirs, _ = run("fused", preload=False)
    ours, _ = run("fused")
    assert ours["sha256"] == theirs["sha256"]
    assert ours["counts"] == [ours["calls"], ours["elements"], 0]


def test_a_caller_that_is_no_op_gets_an_error(run):
    """It has no function to which a call could be left. An id that Spillway cannot represent is DeepSpeed's."""
    result, log = run("strangers")
    assert result["foreign"] == [0, -1, -1] and result["stepped"]
    assert result["counts"] == [1, 0, 3]
    assert any("the optimizer id 1048576 is outside 0 to 1048575" in line for line in log)


@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize(
    "extra, reason",
    [
        ({"SPILLWAY_LIBRARY": str(PRELOAD)}, "does not have ABI version 2; install both libraries of one release"),
        ({"SPILLWAY_PRELOAD_FORWARD": "1"}, "SPILLWAY_PRELOAD_FORWARD=1"),
        ({"SPILLWAY_LIBRARY": "/no/such/library.so"}, "no libspillway.so is found; searched: /no/such/library.so"),
    ],
)
def test_a_process_without_spillway_runs_on_deepspeeds_kernels(run, extra, reason):
    (ours, log), (theirs, _) = run("optimizers", **extra), run("optimizers", preload=False)
    assert ours["sha256"] == theirs["sha256"]
    assert ours["counts"] == [0, 0, ours["calls"]]
    assert log == [line for line in log if reason in line] and len(log) == 1


def test_zenflows_compiled_worker_runs_under_the_preload(compiled, tmp_path):
    """Its worker steps inside DeepSpeed's op, which needs the optimizer that DeepSpeed's own function creates."""
    compiled("cpu_adam")
    results = []
    for preload in ({}, {"LD_PRELOAD": str(PRELOAD)}):
        done = subprocess.run(
            [sys.executable, HERE / "zenflow.py", "2", "1", "0"],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **preload},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        results.append(json.loads(done.stdout.splitlines()[-1]))
    assert results[0]["sha256"] == results[1]["sha256"] and results[0]["losses"] == results[1]["losses"]
