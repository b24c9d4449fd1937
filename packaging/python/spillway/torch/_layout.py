"""Where the elements of an optimizer's parameters are: in subgroups of this process, and in the parameters of the whole job.

All parameters lie one after another, each in row-major order, whatever strides it has. A subgroup is `most` consecutive elements.
A subgroup may hold many parameters, and a parameter many subgroups. The part of a DTensor that a process has is a box of the whole
parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from .._holdings import Held, Holding, aligned, alignment_of, box_runs
from ._tensors import DTensor, local


class Piece(NamedTuple):
    """`count` elements of a parameter from element `start` on, at element `first` of a subgroup."""

    parameter: int
    subgroup: int
    first: int
    start: int
    count: int  # type: ignore[assignment]


class Layout:
    """Pieces of parameters in subgroups of at most `most` elements.

    Args:
        counts: Number of elements of each parameter; 0 for one without states.
        most: Number of elements of a subgroup, except the last.
        alignment: Each piece begins at a multiple of this many elements of its subgroup and of its parameter. Elements between two
            pieces belong to no parameter."""

    def __init__(self, counts: list[int], most: int, alignment: int = 1):
        self.most = most
        most = aligned(most, alignment)
        begins = [*accumulate((aligned(count, alignment) for count in counts), initial=0)]
        total = begins.pop()
        self.elements = [min(most, total - at) for at in range(0, total, most)] or [0]
        self.of_parameter: list[list[Piece]] = [[] for _ in counts]
        self.of_subgroup: list[list[Piece]] = [[] for _ in self.elements]
        for number, (begin, count) in enumerate(zip(begins, counts)):
            at = begin
            while at < begin + count:
                subgroup, first = divmod(at, most)
                length = min(most - first, begin + count - at)
                piece = Piece(number, subgroup, first, at - begin, length)
                self.of_parameter[number].append(piece)
                self.of_subgroup[subgroup].append(piece)
                at += length


def views(tensor: torch.Tensor, start: int, count: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Views of `count` elements of a tensor from element `start` on in row-major order, one after another, each with its first element. A
    contiguous tensor has one view."""
    if tensor.is_contiguous():
        yield start, tensor.view(-1)[start : start + count]
        return
    row = tensor[0].numel()
    while count:
        at, within = divmod(start, row)
        if within or count < row:
            length = min(count, row - within)
            for first, view in views(tensor[at], within, length):
                yield at * row + first, view
        else:
            length = count // row * row
            yield start, tensor[at : at + count // row]
        start, count = start + length, count - length


def values_of(tensor: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """The elements that `views` has, flat; memory of the tensor if it is contiguous."""
    found = [view.reshape(-1) for _, view in views(tensor, start, count)]
    return found[0] if len(found) == 1 else torch.cat(found)


def box_of(param: torch.Tensor) -> list[Any]:
    """Dtype and shape of a whole parameter, and offsets and sizes of the part that this process has. A tensor that is no DTensor is whole
    in every process, as torch.distributed.checkpoint takes it."""
    whole = [str(param.dtype), list(param.shape)]
    if not isinstance(param, DTensor):
        return [*whole, [0] * param.dim(), list(param.shape)]
    if not local(param).numel():
        return [*whole, [0] * param.dim(), [0] * param.dim()]
    [chunk] = param.__create_chunk_list__()
    return [*whole, list(chunk.offsets), list(chunk.sizes)]


def holding_of(facts: dict[str, Any], names: list[str]) -> Holding:
    """The elements that a process holds, from the facts of its commit. `names`: the names of the parameters, for messages."""
    boxes, stateless = facts["boxes"], set(facts["stateless"])
    counts = [0 if number in stateless else math.prod(sizes) for number, (_, _, _, sizes) in enumerate(boxes)]
    layout = Layout(counts, facts["most"], alignment_of(facts["moments"]))
    held = {}
    for number, (dtype, shape, offsets, sizes) in enumerate(boxes):
        name = names[number] if number < len(names) else f"parameter number {number}"
        pieces = [(piece.subgroup, piece.first, piece.count) for piece in layout.of_parameter[number]]
        runs = partial(box_runs, shape, offsets, sizes)
        if number not in stateless:
            held[number] = Held(name, in_words(dtype, shape), runs, pieces, facts["steps"][number])
    return Holding(layout.elements, facts["moments"], held)


def in_words(dtype: str, shape: Sequence[int]) -> str:
    """Dtype and shape of a tensor, as the record of a commit and messages have them."""
    return f"{dtype} of shape {tuple(shape)}"


def described(param: torch.Tensor) -> str:
    """Dtype and shape of the part of a parameter that this process has."""
    return in_words(str(param.dtype), local(param).shape)
