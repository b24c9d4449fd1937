"""The op modules that DeepSpeed's builders return, with DeepSpeed's function names, and the counters of each op.

They are module objects without __file__, because there is no compiled file."""

from __future__ import annotations

import ctypes
import threading
import types
from typing import Any

import spillway

from . import _installed, _io_ops, _optimizer_ops, _zenflow

_lock = threading.Lock()
_modules: dict[str, types.ModuleType] = {}
_SERVED = {**_optimizer_ops.SERVED, "cpu_adam": (*_optimizer_ops.SERVED["cpu_adam"], *_zenflow.SERVED), **_io_ops.SERVED}


def module(op):
    """The module of an op, one object per process."""
    with _lock:
        if op not in _modules:
            made: Any = types.ModuleType(f"spillway.deepspeed.{op}", f"Replacement of DeepSpeed's {op}.")
            made.__spillway__ = True
            for served in _SERVED[op]:
                setattr(made, served.__name__, served)
            for name, advice in _optimizer_ops.NOT_SERVED.get(op, {}).items():
                setattr(made, name, _refusal(op, name, advice))
            _modules[op] = made
        return _modules[op]


def report():
    """The entries of active(): those of the ops, and of the parts of stage 3 that DeepSpeed has imported."""
    return _installed.report()


def _refusal(op, name, advice):
    def refuse(*_args, **_kwargs):
        raise NotImplementedError(f"Spillway's {op} has no {name}: {advice}")

    refuse.__name__ = name
    return refuse


def _preloaded():
    """The calls that the preload library served of the ops that DeepSpeed compiled, their elements, and the calls that went to DeepSpeed's
    own function. Empty if the library is not loaded, or is too old to count."""
    try:
        counts_of = ctypes.CDLL(None).spillway_preload_counts
    except AttributeError:
        return {}
    counts = (ctypes.c_uint64 * 3)()
    names = ("calls", "elements", "left_to_deepspeed")
    return {"preload": {op: dict(zip(names, counts)) for op in _optimizer_ops.SERVED if counts_of(op.encode(), counts)}}


_installed.counted(lambda: {"kernel": spillway.kernel_name()}, *_installed.OPS)
_installed.counted(_preloaded)
