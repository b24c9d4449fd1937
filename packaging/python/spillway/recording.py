"""Steps that can be taken back.

    recording = adam.prepare([(param, grad, exp_avg, exp_avg_sq)]).record()
    stats = recording.step(stats=True)
    if stats.nonfinite:
        recording.rollback()               # every bit is as before the step
    elif norm > limit:
        recording.redo(grad_scale=limit / norm)     # the bits of having stepped with that scale
    else:
        recording.commit()
"""

import ctypes

from . import _abi
from ._held import Held
from .errors import InvalidArgument

MODES = {"arithmetic": 0, "delta": 1, "shadow": 2}


class Recording(Held):
    """The last step of prepared tensors. Until it is rolled back, redone or committed, nobody else writes to them,
    gradients included. After close() it stands.

    "delta": exact, by a log of 1.2 bytes per element in steady state, 9 at step 1, never more than 13. "shadow": exact and
    in no time, for tensors prepared with a shadow, where the step writes; after commit() the caller steps from there,
    with tensors prepared the other way round. "arithmetic": no memory, old values only nearly, refuses Inf and NaN."""

    what, closer = "recording", "spw_undo_close"

    def __init__(self, prepared, mode="delta"):
        if mode not in MODES:
            raise InvalidArgument(f"mode is {mode!r}; one of {', '.join(MODES)} expected")
        self._prepared = prepared
        options = _abi.sized(_abi.UndoOptions)
        options.mode, options.elements, options.tensors = MODES[mode], prepared.elements, len(prepared)
        self._hold("spw_undo_open", ctypes.byref(options))

    def step(self, *, grad_scale=1.0, stats=False):
        """One step of the optimizer, recorded in place of the one before; with stats=True returns StepStats."""
        return self._through(lambda handle: self._prepared._run(grad_scale, stats, handle))

    def rollback(self):
        """Takes the step back, and the optimizer's count with it."""
        self._call("spw_undo_rollback")
        self._prepared.optimizer.step_count -= 1

    def redo(self, *, grad_scale):
        """Takes the step back and does it again with another factor on the gradient, in one pass over memory."""
        self._call("spw_undo_redo", grad_scale)

    def commit(self, *, release_memory=False):
        """The step stands."""
        self._call("spw_undo_commit", int(release_memory))

    @property
    def log_bytes(self):
        """Bytes of log that the step takes."""
        used = ctypes.c_uint64()
        self._call("spw_undo_log_bytes", ctypes.byref(used))
        return used.value
