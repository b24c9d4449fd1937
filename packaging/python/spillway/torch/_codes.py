"""8-bit moments: the names of their states, and their values.

| state | dtype | elements |
|---|---|---|
| `exp_avg_codes`, `exp_avg_sq_codes` | uint8 | those of the parameter, in its shape |
| `exp_avg_scales`, `exp_avg_sq_scales` | bfloat16 | one for each 32 codes in a row |

The names are not those of torch: a class that does not know codes then misses its moments, and does not take codes for numbers."""

from __future__ import annotations

from typing import Any

import torch

from .. import _abi, _native
from .._groups import Rule
from ..errors import InvalidArgumentError
from ._tensors import local

#: Elements with one scale.
BLOCK = 32
#: The moments and their numbers in the C ABI.
_MOMENTS = {"exp_avg": _abi.MOMENT_FIRST, "exp_avg_sq": _abi.MOMENT_SECOND}
#: The states of 8-bit moments of Adam.
CODED_MOMENTS = ("exp_avg_codes", "exp_avg_sq_codes", "exp_avg_scales", "exp_avg_sq_scales")


def coded_rule(rule: Rule) -> Rule:
    """The rule of Adam with 8-bit moments."""
    if any(map(is_scales, rule.keys)):
        return rule
    codes = {f"{name}_codes": field for name, field in rule.keys.items()}
    return rule._replace(keys={**codes, **{f"{name}_scales": f"{field}_scale" for name, field in rule.keys.items()}})


def is_scales(key: str) -> bool:
    """True for the name of a state with scales."""
    return key.endswith("_scales")


def blocks_of(elements: int) -> int:
    """The scales of a moment of these elements."""
    return -(-elements // BLOCK)


def new_scales(param: torch.Tensor) -> torch.Tensor:
    """The scales of a moment of zeros."""
    return torch.zeros(blocks_of(local(param).numel()), dtype=torch.bfloat16, device="cpu")


def check_codes(state: Any, name: str) -> None:
    """Raises InvalidArgumentError if a saved state has parts of 8-bit moments that are not those of a moment."""
    for moment in _MOMENTS if isinstance(state, dict) else ():
        codes, scales = state.get(f"{moment}_codes"), state.get(f"{moment}_scales")
        if codes is None and scales is None:
            continue
        fits = isinstance(codes, torch.Tensor) and isinstance(scales, torch.Tensor) and _fit(codes, scales)
        # A scale of NaN is that of moments that are NaN.
        if not fits or bool(((scales < 0) | scales.isinf()).any()):
            raise InvalidArgumentError(
                f"load_state_dict: {name} has {moment}_codes and {moment}_scales that are no 8-bit moment: uint8 codes, and a bfloat16 "
                f"scale for each {BLOCK} of them. torch's own class casts them when it loads them. Load the state dict that spillway.torch "
                "has saved; nothing was loaded"
            )


def decoded(state: dict[str, Any]) -> dict[str, Any]:
    """A state with float32 moments in place of its 8-bit ones; the state itself if it has none."""
    found = state
    if not isinstance(state, dict):
        return state
    for name, moment in _MOMENTS.items():
        codes, scales = state.get(f"{name}_codes"), state.get(f"{name}_scales")
        if codes is None and scales is None:
            continue
        check_codes(state, "a state")
        assert isinstance(codes, torch.Tensor) and isinstance(scales, torch.Tensor)
        codes, scales = codes.detach().cpu().contiguous(), scales.detach().cpu().contiguous()
        values = torch.empty(codes.shape, dtype=torch.float32, device="cpu")
        _native.call("spw_codes_read", moment, codes.data_ptr(), scales.data_ptr(), codes.numel(), values.data_ptr())
        found = {key: value for key, value in found.items() if key not in (f"{name}_codes", f"{name}_scales")}
        found[name] = values
    return found


def encoded(state: dict[str, Any]) -> dict[str, Any]:
    """A state with 8-bit moments in place of those of floats, to the nearest; the state itself if it has none."""
    found = state
    for name, moment in _MOMENTS.items():
        value = state.get(name)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        values = value.detach().to("cpu", torch.float32).contiguous()
        codes = torch.empty(values.shape, dtype=torch.uint8, device="cpu")
        scales = torch.empty(blocks_of(values.numel()), dtype=torch.bfloat16, device="cpu")
        _native.call("spw_codes_write", moment, values.data_ptr(), values.numel(), codes.data_ptr(), scales.data_ptr())
        found = {key: kept for key, kept in found.items() if key != name}
        found |= {f"{name}_codes": codes, f"{name}_scales": scales}
    return found


def _fit(codes: torch.Tensor, scales: torch.Tensor) -> bool:
    """True if these are the codes and the scales of one moment."""
    return codes.dtype is torch.uint8 and scales.dtype is torch.bfloat16 and scales.shape == (blocks_of(codes.numel()),)
