"""Parameters on a tier, which only commits write. Several parameters have an extent, in which they lie as the states of a chunk do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ...tier import Tier
from .._tensors import check_has_memory, local
from .chunk import Chunk, Entry


class Trained(NamedTuple):
    """All parameters of an optimizer.

    Attributes:
        params, names: Those, and their names in messages.
        given: Their names in the groups; None for one without."""

    params: list[torch.Tensor]
    names: list[str]
    given: list[str | None]


class Weights:
    """The extents of parameters."""

    def __init__(self) -> None:
        #: The numbers of the extents, by their names.
        self._extents: dict[str, int] = {}

    @staticmethod
    def divided(trained: Trained, stepped: Iterable[torch.Tensor], bound: int) -> list[list[Any]]:
        """The parameters that are trained, or have been, in parts of about the bytes of a chunk: the name of each part's extent, and the
        numbers of its parameters."""
        once, found, sizes = {*stepped}, list[list[int]](), list[int]()
        for number, param in enumerate(trained.params):
            own = local(param).numel() * param.element_size()
            if not ((param.requires_grad or param in once) and own):
                continue
            if not found or sizes[-1] + own > bound:
                found.append([])
                sizes.append(0)
            found[-1].append(number)
            sizes[-1] += own
        # An extent has one size: other parameters are another extent.
        return [[f"weights-{numbers[0]:08}-{numbers[-1]:08}-{len(numbers)}-{size}", numbers] for numbers, size in zip(found, sizes)]

    def write(self, tier: Tier, trained: Trained, parts: Sequence[Sequence[Any]]) -> None:
        """Writes the values of parameters, in the parts of divided()."""
        try:
            self._write(tier, trained, parts)
        except BaseException:
            # Nothing of them is in flight when the next commit begins.
            tier._transfer(())
            raise

    def _write(self, tier: Tier, trained: Trained, parts: Sequence[Sequence[Any]]) -> None:
        for name in self._extents.keys() - {name for name, _ in parts}:
            tier.remove(self._extents.pop(name))
        last: int | None = None
        for name, numbers in parts:
            chunk, tensors = _together(trained, numbers)
            memory = torch.empty(chunk.size, dtype=torch.uint8, device="cpu")
            for param, own in tensors.items():
                _copy(chunk.views(memory, param), own)
            # One part is written while the next one is copied.
            if last is not None:
                tier.wait(last)
            extent = self._extents[name] = tier.define(name, [chunk.size])
            last = tier.put(extent, [memory])
        if last is not None:
            tier.wait(last)

    def read(self, tier: Tier, trained: Trained, parts: Sequence[Sequence[Any]]) -> None:
        """Gives parameters the values that were written."""
        self._extents = {}
        for name, numbers in parts:
            chunk, tensors = _together(trained, numbers)
            extent = self._extents[name] = tier.define(name, [chunk.size])
            memory = torch.empty(chunk.size, dtype=torch.uint8, device="cpu")
            tier.wait(tier.get(extent, [memory]))
            for param, own in tensors.items():
                _copy(own, chunk.views(memory, param))


def _together(trained: Trained, numbers: Sequence[int]) -> tuple[Chunk, dict[torch.Tensor, Sequence[torch.Tensor]]]:
    """Parameters as the entries of a chunk, and their plain tensors."""
    params, names, _ = trained
    for number in numbers:
        check_has_memory(local(params[number]), names[number])
    entries = [Entry.of(params[number], names[number], {params[number]: params[number].detach()}) for number in numbers]
    return Chunk(entries), {entry.param: entry.tensors for entry in entries}


def _copy(to: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies of tensors, which are done when this call returns."""
    if to:
        torch._foreach_copy_(to, sources)
