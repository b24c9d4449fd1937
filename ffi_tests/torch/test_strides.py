"""States whose strides are not those of a contiguous parameter, and NaN masters."""

import copy

import pytest
import torch

import spillway
from spillway import torch as own


def convolution(memory_format):
    torch.manual_seed(0)
    return torch.nn.Conv2d(3, 4, 3).to(memory_format=memory_format)


def train(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(10 + step)
        optimizer.zero_grad()
        model(torch.randn(1, 3, 8, 8)).square().sum().backward()
        optimizer.step()


def weights(model):
    return torch.cat([param.detach().flatten() for param in model.parameters()])


@pytest.mark.parametrize("beyond", [{}, {"moment_dtype": torch.float32}])
def test_a_checkpoint_of_channels_last(beyond):
    source = convolution(torch.channels_last)
    optimizer = torch.optim.AdamW(source.parameters())
    train(source, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    assert not saved["state"][0]["exp_avg"].is_contiguous()
    model = convolution(torch.contiguous_format)
    model.load_state_dict(source.state_dict())
    ours = own.AdamW(model.parameters(), **beyond)
    ours.load_state_dict(saved)
    train(model, ours, range(2, 4))
    train(source, optimizer, range(2, 4))
    torch.testing.assert_close(weights(model), weights(source), rtol=1e-5, atol=1e-6)
    assert ours.state[model.weight]["exp_avg"].is_contiguous()


def test_another_memory_format_between_two_steps():
    def trained(kind):
        model = convolution(torch.channels_last)
        optimizer = kind(model.parameters())
        for step in range(5):
            if step in (2, 4):
                model.to(memory_format=torch.contiguous_format if step == 2 else torch.channels_last)
            train(model, optimizer, [step])
        return weights(model)

    torch.testing.assert_close(trained(own.AdamW), trained(torch.optim.AdamW), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["f32", "split"])
def test_a_saved_master_of_other_strides(kind):
    model = convolution(torch.contiguous_format).bfloat16()
    optimizer = own.AdamW(model.parameters(), master=kind)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    expected = optimizer.master(model.weight).clone()
    key = "master_param" if kind == "f32" else "master_low"
    state = optimizer.state[model.weight]
    state[key] = state[key].to(memory_format=torch.channels_last)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert torch.equal(optimizer.master(model.weight), expected) and state[key].is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_with_nan_can_be_rolled_back(dtype):
    """A master that is NaN rounds to a parameter that is NaN: nothing is written to it outside of the step."""
    param = torch.nn.Parameter(torch.ones(100, dtype=dtype))
    optimizer = own.AdamW([param], master="f32", undo=True)
    for step in range(3):
        param.grad = torch.ones(100, dtype=dtype)
        if step == 0:
            param.grad[::2] = float("nan")
        optimizer.step()
    master = optimizer.state[param]["master_param"].clone()
    assert optimizer.master(param).isnan().any()
    other = copy.deepcopy(optimizer)
    optimizer.step()
    assert other.master(other.param_groups[0]["params"][0]).isnan().any()
    optimizer.master(param)
    optimizer.rollback()
    assert torch.equal(optimizer.state[param]["master_param"].view(torch.int32), master.view(torch.int32))


def test_the_master_of_a_closed_tier_is_an_error_for_float32_too():
    param = torch.nn.Parameter(torch.ones(8))
    optimizer = own.AdamW([param], tier=own.TierOptions(None, pin_memory=False))
    assert torch.equal(optimizer.master(param), param)
    optimizer.close()
    with pytest.raises(spillway.InvalidArgumentError, match="closed"):
        optimizer.master(param)
