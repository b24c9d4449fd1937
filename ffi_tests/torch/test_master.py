"""optimizer.master(parameter) has the values that the next step starts from, in memory and on a tier."""

import pytest
import torch

import spillway
from spillway import torch as own

BF16 = torch.bfloat16
KINDS = {"f32": {"master": "f32"}, "split": {"master": "split"}, "tier": {"tier": own.TierOptions([None], part_elements=70, pin_memory=False)}}


def trained(kind, steps):
    """Parameters and their optimizer after some steps."""
    generator = torch.Generator().manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(200, generator=generator).to(dtype)) for dtype in (BF16, torch.float32, BF16)]
    optimizer = own.AdamW(params, lr=1e-3, **KINDS[kind])
    for step in range(steps):
        for param in params:
            param.grad = torch.randn(200, generator=generator).to(param.dtype)
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_the_master_after_steps_is_that_of_f32_masters_in_memory(kind):
    (params, optimizer), (others, reference) = trained(kind, 4), trained("f32", 4)
    for param, other in zip(params, others):
        master = optimizer.master(param)
        assert master.dtype is torch.float32 and torch.equal(master, reference.master(other))
    assert not torch.equal(optimizer.master(params[0]), params[0].float()), "a master has more bits than its parameter"


@pytest.mark.parametrize("kind", KINDS)
def test_the_master_before_the_first_step_is_the_parameter_in_float32(kind):
    params, optimizer = trained(kind, 0)
    for param in params:
        assert torch.equal(optimizer.master(param), param.float()) and optimizer.master(param).dtype is torch.float32
    # The calls have left no state that the first step would take for a whole one.
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_the_master_has_the_values_that_the_program_has_written(kind):
    params, optimizer = trained(kind, 3)
    untouched = optimizer.master(params[2]).clone()
    with torch.no_grad():
        for param in params[:2]:
            param.fill_(2.5)
    for param in params[:2]:
        assert torch.equal(optimizer.master(param), torch.full((200,), 2.5))
    assert torch.equal(optimizer.master(params[2]), untouched)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_another_optimizer_is_refused(kind):
    params, optimizer = trained(kind, 1)
    for other in (torch.nn.Parameter(torch.zeros(200, dtype=BF16)), params[0].detach().clone(), params[0].data, 5):
        with pytest.raises(spillway.InvalidArgumentError, match="not a parameter of this optimizer"):
            optimizer.master(other)


def test_the_master_of_a_closed_tier_is_an_error():
    params, optimizer = trained("tier", 1)
    optimizer.close()
    with pytest.raises(spillway.SpillwayError, match="closed"):
        optimizer.master(params[0])
