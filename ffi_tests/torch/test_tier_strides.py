"""States on a tier of parameters whose elements fill their memory in another order, as those of channels_last do: the tier has the elements
in row-major order, so that the bits are those of contiguous parameters."""

import random

import pytest
import torch
from dcp_worker import load, state_of
from offload_runs import bits
from tier_runs import same, same_states
from tier_worker import BF16_MOMENTS

import spillway
from spillway import torch as own
from spillway.torch import _copies, dcp

#: Elements of a subgroup: a subgroup ends within a row of a kernel, some per parameter, one for all.
PARTS = (50, 700, 1 << 20)
LAST, ROWS = torch.channels_last, torch.contiguous_format


def network(memory_format=LAST, dtype=torch.float32):
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 6, 3), torch.nn.BatchNorm2d(6), torch.nn.Conv2d(6, 4, (2, 3)), torch.nn.Flatten()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(100, 5)).to(dtype).to(memory_format=memory_format)


def transposed(model):
    """Gives the weights of a linear layer columns that lie one after another."""
    model[-1].weight.data = model[-1].weight.data.t().contiguous().t()
    return model


def options(directory=None, **more):
    return own.TierOptions(directory, **{"part_elements": 50, "pin_memory": False, "durability": "process", **more})


def backward(model, step, spike=False):
    torch.manual_seed(100 + step)
    x = torch.randn(2, 3, 8, 9).to(model[0].weight.dtype).to(memory_format=LAST)
    (model(x).float().square().mean() * (300 if spike else 1)).backward()


def give_grads(model, twin):
    """The twin's gradients are those of the model."""
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        other.grad = None if param.grad is None else param.grad.detach().clone(memory_format=ROWS)


def pair_of(tier, dtype=torch.float32, overlap=False, **given):
    """A model whose states are on a tier, a contiguous twin whose states are in memory, and their optimizers."""
    models = transposed(network(LAST, dtype)), network(ROWS, dtype)
    assert [param.is_contiguous() for param in models[0].parameters()].count(False) == 3
    wide = {} if "moment_dtype" in given and dtype is torch.float32 else {"master": "f32"}
    made = own.AdamW(models[0].parameters(), lr=1e-2, tier=tier, overlap=overlap, **given)
    return models, (made, own.AdamW(models[1].parameters(), lr=1e-2, **wide, **given))


def step_both(models, optimizers, step, **more):
    backward(models[0], step, **more)
    give_grads(*models)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def agree(models, optimizers):
    assert same(*(list(model.parameters()) for model in models))
    same_states(*(optimizer.state_dict()["state"] for optimizer in optimizers))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"max_norm": 1.0},
        {"dtype": torch.bfloat16, "max_norm": 0.01},
        {"dtype": torch.float16},
        {**BF16_MOMENTS, "dtype": torch.bfloat16},
        {"maximize": True, "weight_decay": 0.2},
    ],
    ids=str,
)
def test_a_run_has_the_bits_of_contiguous_parameters_in_memory(given, overlap, part):
    models, optimizers = pair_of(options([None, None], part_elements=part), overlap=overlap, **given)
    for step in range(6):
        step_both(models, optimizers, step, spike=step == 3)
        assert optimizers[0].grad_norm == optimizers[1].grad_norm
        agree(models, optimizers)
    assert models[0][0].weight.is_contiguous(memory_format=LAST) and models[0][-1].weight.stride() == (1, 5)
    optimizers[0].close()


@pytest.mark.parametrize("overlap", [False, True])
def test_it_trains_as_torchs_class(overlap):
    models = network(), network()
    optimizers = (
        own.AdamW(models[0].parameters(), lr=1e-2, tier=options(), overlap=overlap),
        torch.optim.AdamW(models[1].parameters(), lr=1e-2),
    )
    for step in range(6):
        # The same gradients: the bias before the normalisation has one of rounding errors only, which Adam makes a whole step of.
        step_both(models, optimizers, step)
    for one, other in zip(*(model.parameters() for model in models)):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
        assert one.stride() == other.stride()
    optimizers[0].close()


def with_strides(tensor, chance):
    """The same values in another order of memory."""
    order = chance.sample(range(tensor.dim()), tensor.dim())
    back = [order.index(place) for place in range(tensor.dim())]
    return tensor.permute(order).contiguous().permute(back)


def _grad(param, chance):
    param.grad = with_strides(param.grad, chance)


def _gaps(param, chance):
    param.grad = torch.stack([param.grad, param.grad], -1)[..., 0]


def _expanded(param, chance):
    param.grad = torch.tensor(0.25).expand(param.shape)


def _strides(param, chance):
    param.data = with_strides(param.data, chance)


def _values(param, chance):
    param.data.mul_(0.5)


def _data(param, chance):
    param.data = with_strides(param.data * 0.75, chance)


#: What a program does to a parameter between backward and step.
CHANGES = {"grad": _grad, "gaps": _gaps, "expanded": _expanded, "strides": _strides, "values": _values, "data": _data}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_any_strides_of_parameters_and_gradients_between_any_steps(seed, overlap):
    chance = random.Random(seed)
    models, optimizers = pair_of(options(part_elements=PARTS[seed % 2]), overlap=overlap, max_norm=chance.choice((None, 0.5)))
    params, others = (list(model.parameters()) for model in models)
    for step in range(8):
        backward(models[0], step)
        give_grads(*models)
        for param in chance.sample(params, 3):
            CHANGES[chance.choice(sorted(CHANGES))](param, chance)
        give_grads(*models)
        with torch.no_grad():
            for param, other in zip(params, others):
                other.copy_(param)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert same(params, others), step
    agree(models, optimizers)
    optimizers[0].close()


@pytest.mark.parametrize("overlap", [False, True])
def test_other_strides_over_the_same_memory_are_other_values(overlap):
    params = [torch.nn.Parameter(torch.arange(9.0).view(3, 3)) for _ in range(2)]
    optimizers = own.AdamW(params[:1], lr=1e-2, tier=options(), overlap=overlap), own.AdamW(params[1:], lr=1e-2, master="f32")
    for step in range(3):
        for param, optimizer in zip(params, optimizers):
            (param * torch.arange(9.0).view(3, 3)).sum().backward()
            if step == 1:
                # Object, version, address and shape stay, and so do the bytes of the memory.
                param.data = param.data.t() if param is params[0] else param.data.t().contiguous()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*params)
    optimizers[0].close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overlap", [False, True])
def test_rollback_resume_and_another_memory_format_at_the_resume(overlap, dtype, tmp_path):
    models, optimizers = pair_of(options(tmp_path), dtype, overlap)
    for step in range(3):
        step_both(models, optimizers, step)
    committed = [param.detach().clone() for param in models[0].parameters()]
    optimizers[0].commit()
    backward(models[0], 7)
    optimizers[0].step()
    backward(models[0], 8)
    optimizers[0].rollback()
    optimizers[0].zero_grad()
    assert same(models[0].parameters(), committed) and not models[0][0].weight.is_contiguous()
    step_both(models, optimizers, 3)
    agree(models, optimizers)
    optimizers[0].commit()
    optimizers[0].close()
    for number, memory_format in enumerate((ROWS, LAST, ROWS)):
        model = network(memory_format, dtype)
        again = own.AdamW(model.parameters(), lr=1e-2, tier=options(tmp_path), overlap=overlap)
        assert again.resumed_step == 4 + number
        resumed = (model, models[1]), (again, optimizers[1])
        agree(*resumed)
        step_both(*resumed, 4 + number)
        agree(*resumed)
        again.commit()
        again.close()


def test_snapshots_and_other_jobs_have_the_elements_in_row_major_order(tmp_path):
    models, optimizers = pair_of(options(tmp_path, job="first"))
    for step in range(2):
        step_both(models, optimizers, step)
    optimizers[0].commit()
    optimizers[0].snapshot(tmp_path / "snapshot").wait()
    expected = [param.detach().clone() for param in models[1].parameters()]
    step_both(models, optimizers, 2)
    optimizers[0].restore(tmp_path / "snapshot")
    assert same(models[0].parameters(), expected) and not models[0][0].weight.is_contiguous()
    optimizers[0].close()
    for source, memory_format in (("first", ROWS), ("snapshot", LAST)):
        model = network(memory_format)
        tier = options(tmp_path, job=f"after {source}", begin_from=tmp_path / source)
        optimizer = own.AdamW(model.parameters(), lr=1e-2, tier=tier)
        assert optimizer.resumed_step == 2 and same(model.parameters(), expected)
        optimizer.close()


def test_state_dicts_of_torch_and_of_either_memory_format(tmp_path):
    plain = network()
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(2):
        backward(plain, step)
        theirs.step()
        theirs.zero_grad()
    assert not theirs.state_dict()["state"][0]["exp_avg"].is_contiguous()
    for memory_format in (LAST, ROWS):
        model = network(memory_format)
        model.load_state_dict(plain.state_dict())
        optimizer = own.AdamW(model.parameters(), lr=1e-2, tier=options())
        optimizer.load_state_dict(theirs.state_dict())
        same_states(optimizer.state_dict()["state"], theirs.state_dict()["state"])
        dcp.save(state_of(model, optimizer), tmp_path / str(memory_format))
        optimizer.close()
    for source, memory_format in ((ROWS, LAST), (LAST, ROWS)):
        model = network(memory_format)
        optimizer = own.AdamW(model.parameters(), lr=1e-2, tier=options())
        load(model, optimizer, tmp_path / str(source))
        assert same(model.parameters(), plain.parameters())
        same_states(optimizer.state_dict()["state"], theirs.state_dict()["state"])
        back = torch.optim.AdamW(network().parameters(), lr=1e-2)
        back.load_state_dict(optimizer.state_dict())
        optimizer.close()


def test_masters_have_the_order_of_their_parameters():
    models, optimizers = pair_of(options(), torch.bfloat16)
    step_both(models, optimizers, 0)
    for param, other in zip(*(model.parameters() for model in models)):
        assert torch.equal(optimizers[0].master(param), optimizers[1].master(other))
    optimizers[0].close()


@pytest.mark.parametrize("overlap", [False, True])
def test_copies_are_made_of_such_tensors_only_and_their_memory_is_made_once(overlap, monkeypatch):
    made, memory = [], _copies.HostLink.memory
    monkeypatch.setattr(_copies.HostLink, "memory", lambda *given: (made.append(memory(*given)), made[-1])[1])
    models, optimizers = pair_of(options(), overlap=overlap)
    for step in range(4):
        step_both(models, optimizers, step)
    every = sum(param.nbytes for param in models[0].parameters())
    apart = sum(param.nbytes for param in models[0].parameters() if not param.is_contiguous())
    # With overlap the new weights of all parameters wait for step().
    assert sum(tensor.nbytes for tensor in made) == apart + (every if overlap else apart)
    optimizers[0].close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_refused_step_changes_nothing_and_can_be_repeated(overlap):
    models, optimizers = pair_of(options(), overlap=overlap, max_norm=1.0)
    step_both(models, optimizers, 0)
    backward(models[0], 1)
    give_grads(*models)
    weight = models[0][0].weight
    before, value = [bits(param.detach()) for param in models[0].parameters()], weight.grad[0, 0, 0, 0].item()
    weight.grad[0, 0, 0, 0] = float("nan")
    with pytest.raises(spillway.InvalidArgumentError, match="Inf or NaN"):
        optimizers[0].step()
    assert [bits(param.detach()) for param in models[0].parameters()] == before
    weight.grad[0, 0, 0, 0] = value
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    agree(models, optimizers)
    optimizers[0].close()


def test_a_distributed_tensor_has_states_with_strides_of_their_own(tmp_path):
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        mesh, value = init_device_mesh("cpu", (1,)), torch.randn(6, 4, 3, 3)

        def placed(value):
            return DTensor.from_local(value.to(memory_format=LAST), mesh, [Shard(0)])

        param = torch.nn.Parameter(placed(value))
        plain = torch.nn.Parameter(value.clone())
        optimizer, other = own.AdamW([param], lr=1e-2, tier=options()), own.AdamW([plain], lr=1e-2, master="f32")
        for _ in range(2):
            param.grad, plain.grad = placed(value), value.clone()
            optimizer.step()
            other.step()
        assert torch.equal(param.full_tensor(), plain) and not param.to_local().is_contiguous()
        state, expected = (made.state_dict()["state"][0]["exp_avg"] for made in (optimizer, other))
        assert torch.equal(state.full_tensor(), expected) and state.stride() == state.to_local().stride() == expected.stride()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.close()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(1).expand(6), torch.zeros(8)[::2], torch.zeros(4, 6)[:, :3]],
    ids=("one value for several elements", "gaps", "gaps between rows"),
)
def test_other_strides_are_refused(tensor):
    with pytest.raises(spillway.UnsupportedError, match=r"\['params'\]\[0\] .* with strides .* whose elements fill their memory"):
        own.AdamW([torch.nn.Parameter(tensor)], tier=options())
