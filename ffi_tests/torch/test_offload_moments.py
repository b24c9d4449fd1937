"""Narrow states of offload(): the bits of AdamW with the same moments and masters, on every way of a step."""

import math

import pytest
import torch
from offload_runs import BF16, CODES, F32, NARROW, NEAREST, SPLIT, STOCHASTIC

import spillway.torch as own
from spillway._tail_search import AskedTail
from spillway.errors import InvalidArgumentError, UnsupportedError
from spillway.torch._codes import decoded, encoded
from spillway.torch._offload import tail as tail_module

KINDS = pytest.mark.parametrize("kind", NARROW.values(), ids=NARROW)


def model(dtype=BF16, wide=64):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, wide), torch.nn.GELU(), torch.nn.Linear(wide, 500), torch.nn.GELU(), torch.nn.Linear(500, 8)]
    return torch.nn.Sequential(*layers).to(dtype)


def train(model, optimizer, steps=6, big=()):
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        x = torch.randn(16, 32, generator=generator).to(next(model.parameters()).dtype)
        loss = model(x).float().square().mean() * (1000.0 if step in big else 1.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def ends(model, optimizer):
    found = [param.detach().clone() for param in model.parameters()]
    for param in model.parameters():
        found += [value.clone() for name, value in sorted(optimizer.state[param].items()) if name != "step"]
    return found


def same(one, other):
    return len(one) == len(other) and all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(one, other))


@pytest.mark.sampled
@KINDS
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("big", [(), (2, 4)], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_training_has_the_bits_of_adamw_with_these_moments(kind, dtype, big, overlap):
    ours, theirs = model(dtype), model(dtype)
    # A bucket is smaller than the largest tensor, which is divided unless rounding is random.
    mine = own.offload(ours, torch.optim.AdamW, lr=1e-2, max_norm=2.0, overlap=overlap, bucket_bytes=1 << 13, **kind)
    plain = own.AdamW(theirs.parameters(), lr=1e-2, max_norm=2.0, **({"master": "f32"} | kind))
    train(ours, mine, big=big)
    train(theirs, plain, big=big)
    assert bool(big) is (mine._plan.engines[0].speculation.stats().redos > 0) or not overlap
    assert same(ends(ours, mine), ends(theirs, plain))
    state = mine.state[next(ours.parameters())]
    coded = kind.get("moment_dtype") == "int8"
    assert state["exp_avg_codes" if coded else "exp_avg"].dtype is (torch.uint8 if coded else kind.get("moment_dtype", F32))
    assert ("master_low" in state) is (dtype is BF16 and "master" in kind)


def test_norm_and_clipped_step_have_the_same_bits_for_any_sum():
    ours, theirs = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    mine = own.offload([ours], torch.optim.AdamW, lr=1e-2, max_norm=1e-3, overlap=False)
    plain = own.AdamW([theirs], lr=1e-2, max_norm=1e-3)
    generator = torch.Generator().manual_seed(0)
    # A power of 0.5 and a square root differ in one of about a thousand sums.
    for _ in range(4000):
        ours.grad = torch.randn(3, generator=generator)
        theirs.grad = ours.grad.clone()
        mine.step()
        plain.step()
        assert mine.grad_norm == plain.grad_norm and torch.equal(ours, theirs)


@KINDS
def test_the_next_forward_completes_a_step(kind):
    ours, theirs = model(), model()
    mine = own.offload(ours, torch.optim.AdamW, lr=1e-2, max_norm=2.0, verdict="forward", overlap=True, **kind)
    plain = own.AdamW(theirs.parameters(), lr=1e-2, max_norm=2.0, **({"master": "f32"} | kind))
    train(ours, mine, big=(3,))
    train(theirs, plain, big=(3,))
    mine.settle()
    assert same(ends(ours, mine), ends(theirs, plain))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_tail_has_the_same_bits(dtype):
    ours, theirs = model(dtype), model(dtype)
    mine = own.offload(ours, torch.optim.AdamW, lr=1e-2, max_norm=2.0, tail=2, overlap=True, bucket_bytes=1 << 13, **NEAREST)
    plain = own.AdamW(theirs.parameters(), lr=1e-2, max_norm=2.0, master="f32", **NEAREST)
    train(ours, mine, big=(2,))
    train(theirs, plain, big=(2,))
    assert same(ends(ours, mine), ends(theirs, plain))


def test_torchs_operations_on_a_tail_round_the_moments_once():
    from spillway.optim import Adam
    from spillway.torch._offload.tail import HostKernels, TorchKernels

    torch.manual_seed(3)
    rows = [[torch.randn(100), torch.randn(100, dtype=BF16), torch.randn(100).to(BF16), torch.rand(100).to(BF16)] for _ in range(2)]
    for row, source in zip(rows[1], rows[0]):
        row.copy_(source)
    for kernels, row in zip((HostKernels(), TorchKernels()), rows):
        kernels.step(Adam(lr=1e-2), [tuple(row)], 1.0)
    (param, _, *moments), (other, _, *others) = rows
    torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-6)
    for moment, found in zip(moments, others):
        # At most the next bfloat16.
        assert (moment.view(torch.int16).to(torch.int32) - found.view(torch.int16).to(torch.int32)).abs().max() <= 1


@KINDS
def test_a_state_dict_continues_with_the_same_bits(kind):
    ours, theirs = model(), model()
    mine = own.offload(ours, torch.optim.AdamW, lr=1e-2, **kind)
    train(ours, mine, 3)
    theirs.load_state_dict(ours.state_dict())
    other = own.offload(theirs, torch.optim.AdamW, lr=1e-2, **kind)
    other.load_state_dict(mine.state_dict())
    assert same(ends(ours, mine), ends(theirs, other))
    train(ours, mine, 3)
    train(theirs, other, 3)
    assert same(ends(ours, mine), ends(theirs, other))


def test_state_dicts_of_both_moments_load_into_each_other():
    wide, narrow = model(), model()
    from_f32, from_bf16 = own.offload(wide, torch.optim.AdamW, lr=1e-2), own.offload(narrow, torch.optim.AdamW, lr=1e-2, **NEAREST)
    train(wide, from_f32, 2)
    train(narrow, from_bf16, 2)
    first, second = from_f32.state_dict(), from_bf16.state_dict()
    rounded = [state["exp_avg"].to(BF16) for state in first["state"].values()]
    widened = [state["exp_avg"].to(F32) for state in second["state"].values()]
    other = own.offload(model(), torch.optim.AdamW, lr=1e-2, **NEAREST)
    other.load_state_dict(first)
    assert same([state["exp_avg"] for state in other.state_dict()["state"].values()], rounded)
    other = own.offload(model(), torch.optim.AdamW, lr=1e-2)
    other.load_state_dict(second)
    assert same([state["exp_avg"] for state in other.state_dict()["state"].values()], widened)


def test_codes_and_floats_load_into_each_other():
    wide, narrow = model(), model()
    from_f32, coded = own.offload(wide, torch.optim.AdamW, lr=1e-2), own.offload(narrow, torch.optim.AdamW, lr=1e-2, **CODES)
    train(wide, from_f32, 2)
    train(narrow, coded, 2)
    other = own.offload(model(), torch.optim.AdamW, lr=1e-2)
    other.load_state_dict(coded.state_dict())
    for state, found in zip(coded.state_dict()["state"].values(), other.state_dict()["state"].values()):
        assert "exp_avg" not in state and "exp_avg_codes" not in found
        expected = decoded(state)
        assert same([found["exp_avg"], found["exp_avg_sq"]], [expected["exp_avg"], expected["exp_avg_sq"]])
    other = own.offload(model(), torch.optim.AdamW, lr=1e-2, **CODES)
    other.load_state_dict(from_f32.state_dict())
    for state, found in zip(from_f32.state_dict()["state"].values(), other.state_dict()["state"].values()):
        expected = encoded({name: state[name] for name in ("exp_avg", "exp_avg_sq")})
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    damaged = coded.state_dict()
    damaged["state"][0]["exp_avg_codes"] = damaged["state"][0]["exp_avg_codes"].float()
    with pytest.raises(InvalidArgumentError, match="no 8-bit moment.*nothing was loaded"):
        other.load_state_dict(damaged)
    del damaged["state"][0]["exp_avg_codes"]
    with pytest.raises(InvalidArgumentError, match="no 8-bit moment.*nothing was loaded"):
        other.load_state_dict(damaged)


def test_a_moment_of_another_dtype_is_named_before_anything_is_stepped():
    ours = model()
    mine = own.offload(ours, torch.optim.AdamW, lr=1e-2, **NEAREST)
    train(ours, mine, 1)
    param = next(ours.parameters())
    mine.state[param]["exp_avg"] = mine.state[param]["exp_avg"].float()
    before = [param.detach().clone() for param in ours.parameters()]
    ours(torch.ones(1, 32, dtype=BF16)).sum().backward()
    with pytest.raises(InvalidArgumentError, match="contiguous bfloat16 tensor"):
        mine.step()
    assert same([param.detach() for param in ours.parameters()], before)


@KINDS
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("tail", [1, 2, 9])
def test_a_tail_has_the_bits_of_no_tail(kind, dtype, tail):
    found = []
    for kept in (0, tail):
        ours = model(dtype)
        mine = own.offload(ours, torch.optim.AdamW, lr=1e-2, max_norm=0.5, tail=kept, bucket_bytes=4096, **kind)
        train(ours, mine, 3)
        # The program writes to a parameter that has its state on the device, and to one that has not.
        with torch.no_grad():
            ours[0].bias.mul_(1.25)
            ours[4].weight.mul_(1.25)
        train(ours, mine, 3, big=(1,))
        assert not kept or any(slot.stays for slot in mine._slots.values())
        found.append(ends(ours, mine))
    assert same(*found)


@KINDS
def test_states_move_between_host_and_tail_with_what_is_known_of_them(kind, monkeypatch):
    found, tail = [], [0]
    monkeypatch.setattr(AskedTail, "buckets", property(lambda _: tail[0]))
    for moves in (False, True):
        ours = model()
        mine = own.offload(ours, torch.optim.AdamW, lr=1e-2, bucket_bytes=4096, **kind)
        for step in range(6):
            tail[0] = (0, 2, 9, 1, 0, 3)[step] if moves else 0
            train(ours, mine, 1)
            with torch.no_grad():
                ours[step % 3 * 2].weight[0].mul_(1.25)
        train(ours, mine, 1)
        found.append(ends(ours, mine))
    assert same(*found)
    assert any(slot.stays for slot in mine._slots.values()) and not all(slot.stays for slot in mine._slots.values())


@KINDS
def test_a_state_dict_of_a_tail_resumes_without_one_and_back(kind):
    found = []
    for first, second in ((0, 0), (9, 0), (0, 9)):
        ours = model()
        mine = own.offload(ours, torch.optim.AdamW, lr=1e-2, tail=first, bucket_bytes=4096, **kind)
        train(ours, mine, 3)
        with torch.no_grad():
            ours[0].weight.mul_(1.25)
        saved = mine.state_dict()
        after = own.offload(ours, torch.optim.AdamW, lr=1e-2, tail=second, bucket_bytes=4096, **kind)
        after.load_state_dict(saved)
        train(ours, after, 3)
        found.append(ends(ours, after))
    assert same(found[0], found[1]) and same(found[0], found[2])


def test_a_tail_that_torch_steps_serves_no_narrow_states(monkeypatch):
    monkeypatch.setitem(tail_module._kernels, torch.device("cpu"), tail_module.TorchKernels())
    for kind in (STOCHASTIC, CODES, SPLIT):
        with pytest.raises(UnsupportedError, match="torch steps the tail of cpu.*pass tail=0"):
            own.offload(model(), torch.optim.AdamW, tail=1, **kind)
        own.offload(model(), torch.optim.AdamW, **kind)


def test_what_is_not_served_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="is float16: a step with bfloat16 moments"):
        own.offload(model(torch.float16), torch.optim.AdamW, **NEAREST)
    with pytest.raises(InvalidArgumentError, match="moment_dtype is torch.float64"):
        own.offload(model(), torch.optim.AdamW, moment_dtype=torch.float64)
    with pytest.raises(InvalidArgumentError, match='moment_rounding.*moment_dtype="bf16"'):
        own.offload(model(), torch.optim.AdamW, moment_rounding="stochastic")


def test_the_optimizer_shows_its_moments():
    text = repr(own.offload(model(), torch.optim.AdamW, **STOCHASTIC))
    assert all(line in text for line in ("moment_dtype: torch.bfloat16", "moment_rounding: stochastic", "rounding_seed: 5"))


def test_low_bits_stay_where_the_program_does_not_write():
    ours, theirs = model(), model()
    mine, plain = own.offload(ours, torch.optim.AdamW, lr=1e-2, **SPLIT), own.AdamW(theirs.parameters(), lr=1e-2, **SPLIT)
    for one, optimizer in ((ours, mine), (theirs, plain)):
        train(one, optimizer, 3)
        first, second, *_ = one.parameters()
        first.data[3] = 0.25
        kept = second.detach().clone()
        second.data.fill_(7.0)
        optimizer.state_dict()
        second.data.copy_(kept)
        train(one, optimizer, 3)
    assert same(ends(ours, mine), ends(theirs, plain))


def test_a_state_dict_has_no_low_bits_of_weights_that_were_replaced():
    ours, theirs = model(), model()
    mine, plain = own.offload(ours, torch.optim.AdamW, lr=1e-2, **SPLIT), own.AdamW(theirs.parameters(), lr=1e-2, **SPLIT)
    found = []
    for one, optimizer in ((ours, mine), (theirs, plain)):
        train(one, optimizer, 3)
        first = next(iter(one.parameters()))
        first.data[3] = 0.25
        found.append([state["master_low"].clone() for state in optimizer.state_dict()["state"].values()])
        assert bool(found[-1][1].any())
    assert same(*found) and not found[0][0][3].any()


def test_low_bits_that_a_checkpoint_writes_in_place_count():
    ours, theirs = model(), model()
    mine = own.offload(ours, torch.optim.AdamW, lr=1e-2, **SPLIT)
    other = own.offload(theirs, torch.optim.AdamW, lr=1e-2, **SPLIT)
    train(ours, mine, 3)
    train(theirs, other, 5)
    with torch.no_grad():
        for to, source in zip(theirs.parameters(), ours.parameters()):
            to.copy_(source)
    into = other.state_dict()["state"]
    for number, state in mine.state_dict()["state"].items():
        for name, value in state.items():
            into[number][name].copy_(value)
    train(ours, mine, 3)
    train(theirs, other, 3)
    assert same(ends(ours, mine), ends(theirs, other))


def test_masters_of_both_kinds_load_into_each_other():
    ours = model()
    mine = own.offload(ours, torch.optim.AdamW, lr=1e-2)
    train(ours, mine, 3)
    theirs = model()
    theirs.load_state_dict(ours.state_dict())
    other = own.offload(theirs, torch.optim.AdamW, lr=1e-2, **SPLIT)
    other.load_state_dict(mine.state_dict())
    train(ours, mine, 2)
    train(theirs, other, 2)
    assert same([*ours.parameters()], [*theirs.parameters()])
    back = own.offload(model(), torch.optim.AdamW, lr=1e-2)
    with pytest.raises(InvalidArgumentError, match="has a split master"):
        back.load_state_dict(other.state_dict())


def test_parameters_that_a_split_master_cannot_have_are_refused():
    with pytest.raises(UnsupportedError, match="float16, and master='split' is for bfloat16"):
        own.offload(model(torch.float16), torch.optim.AdamW, **SPLIT)
    with pytest.raises(InvalidArgumentError, match="master is 'half'"):
        own.offload(model(), torch.optim.AdamW, master="half")


@pytest.mark.parametrize("kind", [{}, SPLIT], ids=["f32", "split"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_skipped_step_writes_no_master(kind, overlap):
    models, options = [model(), model()], {"lr": 1e-2, "max_norm": 1e9, "skip_nonfinite": True, "overlap": overlap}
    for number, one in enumerate(models):
        optimizer = own.offload(one, torch.optim.AdamW, **options, **kind)
        train(one, optimizer, 3)
        if number == 0:
            param = next(one.parameters())
            before = param.detach().clone()
            with torch.no_grad():
                param.add_(1)
            (one(torch.ones(1, 32, dtype=BF16)).float() * math.inf).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.skipped
            with torch.no_grad():
                param.copy_(before)
        train(one, optimizer, 3)
    assert same([*models[0].parameters()], [*models[1].parameters()])


def test_a_model_of_split_masters_becomes_float32():
    ours = model()
    mine = own.offload(ours, torch.optim.AdamW, lr=1e-2, **SPLIT)
    train(ours, mine, 2)
    ours.float()
    mine.zero_grad()
    train(ours, mine, 2)
    assert "master_low" not in mine.state[next(ours.parameters())]


def test_a_state_dict_is_made_in_inference_mode_too():
    ours, theirs = model(), model()
    mine, other = (own.offload(one, torch.optim.AdamW, lr=1e-2, **SPLIT) for one in (ours, theirs))
    for one, optimizer in ((ours, mine), (theirs, other)):
        train(one, optimizer, 2)
        with torch.inference_mode(optimizer is mine):
            optimizer.state_dict()
        train(one, optimizer, 2)
    assert same(ends(ours, mine), ends(theirs, other))


def test_a_checkpoint_returns_from_torchs_class_without_low_bits():
    ours, theirs, last = model(), model(), model()
    mine = own.offload(ours, torch.optim.AdamW, lr=1e-2, **SPLIT)
    train(ours, mine, 2)
    theirs.load_state_dict(ours.state_dict())
    between = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    between.load_state_dict(mine.state_dict())
    train(theirs, between, 1)
    last.load_state_dict(theirs.state_dict())
    back = own.offload(last, torch.optim.AdamW, lr=1e-2, **SPLIT)
    back.load_state_dict(between.state_dict())
    assert not any(state["master_low"].any() for state in back.state_dict()["state"].values())
    train(last, back, 2)
