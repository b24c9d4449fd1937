"""Sub-groups of ZeRO-3 as parts: the subgroups of a tier.

DeepSpeed's default sub-group of 10^9 elements has 12 GB of state, and an update would hold several of them in memory. Parts are fetched,
stepped, written back and cached; callers use sub-groups."""

from __future__ import annotations

import ctypes
from typing import Any

from ..errors import InvalidArgumentError
from ..swap import STATES


class Parts:
    """Parts of at most `most` elements of sub-groups with these numbers of elements.

    Attributes:
        sizes: Number of elements of each part."""

    def __init__(self, elements, most):
        self._elements = list(elements)
        self._parts = [
            (index, start, min(start + most, count))
            for index, count in enumerate(self._elements)
            for start in range(0, max(count, 1), most)
        ]
        self.sizes = [end - start for _, start, end in self._parts]
        self._of: list[list[tuple[int, int, int]]] = [[] for _ in self._elements]
        for place, (index, start, end) in enumerate(self._parts):
            self._of[index].append((place, start, end))

    def read(self, tiered, index, *arrays, weights=None):
        """Copies parts of a sub-group's state into float32 arrays; with a split master `weights` has its bf16
        weights."""
        for place, start, end in self._places(index, arrays):
            tiered.read(place, *_cut(arrays, start, end), weights=None if weights is None else weights[start:end])

    def write(self, tiered, index, *arrays):
        """Sets parts of a sub-group's state; None keeps a part."""
        for place, start, end in self._places(index, arrays):
            tiered.write(place, *_cut(arrays, start, end))

    def _places(self, index, arrays):
        for name, array in zip(STATES, arrays):
            if array is not None and len(array) != self._elements[index]:
                raise InvalidArgumentError(
                    f"{name} has {len(array)} elements, sub-group {index} has {self._elements[index]}; pass a "
                    "tensor of the sub-group's size"
                )
        return self._of[index]

    def counts(self):
        """Number of parts of each sub-group."""
        return [len(parts) for parts in self._of]

    def sub_group(self, place):
        """The sub-group of a part."""
        return self._parts[place][0]

    def rows(self, calls):
        """The call of each part, from one per sub-group. Repeated calls of the same step use the same coefficients, as in DeepSpeed."""
        return [calls[index] for index, _, _ in self._parts]

    def submit(self, update, index, *tensors):
        """Submits a sub-group to a SwapUpdate, with the arrays of SwapUpdate.submit()."""
        for place, start, end in self._of[index]:
            update.submit(place, *_cut(tensors, start, end))

    def ds_step(self, swap, optimizer_id, calls, tensors, stepped=None):
        """Runs one step, with a call and a row of Swap.table() per sub-group. Calls `stepped(index, param)` with the
        new master weights of each sub-group for which `stepped.wants(index)` is true."""
        table = swap.table([_cut(tensors[index], start, end) for index, start, end in self._parts])
        swap.ds_step(optimizer_id, self.rows(calls), table, stepped and self._gathered(stepped))

    def _gathered(self, stepped):
        """Collects parts, which complete in any order, and reports a sub-group once all its parts are stepped."""
        missing: dict[int, int] = {}
        whole: dict[int, Any] = {}

        def part_stepped(place, address):
            index, start, end = self._parts[place]
            if not stepped.wants(index):
                return
            if len(self._of[index]) == 1:
                stepped(index, floats_at(address, end - start))
                return
            if index not in whole:
                whole[index] = floats(self._elements[index])
            param = whole[index]
            param[start:end] = floats_at(address, end - start)
            missing[index] = missing.get(index, len(self._of[index])) - 1
            if missing[index] == 0:
                stepped(index, whole.pop(index))

        return part_stepped


def _cut(arrays, start, end):
    return [None if array is None else array[start:end] for array in arrays]


def floats(count):
    """An uninitialized float32 tensor."""
    import torch

    return torch.empty(count, dtype=torch.float32)


def floats_at(address, count):
    """A float32 tensor over existing memory, without a copy."""
    import torch

    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)
