"""Snapshots of a tier, which a thread of the library writes beside the steps, what they say about themselves, and their removal by count.

A directory is a finished snapshot if it has a manifest, which is written last. Only finished snapshots of the same tier are removed, and
only if they have no other files. They lose their name first: what a killed process leaves is called `*.partial`, as an unfinished snapshot
is."""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from . import _abi, _arguments, _files
from ._native_handle import _NativeHandle
from ._progress import LOOK, Progress, Told
from .errors import CorruptError, InvalidArgumentError, NoStateError, TimedOutError

#: The file of a finished snapshot that is written last.
MANIFEST, _FORMAT = "manifest.json", "spillway tier export"
#: The key of the manifest in the metadata of a safetensors file.
_KEY = "spillway"
#: The names of extents with the rest of a long record.
RECORD = "record-"
#: The names of the extents of a Swap; a number of six digits follows.
_SUBGROUP = "subgroup-"


class SnapshotProgress(NamedTuple):
    """How far a Snapshot is."""

    step: int
    written: int
    bytes: int
    ended: bool


class Snapshot(_NativeHandle):
    """An export of a tier's last commit that is written while the tier is used. Made by Tier.snapshot() and Tier.export_tensors().
    Thread-safe.

    Example:
        with tier.snapshot("/mnt/pfs/step-100", bytes_per_second=200_000_000) as snapshot:
            train()
            snapshot.wait()"""

    closer = "spw_tier_task_close"

    def __init__(
        self,
        tier: Any,
        directory: str | os.PathLike[str],
        bytes_per_second: int,
        keep: int | None = None,
        part: str = "",
        options: Any = None,
    ):
        if keep is not None and (type(keep) is not int or keep < 1):
            raise InvalidArgumentError(f"snapshot: keep is {keep!r}; pass a number of snapshots from 1 on, or None for all")
        given = os.fsdecode(_arguments.path("Tier: directory" if options is None else "Tier: file", directory))
        self._whole, self._part, self._keep = os.path.abspath(given), part, keep
        name = os.fsencode(os.path.join(given, part) if part else given)
        options = options or _abi.sized(_abi.TierExportOptions)
        options.bytes_per_second = bytes_per_second
        tier._through(lambda handle: self._hold("spw_tier_export", handle, name, ctypes.byref(options)))

    def _facts(self) -> dict[str, Any]:
        return {"place": os.path.join(self._whole, self._part)}

    def wait(self, timeout: float | None = None, *, progress: Told | None = None) -> int:
        """Waits until the directory or file is complete; returns its step.

        Args:
            timeout: Longest wait in seconds; None: no limit.
            progress: Called with the bytes that are written and those that will be, several times a second. None: a line on a terminal
                after two seconds.

        Raises:
            TimedOutError: The snapshot is still being written.
            SpillwayError: The snapshot failed, and nothing of it is left.
            OSError: The snapshot is complete, and an older one cannot be removed."""
        step = ctypes.c_uint64()
        limit = _arguments.seconds(timeout)
        end = None if limit is None else time.monotonic() + limit
        with Progress(f"writing {self._whole}", self.progress().bytes, progress) as shown:
            while True:
                left = None if end is None else max(0.0, end - time.monotonic())
                try:
                    self._wait_by(LOOK if left is None else min(LOOK, left), "spw_tier_task_wait", after=(ctypes.byref(step),))
                    break
                except TimedOutError:
                    shown.reached(self.progress().written)
                    if left is not None and left <= LOOK:
                        raise
            shown.reached(self.progress().bytes)
        keep, self._keep = self._keep, None
        if keep is not None:
            _remove_older(self._whole, self._part, keep)
        return step.value

    def progress(self) -> SnapshotProgress:
        """Returns the committed step, the bytes written so far, all bytes that it writes, and whether the snapshot has ended."""
        info = _abi.sized(_abi.TierProgress)
        self._call("spw_tier_task_get_progress", ctypes.byref(info))
        return SnapshotProgress(info.step, info.written, info.bytes, bool(info.ended))

    def close(self) -> None:
        """Frees the snapshot. One that has not ended is cancelled, and nothing of it is left."""
        self._end()


class Exported(NamedTuple):
    """What a finished snapshot, or another export in a directory, says about itself.

    Attributes:
        job, rank, world: Of the tier.
        step, payload: Of the commit.
        states: Name and bytes of each extent but those of records.
        streams: Bytes of each file but the manifest, by name.
        records: Names of the extents of records."""

    job: str
    rank: int
    world: int
    step: int
    payload: bytes
    states: frozenset[tuple[str, tuple[int, ...]]]
    streams: dict[str, int]
    records: frozenset[str]

    @property
    def files(self) -> frozenset[str]:
        """Names of its files."""
        return frozenset([MANIFEST, *self.streams])

    def check_subgroups(self, directory: str, count: int) -> None:
        """Raises CorruptError unless there are extents of each of `count` subgroups of a Swap, and of no other."""
        numbers = {name.split("-")[1] for name, _ in self.states if name.startswith(_SUBGROUP)}
        if numbers != {f"{number:06}" for number in range(count)}:
            raise CorruptError(
                f"the manifest of the snapshot {directory} has {len(numbers)} subgroups, or not those of its commit, which had {count}; "
                "pass another snapshot"
            )

    def check_extents(self, directory: str, names: Iterable[str]) -> None:
        """Raises CorruptError unless there are extents of these names."""
        lacking = sorted({*names} - {name for name, _ in self.states})
        if lacking:
            raise CorruptError(f"the manifest of the snapshot {directory} lacks {lacking[0]}, which its commit had; pass another snapshot")

    def check_files(self, directory: str) -> None:
        """Raises CorruptError if a file of this directory is missing, or has another size than the manifest says. Reads none of them."""
        for name, expected in self.streams.items():
            place = os.path.join(directory, name)
            try:
                size = os.stat(place).st_size
            except FileNotFoundError:
                raise CorruptError(f"{place} is missing, and the manifest of the snapshot names it; pass another snapshot") from None
            if size != expected:
                raise CorruptError(f"{place} has {size} bytes, and the manifest of the snapshot says {expected}; pass another snapshot")

    @staticmethod
    def of(directory: str) -> Exported:
        """Reads the manifest of a directory.

        Raises:
            NoStateError: There is none.
            CorruptError: It is not as the library writes it."""
        place = os.path.join(directory, MANIFEST)
        try:
            found = _files.read_json(place)
            if found["format"] != _FORMAT:
                raise ValueError(f"its format is {found['format']!r}")
            streams = {stream["place"]: stream["bytes"] for extent in found["extents"] for stream in extent["streams"]}
            numbers = [found[name] for name in ("rank", "world", "step")]
            if not all(type(number) is int for number in (*numbers, *streams.values())) or not all(
                type(name) is str for name in (found["job"], *streams)
            ):
                raise ValueError("a value of it has another type")
            rank, world, step = numbers
            extents = frozenset((extent["name"], tuple(stream["bytes"] for stream in extent["streams"])) for extent in found["extents"])
            records = frozenset(name for name, _ in extents if name.startswith(RECORD))
            states = frozenset(extent for extent in extents if extent[0] not in records)
            return Exported(found["job"], rank, world, step, bytes.fromhex(found["payload"]), states, streams, records)
        except (FileNotFoundError, NotADirectoryError):
            raise NoStateError(
                f"{directory} is no finished snapshot: it has no {MANIFEST}. What a killed process leaves is called NAME.*.partial; "
                "pass another snapshot"
            ) from None
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"{place} is no manifest of a snapshot: {type(error).__name__}: {error}; pass another snapshot") from None


def bytes_to_import(place: str, names: Sequence[str] | None) -> int:
    """The bytes that an import takes of a directory or a safetensors file, as this says; 0 if it cannot be read. The library checks it."""
    try:
        extents = _files.read_json(os.path.join(place, MANIFEST))["extents"] if os.path.isdir(place) else _extents_of_file(place)
        sizes = {extent["name"]: sum(stream["bytes"] for stream in extent["streams"]) for extent in extents}
        return sum(size for name, size in sizes.items() if names is None or any(_matches(pattern, name) for pattern in names))
    except (CorruptError, OSError, LookupError, TypeError, ValueError, AttributeError):
        return 0


def _extents_of_file(place: str) -> Any:
    """The extents of a safetensors file: those of its manifest, else its tensors."""
    with _files.open_regular(place) as file:
        tensors = _files.parse_json(file.read(min(int.from_bytes(file.read(8), "little"), _files.MOST_JSON)))
    manifest = tensors.pop("__metadata__", {}).get(_KEY)
    if manifest is not None:
        return _files.parse_json(manifest.encode())["extents"]
    ends = {name: tensor["data_offsets"] for name, tensor in tensors.items()}
    return [{"name": name, "streams": [{"bytes": end - begin}]} for name, (begin, end) in ends.items()]


def _matches(pattern: str, name: str) -> bool:
    """True if a pattern of the library, with `*` and `?`, matches the name of an extent."""
    wild = {"*": ".*", "?": "."}
    return re.fullmatch("".join(wild.get(letter) or re.escape(letter) for letter in pattern), name, re.DOTALL) is not None


def part_name(rank: int, world: int) -> str:
    """The directory of a process in a snapshot; empty if it is the only one."""
    return "" if world == 1 else f"rank-{rank}"


def processes_of(whole: str) -> int:
    """The number of processes of which a directory has finished parts; 0: none."""
    if os.path.exists(os.path.join(whole, MANIFEST)):
        return 1
    with suppress(OSError):
        return sum(os.path.exists(os.path.join(whole, name, MANIFEST)) for name in os.listdir(whole) if name.startswith("rank-"))
    return 0


def is_finished(whole: str, world: int) -> bool:
    """True if all processes have finished their parts of a snapshot."""
    return all(os.path.exists(os.path.join(whole, part, MANIFEST)) for part in (part_name(rank, world) for rank in range(world)))


def remove(directory: str) -> None:
    """Removes the finished snapshot of one process, if there is one.

    Raises:
        InvalidArgumentError: The directory has other files."""
    if not os.path.lexists(directory):
        return
    if set(os.listdir(directory)) != Exported.of(directory).files:
        raise InvalidArgumentError(f"{directory} has files that are no part of its snapshot; move it away")
    _remove(directory, [""])


def _remove_older(newest: str, part: str, keep: int) -> None:
    """Removes snapshots beside `newest` but the last `keep`. `part`: its directory of this process, in a run of several; the whole is
    finished once all processes have theirs."""
    try:
        own, parent = Exported.of(os.path.join(newest, part)), os.path.dirname(newest)
    except NoStateError:
        # A later snapshot was waited for before this one, and has removed it.
        return
    parts = [part_name(rank, own.world) for rank in range(own.world)] if part else [""]
    finished = []
    for name in os.listdir(parent):
        whole = os.path.join(parent, name)
        # Gone meanwhile, no snapshot, or not finished.
        with suppress(NoStateError, CorruptError, OSError):
            if not os.path.islink(whole) and _is_snapshot(whole, parts, own, bool(part)):
                finished.append((os.stat(os.path.join(whole, parts[-1], MANIFEST)).st_mtime_ns, whole))
    for _, whole in sorted(finished)[:-keep]:
        # That of the caller stays, also if later ones are finished.
        if whole != newest:
            _remove(whole, parts)


def _is_snapshot(whole: str, parts: Sequence[str], own: Exported, apart: bool) -> bool:
    """True for a finished snapshot of the same states without other files."""
    if apart and set(os.listdir(whole)) != set(parts):
        return False
    found = [Exported.of(os.path.join(whole, part)) for part in parts]
    ranks = list(range(own.world)) if apart else [own.rank]
    if any((one.job, one.world, one.step) != (own.job, own.world, found[0].step) for one in found) or [one.rank for one in found] != ranks:
        return False
    if found[own.rank if apart else 0].states != own.states:
        return False
    return all(set(os.listdir(os.path.join(whole, part))) == one.files for part, one in zip(parts, found))


def _remove(whole: str, parts: Sequence[str]) -> None:
    # A new name: an interrupted removal may have left others.
    doomed = tempfile.mkdtemp(".partial", f"{os.path.basename(whole)}.", os.path.dirname(whole) or ".")
    try:
        os.rename(whole, doomed)
    except OSError as error:
        os.rmdir(doomed)
        if isinstance(error, FileNotFoundError):
            # Another process removes it.
            return
        raise
    for directory in (os.path.join(doomed, part) for part in parts):
        for name in os.listdir(directory):
            os.unlink(os.path.join(directory, name))
        if directory.rstrip("/") != doomed:
            os.rmdir(directory)
    os.rmdir(doomed)
