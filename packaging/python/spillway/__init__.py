"""Spillway: optimizer offload for training large models on few GPUs.

CPU optimizer steps are bit-identical to DeepSpeed's AVX-512 kernels. Further modules store optimizer state on disks
(`Tier`, `Swap`), transfer gradients and parameters (`Gpu`), and overlap steps with the GPU (`Speculation`,
`Interleave`).

Importing this package needs neither torch nor numpy. The native library is loaded at the first call."""

import atexit as _atexit
import ctypes as _ctypes

from . import _abi, _native
from .errors import (Busy, Corrupt, GpuFailure, InternalError, InvalidArgument, IoFailure, LibraryNotFound, NoDevice, NoState,
                     NoStep, NotFound, OutOfOrder, SpillwayError, SystemFailure, TierFailure, TierLocked, TimedOut, UnknownId,
                     Unsupported)
from .gpu import DeviceArray, Event, Gpu, Stream, gpu_count, pinned
from .interleave import Interleave, Rates, Subgroup, plan
from .optim import Adagrad, Adam, Lion, Prepared, Recording, StepStats, grad_stats
from .speculate import Speculation
from .swap import Swap
from .tier import Tier, TierPath

__version__ = "0.1.0"

__all__ = ["Adagrad", "Adam", "Busy", "Corrupt", "DeviceArray", "Event", "Gpu", "GpuFailure", "Interleave", "InternalError",
           "InvalidArgument", "IoFailure", "LibraryNotFound", "Lion", "NoDevice", "NoState", "NoStep", "NotFound", "OutOfOrder",
           "Prepared", "Rates", "Recording", "Speculation", "SpillwayError", "StepStats", "Stream", "Subgroup", "Swap", "SystemFailure",
           "Tier", "TierFailure", "TierLocked", "TierPath", "TimedOut", "UnknownId", "Unsupported", "gpu_count", "grad_stats",
           "kernel_name", "library_path", "library_version", "num_threads", "pinned", "plan", "set_log", "set_num_threads",
           "stats"]

library_path = _native.library_path
_log_callback = None


def library_version():
    """The version string of the loaded library."""
    return _native.library().spw_version().decode()


def kernel_name():
    """The active kernel: "avx512", "avx2", "sve_bf16", "sve", "neon" or "scalar". SPILLWAY_KERNEL forces one."""
    name = _ctypes.c_char_p()
    _native.check(_native.library().spw_kernel_name(_ctypes.byref(name)))
    return name.value.decode()


def set_num_threads(count=0):
    """Sets the number of threads; 0 derives it from the affinity mask, the cgroup quota and LOCAL_WORLD_SIZE."""
    if not isinstance(count, int) or not 0 <= count < 1 << 32:
        raise InvalidArgument(f"count is {count!r}; a number of threads, or 0, is needed")
    options = _abi.sized(_abi.ThreadOptions)
    options.num_threads = count
    _native.check(_native.library().spw_threads_configure(_ctypes.byref(options)))


def num_threads():
    """Number of threads that a large step uses."""
    count = _ctypes.c_uint32()
    _native.check(_native.library().spw_threads_count(_ctypes.byref(count)))
    return count.value


def stats():
    """Number of calls and elements of each optimizer in this process since the library was loaded, as a dict."""
    counters = _abi.sized(_abi.Stats)
    _native.check(_native.library().spw_stats_get(_ctypes.byref(counters)))
    return {name: getattr(counters, name) for name, _ in _abi.Stats._fields_[2:]}


def set_log(function, level="info"):
    """Sends log messages to function(level, message), called from any thread. `level` is the least severe level to
    send. With None the library logs to stderr if SPILLWAY_LOG names a level, else nowhere."""
    global _log_callback
    if level not in _abi.LOG_LEVELS:
        raise InvalidArgument(f"level is {level!r}; one of {', '.join(_abi.LOG_LEVELS)} expected")
    names = {number: name for name, number in _abi.LOG_LEVELS.items()}

    def forward(_user, number, message):
        function(names.get(number, str(number)), message.decode("utf-8", "replace"))

    callback = _abi.LOG_FN(forward) if function is not None else _abi.LOG_FN()
    _native.check(_native.library().spw_set_log(callback, None, _abi.LOG_LEVELS[level]))
    if _log_callback is None and function is not None:
        _atexit.register(set_log, None)
    _log_callback = callback
