"""Copies between devices and host memory, which all optimizers start in the same way: on a stream of their own, by torch's streams and
events of any accelerator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ._tensors import holds_values, local


class HostLink:
    """Copies between a tensor in host memory and other host memory; each copy is done when its call returns."""

    #: Host memory for copies is page-locked, and the library cannot read the tensors where they are.
    pinned = is_apart = False

    def memory(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        """Host memory for copies."""
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self.pinned)

    def out(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """Starts the copy of a tensor to the host."""
        host.copy_(tensor)

    def back(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Starts the copy of host memory to a tensor. Later work of the caller on that device sees it."""
        tensor.copy_(host)

    def bring(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Starts the copy of host memory to a tensor. Later work of the caller that needs it waits for `fence()`."""
        tensor.copy_(host)

    def mark(self, tensor: torch.Tensor) -> Any:
        """What `differs` needs of the values of a tensor that is copied."""
        return None

    def differs(self, tensor: torch.Tensor, host: torch.Tensor, mark: Any) -> bool:
        """True if a tensor has changed since its values were copied, also through `.data`, which changes no version."""
        if tensor.dtype is host.dtype and _is_words(tensor) and _is_words(host):
            # Some times faster than the comparison of 16-bit numbers.
            tensor, host = (own.view(-1).view(torch.int64) for own in (tensor, host))
        return not torch.equal(tensor, host)

    def any_differs(self, rows: Iterable[tuple[torch.Tensor, torch.Tensor, Any]]) -> bool:
        """True if `differs` of any of these tensors."""
        return any(self.differs(*row) for row in rows)

    def release(self) -> None:
        """Later work of the caller on the device may overwrite what is copied to the host."""

    def fence(self) -> Any:
        """An object with `synchronize()` and `query()` for the copies that were started before; None if they are done."""
        return None

    def wait(self, fence: Any) -> None:
        """Makes the caller's later work on the device wait for the copies of a fence."""


class DeviceLink(HostLink):
    """Copies between a device and pinned host memory, on a stream of their own."""

    pinned = is_apart = True

    def __init__(self, device: torch.device):
        self._stream = torch.Stream(device=device)
        self._device = device

    def out(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """Starts the copy of a tensor to the host, after the caller's work on the device."""
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._stream)

    def back(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Starts the copy of host memory to a tensor; the caller's later work on the device waits for it."""
        self.bring(tensor, host)
        torch.accelerator.current_stream(self._device).wait_stream(self._stream)

    def bring(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Starts the copy of host memory to a tensor, after the caller's work on the device."""
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            tensor.copy_(host, non_blocking=True)

    def mark(self, tensor: torch.Tensor) -> Any:
        """The norm, computed on the device: the values on the host are not read back."""
        return torch.linalg.vector_norm(tensor, dtype=torch.float32)

    def differs(self, tensor: torch.Tensor, host: torch.Tensor, mark: Any) -> bool:
        """True if the norm has changed."""
        return bool(self.mark(tensor) != mark)

    def any_differs(self, rows: Iterable[tuple[torch.Tensor, torch.Tensor, Any]]) -> bool:
        """True if the norm of any has changed. The host waits for the device once."""
        found = [self.mark(tensor) != mark for tensor, _, mark in rows]
        return bool(found) and bool(torch.stack(found).any())

    def release(self) -> None:
        """Makes the caller's later work on the device wait for the copies that were started before."""
        torch.accelerator.current_stream(self._device).wait_stream(self._stream)

    def fence(self) -> Any:
        """An event of the stream."""
        return self._stream.record_event()

    def wait(self, fence: Any) -> None:
        """Makes the caller's later work on the device wait for the copies of a fence."""
        torch.accelerator.current_stream(self._device).wait_event(fence)


def wait(fence: Any) -> None:
    """Waits for the copies of a fence; None: they are done."""
    if fence is not None:
        fence.synchronize()


_links: dict[torch.device, HostLink] = {}


def link_to(param: torch.Tensor) -> HostLink:
    """The link to the device of a parameter; one per device."""
    device = local(param).device
    if device not in _links:
        _links[device] = new_link(device)
    return _links[device]


def new_link(device: torch.device) -> HostLink:
    """A link with a stream of its own."""
    return HostLink() if device.type == "cpu" else DeviceLink(device)


def _is_words(tensor: torch.Tensor) -> bool:
    """True if the memory of a tensor has its values, in whole words of 8 bytes."""
    return tensor.is_contiguous() and holds_values(tensor) and not (tensor.nbytes % 8 or tensor.storage_offset() * tensor.itemsize % 8)
