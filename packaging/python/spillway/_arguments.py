"""Checks of numbers, names, dtypes and timeouts before C gets them: ctypes shortens integers and cuts names without notice."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Collection
from typing import Any

from ._integers import RANGES, between
from .errors import InvalidArgumentError

_NUMPY = {"f32": "float32", "f16": "float16", "bf16": "uint16"}


def unsigned(argument: str, value: Any, bits: int = 64) -> int:
    """The value, if an unsigned C integer of `bits` bits holds it. `argument` is its name in messages."""
    return between(argument, value, 0, (1 << bits) - 1)


def signed(argument: str, value: Any) -> int:
    """The value, if a signed C integer of 32 bits holds it."""
    return between(argument, value, -(1 << 31), (1 << 31) - 1)


def table(argument: str, values: Any, kind: Any) -> Any:
    """A C array of integers of the C type `kind`, if all values fit."""
    given = tuple(values)
    return (kind * len(given))(*(between(argument, value, *RANGES[kind]) for value in given))


def real(argument: str, value: Any) -> float:
    """The value as a float, if it is a number or has __float__ and fits."""
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise InvalidArgumentError(f"{argument} is {value!r}; pass a number") from None


def text(argument: str, value: Any) -> bytes:
    """The bytes of a name; a NUL would end it early in C."""
    if not isinstance(value, str) or "\0" in value:
        raise InvalidArgumentError(f"{argument} is {value!r}; pass a str without NUL characters")
    return value.encode("utf-8", "surrogateescape")


def one_of(argument: str, value: Any, names: Collection[str]) -> str:
    """The value, if it is one of these names."""
    if not isinstance(value, str) or value not in names:
        raise InvalidArgumentError(f"{argument} is {value!r}; pass one of {', '.join(names)}")
    return value


def path(argument: str, value: Any) -> bytes:
    """The bytes of a file's name; a NUL would end it early in C."""
    name = os.fsencode(value)
    if b"\0" in name:
        raise InvalidArgumentError(f"{argument} is {value!r}; pass a name without NUL characters")
    return name


def seconds(timeout: Any) -> float | None:
    """A timeout in seconds, at least 0; None: no limit."""
    if timeout is None:
        return None
    try:
        value = float(timeout)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise InvalidArgumentError(f"timeout is {timeout!r}; pass a finite number of seconds, or None for no limit")
    return max(0.0, value)


def milliseconds(timeout: Any) -> int:
    """A timeout as C takes it: milliseconds, or -1 for no limit."""
    value = seconds(timeout)
    return -1 if value is None else int(min(value * 1000 + 0.5, 2.0**62))


def numpy_dtype(argument: str, dtype: Any) -> Any:
    """The numpy dtype of "f32", "f16", "bf16" (as uint16) or of anything that names one. Shared bytes are no Python objects."""
    import numpy

    try:
        kind = numpy.dtype(_NUMPY.get(dtype, dtype) if isinstance(dtype, str) else dtype)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{argument} is {dtype!r}, which names no numpy dtype: {error}") from None
    if kind.hasobject or kind.itemsize == 0:
        raise InvalidArgumentError(
            f"{argument} is {dtype!r}, whose elements are {'Python objects' if kind.hasobject else 'empty'}; pass a dtype of plain numbers"
        )
    return kind


def shape(argument: str, given: Any, available: int) -> tuple[int, ...]:
    """The shape of an array over the first of `available` elements. One length may be -1: the array has all elements then."""
    try:
        lengths = tuple(map(operator.index, given if hasattr(given, "__iter__") else (given,)))
    except TypeError:
        lengths = (-2,)
    if any(length < -1 for length in lengths) or lengths.count(-1) > 1:
        raise InvalidArgumentError(f"{argument} is {given!r}; pass lengths of at least 0, of which one may be -1")
    count = math.prod(length for length in lengths if length >= 0)
    if -1 in lengths:
        if count == 0 or available % count:
            raise InvalidArgumentError(f"{argument} is {given!r}, but {available} elements are no multiple of {count}")
        return tuple(available // count if length < 0 else length for length in lengths)
    if count > available:
        raise InvalidArgumentError(f"{argument} is {given!r}, with {count} elements, but the region has {available}")
    return lengths
