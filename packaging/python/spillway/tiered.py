"""Adam states of a process on a tier: what the optimizers of the frameworks have in common.

Invariants:
- All ranks open their tiers at one committed step, or none does. A failure on one rank during the open or a commit is an error on all.
- A tier of other parameters is refused before anything is written to it: the record of its commit is read before its update is opened.
- If a step fails in one process, all raise an error, and no commit has states of different steps.
- After a commit that succeeded in some processes only, none of them continues: their states are of different steps.
- No tier of a chain begins a commit of the next round before all of them have ended theirs, in all processes.
- A restore changes nothing before it has found all files of the snapshot, in all processes, and has committed what would be lost.
- The record of a commit belongs to the states as soon as the library has committed, also if a signal handler raises then.
- The update closes before the tier. A forked child closes nothing: its handles are copies."""

from __future__ import annotations

import logging
import os
import struct
import tempfile
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from . import _abi, _files, _ranks, _values
from ._commit import Commit
from ._live.publisher import Figures
from ._snapshot import Exported, Snapshot, part_name, processes_of
from ._timeline import span
from .errors import CorruptError, InvalidArgumentError, NoStateError, OutOfOrderError, OwnSuppressed, SpillwayError, TierError, from_status
from .swap import Swap
from .tier import Tier, TierPath

_log = logging.getLogger("spillway")
_Result = TypeVar("_Result")

_MAGIC = b"spillway.tiered 1\n"
_LENGTH = struct.Struct("<Q")
#: Most bytes that a commit of the library stores.
_MOST_COMMITTED = 1 << 20
#: Bytes of the identity in the payload, which the library's tag of a commit covers with the magic.
_IDENTITY_BYTES = 48 - len(_MAGIC)


class Place(NamedTuple):
    """Where the tier of a process is, and which process of the run it is.

    Attributes:
        paths, job, host, rank, world: As for Tier.
        group: The group of torch.distributed with the `world` processes; None: the default group.
        options: Further arguments of Tier. With "at_step", the processes agree on no step."""

    paths: Sequence[TierPath]
    job: str
    host: str | None = None
    rank: int = 0
    world: int = 1
    group: Any = None
    options: Mapping[str, Any] = {}

    @property
    def degraded(self) -> bool:
        """True if the tier opens without some of its paths."""
        return bool(self.options.get("degraded", False))

    @property
    def directory(self) -> str | None:
        """The absolute name of the first directory; None if all paths are object stores or memory."""
        found = (path.directory for path in self.paths if path.directory is not None and not _is_remote(path.directory))
        return next(map(os.path.abspath, found), None)

    def agreed(self, cure: str) -> Mapping[str, int]:
        """The options of open_alone() for the step that all processes have. `cure` says what to do if there is none."""
        if self.world == 1 or "at_step" in self.options:
            return {}
        return _ranks.agreed([self], self.rank, self.world, cure, self.group)[0]

    def open_alone(self, at: Mapping[str, int] = {}) -> Tier:
        """Opens the tier of this process, at the commit of these options; by default the last one."""
        return Tier(self.paths, job=self.job, host=self.host, rank=self.rank, world=self.world, **{**at, **self.options})

    def together(
        self, work: Callable[[], Any], undo: Callable[[Any], object] | None = None, partly: Callable[[], object] | None = None
    ) -> Any:
        """Returns the result of `work` once every process has its own; raises in all of them if it fails in one. See _ranks.together."""
        return _ranks.together(self.world, work, undo, self.group, partly)

    def exchanged(
        self,
        work: Callable[[], Any],
        told: Callable[[Any], Any],
        undo: Callable[[Any], object] | None = None,
        call: str = "",
        cure: str = "",
    ) -> tuple[Any, list[Any]]:
        """As together(); also returns told(result) of every process. See _ranks.exchanged."""
        return _ranks.exchanged(self.world, work, told, undo, self.group, call=call, cure=cure)


def _is_remote(directory: str | os.PathLike[str]) -> bool:
    return os.fspath(directory).startswith("s3://")


class Record(NamedTuple):
    """What a commit stores beside the states.

    Attributes:
        by: The part of Spillway that has committed.
        facts: Its facts, as _values has them: what identifies the parameters, the layout, the counts.
        payload: Bytes of the program.
        identity: Distinguishes commits of one step. The commits of a round have the same identity, in all processes.
        rank, world: The process that has committed, and the number of processes."""

    by: str
    facts: dict[str, Any]
    payload: bytes = b""
    identity: str = ""
    rank: int = 0
    world: int = 1

    def packed(self) -> bytes:
        """The payload of the tier's commit."""
        head = zlib.compress(_values.pack([self.by, self.facts, [self.rank, self.world]]))
        return _MAGIC + self.identity.encode().ljust(_IDENTITY_BYTES)[:_IDENTITY_BYTES] + _LENGTH.pack(len(head)) + head + self.payload

    @staticmethod
    def unpacked(stored: bytes, by: str) -> Record | None:
        """The record of a payload; None if something else than `by` has committed."""
        length = len(_MAGIC) + _IDENTITY_BYTES
        start = length + _LENGTH.size
        if not stored.startswith(_MAGIC) or len(stored) < start:
            return None
        end = start + _LENGTH.unpack_from(stored, length)[0]
        try:
            author, facts, (rank, world) = _values.unpack(zlib.decompressobj().decompress(stored[start:end], _files.MOST_JSON))
        except (CorruptError, ValueError, TypeError, zlib.error):
            return None
        if author != by or not isinstance(facts, dict):
            return None
        return Record(by, facts, stored[end:], stored[len(_MAGIC) : length].decode("ascii", "replace").rstrip(), rank, world)


class Prepared(NamedTuple):
    """The next commit of a process: its number, the number of steps of the states, and the values that are stored beside the states.

    Attributes:
        step, steps: Both are the same in all processes.
        facts, payload: As of Record."""

    step: int
    steps: int
    facts: dict[str, Any]
    payload: bytes = b""


class Found(NamedTuple):
    """A process's part of a finished snapshot: its directory, its step, and the record of its commit."""

    directory: str
    step: int
    record: Record


class Update(Protocol):
    """What is committed with a tier: a Swap, or states of another kind."""

    _user: str

    def _commit(self, step: int, payload: bytes, status: list[int]) -> None:
        """Commits, and appends the status of the call to `status`, also if a signal handler raises after the call."""

    def _begin_commit(self, step: int, payload: bytes, commit: Commit) -> Commit:
        """Begins a commit that continues beside changes of the states."""

    def _check_exported(self, found: Exported, directory: str, facts: Any) -> None:
        """Raises CorruptError if a snapshot lacks extents of its commit, which has stored these facts."""

    def rollback(self) -> None:
        """Restores the states of the last commit."""

    def close(self) -> None:
        """Frees the memory of the update."""


class Handles:
    """An open tier and the update on it, in the order in which they close.

    Args:
        tier: The tier.
        close_tier: Closes it."""

    def __init__(self, tier: Tier, close_tier: Callable[[Tier], object]):
        self.process: int = os.getpid()
        self.closed: bool = False
        self.tier: Tier = tier
        self.close_tier: Callable[[Tier], object] = close_tier
        self.swap: Update | None = None
        #: The last commit that was begun beside steps.
        self.commit: Commit | None = None

    def close(self) -> None:
        """Closes both, after the commit in flight; a second call does nothing, nor does one in a forked child. Raises the error of a commit
        that nobody waited for."""
        if self.closed or self.process != os.getpid():
            return
        self.tier._end_turns()
        try:
            if self.commit is not None:
                self.commit.close()
        finally:
            try:
                if self.swap is not None:
                    self.swap.close()
            finally:
                self.close_tier(self.tier)
            # Not after an interrupt: a further close ends what is open.
            self.closed = True


def new_opening() -> str:
    """A random word that distinguishes the commits of this run from those of others."""
    return os.urandom(8).hex()


class Chain:
    """Tiers of a process that resume at one step, such as those of the optimizers of a ChainedOptimizer. The open tiers of a Tiered are a
    chain of their own until they are set to another one.

    A round is a commit of each tier at one step. Its commits have one identity, which no other round has. A tier keeps the commit before
    until its next one begins. So wherever the process is killed, the tiers have a round in common. A commit that is waited for keeps the
    one before only until the next write: beside one, no other commit of the round is in flight.

    Args:
        opening: A random word of new_opening(), the same in all processes.

    Attributes:
        apart: True after a commit that succeeded in some processes only."""

    def __init__(self, opening: str) -> None:
        self.apart = False
        self._opening, self._number = opening, 0
        self._step: int | None = None
        self._waits = False
        # They refer to their chain.
        self._round: list[weakref.ref[Tiered]] = []

    @property
    def identity(self) -> str:
        """That of the commits of this round."""
        return f"{self._opening}-{self._number}"

    def begin(self, tiered: Tiered, step: int, waits: bool) -> bool:
        """Called before each commit, whether the caller waits for it or not. Ends the round before, if the commit is one of the next round.

        Returns:
            True if the commit must be waited for: another one of the round was, or one of the round before failed."""
        waits = waits or tiered.failed
        # A commit that failed is made again in its round: the other tiers may have theirs.
        further = step != self._step or (tiered.committed is not None and tiered.committed.identity == self.identity)
        if further or any(member() is tiered for member in self._round):
            self._waits = self.finish()
            self._number, self._step, self._round = self._number + further, step, []
        self._round.append(weakref.ref(tiered))
        self._waits = self._waits or waits
        return self._waits

    def finish(self) -> bool:
        """Waits for the commits of the round, in all processes. Returns True if one failed."""
        members = [found for member in self._round if (found := member()) is not None]
        for member in members:
            member.finish()
        return any(member.failed for member in members)


class Tiered:
    """The open tier of an optimizer and the update on it. Not thread-safe.

    Args:
        user: Name of the optimizer's class, for messages.
        by: The part of Spillway that commits; the records of other parts are refused.
        place: Where the tier is.
        cure: What to do if the processes have no step in common, for the message.
        foreign: The message about a commit of something else.
        update: Opens the update on the tier, for the parameters that the record names; None: nothing was committed. Raises an error if
            the record is one of other parameters.
        limit: The error in the words of the caller about a path that has no room; None: the error itself.
        open_tier: Opens the tier in another way than Place.open_alone, at a step of its own.
        close_tier: Closes the tier in another way than Tier.close.
        found: Called in all processes with the record of the last commit, or None, before the update is opened.

    Attributes:
        directory: As of Place, when the tier was opened: a later change of the working directory changes nothing.
        resumed_step: The step at which the tier was opened; None for a new one.
        committed: The record of the last commit.
        committed_step: Its step.
        commits: Number of commits since the open.
        changed: True if states were written since the last commit.
        changes_made: Number of changes of the states.
        failed: True if the last commit beside steps failed, and none has succeeded since.
        chain: The tiers that resume at one step with this one. While it is apart, reads, writes, commits and rollbacks are refused."""

    def __init__(
        self,
        user: str,
        by: str,
        place: Place,
        cure: str,
        foreign: str,
        update: Callable[[Tier, Record | None], Update],
        limit: Callable[[SpillwayError], Exception | None] = lambda error: None,
        open_tier: Callable[[], Tier] | None = None,
        close_tier: Callable[[Tier], object] = Tier.close,
        found: Callable[[Record | None], object] = lambda record: None,
    ):
        self.by: str = by
        self.place: Place = place
        self._user = user
        self._figures = Figures(user, self, Tiered._told)
        self.directory: str | None = place.directory
        self.committed: Record | None = None
        self.commits: int = 0
        self.changes_made: int = 0
        self.changed: bool = False
        self.failed: bool = False
        #: True while whole() runs, and after one that did not end.
        self._replacing, self._mixed = False, False
        #: Step and record of a commit that has begun, and the status of the library's call once it has returned.
        self._pending: tuple[int, Record, list[int]] | None = None
        #: Step and record of a commit beside steps, and the commit.
        self._begun: tuple[int, Record, Commit] | None = None
        #: The commit of which this process does not know whether the others have it.
        self._unagreed: Commit | None = None
        at = place.agreed(cure) if open_tier is None else {}

        def open_read() -> Tier:
            opened = place.open_alone(at) if open_tier is None else open_tier()
            opened._user = user
            if opened.opened.step is not None:
                self.committed = Record.unpacked(opened.opened.payload, by)
                if self.committed is None:
                    close_tier(opened)
                    raise InvalidArgumentError(foreign)
            return opened

        def told(_: Tier) -> tuple[str | None, str]:
            return None if self.committed is None else self.committed.identity, new_opening()

        opened, everyone = place.exchanged(open_read, told, close_tier, "the constructor")
        self._handles = Handles(opened, close_tier)
        weakref.finalize(self, Handles.close, self._handles)

        def begin() -> None:
            try:
                self._handles.swap = update(opened, self.committed)
            except SpillwayError as error:
                described = limit(error) if error.status == _abi.ERR_NO_SPACE else None
                if described is None:
                    raise
                raise described from error
            self._handles.swap._user = user

        try:
            self._check_one_commit({identity for identity, _ in everyone}, opened.opened.step, cure)
            self.chain: Chain = Chain(everyone[0][1])
            found(self.committed)
            place.together(begin)
        except BaseException:
            self._handles.close()
            raise
        self.resumed_step: int | None = opened.opened.step
        self.committed_step: int | None = opened.opened.step

    def _record(self, facts: dict[str, Any], payload: bytes) -> Record:
        """The record of the next commit."""
        return Record(self.by, facts, payload, self.chain.identity, self.place.rank, self.place.world)

    def _check_one_commit(self, identities: set[str | None], step: int | None, cure: str) -> None:
        """Raises an error if the processes have different commits of one step: one of them was killed while it committed a step again."""
        if len(identities) > 1:
            raise InvalidArgumentError(
                f"{self._user}: the processes have different commits of step {step}, because not all of them could commit when the step "
                f"was committed again; {cure}"
            )

    @property
    def tier(self) -> Tier:
        """The tier."""
        return self._handles.tier

    @property
    def swap(self) -> Swap:
        """The update; a Swap, except for a caller that has opened another kind."""
        assert self._handles.swap is not None
        return cast(Swap, self._handles.swap)

    @property
    def is_own(self) -> bool:
        """False in a forked child, where every call raises."""
        return self._handles.process == os.getpid()

    @property
    def closed(self) -> bool:
        """True after close()."""
        return self._handles.closed

    def close(self) -> None:
        """Closes update and tier; states since the last commit are lost."""
        self._handles.close()

    def read(self, subgroup: int, *parts: Any, weights: Any = None) -> None:
        """Copies param, exp_avg and exp_avg_sq of a subgroup, or the first of them, into float32 arrays. `weights`: as for Swap.read."""
        self.check()
        self.swap.read(subgroup, *parts, weights=weights)

    def write(self, subgroup: int, *parts: Any) -> None:
        """Sets param, exp_avg and exp_avg_sq of a subgroup, or the first of them; None keeps a part."""
        self.changes()
        self.swap.write(subgroup, *parts)

    def changes(self) -> None:
        """Notes that states are written from here on."""
        self.check()
        self.changed = True
        self.changes_made += 1

    def room(self, facts: dict[str, Any]) -> int:
        """Bytes that the payload of a commit with these facts may have."""
        return _MOST_COMMITTED - len(self._record(facts, b"").packed())

    @property
    def apart(self) -> bool:
        """True after a commit of the chain that succeeded in some processes only."""
        return self.chain.apart

    def step(self, work: Callable[[], _Result], count: Callable[[], int]) -> _Result:
        """Returns work(), a step of this process, once all processes have made theirs. If it fails in one, it raises in all: those
        that have stepped must return to the last commit too.

        Args:
            work: The step. It raises an error if the step is refused or fails.
            count: Returns the number of steps that the states have.

        Raises:
            OutOfOrderError: The processes have different numbers of steps."""
        self._check_apart()
        if not self.is_own:
            # The handles refuse the step, and the group belongs to the parent process.
            return work()
        begun, waited = time.perf_counter(), self._waited()
        cure = "; this rank has stepped, so call rollback() in all processes"
        with span("tier.step"):
            found, counts = self.place.exchanged(work, lambda _: count(), call="step()", cure=cure)
        if differ := _ranks.differences(counts):
            raise OutOfOrderError(
                f"{self._user}: the processes have different numbers of steps: {differ}; call rollback() in all of them, or make the "
                f"{self._user} of all of them again"
            )
        self._figures.stepped(begun, self._waited() - waited)
        return found

    def _waited(self) -> float:
        """Seconds since the open in which calls waited for data, or for the update that runs beside them."""
        with OwnSuppressed(SpillwayError):
            if isinstance(swap := self._handles.swap, Swap):
                return swap.stats().exposed_seconds
        return 0.0

    def _told(self) -> dict[str, Any]:
        """The figures of the tier that are published."""
        swap, place = self._handles.swap, self.place
        given = (path.directory for path in place.paths if path.directory is not None and not _is_remote(path.directory))
        of_swap: dict[str, Any] = {}
        if isinstance(swap, Swap):
            of_swap = {"memory": {"host": {"buffers": swap.budget.host_bytes}}}
        paths = [
            {
                "name": path.directory,
                "health": path.health,
                "read_bytes": path.read_bytes,
                "written_bytes": path.written_bytes,
                "reading_seconds": path.reading_seconds,
                "writing_seconds": path.writing_seconds,
            }
            for path in self.tier.paths()
        ]
        return {
            "where": f"tier {place.job}, rank {place.rank} of {place.world}",
            "directories": [os.path.join(os.path.abspath(directory), place.job) for directory in given],
            "paths": paths,
            "commits": self.commits,
            "committed_step": self.committed_step,
            **of_swap,
        }

    def commit(self, prepare: Callable[[], Prepared], wait: bool = True) -> Commit | None:
        """Makes the states durable; returns after all processes have committed. Every process calls it.

        Without `wait` a thread of the library makes them durable beside the next steps. Each process has its own commit, which is returned.
        The states of the commit before are kept until finish() has told whether all processes have succeeded. After one that failed, this
        call waits: such a commit moves data off a path that failed. It also waits after a commit of the chain that was waited for.

        Args:
            prepare: Makes the states ready, and returns what is committed. An error in one process is an error in all, and nothing was
                committed.
            wait: The same in all processes.

        Raises:
            InvalidArgumentError: The processes would commit different steps; nothing was committed."""
        self._check_apart()
        self.finish()

        def ready() -> Prepared:
            self.check()
            return prepare()

        prepared, everyone = self.place.exchanged(ready, lambda own: (own.steps, own.step, bool(wait)), call="commit()")
        for at, name in enumerate(("numbers of steps", "numbers of a commit", "values of wait")):
            if differ := _ranks.differences([values[at] for values in everyone]):
                raise InvalidArgumentError(
                    f"{self._user}: the processes have different {name}: {differ}; nothing was committed. Call commit() with the same "
                    "arguments after the same step in all processes, or rollback() in all"
                )
        waits = self._next(prepared.step, wait)
        record = self._record(prepared.facts, prepared.payload)
        if not waits:
            return self._begin_commit(prepared.step, record)
        self._committing(prepared.step, record, lambda status: self.swap._commit(prepared.step, record.packed(), status))
        return None if wait else Commit.done()

    def _next(self, step: int, waits: bool) -> bool:
        """Waits for the commit before this one. Returns True if this one must be waited for."""
        self.finish()
        waits = self.chain.begin(self, step, waits)
        self.check()
        return waits

    def _begin_commit(self, step: int, record: Record) -> Commit:
        commit = Commit()
        # Noted before the call: a signal handler may raise after the library has begun.
        before, changed = self._handles.commit, self.changed
        self._begun, self._handles.commit, self.changed = (step, record, commit), commit, False
        try:
            self.place.together(lambda: self.swap._begin_commit(step, record.packed(), commit), partly=self._part)
        except Exception:
            self._part(self.place.world > 1 and commit.begun)
            raise
        except BaseException:
            # This process leaves without its report, for which the others wait.
            self._part(self.place.world > 1)
            raise
        finally:
            if not commit.begun:
                self._begun, self._handles.commit, self.changed = None, before, changed
        self._unagreed = commit if self.place.world > 1 else None
        if before is not None:
            before.superseded()
        return commit

    def finish(self) -> None:
        """Waits for the commit beside steps, in all processes. If it failed, its states are uncommitted."""
        if self._begun is not None and self.is_own:
            self._begun[2].finish()
            self.note_ended_commit()
        if self._unagreed is not None and self.is_own and not self.apart:
            self._unagreed.finish()
            everyone = _ranks.gathered(self._unagreed.succeeded, self.place.world, self.place.group)
            self._unagreed = None
            self._part(len(set(everyone)) > 1)

    def _committing(self, step: int, record: Record, work: Callable[[list[int]], object]) -> None:
        """Calls work(status) in all processes, which commits a step and appends the status of the library's call."""
        status = list[int]()
        # Noted before the call: a signal handler may raise after the library has committed.
        self._pending = step, record, status
        try:
            self.place.together(lambda: work(status), partly=self._part)
        except Exception:
            # Another process may have ended before it could report.
            self._part(self.place.world > 1 and status == [0])
            raise
        except BaseException:
            # This process leaves without its report, for which the others wait.
            self._part(self.place.world > 1)
            raise
        finally:
            self.note_ended_commit()
            self._pending = None
        self.chain.finish()

    def snapshot(self, directory: str | os.PathLike[str], bytes_per_second: int, keep: int | None) -> Snapshot:
        """Starts to write the last commit to `directory`, or to its part of this process in a run of several. `keep`: as for Tier.snapshot,
        of directories with the parts of all processes."""
        self.finish()
        self.check()
        if self.place.world > 1:
            _files.make_directory(directory)
        return Snapshot(self.tier, directory, bytes_per_second, keep, part_name(self.place.rank, self.place.world))

    def part_of(self, directory: str | os.PathLike[str]) -> str:
        """The part of this process of a snapshot."""
        part = part_name(self.place.rank, self.place.world)
        return os.path.join(os.fspath(directory), part) if part else os.fspath(directory)

    def snapshot_of(self, directory: str | os.PathLike[str], check: Callable[[Record], object]) -> Found:
        """This process's part of a finished snapshot of all processes.

        Args:
            directory: As it was given to snapshot().
            check: Raises an error if the record is one of other parameters.

        Raises:
            NoStateError: The snapshot is not finished.
            InvalidArgumentError: It is one of other states.
            CorruptError: A file of it is missing or truncated, or the manifest lacks states. Checksums are compared by take()."""
        self.finish()
        self.check(also_mixed=True)
        where = self.part_of(directory)

        def read() -> Found:
            try:
                found = Exported.of(where)
            except NoStateError:
                others = processes_of(os.fspath(directory))
                if others in (0, self.place.world):
                    raise
                raise InvalidArgumentError(
                    f"{os.fspath(directory)} is a snapshot of {others} processes, and this run has {self.place.world}; start as many, or "
                    "begin a new job with it, by begin_from of TierOptions or of DeepSpeed's spillway block"
                ) from None
            if (found.rank, found.world) != (self.place.rank, self.place.world):
                raise InvalidArgumentError(
                    f"{where} is a snapshot of rank {found.rank} of {found.world} processes, and this is rank {self.place.rank} of "
                    f"{self.place.world}; pass a snapshot of as many processes"
                )
            record = Record.unpacked(found.payload, self.by)
            if record is None:
                raise InvalidArgumentError(f"{where} is a snapshot of another program's states; pass one that the {self._user} has written")
            check(record)
            self.swap._check_exported(found, where, record.facts)
            found.check_files(where)
            return Found(where, found.step, record)

        found = self.place.together(read)
        steps = _ranks.gathered(found.step, self.place.world, self.place.group)
        if len(set(steps)) > 1:
            raise InvalidArgumentError(
                f"{directory}: the processes have snapshots of different steps, {steps}; pass a snapshot of one step"
            )
        return found

    def keep(self, found: Found, step: int, commit: Callable[[], object]) -> None:
        """Commits states that have changed, before a take(): one that fails returns to them. All processes commit, or none does.

        Args:
            found: What is taken then.
            step: The step of the states.
            commit: Commits them at this step."""
        # Each of several processes commits a step once: after a crash, two commits of one step could not be told apart.
        again = self.place.world > 1 and step in (found.step, self.committed_step)
        everyone = _ranks.gathered((self.changed, again or self._mixed), self.place.world, self.place.group)
        if any(changed for changed, _ in everyone) and not any(refused for _, refused in everyone):
            try:
                commit()
            except (SpillwayError, OSError) as error:
                if self.apart:
                    raise
                # As after a failed step, which a restore mends.
                _log.warning("%s: the states could not be committed before the restore: %s", self._user, error)

    def take(self, found: Found) -> None:
        """Replaces the states by those of a snapshot, and commits them at its step. If one process fails, all do.

        Raises:
            CorruptError: It is damaged. The states are those of the last commit; without one they are lost, as the message says."""
        # What the update has in memory is of other states.
        self.place.together(self.rollback)
        self._next(found.step, True)
        try:
            self._committing(found.step, found.record, lambda status: self.tier._import(found.directory, status))
        except SpillwayError as error:
            if self.committed is not None or self.apart:
                raise
            lost = "the states of before are lost, because nothing was committed; restore another snapshot, or begin anew"
            raise from_status(error.status, f"{error}; {lost}") from error
        self.rollback()

    def note_ended_commit(self) -> None:
        """Takes over the record of a commit that the library has completed."""
        if self._begun is not None and self.is_own and self._begun[2].ended:
            (step, record, commit), self._begun = self._begun, None
            if commit.succeeded:
                self._take_over(step, record)
            else:
                self.changed = self.failed = True
                _log.warning("%s: a commit with wait=False failed: %s", self._user, commit.error)
        # Without a status, the library was not called, or this is a signal handler before or during the call.
        if self._pending is not None and self._pending[2]:
            step, record, status = self._pending
            if status == [0] and self.committed is not record:
                self._take_over(step, record)
                self.changed = False
            self._pending = None

    def _take_over(self, step: int, record: Record) -> None:
        if self._handles.commit is not None:
            self._handles.commit.superseded()
        self.commits, self.failed = self.commits + 1, False
        self.committed_step, self.committed = step, record

    def _part(self, apart: bool = True) -> None:
        self.chain.apart = self.chain.apart or apart

    def whole(self, work: Callable[[], _Result]) -> _Result:
        """Returns work(), which replaces all states, or gives the parameters their values. If it does not end, as after an interrupt,
        check() refuses other calls until another whole() has ended."""
        self._mixed = self._replacing = True
        try:
            found = work()
            self._mixed = False
            return found
        finally:
            self._replacing = False

    @property
    def mixed(self) -> bool:
        """True after a whole() that did not end."""
        return self._mixed and not self._replacing

    def check(self, also_mixed: bool = False) -> None:
        """Raises TierError if the processes are apart, and OutOfOrderError after a whole() that did not end, except with `also_mixed`.
        Takes over the record of a commit first."""
        self.note_ended_commit()
        self._check_apart()
        if self.mixed and not also_mixed and not self.closed:
            raise OutOfOrderError(
                f"{self._user}: a rollback, restore or load was interrupted, so states and parameters may be of two steps; call "
                "rollback(), or restore or load again"
            )

    def _check_apart(self) -> None:
        """Raises TierError if the processes are apart. Called before a report to the others, because one of them may have ended."""
        if self.apart:
            raise TierError(
                f"{self._user}: a step was committed by some processes, and others could not commit it; close the {self._user} of "
                "all processes and make it again: all resume at the step that they have in common"
            )

    def rollback(self) -> None:
        """Restores the states of the last commit, also after a failed step. A caller that gives them to parameters calls it in whole()."""
        self.finish()
        self.check()
        self.changes_made += 1
        self.swap.rollback()
        self.changed = False


def mapped(count: int, directory: str | os.PathLike[str], dtype: Any = None) -> Any:
    """A tensor of torch that is the map of a file without a name in a directory: the system may write its pages out. Without `dtype` it is
    of float32.

    Raises:
        OSError: The directory has no room."""
    import torch

    dtype = torch.float32 if dtype is None else dtype
    size = dtype.itemsize * count
    with tempfile.TemporaryFile(dir=directory) as file:
        try:
            # Without this, a full disk would end the process at the write to a page.
            os.posix_fallocate(file.fileno(), 0, size or 1)
        except OSError as error:
            raise OSError(
                error.errno, f"cannot make a file of {size} bytes for a state dict: {os.strerror(error.errno or 0)}", os.fspath(directory)
            ) from None
        return torch.from_file(f"/proc/self/fd/{file.fileno()}", shared=True, size=count, dtype=dtype)
