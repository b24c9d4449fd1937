"""Divides sub-groups on a tier into parts. DeepSpeed's default sub-group of 10^9 elements has 12 GB of state, and an
update would hold several of them in memory. Parts are fetched, stepped, written back and cached; callers use
sub-groups."""

import ctypes

from ..errors import InvalidArgumentError
from ..swap import STATES, Swap, working_bytes


class PartedSwap:
    """A Swap of parts of at most `most` elements, addressed by sub-group."""

    def __init__(self, tier, elements, most, *, cache_bytes, split_master=False, **options):
        self.parts = [
            (index, start, min(start + most, count)) for index, count in enumerate(elements) for start in range(0, max(count, 1), most)
        ]
        sizes = [end - start for _, start, end in self.parts]
        memory_budget = working_bytes(sizes, len(tier.paths()), split_master=split_master) + cache_bytes
        self.swap = Swap(tier, sizes, memory_budget=memory_budget, split_master=split_master, **options)
        self._elements = list(elements)
        self._of = [[] for _ in elements]
        for place, (index, start, end) in enumerate(self.parts):
            self._of[index].append((place, start, end))

    def read(self, index, *arrays, weights=None):
        """Copies parts of a sub-group's state into float32 arrays; with a split master `weights` has its bf16
        weights."""
        for place, start, end in self._places(index, arrays):
            self.swap.read(place, *_cut(arrays, start, end), weights=None if weights is None else weights[start:end])

    def write(self, index, *arrays):
        """Sets parts of a sub-group's state; None keeps a part."""
        for place, start, end in self._places(index, arrays):
            self.swap.write(place, *_cut(arrays, start, end))

    def _places(self, index, arrays):
        for name, array in zip(STATES, arrays):
            if array is not None and len(array) != self._elements[index]:
                raise InvalidArgumentError(
                    f"{name} has {len(array)} elements, sub-group {index} has {self._elements[index]}; pass a "
                    "tensor of the sub-group's size"
                )
        return self._of[index]

    def ds_step(self, optimizer_id, calls, tensors, stepped=None):
        """Runs one step, with a call and a row of Swap.table() per sub-group. Calls `stepped(index, param)` with the
        new master weights of each sub-group for which `stepped.wants(index)` is true."""
        rows, cuts = [], []
        for index, start, end in self.parts:
            # Repeated calls of the same step use the same coefficients, as in DeepSpeed.
            rows.append(calls[index])
            cuts.append(_cut(tensors[index], start, end))
        table = self.swap.table(cuts)
        self.swap.ds_step(optimizer_id, rows, table, stepped and self._gathered(stepped))

    def _gathered(self, stepped):
        """Collects parts, which complete in any order, and reports a sub-group once all its parts are stepped."""
        missing, whole = {}, {}

        def part_stepped(place, address):
            index, start, end = self.parts[place]
            if not stepped.wants(index):
                return
            if len(self._of[index]) == 1:
                stepped(index, floats_at(address, end - start))
                return
            param = whole.setdefault(index, floats(self._elements[index]))
            param[start:end] = floats_at(address, end - start)
            missing[index] = missing.get(index, len(self._of[index])) - 1
            if missing[index] == 0:
                stepped(index, whole.pop(index))

        return part_stepped


def _cut(arrays, start, end):
    return [None if array is None else array[start:end] for array in arrays]


def block_bytes(part_elements, split_master):
    """Block size with at least 128 blocks per part, because paths share a part in whole blocks; limited to 16 KiB..1
    MiB."""
    state = (10 if split_master else 12) * part_elements
    return min(max(state // 128 // 4096 * 4096, 16 << 10), 1 << 20)


def floats(count):
    """An uninitialized float32 tensor."""
    import torch

    return torch.empty(count, dtype=torch.float32)


def floats_at(address, count):
    """A float32 tensor over existing memory, without a copy."""
    import torch

    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)
