"""Step counts, which torch keeps in a tensor for each parameter: read and written by one call for many."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

from .._copies import Pieces, copy_all
from .._tensors import lasting

_shape, _device = attrgetter("shape"), attrgetter("device")
_HOST = torch.device("cpu")


class Counts:
    """Memory for the step counts of a number of parameters."""

    @lasting
    def __init__(self, count: int):
        self._values = torch.zeros(count, dtype=torch.float32, device="cpu")
        self._pieces = Pieces(self._values.unbind())

    def put(self, number: int, steps: Sequence[torch.Tensor]) -> None:
        """Sets these counts to a number."""
        self._values.fill_(number)
        copy_all(steps, self._pieces)

    def following(self, steps: Sequence[torch.Tensor]) -> list[int]:
        """The numbers of the steps that follow these counts."""
        if not self._pieces.take(steps):
            return next_steps(steps)
        return [int(step) + 1 for step in self._values.tolist()]


def next_steps(steps: Sequence[torch.Tensor]) -> list[int]:
    """The numbers of the steps that follow these counts."""
    devices = {*map(_device, steps)}
    if {*map(_shape, steps)} == {()} and len(devices) == 1 and devices != {_HOST}:
        # One wait for all.
        steps = torch.stack([*steps]).cpu()
    return [int(step) + 1 for step in map(torch.Tensor.item, steps)]
