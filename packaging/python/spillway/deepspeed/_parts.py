"""Sub-groups on a tier, cut into parts: DeepSpeed's default sub-group of 10^9 elements has 12 GB of state, of which an update
would hold several in memory. Parts are what is fetched, stepped, written back and kept in memory; sub-groups are what the
caller sees."""

import ctypes

from ..errors import InvalidArgument
from ..swap import STATES, Swap, working_bytes


class PartedSwap:
    """A Swap of parts of at most `most` elements, called by sub-group."""

    def __init__(self, tier, elements, most, *, cache_bytes, **options):
        self.parts = [(index, start, min(start + most, count))
                      for index, count in enumerate(elements) for start in range(0, max(count, 1), most)]
        sizes = [end - start for _, start, end in self.parts]
        host_bytes = working_bytes(sizes, len(tier.paths())) + cache_bytes
        self.swap = Swap(tier, sizes, host_bytes=host_bytes, **options)
        self._elements = list(elements)
        self._of = [[] for _ in elements]
        for place, (index, start, end) in enumerate(self.parts):
            self._of[index].append((place, start, end))

    def read(self, index, *arrays):
        """Copies parts of a sub-group's state into float32 arrays."""
        self._each(index, arrays, self.swap.read)

    def write(self, index, *arrays):
        """Gives a sub-group other values; None leaves a part of its state as it is."""
        self._each(index, arrays, self.swap.write)

    def _each(self, index, arrays, work):
        for name, array in zip(STATES, arrays):
            if array is not None and len(array) != self._elements[index]:
                raise InvalidArgument(f"{name} has {len(array)} elements, sub-group {index} has {self._elements[index]}")
        for place, start, end in self._of[index]:
            work(place, *(None if array is None else array[start:end] for array in arrays))

    def ds_step(self, optimizer_id, calls, tensors, stepped=None):
        """One step: a call and a (grad, weight) for each sub-group. `stepped(index, param)` is called with the new master
        weights of each sub-group, as `stepped.wants(index)` asks for."""
        rows, pairs = [], []
        for index, start, end in self.parts:
            grad, weight = tensors[index]
            # The same call again has the same coefficients, as in DeepSpeed.
            rows.append(calls[index])
            pairs.append((grad[start:end], None if weight is None else weight[start:end]))
        table = self.swap.table(pairs)
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


def floats(count):
    """Float32 of any value."""
    import torch
    return torch.empty(count, dtype=torch.float32)


def floats_at(address, count):
    """Float32 that are there, not a copy."""
    import torch
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)
