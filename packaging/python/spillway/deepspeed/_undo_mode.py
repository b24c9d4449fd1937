"""Which Adam steps of DeepSpeed are recorded, as install() or the environment chooses."""

from __future__ import annotations

import os

MODES = ("auto", "always", "never")
#: The `undo` argument of install(), once one was given.
given: str | None = None


def chosen() -> str:
    """The `undo` argument of install(); if it was not given, that of SPILLWAY_DEEPSPEED_UNDO, or "auto"."""
    mode = given or os.environ.get("SPILLWAY_DEEPSPEED_UNDO") or "auto"
    if mode not in MODES:
        raise ValueError(f"the environment variable SPILLWAY_DEEPSPEED_UNDO is {mode!r}; set it to one of {', '.join(MODES)}")
    return mode
