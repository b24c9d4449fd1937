"""What a parameter group of a torch optimizer says to the library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

#: Options of a group that only torch's own step has.
TORCHS = ("amsgrad", "capturable", "differentiable")


def is_torchs(group: Mapping[str, Any]) -> bool:
    """True if only torch has what a group asks for."""
    return bool(group.get("amsgrad") or group.get("capturable") or group.get("differentiable"))


def put_numbers(options: Any, group: Mapping[str, Any], names: Iterable[str] = ("lr", "eps", "weight_decay", "betas")) -> None:
    """Writes numbers of a group into the C struct of an optimizer's options, by default those of Adam.

    Args:
        options: The struct. It has a field of each name, and beta1 and beta2 for "betas".
        group: The group.
        names: Names of the numbers.

    Raises:
        KeyError: The group lacks one of them.
        TypeError, ValueError, OverflowError, RuntimeError: One of them is no number."""
    for name in names:
        if name == "betas":
            options.beta1, options.beta2 = map(float, group[name])
        else:
            setattr(options, name, float(group[name]))
