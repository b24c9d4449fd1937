"""A KeyboardInterrupt at any line of a step or rollback. Parameters, masters, moments and counts are afterwards those of one whole number
of steps, and training goes on with the bits of an undisturbed run."""

import concurrent.futures
import gc
import pathlib
import sys

import pytest
import torch

import spillway
from spillway import pipeline
from spillway import torch as own

PACKAGE = str(pathlib.Path(spillway.__file__).parent)
KINDS = {
    "plain": {},
    "f32": {"master": "f32"},
    "split": {"master": "split"},
    "undo": {"master": "f32", "undo": True},
    "stage": {"master": "f32"},
}


def made(kind, steps=0):
    params = [torch.nn.Parameter(torch.linspace(-1, 1, 50).bfloat16()), torch.nn.Parameter(torch.linspace(-1, 1, 30))]
    optimizer = (pipeline.StageAdamW if kind == "stage" else own.AdamW)(params, lr=1e-2, **KINDS[kind])
    for step in range(steps):
        train(optimizer, params, step)
    return optimizer, params


def set_grads(params, step):
    generator = torch.Generator().manual_seed(step)
    for param in params:
        # Old gradients stay alive in `kept`, so that no new one lies at their address.
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        kept.append(param.grad)


kept = []


def train(optimizer, params, step):
    set_grads(params, step)
    optimizer.step()


def snapshot(optimizer, params):
    """Masters and states, after the optimizer has noted what the library has done."""
    return [optimizer.master(param).detach().clone() for param in params] + [
        value.clone() for state in optimizer.state_dict()["state"].values() for key, value in sorted(state.items()) if key != "master_param"
    ]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))


def interrupted_at(line, call):
    """_interrupted_at() in a thread of its own. Tracing can raise between a `with` block and its end, where Python runs no signal handler:
    the flags of torch that the end would have restored are those of the thread."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(_interrupted_at, line, call).result()


def _interrupted_at(line, call):
    """Calls, and raises KeyboardInterrupt before the line of Spillway with this number in the order of execution; False if there are
    fewer."""
    seen, hit = 0, False

    def trace(frame, event, _):
        nonlocal seen
        # Python ignores exceptions in destructors.
        names = {frame.f_code.co_name, frame.f_back.f_code.co_name}
        if not frame.f_code.co_filename.startswith(PACKAGE) or names & {"__del__", "close", "_end", "_drain"}:
            return None
        # Python runs no signal handler between the end of a block and the release of its lock.
        if event == "line" and frame.f_code.co_name != "alone":
            seen += 1
            if seen > line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        hit = True
    finally:
        sys.settrace(before)
        gc.enable()
    return hit


@pytest.fixture(scope="module", params=KINDS)
def reference(request):
    optimizer, params = made(request.param)
    states = []
    for step in range(5):
        train(optimizer, params, step)
        states.append(snapshot(optimizer, params))
    return request.param, states


def steps_done(optimizer):
    states = optimizer.state_dict()["state"].values()
    counts = {float(state["step"]) if state else 0.0 for state in states} or {0.0}
    assert len(counts) == 1 or counts == {0.0}, "some parameters were stepped"
    return int(counts.pop())


def goes_on(optimizer, params, states):
    """Two more steps, after the steps that the counts name."""
    done = steps_done(optimizer)
    if done:
        assert same(snapshot(optimizer, params), states[done - 1])
    for step in range(done, done + 2):
        train(optimizer, params, step)
    assert same(snapshot(optimizer, params), states[done + 1])
    return done


@pytest.mark.sampled(cases=6)
@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_step(reference, before):
    kind, states = reference
    line, counts = 0, set()
    while True:
        kept.clear()
        optimizer, params = made(kind, before)
        set_grads(params, before)
        if not interrupted_at(line, optimizer.step):
            break
        counts.add(goes_on(optimizer, params, states))
        line += 1
    # Some interruptions came before the library's call, and some after it.
    assert line > 50 and counts == {before, before + 1}


@pytest.mark.parametrize("kind", ["undo", "stage"])
def test_a_rollback(kind):
    line, counts = 0, set()
    optimizer, params = made(kind)
    states = []
    for step in range(4):
        train(optimizer, params, step)
        states.append(snapshot(optimizer, params))
    while True:
        optimizer, params = made(kind, 2)
        if not interrupted_at(line, optimizer.rollback):
            break
        counts.add(goes_on(optimizer, params, states))
        line += 1
    assert counts == {1, 2}


@pytest.mark.parametrize("kind", ["undo", "stage"])
def test_a_rollback_after_an_interrupted_one(kind):
    """A rollback that did not reach the library can be repeated; one that did is not repeated on the restored values."""
    optimizer, params = made(kind, 1)
    after_one = snapshot(optimizer, params)
    line = 0
    while True:
        optimizer, params = made(kind, 2)
        if not interrupted_at(line, optimizer.rollback):
            break
        if steps_done(optimizer) == 2:
            optimizer.rollback()
        assert same(snapshot(optimizer, params), after_one)
        line += 1


@pytest.mark.parametrize("kind", ["split", "undo"])
def test_values_that_the_program_writes_after_an_interrupted_step(kind):
    """They are the new masters, and the step is not rolled back on them."""
    line = stepped = 0
    while True:
        optimizer, params = made(kind, 1)
        set_grads(params, 1)
        if not interrupted_at(line, optimizer.step):
            break
        with torch.no_grad():
            params[0].fill_(2.0)
        if kind == "split":
            assert torch.equal(optimizer.master(params[0]), torch.full((50,), 2.0))
            stepped += steps_done(optimizer) == 2
        elif steps_done(optimizer) == 2:
            stepped += 1
            with pytest.raises(spillway.InvalidArgumentError, match="was written to since the step"):
                optimizer.rollback()
        line += 1
    assert stepped


@pytest.mark.parametrize("tier", [None, own.TierOptions(None, part_elements=4096, pin_memory=False)])
def test_loading(tier):
    """It can be repeated, and no hook stays then."""
    source, _ = made("f32", 2)
    saved, line = source.state_dict(), 0
    while True:
        optimizer = own.AdamW(made("f32")[1], master="f32", tier=tier)
        hit = interrupted_at(line, lambda: optimizer.load_state_dict(saved))
        optimizer.load_state_dict(saved)
        assert not optimizer._optimizer_load_state_dict_pre_hooks
        for number, state in optimizer.state_dict()["state"].items():
            for key in ("step", "exp_avg", "exp_avg_sq"):
                assert torch.equal(state[key], saved["state"][number][key].to(state[key].dtype))
        optimizer.close()
        if not hit:
            break
        line += 1
    assert line > 5
