"""Memory for the transfer of a tensor: the tensor's own, or a staging copy.

GPU tensors and strided tensors use a staging copy in host memory. A write copies first; a read copies back after a wait
found that it succeeded."""

import ctypes
import os

from ..errors import InvalidArgumentError, SpillwayError
from . import _pin

_COMPARED_AT_ONCE = 8 << 20


def memory(tensor, reads):
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

    _pin.tensor_argument(tensor, "buffer")
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


def path_of(filename):
    """A path as bytes for the C library."""
    path = os.fsencode(filename)
    if b"\0" in path:
        raise InvalidArgumentError(f"filename is {filename!r}; pass a path without NUL")
    return path


def verify(path, offset, address, size):
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
