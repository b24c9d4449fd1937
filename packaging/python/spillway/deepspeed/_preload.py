"""Counters of the preload library, which serves the ops that DeepSpeed compiled, if it is loaded in this process."""

from __future__ import annotations

import ctypes
from typing import Any

OPS = ("cpu_adam", "cpu_adagrad", "cpu_lion")


def served() -> dict[str, dict[str, Any]] | None:
    """For each op the served calls, their elements, and the calls that went to DeepSpeed's own function, for active().
    None if the preload library is not loaded, or is too old to count."""
    try:
        counts_of = ctypes.CDLL(None).spillway_preload_counts
    except AttributeError:
        return None
    counts = (ctypes.c_uint64 * 3)()
    report = {}
    for op in OPS:
        if counts_of(op.encode(), counts):
            report[op] = dict(zip(("calls", "elements", "left_to_deepspeed"), counts))
    return report
