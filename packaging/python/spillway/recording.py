"""Optimizer steps that can be rolled back.

recording = adam.prepare([(param, grad, exp_avg, exp_avg_sq)]).record()
stats = recording.step(return_stats=True)
if stats.nonfinite:
    recording.rollback()               # every bit is as before the step
elif norm > limit:
    recording.redo(grad_scale=limit / norm)     # bit-identical to a step with that scale
else:
    recording.commit()
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any, NamedTuple, Protocol

from . import _abi, _arguments
from ._native_handle import _NativeHandle

MODES = {"arithmetic": _abi.UNDO_MODE_ARITHMETIC, "delta": _abi.UNDO_MODE_DELTA, "shadow": _abi.UNDO_MODE_SHADOW}


class StepStats(NamedTuple):
    """Statistics of scaled gradients.

    Attributes:
        nonfinite: True if any gradient is Inf or NaN.
        sum_squares: Sum of the squares of all gradients, in float64; the norm is its square root."""

    nonfinite: bool
    sum_squares: float


class _Prepared(Protocol):
    """Prepared tensors, as a Recording uses them."""

    optimizer: Any

    def __len__(self) -> int: ...

    @property
    def elements(self) -> int: ...

    def _run(self, grad_scale: float, wanted: bool, recording: Any = None) -> StepStats | None: ...


class Recording(_NativeHandle):
    """The last step of prepared tensors, which can be rolled back or redone.

    Until the step is rolled back, redone or committed, no other code may write to the tensors, gradients included.
    close() keeps the step. Not thread-safe.

    | mode | rollback | cost |
    |---|---|---|
    | "delta" | exact, from a log | per element 1.2 bytes in steady state, 3.4 at step 2, at most 13 |
    | "shadow" | exact and immediate | tensors prepared with a shadow, which the step writes |
    | "arithmetic" | old values only approximately; refuses Inf and NaN | no memory |

    After commit() in mode "shadow" the shadow holds the state: prepare the next step with tensors and shadow
    exchanged.

    Args:
        prepared: The tensors, from an optimizer's prepare().
        mode: "delta", "shadow" or "arithmetic".

    Raises:
        InvalidArgumentError: `mode` is unknown.

    Example:
        with prepared.record() as recording:
            recording.step()
            recording.rollback()"""

    closer = "spw_undo_close"

    def __init__(self, prepared: _Prepared, mode: str = "delta"):
        self._prepared, self._mode = prepared, _arguments.one_of("Recording: mode", mode, MODES)
        options = _abi.sized(_abi.UndoOptions)
        options.mode, options.elements, options.tensors = MODES[mode], prepared.elements, len(prepared)
        self._hold("spw_undo_open", ctypes.byref(options))

    def _facts(self) -> dict[str, Any]:
        return {"mode": self._mode, "tensors": len(self._prepared), "elements": self._prepared.elements}

    def step(self, *, grad_scale: float = 1.0, return_stats: bool = False) -> StepStats | None:
        """Runs and records one step, which replaces the previous recording.

        Args:
            grad_scale: Factor of the gradients.
            return_stats: Return the statistics of the scaled gradients.

        Returns:
            StepStats with `return_stats`, else None."""
        return self._through(lambda handle: self._prepared._run(grad_scale, return_stats, handle))

    def rollback(self) -> None:
        """Rolls the step back, and decrements the optimizer's step count.

        Raises:
            InvalidArgumentError: No step is recorded."""
        optimizer = self._prepared.optimizer
        self._counted(partial(setattr, optimizer, "step_count", optimizer.step_count - 1), "spw_undo_rollback")

    def redo(self, *, grad_scale: float) -> None:
        """Rolls the step back and repeats it with another gradient scale, in one pass over memory.

        Args:
            grad_scale: Factor of the gradients.

        Raises:
            InvalidArgumentError: No step is recorded."""
        self._call("spw_undo_redo", _arguments.real("grad_scale", grad_scale))

    def commit(self, *, release_memory: bool = False) -> None:
        """Keeps the step.

        Args:
            release_memory: Also free the log's memory."""
        self._call("spw_undo_commit", int(release_memory))

    @property
    def log_bytes(self) -> int:
        """Bytes of log that the recorded step uses."""
        used = ctypes.c_uint64()
        self._call("spw_undo_get_log_bytes", ctypes.byref(used))
        return used.value
