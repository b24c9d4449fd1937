"""Page-locked memory of the library."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from numbers import Integral
from typing import Any, Literal

from . import _abi, _native, topo
from ._native_handle import _NativeHandle
from ._progress import Told, Watched
from .errors import InvalidArgumentError


def allocate(size: int, freed: Callable[[int], object] = lambda address: None, *, lock: bool = True, node: int | None = None) -> Any:
    """A ctypes array of `size` bytes with undefined content, all of whose pages are taken. With its last view freed(address) is called, and
    the memory returns to the library.

    Args:
        size: Number of bytes.
        freed: What is called. After an exception of a signal handler it may be called twice.
        lock: Lock it, as far as the limit allows.
        node: The NUMA node that it comes from; None: any."""
    options = _abi.sized(_abi.PinnedOptions)
    options.flags = (0 if lock else _abi.PINNED_FLAG_NO_LOCK) | (0 if node is None else _abi.PINNED_FLAG_BIND_NODE)
    options.node = node or 0
    block = _Block(options, max(1, size), freed)
    memory: Any = (ctypes.c_char * size).from_address(block.handle.value)
    # A view of the array keeps the array, and so the block.
    memory.block = block
    return memory


class _Block(_NativeHandle):
    """An allocation of the library, whose handle is its address. It is freed with its last reference, also if a signal handler raises
    meanwhile. At the end of the interpreter it stays."""

    closer = "spw_pinned_free"
    _user = "pinned memory"

    def __init__(self, options: Any, size: int, freed: Callable[[int], object]):
        self._before = lambda handle: freed(handle.value)
        self._hold("spw_pinned_alloc", ctypes.byref(options), size)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            super().__del__()


def taking(size: int, told: Told | None) -> Watched:
    """A context around a call that takes `size` bytes of memory: tells how the process grows. It does not grow by reserved huge pages.

    Args:
        size: Number of bytes.
        told: As of Progress."""
    return Watched("taking host memory", lambda: size, _resident_bytes, told)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[1]) * mmap.PAGESIZE


def unused_bytes() -> int | None:
    """Bytes of memory that this process can still use without swap; None if the system does not say."""
    stats = _abi.sized(_abi.PinnedStats)
    _native.call("spw_pinned_get_stats", ctypes.byref(stats))
    return stats.unused_bytes or None


def limit_of(user: str, host_memory: int | Literal["auto"] | None) -> int | None:
    """The bytes of host memory that an argument `host_memory` allows; None: any number.

    Args:
        user: What has the argument, for messages.
        host_memory: A number of bytes; "auto": this rank's share of what machine and cgroup have left now; None.

    Raises:
        InvalidArgumentError: It is something else."""
    if isinstance(host_memory, str) and host_memory == "auto":
        left = unused_bytes()
        return None if left is None else left // topo._ranks_here()[1]
    if host_memory is None:
        return None
    if isinstance(host_memory, bool) or not isinstance(host_memory, Integral) or not 0 < host_memory < 1 << 64:
        raise InvalidArgumentError(
            f"{user}: host_memory is {host_memory!r}; pass a number of bytes below 2^64, 'auto', or None for no limit"
        )
    return int(host_memory)


def contains(address: int, size: int) -> bool:
    """True if all these bytes lie in one allocation."""
    found = ctypes.c_uint32()
    _native.call("spw_pinned_contains", address, size, ctypes.byref(found))
    return bool(found.value)
