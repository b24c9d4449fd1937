"""Replacement of DeepSpeed's pin_memory: page-locked tensors, in 2 MiB pages if possible.

If the system refuses the lock, the log has one warning; the process is not aborted. The memory returns to the library
with the last view of a tensor, freed or not, so every view stays valid."""

from __future__ import annotations

import ctypes

from .. import _abi, _arguments, _native, _pinned
from ..errors import InvalidArgumentError
from . import _installed

# Base addresses that free() accepts. Each dict operation is atomic, so no lock is needed.
_live: dict[int, int] = {}


def new_tensor(num_elem, example):
    """An uninitialized 1-D tensor of `num_elem` elements with the dtype of `example`, in pinned memory."""
    import torch

    count = _arguments.unsigned("num_elem", num_elem, 63)
    tensor_argument(example, "example_tensor")
    size = count * example.element_size()
    if size == 0:
        return torch.empty(0, dtype=example.dtype)
    # The storage references `memory`, and every view of the tensor references the storage.
    memory = _pinned.allocate(size, lambda address: _live.pop(address, None))
    _live[ctypes.addressof(memory)] = size
    return torch.frombuffer(memory, dtype=example.dtype, count=count)


def free(address):
    """True if `address` is the start of a tensor of new_tensor() that was not freed before."""
    return _live.pop(address, None) is not None


def is_pinned(buffer):
    """True if torch or new_tensor() pinned the whole tensor, which may be a slice."""
    tensor_argument(buffer, "buffer")
    if buffer.is_cpu and _pinned.contains(buffer.data_ptr(), buffer.numel() * buffer.element_size()):
        return True
    return buffer.is_pinned()


def tensor_argument(value, name):
    """Raises InvalidArgumentError for an object that is no tensor."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise InvalidArgumentError(f"{name} is a {type(value).__name__}; pass a torch tensor")


class pin_handle:
    """Allocates and frees the process's page-locked tensors; every handle knows all of them, as in DeepSpeed."""

    def new_cpu_locked_tensor(self, num_elem, example_tensor):
        """Allocates a page-locked tensor."""
        return new_tensor(num_elem, example_tensor)

    def free_cpu_locked_tensor(self, locked_tensor):
        """Frees a tensor; False if its address is not the start of an allocated one."""
        tensor_argument(locked_tensor, "locked_tensor")
        return free(locked_tensor.data_ptr())

    def free_cpu_locked_tensor_by_ptr(self, address):
        """Frees a tensor by the address of its first byte."""
        return free(_arguments.unsigned("address", address))

    def is_pinned(self, buffer):
        """True if torch or Spillway pinned the whole tensor."""
        return is_pinned(buffer)


def served():
    """Allocation counters of this process."""
    stats = _abi.sized(_abi.PinnedStats)
    _native.call("spw_pinned_get_stats", ctypes.byref(stats))
    return {name: getattr(stats, name) for name in ("allocations", "bytes", "high_water", "locked_bytes")}


_installed.counted(lambda: {"pin_memory": served()}, "pin_memory")
