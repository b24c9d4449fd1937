"""Reports the configured limits that are too small for the optimizer states."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .. import _abi
from ..errors import InvalidArgumentError, SpillwayError

_LIMIT_REACHED = _abi.ERR_LIMIT_REACHED
# Bytes of state per parameter.
_STATE, _SPLIT_STATE = 12, 10


@contextlib.contextmanager
def named(settings: Any, elements: list[int]) -> Iterator[None]:
    """Turns the tier's error for too small a limit into one that names the settings."""
    try:
        yield
    except SpillwayError as error:
        limits = {f"spillway.paths[{index}].limit_bytes": path.limit_bytes for index, path in enumerate(settings.paths) if path.limit_bytes}
        if not limits or error.status != _LIMIT_REACHED:
            raise
        needed = (_SPLIT_STATE if settings.split_master else _STATE) * sum(elements)
        given = ", ".join(f"{name} is {limit}" for name, limit in limits.items())
        raise InvalidArgumentError(
            f"{given}: too small for the optimizer states of this rank, which take {needed} bytes, rounded up to "
            "whole blocks; raise the limits, or add a path"
        ) from error
