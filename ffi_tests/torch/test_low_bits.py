"""The low bits of split masters once the program has written to the parameter: they are forgotten, in every order of steps, writes and
copies."""

import copy
import io

import pytest
import torch

import spillway
from spillway.torch import AdamW


def made(value=1.0):
    param, other = (torch.nn.Parameter(torch.full((500,), value).bfloat16()) for _ in range(2))
    optimizer = AdamW([param, other], lr=1e-3, master="split")
    return param, other, optimizer


def step(optimizer, *params):
    for param in params:
        param.grad = torch.linspace(-1, 1, 500).bfloat16()
    optimizer.step()


def write(param):
    with torch.no_grad():
        param.fill_(2.0)


def is_written(optimizer, param):
    return torch.equal(optimizer.master(param), torch.full((500,), 2.0))


def test_a_parameter_without_a_gradient_in_the_last_step():
    param, other, optimizer = made()
    step(optimizer, param, other)
    param.grad = None
    step(optimizer, other)
    write(param)
    assert is_written(optimizer, param)
    expected, _, fresh = made(2.0)
    param.grad = torch.zeros(500).bfloat16()
    for kind, target in ((fresh, expected), (optimizer, param)):
        kind.param_groups[0]["lr"] = 0.0
        target.grad = torch.zeros(500).bfloat16()
        kind.step()
    assert torch.equal(optimizer.master(param), fresh.master(expected))


def test_a_step_that_was_refused_before_the_write():
    param, other, optimizer = made()
    step(optimizer, param, other)
    state = optimizer.state[other].pop("exp_avg")
    with pytest.raises(spillway.InvalidArgumentError, match="lacks 'exp_avg'"):
        step(optimizer, param, other)
    write(param)
    optimizer.state[other]["exp_avg"] = state
    assert is_written(optimizer, param)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "state_dict"])
def test_a_copy_after_the_write(way):
    param, other, optimizer = made()
    step(optimizer, param, other)
    write(param)
    if way == "deepcopy":
        twin, copied = copy.deepcopy((param, optimizer))
    elif way == "pickle":
        file = io.BytesIO()
        torch.save((param, optimizer), file)
        file.seek(0)
        twin, copied = torch.load(file, weights_only=False)
    else:
        twin, _, copied = made(2.0)
        copied.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert is_written(copied, twin) and is_written(optimizer, param)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_write_to_a_copy(way):
    param, other, optimizer = made()
    step(optimizer, param, other)
    kept = optimizer.master(param).clone()
    if way == "deepcopy":
        twin, copied = copy.deepcopy((param, optimizer))
    else:
        file = io.BytesIO()
        torch.save((param, optimizer), file)
        file.seek(0)
        twin, copied = torch.load(file, weights_only=False)
    assert torch.equal(copied.master(twin), kept)
    write(twin)
    assert is_written(copied, twin) and torch.equal(optimizer.master(param), kept)


def test_loaded_low_bits_survive_the_loading_of_the_weights():
    param, other, optimizer = made()
    step(optimizer, param, other)
    saved, values, kept = copy.deepcopy(optimizer.state_dict()), param.detach().clone(), optimizer.master(param).clone()
    step(optimizer, param, other)
    optimizer.load_state_dict(saved)
    with torch.no_grad():
        param.copy_(values)
    assert torch.equal(optimizer.master(param), kept)
