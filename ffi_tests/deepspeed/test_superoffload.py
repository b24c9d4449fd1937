"""Proves that DeepSpeed's SuperOffload on Spillway's engine steps during backward, clipped or not, without a second
process. It ends with the bits of the run that waits for the norm. With clipping, DeepSpeed's own SuperOffload also
waits, and the bits equal its bits."""

import json
import os
import pathlib
import tempfile
import time

import pytest

HERE = pathlib.Path(__file__).parent


@pytest.fixture
def run(starter, native_starter, tmp_path):
    """Runs a script, whose last argument is the file of its report."""

    def run(script, *arguments, spillway=True, ranks=1):
        report = tmp_path / "report.json"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("SPILLWAY_LIBRARY")
        if spillway:
            environment.update(SPILLWAY_DEEPSPEED="1", TORCH_EXTENSIONS_DIR=str(tmp_path))
        with tempfile.TemporaryFile("w+") as errors:
            run = (starter if spillway else native_starter).start([HERE / script, *arguments, report], environment, errors, ranks)
            output, status = run.stdout.read(), run.wait(300)
            errors.seek(0)
            assert status == 0, output[-2000:] + errors.read()[-3000:]
        return json.loads(report.read_text())

    return run


@pytest.fixture
def train(run):
    return lambda *arguments, **how: run("superoffload.py", *arguments, "--json", **how)


@pytest.mark.parametrize(
    "clip, ranks, verdict",
    [("0", 1, "step"), ("0.05", 1, "step"), ("2.5", 1, "forward"), ("0", 2, "forward"), ("2.5", 2, "step"), ("0.05", 2, "forward")],
)
def test_the_weights_are_those_of_the_run_that_waits(train, clip, ranks, verdict):
    spikes = [] if clip == "0" else ["--spikes"]
    ours = train("--clip", clip, *spikes, "--verdict", verdict, ranks=ranks)
    waiting = train("--clip", clip, *spikes, "--mode", "serial", ranks=ranks)
    assert ours["stage3"] == "SuperOffloadOptimizer_Stage3" and waiting["stage3"] == "DeepSpeedZeroOptimizer_Stage3"
    assert ours["children"] == [] and ours["waits"] == 0 and ours["published"] == ["torch.bfloat16"]
    assert (ours["sha256"], ours["losses"]) == (waiting["sha256"], waiting["losses"])
    done = ours["active"]["superoffload"]
    assert done["commits"] + done["redos"] + done["aborts"] == ours["steps"]
    assert done["aborts"] == ours["skipped"] == waiting["skipped"] == (1 if spikes else 0)
    assert done["buckets_speculated"] >= ours["steps"]
    assert done.get("deferred", 0) == (done["commits"] + done["redos"] if verdict == "forward" else 0)
    if clip == "0":
        assert done["redos"] == done["aborts"] == done["buckets_spared"] == 0
    if clip == "2.5":
        assert done["commits"] > 0 and done["redos"] > 0 and done["buckets_redone"] > 0
    if clip == "0.05":
        assert done["commits"] == 0 and done["buckets_spared"] > 0


def test_the_weights_are_those_of_deepspeeds_own_superoffload(train, compiled):
    compiled("cpu_adam")
    ours, theirs = train("--steps", "6"), train("--steps", "6", spillway=False)
    assert theirs["children"] and not theirs["active"] and theirs["waits"] >= 6
    assert (ours["sha256"], ours["losses"]) == (theirs["sha256"], theirs["losses"])


@pytest.mark.parametrize("ranks, trainings", [(1, 16), (2, 8)])
def test_random_trainings_show_the_same_with_the_verdict_in_the_next_forward(run, ranks, trainings):
    seed = int(os.environ.get("SPILLWAY_SEED") or time.time() // 86400) * 100
    serial, at_once, later = (run("superoffload_random.py", mode, seed, trainings, ranks=ranks) for mode in ("serial", "step", "forward"))
    active = [shown.pop("active") for shown in (serial, at_once, later)]
    for number in later:
        assert at_once[number]["seen"] == serial[number]["seen"], f"seed {number}, SuperOffload"
        assert later[number]["seen"] == serial[number]["seen"], f"seed {number}, the verdict in the next forward"
    assert (
        active[2]["deferred"] == active[2]["commits"] + active[2]["redos"] == sum(shown["due"] for shown in later.values()) > 2 * trainings
    )
    assert active[1]["redos"] > 0 and "deferred" not in active[1] and not any(shown["due"] for shown in at_once.values())


def test_what_a_step_leaves_to_the_next_forward_is_completed_once_or_refused(run_forked):
    assert (
        run_forked(
            """
import train, superoffload
train.become_single_rank()
import deepspeed, spillway, torch
superoffload.allow_the_cpu()


def engine(verdict):
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "steps_per_print": 1 << 30,
              "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}},
              "spillway": {"superoffload": {"verdict": verdict}}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def step(made):
    made.backward(made(torch.ones(2, 16, dtype=torch.bfloat16)).float().square().mean())
    made.step()
    return made.module.weight.ds_tensor.clone()


at_once, later = engine("step"), engine("forward")
old = later.module.weight.ds_tensor.clone()
new, seen = step(at_once), step(later)
window = later.optimizer._spillway_window
print(torch.equal(seen, old), (window._due is not None), window._ungathered)
spillway.deepspeed.settle(later), spillway.deepspeed.settle(at_once)
print(torch.equal(later.module.weight.ds_tensor, new), (window._due is not None))
master = later.optimizer.fp32_partitioned_groups_flat[0]
step(later)
with torch.no_grad():
    master.mul_(2)
try:
    later(torch.ones(2, 16, dtype=torch.bfloat16))
except ValueError as error:
    print(str(error).split(";")[0], (window._due is not None))
step(later)
later.destroy()
print((window._due is not None), spillway.deepspeed.active()["superoffload"]["deferred"])
at_once.destroy()
""",
            HERE,
        )
        == """True True True
True False
SuperOffload: a tensor of sub-group 0 was written or replaced after step(), which the next forward was to complete False
False 3
"""
    )


def test_the_optimizer_refuses_what_it_cannot_do(run_forked):
    assert (
        run_forked("""
import torch
from spillway.deepspeed import _ops
from spillway.deepspeed._rounds import SuperOffloadCPUOptimizer
from spillway.deepspeed._optimizer_ops import adam_call
config = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
for bad in ({**config, "amsgrad": True}, [config, {**config, "amsgrad": True}]):
    try:
        SuperOffloadCPUOptimizer(bad)
    except ValueError as error:
        print(error)
_ops.module("cpu_adam").create_adam(99, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)
optimizer = SuperOffloadCPUOptimizer([config])
optimizer.begin(99, dict.fromkeys((0, 3), adam_call(1, 1e-3, 0.9, 0.999, 1e-8, 0.0, 1)), 1.0, 0.0)
param, grad, states = torch.ones(8), torch.ones(8), [torch.zeros(8), torch.zeros(8)]
optimizer.submit(3, param, grad, *states)
assert optimizer.missing() == [0] and optimizer.has(3) and not optimizer.has(0)
optimizer.close()
assert torch.equal(param, torch.ones(8)) and states[0].abs().sum() == 0
""")
        == "SuperOffload: amsgrad is not supported; set amsgrad to false\n" * 2
    )
