"""The commits of all ranks of another run, which a run with any number of ranks reads: on tiers, or in a snapshot.

Each rank reads the steps and payloads of its share of the parts, and one gather gives them to all ranks. A rank then opens only the parts
with elements that it needs.

Invariants:
- Nothing of the other run is changed: its tiers are opened for reading, without their locks. That run can go on, or be read again.
- All parts are of one commit of all ranks. A rank that is missing is an error that names its directory.
- A run that commits while it is read is an error: what was read may be of two steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from . import _arguments, _native, _ranks, tier
from ._holdings import Holding, check_alike, move, steps_of
from ._snapshot import MANIFEST, Exported, part_name
from .errors import InvalidArgumentError, NoStateError
from .swap import MOMENTS, extent_name
from .tier import Tier
from .tiered import Place, Record, Tiered

_MOST_NAMED = 8


class _OfTier(NamedTuple):
    """A rank's tier: host and rank below the directories of its job."""

    jobs: Sequence[str]
    host: str
    rank: int

    @property
    def where(self) -> str:
        """Its first directory."""
        return os.path.join(self.jobs[0], self.host, f"rank-{self.rank}")

    @property
    def _given(self) -> dict[str, Any]:
        paths = [os.path.dirname(job) for job in self.jobs]
        return {"paths": paths, "job": os.path.basename(self.jobs[0]), "host": self.host, "rank": self.rank, "mode": "read"}

    def steps(self) -> tier.Steps:
        """The steps at which it can be read."""
        return tier.steps(**self._given)

    def opened(self, at: Mapping[str, int]) -> Tier:
        """Opens it for reading."""
        return Tier(**self._given, **dict[str, Any](at))

    def payload(self, at: Mapping[str, int]) -> bytes:
        """The payload of a commit."""
        with self.opened(at) as opened:
            return opened.opened.payload


class _OfSnapshot(NamedTuple):
    """A rank's part of a snapshot."""

    where: str

    def steps(self) -> tier.Steps:
        """Its step."""
        return tier.Steps(Exported.of(self.where).step, None, False, True)

    def payload(self, at: Mapping[str, int]) -> bytes:
        """The payload of the commit."""
        return Exported.of(self.where).payload

    def opened(self, at: Mapping[str, int]) -> Tier:
        """A tier in memory with the records beside the states."""
        memory = Tier([None], job="part")
        if records := Exported.of(self.where).records:
            memory.import_from(self.where, sorted(records))
        return memory


class Commits:
    """A commit of all ranks of another run. Every rank of this run constructs it, and calls give(), at the same points.

    Args:
        given: The directory of a job, as `PATH/JOB`, or a list of one for each path; or the directory of a snapshot.
        place: Where this run is.
        by: The part of Spillway that has committed.
        holding_of: Returns what the rank of a record holds; raises an error if the facts do not say it.

    Attributes:
        step: Its step.
        records: The record of each rank.
        parts: The part of each rank, as _holdings takes it.
        where: Its directories, for messages.

    Raises:
        NoStateError: There is no commit.
        InvalidArgumentError: A rank is missing, or something else has committed."""

    def __init__(self, given: Any, place: Place, by: str, holding_of: Callable[[Record], Holding]):
        self._place = place
        found = place.together(lambda: _found(given, place))
        self._ranks, self.where = found, _common(found)
        steps = [tier.Steps(*one) for one in self._gathered(lambda rank: tuple(self._ranks[rank].steps()))]
        self._steps = steps
        chosen, tags = _ranks.chosen([[one] for one in steps], f"pass another directory than {self.where}")
        if chosen is None:
            raise NoStateError(f"{self.where}: the ranks have committed nothing; pass the directory of a job that has")
        self.step = chosen
        self._at = {"at_step": chosen, "at_tag": tags[0]}
        payloads = self._gathered(lambda rank: self._ranks[rank].payload(self._at))
        self.records = [self._record(payload, by, rank) for rank, payload in enumerate(payloads)]
        self._check_complete()
        self.parts = [self._part(rank, holding_of(record)) for rank, record in enumerate(self.records)]

    def _gathered(self, of: Callable[[int], Any]) -> list[Any]:
        """of(rank) for each rank of the other run. Each rank of this run calls it for its share."""
        rank, world = self._place.rank, self._place.world
        _, shares = self._place.exchanged(lambda: {other: of(other) for other in range(rank, len(self._ranks), world)}, lambda own: own)
        everyone = {other: value for share in shares for other, value in share.items()}
        return [everyone[other] for other in range(len(self._ranks))]

    def _record(self, payload: bytes, by: str, rank: int) -> Record:
        record = Record.unpacked(payload, by)
        if record is None:
            raise InvalidArgumentError(
                f"{self._ranks[rank].where} was committed by another part of Spillway, or by another program; pass the directory of a run "
                "with the same optimizer"
            )
        return record

    def _check_complete(self) -> None:
        """The records say how many ranks there were: the directories of the last ones may be missing."""
        for rank, record in enumerate(self.records):
            if (record.rank, record.world) != (rank, len(self.records)):
                raise InvalidArgumentError(
                    f"{self._ranks[rank].where} is of rank {record.rank} of {record.world} ranks, and {len(self.records)} were found in "
                    f"{self.where}; {_missing(self.where, range(len(self.records), record.world))}"
                )

    def _part(self, rank: int, holding: Holding) -> Any:
        found = self._ranks[rank]
        if isinstance(found, _OfTier):
            return _TierPart(found.where, holding, lambda: found.opened(self._at))
        return _SnapshotPart(found.where, holding)

    @property
    def own(self) -> int:
        """The rank whose payload this rank takes over."""
        return self._place.rank % len(self.parts)

    def opened(self) -> Tier:
        """The tier with the records beside the states of that rank, for reading."""
        return self._ranks[self.own].opened(self._at)

    def give(self, tiered: Tiered, own: Holding) -> dict[Any, float]:
        """Writes to a new tier what this rank holds now; returns the number of steps of each tensor. All ranks call it. Nothing is
        committed."""

        def work() -> None:
            check_alike(own, self.parts, self.where)
            move(own, self.parts, self._place.rank, lambda subgroup, states: tiered.write(subgroup, *states))

        try:
            self._place.together(work)
        finally:
            for part in self.parts:
                part.close()
        self._check_unchanged()
        return {key: steps_of(key, held.name, self.parts) for key, held in own.held.items()}

    def _check_unchanged(self) -> None:
        if [tier.Steps(*one) for one in self._gathered(lambda rank: tuple(self._ranks[rank].steps()))] != self._steps:
            raise InvalidArgumentError(f"{self.where}: its run has committed while it was read; end that run first")


class _TierPart:
    """The states of a rank on its tier, which is opened by the first read."""

    def __init__(self, where: str, holding: Holding, opened: Callable[[], Tier]):
        self.where, self.holding, self._open = where, holding, opened
        self._tier: Tier | None = None

    def read(self, subgroup: int) -> Sequence[Any]:
        """The states of a subgroup."""
        self._tier = self._tier or self._open()
        return _read(self._tier, self.holding, subgroup)

    def close(self) -> None:
        """Closes the tier."""
        if self._tier is not None:
            self._tier.close()


class _SnapshotPart:
    """The states of a rank in a snapshot. An import compares the checksums."""

    def __init__(self, where: str, holding: Holding):
        self.where, self.holding = where, holding

    def read(self, subgroup: int) -> Sequence[Any]:
        """The states of a subgroup."""
        with Tier([None], job="part") as memory:
            memory.import_from(self.where, [_name(self.holding, subgroup)])
            return _read(memory, self.holding, subgroup)

    def close(self) -> None:
        """No-op: nothing is open between two reads."""


def _name(holding: Holding, subgroup: int) -> str:
    return extent_name(subgroup, moment_dtype=holding.moments)


def _read(opened: Tier, holding: Holding, subgroup: int) -> Sequence[Any]:
    import torch

    elements = holding.elements[subgroup]
    streams = [torch.empty(count, dtype=torch.uint8, device="cpu") for count in _stream_bytes(elements, holding.moments)]
    if elements:
        extent = opened.define(_name(holding, subgroup), [stream.nbytes for stream in streams])
        opened.wait(opened.get(extent, streams))
    if holding.moments == "int8":
        master, *moments = streams
        return [master.view(torch.float32), *(_decoded(*one, elements) for one in zip(MOMENTS, moments))]
    moment = torch.bfloat16 if holding.moments == "bf16" else torch.float32
    return [stream.view(dtype).float() for stream, dtype in zip(streams, (torch.float32, moment, moment))]


def _stream_bytes(elements: int, moments: str) -> list[int]:
    """Bytes of the streams of an extent: param, exp_avg, exp_avg_sq. Codes of 8 bits have their scales behind them, from the next even
    byte on."""
    of = {"f32": 4 * elements, "bf16": 2 * elements, "int8": elements + elements % 2 + 2 * -(-elements // 32)}
    return [4 * elements, of[moments], of[moments]]


def _decoded(moment: int, stream: Any, elements: int) -> Any:
    import torch

    values, scales = torch.empty(elements, dtype=torch.float32, device="cpu"), stream[elements + elements % 2 :]
    _native.call("spw_codes_read", moment, stream.data_ptr(), scales.data_ptr(), elements, values.data_ptr())
    return values


def _found(given: Any, place: Place) -> list[Any]:
    """The parts of all ranks that the directories name."""
    every = [given] if isinstance(given, (str, os.PathLike)) else given
    if not isinstance(every, Sequence) or not every or not all(isinstance(one, (str, os.PathLike)) and one != "" for one in every):
        raise InvalidArgumentError(
            f"begin_from is {given!r}; pass the directory of a job, a list of it on each path, or that of a snapshot"
        )
    if remote := [one for one in every if str(one).startswith("s3://")]:
        raise InvalidArgumentError(f"begin_from has {remote[0]}; a job in an object store cannot be read by others, so pass a snapshot")
    jobs = [os.path.abspath(os.fsdecode(_arguments.path("begin_from", one))) for one in every]
    if len(jobs) == 1 and (found := _snapshot(jobs[0])):
        return found
    if len({os.path.basename(job) for job in jobs}) > 1:
        raise InvalidArgumentError(f"begin_from is {given!r}, which are directories of several jobs; pass those of one job")
    own = {os.path.join(os.path.abspath(os.fsdecode(path.directory)), place.job) for path in place.paths if path.directory is not None}
    if same := own & set(jobs):
        raise InvalidArgumentError(f"begin_from has {same.pop()}, which is the directory of this job; pass another job")
    return _of_job(jobs)


def _snapshot(whole: str) -> list[_OfSnapshot]:
    """The parts of a snapshot; none if it is not one."""
    if os.path.exists(os.path.join(whole, MANIFEST)):
        return [_OfSnapshot(whole)]
    ranks = [name for name in _names(whole) if os.path.exists(os.path.join(whole, name, MANIFEST))]
    if not ranks:
        return []
    world = Exported.of(os.path.join(whole, ranks[0])).world
    if world == 1:
        raise InvalidArgumentError(
            f"{whole}/{ranks[0]} is a snapshot of one process, and has the name of a part of a snapshot of several; pass that directory"
        )
    parts = [part_name(rank, world) for rank in range(world)]
    if missing := [part for part in parts if part not in ranks]:
        raise InvalidArgumentError(
            f"the snapshot {whole} lacks the parts {', '.join(missing[:_MOST_NAMED])} of {world} ranks; pass a finished snapshot"
        )
    return [_OfSnapshot(os.path.join(whole, part)) for part in parts]


def _of_job(jobs: Sequence[str]) -> list[_OfTier]:
    """The tiers of all ranks of a job, in the order of their ranks."""
    hosts: dict[int, dict[str, None]] = {}
    for job in jobs:
        for host in _names(job):
            for name in _names(os.path.join(job, host)):
                if name.startswith("rank-") and name[5:].isdigit():
                    hosts.setdefault(int(name[5:]), {})[host] = None
    where = ", ".join(jobs)
    if not hosts:
        raise NoStateError(f"{where} has no tier HOST/rank-N, and is no finished snapshot; pass the directory of a job or of a snapshot")
    if missing := [rank for rank in range(max(hosts)) if rank not in hosts]:
        raise InvalidArgumentError(f"ranks are missing: {_missing(where, missing)}")
    for rank, names in hosts.items():
        if len(names) > 1:
            raise InvalidArgumentError(f"{where} has a rank {rank} of several hosts, {', '.join(names)}; move the older ones away")
    return [_OfTier(jobs, next(iter(hosts[rank])), rank) for rank in sorted(hosts)]


def _missing(where: str, ranks: Sequence[int]) -> str:
    named = ", ".join(os.path.join(where, "*", f"rank-{rank}") for rank in ranks[:_MOST_NAMED])
    return f"there is no {named}; mount the directories of all its ranks here, or pass a snapshot"


def _names(directory: str) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(directory) if entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _common(found: Sequence[Any]) -> str:
    first = found[0]
    return ", ".join(first.jobs) if isinstance(first, _OfTier) else (os.path.dirname(first.where) if len(found) > 1 else first.where)
