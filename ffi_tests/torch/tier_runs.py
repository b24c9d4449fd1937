"""Runs of optimizers with states on a tier, for the tests of it."""

import pytest
import torch
from tier_worker import options, random_grads

from spillway.torch._codes import decoded


def train(optimizer, params, steps):
    for step in steps:
        random_grads(params, step)
        optimizer.step()


def same(ones, others):
    return all(one.dtype is other.dtype and torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def same_states(one, other):
    assert one.keys() == other.keys()
    for number, state in other.items():
        assert state.keys() == one[number].keys() and all(torch.equal(one[number][key], value) for key, value in state.items()), number


def values(optimizer):
    """The states of an optimizer, with 8-bit moments as float32: so a state dict of a tier has them."""
    return {number: decoded(state) for number, state in optimizer.state_dict()["state"].items()}


@pytest.fixture
def tier(tmp_path):
    """Options of a tier on two paths."""
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        path.mkdir()
    return options(paths)
