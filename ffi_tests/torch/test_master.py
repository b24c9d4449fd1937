"""optimizer.master(parameter) has the values that the next step starts from, in memory and on a tier."""

import pytest
import torch

import spillway
from spillway import torch as own

BF16 = torch.bfloat16
KINDS = {
    "f32": {"master": "f32"},
    "split": {"master": "split"},
    "tier": {"tier": own.TierOptions([None], part_elements=70, pin_memory=False)},
}


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


def ones(kind, steps, after=lambda param: None):
    """Ones in bf16 after steps of 1e-4, which are below half a unit, and a call after each step."""
    param = torch.nn.Parameter(torch.ones(1000, dtype=BF16))
    optimizer = own.AdamW([param], lr=1e-4, weight_decay=0.0, **KINDS[kind])
    for _ in range(steps):
        param.grad = torch.ones_like(param)
        optimizer.step()
        with torch.no_grad():
            after(param)
    return param, optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_a_written_value_that_is_the_rounding_of_its_master_keeps_a_master(kind):
    param, optimizer = ones(kind, 1, lambda param: param.copy_(torch.ones(1000)))
    assert bool((optimizer.master(param) < 1).all())
    param.grad = torch.ones_like(param)
    optimizer.step()
    # Two steps on one master.
    assert bool(((optimizer.master(param) - 0.9998).abs() < 5e-6).all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_that_is_written_to_after_every_step_trains_with_f32_masters_only(kind):
    param, optimizer = ones(kind, 100, lambda param: param[:1].zero_())
    rest = optimizer.master(param)[1:]
    assert bool((rest == 1).all()) if kind == "split" else bool(((rest - 0.99).abs() < 1e-4).all())
    assert float(optimizer.master(param)[0].detach()) == 0 and float(param[0].detach()) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_after_loading_counts_as_the_loading_of_the_weights(kind):
    """A split master is then within half a unit of the written value. An f32 master has the value."""
    param, optimizer = ones(kind, 3)
    optimizer.load_state_dict(optimizer.state_dict())
    masters = optimizer.master(param).clone()
    with torch.no_grad():
        param.copy_(torch.ones(1000))
    assert torch.equal(optimizer.master(param), masters), "the weights that belong to the masters"
    with torch.no_grad():
        param.fill_(-3.015625)
    distance = (optimizer.master(param) + 3.015625).abs()
    assert bool((distance == 0).all()) if kind != "split" else bool(((distance > 0) & (distance <= 2**-8)).all())


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


def next_step(param, optimizer):
    """The parameter and its master after a step whose gradient is 0: the step changes neither."""
    param.grad = torch.zeros_like(param)
    optimizer.step()
    return param.detach(), optimizer.master(param)


def without_decay(**options):
    """Two steps of a bf16 parameter, after which no step with a gradient of 0 changes it."""
    param = torch.nn.Parameter(torch.linspace(-2, 2, 40).to(BF16))
    optimizer = own.Lion([param], lr=1e-3, betas=(0.0, 0.0), weight_decay=0.0, **options)
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()
    return param, optimizer


@pytest.mark.parametrize("undo", [False, True])
def test_only_written_elements_lose_their_f32_master_and_keep_every_bit(undo):
    param, optimizer = without_decay(master="f32", undo=undo)
    before = optimizer.master(param).clone()
    words = param.detach().view(torch.int16).numpy()
    other = [0x7FC1, 0xFF80, -0x8000, 0x0001, 0x7F80]
    words[3:8] = torch.tensor(other, dtype=torch.int32).to(torch.int16).numpy()
    written = param.detach()[3:8].clone()
    now, master = next_step(param, optimizer)
    assert torch.equal(master[:3], before[:3]) and torch.equal(master[8:], before[8:])
    assert torch.equal(master[4:8].view(torch.int32), written[1:].float().view(torch.int32)) and bool(master[3].isnan())
    assert torch.equal(now[4:8].view(torch.int16), written[1:].view(torch.int16)) and bool(now[3].isnan())
    if undo:
        optimizer.rollback()
        assert torch.equal(param.detach()[4:8].view(torch.int16), written[1:].view(torch.int16))
        assert torch.equal(optimizer.master(param)[8:], before[8:])


@pytest.mark.parametrize("undo", [False, True])
def test_a_master_that_the_program_writes_counts_unless_it_writes_to_the_parameter_too(undo):
    param, optimizer = without_decay(master="f32", undo=undo)
    master = optimizer.state[param]["master_param"]
    with torch.no_grad():
        master.fill_(1.0009765625)
    now, kept = next_step(param, optimizer)
    assert bool((kept == 1.0009765625).all()) and bool((now == 1).all())

    with torch.no_grad():
        master.fill_(3)
        param.fill_(5)
    now, kept = next_step(param, optimizer)
    assert bool((kept == 5).all()) and bool((now == 5).all())

    master.data.fill_(7)
    now, kept = next_step(param, optimizer)
    assert bool((kept == 5).all()) and bool((now == 5).all())


def test_reading_a_master_hides_no_later_write():
    param, optimizer = without_decay(master="f32")
    for value in (20.0, 30.0):
        param.data.fill_(value)
        assert bool((optimizer.master(param) == value).all())
    param.data.fill_(40.0)
    now, kept = next_step(param, optimizer)
    assert bool((kept == 40).all()) and bool((now == 40).all())


@pytest.mark.parametrize("kind", ["f32", "tier"])
@pytest.mark.parametrize("read", ["master", "state_dict"])
def test_a_read_while_averaged_weights_are_in_the_parameters_changes_no_master(kind, read):
    params, optimizer = trained(kind, 3)
    before = [optimizer.master(param).clone() for param in params]
    kept = [param.detach().clone() for param in params]
    with torch.no_grad():
        for param in params:
            param.mul_(0.5)
    # The read itself has the values that a step now would start from.
    if read == "master":
        read_now = [optimizer.master(param).clone() for param in params]
    else:
        state = optimizer.state_dict()["state"]
        read_now = [state[number].get("master_param", param.detach()) for number, param in enumerate(params)]
    if kind == "tier" or read == "master":
        assert all(torch.equal(one, param.float()) for one, param in zip(read_now, params))
    with torch.no_grad():
        for param, values in zip(params, kept):
            param.copy_(values)
    assert all(torch.equal(optimizer.master(param), master) for param, master in zip(params, before))


@pytest.mark.parametrize("kind", ["f32", "tier", "offload"])
def test_a_written_neighbour_of_a_master_in_the_middle_keeps_the_master(kind):
    middle = torch.tensor([0x3FDA8000, 0x3FDB8000], dtype=torch.int32).view(torch.float32)
    param = torch.nn.Parameter(middle.to(BF16))
    options = {"lr": 1e-3, "weight_decay": 0.0}
    optimizer = own.offload([param], **options) if kind == "offload" else own.AdamW([param], **options, **KINDS[kind])
    param.grad = torch.zeros_like(param)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["master_param"] = middle.clone()
    optimizer.load_state_dict(saved)
    for words in ([0x3FDA, 0x3FDB], [0x3FDB, 0x3FDC]):
        param.data.view(torch.int16).copy_(torch.tensor(words))
        param.grad = torch.zeros_like(param)
        optimizer.step()
        assert torch.equal(optimizer.state_dict()["state"][0]["master_param"], middle)
