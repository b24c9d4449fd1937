"""What of Spillway is installed in this process: the replaced ops and parts, which Adam steps are recorded, and the counters of each part.

Standard library only, like _hook.py: spillway.pth loads both in every Python process of a job."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ..errors import InvalidArgumentError

OPS = ("cpu_adam", "cpu_adagrad", "cpu_lion", "async_io", "pin_memory", "gds")
# Replaceable parts: the ops, and Python classes.
PARTS = (*OPS, "superoffload", "swapper")
UNDO_MODES = ("auto", "always", "never")

#: The replaced ops and parts.
parts: set[str] = set()
#: Which Adam steps are recorded; None until install() or the first op chooses it.
undo: str | None = None
# The `undo` argument of install(), once one was given.
_given: str | None = None
_counters: list[tuple[frozenset[str], Callable[[], dict[str, Any]]]] = []


def choose_undo(given: str | None) -> None:
    """Has the argument of install() select the recorded steps; None keeps an earlier one."""
    global _given, undo
    _given, undo = given or _given, None


def read_undo() -> str:
    """The `undo` argument of install(); if it was not given, that of SPILLWAY_DEEPSPEED_UNDO, or "auto"."""
    global undo
    mode = _given or os.environ.get("SPILLWAY_DEEPSPEED_UNDO") or "auto"
    if mode not in UNDO_MODES:
        raise InvalidArgumentError(
            f"the environment variable SPILLWAY_DEEPSPEED_UNDO is {mode!r}; set it to one of {', '.join(UNDO_MODES)}"
        )
    undo = mode
    return mode


def counted(entries: Callable[[], dict[str, Any]], *of: str) -> None:
    """Adds a part's entries to active(), while one of the parts `of` is installed; always, if none is named."""
    _counters.append((frozenset(of), entries))


def report() -> dict[str, Any]:
    """The entries of all parts that were imported."""
    found: dict[str, Any] = {}
    for of, entries in _counters:
        if not of or of & parts:
            found.update(entries())
    return found
