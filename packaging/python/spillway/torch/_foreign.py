"""State dicts of other packages' optimizers with narrow moments, as torch's class would have written them.

| package | moment | its value |
|---|---|---|
| torchao, 8-bit, 4-bit and float8 | a subclass of tensor with `dequantize` | that of `dequantize` |
| bitsandbytes, 8-bit | codes `state1` and `state2`, `qmap` of 256 numbers, `absmax` of blocks | number of the code, times its block's |
| bitsandbytes, 32-bit | `state1`, `state2` in float32 | itself |

bitsandbytes keeps the parts of 8-bit moments in a dict of their own since its version 0.46."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import InvalidArgumentError
from ._states import MOMENTS

#: The entry of a state in which bitsandbytes keeps its parts.
_WRAPPED = "__bnb_optimizer_quant_state__"
#: Elements of its blocks, in all of its versions.
_BLOCKS = (256, 2048)
#: What a group of torch's Adam has, and one of bitsandbytes not.
DEFAULTS = {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None}


def as_torchs(loaded: Any, names: Sequence[str] = MOMENTS) -> Any:
    """A state dict with float32 moments in place of those of another package; the same dict if it has none.

    Args:
        loaded: The state dict.
        names: torch's names of the moments of the class.

    Raises:
        InvalidArgumentError: Parts of a moment do not fit each other."""
    if not isinstance(loaded, dict) or not isinstance(loaded.get("state"), dict):
        return loaded
    states = {number: _state(state, number, names) for number, state in loaded["state"].items()}
    if all(states[number] is state for number, state in loaded["state"].items()):
        return loaded
    groups = [{**DEFAULTS, **group} for group in loaded.get("param_groups", [])]
    return {**loaded, "state": states, "param_groups": groups}


def _state(state: Any, number: Any, names: Sequence[str]) -> Any:
    if not isinstance(state, dict):
        return state
    if "state1" in state or _WRAPPED in state:
        return _of_bitsandbytes(state, number, names)
    if any(map(_is_quantized, state.values())):
        return {key: value.dequantize().to(torch.float32) if _is_quantized(value) else value for key, value in state.items()}
    return state


def _is_quantized(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and type(value) is not torch.Tensor and hasattr(value, "tensor_attrs")


def _of_bitsandbytes(state: dict[str, Any], number: Any, names: Sequence[str]) -> dict[str, Any]:
    parts = {**state, **state.get(_WRAPPED, {})}
    step = state.get("step")
    # torch keeps counts as tensors of floats.
    found = {"step": torch.tensor(float(step)) if isinstance(step, int) else step} if "step" in state else {}
    for end, name in zip("12", names):
        codes = parts.get(f"state{end}")
        if not isinstance(codes, torch.Tensor):
            raise InvalidArgumentError(
                f"load_state_dict: state[{number!r}] is one of bitsandbytes without 'state{end}'; load the state of the same kind of "
                "optimizer; nothing was loaded"
            )
        found[name] = codes.to(torch.float32) if codes.is_floating_point() else _values(codes, parts, end, number)
    return found


def _values(codes: torch.Tensor, parts: dict[str, Any], end: str, number: Any) -> torch.Tensor:
    numbers, largest = parts.get(f"qmap{end}"), parts.get(f"absmax{end}", parts.get(f"max{end}"))
    count = codes.numel()
    blocks = [count, *_BLOCKS] if isinstance(largest, torch.Tensor) and largest.numel() == 1 else _BLOCKS
    fits = isinstance(numbers, torch.Tensor) and numbers.numel() == 256 and isinstance(largest, torch.Tensor)
    size = next((size for size in blocks if fits and size and -(-count // size) == largest.numel()), 0)  # type: ignore[union-attr]
    if not size:
        raise InvalidArgumentError(
            f"load_state_dict: 'qmap{end}' and 'absmax{end}' of state[{number!r}] do not fit its {count} codes; load what bitsandbytes has "
            "saved; nothing was loaded"
        )
    assert isinstance(numbers, torch.Tensor) and isinstance(largest, torch.Tensor)
    each = largest.to("cpu", torch.float32).view(-1).repeat_interleave(size)[:count]
    return numbers.to("cpu", torch.float32)[codes.cpu().reshape(-1).long()].mul_(each).view(codes.shape)
