"""Chunks: the states of several parameters, one after another in flat memory, which move together.

A chunk is made of states that exist, so it has the sizes that the optimizer's class has chosen. A state that gets another form, as one that
grows, makes a new chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ...errors import UnsupportedError
from .._tensors import local
from .leaves import Leaf, overlap, put_together, take_apart

#: Tensors in a chunk begin at multiples of this: a cache line.
_ALIGNMENT = 64


class Entry(NamedTuple):
    """The state of a parameter.

    Attributes:
        param: The parameter.
        name: Names it in messages.
        stated: False if the class keeps no state of it.
        tree: The state without its tensors.
        leaves: Its tensors' memory.
        tensors: Its tensors, where they are now; empty in a chunk."""

    param: torch.Tensor
    name: str
    stated: bool
    tree: Any
    leaves: tuple[Leaf, ...]
    tensors: Sequence[torch.Tensor] = ()

    @staticmethod
    def of(param: torch.Tensor, name: str, states: Any) -> Entry:
        """The present state of a parameter, if `states` has one.

        Raises:
            UnsupportedError: It shares memory with the parameter, or tensors of it share memory with each other."""
        if param not in states:
            return Entry(param, name, False, None, ())
        tensors: list[torch.Tensor] = []
        tree = take_apart(states[param], tensors, f"the state of {name}")
        return Entry(param, name, True, tree, tuple(map(Leaf.of, tensors)), tensors)

    @property
    def size(self) -> int:
        """Bytes of the state."""
        return sum(_up(leaf.size) for leaf in self.leaves)

    @property
    def weight(self) -> int:
        """Bytes that count towards a chunk's bound: also of the parameter, of which a step may make copies."""
        own = local(self.param)
        return max(self.size, own.numel() * own.element_size())

    def is_beside(self, other: Entry) -> bool:
        """True if the parameters are on one device, so that one chunk may have their states."""
        return local(self.param).device == local(other.param).device

    def check_apart(self) -> None:
        """Raises UnsupportedError if tensors of the state share memory, which a copy of them would not."""
        others = [local(tensor) for tensor in (self.param, self.param.grad) if tensor is not None]
        plain = [tensor.detach() for tensor in others if tensor.layout is torch.strided]
        if overlap([*self.tensors, *plain]):
            raise UnsupportedError(
                f"the state of {self.name} has tensors that share memory with each other, with the parameter or with its gradient, so a "
                "copy of the state would not be one; use the class itself for this parameter"
            )

    def state(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The state, with these tensors."""
        return put_together(self.tree, tensors)


class Chunk:
    """States in flat memory, which a home keeps.

    Args:
        entries: The parameters and their states.

    Attributes:
        entries: Those, by the parameter.
        size: Bytes of the memory.
        kept: What the home knows of the chunk."""

    def __init__(self, entries: Iterable[Entry]):
        self.entries = {entry.param: entry for entry in entries}
        self._starts: dict[torch.Tensor, list[int]] = {}
        at = 0
        for entry in self.entries.values():
            self._starts[entry.param] = _starts(entry, at)
            at += entry.size
        self.size = at
        self.kept: Any = None
        self._kept_views: dict[torch.Tensor, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    @property
    def device(self) -> torch.device:
        """The device of its parameters."""
        return local(next(iter(self.entries))).device

    def views(self, memory: torch.Tensor, param: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of a parameter's state in the memory of the chunk."""
        if self.kept is not memory:
            return self._views(memory, param)
        # Memory that is the chunk's for good.
        if param not in self._kept_views or self._kept_views[param][0] is not memory:
            self._kept_views[param] = memory, self._views(memory, param)
        return self._kept_views[param][1]

    def _views(self, memory: torch.Tensor, param: torch.Tensor) -> list[torch.Tensor]:
        return [leaf.of_bytes(memory, start) for leaf, start in zip(self.entries[param].leaves, self._starts[param])]

    def fits(self, entry: Entry) -> bool:
        """True if the chunk has memory of this form for a state."""
        own = self.entries[entry.param]
        return own.stated == entry.stated and own.leaves == entry.leaves

    def take(self, entry: Entry) -> None:
        """Takes over the values of a state that are no tensors."""
        self.entries[entry.param] = entry._replace(tensors=())

    def forget(self, param: torch.Tensor) -> None:
        """Forgets a state, whose bytes stay unused until the chunk is made again."""
        del self.entries[param], self._starts[param]
        self._kept_views.pop(param, None)

    def start(self, param: torch.Tensor) -> int:
        """Where the state of a parameter begins."""
        return next(iter(self._starts[param]), 0)

    @staticmethod
    def placed(entries: Iterable[tuple[Entry, int]], size: int) -> Chunk:
        """A chunk that was recorded: its entries, where each begins, and its size."""
        made = Chunk(())
        for entry, start in entries:
            made.entries[entry.param] = entry
            made._starts[entry.param] = _starts(entry, start)
        made.size = size
        return made


def divided(entries: Iterable[Entry], bound: int) -> Iterator[list[Entry]]:
    """Consecutive entries of at most `bound` bytes, or single ones, each of one device."""
    found: list[Entry] = []
    weight = 0
    for entry in entries:
        if found and (weight + entry.weight > bound or not entry.is_beside(found[0])):
            yield found
            found, weight = [], 0
        found.append(entry)
        weight += entry.weight
    if found:
        yield found


def _starts(entry: Entry, first: int) -> list[int]:
    """Where the tensors of a state begin that begins at `first`."""
    *starts, _ = accumulate((_up(leaf.size) for leaf in entry.leaves), initial=first)
    return starts


def _up(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
