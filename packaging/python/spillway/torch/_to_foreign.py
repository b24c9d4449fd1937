"""State dicts for the 8-bit optimizers of other packages, from optimizers of this module: the way out that `_foreign` is in.

bitsandbytes: a moment has codes in `state1` or `state2`, numbers of the codes in `qmap1` or `qmap2`, and the largest magnitude of each 256
elements in `absmax1` or `absmax2`. Its numbers are seven decades below 1. Each is divided into equal parts, the largest decade into the
most, and the numbers are the middles of the parts; 0 and 1 are numbers too, and the first moment's have negatives. A parameter with few
elements has moments in float32."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from ..errors import UnsupportedError
from ._foreign import DEFAULTS
from ._states import MASTER, MOMENTS
from ._wide import wide_state_dict

#: Elements with one magnitude.
_BLOCK = 256
#: Decades of the numbers.
_DECADES = 7
#: Elements that are encoded at once.
_AT_ONCE = _BLOCK << 13
#: Entries of a group that they lack.
_LACKED = {*DEFAULTS, "decoupled_weight_decay"}
#: torch's options of a group that they do not compute.
_REFUSED = ("amsgrad", "maximize")


def bitsandbytes_state_dict(optimizer: torch.optim.Optimizer, *, min_8bit_size: int = 4096) -> dict[str, Any]:
    """The state dict of an Adam, AdamW or Lion of this module, as bitsandbytes' 8-bit class of that name loads it.

    Moments are encoded to the nearest of bitsandbytes' numbers. It has no masters: the parameters are its masters. Values are in host
    memory, and bitsandbytes moves them to its parameters.

    Args:
        optimizer: Its states may be of any dtype, in memory or on a tier.
        min_8bit_size: Parameters with fewer elements get float32 moments, as for bitsandbytes' class.

    Raises:
        UnsupportedError: A parameter is divided over processes, or a group has an option that bitsandbytes lacks.

    Example:
        theirs = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-4)
        theirs.load_state_dict(spillway.torch.bitsandbytes_state_dict(optimizer))"""

    def encoded(moment: torch.Tensor, first: bool) -> dict[str, torch.Tensor]:
        end = "1" if first else "2"
        if moment.numel() < min_8bit_size:
            return {f"state{end}": moment}
        codes, largest = _codes(moment, first)
        return {f"state{end}": codes, f"qmap{end}": _numbers(first).clone(), f"absmax{end}": largest}

    def state(moments: dict[str, torch.Tensor], step: float) -> dict[str, Any]:
        found: dict[str, Any] = {"step": int(step)}
        for number, moment in enumerate(moments.values()):
            found |= encoded(moment, number == 0)
        return found

    return _converted("bitsandbytes", optimizer, state, lambda group: {"eps": 0.0, **group})


def torchao_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict of an Adam or AdamW of this module, as torchao's 8-bit class of that name loads it. torchao encodes the moments.

    Args:
        optimizer: Its states may be of any dtype, in memory or on a tier.

    Raises:
        ImportError: There is no torchao.
        UnsupportedError: As for bitsandbytes_state_dict, and the optimizer is a Lion."""
    made = importlib.import_module("torchao.optim.subclass_8bit").OptimState8bit

    def encoded(moment: torch.Tensor, first: bool) -> Any:
        # As torchao decides it.
        if moment.numel() < 4096 or moment.numel() % _BLOCK:
            return moment
        return made.zeros(moment.shape, first, _BLOCK).copy_(moment)

    def state(moments: dict[str, torch.Tensor], step: float) -> dict[str, Any]:
        if len(moments) != len(MOMENTS):
            raise UnsupportedError(f"torchao_state_dict: torchao has no 8-bit {type(optimizer).__name__}; pass an Adam or AdamW")
        values = {name: encoded(moment, name == MOMENTS[0]) for name, moment in moments.items()}
        return {"step": torch.tensor(step), **values}

    # torchao steps only with a rate that is a tensor.
    return _converted("torchao", optimizer, state, lambda group: {**group, "lr": torch.tensor(float(group["lr"])), "amsgrad": False})


def _converted(
    package: str,
    optimizer: torch.optim.Optimizer,
    convert: Callable[[dict[str, torch.Tensor], float], dict[str, Any]],
    regroup: Callable[[dict[str, Any]], dict[str, Any]],
) -> dict[str, Any]:
    """A state dict with the states that `convert` makes of moments and number of steps, and the groups that `regroup` makes."""
    for group in optimizer.param_groups:
        for option in _REFUSED:
            if group.get(option):
                raise UnsupportedError(f"{package}_state_dict: a group has {option}=True, which {package} does not compute")
        if "betas" not in group:
            raise UnsupportedError(f"{package}_state_dict: {package} has no 8-bit {type(optimizer).__name__}; pass an Adam, AdamW or Lion")
    saved = wide_state_dict(optimizer)
    groups = [regroup({key: value for key, value in group.items() if key not in _LACKED}) for group in saved["param_groups"]]
    # One parameter after another: a moment goes once it is encoded.
    states, found = saved["state"], dict[int, Any]()
    for number in [*states]:
        state = states.pop(number)
        moments = {name: _plain(package, number, state.pop(name)) for name in MOMENTS if name in state}
        if unknown := [*state.keys() - {"step", MASTER}]:
            raise UnsupportedError(f"{package}_state_dict: {package} has no state {unknown[0]!r}; pass an Adam, AdamW or Lion")
        if moments:
            # A Lion counts no steps.
            found[number] = convert(moments, float(state.get("step", 0)))
    return {"state": found, "param_groups": groups}


def _plain(package: str, number: int, moment: Any) -> torch.Tensor:
    if type(moment) is not torch.Tensor:
        raise UnsupportedError(
            f"{package}_state_dict: the moments of parameter {number} are {type(moment).__name__}; gather the state dict to one process, "
            "and load it there"
        )
    return moment.detach().to("cpu", torch.float32, copy=True)


@functools.cache
def _numbers(signed: bool) -> torch.Tensor:
    """bitsandbytes' numbers of codes, in order."""
    numbers = [torch.tensor([0.0, 1.0])]
    for decade in range(_DECADES):
        # The parts of a decade, and those of the decades below, fill the codes but two.
        edges = torch.linspace(0.1, 1, (1 << decade) * (1 if signed else 2) + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade + 1 - _DECADES)
        numbers += [middles, -middles] if signed else [middles]
    return torch.cat(numbers).sort().values


def _codes(moment: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a moment, to the nearest, and the largest magnitude of each block."""
    numbers = _numbers(signed)
    between = (numbers[:-1] + numbers[1:]) / 2
    codes, flat = torch.empty(moment.shape, dtype=torch.uint8), moment.reshape(-1)
    largest = torch.empty(-(-flat.numel() // _BLOCK))
    for start in range(0, flat.numel(), _AT_ONCE):
        part = flat[start : start + _AT_ONCE]
        rows = torch.nn.functional.pad(part, (0, -part.numel() % _BLOCK)).view(-1, _BLOCK)
        most = rows.abs().amax(1)
        largest[start // _BLOCK : start // _BLOCK + len(most)] = most
        # A block of zeros has no magnitude to divide by. NaN is above all numbers.
        scaled = rows / most.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
        found = torch.bucketize(scaled, between, out_int32=True).clamp_(max=len(between))
        codes.view(-1)[start : start + part.numel()] = found.view(-1)[: part.numel()].to(torch.uint8)
    return codes, largest
