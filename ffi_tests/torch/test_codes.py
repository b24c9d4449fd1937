"""8-bit moments of Adam and AdamW: steps are those of the decoded moments, and states come from and go to those of other dtypes."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

import spillway.torch
from spillway.errors import InvalidArgumentError, UnsupportedError
from spillway.torch._codes import decoded, encoded

SHAPES = [(1,), (31,), (32,), (33,), (64, 65), (3, 5, 7), (70_001,), ()]
NAMES = ("exp_avg", "exp_avg_sq")


def params(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def give_grads(own: list[torch.nn.Parameter], number: int) -> None:
    generator = torch.Generator().manual_seed(100 + number)
    for param in own:
        param.grad = (torch.randn(param.shape, generator=generator) * 0.1).to(param.dtype)


def unit(codes: torch.Tensor, first: bool) -> torch.Tensor:
    """Values of codes in units of their scales, by the definition in kernels/src/codes.rs."""
    start = 2.0**-8 if first else 2.0**-16
    steps = (codes & 0x7F if first else codes).to(torch.int32)
    sums = torch.tensor(start).view(torch.int32) + (steps << 19)
    values = sums.view(torch.float32) - start
    return torch.where(codes >= 128, -values, values) if first else values


def values_of(state: dict[str, Any], name: str) -> torch.Tensor:
    codes, scales = state[f"{name}_codes"], state[f"{name}_scales"]
    each = scales.float().repeat_interleave(32)[: codes.numel()].view(codes.shape)
    return unit(codes, name == "exp_avg") * each


@pytest.mark.parametrize("kind", [spillway.torch.Adam, spillway.torch.AdamW])
@pytest.mark.parametrize("master", [None, "f32", "split"])
def test_a_step_is_that_of_the_decoded_moments(kind: Any, master: str | None) -> None:
    dtype = torch.float32 if master is None else torch.bfloat16
    own, plain = params(dtype), params(dtype)
    options = {"lr": 1e-2, "weight_decay": 0.1}
    coded = kind(own, moment_dtype="int8", moment_rounding="nearest", master=master, **options)
    for number in range(5):
        give_grads(own, number), give_grads(plain, number)
        before = kind(plain, master=master, **options)
        if number:
            # The same states in float32.
            saved = copy.deepcopy(coded.state_dict())
            before.load_state_dict(saved)
            for state in before.state.values():
                assert state["exp_avg"].dtype is torch.float32 and "exp_avg_codes" not in state
        coded.step(), before.step()
        for one, other in zip(own, plain):
            assert torch.equal(one, other)
            state, expected = coded.state[one], encoded(before.state[other])
            assert state["exp_avg_codes"].shape == one.shape and state["exp_avg_codes"].dtype is torch.uint8
            for name in NAMES:
                assert torch.equal(state[f"{name}_codes"], expected[f"{name}_codes"])
                assert torch.equal(state[f"{name}_scales"], expected[f"{name}_scales"])
                assert torch.equal(decoded(state)[name], values_of(state, name))


def test_random_rounding_is_the_default_and_follows_the_seed() -> None:
    found = []
    for seed in (1, 1, 2):
        own = params()
        optimizer = spillway.torch.AdamW(own, moment_dtype="int8", rounding_seed=seed)
        for number in range(3):
            give_grads(own, number)
            optimizer.step()
        found.append(torch.cat([optimizer.state[param]["exp_avg_sq_codes"].view(-1) for param in own]))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert "moment_rounding" not in repr(optimizer) and "torch.uint8" in repr(optimizer)


def test_state_dicts_go_both_ways() -> None:
    own = params()
    optimizer = spillway.torch.AdamW(own, moment_dtype="int8", max_norm=1.0)
    give_grads(own, 0)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    others = copy.deepcopy(own)
    again = spillway.torch.AdamW(others, moment_dtype="int8", max_norm=1.0)
    again.load_state_dict(saved)
    wide = spillway.torch.AdamW(copy.deepcopy(own), moment_dtype="f32")
    wide.load_state_dict(saved)
    brain = spillway.torch.AdamW(copy.deepcopy(own), moment_dtype="bf16")
    brain.load_state_dict(saved)
    for param, other, far, near in zip(own, others, *(one.param_groups[0]["params"] for one in (wide, brain))):
        for name in NAMES:
            for part in ("codes", "scales"):
                assert torch.equal(optimizer.state[param][f"{name}_{part}"], again.state[other][f"{name}_{part}"])
            assert torch.equal(wide.state[far][name], values_of(optimizer.state[param], name))
            assert torch.equal(brain.state[near][name], wide.state[far][name].bfloat16())
    # torch's class writes float32 states, which become codes.
    torchs = torch.optim.AdamW(params())
    give_grads(torchs.param_groups[0]["params"], 3)
    torchs.step()
    again.load_state_dict(torchs.state_dict())
    for other, one in zip(others, torchs.param_groups[0]["params"]):
        assert "exp_avg" not in again.state[other]
        wanted = encoded({"exp_avg": torchs.state[one]["exp_avg"]})
        assert torch.equal(again.state[other]["exp_avg_codes"], wanted["exp_avg_codes"])
    give_grads(others, 1)
    again.step()
    for copied in (copy.deepcopy(again), pickle.loads(pickle.dumps(again))):
        give_grads(copied.param_groups[0]["params"], 2)
        copied.step()


def test_torch_does_not_take_codes_for_moments() -> None:
    own = params()
    optimizer = spillway.torch.AdamW(own, moment_dtype="int8")
    give_grads(own, 0)
    optimizer.step()
    torchs = torch.optim.AdamW(own)
    torchs.load_state_dict(optimizer.state_dict())
    with pytest.raises(KeyError, match="exp_avg"):
        torchs.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_that_torchs_class_has_cast_are_refused(dtype: torch.dtype, tmp_path: Any) -> None:
    own = params(dtype)
    master = None if dtype is torch.float32 else "f32"
    optimizer = spillway.torch.AdamW(own, moment_dtype="int8", master=master)
    give_grads(own, 0)
    optimizer.step()
    torchs = torch.optim.AdamW(own)
    torchs.load_state_dict(optimizer.state_dict())
    saved = torchs.state_dict()
    others = {
        "int8": spillway.torch.AdamW(params(dtype), moment_dtype="int8", master=master),
        "f32": spillway.torch.AdamW(params(dtype), master=master),
        "offload": spillway.torch.offload(params(dtype), torch.optim.AdamW, moment_dtype="int8"),
        "tier": spillway.torch.AdamW(params(dtype), tier=str(tmp_path)),
    }
    for name, other in others.items():
        with pytest.raises(InvalidArgumentError, match="no 8-bit moment.*nothing was loaded"):
            other.load_state_dict(saved)
        assert not other.state_dict()["state"] or name == "tier"


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("exp_avg_scales"),
        lambda state: state.pop("exp_avg_sq_codes"),
        lambda state: state["exp_avg_scales"].fill_(-1),
        lambda state: state["exp_avg_sq_scales"].fill_(torch.inf),
        lambda state: state.update(exp_avg_codes=[1, 2]),
    ],
)
def test_damaged_codes_load_nothing(change: Any) -> None:
    own = params()
    optimizer = spillway.torch.AdamW(own, moment_dtype="int8")
    give_grads(own, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    change(saved["state"][3])
    before = {name: value.clone() for name, value in optimizer.state[own[3]].items()}
    with pytest.raises(InvalidArgumentError, match=r"state\[3\] has exp_avg.*nothing was loaded"):
        optimizer.load_state_dict(saved)
    assert all(torch.equal(value, optimizer.state[own[3]][name]) for name, value in before.items())


def test_a_moment_beyond_the_largest_scale_counts_as_the_largest() -> None:
    param = torch.nn.Parameter(torch.zeros(64))
    optimizer = spillway.torch.AdamW([param], moment_dtype="int8")
    for largest in (1.0, 2e19, 1.0, 1.0):
        param.grad = torch.ones(64)
        param.grad[0] = largest
        optimizer.step()
    assert param.isfinite().all() and (param[32:] < -3e-3).all()
    torchs = torch.optim.AdamW([param])
    param.grad = torch.ones(64)
    torchs.step()
    torchs.state[param]["exp_avg_sq"][0], torchs.state[param]["exp_avg_sq"][33] = -0.0, torch.inf
    optimizer.load_state_dict(torchs.state_dict())
    found = decoded(optimizer.state[param])["exp_avg_sq"]
    assert found[0] == 0 and found.isfinite().all() and found[33] > 8e37


def test_a_written_state_counts() -> None:
    own, other = params(), params()
    pair = [spillway.torch.AdamW(one, moment_dtype="int8", moment_rounding="nearest") for one in (own, other)]
    for number in range(2):
        for one, optimizer in zip((own, other), pair):
            give_grads(one, number)
            optimizer.step()
            for param in one:
                # In place in one optimizer, by another tensor in the other one.
                state = optimizer.state[param]
                if optimizer is pair[0]:
                    state["exp_avg_scales"].mul_(0.5)
                else:
                    state["exp_avg_scales"] = state["exp_avg_scales"] * 0.5
    assert all(torch.equal(one, two) for one, two in zip(own, other))


def test_a_nan_is_seen_in_its_block_alone() -> None:
    param = torch.nn.Parameter(torch.ones(96))
    optimizer = spillway.torch.AdamW([param], moment_dtype="int8")
    param.grad = torch.ones(96)
    param.grad[40] = float("nan")
    optimizer.step()
    param.grad = torch.ones(96)
    optimizer.step()
    assert param.isnan().nonzero().view(-1).tolist() == [*range(32, 64)]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"moment_dtype": "int4"}, "moment_dtype is 'int4'"),
        ({"moment_dtype": torch.int8}, "moment_dtype is torch.int8"),
        ({"moment_rounding": "up"}, "moment_rounding is 'up'"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises((InvalidArgumentError, UnsupportedError), match=message):
        spillway.torch.AdamW(params(), **{"moment_dtype": "int8", **keywords})


@pytest.mark.parametrize("kind", [spillway.torch.Adagrad, spillway.torch.Lion, spillway.torch.Signum])
def test_other_rules_have_no_codes(kind: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="for Adam and AdamW"):
        kind(params(), moment_dtype="int8")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("exp_avg_scales", lambda state: state["exp_avg_scales"][:-1]),
        ("exp_avg_scales", lambda state: state["exp_avg_scales"].float()),
        ("exp_avg_codes", lambda state: state["exp_avg_codes"].to(torch.int8)),
        ("exp_avg_sq_codes", lambda state: state["exp_avg_sq_codes"][:-40]),
    ],
)
def test_states_that_do_not_fit_are_named(name: str, change: Any) -> None:
    param = torch.nn.Parameter(torch.ones(1000))
    optimizer = spillway.torch.AdamW([param], moment_dtype="int8")
    give_grads([param], 0)
    optimizer.step()
    before = param.detach().clone()
    optimizer.state[param][name] = change(optimizer.state[param])
    with pytest.raises((InvalidArgumentError, UnsupportedError), match=name):
        optimizer.step()
    assert torch.equal(param, before)
    with pytest.raises(InvalidArgumentError, match="are no 8-bit moment"):
        spillway.torch.AdamW([torch.nn.Parameter(torch.ones(1000))]).load_state_dict(optimizer.state_dict())


def test_bytes_of_a_parameter() -> None:
    param = torch.nn.Parameter(torch.ones(1 << 16, dtype=torch.bfloat16))
    optimizer = spillway.torch.AdamW([param], moment_dtype="int8", master="split")
    give_grads([param], 0)
    optimizer.step()
    tensors = [value for name, value in optimizer.state[param].items() if name != "step"]
    assert sum(tensor.nbytes for tensor in tensors) == (2 + 2 + 2 / 16) * param.numel()
