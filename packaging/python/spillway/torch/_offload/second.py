"""Second copies of the weights of a bucket, on the device of its parameters.

The weights that a step during backward has written go there at once, on a stream of their own. If the verdict keeps the step, a copy on the
device gives them to the parameters. Otherwise nothing has happened to the parameters.

Invariant: `fences` is set once the copies of a round have begun, and None from `forget` on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .._copies import HostLink
from .slot import Slot

_ByLink = list[tuple[HostLink, list[int]]]


class Second:
    """The second copies of a bucket of these parameters.

    Attributes:
        fences: What the copies from the host are awaited by; None: there are none."""

    def __init__(self, slots: Sequence[Slot]):
        self._slots = slots
        self._memory: list[torch.Tensor] = []
        self._links: _ByLink = []
        self.fences: list[Any] | None = None

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
        self._links = links
        return True

    def bring(self) -> None:
        """Starts the copies of what the step has written."""
        weights = [slot.weights for slot in self._slots]
        self.fences = [
            link.bring_second([self._memory[place] for place in places], [weights[place] for place in places])
            for link, places in self._links
        ]

    def give(self, to: Sequence[torch.Tensor], places: Iterable[int]) -> bool:
        """Gives the parameters at these places their weights; False if no copies have begun."""
        if self.fences is None:
            return False
        wanted = {*places}
        for (link, members), fence in zip(self._links, self.fences):
            own = [place for place in members if place in wanted]
            link.place_all([to[place] for place in own], [self._memory[place] for place in own], fence)
        return True

    def free(self) -> None:
        """Frees the memory, whose copies are not used any more."""
        self._memory = []

    def forget(self) -> None:
        """The copies of this round are not used any more."""
        self.fences = None


def _fit(memory: Sequence[torch.Tensor], owns: Sequence[torch.Tensor]) -> bool:
    return len(memory) == len(owns) and all(
        (one.shape, one.dtype, one.device) == (own.shape, own.dtype, own.device) for one, own in zip(memory, owns)
    )
