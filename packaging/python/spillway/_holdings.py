"""Which elements of a job's tensors a rank holds, where they are in its subgroups, and how the states of N ranks become those of M.

A tensor of the job is flat here: its elements lie in row-major order. A rank holds runs of these elements, one after another. The runs lie
in pieces of the rank's subgroups. Master and moments of an element are at one place of a subgroup.

Invariants:
- A step of Adam is elementwise. So a job continues with the same bits however its elements are divided.
- A rank takes each element from a part that has it. Without one an error names tensor and element.
- A new subgroup is complete before it is written."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from .errors import InvalidArgumentError

#: Most bytes of subgroups of other ranks that stay in memory, beside the one in use.
_MOST_KEPT = 1 << 30
_CURE = "pass the model, and the optimizer's groups, of the run that committed"


class Span(NamedTuple):
    """`count` elements of a tensor from element `start` on, at element `first` of a subgroup."""

    start: int
    subgroup: int
    first: int
    count: int  # type: ignore[assignment]


class Held(NamedTuple):
    """The elements of a tensor of the job that a rank holds.

    Attributes:
        name: The tensor in messages.
        what: Dtype and shape of the whole tensor.
        runs: Returns first element and number of elements of each run.
        pieces: Subgroup, first element in it and number of elements of each piece, in the order of the runs.
        steps: Number of steps of the tensor."""

    name: str
    what: str
    runs: Callable[[], Iterable[tuple[int, int]]]
    pieces: Sequence[tuple[int, int, int]]
    steps: float = 0.0

    def spans(self) -> Iterator[Span]:
        """The elements and their places, cut where a run or a piece ends."""
        start = left = 0
        runs = iter(self.runs())
        for subgroup, first, count in self.pieces:
            while count:
                while not left:
                    start, left = next(runs)
                length = min(count, left)
                yield Span(start, subgroup, first, length)
                start, left, first, count = start + length, left - length, first + length, count - length


class Holding(NamedTuple):
    """The elements of all tensors that a rank holds.

    Attributes:
        elements: Number of elements of each subgroup.
        moments: The dtype of the moments on the tier.
        held: The elements of each tensor."""

    elements: Sequence[int]
    moments: str
    held: Mapping[Any, Held]


class RankCommit(Protocol):
    """The commit of a rank of another run."""

    #: Its directory, for messages.
    where: str
    holding: Holding

    def read(self, subgroup: int) -> Sequence[Any]:
        """The master and both moments of a subgroup, as float32 tensors."""


def alignment_of(moment_dtype: str) -> int:
    """A part of a subgroup begins at a multiple of this many elements: 8-bit moments have a scale for 32 of them."""
    return 32 if moment_dtype == "int8" else 1


def aligned(count: int, alignment: int) -> int:
    """The next multiple of `alignment`."""
    return -(-count // alignment) * alignment


def box_runs(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The runs of a box of a tensor: of `sizes`, from `offsets` on."""
    if not math.prod(sizes):
        return
    # A run ends where a dimension is cut; the dimensions behind it are whole.
    cut = max((place for place, (size, whole) in enumerate(zip(sizes, shape)) if size != whole), default=0)
    strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    count, begin = math.prod(sizes[cut:]), sum(offset * stride for offset, stride in zip(offsets[cut:], strides[cut:]))
    for outer in itertools.product(*(range(offset, offset + size) for offset, size in zip(offsets[:cut], sizes[:cut]))):
        yield begin + sum(at * stride for at, stride in zip(outer, strides)), count


def check_alike(own: Holding, parts: Sequence[RankCommit], where: str) -> None:
    """Raises InvalidArgumentError if the parts have other tensors than this rank, other step counts than each other, or other moments."""
    for part in parts:
        if part.holding.moments != own.moments:
            raise InvalidArgumentError(
                f"{part.where} has moments of {part.holding.moments}, and this optimizer has {own.moments}; construct it with moments of "
                f"{part.holding.moments}"
            )
    for key, held in own.held.items():
        others = [part.holding.held[key] for part in parts if key in part.holding.held]
        if not others:
            raise InvalidArgumentError(f"{held.name} has no states in {where}; {_CURE}")
        if different := next((other.what for other in others if other.what != held.what), None):
            raise InvalidArgumentError(f"{held.name} is {held.what}, and {different} in {where}; {_CURE}")
        steps_of(key, held.name, parts)


def steps_of(key: Any, name: str, parts: Sequence[RankCommit]) -> float:
    """Number of steps of a tensor, which all parts with elements of it have."""
    known = {part.holding.held[key].steps for part in parts if key in part.holding.held and part.holding.held[key].pieces}
    if len(known) > 1:
        raise InvalidArgumentError(
            f"the parts of {name} have had {sorted(known)} steps: their gradients were not computed by all ranks; it cannot be divided in "
            "another way"
        )
    return known.pop() if known else 0.0


def move(own: Holding, parts: Sequence[RankCommit], rank: int, write: Callable[[int, Sequence[Any]], object]) -> None:
    """Reads what this rank holds from the parts, and calls write(subgroup, (master, moments...)) for each of its subgroups.

    Args:
        own: What this rank holds.
        parts: The commits of all ranks of the other run.
        rank: Number of this rank. Of several parts that have an element, ranks choose different ones.
        write: Takes float32 tensors. Elements of a subgroup that belong to no tensor are zero."""
    import torch

    finder, reads = _Finder(own, parts, rank), _Reads(parts)
    wanted = _by_subgroup(own)
    for subgroup, elements in enumerate(own.elements):
        into = [torch.zeros(elements, dtype=torch.float32, device="cpu") for _ in range(3)]
        found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for key, span in wanted(subgroup):
            for source, first, begin, count in finder.places(key, span):
                found.setdefault(source, []).append((first, begin, count))
        for source in sorted(found):
            states = reads.read(*source)
            for first, begin, count in found[source]:
                for to, state in zip(into, states, strict=True):
                    to[first : first + count] = state[begin : begin + count]
        write(subgroup, into)


def _by_subgroup(own: Holding) -> Callable[[int], Iterator[tuple[Any, Span]]]:
    """Returns a function that yields the tensors of a subgroup with their spans."""
    keys: dict[int, list[Any]] = {}
    for key, held in own.held.items():
        for subgroup, _, _ in held.pieces:
            if key not in keys.setdefault(subgroup, [])[-1:]:
                keys[subgroup].append(key)

    def of(subgroup: int) -> Iterator[tuple[Any, Span]]:
        for key in keys.get(subgroup, []):
            yield from ((key, span) for span in own.held[key].spans() if span.subgroup == subgroup)

    return of


class _Finder:
    """Finds elements in the parts. Holds the spans of the tensor that was asked for last."""

    def __init__(self, own: Holding, parts: Sequence[RankCommit], rank: int):
        self._own, self._parts = own, parts
        # The part with the number of this rank comes first: so ranks that could read the same part read different ones.
        self._order = [(rank + number) % len(parts) for number in range(len(parts))]
        self._key: Any = None
        self._spans: dict[int, tuple[list[int], list[Span]]] = {}

    def places(self, key: Any, span: Span) -> Iterator[tuple[tuple[int, int], int, int, int]]:
        """Commit and subgroup, the first element in the own subgroup and in that one, and the number of elements."""
        if key != self._key:
            held = ((number, self._parts[number].holding.held.get(key)) for number in self._order)
            sorted_ = {number: sorted(one.spans()) for number, one in held if one is not None}
            self._spans = {number: ([span.start for span in spans], spans) for number, spans in sorted_.items() if spans}
            self._key = key
        at, end = span.start, span.start + span.count
        while at < end:
            number, source = self._at(key, at)
            count = min(end, source.start + source.count) - at
            yield (number, source.subgroup), span.first + at - span.start, source.first + at - source.start, count
            at += count

    def _at(self, key: Any, element: int) -> tuple[int, Span]:
        for number, (starts, spans) in self._spans.items():
            found = bisect_right(starts, element) - 1
            if found >= 0 and element < spans[found].start + spans[found].count:
                return number, spans[found]
        raise InvalidArgumentError(
            f"no rank of {', '.join(part.where for part in self._parts[:4])}{', ...' * (len(self._parts) > 4)} has element {element} of "
            f"{self._own.held[key].name}; {_CURE}"
        )


class _Reads:
    """Reads subgroups of parts, and keeps the last ones."""

    def __init__(self, parts: Sequence[RankCommit]):
        self._parts = parts
        self._kept: OrderedDict[tuple[int, int], Sequence[Any]] = OrderedDict()
        self._bytes = 0

    def read(self, number: int, subgroup: int) -> Sequence[Any]:
        """The states of a subgroup of a part."""
        place = number, subgroup
        if place in self._kept:
            self._kept.move_to_end(place)
            return self._kept[place]
        size = 12 * self._parts[number].holding.elements[subgroup]
        while self._kept and self._bytes + size > _MOST_KEPT:
            self._bytes -= sum(state.nbytes for state in self._kept.popitem(last=False)[1])
        self._kept[place] = states = self._parts[number].read(subgroup)
        self._bytes += size
        return states
