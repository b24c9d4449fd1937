"""Recordings of steps that DeepSpeed may roll back with adam_rollback.

In DeepSpeed only SuperOffload rolls steps back, and only it calls DeepSpeedCPUAdam.step_subgroup. Mode "auto" therefore
records the steps of step_subgroup, and those of every id that was rolled back before; plain ZeRO-Offload has no cost. A
recording takes about a tenth of a step's time, and per parameter 9 bytes at step 1, 1.2 in steady state and at most 13.
Between steps at most 3 bytes per parameter stay allocated.

Recordings are keyed by id and the address of exp_avg, because SuperOffload passes param and grad at changing
addresses."""

from __future__ import annotations

import contextlib
import ctypes
import threading

from .. import _abi, _native
from . import _undo_mode

_DELTA = _abi.UNDO_MODE_DELTA

_thread = threading.local()
_rolled_back: set[int] = set()
_recordings: dict[tuple[int, int], _Recording] = {}
_exact: list[None] = []
_nearly: list[None] = []


_mode = ""


def read_mode():
    """Reads the mode that selects the recorded steps. A step does not read it again."""
    global _mode
    _mode = _undo_mode.chosen()


read_mode()


@contextlib.contextmanager
def subgroup_step():
    """Marks the steps of this thread as those of step_subgroup."""
    before = getattr(_thread, "subgroup", False)
    _thread.subgroup = True
    try:
        yield
    finally:
        _thread.subgroup = before


def wanted(optimizer_id):
    """True if the next step of the id must be recorded."""
    if _mode == "auto":
        return getattr(_thread, "subgroup", False) or optimizer_id in _rolled_back
    return _mode == "always"


@contextlib.contextmanager
def recording(optimizer_id, tensor, make):
    """The handle of this tensor's recording; None if there is none and `make` is false.

    The handle is removed from the table while it is in use, so no other thread finds it."""
    key = (optimizer_id, tensor.exp_avg)
    found = _recordings.pop(key, None)
    if found and make and found.elements < tensor.n:
        found = None
    if found is None and make:
        found = _Recording(tensor.n)
    try:
        yield found and found.handle
    finally:
        if found:
            _recordings[key] = found


def rolled_back(optimizer_id, exact):
    """Counts a rollback, and enables recording for the id's next steps."""
    _rolled_back.add(optimizer_id)
    (_exact if exact else _nearly).append(None)


def forget(optimizer_id):
    """Drops the recordings of an id."""
    _rolled_back.discard(optimizer_id)
    for key in [key for key in list(_recordings) if key[0] == optimizer_id]:
        _recordings.pop(key, None)


def report():
    """Entry for active(); empty if nothing was recorded or rolled back."""
    if not (_recordings or _exact or _nearly):
        return {}
    return {
        "mode": _mode,
        "recordings": len(_recordings),
        "log_bytes": sum(r.bytes() for r in list(_recordings.values())),
        "exact_rollbacks": len(_exact),
        "arithmetic_rollbacks": len(_nearly),
    }


class _Recording:
    """An spw_undo handle that is closed with its last reference."""

    def __init__(self, elements):
        self.elements, self.handle = elements, ctypes.c_void_p()
        options = _abi.sized(_abi.UndoOptions)
        options.mode, options.elements, options.tensors = _DELTA, elements, 1
        _native.call("spw_undo_open", ctypes.byref(options), ctypes.byref(self.handle))
        self._close = _native.library().spw_undo_close

    def bytes(self):
        used = ctypes.c_uint64()
        _native.call("spw_undo_get_log_bytes", self.handle, ctypes.byref(used))
        return used.value

    def __del__(self):
        if self.handle:
            self._close(self.handle)
