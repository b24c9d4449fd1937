"""Which part of which parameter lies in which subgroup of a tier, and the record of a commit.

All parameters lie one after another, and a subgroup is `most` consecutive elements of them. A subgroup may hold many parameters, and a
parameter many subgroups. The record names every parameter's shape and dtype, so that a tier of another model is refused."""

from __future__ import annotations

import json
import struct
import zlib
from itertools import accumulate
from typing import NamedTuple

import torch

from ..errors import InvalidArgumentError
from ._rows import local

_MAGIC = b"spillway.torch 1\n"
_LENGTH = struct.Struct("<Q")


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
        most: Number of elements of a subgroup, except the last."""

    def __init__(self, counts: list[int], most: int):
        total = sum(counts)
        self.most = most
        self.elements = [min(most, total - at) for at in range(0, total, most)] or [0]
        self.of_parameter: list[list[Piece]] = [[] for _ in counts]
        self.of_subgroup: list[list[Piece]] = [[] for _ in self.elements]
        for number, (begin, count) in enumerate(zip(accumulate(counts, initial=0), counts)):
            at = begin
            while at < begin + count:
                subgroup, first = divmod(at, most)
                length = min(most - first, begin + count - at)
                piece = Piece(number, subgroup, first, at - begin, length)
                self.of_parameter[number].append(piece)
                self.of_subgroup[subgroup].append(piece)
                at += length


class Commit(NamedTuple):
    """What a commit stores beside the states: the layout, the parameters, the step counts and the caller's payload."""

    most: int
    parameters: list[tuple[str, list[int]]]
    steps: list[float]
    count: int  # type: ignore[assignment]
    payload: bytes
    #: Numbers of the parameters without states.
    stateless: list[int]

    def packed(self) -> bytes:
        """The payload of the tier's commit."""
        fields = [self.most, self.parameters, self.steps, self.count, *([self.stateless] if self.stateless else [])]
        head = zlib.compress(json.dumps(fields).encode())
        return _MAGIC + _LENGTH.pack(len(head)) + head + self.payload

    @staticmethod
    def unpacked(stored: bytes) -> Commit:
        """The record of a payload.

        Raises:
            InvalidArgumentError: Another program has committed the tier."""
        start = len(_MAGIC) + _LENGTH.size
        if not stored.startswith(_MAGIC) or len(stored) < start:
            raise InvalidArgumentError(
                "the tier holds states that no optimizer of spillway.torch has committed; pass other paths or another job"
            )
        end = start + _LENGTH.unpack_from(stored, len(_MAGIC))[0]
        most, parameters, steps, count, *stateless = json.loads(zlib.decompress(stored[start:end]))
        return Commit(most, [(dtype, shape) for dtype, shape in parameters], steps, count, stored[end:], stateless[0] if stateless else [])


def described(param: torch.Tensor) -> tuple[str, list[int]]:
    """Dtype and shape of a parameter, as the record stores them."""
    return str(param.dtype).removeprefix("torch."), list(param.shape)


def check_parameters(commit: Commit, params: list[torch.Tensor], names: list[str]) -> None:
    """Raises InvalidArgumentError if a commit belongs to other parameters; the message names the first one that differs."""
    cure = "pass the model of the run that committed, or other paths or another job for this one"
    for name, param, stored in zip(names, params, commit.parameters):
        if described(local(param)) != stored:
            raise InvalidArgumentError(
                f"{name} is {param.dtype} of shape {tuple(local(param).shape)}; the tier was committed with torch.{stored[0]} of "
                f"shape {tuple(stored[1])} there; {cure}"
            )
    if len(params) != len(commit.parameters):
        first = names[len(commit.parameters)] if len(params) > len(commit.parameters) else f"parameter number {len(params)}"
        raise InvalidArgumentError(
            f"the optimizer has {len(params)} parameters, and the tier was committed with {len(commit.parameters)}: {first} "
            f"is the first without a counterpart; {cure}"
        )
    for number in commit.stateless:
        if params[number].requires_grad:
            raise InvalidArgumentError(
                f"{names[number]} requires a gradient, and the tier was committed without states for it, because it required "
                "none then; freeze it before the optimizer is constructed, or pass another job and load a state dict"
            )
