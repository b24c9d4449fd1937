"""Integers as C has them: ctypes shortens one that does not fit its type, without notice. Here it is an error.

| name | what |
|---|---|
| `between` | the check of a value |
| `u32`, `i32`, `u64`, `i64`, `address` | integer arguments of functions, with their names in the header |
| `Given` | base of structs whose integer fields are checked |"""

from __future__ import annotations

import operator
from ctypes import Structure, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import partial
from typing import Any, NamedTuple

#: The least and the largest value of the integer types of C, and of an address.
RANGES: dict[Any, tuple[int, int]] = {
    c_uint32: (0, 2**32 - 1),
    c_int32: (-(2**31), 2**31 - 1),
    c_uint64: (0, 2**64 - 1),
    c_int64: (-(2**63), 2**63 - 1),
    c_void_p: (0, 2**64 - 1),
}


def between(argument: str, value: Any, least: int, most: int) -> int:
    """The value as an int, if it is an integer from `least` to `most`. Integers of numpy and torch, and bools, are integers; floats are
    none."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number <= most:
        from .errors import InvalidArgumentError

        raise InvalidArgumentError(f"{argument} is {value!r}; pass an integer from {least} to {most}")
    return number


class Integer(NamedTuple):
    """An integer argument of a C function: its C type, and its name in the header."""

    kind: Any
    name: str


u32, i32, u64, i64 = (partial(Integer, kind) for kind in (c_uint32, c_int32, c_uint64, c_int64))
#: An address: an integer, or an object of ctypes.
address = partial(Integer, c_void_p)


class _Checked(type(Structure)):
    def __init__(cls, name, bases, body):
        super().__init__(name, bases, body)
        for field, kind, *_ in body.get("_fields_", ()):
            if kind in RANGES and kind is not c_void_p:
                setattr(cls, field, _Field(field, getattr(cls, field), *RANGES[kind]))


class Given(Structure, metaclass=_Checked):
    """Base of structs with user input: an integer that does not fit its field is an error."""


class _Field:
    """A field that refuses what does not fit. Fields of floats and addresses stay those of ctypes, without Python code per access."""

    def __init__(self, name, field, least, most):
        self._name, self._field, self._least, self._most = name, field, least, most
        self.offset, self.size = field.offset, field.size

    def __get__(self, instance, owner=None):
        return self if instance is None else self._field.__get__(instance, owner)

    def __set__(self, instance, value):
        if type(value) is not int or not self._least <= value <= self._most:
            value = between(self._name, value, self._least, self._most)
        self._field.__set__(instance, value)
