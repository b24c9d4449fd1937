"""Ranges in the timeline of torch's profiler, and of NVTX under torch.autograd.profiler.emit_nvtx. Without an active profiler a range
costs one call of torch that tells so. Torch is not imported for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

_NOTHING: AbstractContextManager[Any] = nullcontext()
#: torch's function that tells whether a profiler is active in this thread; None: torch is not imported.
_is_active: Callable[[], bool] | None = None


def span(name: str, number: int | None = None) -> AbstractContextManager[Any]:
    """A range of a `with` block, as `spillway.name`, with the number of a bucket or subgroup if there is one."""
    global _is_active
    if _is_active is None:
        _is_active = getattr(getattr(sys.modules.get("torch"), "autograd", None), "_profiler_enabled", None)
        if _is_active is None:
            return _NOTHING
    if not _is_active():
        return _NOTHING
    import torch

    found: AbstractContextManager[Any] = torch.profiler.record_function(
        f"spillway.{name}" if number is None else f"spillway.{name} {number}"
    )
    return found
