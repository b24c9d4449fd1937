"""States of shards in a directory, which every process writes its part of and any process reads.

A process writes two files: `rank-R-step-S.safetensors` with the tensors SHARD.param, SHARD.exp_avg and SHARD.exp_avg_sq, and `rank-R.json`,
which names it, the step, and a checksum of each tensor and of itself. The second one is renamed into place after the first one is durable.
So a process that is killed leaves its old part or its new one.

A shard with a name such as `w[0:4096]` has these elements of `w`. It is put together from others of `w`, if the processes of another number
of ranks have saved them.

The directory may be one that others write to. Whatever is in it, a read ends, and reports what is not as write() wrote it as
CorruptError."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from .. import _files, _safetensors
from ..errors import CorruptError, InvalidArgumentError, NoStateError
from ..swap import STATES
from ._shards import range_of

_FORMAT = 1
_MANIFEST, _TENSORS = re.compile(r"rank-[0-9]{5,9}\.json"), re.compile(r"rank-[0-9]{5,9}-step-[0-9]{1,19}\.safetensors")
#: Largest step: the library counts to 2**63, and the next step has a number too.
_MOST_STEP = (1 << 63) - 2
_MOST_OFFSET = (1 << 63) - 1


class Place(NamedTuple):
    """Where the states of a shard are: the file, the step, and for each state offset, bytes and checksum."""

    file: str
    step: int
    spans: dict[str, tuple[int, int, int]]


class Piece(NamedTuple):
    """A part of a shard: `count` elements from element `first` on, which are those from `start` on of a saved shard of `elements`."""

    place: Place
    elements: int
    start: int
    first: int
    count: int  # type: ignore[assignment]


def write(directory: str, rank: int, step: int, sizes: Iterable[tuple[str, int]], states: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Writes a process's part.

    Args:
        directory: An existing directory.
        rank: Number of the process.
        step: Step of the states.
        sizes: Name and number of elements of each tensor, in the order of `states`.
        states: The same tensors, float32 in host memory; computed while they are written."""
    header, own = _safetensors.Header(), f"rank-{rank:05d}"
    for tensor, elements in sizes:
        header.add(tensor, "F32", [elements])
    packed, name, spans = header.packed(), f"{own}-step-{step}.safetensors", {}
    _files.check_replaceable(os.path.join(directory, f"{own}.json"))
    with _files.durable(os.path.join(directory, name)) as file:
        file.write(packed)
        for tensor, flat in states:
            content = memoryview(flat.contiguous().numpy()).cast("B")
            spans[tensor] = [file.tell(), len(content), zlib.crc32(content)]
            file.write(content)
    with _files.durable(os.path.join(directory, f"{own}.json")) as file:
        body = {"step": step, "file": name, "spans": spans}
        file.write(json.dumps({"format": _FORMAT, "checksum": _checksum(body), **body}).encode())
    _files.sync_directory(directory)
    for other in os.listdir(directory):
        if other.startswith(f"{own}-step-") and other != name:
            os.unlink(os.path.join(directory, other))


def places(directory: str) -> dict[str, Place]:
    """The shards in a directory. Where two processes wrote a shard, the later step counts."""
    if os.path.exists(directory) and not os.path.isdir(directory):
        raise InvalidArgumentError(f"{directory} is not a directory; pass one that save_to() wrote")
    found: dict[str, Place] = {}
    for manifest in sorted(filter(_MANIFEST.fullmatch, os.listdir(directory) if os.path.isdir(directory) else [])):
        path = os.path.join(directory, manifest)
        try:
            content = _files.read_json(path)
            written = content["format"]
            if written == _FORMAT:
                if _checksum({key: content[key] for key in ("step", "file", "spans")}) != content["checksum"]:
                    raise ValueError("it does not match its checksum")
                _enter(found, directory, content)
        except CorruptError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptError(f"{path} is damaged: {error!r}; use another checkpoint") from None
        if written != _FORMAT:
            raise InvalidArgumentError(
                f"{path} has format {_shortened(written)}, and this Spillway reads {_FORMAT}; load it with the version that wrote it"
            )
    return found


def _checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 100 else f"{text[:100]}..."


def _integer(name: str, value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{name} is {_shortened(value)}, not an integer from 0 to {most}")
    return value


def _enter(found: dict[str, Place], directory: str, content: dict[str, Any]) -> None:
    """Enters the shards of a manifest. ValueError, KeyError or TypeError if it is not one that write() makes."""
    step, name = _integer("step", content["step"], _MOST_STEP), content["file"]
    if not isinstance(name, str) or not _TENSORS.fullmatch(name):
        raise ValueError(f"its file is {_shortened(name)}, not the name of a rank's tensors")
    spans: dict[str, dict[str, tuple[int, int, int]]] = {}
    for tensor, (offset, length, checksum) in content["spans"].items():
        shard, _, state = tensor.rpartition(".")
        spans.setdefault(shard, {})[state] = (
            _integer("an offset", offset, _MOST_OFFSET),
            _integer("a length", length, _MOST_OFFSET),
            _integer("a checksum", checksum, (1 << 32) - 1),
        )
    ends = 0
    for offset, length, _ in sorted(span for states in spans.values() for span in states.values()):
        if offset < ends:
            raise ValueError(f"two tensors overlap at byte {offset}")
        ends = offset + length
    for shard, parts in spans.items():
        if shard not in found or found[shard].step < step:
            found[shard] = Place(os.path.join(directory, name), step, parts)


def _opened(path: str) -> Any:
    try:
        return _files.open_regular(path)
    except FileNotFoundError:
        raise CorruptError(f"{path} is missing; use another checkpoint") from None


def pieces_of(found: dict[str, Place], shards: dict[str, int], directory: str) -> dict[str, list[Piece]]:
    """Where the elements of each shard are. Shards of the latest step are preferred: those of an earlier one are what an earlier number
    of processes has left.

    Args:
        found: The result of places().
        shards: Number of elements of each shard.
        directory: For messages.

    Raises:
        NoStateError: Elements of a shard are not there."""
    latest = max((place.step for place in found.values()), default=0)
    ranges: dict[str, list[tuple[int, int, Place]]] = {}
    for name, place in found.items():
        if place.step == latest and (of := range_of(name)):
            ranges.setdefault(of[0], []).append((*of[1:], place))
    for parts in ranges.values():
        parts.sort(key=lambda part: part[:2])
    return {name: _pieces(found, latest, ranges, name, elements, directory) for name, elements in shards.items()}


def _pieces(
    found: dict[str, Place], latest: int, ranges: dict[str, list[tuple[int, int, Place]]], name: str, elements: int, directory: str
) -> list[Piece]:
    own = found.get(name)
    if own is None or own.step != latest:
        of = range_of(name)
        if of and of[2] - of[1] == elements:
            covering = _covering(ranges.get(of[0], []), *of[1:])
            if covering:
                return covering
    if own is None:
        raise NoStateError(f"{directory} has no state of shard {name!r}; load a checkpoint of the same parameters")
    return [Piece(own, elements, 0, 0, elements)]


def _covering(ranges: list[tuple[int, int, Place]], begin: int, end: int) -> list[Piece]:
    """The pieces of elements `begin` to `end` in sorted ranges; none if elements are missing."""
    pieces, at = [], begin
    for start, stop, place in ranges:
        if start <= at < min(stop, end):
            pieces.append(Piece(place, stop - start, at - start, at - begin, min(stop, end) - at))
            at += pieces[-1].count
    return pieces if at == end else []


def step_of(wanted: dict[str, list[Piece]], directory: str) -> int:
    """The step of the states of all shards, after a check that they are there.

    Args:
        wanted: The result of pieces_of().
        directory: For messages."""
    for name, pieces in wanted.items():
        for piece in pieces:
            lengths = {piece.place.spans.get(state, (0, 0, 0))[1] for state in STATES}
            if lengths != {4 * piece.elements}:
                raise InvalidArgumentError(
                    f"{directory}: the states of shard {name!r} have {sorted(lengths)} bytes, and {4 * piece.elements} are needed; "
                    "load a checkpoint of the same parameters"
                )
    places = [piece.place for pieces in wanted.values() for piece in pieces]
    steps = sorted({place.step for place in places})
    if len(steps) != 1:
        raise InvalidArgumentError(
            f"{directory} has shards of the steps {steps}: not every process wrote its part of one step; use another checkpoint"
        )
    ends: dict[str, int] = {}
    for place in places:
        ends[place.file] = max(ends.get(place.file, 0), *(sum(place.spans[state][:2]) for state in STATES))
    for file, end in ends.items():
        with _opened(file) as opened:
            size = os.fstat(opened.fileno()).st_size
        if size < end:
            raise CorruptError(f"{file} has {size} bytes, and its tensors end at byte {end}; use another checkpoint")
    return steps[0]


def read(pieces: list[Piece], state: str, into: torch.Tensor) -> None:
    """Reads one state of a shard into a float32 tensor in host memory. The checksums are those of whole saved shards."""
    for place, elements, start, first, count in pieces:
        if count == elements:
            _read_whole(place, state, into[first : first + count])
        else:
            whole = torch.empty(elements, dtype=torch.float32, device="cpu")
            _read_whole(place, state, whole)
            into[first : first + count] = whole[start : start + count]


def _read_whole(place: Place, state: str, into: torch.Tensor) -> None:
    offset, length, checksum = place.spans[state]
    content = memoryview(into.numpy()).cast("B")
    with _opened(place.file) as file:
        file.seek(offset)
        got = file.readinto(content)
    if got != length or zlib.crc32(content) != checksum:
        raise CorruptError(f"{place.file}: {state} at byte {offset} does not match its checksum; use another checkpoint")
