"""Replacements of DeepSpeed's async_io, gds and pin_memory: transfers between tensors and files by Spillway's I/O engine, and page-locked
tensors.

Arguments, their order and the results are DeepSpeed's, except: a failed operation raises an exception instead of
returning a number; any buffer, offset and length works; wait() with nothing in flight returns 0; operations on several
tensors run concurrently. GPU tensors and strided tensors are staged in host memory: a write copies first, a read copies
back after a wait found that it succeeded.

Page-locked tensors are in 2 MiB pages if possible. If the system refuses the lock, the log has one warning; the process is not aborted. The
memory returns to the library with the last view of a tensor, freed or not, so every view stays valid."""

from __future__ import annotations

import ctypes
import os
import threading

from .. import _abi, _arguments, _native, _pinned
from ..errors import InvalidArgumentError, SpillwayError
from . import _installed, _io_engine

_SECTOR = 512
_MOST_DEPTH = 4096
_MOST_BLOCK = 1 << 30
_COMPARED_AT_ONCE = 8 << 20
# Base addresses that free() accepts. Each dict operation is atomic, so no lock is needed.
_live: dict[int, int] = {}


class aio_handle:
    """Transfers tensors to and from files. `block_size` is the most bytes per system request. Up to `queue_depth` times
    `intra_op_parallelism` reads are in flight, and as many writes. The other two arguments have no effect: requests are
    always submitted in batches, and the queue is refilled as they complete."""

    _op = "async_io"

    def __init__(self, block_size=1 << 20, queue_depth=128, single_submit=False, overlap_events=False, intra_op_parallelism=1):
        self._block_size = _arguments.between("block_size", block_size, 1, (1 << 31) - 1)
        self._queue_depth = _arguments.between("queue_depth", queue_depth, 1, (1 << 31) - 1)
        self._parallelism = _arguments.between("intra_op_parallelism", intra_op_parallelism, 1, (1 << 31) - 1)
        self._single_submit, self._overlap_events = bool(single_submit), bool(overlap_events)
        depth = min(self._queue_depth * self._parallelism, _MOST_DEPTH)
        self._engine = _io_engine.Engine(self._op, min(self._block_size, _MOST_BLOCK), depth)

    def get_block_size(self):
        """The constructor's argument."""
        return self._block_size

    def get_queue_depth(self):
        """The constructor's argument."""
        return self._queue_depth

    def get_single_submit(self):
        """The constructor's argument."""
        return self._single_submit

    def get_overlap_events(self):
        """The constructor's argument."""
        return self._overlap_events

    def get_intra_op_parallelism(self):
        """The constructor's argument."""
        return self._parallelism

    def get_thread_count(self):
        """Name of get_intra_op_parallelism() up to DeepSpeed 0.15.2."""
        return self._parallelism

    def get_alignment(self):
        """The alignment in bytes that DeepSpeed's own op requires of lengths; this op requires none."""
        return _SECTOR * self._parallelism

    def read(self, buffer, filename, validate, file_offset=0):
        """Fills a buffer; returns 0."""
        self._begin(True, buffer, filename, file_offset, validate, threading.get_ident())
        self.wait()
        return 0

    def write(self, buffer, filename, validate, file_offset=0):
        """Writes a buffer; returns 0."""
        self._begin(False, buffer, filename, file_offset, validate, threading.get_ident())
        self.wait()
        return 0

    def pread(self, buffer, filename, validate, *asynchronous, **named):
        """pread(buffer, filename, validate, async, file_offset=0): fills a buffer. Returns 0 if async, else like
        wait()."""
        return self._parallel(True, buffer, filename, validate, asynchronous, named)

    def pwrite(self, buffer, filename, validate, *asynchronous, **named):
        """pwrite(buffer, filename, validate, async, file_offset=0): writes a buffer. Returns 0 if async, else like
        wait()."""
        return self._parallel(False, buffer, filename, validate, asynchronous, named)

    def sync_pread(self, buffer, filename, file_offset=0):
        """Fills a buffer; returns like wait()."""
        self._begin(True, buffer, filename, file_offset, False, threading.get_ident())
        return self.wait()

    def sync_pwrite(self, buffer, filename, file_offset=0):
        """Writes a buffer; returns like wait()."""
        self._begin(False, buffer, filename, file_offset, False, threading.get_ident())
        return self.wait()

    def async_pread(self, buffer, filename, file_offset=0):
        """Starts filling a buffer; returns 0."""
        self._begin(True, buffer, filename, file_offset)
        return 0

    def async_pwrite(self, buffer, filename=None, file_offset=0, *, fd=None):
        """Starts writing a buffer to a path, or to a descriptor that the caller keeps open; returns 0."""
        self._begin(False, buffer, filename if fd is None else fd, file_offset)
        return 0

    def wait(self):
        """Waits for all operations in flight and returns their number."""
        return self._engine.wait()

    def new_cpu_locked_tensor(self, num_elem, example_tenosr):
        """Allocates a page-locked 1-D tensor."""
        return new_tensor(num_elem, example_tenosr)

    def free_cpu_locked_tensor(self, tensor):
        """Frees a page-locked tensor; False if its address is not the start of an allocated one."""
        tensor_argument(tensor, "tensor")
        return free(tensor.data_ptr())

    def is_pinned(self, buffer):
        """True if torch or Spillway pinned the whole tensor."""
        return is_pinned(buffer)

    def _parallel(self, reads, buffer, filename, validate, positional, named):
        asynchronous, file_offset = _after_validate(positional, named)
        self._begin(reads, buffer, filename, file_offset, validate, None if asynchronous else threading.get_ident())
        return 0 if asynchronous else self.wait()

    def _begin(self, reads, buffer, target, file_offset, validate=False, owner=None):
        offset = _arguments.unsigned("file_offset", file_offset, 63)
        if isinstance(target, int):
            fd, path = _arguments.unsigned("fd", target, 31), None
        else:
            fd, path = -1, _arguments.path("filename", target)
        address, size, held, after = _memory(buffer, reads)
        if validate:
            after = _then_verify(after, path, offset, address, size)
        begin = self._engine.read if reads else self._engine.write
        begin(path, fd, offset, address, size, held, after, owner)


class gds_handle(aio_handle):
    """The same for GPU tensors, through pinned host memory; needs neither GPUDirect Storage nor its driver."""

    _op = "gds"

    def get_alignment(self):
        """The alignment in bytes that DeepSpeed's own op requires of lengths; this op requires none."""
        return _SECTOR

    def new_pinned_device_tensor(self, num_elem, example_tenosr):
        """A 1-D tensor on the device of the example. For an example on the CPU it is on the current GPU, or in
        page-locked host memory if there is no GPU."""
        import torch

        tensor_argument(example_tenosr, "example_tenosr")
        device = example_tenosr.device if not example_tenosr.is_cpu else "cuda"
        if device == "cuda" and not torch.cuda.is_available():
            return new_tensor(num_elem, example_tenosr)
        return torch.empty(_arguments.unsigned("num_elem", num_elem, 63), dtype=example_tenosr.dtype, device=device)

    def free_pinned_device_tensor(self, tensor):
        """Releases a tensor of new_pinned_device_tensor(); returns True."""
        tensor_argument(tensor, "tensor")
        free(tensor.data_ptr())
        return True

    def pin_device_tensor(self, tensor):
        """No-op: transfers need no registration; returns True."""
        tensor_argument(tensor, "tensor")
        return True

    def unpin_device_tensor(self, tensor):
        """No-op: transfers need no registration; returns True."""
        tensor_argument(tensor, "tensor")
        return True


def aio_read(buffer, filename, block_size, queue_depth, single_submit, overlap_events, validate, /):
    """Fills a buffer from the start of a file; returns 0."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).read(buffer, filename, validate)


def aio_write(buffer, filename, block_size, queue_depth, single_submit, overlap_events, validate, /):
    """Writes a buffer to the start of a file; returns 0."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).write(buffer, filename, validate)


def deepspeed_memcpy(dest, src, /):
    """Copies one tensor into another of the same dtype and size; returns 0."""
    import torch

    tensor_argument(dest, "dest")
    tensor_argument(src, "src")
    if dest.dtype is not src.dtype or dest.numel() != src.numel():
        raise InvalidArgumentError(
            f"deepspeed_memcpy: dest has {dest.numel()} elements of {dest.dtype}, src {src.numel()} of {src.dtype}; "
            "pass tensors of one dtype and size"
        )
    with torch.no_grad():
        dest.copy_(src.reshape(dest.shape))
    return 0


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


#: The classes and functions of each op.
SERVED = {"async_io": (aio_handle, aio_read, aio_write, deepspeed_memcpy), "gds": (gds_handle,), "pin_memory": (pin_handle,)}

# Page-locked tensors.


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


def pinned_stats():
    """Allocation counters of this process."""
    stats = _abi.sized(_abi.PinnedStats)
    _native.call("spw_pinned_get_stats", ctypes.byref(stats))
    return {name: getattr(stats, name) for name in ("allocations", "bytes", "high_water", "locked_bytes")}


_installed.counted(lambda: {"pin_memory": pinned_stats()}, "pin_memory")

# Transfers.


def _after_validate(positional, named):
    """The arguments `async` and `file_offset`; `async` is a Python keyword, so it cannot be a parameter name."""
    given = dict(zip(("async", "file_offset"), positional))
    if (
        len(positional) > 2
        or given.keys() & named.keys()
        or not named.keys() <= {"async", "file_offset"}
        or "async" not in (given := {**given, **named})
    ):
        raise TypeError("the arguments are (buffer, filename, validate, async, file_offset=0)")
    return given["async"], given.get("file_offset", 0)


def _then_verify(after, path, offset, address, size):
    def both():
        _verify(path, offset, address, size)
        if after is not None:
            after()

    return both


def _memory(tensor, reads):
    """(address, bytes, reference that keeps the memory alive, callback after success or None)."""
    try:
        if tensor.is_cpu and tensor.is_contiguous():
            # Keep the storage: the tensor may get another one during the transfer.
            return tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor.untyped_storage(), None
    except (AttributeError, RuntimeError):
        pass  # No tensor, or one without a storage; staging says which.
    staged = _staging(tensor, reads)
    after = (lambda: _copy(tensor, staged)) if reads else None
    return staged.data_ptr(), staged.numel() * staged.element_size(), staged, after


def _staging(tensor, reads):
    import torch

    tensor_argument(tensor, "buffer")
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise InvalidArgumentError(
            f"buffer is {tensor.layout} on device {tensor.device} and has no bytes to transfer; pass a dense tensor with data"
        )
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    if not reads:
        _copy(staged, tensor)
    return staged


def _copy(target, source):
    import torch

    with torch.no_grad():
        target.copy_(source)


def _verify(path, offset, address, size):
    """Reads the file by ordinary I/O, and raises if the memory differs."""
    with open(path, "rb") as file:
        file.seek(offset)
        for at in range(0, size, _COMPARED_AT_ONCE):
            length = min(_COMPARED_AT_ONCE, size - at)
            if file.read(length) != ctypes.string_at(address + at, length):
                raise SpillwayError(
                    f"validating {size} bytes at offset {offset} of {os.fsdecode(path)}: file and buffer differ in the "
                    f"{length} bytes from byte {offset + at} of the file; the transfer is not intact, repeat it"
                )
