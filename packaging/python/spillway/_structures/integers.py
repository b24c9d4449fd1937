"""The check that an integer fits its C type: ctypes shortens one that does not fit, without notice."""

from __future__ import annotations

import operator
from ctypes import c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

#: The least and the largest value of the integer types of C, and of an address.
RANGES: dict[Any, tuple[int, int]] = {
    c_uint32: (0, 2**32 - 1), c_int32: (-2**31, 2**31 - 1), c_uint64: (0, 2**64 - 1), c_int64: (-2**63, 2**63 - 1),
    c_size_t: (0, 2**64 - 1), c_void_p: (0, 2**64 - 1)}


def between(argument: str, value: Any, least: int, most: int) -> int:
    """The value as an int, if it is an integer from `least` to `most`. Integers of numpy and torch, and bools, are integers; floats are none."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number <= most:
        # Here, so that a program may read the layouts from this folder alone.
        from ..errors import InvalidArgumentError
        raise InvalidArgumentError(f"{argument} is {value!r}; pass an integer from {least} to {most}")
    return number
