"""Replacement of DeepSpeed's async_io: transfers between tensors and files by io_uring, with every completion
checked."""

from __future__ import annotations

from ..errors import InvalidArgumentError
from . import _pin
from ._handle import aio_handle

SERVED = ("aio_handle", "aio_read", "aio_write", "deepspeed_memcpy")
NOT_SERVED: dict[str, str] = {}


def aio_read(buffer, filename, block_size, queue_depth, single_submit, overlap_events, validate, /):
    """Fills a buffer from the start of a file; returns 0."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).read(buffer, filename, validate)


def aio_write(buffer, filename, block_size, queue_depth, single_submit, overlap_events, validate, /):
    """Writes a buffer to the start of a file; returns 0."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).write(buffer, filename, validate)


def deepspeed_memcpy(dest, src, /):
    """Copies one tensor into another of the same dtype and size; returns 0."""
    import torch

    _pin.tensor_argument(dest, "dest")
    _pin.tensor_argument(src, "src")
    if dest.dtype is not src.dtype or dest.numel() != src.numel():
        raise InvalidArgumentError(
            f"deepspeed_memcpy: dest has {dest.numel()} elements of {dest.dtype}, src {src.numel()} of {src.dtype}; "
            "pass tensors of one dtype and size"
        )
    with torch.no_grad():
        dest.copy_(src.reshape(dest.shape))
    return 0
