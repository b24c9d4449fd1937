"""Moments in bf16, stochastic rounding and f32 masters of 16-bit parameters: values against torch, checkpoints, resumed runs, errors."""

import copy
import io

import pytest
import torch

from spillway import torch as own
from spillway.errors import InvalidArgumentError, UnsupportedError

BF16, F32 = torch.bfloat16, torch.float32
STOCHASTIC = {"moment_dtype": BF16, "moment_rounding": "stochastic"}
KINDS = [
    {"moment_dtype": BF16},
    STOCHASTIC,
    {"master": "f32"},
    {"master": "f32", **STOCHASTIC},
    {"master": "split"},
    {"master": "split", **STOCHASTIC},
]


def parameters(dtype=F32, seed=0):
    """Two parameters of this dtype around one that always is f32."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(kind))
        for shape, kind in [((40, 8), dtype), ((7,), F32), ((5000,), dtype)]
    ]


def random_grads(params, seed):
    generator = torch.Generator().manual_seed(1000 + seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def train(optimizer, params, steps):
    for step in steps:
        random_grads(params, step)
        optimizer.step()


def dtype_of(kind):
    return BF16 if "master" in kind else F32


def bits(optimizer, params):
    tensors = [*params, *(value for param in params for value in optimizer.state[param].values())]
    return [tensor.detach().clone() for tensor in tensors]


def same(ones, others):
    return all(one.dtype is other.dtype and torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad"])
def test_a_master_follows_torchs_f32_training_and_the_parameter_is_its_rounded_copy(name, dtype):
    ours = parameters(dtype)
    theirs = [torch.nn.Parameter(param.detach().float()) for param in ours]
    mine, plain = getattr(own, name)(ours, lr=1e-2, master="f32"), getattr(torch.optim, name)(theirs, lr=1e-2)
    for step in range(8):
        random_grads(ours, step)
        for one, other in zip(ours, theirs):
            other.grad = one.grad.float()
        mine.step()
        plain.step()
    assert set(mine.state[ours[1]]) == set(plain.state[theirs[1]]), "an f32 parameter has no master"
    for one, other in zip(ours, theirs):
        master = mine.state[one].get("master_param", one)
        torch.testing.assert_close(master, other, rtol=1e-5, atol=1e-6)
        assert torch.equal(one, master.to(one.dtype))


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "Lion", "Signum"])
def test_bf16_moments_are_the_f32_moments_rounded(name):
    ours, theirs = parameters(), parameters()
    mine, plain = getattr(own, name)(ours, lr=1e-2, moment_dtype=BF16), getattr(own, name)(theirs, lr=1e-2)
    for step in range(6):
        # Both begin the step with the same values, which bf16 holds.
        for one, other in zip(ours, theirs):
            other.data.copy_(one.data)
            for key, value in mine.state[one].items() if step else ():
                plain.state[other][key].copy_(value)
        random_grads(ours, step)
        random_grads(theirs, step)
        mine.step()
        plain.step()
        for one, other in zip(ours, theirs):
            assert torch.equal(one, other)
            for key, value in mine.state[one].items():
                assert torch.equal(value, plain.state[other][key].to(value.dtype)), key


def test_stochastic_rounding_keeps_what_round_to_nearest_loses():
    """With a constant gradient g, exp_avg_sq grows to g*g. To the nearest, it stops where 0.001 * (g*g - v) is half a unit."""
    result = {}
    for rounding in ("nearest", "stochastic"):
        param = torch.nn.Parameter(torch.zeros(20_000))
        optimizer = own.AdamW([param], lr=0.0, moment_dtype=BF16, moment_rounding=rounding)
        for _ in range(2000):
            param.grad = torch.ones(20_000)
            optimizer.step()
        result[rounding] = optimizer.state[param]["exp_avg_sq"].double().mean().item()
    exact = 1 - 0.999**2000
    assert result["nearest"] < 0.6 * exact
    assert result["stochastic"] == pytest.approx(exact, rel=2e-3)


def test_random_bits_differ_between_parameters_steps_and_seeds_only():
    def moments(seed, steps=1, threads=None):
        params = [torch.nn.Parameter(torch.zeros(300_000)) for _ in range(2)]
        optimizer = own.AdamW(params, rounding_seed=seed, **STOCHASTIC)
        for _ in range(steps):
            for param in params:
                param.grad = torch.full((300_000,), 0.3)
            optimizer.step()
        return [optimizer.state[param]["exp_avg"] for param in params]

    one, other = moments(5)
    assert one.unique().numel() == 2 and not torch.equal(one, other)
    assert torch.equal(moments(5)[0], one) and torch.equal(moments(5)[1], other)
    assert not torch.equal(moments(6)[0], one)
    up = [values == values.max() for values in (one, other)]
    share = up[0].double().mean().item()
    agree = (up[0] == up[1]).double().mean().item()
    assert agree == pytest.approx(share**2 + (1 - share) ** 2, abs=5 / 300_000**0.5)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(kind):
    whole = parameters(dtype_of(kind))
    uninterrupted = own.AdamW(whole, lr=1e-2, rounding_seed=3, **kind) if "moment_rounding" in kind else own.AdamW(whole, lr=1e-2, **kind)
    train(uninterrupted, whole, range(4))
    file = io.BytesIO()
    torch.save({"weights": [param.detach() for param in whole], "optimizer": uninterrupted.state_dict()}, file)
    train(uninterrupted, whole, range(4, 8))

    file.seek(0)
    loaded = torch.load(file)
    resumed = [torch.nn.Parameter(weight) for weight in loaded["weights"]]
    optimizer = own.AdamW(resumed, lr=1e-2, **({"rounding_seed": 3} if "moment_rounding" in kind else {}), **kind)
    optimizer.load_state_dict(loaded["optimizer"])
    train(optimizer, resumed, range(4, 8))
    assert same(bits(optimizer, resumed), bits(uninterrupted, whole))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_copies_and_pickles_step_alike(kind):
    params = parameters(dtype_of(kind))
    optimizer = own.AdamW(params, **kind)
    train(optimizer, params, range(3))
    twin, twins = copy.deepcopy((optimizer, params))
    train(optimizer, params, range(3, 6))
    train(twin, twins, range(3, 6))
    assert same(bits(optimizer, params), bits(twin, twins))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_checkpoints_of_torch_load_and_torch_loads_ours(kind):
    params, theirs = parameters(dtype_of(kind)), parameters(dtype_of(kind))
    plain = torch.optim.AdamW(theirs, lr=1e-2)
    train(plain, theirs, range(3))
    optimizer = own.AdamW(params, lr=1e-2, **kind)
    for one, other in zip(params, theirs):
        one.data.copy_(other)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    train(optimizer, params, range(3, 5))
    assert optimizer.state[params[0]]["exp_avg"].dtype is kind.get("moment_dtype", F32)
    assert optimizer.state[params[0]]["step"] == 5
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(plain, theirs, range(5, 7))
    assert plain.state[theirs[0]]["step"] == 7


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.get("master") != "split"], ids=str)
def test_a_rollback_restores_every_bit(kind):
    params = parameters(dtype_of(kind))
    optimizer = own.AdamW(params, lr=1e-2, undo=True, **kind)
    train(optimizer, params, range(3))
    before = bits(optimizer, params)
    for step in range(3, 6):
        train(optimizer, params, [step])
        assert not same(bits(optimizer, params), before)
        optimizer.rollback()
        assert same(bits(optimizer, params), before)
    train(optimizer, params, [6])


def test_a_master_takes_the_values_that_the_program_wrote():
    params = parameters(BF16)
    optimizer = own.AdamW(params, lr=1e-2, master="f32")
    train(optimizer, params, range(3))
    before = optimizer.state[params[0]]["master_param"].clone()
    with torch.no_grad():
        params[0][3].fill_(2.0)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.param_groups[0]["weight_decay"] = 0.0
    train(optimizer, params, [3])
    master = optimizer.state[params[0]]["master_param"]
    assert torch.equal(master[3], torch.full((8,), 2.0)) and torch.equal(params[0][3], torch.full((8,), 2.0, dtype=BF16))
    untouched = torch.arange(40) != 3
    assert torch.equal(master[untouched], before[untouched])


def test_parameters_with_and_without_masters_in_any_order():
    generator = torch.Generator().manual_seed(0)
    kinds = [BF16, BF16, F32, BF16, F32, F32, torch.float16, BF16] * 40
    params = [torch.nn.Parameter(torch.randn(33, generator=generator).to(kind)) for kind in kinds]
    theirs = [torch.nn.Parameter(param.detach().float()) for param in params]
    optimizer, plain = own.AdamW(params, master="f32"), torch.optim.AdamW(theirs)
    for step in range(4):
        random_grads(params, step)
        for number, (one, other) in enumerate(zip(params, theirs)):
            if number % 11 == step:
                one.grad = None
            other.grad = None if one.grad is None else one.grad.float()
        optimizer.step()
        plain.step()
    for one, other in zip(params, theirs):
        torch.testing.assert_close(optimizer.state[one].get("master_param", one), other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda p: own.AdamW(p, moment_dtype=torch.float64), "moment_dtype is torch.float64"),
        (lambda p: own.AdamW(p, moment_rounding="up"), "moment_rounding is 'up'"),
        (lambda p: own.AdamW(p, moment_rounding="stochastic"), 'with moment_dtype="bf16"'),
        (lambda p: own.Lion(p, **STOCHASTIC), "is for Adam and AdamW"),
        (lambda p: own.AdamW(p, rounding_seed=-1, **STOCHASTIC), "rounding_seed is -1"),
        (lambda p: own.AdamW(p, master="bf16"), "master is 'bf16'"),
    ],
    ids=range(6),
)
def test_arguments_out_of_range_are_refused(make, message):
    with pytest.raises((InvalidArgumentError, UnsupportedError), match=message):
        make(parameters())


def test_what_cannot_be_stepped_is_named_and_nothing_is_stepped():
    params = [torch.nn.Parameter(torch.zeros(8)), torch.nn.Parameter(torch.zeros(8, dtype=torch.float64))]
    for kind, second in [({"moment_dtype": BF16}, torch.float64), ({"master": "f32"}, torch.float64), (STOCHASTIC, BF16)]:
        params[1] = torch.nn.Parameter(torch.zeros(8, dtype=second))
        optimizer = own.AdamW([{"params": params[:1]}, {"params": params[1:]}], **kind)
        random_grads(params, 0)
        with pytest.raises(UnsupportedError, match=r"param_groups\[1\]\['params'\]\[0\]"):
            optimizer.step()
        assert not any(param.any() for param in params)


def test_a_state_of_another_dtype_is_refused():
    params = parameters()
    optimizer = own.AdamW(params, moment_dtype=BF16)
    train(optimizer, params, range(2))
    before = [param.detach().clone() for param in params]
    optimizer.state[params[2]]["exp_avg"] = optimizer.state[params[2]]["exp_avg"].float()
    random_grads(params, 2)
    with pytest.raises(
        UnsupportedError, match=r"\['params'\]\[2\] is torch.float32, its state 'exp_avg' torch.float32; cast the state to torch.bf"
    ):
        optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(params, before))
