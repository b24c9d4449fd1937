"""Proves that DeepSpeed's Muon trains with the same bits with and without Spillway. States are in host memory or in files, under one and
two ranks, with clipped gradients. A new process resumes at a checkpoint with the bits of a run without one, also where DeepSpeed alone
does not. What Spillway does not serve for Muon is an error."""

import functools
import json
import os
import pathlib

import pytest

SCRIPT = pathlib.Path(__file__).parent / "muon.py"
IN_MEMORY = ["--zero", '{"save_muon_momentum_buffer_in_memory": true}']
#: The stage, the ranks, whether the states are in files, and further arguments.
RUNS = {
    "ZeRO-1": (1, 1, False, []),
    "ZeRO-2": (2, 1, False, []),
    "ZeRO-2, two ranks": (2, 2, False, []),
    "ZeRO-3, two ranks": (3, 2, False, []),
    "ZeRO-3, momentum in memory": (3, 1, False, IN_MEMORY),
    "files": (3, 1, True, []),
    "files, two ranks": (3, 2, True, []),
    "pipelined files, momentum in memory": (3, 1, True, ["--pipeline", *IN_MEMORY]),
}


def attempt(starter, folder, *arguments, ranks=1, **extra):
    """A run that may fail; returns its result and the path of its report."""
    report = folder / "report.json"
    environment = {name: value for name, value in os.environ.items() if name != "SPILLWAY_LIBRARY"}
    command = [SCRIPT, *map(str, arguments), "--json", report]
    return starter.run(command, {**environment, "OMP_NUM_THREADS": "1", **extra}, 300, ranks), report


def finished(*arguments, **how):
    done, report = attempt(*arguments, **how)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(report.read_text())


@pytest.fixture(scope="module")
def deepspeed_alone(native_starter, compiled, tmp_path_factory):
    """The report of DeepSpeed alone with states in host memory, once for each stage and number of ranks."""
    compiled("cpu_adam")
    folder = tmp_path_factory.mktemp("alone")

    @functools.cache
    def run(stage, ranks):
        found = finished(native_starter, folder, "--stage", stage, ranks=ranks)
        assert found["compiled_ops"] == ["cpu_adam.so"] and not found["active"]
        return found

    return run


@pytest.fixture
def with_spillway(starter, tmp_path):
    (tmp_path / "extensions").mkdir()

    def run(*arguments, how=finished, **more):
        extra = {"SPILLWAY_DEEPSPEED": "1", "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
        return how(starter, tmp_path, *arguments, **more, **extra)

    return run


@pytest.mark.parametrize("name", RUNS)
def test_the_bits_are_those_of_deepspeed_alone_also_after_a_checkpoint(with_spillway, deepspeed_alone, tmp_path, name):
    stage, ranks, in_files, more = RUNS[name]
    alone = deepspeed_alone(stage, ranks)
    arguments = ["--stage", stage, *more, *(["--nvme", tmp_path / "first"] if in_files else [])]
    ours = with_spillway(*arguments, "--save", tmp_path / "saved", ranks=ranks)
    assert (ours["sha256"], ours["losses"]) == (alone["sha256"], alone["losses"])
    assert ours["active"]["cpu_adam"]["calls"] >= 4 and not ours["compiled_ops"]
    if in_files:
        momentum = list((tmp_path / "first").rglob("momentum_buffer-*.swp"))
        assert bool(momentum) == ("momentum in memory" not in name) and ours["active"]["async_io"]["written_bytes"] > 0
        arguments[-1] = tmp_path / "second"
    resumed = with_spillway(*arguments, "--load", tmp_path / "saved", ranks=ranks)
    assert resumed["losses"] == alone["losses"][2:] and resumed["sha256"] == alone["sha256"]


def test_deepspeed_alone_has_these_bits_with_states_in_files(native_starter, deepspeed_alone, compiled, tmp_path):
    compiled("async_io"), compiled("pin_memory")
    in_files = finished(native_starter, tmp_path, "--stage", 3, "--nvme", tmp_path / "states")
    assert "async_io.so" in in_files["compiled_ops"]
    assert in_files["sha256"] == deepspeed_alone(3, 1)["sha256"]


NO_ADAM = "the optimizer is MuonWithAuxAdam; DeepSpeedCPUAdam on Spillway's op is needed"
REFUSED = {
    "tier": (["--nvme", "states", "--block", '{"split_master": true}'], f'{NO_ADAM}; set "enabled": false'),
    "interleave": (["--block", '{"interleave": {"backend": "host", "plan": "stride", "plan_argument": 2}}'], NO_ADAM),
    "superoffload": (
        ["--zero", '{"offload_optimizer": {"device": "cpu", "super_offload": true}}'],
        'take "super_offload" out of offload_optimizer',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_part_that_cannot_step_muon_is_an_error(with_spillway, tmp_path, name):
    arguments, words = REFUSED[name]
    arguments = [tmp_path / "states" if argument == "states" else argument for argument in arguments]
    done, _ = with_spillway("--stage", 3, *arguments, how=attempt)
    assert done.returncode != 0 and words in done.stderr, done.stderr[-4000:]


def test_a_load_into_a_running_engine_has_nothing_of_the_steps_before(with_spillway, deepspeed_alone, tmp_path):
    """The checkpoint is of no step: moments and step numbers begin again."""
    arguments = ["--stage", 3, "--nvme", tmp_path / "states", "--again", tmp_path / "saved"]
    assert with_spillway(*arguments)["sha256"] == deepspeed_alone(3, 1)["sha256"]


def test_states_of_host_memory_do_not_load_into_files(with_spillway, tmp_path):
    with_spillway("--stage", 3, "--save", tmp_path / "saved", "--steps", 2)
    done, _ = with_spillway("--stage", 3, "--nvme", tmp_path / "states", "--load", tmp_path / "saved", how=attempt)
    assert done.returncode != 0 and 'Load it with "offload_optimizer": {"device": "cpu"}; nothing was loaded' in done.stderr, done.stderr[
        -4000:
    ]
