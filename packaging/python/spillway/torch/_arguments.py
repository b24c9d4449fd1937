"""Checks of the keywords beyond torch, and of step counts that are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch

from ..errors import InvalidArgumentError


def check_keywords(name: str, max_norm: Any, process_group: Any, flags: dict[str, Any], memory_budget: Any) -> None:
    """Checks keywords of the optimizer class `name`. Raises InvalidArgumentError, whose message names the keyword."""
    if max_norm is not None and (isinstance(max_norm, bool) or not isinstance(max_norm, Real) or not max_norm > 0):  # type: ignore[operator]
        raise InvalidArgumentError(f"{name}: max_norm is {max_norm!r}; pass a number above 0, or None")
    for keyword, value in flags.items():
        if not isinstance(value, bool):
            raise InvalidArgumentError(f"{name}: {keyword} is {value!r}; pass True or False")
    if process_group is not None and not (torch.distributed.is_available() and isinstance(process_group, torch.distributed.ProcessGroup)):
        raise InvalidArgumentError(
            f"{name}: process_group is {process_group!r}; pass a group of torch.distributed with this process, or None"
        )
    if memory_budget is not None and (isinstance(memory_budget, bool) or not isinstance(memory_budget, Integral) or memory_budget < 0):
        raise InvalidArgumentError(f"{name}: memory_budget is {memory_budget!r}; pass a whole number of bytes, or None")


def check_tier(options: Any) -> None:
    """Checks the fields of a TierOptions that the library does not check. Raises InvalidArgumentError, whose message names the field."""

    def whole(value: Any, least: int) -> bool:
        return value is None or (isinstance(value, Integral) and not isinstance(value, bool) and value >= least)  # type: ignore[operator]

    def real(value: Any) -> bool:
        return isinstance(value, Real) and not isinstance(value, bool)

    ratio = options.ratio
    fits = {
        "rank": (whole(options.rank, 0), "a whole number from 0 on, or None"),
        "world": (whole(options.world, 1), "a whole number from 1 on, or None"),
        "part_elements": (whole(options.part_elements, 1), "a number of elements from 1 on, or None"),
        "ratio": (ratio is None or (isinstance(ratio, Sequence) and all(map(real, ratio))), "a list of numbers, or None"),
        "turns": (isinstance(options.turns, bool), "True or False"),
        "pin_memory": (isinstance(options.pin_memory, bool), "True or False"),
        "io_timeout": (real(options.io_timeout) and 0 <= options.io_timeout < 2**31, "seconds, a number from 0 on"),
    }
    for field, (good, wanted) in fits.items():
        if not good:
            raise InvalidArgumentError(f"TierOptions: {field} is {getattr(options, field)!r}; pass {wanted}")


def is_count(step: Any) -> bool:
    """True for a step count: a number, or a tensor with one number."""
    try:
        count = -1.0 if isinstance(step, (str, bytes)) else float(step)
    except (TypeError, ValueError, RuntimeError):
        return False
    return 0 <= count < 2**63 and count % 1 == 0


def check_steps(loaded: dict[str, Any], counted: bool) -> None:
    """Checks the step counts of a state dict before it is loaded. `counted`: states of the optimizer have one."""
    for number, state in loaded.get("state", {}).items():
        if not counted or not isinstance(state, dict) or not state:
            continue
        step = state.get("step")
        if not (isinstance(step, torch.Tensor) and step.is_meta) and not is_count(step):
            raise InvalidArgumentError(
                f"load_state_dict: state[{number!r}]['step'] is {step!r}; pass the number of steps that the state has had, "
                "a whole number from 0 on; nothing was loaded"
            )
