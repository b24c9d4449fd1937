"""States on a tier of models with frozen parameters: these have none, as with torch."""

import os

import pytest
import torch
from tier_runs import same, same_states, tier, train

import spillway
from spillway import torch as own


def frozen(dtype=torch.float32, count=200_000):
    return torch.nn.Parameter(torch.ones(count).to(dtype), requires_grad=False)


def trained(count=3):
    generator = torch.Generator().manual_seed(5)
    return [torch.nn.Parameter(torch.randn(50 + at, generator=generator)) for at in range(count)]


def around(params):
    """The parameters with frozen ones between them."""
    return [frozen(), params[0], frozen(torch.int8), frozen(torch.bfloat16), *params[1:], frozen(torch.float64)]


def size_of(paths):
    return sum(os.stat(os.path.join(root, name)).st_blocks * 512 for path in paths for root, _, names in os.walk(path) for name in names)


def test_frozen_parameters_take_no_room_and_are_not_written(tier):
    ours, theirs = trained(), trained()
    everything = around(ours)
    mine, other = own.AdamW(everything, lr=1e-2, tier=tier), own.AdamW(around(theirs), lr=1e-2)
    for optimizer, params in ((mine, ours), (other, theirs)):
        train(optimizer, params, range(3))
    mine.commit()
    # The states of the frozen parameters would take 7 MB.
    assert size_of(tier.paths) < 1_000_000
    assert same(ours, theirs)
    same_states(mine.state_dict()["state"], other.state_dict()["state"])
    assert all(bool((param == 1).all()) for param in everything if not param.requires_grad)
    assert torch.equal(mine.master(everything[0]), torch.ones(200_000))
    other.load_state_dict(mine.state_dict())
    mine.load_state_dict(other.state_dict())
    mine.close()
    again = own.AdamW(around(ours), lr=1e-2, tier=tier)
    assert again.resumed_step == 3 and same(ours, theirs)
    train(again, ours, [3])
    train(other, theirs, [3])
    assert same(ours, theirs)
    with torch.no_grad():
        everything[0].fill_(2.0)
        ours[0].fill_(2.0)
    again.rollback()
    assert float(again.state[ours[0]]["step"]) == 3
    assert bool((everything[0] == 2).all()) and not bool((ours[0] == 2).any()), "a rollback restores what has states"


def test_all_parameters_may_be_frozen(tier):
    optimizer = own.AdamW([frozen()], tier=tier)
    optimizer.step()
    optimizer.commit()
    assert optimizer.state_dict()["state"] == {}


def test_a_parameter_that_is_unfrozen_later_is_an_error_that_names_it(tier):
    params = trained()
    late = frozen(count=10)
    optimizer = own.AdamW([*params, late], lr=1e-2, tier=tier)
    train(optimizer, params, range(2))
    optimizer.commit()
    late.requires_grad_(True)
    late.grad = torch.ones(10)
    before = [param.detach().clone() for param in (*params, late)]
    with pytest.raises(spillway.InvalidArgumentError, match=r"param_groups\[0\]\['params'\]\[3\] has a gradient and no states on the tier"):
        optimizer.step()
    assert same([*params, late], before) and float(optimizer.state[params[0]]["step"]) == 2
    late.grad = None
    train(optimizer, params, [2])
    optimizer.close()
    with pytest.raises(spillway.InvalidArgumentError, match=r"\[3\] requires a gradient, and the tier was committed without states for it"):
        own.AdamW([*params, late], lr=1e-2, tier=tier)
    saved = own.AdamW([*params, late])
    train(saved, [*params, late], [0])
    again = own.AdamW([*params, late.requires_grad_(False)], lr=1e-2, tier=tier)
    with pytest.raises(spillway.InvalidArgumentError, match=r"\[3\] has no states on the tier.*nothing was loaded"):
        again.load_state_dict(saved.state_dict())
    assert float(again.state[params[0]]["step"]) == 2


def test_a_parameter_that_is_frozen_later_keeps_its_states(tier):
    ours, theirs = trained(), trained()
    mine, other = own.AdamW(ours, lr=1e-2, tier=tier), own.AdamW(theirs, lr=1e-2)
    for optimizer, params in ((mine, ours), (other, theirs)):
        train(optimizer, params, range(2))
    mine.commit()
    mine.close()
    ours[1].requires_grad_(False)
    ours[1].grad = None
    again = own.AdamW(ours, lr=1e-2, tier=tier)
    train(again, [ours[0], ours[2]], [2])
    again.commit()
    again.close()
    ours[1].requires_grad_(True)
    again = own.AdamW(ours, lr=1e-2, tier=tier)
    theirs[1].grad = None
    train(other, [theirs[0], theirs[2]], [2])
    train(again, ours, [3])
    train(other, theirs, [3])
    assert same(ours, theirs)
