"""Log lines of the Python package. They go to the function of set_log(), else to stderr if SPILLWAY_LOG asks, like those of
the library."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from . import _abi, _native

# Values of SPILLWAY_LOG that ask for info messages, as in src/log/level.rs.
_INFO = ("info", "1", "debug")

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
            _sink[0]("info", _served(framework, op))
    elif os.environ.get("SPILLWAY_LOG", "").strip().lower() in _INFO and sys.stderr is not None:
        print(f"spillway: {_served(framework, op)}", file=sys.stderr, flush=True)


def _served(framework: str, op: str) -> str:
    import spillway
    return f"{framework}: {op} served by libspillway {spillway.library_version()}, kernel {spillway.kernel_name()}"
