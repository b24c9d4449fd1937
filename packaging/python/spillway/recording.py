"""Optimizer steps that can be rolled back.

    recording = adam.prepare([(param, grad, exp_avg, exp_avg_sq)]).record()
    stats = recording.step(stats=True)
    if stats.nonfinite:
        recording.rollback()               # every bit is as before the step
    elif norm > limit:
        recording.redo(grad_scale=limit / norm)     # bit-identical to a step with that scale
    else:
        recording.commit()
"""

import ctypes

from . import _abi
from ._held import Held
from .errors import InvalidArgument

MODES = {"arithmetic": 0, "delta": 1, "shadow": 2}


class Recording(Held):
    """The last step of prepared tensors. Until the step is rolled back, redone or committed, no other code may write to
    the tensors, gradients included. close() keeps the step.

    | mode | rollback | cost |
    |---|---|---|
    | "delta" | exact, from a log | per element 9 bytes at step 1, 1.2 in steady state, at most 13 |
    | "shadow" | exact and immediate | tensors prepared with a shadow, which the step writes |
    | "arithmetic" | old values only approximately; refuses Inf and NaN | no memory |

    After commit() in mode "shadow" the shadow holds the state: prepare the next step with tensors and shadow
    exchanged."""

    what, closer = "recording", "spw_undo_close"

    def __init__(self, prepared, mode="delta"):
        if mode not in MODES:
            raise InvalidArgument(f"mode is {mode!r}; one of {', '.join(MODES)} expected")
        self._prepared = prepared
        options = _abi.sized(_abi.UndoOptions)
        options.mode, options.elements, options.tensors = MODES[mode], prepared.elements, len(prepared)
        self._hold("spw_undo_open", ctypes.byref(options))

    def step(self, *, grad_scale=1.0, stats=False):
        """Runs and records one step, which replaces the previous recording; with stats=True returns StepStats."""
        return self._through(lambda handle: self._prepared._run(grad_scale, stats, handle))

    def rollback(self):
        """Rolls the step back, and decrements the optimizer's step count."""
        self._call("spw_undo_rollback")
        self._prepared.optimizer.step_count -= 1

    def redo(self, *, grad_scale):
        """Rolls the step back and repeats it with another gradient scale, in one pass over memory."""
        self._call("spw_undo_redo", grad_scale)

    def commit(self, *, release_memory=False):
        """Keeps the step. With release_memory=True also frees the log's memory."""
        self._call("spw_undo_commit", int(release_memory))

    @property
    def log_bytes(self):
        """Bytes of log that the recorded step uses."""
        used = ctypes.c_uint64()
        self._call("spw_undo_log_bytes", ctypes.byref(used))
        return used.value
