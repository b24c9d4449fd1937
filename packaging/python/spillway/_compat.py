"""Whether an installed version of a framework is one that Spillway was tested with, and has the methods that it replaces or calls."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Mapping
from typing import Any


def numbers(stated: str) -> tuple[int, ...]:
    """Major, minor and patch number of a version; zeros for a text that is none."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", stated)
    return tuple(int(number or 0) for number in found.groups()) if found else (0, 0, 0)


def version_lacks(what: str, framework: str, first: tuple[int, ...], last: tuple[int, ...], stated: str) -> str | None:
    """The reason why a version is not served; None if it is.

    Args:
        what: What is tested, with its verb: "Spillway is".
        framework: Name of the framework.
        first, last: The first version, and the last minor series, in which a test trains.
        stated: The version that is installed."""
    found = numbers(stated)
    if first <= found and found[: len(last)] <= last:
        return None
    begin, end = (".".join(map(str, version)) for version in (first, last))
    return f"{what} tested with {framework} {begin} to {end}.x, and this is {stated or 'a version without a number'}"


def methods_lack(owner: type, methods: Mapping[str, str], framework: str, optional: bool = False) -> str | None:
    """The reason why a class does not have the methods of the tested versions; None if it has.

    Args:
        owner: The class.
        methods: For each method its parameters after `self`, separated by spaces.
        framework: Name of the framework.
        optional: A method may be missing."""
    for name, parameters in methods.items():
        method = inspect.getattr_static(owner, name, None)
        if method is None and not optional:
            return f"{owner.__name__} of this {framework} has no {name}"
        if method is not None and _parameters(method) != parameters.split():
            return (
                f"{owner.__name__}.{name} of this {framework} takes ({', '.join(_parameters(method))}), and Spillway was written for "
                f"({', '.join(parameters.split())})"
            )
    return None


def _parameters(method: Any) -> list[str]:
    """Names of the parameters after `self`. Decorators that accept any arguments keep the function in a closure."""
    if isinstance(method, staticmethod):
        return list(inspect.signature(method.__func__).parameters)
    names = list(inspect.signature(method).parameters)
    if names == ["args", "kwargs"]:
        inner = [cell.cell_contents for cell in method.__closure__ or () if isinstance(cell.cell_contents, types.FunctionType)]
        if len(inner) == 1:
            return _parameters(inner[0])
    return names[1:]
