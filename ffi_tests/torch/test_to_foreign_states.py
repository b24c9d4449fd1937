"""bitsandbytes_state_dict and torchao_state_dict: what an optimizer of this module has, as the other package's 8-bit class loads it.

The numbers of bitsandbytes' codes were compared with those of its version 0.50.2, which also loaded and stepped these state dicts."""

from __future__ import annotations

import copy
import hashlib
import warnings
from typing import Any

import pytest
import torch
from test_foreign_states import makes, params

import spillway.torch as own
from spillway.errors import UnsupportedError
from spillway.torch import _to_foreign

NAMES = ["AdamW", "8 bits", "bfloat16", "offload", "offload, 8 bits", "tier"]


def train(optimizer: Any, given: list[torch.nn.Parameter], steps: int, seed: int = 0) -> None:
    torch.manual_seed(seed)
    for _ in range(steps):
        for param in given:
            param.grad = torch.randn_like(param) * 0.01
        optimizer.step()


def trained(name: str, tmp_path: Any) -> tuple[list[torch.nn.Parameter], Any, dict[int, Any]]:
    """Parameters, their optimizer, and its moments in float32."""
    given = params()
    optimizer = makes(tmp_path)[name](given)
    train(optimizer, given, 3)
    return given, optimizer, own.wide_state_dict(optimizer)["state"]


@pytest.mark.parametrize(("signed", "digest"), [(True, "e732639a65f497b4"), (False, "305f002cc11278fb")])
def test_the_numbers_of_codes_are_those_of_bitsandbytes(signed: bool, digest: str) -> None:
    numbers = _to_foreign._numbers(signed)
    assert len(numbers) == 256 and bool((numbers.diff() > 0).all()) and numbers[-1] == 1
    assert hashlib.sha256(numbers.numpy().tobytes()).hexdigest()[:16] == digest


@pytest.mark.parametrize("name", NAMES)
def test_a_state_dict_for_bitsandbytes_has_the_nearest_codes_and_loads_back(name: str, tmp_path: Any) -> None:
    given, optimizer, wide = trained(name, tmp_path)
    before = [param.detach().clone() for param in given]
    saved = own.bitsandbytes_state_dict(optimizer)
    assert all(torch.equal(*pair) for pair in zip(before, given))
    for number, param in enumerate(given):
        state, small = saved["state"][number], param.numel() < 4096
        assert state["step"] == 3 and isinstance(state["step"], int)
        assert sorted(state) == sorted(
            ["step", "state1", "state2"] + [f"{part}{end}" for part in ("absmax", "qmap") for end in "12" if not small]
        )
        for end, key in (("1", "exp_avg"), ("2", "exp_avg_sq")):
            codes, moment = state[f"state{end}"], wide[number][key]
            assert codes.shape == param.shape
            if small:
                assert codes.dtype is torch.float32 and torch.equal(codes, moment)
                continue
            numbers, largest = state[f"qmap{end}"], state[f"absmax{end}"]
            assert torch.equal(largest, torch.stack([part.abs().max() for part in moment.reshape(-1).split(256)]))
            scaled = moment.reshape(-1) / largest.repeat_interleave(256)[: moment.numel()]
            apart = (scaled - numbers[codes.reshape(-1).long()]).abs()
            # At a tie, which these differences round, either neighbour is the nearest.
            assert bool((apart <= (scaled[:, None] - numbers).abs().amin(1) + 2**-23).all())
    kept = copy.deepcopy(saved)
    back = own.AdamW(params())
    back.load_state_dict(saved)
    assert saved["state"].keys() == kept["state"].keys()
    again = own.bitsandbytes_state_dict(back)["state"]
    assert all(torch.equal(again[number][key], kept["state"][number][key]) for number in again for key in ("state1", "state2"))


def test_blocks_of_zeros_and_of_nan_keep_their_values() -> None:
    moment = torch.zeros(3 * 256 + 7)
    moment[256], moment[-1] = float("nan"), -2.0
    codes, largest = _to_foreign._codes(moment, True)
    values = _to_foreign._numbers(True)[codes.long()] * largest.repeat_interleave(256)[: len(moment)]
    assert not values[:256].any() and values[256:512].isnan().all() and not values[512:-1].any()
    # The least number of bitsandbytes is above -1.
    assert -2 < values[-1] < -1.98


def test_many_blocks_are_encoded_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    moment = torch.randn(5 * 256 + 3)
    whole = _to_foreign._codes(moment, True)
    monkeypatch.setattr(_to_foreign, "_AT_ONCE", 512)
    assert all(torch.equal(*pair) for pair in zip(whole, _to_foreign._codes(moment, True)))


def test_groups_keep_what_bitsandbytes_computes_and_a_lion_has_one_moment() -> None:
    given = params()
    optimizer = own.Lion([{"params": given[:1], "lr": 0.5, "mine": 7}, {"params": given[1:]}])
    train(optimizer, given, 1)
    given[0].grad = None
    saved = own.bitsandbytes_state_dict(optimizer, min_8bit_size=1)
    assert saved["param_groups"][0] == {"lr": 0.5, "betas": (0.9, 0.99), "eps": 0.0, "weight_decay": 0.0, "mine": 7, "params": [0]}
    assert all(sorted(state) == ["absmax1", "qmap1", "state1", "step"] for state in saved["state"].values())
    back = own.Lion(params())
    back.load_state_dict({**saved, "param_groups": [{**saved["param_groups"][0], "params": [0, 1, 2]}]})
    assert back.state_dict()["state"][2]["exp_avg"].any()
    adam = own.AdamW(params())
    assert own.bitsandbytes_state_dict(adam) == {
        "state": {},
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "params": [0, 1, 2]}],
    }


@pytest.mark.parametrize("convert", [own.bitsandbytes_state_dict, own.torchao_state_dict], ids=["bitsandbytes", "torchao"])
def test_what_the_other_package_lacks_is_refused_by_name(convert: Any) -> None:
    pytest.importorskip("torchao")
    given = params()
    adagrad = own.Adagrad(given)
    train(adagrad, given, 1)
    with pytest.raises(UnsupportedError, match="has no 8-bit Adagrad; pass an Adam"):
        convert(adagrad)
    with pytest.raises(UnsupportedError, match="has no 8-bit Signum; pass an Adam"):
        convert(own.Signum(given))
    with pytest.raises(UnsupportedError, match="maximize=True, which .* does not compute"):
        convert(own.AdamW(params(), maximize=True))
    if convert is own.torchao_state_dict:
        lion = own.Lion(given)
        train(lion, given, 1)
        with pytest.raises(UnsupportedError, match="no 8-bit Lion"):
            convert(lion)


@pytest.mark.parametrize("name", NAMES)
def test_torchaos_class_goes_on_from_it(name: str, tmp_path: Any) -> None:
    pytest.importorskip("torchao")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.optim import AdamW8bit
        from torchao.optim.subclass_8bit import OptimState8bit

    given, optimizer, wide = trained(name, tmp_path)
    theirs = [torch.nn.Parameter(param.detach().clone()) for param in given]
    other = AdamW8bit(theirs, lr=0.5)
    other.load_state_dict(own.torchao_state_dict(optimizer))
    assert float(other.param_groups[0]["lr"]) == pytest.approx(1e-3)
    for number, param in enumerate(theirs):
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            moment, expected = other.state[param][key], wide[number][key]
            assert isinstance(moment, OptimState8bit) == (number == 0)
            if number == 0:
                expected = OptimState8bit.zeros(expected.shape, signed).copy_(expected).dequantize()
                moment = moment.dequantize()
            assert torch.equal(moment, expected)
        assert float(other.state[param]["step"]) == 3
    before = [param.detach().clone() for param in theirs]
    _step_as_torchao(other, theirs)
    assert all(not torch.equal(*pair) and pair[1].isfinite().all() for pair in zip(before, theirs))


def _step_as_torchao(optimizer: Any, given: list[torch.nn.Parameter]) -> None:
    """A step of torchao without its compiler."""
    with torch.compiler.set_stance("force_eager"):
        train(optimizer, given, 1)
