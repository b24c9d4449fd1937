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


@pytest.mark.parametrize("through", ["data", "numpy", "copy_"])
@pytest.mark.parametrize("at", [0, 4095, 4096, 8191, 8192, 9999])
def test_a_write_between_steps_makes_its_block_of_4096_elements_its_own_master(at, through):
    param = torch.nn.Parameter(torch.ones(10_000).bfloat16())
    optimizer = AdamW([param], lr=1e-4, weight_decay=0.0, master="split")
    for _ in range(3):
        param.grad = torch.ones_like(param)
        optimizer.step()
    kept = optimizer.master(param).clone()
    assert bool((kept < 1).all())
    if through == "data":
        param.data[at] = 2.0
    elif through == "numpy":
        param.detach().view(torch.int16).numpy()[at] = 0x4000
    else:
        with torch.no_grad():
            param[at].copy_(torch.tensor(2.0))
    expected = kept.clone()
    block = slice(at // 4096 * 4096, at // 4096 * 4096 + 4096)
    expected[block] = param.detach()[block].float()
    assert torch.equal(optimizer.master(param), expected)
    # A step without a gradient changes nothing else.
    optimizer.param_groups[0]["lr"] = 0.0
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert torch.equal(optimizer.master(param), expected)


def test_exchanged_and_negated_elements_are_seen():
    changes = {
        "neighbours": lambda values: values[[1, 0, *range(2, 8192)]],
        "stripes": lambda values: torch.cat([values[8:16], values[:8], values[16:]]),
        "blocks": lambda values: values.roll(4096),
        "negated": lambda values: -values,
        "two signs": lambda values: torch.cat([-values[:1], values[1:32], -values[32:33], values[33:]]),
        "reversed": lambda values: values.flip(0),
    }
    for name, change in changes.items():
        param = torch.nn.Parameter(torch.randn(8192).bfloat16())
        optimizer = AdamW([param], lr=1e-4, master="split")
        param.grad = torch.ones_like(param)
        optimizer.step()
        param.data.copy_(change(param.detach().clone()))
        master = optimizer.master(param)
        assert torch.equal(master[:4096], param.detach()[:4096].float()), name


def test_parameter_and_low_bits_that_are_loaded_in_place_both_count():
    param, other, optimizer = made()
    step(optimizer, param, other)
    values, low = param.detach().clone(), optimizer.state[param]["master_low"].clone()
    kept = optimizer.master(param).clone()
    step(optimizer, param, other)
    with torch.no_grad():
        param.copy_(values)
        optimizer.state[param]["master_low"].copy_(low)
    assert torch.equal(optimizer.master(param), kept)
    optimizer.param_groups[0]["lr"] = 0.0
    step(optimizer, param, other)
    assert torch.equal(optimizer.master(param), kept)
    write(param)
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


@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle", "two state dicts", "state_dict and master", "refused step"])
def test_weights_that_are_copied_in_and_out_around_a_save_keep_their_masters(way):
    param, other, optimizer = made()
    step(optimizer, param, other)
    kept, values = optimizer.master(param).clone(), param.detach().clone()
    write(param)
    if way == "deepcopy":
        copy.deepcopy((param, optimizer))
    elif way == "pickle":
        torch.save((param, optimizer), io.BytesIO())
    elif way == "refused step":
        state = optimizer.state[other].pop("exp_avg")
        with pytest.raises(spillway.InvalidArgumentError, match="lacks 'exp_avg'"):
            step(optimizer, param, other)
        optimizer.state[other]["exp_avg"] = state
    else:
        optimizer.state_dict()
    if way == "two state dicts":
        param.data.mul_(2)
        saved = copy.deepcopy(optimizer.state_dict())
        assert torch.equal(saved["state"][0]["master_low"], torch.zeros_like(saved["state"][0]["master_low"]))
    if way == "state_dict and master":
        assert is_written(optimizer, param)
    param.data.copy_(values)
    assert torch.equal(optimizer.master(param), kept)
    optimizer.param_groups[0]["lr"] = 0.0
    step(optimizer, param, other)
    assert torch.equal(optimizer.master(param), kept)


def test_what_was_put_aside_ends_with_the_next_step():
    param, other, optimizer = made()
    step(optimizer, param, other)
    values = param.detach().clone()
    write(param)
    optimizer.state_dict()
    step(optimizer, param, other)
    assert not torch.equal(optimizer.master(param), param.detach().float())
    param.data.copy_(values)
    assert torch.equal(optimizer.master(param), values.float())
