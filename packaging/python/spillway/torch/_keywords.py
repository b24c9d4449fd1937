"""The keywords beyond torch, which all optimizer classes have: their types, their defaults, and the checks of those that `offload` has too.

A class declares torch's arguments one by one, and these as `**beyond: Unpack[Beyond]`, which type checkers and editors understand.
`ConstructorSignature` spells them out for `inspect.signature` and `help`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch

from .. import _pinned
from ..errors import InvalidArgumentError

if TYPE_CHECKING:
    from ..tier import TierPath
    from ._tier_states import TierOptions


class Beyond(TypedDict, total=False):
    """The keywords beyond torch; the docstrings of the classes of `spillway.torch` describe them."""

    max_norm: float | None
    process_group: torch.distributed.ProcessGroup | None
    skip_nonfinite: bool
    undo: bool
    moment_dtype: torch.dtype | str | None
    moment_rounding: str | None
    rounding_seed: int
    master: str | None
    tier: str | os.PathLike[str] | TierPath | TierOptions | Sequence[str | os.PathLike[str] | TierPath | None] | None
    host_memory: int | Literal["auto"] | None
    overlap: bool


#: Their defaults.
DEFAULTS: dict[str, Any] = {
    "max_norm": None,
    "process_group": None,
    "skip_nonfinite": False,
    "undo": False,
    "moment_dtype": None,
    "moment_rounding": None,
    "rounding_seed": 0,
    "master": None,
    "tier": None,
    "host_memory": None,
    "overlap": False,
}


def take_beyond(options: dict[str, Any]) -> dict[str, Any]:
    """Removes the keywords beyond torch from `options`, and returns all of them."""
    return {name: options.pop(name, default) for name, default in DEFAULTS.items()}


class ConstructorSignature:
    """The attribute `__signature__` of a class: the parameters of its `__init__`, with one for each keyword of `**beyond`."""

    def __get__(self, _: Any, owner: Any) -> inspect.Signature:
        found = inspect.signature(owner.__init__)
        params = list(found.parameters.values())
        if params and params[0].kind is not inspect.Parameter.VAR_POSITIONAL:
            del params[0]
        if params and params[-1].name == "beyond" and params[-1].kind is inspect.Parameter.VAR_KEYWORD:
            params[-1:] = [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=_types()[name])
                for name, default in DEFAULTS.items()
            ]
        return found.replace(parameters=params)


def _types() -> dict[str, str]:
    """The types of the keywords beyond torch, as they are written."""
    return {name: kind.__forward_arg__ for name, kind in Beyond.__annotations__.items()}


def check_keywords(name: str, max_norm: Any, process_group: Any, flags: dict[str, Any], host_memory: Any) -> None:
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
    _pinned.limit_of(name, host_memory)
