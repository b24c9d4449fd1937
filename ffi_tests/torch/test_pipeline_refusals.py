"""Proves that values which an optimizer cannot use are refused before a step and leave the pipeline usable, that units
without a gradient train as in a serial run, and that a pipeline that is never closed leaves no process."""

import functools
import math
import os
import subprocess
import sys

import numpy
import pytest
import torch
from test_pipeline_torch import ADAMW, DIM, batches, forked, model, one_thread, serial  # noqa: F401

import spillway
import spillway.torch
from spillway import pipeline

LOSS = torch.nn.functional.mse_loss
TORCHS = functools.partial(torch.optim.AdamW, lr=0.01)


def opened(units, optimizer=ADAMW, **options):
    options = {"devices": 2, "micro_batches": 2, "split": 2, "seed": 7, **options}
    return pipeline.Pipeline(units, LOSS, optimizer, torch.ones(3, DIM), **options)


OPTIONS = [
    {"lr": math.nan},
    {"lr": math.inf},
    {"eps": -math.inf},
    {"lr": "abc"},
    {"lr": None},
    {"betas": (2, 2)},
    {"betas": 3},
    {"betas": (0.9, math.nan)},
    {"weight_decay": "x"},
    {"amsgrad": True},
    {"lr": numpy.array(math.inf)},
    {"betas": (numpy.array(math.nan), 0.9)},
]


def other(state, change):
    """States in which `change` has replaced that of the last stage: the first device does not refuse them."""
    last = max(state)
    return {**state, last: change(state[last])}


def other_shape(state):
    return {
        **state,
        "state": {
            number: {name: value if name == "step" else torch.zeros(DIM + 1, DIM + 1) for name, value in one.items()}
            for number, one in state["state"].items()
        },
    }


def other_groups(change):
    return lambda state: {**state, "param_groups": [change(group) for group in state["param_groups"]]}


STATES = [
    other_shape,
    lambda state: {**state, "state": {0: 5}},
    other_groups(lambda group: {"params": group["params"]}),
    other_groups(lambda group: {**group, "lr": math.nan}),
    other_groups(lambda group: None),
    lambda state: None,
]


@pytest.mark.parametrize(
    "optimizer, shape, options",
    [(ADAMW, {}, [*OPTIONS, {"lr": -1}, {"eps": -1}]), (TORCHS, {"async_optimizer": False, "check_finite": False}, OPTIONS)],
    ids=["spillway", "torch"],
)
def test_values_with_which_no_optimizer_can_step_are_refused_and_change_no_bit(optimizer, shape, options):
    steps, weights = batches(2, 2), []
    for hostile in (False, True):
        units = model(4)
        with opened(units, optimizer, **shape) as runner:
            runner.step(*steps[0], timeout=300)
            state = runner.state_dict()
            for value in options if hostile else ():
                with pytest.raises(spillway.InvalidArgumentError, match="^set_options: the optimizer of the stage of unit"):
                    runner.set_options(**value)
            for change in STATES if hostile else ():
                with pytest.raises(spillway.InvalidArgumentError, match="^load_state_dict: the optimizer of the stage of unit 3"):
                    runner.load_state_dict(other(state, change))
            runner.set_options(lr=0.02)
            assert runner.step(*steps[1], timeout=300).committed
            runner.sync()
        weights.append([parameter.detach().clone() for parameter in units.parameters()])
    assert all(torch.equal(left, right) for left, right in zip(*weights))


def by_shape(parameters):
    """An optimizer with weight decay for large parameters only."""
    large, small = ([one for one in parameters if (one.numel() > DIM) == is_large] for is_large in (True, False))
    return ADAMW([{"params": large}, {"params": small, "weight_decay": 0.0}])


def test_options_before_the_first_step_and_of_groups_by_shape_are_taken():
    with opened(model(4), by_shape) as runner:
        runner.set_options(lr=0.5)
        assert runner.step(*batches(1, 2)[0], timeout=300).committed
        runner.set_options(lr=0.25)
        with pytest.raises(spillway.InvalidArgumentError, match="lr: -1"):
            runner.set_options(lr=-1)
        assert [group["lr"] for group in runner.state_dict()[3]["param_groups"]] == [0.25, 0.25]
    with opened(model(4), TORCHS, async_optimizer=False, check_finite=False) as runner:
        runner.set_options(amsgrad=True)
        runner.step(*batches(1, 2)[0], timeout=300)
        assert "max_exp_avg_sq" in runner.state_dict()[3]["state"][0]


def test_messages_name_the_method_and_steps_without_targets_or_time_are_refused():
    inputs, targets = batches(1, 2)[0]
    with opened(model(4)) as runner:
        for call, words in [
            (lambda: runner.set_options(lr=lambda: 0), "^set_options: the values must be picklable"),
            (lambda: runner.load_state_dict({unit: LocalClass() for unit in range(4)}), "^load_state_dict: "),
            (lambda: runner.step(inputs, targets, timeout=-1), "timeout is -1"),
            (lambda: runner.step(inputs, targets, timeout="1"), "timeout is '1'"),
            (lambda: runner.step(inputs.to_sparse(), targets), "inputs is a tensor of torch.sparse_coo"),
            (lambda: runner.step(inputs, targets.to("meta")), "targets is a tensor of .* on meta"),
            (lambda: runner.step(inputs, targets[:0]), "targets must be a tensor whose first dimension"),
            (lambda: runner.step(inputs[:0], targets), "inputs must be a tensor whose first dimension"),
        ]:
            with pytest.raises(spillway.InvalidArgumentError, match=words):
                call()
        assert runner.step(inputs, targets, timeout=300).committed
    with pytest.raises(spillway.InvalidArgumentError, match="sync: this pipeline is closed"):
        runner.sync()
    with pytest.raises(spillway.InvalidArgumentError, match="Pipeline: StageAdamW cannot step with these options: .*lr"):
        opened(model(4), functools.partial(pipeline.StageAdamW, lr=math.inf))


def test_a_close_that_a_signal_handler_interrupts_is_completed_by_the_next_one():
    runner = opened(model(4))
    ids, process = runner.process_ids(), runner._fleet._processes[0]
    kill = process.kill

    def interrupted():
        process.kill = kill
        raise KeyboardInterrupt

    process.kill = interrupted
    with pytest.raises(KeyboardInterrupt):
        runner.close()
    with pytest.raises(spillway.BusyError, match="closed"):
        runner.process_ids()
    runner.close()
    assert not [one for one in ids if os.path.exists(f"/proc/{one}")]


class LocalClass:
    def __reduce__(self):
        raise TypeError("not picklable, on purpose")


class Alias(torch.nn.Module):
    """A buffer in the memory of a parameter."""

    def __init__(self, trained=True):
        super().__init__()
        self.linear = torch.nn.Linear(DIM, DIM)
        self.linear.weight.requires_grad_(trained)
        self.register_buffer("view", self.linear.weight.detach()[1:])
        self.register_buffer("again", self.view[1:])

    def forward(self, x):
        return self.linear(x) + (x @ self.view.t()).sum(1, keepdim=True)


def test_a_buffer_in_the_memory_of_a_trained_parameter_is_refused():
    with pytest.raises(spillway.InvalidArgumentError, match=r"buffer \w+ of unit 1 shares memory with parameter linear.weight of unit 1"):
        opened([torch.nn.Linear(DIM, DIM), Alias()])
    far = [torch.nn.Linear(DIM, DIM), torch.nn.Linear(DIM, DIM)]
    far[1].register_buffer("bias_of_other", far[0].bias.detach())
    with pytest.raises(spillway.InvalidArgumentError, match="buffer bias_of_other of unit 1 shares memory with parameter bias of unit 0"):
        opened(far)
    opened([torch.nn.Linear(DIM, DIM), Alias(trained=False)]).close()


class Detached(torch.nn.Module):
    """Its output does not depend on its input: units before it get no gradient. Only micro-batches whose first number is
    positive, if `sometimes`."""

    def __init__(self, sometimes=False):
        super().__init__()
        self.linear, self.sometimes = torch.nn.Linear(DIM, DIM), sometimes

    def forward(self, x):
        return self.linear(x if self.sometimes and x[0, 0] < 0 else x.detach())


@pytest.mark.sampled(cases=3)
@pytest.mark.parametrize("schedule, options", [("decoupled", {}), ("decoupled", {"split": 1}), ("afab", {"recompute": False})], ids=str)
@pytest.mark.parametrize("sometimes", [False, True])
def test_units_before_one_that_does_not_use_its_input_train_as_in_a_serial_run(schedule, options, sometimes):
    def units():
        torch.manual_seed(5)
        return [*model(2), Detached(sometimes), *model(3, seed=9)]

    steps, ours, theirs, start = batches(4, 4), units(), units(), units()
    steps[2][1][0, 0] = math.inf
    with opened(ours, schedule=schedule, micro_batches=4, **options) as runner:
        # The third step is rolled back on all stages, also on those that got no gradient.
        assert [runner.step(*step, timeout=300).committed for step in steps] == [True, True, False, True]
        runner.sync()
        stage = runner.plan.backward_split
    serial(theirs, steps, 4, stage, spoil=2)
    for left, right, before in zip(ours, theirs, start):
        assert all(torch.equal(one, other) for one, other in zip(left.parameters(), right.parameters()))
        changed = not all(torch.equal(one, other) for one, other in zip(left.parameters(), before.parameters()))
        assert changed == (sometimes or left not in ours[:2])


def test_states_of_another_split_continue_to_the_bit_or_are_refused():
    steps, theirs = batches(4, 2), model(4)
    serial(theirs, steps, 2, 1)
    first = model(4)
    with opened(first, split=2) as runner:
        for step in steps[:2]:
            runner.step(*step, timeout=300)
        runner.sync()
        state = runner.state_dict()
    for options, fits in [
        ({"split": 4, "devices": 1}, True),
        ({"schedule": "afab", "split": 1}, True),
        ({"schedule": "1f1b", "split": 2}, False),
    ]:
        units = model(4)
        units.load_state_dict(first.state_dict())
        with opened(units, **options) as runner:
            if not fits:
                with pytest.raises(spillway.InvalidArgumentError, match=r"stages \[0, 1, 2, 3\]; pass those of \[0, 2\]"):
                    runner.load_state_dict(state)
                continue
            runner.load_state_dict(state)
            # Steps are numbered from 0 in each pipeline, and random numbers depend on them.
            runner._step = 2
            for step in steps[2:]:
                runner.step(*step, timeout=300)
            runner.sync()
        assert all(torch.equal(left, right) for left, right in zip(units.parameters(), theirs.parameters()))


FORGOTTEN = {
    "forgotten": "del runner; gc.collect(); print(*filter(exists, ids), 'left', flush=True)",
    "in a circle": "me = [runner]; me.append(me); del runner, me; print('left', flush=True)",
    "error": "print('left', flush=True); raise SystemExit(3)",
}


@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("way", FORGOTTEN)
def test_a_pipeline_that_is_never_closed_leaves_no_process(tmp_path, way):
    program = tmp_path / "forgets.py"
    program.write_text(
        "import gc, os, sys\n"
        f"sys.path[:0] = {sys.path!r}\n"
        "import torch\n"
        "from test_pipeline_refusals import batches, model, opened\n"
        "exists = lambda process: os.path.exists(f'/proc/{process}')\n"
        "if __name__ == '__main__':\n"
        "    runner = opened(model(2), split=1)\n"
        "    runner.step(*batches(1, 2)[0], timeout=300)\n"
        "    ids = runner.process_ids()\n"
        "    print(*ids, flush=True)\n"
        f"    {FORGOTTEN[way]}\n"
    )
    ended = subprocess.run([sys.executable, program], stdout=subprocess.PIPE, text=True, timeout=300)
    ids, left = ended.stdout.splitlines()
    assert ended.returncode == (3 if way == "error" else 0) and left == "left"
    assert len(ids.split()) == 2 and not any(os.path.exists(f"/proc/{process}") for process in ids.split())


def test_states_on_a_tier_are_refused(tmp_path):
    with pytest.raises(spillway.InvalidArgumentError, match="leave out tier"):
        opened(model(4), functools.partial(spillway.torch.AdamW, lr=1e-2, tier=[tmp_path]))
    assert not any(tmp_path.iterdir())
