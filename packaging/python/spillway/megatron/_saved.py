"""States of shards in a directory, which every process writes its part of and any process reads.

A process writes two files: `rank-R-step-S.safetensors` with the tensors SHARD.param, SHARD.exp_avg and SHARD.exp_avg_sq, and `rank-R.json`,
which names it, the step, and a checksum of each tensor and of itself. The second one is renamed into place after the first one is durable. So a
process that is killed leaves its old part or its new one."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ..errors import CorruptError, InvalidArgumentError, NoStateError
from ..swap import STATES

_FORMAT = 1


class Place(NamedTuple):
    """Where the states of a shard are: the file, the step, and for each state offset, bytes and checksum."""

    file: str
    step: int
    spans: dict[str, tuple[int, int, int]]


def write(directory: str, rank: int, step: int, sizes: Iterable[tuple[str, int]], states: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Writes a process's part.

    Args:
        directory: An existing directory.
        rank: Number of the process.
        step: Step of the states.
        sizes: Name and number of elements of each tensor, in the order of `states`.
        states: The same tensors, float32 in host memory; computed while they are written."""
    header, at = {}, 0
    for name, elements in sizes:
        header[name] = {"dtype": "F32", "shape": [elements], "data_offsets": [at, at + 4 * elements]}
        at += 4 * elements
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    name, spans = f"rank-{rank:05d}-step-{step}.safetensors", {}
    with _durable(os.path.join(directory, name)) as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor, flat in states:
            content = memoryview(flat.contiguous().numpy()).cast("B")
            spans[tensor] = [file.tell(), len(content), zlib.crc32(content)]
            file.write(content)
    with _durable(os.path.join(directory, f"rank-{rank:05d}.json")) as file:
        body = {"step": step, "file": name, "spans": spans}
        file.write(json.dumps({"format": _FORMAT, "checksum": _checksum(body), **body}).encode())
    _sync_directory(directory)
    for other in os.listdir(directory):
        if other.startswith(f"rank-{rank:05d}-step-") and other != name:
            os.unlink(os.path.join(directory, other))


def places(directory: str) -> dict[str, Place]:
    """The shards in a directory. Where two processes wrote a shard, the later step counts."""
    found: dict[str, Place] = {}
    names = sorted(os.listdir(directory)) if os.path.isdir(directory) else []
    for manifest in names:
        if not (manifest.startswith("rank-") and manifest.endswith(".json")):
            continue
        path = os.path.join(directory, manifest)
        try:
            with open(path, "rb") as file:
                content = json.load(file)
            written = content["format"]
            if written == _FORMAT:
                if _checksum({key: content[key] for key in ("step", "file", "spans")}) != content["checksum"]:
                    raise ValueError("it does not match its checksum")
                _enter(found, directory, content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptError(f"{path} is damaged: {error!r}; use another checkpoint") from None
        if written != _FORMAT:
            raise InvalidArgumentError(f"{path} has format {written!r}, and this Spillway reads {_FORMAT}; load it with the version that "
                                       "wrote it")
    return found


def _checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _enter(found: dict[str, Place], directory: str, content: dict[str, Any]) -> None:
    spans: dict[str, dict[str, tuple[int, int, int]]] = {}
    for tensor, (offset, length, checksum) in content["spans"].items():
        shard, _, state = tensor.rpartition(".")
        spans.setdefault(shard, {})[state] = (int(offset), int(length), int(checksum))
    file = os.path.join(directory, os.path.basename(content["file"]))
    for shard, parts in spans.items():
        if shard not in found or found[shard].step < content["step"]:
            found[shard] = Place(file, int(content["step"]), parts)


def step_of(found: dict[str, Place], shards: dict[str, int], directory: str) -> int:
    """The step of the states of all shards, after a check that they are there.

    Args:
        found: The result of places().
        shards: Number of elements of each shard.
        directory: For messages."""
    for name, elements in shards.items():
        if name not in found:
            raise NoStateError(f"{directory} has no state of shard {name!r}; load a checkpoint of the same shards")
        lengths = {found[name].spans.get(state, (0, 0, 0))[1] for state in STATES}
        if lengths != {4 * elements}:
            raise InvalidArgumentError(f"{directory}: the states of shard {name!r} have {sorted(lengths)} bytes, and {4 * elements} are needed; "
                                       "load a checkpoint of the same shards")
    steps = sorted({found[name].step for name in shards})
    if len(steps) != 1:
        raise InvalidArgumentError(f"{directory} has shards of the steps {steps}: not every process wrote its part of one step; use another "
                                   "checkpoint")
    return steps[0]


def read(place: Place, state: str, into: torch.Tensor) -> None:
    """Reads one state of a shard into a float32 tensor in host memory."""
    offset, length, checksum = place.spans[state]
    content = memoryview(into.numpy()).cast("B")
    try:
        with open(place.file, "rb") as file:
            file.seek(offset)
            got = file.readinto(content)
    except FileNotFoundError:
        raise CorruptError(f"{place.file} is missing; use another checkpoint") from None
    if got != length or zlib.crc32(content) != checksum:
        raise CorruptError(f"{place.file}: {state} at byte {offset} does not match its checksum; use another checkpoint")


class _durable:
    """A file that takes its name when it is complete and durable."""

    def __init__(self, path: str):
        self._path, self._part = path, f"{path}.part"

    def __enter__(self) -> Any:
        self._file = open(self._part, "wb")
        return self._file

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            with self._file:
                if kind is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
            if kind is None:
                os.replace(self._part, self._path)
        finally:
            if os.path.exists(self._part):
                os.unlink(self._part)


def _sync_directory(directory: str) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


