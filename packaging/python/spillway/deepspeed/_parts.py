"""Sub-groups on a tier, cut into parts: DeepSpeed's default sub-group of 10^9 elements has 12 GB of state, of which an update
would hold several in memory. Parts are what is fetched, stepped, written back and kept in memory; sub-groups are what the
caller sees."""

import ctypes

from ..errors import InvalidArgument
from ..swap import STATES, Swap, working_bytes


class PartedSwap:
    """A Swap of parts of at most `most` elements, called by sub-group."""

    def __init__(self, tier, elements, most, *, cache_bytes, split_master=False, **options):
        self.parts = [(index, start, min(start + most, count))
                      for index, count in enumerate(elements) for start in range(0, max(count, 1), most)]
        sizes = [end - start for _, start, end in self.parts]
        host_bytes = working_bytes(sizes, len(tier.paths()), split_master=split_master) + cache_bytes
        self.swap = Swap(tier, sizes, host_bytes=host_bytes, split_master=split_master, **options)
        self._elements = list(elements)
        self._of = [[] for _ in elements]
        for place, (index, start, end) in enumerate(self.parts):
            self._of[index].append((place, start, end))

    def read(self, index, *arrays, weights=None):
        """Copies parts of a sub-group's state into float32 arrays; a split master is made of its bf16 `weights`."""
        for place, start, end in self._places(index, arrays):
            self.swap.read(place, *_cut(arrays, start, end), weights=None if weights is None else weights[start:end])

    def write(self, index, *arrays):
        """Gives a sub-group other values; None leaves a part of its state as it is."""
        for place, start, end in self._places(index, arrays):
            self.swap.write(place, *_cut(arrays, start, end))

    def _places(self, index, arrays):
        for name, array in zip(STATES, arrays):
            if array is not None and len(array) != self._elements[index]:
                raise InvalidArgument(f"{name} has {len(array)} elements, sub-group {index} has {self._elements[index]}")
        return self._of[index]

    def ds_step(self, optimizer_id, calls, tensors, stepped=None):
        """One step: a call for each sub-group, and a row of Swap.table() for it. `stepped(index, param)` is called with the
        new master weights of each sub-group, as `stepped.wants(index)` asks for."""
        rows, cuts = [], []
        for index, start, end in self.parts:
            # The same call again has the same coefficients, as in DeepSpeed.
            rows.append(calls[index])
            cuts.append(_cut(tensors[index], start, end))
        table = self.swap.table(cuts)
        self.swap.ds_step(optimizer_id, rows, table, stepped and self._gathered(stepped))

    def _gathered(self, stepped):
        """Parts come in any order; a sub-group is shown once it is whole."""
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
    """At least 128 blocks of a part's state, if they are not too small: paths share it by whole blocks."""
    state = (10 if split_master else 12) * part_elements
    return min(max(state // 128 // 4096 * 4096, 16 << 10), 1 << 20)


def floats(count):
    """Float32 of any value."""
    import torch
    return torch.empty(count, dtype=torch.float32)


def floats_at(address, count):
    """Float32 that are there, not a copy."""
    import torch
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)
