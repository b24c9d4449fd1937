"""Options of a tier: their names, and the C structures that they become."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from . import _abi, _arguments
from ._tier_records import TierPath
from .errors import InvalidArgumentError

MODES = {"auto": _abi.TIER_MODE_AUTO, "create": _abi.TIER_MODE_CREATE, "resume": _abi.TIER_MODE_RESUME, "read": _abi.TIER_MODE_READ}
DURABILITIES = {"data": _abi.TIER_DURABILITY_DATA, "process": _abi.TIER_DURABILITY_PROCESS, "full": _abi.TIER_DURABILITY_FULL}
BACKENDS = {"auto": _abi.IO_BACKEND_AUTO, "uring": _abi.IO_BACKEND_URING, "threads": _abi.IO_BACKEND_THREADS}
_DEGRADED = _abi.TIER_FLAG_DEGRADED
_NODE = _abi.TIER_PATH_FLAG_NODE
_DIRECTORY, _MEMORY = _abi.TIER_PATH_KIND_DIRECTORY, _abi.TIER_PATH_KIND_MEMORY


def tier_options(paths: Iterable[Any], job: str, host: str | None, rank: int, world: int, degraded: bool) -> Any:
    """Returns the C options that opening and reading a tier share."""
    options = _abi.sized(_abi.TierOptions)
    options.job, options.host = text(job, "job"), None if host is None else text(host, "host")
    options.rank, options.world, options.flags = rank, world, _DEGRADED * bool(degraded)
    # A string is a sequence of strings too: its letters would be directories.
    if isinstance(paths, (str, bytes, os.PathLike)):
        raise InvalidArgumentError(f"Tier: paths is {paths!r}; pass a list of paths")
    rows = [_path(path) for path in paths]
    options.paths, options.path_count = (_abi.TierPath * len(rows))(*rows), len(rows)
    return options


def _path(given: Any) -> Any:
    path = given if isinstance(given, TierPath) else TierPath(given)
    kind, directory = (_MEMORY, None) if path.directory is None else (_DIRECTORY, _arguments.path("Tier: a path", path.directory))
    flags, node = (0, 0) if path.node is None else (_NODE, _arguments.unsigned("Tier: node", path.node, 32))
    return _abi.TierPath(ctypes.sizeof(_abi.TierPath), kind, directory, path.limit_bytes, path.reserve_bytes, flags, node)


def number(value: int, argument: str, most: int = (1 << 64) - 1) -> int:
    """Returns an integer argument; raises InvalidArgumentError if it does not fit."""
    return _arguments.between(f"Tier: {argument}", value, 0, most)


def milliseconds(argument: str, seconds: Any) -> int:
    """Returns a limit of seconds as C takes it. Less than a millisecond is one, because 0 is the default."""
    try:
        value = float(seconds)
    except (TypeError, ValueError, OverflowError):
        value = -1.0
    if not 0 <= value < 1e15:
        raise InvalidArgumentError(f"Tier: {argument} is {seconds!r}; pass 0 or a number of seconds")
    return math.ceil(value * 1000)


def payload_of(payload: Any) -> bytes:
    """Returns the bytes of a commit's payload."""
    if not isinstance(payload, (bytes, bytearray, memoryview)):
        raise InvalidArgumentError(f"Tier: payload is of type {type(payload).__name__}; pass bytes")
    return bytes(payload)


def choice(choices: Mapping[str, int], value: str, argument: str) -> int:
    """Returns the number of a named choice; raises InvalidArgumentError for an unknown name."""
    return choices[_arguments.one_of(f"Tier: {argument}", value, choices)]


def text(value: Any, argument: str) -> bytes:
    """Returns a string as bytes for C."""
    return _arguments.text(f"Tier: {argument}", value)
