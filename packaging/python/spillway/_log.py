"""Log lines of the Python package. They go to the function of set_log(), else to stderr if SPILLWAY_LOG asks, like those of
the library."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Callable

from . import _abi, _native

# Values of SPILLWAY_LOG that ask for info messages, as in src/log/level.rs.
_INFO = ("info", "1", "debug")

# Calls a function whose exception goes to sys.unraisablehook.
_report = ctypes.CFUNCTYPE(None)

_sink: tuple[Callable[[str, str], object], int] | None = None
_said: set[tuple[str, str]] = set()


def send_to(function: Callable[[str, str], object] | None, level: str) -> None:
    """Sends later lines up to a level to a function; None returns to SPILLWAY_LOG."""
    global _sink
    _sink = None if function is None else (function, _abi.LOG_LEVELS[level])


def first_served(framework: str, op: str) -> None:
    """Logs the first served call of an op of a framework in this process."""
    if (framework, op) in _said:
        return
    _said.add((framework, op))
    if _sink is not None:
        if _sink[1] >= _abi.LOG_LEVELS["info"]:
            _call(_sink[0], _served(framework, op))
    elif os.environ.get("SPILLWAY_LOG", "").strip().lower() in _INFO and sys.stderr is not None:
        # The program may have closed it.
        with contextlib.suppress(ValueError, OSError):
            print(f"spillway: {_served(framework, op)}", file=sys.stderr, flush=True)


def _call(function: Callable[[str, str], object], message: str) -> None:
    """Calls the program's function. Its exception is reported as ctypes reports one of a line that the library logs: the call that logs has
    been done, and must not look like one that failed."""
    try:
        function("info", message)
    except Exception as error:
        _report(functools.partial(_raise, error))()


def _raise(error: Exception) -> None:
    raise error


def _served(framework: str, op: str) -> str:
    return f"{framework}: {op} served by libspillway {_native.library_version()}, kernel {_native.kernel_name()}"
