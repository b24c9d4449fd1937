"""Spillway: optimizer offload for training large models on few GPUs.

CPU optimizer steps are bit-identical to DeepSpeed's AVX-512 kernels. Further modules store optimizer state on disks
(`Tier`, `Swap`), transfer gradients and parameters (`Gpu`), and overlap steps with the GPU (`Speculation`,
`Interleave`). Modules to import by name: `spillway.torch`, `deepspeed`, `megatron`, `pipeline`, `arena`, `stage`, `topo`,
`window`.

Importing this package needs neither torch nor numpy. The native library is loaded at the first call.

Example:
    Step two numpy arrays or torch tensors in place:

        adam = spillway.Adam(lr=1e-3)
        adam.step([(param, grad, exp_avg, exp_avg_sq)])

Conventions:
    - Times and timeouts are in seconds, sizes in bytes unless the name says elements.
    - Counters and reports are read by methods: `stats()`, `info()`, `paths()`.
    - An object that owns memory or files has `close()` and works in a `with` block. Its methods may be called by
      several threads at once unless its class says otherwise."""

from __future__ import annotations

import atexit as _atexit
import ctypes as _ctypes
import typing as _typing
from collections.abc import Callable as _Callable

from . import _abi, _arguments, _log, _native, _version
from .errors import (
    BusyError,
    CorruptError,
    GpuError,
    InternalError,
    InvalidArgumentError,
    IoError,
    LibraryNotFoundError,
    NoDeviceError,
    NoStateError,
    NoStepError,
    NotFoundError,
    OutOfOrderError,
    SpillwayError,
    SystemCallError,
    TierError,
    TierFencedError,
    TierLockedError,
    TimedOutError,
    UnknownIdError,
    UnsupportedError,
)
from .gpu import DeviceArray, Event, Gpu, Stream, gpu_count, pinned
from .interleave import Interleave, Rates, Subgroup, plan
from .optim import Adagrad, Adam, Lion, Prepared, Recording, Signum, StepStats, accumulate_, grad_stats
from .planner import plan_model
from .speculate import Speculation
from .swap import Swap
from .tier import Tier, TierPath

__version__ = _version.VERSION

__all__ = [
    "Adagrad",
    "Adam",
    "BusyError",
    "CorruptError",
    "DeviceArray",
    "Event",
    "Gpu",
    "GpuError",
    "Interleave",
    "InternalError",
    "InvalidArgumentError",
    "IoError",
    "LibraryNotFoundError",
    "Lion",
    "NoDeviceError",
    "NoStateError",
    "NoStepError",
    "NotFoundError",
    "OptimizerStats",
    "OutOfOrderError",
    "Prepared",
    "Rates",
    "Recording",
    "Signum",
    "Speculation",
    "SpillwayError",
    "StepStats",
    "Stream",
    "Subgroup",
    "Swap",
    "SystemCallError",
    "Tier",
    "TierError",
    "TierFencedError",
    "TierLockedError",
    "TierPath",
    "TimedOutError",
    "UnknownIdError",
    "UnsupportedError",
    "accumulate_",
    "gpu_count",
    "grad_stats",
    "kernel_name",
    "library_path",
    "library_version",
    "num_threads",
    "pinned",
    "plan",
    "plan_model",
    "preload_path",
    "set_log",
    "set_num_threads",
    "stats",
]

library_path: _Callable[[], str] = _native.library_path
preload_path: _Callable[[], str] = _native.preload_path
library_version: _Callable[[], str] = _native.library_version
kernel_name: _Callable[[], str] = _native.kernel_name
_log_callback = None


class OptimizerStats(_typing.NamedTuple):
    """Number of calls and of stepped elements of each optimizer in this process since the library was loaded. A Signum counts as a Lion."""

    adam_calls: int
    adam_elements: int
    adagrad_calls: int
    adagrad_elements: int
    lion_calls: int
    lion_elements: int


def set_num_threads(count: int = 0) -> None:
    """Sets the number of threads of this process's optimizer steps.

    Args:
        count: Number of threads; 0 derives it from the affinity mask, the cgroup quota and LOCAL_WORLD_SIZE.

    Raises:
        InvalidArgumentError: `count` is negative or no integer."""
    options = _abi.sized(_abi.ThreadOptions)
    options.num_threads = _arguments.unsigned("set_num_threads: count", count, 32)
    _native.call("spw_set_threads", _ctypes.byref(options))


def num_threads() -> int:
    """Returns the number of threads that a large step uses."""
    return _native.process_info().num_threads


def stats() -> OptimizerStats:
    """Returns the counters of all optimizer steps of this process."""
    counters = _native.process_info()
    return OptimizerStats(*(getattr(counters, name) for name in OptimizerStats._fields))


def set_log(function: _Callable[[str, str], object] | None, level: str = "info") -> None:
    """Sends the library's log messages to a function.

    Args:
        function: Called as function(level, message) at the end of a call of the library, on the thread of that call. It also gets
            the messages of the library's own threads. Its exceptions go to sys.unraisablehook. None: the library logs at once to
            stderr if SPILLWAY_LOG names a level, else nowhere.
        level: The least severe level to send: "off", "error", "warn", "info" or "debug".

    Raises:
        InvalidArgumentError: `level` is no known level.

    Example:
        spillway.set_log(lambda level, message: print(level, message), "warn")"""
    global _log_callback
    _arguments.one_of("set_log: level", level, _abi.LOG_LEVELS)
    names = {number: name for name, number in _abi.LOG_LEVELS.items()}

    def forward(_user: object, number: int, message: bytes) -> None:
        assert function is not None
        function(names.get(number, str(number)), message.decode("utf-8", "replace"))

    callback = _abi.LOG_FN(forward) if function is not None else _abi.LOG_FN()
    _native.call("spw_set_log", callback, None, _abi.LOG_LEVELS["off" if function is None else level])
    _log.send_to(function, level)
    if _log_callback is None and function is not None:
        _atexit.register(set_log, None)
    _log_callback = callback
