"""master="split": the same masters, bit for bit, as master="f32", in 10 bytes per parameter; checkpoints, writes by the program, errors."""

import copy
import io

import pytest
import torch

import spillway
from spillway import torch as own

BF16, F32 = torch.bfloat16, torch.float32
STOCHASTIC = {"moment_dtype": BF16, "moment_rounding": "stochastic", "rounding_seed": 5}


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(kind))
        for shape, kind in [((40, 8), BF16), ((7,), F32), ((70_001,), BF16), ((), BF16), ((0,), BF16)]
    ]


def random_grads(params, seed, scale=1.0):
    generator = torch.Generator().manual_seed(1000 + seed)
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * scale).to(param.dtype)


def pair(name="AdamW", **options):
    """The same training with split and with f32 masters."""
    made = []
    for master in ("split", "f32"):
        params = parameters()
        made.append((params, getattr(own, name)(params, lr=1e-2, master=master, **options)))
    return made


def nearest(master):
    """The bf16 number nearest to a master, ties away from zero. The tests of the kernels compare it with distances in float64."""
    bits = master.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return torch.where(master.isnan(), 0x7FC0, ((bits + 0x8000) >> 16).to(torch.int16)).to(torch.int16).view(BF16)


def assert_same(split, whole):
    """Equal masters and moments; the parameter of a split master is the master rounded to the nearest."""
    for one, other in zip(split[0], whole[0], strict=True):
        master = split[1].master(one)
        assert torch.equal(master, whole[1].master(other)) and master.dtype is F32
        assert torch.equal(one, nearest(master.contiguous()) if one.dtype is BF16 else master)
        for key, value in whole[1].state[other].items():
            if key != "master_param":
                assert torch.equal(split[1].state[one][key], value), key


@pytest.mark.parametrize(
    "name, options",
    [
        ("AdamW", {}),
        ("Adam", {"weight_decay": 0.1}),
        ("Adagrad", {}),
        ("Lion", {"weight_decay": 0.1}),
        ("Signum", {"weight_decay": 0.1}),
        ("AdamW", {"moment_dtype": BF16}),
        ("AdamW", STOCHASTIC),
        ("AdamW", {"max_norm": 1.0}),
        ("AdamW", {"skip_nonfinite": True}),
        ("AdamW", {"maximize": True}),
    ],
    ids=str,
)
def test_masters_have_the_bits_of_f32_masters(name, options):
    split, whole = pair(name, **options)
    for step in range(12):
        for params, optimizer in (split, whole):
            random_grads(params, step)
            if options.get("skip_nonfinite") and step == 5:
                params[2].grad[11] = float("nan")
            optimizer.step()
        assert_same(split, whole)


def test_a_split_master_takes_two_bytes():
    (params, optimizer), _ = pair()
    random_grads(params, 0)
    optimizer.step()
    state = optimizer.state[params[0]]
    assert sorted(state) == ["exp_avg", "exp_avg_sq", "master_low", "step"]
    assert state["master_low"].dtype is torch.int16 and state["exp_avg"].dtype is F32
    assert sum(state[key].element_size() for key in ("master_low", "exp_avg", "exp_avg_sq")) == 10
    assert sorted(optimizer.state[params[1]]) == ["exp_avg", "exp_avg_sq", "step"]


def test_ties_infinity_and_nan_of_every_sign():
    """Masters at exact ties, at the largest finite numbers, Inf and NaN, which the step leaves or makes."""
    values = [0x3F808000, 0x3F818000, 0xBF808000, 0xBF818000, 0x7F7FFFFF, 0xFF7F8000, 0x00008000, 0x80008000, 0x7F800000, 0x7FC00000, 1]
    masters = torch.tensor([value - 2**32 * (value >> 31) for value in values], dtype=torch.int32).view(F32)
    params = [torch.nn.Parameter(nearest(masters)), torch.nn.Parameter(masters.bfloat16())]
    optimizers = [
        own.AdamW([params[0]], lr=0.0, weight_decay=0, master="split"),
        own.AdamW([params[1]], lr=0.0, weight_decay=0, master="f32"),
    ]
    for param, optimizer in zip(params, optimizers):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    low = (masters.view(torch.int32) & 0xFFFF).to(torch.int16)
    optimizers[0].state[params[0]]["master_low"].copy_(low)
    optimizers[1].state[params[1]]["master_param"].copy_(masters)
    for param, optimizer in zip(params, optimizers):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    found = [optimizer.master(param) for optimizer, param in zip(optimizers, params)]
    assert torch.equal(found[0].isnan(), found[1].isnan()) and torch.equal(params[0].isnan(), found[1].isnan())
    finite = ~found[1].isnan()
    assert torch.equal(found[0][finite], found[1][finite])


@pytest.mark.parametrize("order", ["model first", "optimizer first", "live, model first", "live, optimizer first"])
def test_a_resumed_run_has_the_bits_in_every_order_of_loading(order):
    split, whole = pair()
    for step in range(4):
        for params, optimizer in (split, whole):
            random_grads(params, step)
            optimizer.step()
    file = io.BytesIO()
    torch.save({"weights": [param.detach() for param in split[0]], "optimizer": split[1].state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    params, optimizer = pair()[0]
    if "live" in order:
        random_grads(params, 77)
        optimizer.step()

    def load_model():
        with torch.no_grad():
            for param, value in zip(params, loaded["weights"]):
                param.copy_(value)

    loads = [load_model, lambda: optimizer.load_state_dict(loaded["optimizer"])]
    for load in loads if "model first" in order else loads[::-1]:
        load()
    for step in range(4, 8):
        for some, other in ((params, optimizer), whole):
            random_grads(some, step)
            other.step()
    assert_same((params, optimizer), whole)


def test_masters_of_one_kind_load_as_the_other():
    split, whole = pair()
    for step in range(4):
        for params, optimizer in (split, whole):
            random_grads(params, step)
            optimizer.step()
    for source, target in ((split, pair()[1]), (whole, pair()[0])):
        for one, other in zip(target[0], source[0]):
            one.data.copy_(other)
        target[1].load_state_dict(copy.deepcopy(source[1].state_dict()))
        for params, optimizer in (source, target):
            random_grads(params, 9)
            optimizer.step()
        for one, other in zip(target[0], source[0]):
            # A tie moves by one unit of float32.
            torch.testing.assert_close(target[1].master(one), source[1].master(other), rtol=3e-7, atol=1e-9)
        source[1].load_state_dict(source[1].state_dict())


def test_what_the_program_writes_is_the_new_master():
    (params, optimizer), _ = pair(weight_decay=0)
    random_grads(params, 0)
    optimizer.step()
    before = optimizer.master(params[2])
    with torch.no_grad():
        params[0].fill_(2.0)
    optimizer.param_groups[0]["lr"] = 0.0
    random_grads(params, 1)
    optimizer.step()
    assert torch.equal(optimizer.master(params[0]), torch.full((40, 8), 2.0)) and torch.equal(optimizer.master(params[2]), before)


def test_values_written_through_data_are_kept_within_half_a_unit():
    (params, optimizer), _ = pair(weight_decay=0)
    random_grads(params, 0)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.0
    params[0].data.zero_()
    params[2].data.fill_(-3.0)
    random_grads(params, 1)
    optimizer.step()
    assert not params[0].isnan().any() and params[0].abs().max() < 1e-38 and torch.equal(params[2], torch.full((70_001,), -3.0, dtype=BF16))


def test_what_cannot_be_split_is_named_and_nothing_is_stepped():
    params = [torch.nn.Parameter(torch.zeros(8, dtype=BF16)), torch.nn.Parameter(torch.zeros(8, dtype=torch.float16))]
    optimizer = own.AdamW([("first", params[0]), ("second", params[1])], master="split")
    random_grads(params, 0)
    with pytest.raises(spillway.UnsupportedError, match=r"\(second\) is torch.float16, and master=\"split\" is for torch.bfloat16; pass"):
        optimizer.step()
    assert not any(param.any() for param in params)
    split, _ = pair()
    random_grads(split[0], 0)
    split[1].step()
    before = [param.detach().clone() for param in split[0]]
    split[1].state[split[0][2]]["master_low"] = torch.zeros(70_001, dtype=torch.int32)
    random_grads(split[0], 1)
    with pytest.raises(spillway.UnsupportedError, match=r"\['params'\]\[2\] is torch.bfloat16, its state 'master_low' torch.int32; cast"):
        split[1].step()
    assert all(torch.equal(one, other) for one, other in zip(split[0], before))


def test_torch_loads_and_saves_the_state():
    split, _ = pair()
    for step in range(3):
        random_grads(split[0], step)
        split[1].step()
    theirs = [torch.nn.Parameter(param.detach().clone()) for param in split[0]]
    plain = torch.optim.AdamW(theirs, lr=1e-2)
    plain.load_state_dict(copy.deepcopy(split[1].state_dict()))
    random_grads(theirs, 3)
    plain.step()
    split[1].load_state_dict(plain.state_dict())
    random_grads(split[0], 3)
    split[1].step()
    assert torch.equal(split[1].state[split[0][0]]["step"], torch.tensor(5.0))
