"""Proves that StageAdamW and StageAdam have the bits, options and states of spillway.torch, roll back exactly, and give a pipeline its
verdict without a pass of its own over the gradients."""

import copy
import dataclasses
import functools
import gc
import math
import os

import pytest
import torch
from test_pipeline_torch import ADAMW, DIM, STAGE, batches, model, one_thread, serial  # noqa: F401

import spillway
from spillway import pipeline
from spillway.pipeline import StageAdam, StageAdamW
from spillway.pipeline._optimizers import Optimizers
from spillway.pipeline._stage_optimizer import _KeptStage
from spillway.pipeline._store import Store
from spillway.torch import Adam, AdamW

LOSS = torch.nn.functional.mse_loss
DTYPES = [(1000, torch.float32), (33, torch.bfloat16), (65, torch.float16), (1, torch.float32)]


def parameters(dtypes=DTYPES):
    random = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(length, generator=random).to(dtype)) for length, dtype in dtypes]


def give(step, *lists):
    """Gives equal gradients to the parameters of all lists; in step 3 the first parameter has none."""
    random = torch.Generator().manual_seed(step)
    for same in zip(*lists):
        gradient = torch.randn(same[0].shape, generator=random).to(same[0].dtype)
        for parameter in same:
            parameter.grad = gradient.clone()
    for one in lists if step == 3 else ():
        one[0].grad = None


def bits(optimizer):
    """The bytes of all parameters and states."""
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.detach().clone().view(-1).view(torch.uint8) for tensor in tensors]


def same(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.mark.parametrize("ours, theirs", [(StageAdamW, AdamW), (StageAdam, Adam)])
@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1, "maximize": True}, {"master": "f32"}, {"master": "f32", "moment_dtype": torch.bfloat16}], ids=str
)
def test_steps_and_rollbacks_have_the_bits_of_the_class_without_a_stage(ours, theirs, options):
    dtypes = DTYPES[:1] if "moment_dtype" in options else DTYPES
    left, right = parameters(dtypes), parameters(dtypes)
    one, other = ours(left, lr=0.01, **options), theirs(right, lr=0.01, undo=True, **options)
    assert isinstance(one, theirs)
    for step in range(6):
        give(step, left, right)
        before = bits(one)
        one.step(), other.step()
        squares = sum(float((parameter.grad.double() ** 2).sum()) for parameter in left if parameter.grad is not None)
        assert not one.verdict.nonfinite and one.verdict.sum_squares == pytest.approx(squares)
        assert same(bits(one), bits(other)) and one.state_dict().keys() == other.state_dict().keys()
        if step in (1, 4):
            one.rollback(), other.rollback()
            assert same(bits(one), before) and same(bits(one), bits(other))
        elif step == 2:
            one.keep()
            with pytest.raises(spillway.InvalidArgumentError, match="no step is recorded"):
                one.rollback()
    left[0].grad[0] = right[0].grad[0] = math.nan
    one.step(), other.step()
    assert one.verdict.nonfinite and same(bits(one), bits(other))
    one.rollback()
    for step in (6, 7):
        give(step, left)
        one.step()
    stepped = [parameter.detach().clone() for parameter in left]
    copy.deepcopy(one).step()
    del one
    gc.collect()
    assert same(left, stepped)  # a step without a verdict is kept


def test_what_a_stage_cannot_step_is_refused_with_a_cure():
    double = [torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))]
    apart = [{"params": parameters()}, {"params": parameters(), "maximize": True}]
    for given, options, error, words in [
        (parameters(), {"undo": False}, spillway.InvalidArgumentError, "leave out undo"),
        (double, {}, spillway.UnsupportedError, "float64 .* cast or copy it"),
        (parameters(), {"amsgrad": True}, spillway.UnsupportedError, "no amsgrad"),
        (apart, {}, spillway.UnsupportedError, "maximize differs"),
        (parameters(), {"master": "split"}, spillway.UnsupportedError, 'pass master="f32"'),
        (parameters(), {"tier": ["x"]}, spillway.UnsupportedError, "spillway.torch.AdamW"),
    ]:
        with pytest.raises(error, match=words):
            StageAdamW(given, **options)
    optimizer = StageAdamW([{"params": [one]} for one in parameters()])
    optimizer.param_groups[1]["maximize"] = True
    give(0, [one for group in optimizer.param_groups for one in group["params"]])
    with pytest.raises(spillway.UnsupportedError, match="maximize differs"):
        optimizer.step()
    optimizer = StageAdamW(parameters())
    with pytest.raises(spillway.UnsupportedError, match="float64"):
        optimizer.add_param_group({"params": double})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(spillway.UnsupportedError, match="Pipeline: StageAdamW: parameter weight of unit 1 is torch.float64"):
        pipeline.Pipeline([torch.nn.Linear(DIM, DIM), torch.nn.Linear(DIM, DIM).double()], LOSS, STAGE, torch.ones(3, DIM))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_step_is_kept_when_its_optimizer_is_freed_also_if_a_signal_handler_raises_then(monkeypatch, interrupted):
    left = parameters()
    optimizer = StageAdamW(left)
    give(0, left)
    optimizer.step()
    after = [parameter.detach().clone() for parameter in left]
    calls = []

    def drain(stage, _):
        calls.append(stage)
        if interrupted:
            raise KeyboardInterrupt

    monkeypatch.setattr(_KeptStage, "_drain", drain)
    del optimizer
    gc.collect()
    assert len(calls) == 1 and all(map(torch.equal, left, after))


def test_a_step_that_was_written_to_is_kept_and_a_forked_child_has_a_stage_of_its_own():
    left, right = parameters(), parameters()
    one, other = StageAdamW(left), AdamW(right, undo=True)
    give(0, left, right)
    one.step(), other.step()
    with torch.no_grad():
        left[0].add_(1), right[0].add_(1)
    for optimizer in (one, other):
        with pytest.raises(spillway.InvalidArgumentError, match="was written to since"):
            optimizer.rollback()
    assert same(bits(one), bits(other))
    before = bits(one)
    one.step()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            after = bits(one)
            one.step()
            one.rollback()
            status = 7 if same(bits(one), after) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    one.rollback()
    assert same(bits(one), before)


@pytest.mark.parametrize("options", [{"transport": "gloo"}, {"async_optimizer": False}], ids=str)
def test_a_pipeline_with_stages_has_the_bits_of_the_serial_run_and_rolls_back(options):
    steps = batches(4, 2)
    steps[1][1][0, 0] = math.inf
    ours, theirs = model(4), model(4)
    with pipeline.Pipeline(ours, LOSS, STAGE, steps[0][0][:3], micro_batches=2, split=2, seed=7, **options) as runner:
        assert [runner.step(*step, timeout=300).committed for step in steps] == [True, False, True, True]
        for value in (math.inf, -math.inf, math.nan, -1.0):
            with pytest.raises(spillway.InvalidArgumentError, match="^set_options: .*lr"):
                runner.set_options(lr=value)
        with pytest.raises(spillway.InvalidArgumentError, match="^set_options: .*amsgrad"):
            runner.set_options(amsgrad=True)
        state, stage = runner.state_dict(), runner.plan.backward_split
        runner.sync()
    serial(theirs, steps, 2, stage, spoil=1)
    assert same(list(ours.parameters()), list(theirs.parameters()))
    assert {name for one in state.values() for entry in one["state"].values() for name in entry} == {"step", "exp_avg", "exp_avg_sq"}
    assert {float(entry["step"]) for one in state.values() for entry in one["state"].values()} == {3.0}


PLAN = pipeline.plan("decoupled", devices=1, micro_batches=1, stages=2)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(
    "optimizer, passes", [(STAGE, 0), (ADAMW, 1), (functools.partial(STAGE, max_norm=1.0), 1)], ids=["stage", "torch", "clips"]
)
def test_only_a_step_that_does_not_check_needs_a_pass_over_the_gradients(monkeypatch, optimizer, passes, asynchronous):
    calls, isfinite = [], torch.isfinite
    monkeypatch.setattr(torch, "isfinite", lambda tensor: calls.append(tensor) or isfinite(tensor))
    units = [torch.nn.Linear(DIM, DIM, bias=False) for _ in range(2)]
    store = Store(units)
    stages = Optimizers(dataclasses.replace(PLAN, async_optimizer=asynchronous), 0, store, optimizer, True)
    before = [store.tensors(unit)[0].clone() for unit in range(2)]
    for step, value in enumerate((1.0, math.inf, 1.0)):
        stages.begin(step - (step > 1))
        stages.give(0, [torch.ones(DIM, DIM)]), stages.give(1, [torch.full((DIM, DIM), value)])
        for unit in range(2) if asynchronous else ():
            stages.optimize(unit)
        verdict = stages.verdict()
        stages.validated(verdict)
        for unit in range(2) if not asynchronous else ():
            stages.optimize(unit)
        assert verdict == (value == 1.0) == stages.finish()
        after = [store.tensors(unit)[0].clone() for unit in range(2)]
        assert [torch.equal(left, right) for left, right in zip(before, after)] == [not verdict] * 2
        before = after
    store.check_whole(2)
    assert len(calls) == 6 * passes
