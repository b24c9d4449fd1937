"""State dicts of torchao's and bitsandbytes' Adam load into ours: the moments are those that the other package computes with."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

import spillway.torch as own
from spillway.errors import InvalidArgumentError

SHAPES = [(64, 128), (5000,), (3,)]


def params() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def makes(tmp_path: Any) -> dict[str, Any]:
    return {
        "AdamW": lambda given: own.AdamW(given),
        "8 bits": lambda given: own.AdamW(given, moment_dtype="int8"),
        "bfloat16": lambda given: own.AdamW(given, moment_dtype="bf16"),
        "offload": lambda given: own.offload(given, torch.optim.AdamW),
        "offload, 8 bits": lambda given: own.offload(given, torch.optim.AdamW, moment_dtype="int8"),
        "tier": lambda given: own.AdamW(given, tier=str(tmp_path)),
    }


def check(loaded: Any, given: list[torch.nn.Parameter], moments: list[dict[str, torch.Tensor]], steps: int) -> None:
    """The moments of an optimizer are these, in its dtype; the next step works."""
    from spillway.torch._codes import decoded, encoded

    for state, expected in zip(loaded.state_dict()["state"].values(), moments):
        found = decoded(state)
        for name, value in expected.items():
            if "exp_avg_codes" in state:
                value = decoded(encoded({name: value}))[name]
            assert torch.equal(found[name], value.to(found[name].dtype)), name
        assert float(state["step"]) == steps
    before = [param.detach().clone() for param in given]
    for param in given:
        param.grad = torch.full_like(param, 0.1)
    loaded.step()
    assert all(not torch.equal(one, two) and two.isfinite().all() for one, two in zip(before, given))


def dynamic_map(signed: bool) -> torch.Tensor:
    """256 numbers from -1 or 0 to 1, closer to each other near zero."""
    if signed:
        line = torch.linspace(-1, 1, 255)
        return torch.cat([line * line.abs(), torch.tensor([1.0])])
    return torch.linspace(0, 1, 256) ** 2


def quantized(value: torch.Tensor, signed: bool, block: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Parts of a moment as bitsandbytes has them, and its value element by element."""
    numbers, flat = dynamic_map(signed), value.reshape(-1)
    largest = torch.stack([part.abs().max() for part in flat.split(block)])
    codes = torch.stack([(numbers - element / largest[at // block]).abs().argmin() for at, element in enumerate(flat)])
    exact = torch.tensor([float(numbers[code]) * float(largest[at // block]) for at, code in enumerate(codes.tolist())])
    return {"state": codes.to(torch.uint8).view(value.shape), "qmap": numbers, "absmax": largest}, exact.view(value.shape)


@pytest.mark.sampled(cases=8)
@pytest.mark.parametrize("name", ["AdamW", "8 bits", "bfloat16", "offload", "offload, 8 bits", "tier"])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("block", [256, 2048])
def test_8_bit_states_of_bitsandbytes_load(name: str, wrapped: bool, block: int, tmp_path: Any) -> None:
    given, states, moments = params(), dict[int, Any](), list[dict[str, torch.Tensor]]()
    for number, param in enumerate(given):
        parts: dict[str, Any] = {}
        values: dict[str, torch.Tensor] = {}
        for end, key in (("1", "exp_avg"), ("2", "exp_avg_sq")):
            value = torch.randn_like(param) * 0.01
            value = value if end == "1" else value.square()
            if number == 2:
                # bitsandbytes keeps small parameters in float32.
                parts[f"state{end}"], values[key] = value.detach(), value.detach()
            else:
                one, values[key] = quantized(value.detach(), end == "1", block)
                parts |= {f"{part}{end}": tensor for part, tensor in one.items()}
        states[number] = {"step": 7, **({"__bnb_optimizer_quant_state__": parts} if wrapped else parts)}
        moments.append(values)
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "params": [0, 1, 2]}
    saved = {"state": states, "param_groups": [group]}
    kept = copy.deepcopy(saved)
    optimizer = makes(tmp_path)[name](given)
    optimizer.load_state_dict(saved)
    assert saved["state"][0].keys() == kept["state"][0].keys() and saved["param_groups"] == kept["param_groups"]
    check(optimizer, given, moments, 7)


@pytest.mark.parametrize("name", ["AdamW", "8 bits", "bfloat16", "offload", "offload, 8 bits", "tier"])
def test_8_bit_states_of_torchao_load(name: str, tmp_path: Any) -> None:
    pytest.importorskip("torchao")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.optim import AdamW8bit

    theirs, given = params(), params()
    optimizer = AdamW8bit(theirs, lr=1e-3)
    for _ in range(3):
        for param in theirs:
            param.grad = torch.randn_like(param)
        optimizer.step()
    saved = optimizer.state_dict()
    assert type(saved["state"][0]["exp_avg"]) is not torch.Tensor
    moments = [
        {key: state[key].dequantize() if hasattr(state[key], "tensor_attrs") else state[key] for key in ("exp_avg", "exp_avg_sq")}
        for state in saved["state"].values()
    ]
    ours = makes(tmp_path)[name](given)
    ours.load_state_dict(saved)
    check(ours, given, moments, 3)


def test_a_lion_of_bitsandbytes_has_one_moment() -> None:
    param = torch.nn.Parameter(torch.ones(5000))
    parts, exact = quantized(torch.randn(5000), True, 256)
    state = {"step": 7, **{f"{part}1": tensor for part, tensor in parts.items()}}
    optimizer = own.Lion([param])
    group = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0, "params": [0]}
    optimizer.load_state_dict({"state": {0: state}, "param_groups": [group]})
    assert torch.equal(optimizer.state[param]["exp_avg"], exact)
    param.grad = torch.ones(5000)
    optimizer.step()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("state2"), "without 'state2'"),
        (lambda state: state.pop("qmap1"), "'qmap1' and 'absmax1'"),
        (lambda state: state.update(absmax1=torch.ones(7)), "'qmap1' and 'absmax1'"),
        (lambda state: state.update(qmap2=torch.ones(16)), "'qmap2' and 'absmax2'"),
    ],
)
@pytest.mark.parametrize("name", ["AdamW", "offload", "tier"])
def test_parts_that_do_not_fit_are_named_before_anything_is_loaded(name: str, change: Any, message: str, tmp_path: Any) -> None:
    given = [torch.nn.Parameter(torch.ones(5000))]
    state: dict[str, Any] = {"step": 7}
    for end in "12":
        state |= {f"state{end}": torch.zeros(5000, dtype=torch.uint8), f"qmap{end}": torch.ones(256), f"absmax{end}": torch.ones(20)}
    change(state)
    optimizer = makes(tmp_path)[name](given)
    before = copy.deepcopy(optimizer.state_dict())
    group = {"lr": 0.5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "params": [0]}
    with pytest.raises(InvalidArgumentError, match=message):
        optimizer.load_state_dict({"state": {0: state}, "param_groups": [group]})
    assert optimizer.param_groups[0]["lr"] == before["param_groups"][0]["lr"]
