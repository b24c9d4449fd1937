"""Portions of a bucket: what the engine steps in one call.

A tensor of more bytes than its bucket should have is divided. Its gradient arrives at once, so its pieces leave the device, are stepped and
return one after another: while one is stepped, the gradient of the next one leaves and the weights of the last one return.

Invariant: `sum_of` the sums of the portions has the bits of the library's sum of the squares of the whole bucket. The library halves a list
of tensors, and divides the tiles of a tensor at the largest power of two below their number. Portions are nodes of this tree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Union

import torch

from .._layout import views
from .slot import Slot

#: Elements of a tile of the library's sums of squares.
_TILE = 4096
#: A portion, or the two branches of a node whose sum is that of its branches.
Tree = Union["Portion", "tuple[Tree, Tree]"]


class Portion:
    """Parameters of a bucket, or a piece of one of them.

    Attributes:
        places: The places of the parameters in the bucket.
        number: Its number in the rounds of the bucket's engine, if the bucket is not in the tail."""

    number = 0

    def __init__(self, places: Sequence[int], piece: tuple[int, int] | None = None):
        self.places = places
        # First element and number of elements; None: whole parameters.
        self._piece = piece

    @property
    def is_piece(self) -> bool:
        """True if the portion has a piece of one parameter."""
        return self._piece is not None

    @property
    def start(self) -> int:
        """The first element that it has of each parameter."""
        return 0 if self._piece is None else self._piece[0]

    def rows(self, slots: Sequence[Slot]) -> list[tuple[Any, ...]]:
        """The arrays of each row, for the slots of the bucket."""
        rows = [slots[place].row() for place in self.places]
        if self._piece is None:
            return rows
        start, count = self._piece
        return [tuple(array.view(-1)[start : start + count] for array in row) for row in rows]

    def pairs(
        self, places: Iterable[int], hosts: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What the portion has of contiguous host memory and of tensors of any strides, at some of its places: the two sides of copies."""
        if self._piece is None:
            own = [*places]
            return [hosts[place] for place in own], [tensors[place] for place in own]
        ours, theirs = [], []
        for place in places:
            flat = hosts[place].view(-1)
            for start, view in views(tensors[place], *self._piece):
                ours.append(flat[start : start + view.numel()].view(view.shape))
                theirs.append(view)
        return ours, theirs


def divide(slots: Sequence[Slot], most: int) -> Tree:
    """The portions of a bucket of these slots, whose tensors have at most `most` bytes each, or one tile."""
    return _halve([_length(slot, most) for slot in slots], slots, range(len(slots)))


def leaves(tree: Tree) -> Iterator[Portion]:
    """The portions, in their order."""
    if isinstance(tree, Portion):
        yield tree
    else:
        for branch in tree:
            yield from leaves(branch)


def sum_of(tree: Tree, sums: Mapping[Portion, float]) -> float:
    """The sum of the squares of a bucket, from those of its portions."""
    return sums[tree] if isinstance(tree, Portion) else sum_of(tree[0], sums) + sum_of(tree[1], sums)


def _length(slot: Slot, most: int) -> int:
    """Elements of a piece of a tensor: a power of two of tiles. As many as it has, if it is not divided."""
    if slot.size * slot.param.element_size() <= most:
        return slot.size
    elements = max(_TILE, 1 << (most // slot.param.element_size()).bit_length() >> 1)
    return min(elements, slot.size)


def _halve(lengths: Sequence[int], slots: Sequence[Slot], places: range) -> Tree:
    if all(lengths[place] == slots[place].size for place in places):
        return Portion(places)
    if len(places) == 1:
        length, size = lengths[places[0]], slots[places[0]].size
        return _pieces([Portion(places, (start, min(length, size - start))) for start in range(0, size, length)])
    middle = len(places) // 2
    return _halve(lengths, slots, places[:middle]), _halve(lengths, slots, places[middle:])


def _pieces(portions: Sequence[Portion]) -> Tree:
    if len(portions) == 1:
        return portions[0]
    middle = 1 << (len(portions) - 1).bit_length() >> 1
    return _pieces(portions[:middle]), _pieces(portions[middle:])
