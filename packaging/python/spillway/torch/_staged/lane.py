"""Copies of chunks between a device and host memory: one stream for each direction, so that a chunk leaves while the next one comes.

Memory of the device is used again only after its copies to the host have ended, for which the flow waits. So no copy to the device has to
wait for the program's work there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._copies import copy_all, link_to
from .leaves import Leaf


class Lane:
    """Copies within host memory; each is done when its call returns."""

    def fetch(self, leaves: Sequence[Leaf], hosts: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """Starts copies of host memory to new tensors. Returns these, and an event for `arrive`."""
        made = [leaf.empty() for leaf in leaves]
        copy_all(made, hosts)
        return made, None

    def arrive(self, event: Any) -> None:
        """Later work of the program on the device waits for the copies of a fetch."""

    def replaced(self, tensors: Sequence[torch.Tensor]) -> None:
        """The memory of these fetched tensors is free after the program's work on the device; nobody waits for that."""

    def flush(self, hosts: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Any:
        """Starts copies of tensors to host memory, after the program's work on the device. Returns an event for `wait`."""
        copy_all(hosts, tensors)

    def wait(self, event: Any) -> None:
        """Waits until the copies of a fetch or a flush have ended."""

    def synchronize(self) -> None:
        """Waits for the program's work on the device, and for all copies."""


class DeviceLane(Lane):
    """Copies between a device and page-locked host memory.

    Args:
        device: The device."""

    def __init__(self, device: torch.device):
        self._device = device
        self._in, self._out = torch.Stream(device=device), torch.Stream(device=device)

    def fetch(self, leaves: Sequence[Leaf], hosts: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """Starts copies of host memory to new tensors, whose memory is of this stream: its last use has ended."""
        with self._in:
            made = [leaf.empty() for leaf in leaves]
            self._copy(made, hosts, made)
        return made, self._in.record_event()

    def arrive(self, event: Any) -> None:
        """Later work of the program on the device waits for the copies of a fetch."""
        torch.accelerator.current_stream(self._device).wait_event(event)

    def replaced(self, tensors: Sequence[torch.Tensor]) -> None:
        """The memory of these fetched tensors is free after the program's work on the device; nobody waits for that."""
        for tensor in tensors:
            if tensor.device == self._device:
                tensor.record_stream(torch.accelerator.current_stream(self._device))

    def flush(self, hosts: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Any:
        """Starts copies of tensors to host memory, after the program's work on the device."""
        self._out.wait_stream(torch.accelerator.current_stream(self._device))
        with self._out:
            self._copy(hosts, tensors, tensors)
        return self._out.record_event()

    def wait(self, event: Any) -> None:
        """Waits until the copies of a fetch or a flush have ended."""
        event.synchronize()

    def _copy(self, to: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], states: Sequence[torch.Tensor]) -> None:
        """Copies to and from states, of which the class keeps some in host memory: their copies are done when this call returns."""
        for here in (True, False):
            some = [place for place, state in enumerate(states) if (state.device == self._device) is here]
            copy_all([to[place] for place in some], [sources[place] for place in some])

    def synchronize(self) -> None:
        """Waits for the program's work on the device, and for all copies."""
        for stream in (torch.accelerator.current_stream(self._device), self._in, self._out):
            stream.synchronize()


_lanes: dict[torch.device, Lane] = {}


def lane_of(device: torch.device) -> Lane:
    """The lane of a device; one per device."""
    if device not in _lanes:
        _lanes[device] = Lane() if device.type in ("cpu", "meta") else DeviceLane(device)
    return _lanes[device]


def host_memory(size: int, param: torch.Tensor) -> torch.Tensor:
    """Flat host memory for copies to and from the device of a parameter."""
    return link_to(param).memory((size,), torch.uint8)
