"""Second copies of the weights of a bucket, on the device of its parameters.

The weights that a step during backward has written go there at once, on a stream of their own. If the verdict keeps the step, a copy on the
device gives them to the parameters. Otherwise nothing has happened to the parameters.

Invariant: `fences` has those of all portions that were brought in a round, and `_left` is the number of the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .._copies import HostLink
from .portions import Portion
from .slot import Slot

_ByLink = Sequence[tuple[HostLink, Sequence[int]]]


class Second:
    """The second copies of a bucket of these parameters, which has this number of portions."""

    def __init__(self, slots: Sequence[Slot], portions: int):
        self._slots, self._portions, self._left = slots, portions, portions
        self._memory: list[torch.Tensor] = []
        self._links: list[tuple[HostLink, set[int]]] = []
        # The copies of a link are awaited by its last fence.
        self._fences: dict[HostLink, Any] = {}

    def make(self, owns: Sequence[torch.Tensor], links: _ByLink) -> bool:
        """Makes memory for these weights; False if a device has too little."""
        if not _fit(self._memory, owns):
            self._memory = []
            memory: list[Any] = [None] * len(owns)
            for link, places in links:
                made = link.second([owns[place] for place in places])
                if made is None:
                    return False
                for place, tensor in zip(places, made):
                    memory[place] = tensor
            self._memory = memory
        self._links = [(link, {*places}) for link, places in links]
        return True

    def bring(self, portion: Portion) -> None:
        """Starts the copies of what the step of a portion has written."""
        weights = [slot.weights for slot in self._slots]
        for link, members in self._links:
            if own := [place for place in portion.places if place in members]:
                hosts, copies = portion.pairs(own, weights, self._memory)
                self._fences[link] = link.bring_second(copies, hosts)
        self._left -= 1

    def fences(self) -> list[Any] | None:
        """What the copies from the host are awaited by; None: those of some portion have not begun."""
        return None if self._left else [*self._fences.values()]

    def give(self, to: Sequence[torch.Tensor], places: Iterable[int]) -> None:
        """Gives the parameters at these places their weights, whose copies have begun."""
        wanted = [*places]
        for link, members in self._links:
            own = [place for place in wanted if place in members]
            link.place_all([to[place] for place in own], [self._memory[place] for place in own], self._fences[link])

    def nbytes(self) -> int:
        """Bytes of the memory."""
        return sum(tensor.nbytes for tensor in self._memory)

    def free(self) -> None:
        """Frees the memory, whose copies are not used any more."""
        self._memory = []

    def forget(self) -> None:
        """The copies of this round are not used any more."""
        self._fences, self._left = {}, self._portions


def _fit(memory: Sequence[torch.Tensor], owns: Sequence[torch.Tensor]) -> bool:
    return len(memory) == len(owns) and all(
        (one.shape, one.dtype, one.device) == (own.shape, own.dtype, own.device) for one, own in zip(memory, owns)
    )
