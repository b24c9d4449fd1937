"""Sums of the words of tensors on a device, which tell whether a program has written to them. They stay on the device.

Each word counts with a factor of its place, an odd random number: words that are exchanged, negated or changed against each other change
the sum, as they would not change a plain one. All arithmetic is modulo 2^64.

Small tensors are laid end to end and summed up together, so that the number of operations does not grow with the number of tensors. Of a
large one first those words are added that have the same factor: only changes that cancel there, at distances of a multiple of 65,536 words,
are not seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

#: Words after which the factors repeat, and words of small tensors that are summed up together.
_PERIOD, _AT_ONCE = 1 << 16, 1 << 22
_WIDTHS = (torch.int32, torch.int16, torch.uint8)
_factors: dict[torch.device, torch.Tensor] = {}


def device_sums(memories: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The sum of each tensor's bytes, an integer on its device. `memories` are flat tensors of bytes."""
    words = [memory.view(next(width for width in _WIDTHS if _fits(memory, width.itemsize))) for memory in memories]
    found: list[Any] = [None] * len(words)
    for places in _batches(words):
        if words[places[0]].numel() > _PERIOD:
            found[places[0]] = _large(words[places[0]])
        else:
            for place, total in zip(places, _small([words[place] for place in places])):
                found[place] = total
    return found


def _fits(memory: torch.Tensor, size: int) -> bool:
    return memory.numel() % size == 0 and memory.storage_offset() % size == 0


def _batches(words: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """The places of tensors that are summed up together: a large one alone, small ones of one device and width."""
    small: dict[Any, list[int]] = {}
    sizes: dict[Any, int] = {}
    for place, own in enumerate(words):
        kind, size = (own.device, own.dtype), own.numel()
        if size > _PERIOD:
            yield [place]
            continue
        if sizes.get(kind, 0) + size > _AT_ONCE:
            yield small.pop(kind)
            sizes[kind] = 0
        small.setdefault(kind, []).append(place)
        sizes[kind] = sizes.get(kind, 0) + size
    yield from small.values()


def _small(words: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    device, sizes = words[0].device, [own.numel() for own in words]
    factors = _factors_of(device)
    products = torch.cat([*words]) * torch.cat([factors[:size] for size in sizes])
    # The sums of all words before each end.
    upto = torch.cat([products.new_zeros(1), products.cumsum(0)])
    # Views, and no list of numbers that would be copied to the device.
    return torch.diff(torch.stack([upto[end] for end in accumulate(sizes, initial=0)])).unbind()


def _large(words: torch.Tensor) -> torch.Tensor:
    rows = words.numel() // _PERIOD
    columns = words[: rows * _PERIOD].view(rows, _PERIOD).sum(0, dtype=torch.int64)
    rest = words[rows * _PERIOD :]
    columns[: rest.numel()] += rest
    return (columns * _factors_of(words.device)).sum()


def _factors_of(device: torch.device) -> torch.Tensor:
    if device not in _factors:
        source = torch.Generator().manual_seed(1)
        drawn = torch.randint(-(1 << 63), (1 << 63) - 1, (_PERIOD,), generator=source, device="cpu")
        _factors[device] = (drawn | 1).to(device)
    return _factors[device]
