"""Crash-safe storage of named extents over several directories, with checksums.

    with spillway.Tier(["/mnt/nvme", "/mnt/pfs"], job="run7") as tier:
        weights = tier.define("weights", [array.nbytes])
        tier.wait(tier.put(weights, [array]))
        tier.commit(step=1, payload=b"returned by the next open")
        tier.wait(tier.get(weights, [array]))

An extent has one or more streams (arrays) of fixed size. After a crash an open finds the state of the last commit; puts
since then are lost."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal, overload

from . import _abi, _arguments, _arrays, _kept, _native
from ._arrays import Array
from ._attributes import Fixed
from ._commit import Commit
from ._progress import Watched
from ._snapshot import Snapshot, bytes_to_import
from ._tier_options import BACKENDS, DURABILITIES, MODES, choice, milliseconds, number, payload_of, text, tier_options
from ._tier_records import Extent, Opened, PathReport, Steps, TierPath
from ._transfers import TransferHandle, end_of, seconds_left
from .errors import InvalidArgumentError, NotFoundError, TimedOutError

HEALTH = ("healthy", "draining", "failed", "missing")
_NO_DIRECT, _AT_STEP, _KEEP_BEFORE = _abi.TIER_FLAG_NO_DIRECT, _abi.TIER_FLAG_AT_STEP, _abi.TIER_FLAG_KEEP_BEFORE
_TEXT_BYTES, _MOST_U32 = 4096, (1 << 32) - 1


class Tier(TransferHandle):
    """An open tier. Thread-safe.

    If a path fails or is full, new blocks are written to the other paths.

    Args:
        paths: Existing directories, "s3://BUCKET/PREFIX", None for memory, or TierPath.
        job: Name of the run, and of a directory on each path.
        host: Name of this machine, and of a directory below that; None: the host name.
        rank: Number of this process in the run.
        world: Number of processes of the run.
        mode: "auto" resumes a committed state and otherwise creates the tier, unless the rank's state is stored under
            another host's name; "create" refuses a committed state; "resume" requires one; "read" reads one, whatever its
            `world`, also while others read it: nothing is created, written or locked.
        durability: What a commit survives: "data" a power failure; "process" only the end of the process; "full" like
            "data", and also syncs directories.
        degraded: Open even if a path is missing; its extents are lost.
        direct: Bypass the page cache where the file system can.
        block_bytes: Size of a block; 0: the default.
        io_timeout: Seconds without progress after which a path counts as failed; 0: 60 seconds.
        queue_depth: Requests in flight per path; 0: the default.
        backend: "auto", "uring" or "threads".
        at_step: Open the tier at this step, one of steps(). Opening at the step before the last discards the last step.
        at_tag: With `at_step`, the tag of the commit, one of steps(), for a step that was committed twice. 0: the last commit of the step.
        keep_before: A commit with wait=False keeps the state of the commit before until the next commit begins, as with `world` above 1.
            For tiers that resume at one step: then the commits of all must have ended before the next commit of any of them.
        turns: Number of processes of a user that transfer to the device of a directory at a time, the same in all of them; the others
            wait. 0: any number. Transfers of up to 64 KiB need no turn.
        turn_timeout: Seconds that a transfer waits for its turn before it goes on without one; 0: 30 seconds.

    Attributes:
        opened: What the open found, an Opened.

    Raises:
        InvalidArgumentError: An argument has a wrong value.
        NotFoundError: A directory does not exist.
        TierLockedError: A live process holds the tier.
        NoStateError: `mode` is "resume", and there is no committed state.
        NoStepError: The tier has no state of `at_step`, or something was put since the last commit.
        TierError: The paths hold another tier, or a path is missing.

    Example:
        with spillway.Tier(["/mnt/nvme"], job="run7") as tier:
            extent = tier.define("weights", [array.nbytes])
            tier.wait(tier.put(extent, [array]))
            tier.commit(step=1)"""

    closer: str = "spw_tier_close"
    _closer_arguments = (-1,)

    opened: Fixed[Opened] = Fixed("What the open found.")

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str] | TierPath | None],
        *,
        job: str,
        host: str | None = None,
        rank: int = 0,
        world: int = 1,
        mode: str = "auto",
        durability: str = "data",
        degraded: bool = False,
        direct: bool = True,
        block_bytes: int = 0,
        io_timeout: float = 0.0,
        queue_depth: int = 0,
        backend: str = "auto",
        at_step: int | None = None,
        at_tag: int = 0,
        keep_before: bool = False,
        turns: int = 0,
        turn_timeout: float = 0.0,
    ):
        options = tier_options(paths, job, host, rank, world, degraded)
        options.mode = choice(MODES, mode, "mode")
        options.durability = choice(DURABILITIES, durability, "durability")
        options.io_backend = choice(BACKENDS, backend, "backend")
        options.flags |= _NO_DIRECT * (not direct) + _AT_STEP * (at_step is not None) + _KEEP_BEFORE * bool(keep_before)
        options.block_bytes, options.queue_depth = block_bytes, queue_depth
        options.io_timeout_ms = milliseconds("io_timeout", io_timeout)
        options.at_step, options.at_tag = at_step or 0, number(at_tag, "at_tag")
        options.turns = number(turns, "turns", _MOST_U32)
        options.turn_timeout_ms = number(milliseconds("turn_timeout", turn_timeout), "turn_timeout", _MOST_U32)
        self._streams: dict[int, tuple[int, ...]] = {}
        places = [row.directory and os.fsdecode(row.directory) for row in options.paths[: options.path_count]]
        self._asked = {"job": job, "rank": rank, "world": world, "paths": places}
        self._begin_transfers()
        #: Commits that may be in flight.
        self._commits = _kept.Living()
        self._hold("spw_tier_open", ctypes.byref(options), keeps=(self._in_flight,))
        _opened_tiers.add(self)
        self.opened = self._opened()

    def _facts(self) -> dict[str, Any]:
        return {**self._asked, "extents": len(self._streams), "resumed_step": self.opened.step}

    def define(self, name: str, stream_bytes: Sequence[int]) -> int:
        """Returns the number of an extent; creates a missing one.

        Args:
            name: Name of the extent.
            stream_bytes: Size of each stream in bytes.

        Raises:
            TierError: The extent exists with other sizes."""
        sizes = _arguments.table("Tier: stream_bytes", stream_bytes, ctypes.c_uint64)
        extent = ctypes.c_uint32()
        self._call("spw_tier_define", text(name, "name"), sizes, len(sizes), ctypes.byref(extent))
        self._streams[extent.value] = tuple(sizes)
        return extent.value

    def remove(self, extent: int) -> None:
        """Removes an extent; the removal is durable with the next commit."""
        self._call("spw_tier_remove", extent)

    def put(self, extent: int, arrays: Sequence[Array | bytearray], *, path: int | None = None) -> int:
        """Starts writing an extent. Do not change the arrays until the wait returns or a commit succeeds.

        Args:
            extent: Number of the extent.
            arrays: For each stream a contiguous numpy array, torch tensor or bytearray of its size in bytes.
            path: Number of the path to write to; None chooses the best one.

        Returns:
            A ticket for wait().

        Raises:
            InvalidArgumentError: An array does not fit.
            BusyError: A put or get of the extent is in flight."""
        streams = self._addresses(extent, arrays, False)
        target = None if path is None else _abi.sized(_abi.TierTarget)
        if target is not None:
            target.path = path
        return self._begin(True, "spw_tier_put", extent, arrays, streams, target and ctypes.byref(target))

    def put_striped(self, extent: int, arrays: Sequence[Array | bytearray], path_blocks: Sequence[int]) -> int:
        """Like put(), distributed over the paths.

        Args:
            extent: Number of the extent.
            arrays: As for put().
            path_blocks: Number of blocks for each path.

        Returns:
            A ticket for wait()."""
        streams, blocks = self._addresses(extent, arrays, False), _arguments.table("Tier: path_blocks", path_blocks, ctypes.c_uint32)
        target = _abi.sized(_abi.TierTarget)
        target.path_blocks, target.path_count = blocks, len(blocks)
        return self._begin(True, "spw_tier_put", extent, arrays, streams, ctypes.byref(target))

    def get(self, extent: int, arrays: Sequence[Array | bytearray | None]) -> int:
        """Starts reading an extent.

        Args:
            extent: Number of the extent.
            arrays: For each stream a contiguous writable array of its size in bytes; None skips a stream.

        Returns:
            A ticket for wait().

        Raises:
            InvalidArgumentError: An array does not fit, or the extent was never put."""
        return self._begin(False, "spw_tier_get", extent, arrays, self._addresses(extent, arrays, True))

    def wait(self, ticket: int, timeout: float | None = None) -> int:
        """Waits for a put or a get.

        Args:
            ticket: The ticket.
            timeout: Longest wait in seconds; None: no limit.

        Returns:
            The version of the extent's contents.

        Raises:
            TimedOutError: The operation is still in flight.
            CorruptError: A block that was read does not match its checksum.
            IoError: The transfer failed. With status 26 (the path did not respond in time) the arrays stay allocated
                for good, and the system may still change their content."""
        return self._outcome(number(ticket, "ticket"), timeout)

    @overload
    def commit(self, step: int, payload: bytes | bytearray | memoryview = ..., wait: Literal[True] = ...) -> None: ...

    @overload
    def commit(self, step: int, payload: bytes | bytearray | memoryview = ..., *, wait: Literal[False]) -> Commit: ...

    def commit(self, step: int, payload: bytes | bytearray | memoryview = b"", wait: bool = True) -> Commit | None:
        """Makes all earlier puts durable, and ends them.

        Args:
            step: Number of the step, which the next open returns.
            payload: Data of the caller, up to 1 MiB, which the next open returns.
            wait: False: return at once. A thread of the library commits what the extents hold now, and what puts in flight put. Later puts
                count for the next commit. Until the commit has ended, commits, rollbacks, removals and imports wait for it.

        Returns:
            None, or with `wait=False` the Commit that is in flight.

        Raises:
            OutOfOrderError, BusyError: A Swap has changed states; commit or roll back with it.
            SpillwayError: The failure of an earlier put or of the commit; the last commit is intact."""
        step, stored = number(step, "step"), payload_of(payload)
        if not wait:
            return Commit(self._puts_end())._begin(self, self, "spw_tier_commit_begin", step, stored)
        ended = self._puts_end()
        self._call("spw_tier_commit", step, stored, len(stored))
        ended()
        return None

    def rollback(self) -> None:
        """Discards everything put since the last commit.

        Raises:
            OutOfOrderError, BusyError: A Swap has changed states; roll back with it."""
        self._call("spw_tier_rollback")
        self._forget_failures()

    def extents(self) -> list[Extent]:
        """Returns all extents. Before get(), define() needs an extent's name and the bytes of each stream, which the program keeps."""
        return [
            Extent(info.extent, name, info.bytes, info.generation, info.streams, bool(info.committed), bool(info.lost), info.blocks)
            for info, name in self._all("spw_tier_get_extent", _abi.TierExtentInfo)
        ]

    def paths(self) -> list[PathReport]:
        """Returns a report of each path, in the order of their numbers."""
        return [
            PathReport(
                directory,
                HEALTH[info.health],
                info.read_bytes,
                info.written_bytes,
                info.reading_ns / 1e9,
                info.writing_ns / 1e9,
                info.wear_bytes,
                info.file_bytes,
                info.free_bytes,
                info.blocks,
            )
            for info, directory in self._all("spw_tier_get_path", _abi.TierPathInfo)
        ]

    def set_health(self, path: int, health: str) -> None:
        """Sets a path's health.

        Args:
            path: Number of the path.
            health: "draining" stops new writes to the path, "healthy" allows them again."""
        self._call("spw_tier_set_path", path, choice({name: n for n, name in enumerate(HEALTH)}, health, "health"))

    def evacuate(self, path: int) -> None:
        """Moves all blocks off a path, given by its number, after the puts and gets of them that are in flight. The next commit makes the
        move durable. After an error the path stays "draining": set_health(path, "healthy") lets it take writes again."""
        self._call("spw_tier_evacuate", path)

    def verify(self) -> int:
        """Reads all blocks and verifies their checksums; returns the number of blocks.

        Raises:
            CorruptError: A block is damaged; the message names the first one."""
        self._end_lost()
        checked = _abi.sized(_abi.TierVerifyInfo)
        self._call("spw_tier_verify", ctypes.byref(checked))
        return checked.blocks

    def export(self, directory: str | os.PathLike[str], *, progress: Callable[[int, int], object] | None = None) -> int:
        """Writes the last committed state as plain files into a new directory; returns its step. Others may put and commit meanwhile.
        `progress`: as for Snapshot.wait()."""
        options = _abi.sized(_abi.TierExportOptions)
        options.flags = _abi.TIER_EXPORT_FLAG_FAST
        with Snapshot(self, directory, 0, options=options) as whole:
            return whole.wait(progress=progress)

    def snapshot(self, directory: str | os.PathLike[str], *, bytes_per_second: int = 0, keep: int | None = None) -> Snapshot:
        """Starts to export the last committed state, and returns at once. Steps and commits continue meanwhile.

        The snapshot keeps the space of its state on the paths until it has ended. The tier stays locked until then, also if it is
        closed before.

        Args:
            directory: As for export(): a new directory, which import_from() reads. It appears complete or not at all.
            bytes_per_second: Limit of the speed; 0: no limit.
            keep: wait() then removes all but this number of snapshots beside the directory, those written last. Only finished ones of
                the same job, rank, number of processes and extents are removed, and none with other files; None: none.

        Raises:
            NoStateError: Nothing was committed.
            IoError: The directory exists."""
        return Snapshot(self, directory, bytes_per_second, keep)

    def export_tensors(
        self,
        file: str | os.PathLike[str],
        *,
        names: Sequence[str] | None = None,
        elements: tuple[int, int] | None = None,
        dtype: str = "U8",
        bytes_per_second: int = 0,
    ) -> Snapshot:
        """Starts to write the last committed state to one safetensors file, as snapshot() does, and returns at once.

        A subgroup of a Swap becomes the tensors `NAME.param`, `NAME.exp_avg` and `NAME.exp_avg_sq`. Another extent becomes `NAME`, or
        `NAME.0` and so on if it has several streams.

        Args:
            file: The new file. import_from() reads it, unless it has a range of elements.
            names: Patterns, one of which the name of an extent must match: `*` stands for any letters, `?` for one; None: all extents.
            elements: The first element of each tensor that is taken, and the first that is not any more; None: all.
            dtype: Type of the elements of extents that are no optimizer states, as safetensors names it.
            bytes_per_second: Limit of the speed; 0: no limit, and all paths are read at once.

        Raises:
            NoStateError: Nothing was committed.
            InvalidArgumentError: No extent has such a name, or the type does not fit one.
            IoError: The file exists.

        Example:
            with tier.export_tensors("half.safetensors", names=["subgroup-*"], elements=(0, 1 << 20)) as export:
                export.wait()"""
        options = _abi.sized(_abi.TierExportOptions)
        options.flags = _abi.TIER_EXPORT_FLAG_SAFETENSORS + _abi.TIER_EXPORT_FLAG_FAST * (not bytes_per_second)
        options.names, options.dtype = _patterns(names), text(dtype, "dtype")
        if elements is not None:
            first, end = elements
            options.first = number(first, "elements[0]")
            options.end = _arguments.between("Tier: elements[1]", end, first + 1, (1 << 64) - 1)
        return Snapshot(self, file, bytes_per_second, options=options)

    def import_from(
        self, directory: str | os.PathLike[str], names: Sequence[str] | None = None, *, progress: Callable[[int, int], object] | None = None
    ) -> int:
        """Reads an exported directory or file, and commits it with everything put before; returns the step. A place that is no export (a
        TierError), or whose manifest or sizes are damaged (a CorruptError), is refused, and nothing changes. After any other error the
        tier is at its last commit. Meanwhile other commits, rollbacks and steps raise BusyError. Afterwards the calls
        of an open Swap raise it until Swap.rollback(), which takes the states over.

        Args:
            directory: The directory or file.
            names: Patterns as for export_tensors(), of the extents to take. Step and payload are then those of the tier.
            progress: Called with the bytes that are written and those that will be, several times a second, by another thread; last by
                this one. What it raises is raised after the import. None: a line on a terminal after two seconds."""
        return self._import(directory, [], names, progress)

    def _import(
        self,
        directory: str | os.PathLike[str],
        status: list[int],
        names: Sequence[str] | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> int:
        """Imports, and appends the status of the call to `status`, also if a signal handler raises after the call."""
        step = ctypes.c_uint64()
        where, taken = _arguments.path("Tier: directory", directory), _patterns(names)
        self._end_lost()
        total = functools.partial(bytes_to_import, os.fsdecode(where), names)
        with Watched(f"reading {os.fsdecode(where)}", total, lambda: sum(path.written_bytes for path in self.paths()), progress):
            self._recorded(status, "spw_tier_import", where, taken, ctypes.byref(step))
        return step.value

    def close(self, timeout: float | None = None) -> None:
        """Closes the tier, after commits that are in flight; everything not committed is lost. From the call on, transfers of the tier wait
        for no turns.

        Args:
            timeout: Longest wait for operations in flight, in seconds; None: no limit.

        Raises:
            TimedOutError: Operations are still in flight, and the tier is still open. Close it again later. If a path has stopped
                responding, the tier is closed, as the message says."""
        end, timeout = end_of(timeout), _arguments.seconds(timeout)
        self._end_turns()
        for commit in self._commits.list():
            commit.finish(None if end is None else seconds_left(end))
        try:
            self._end(
                lambda: _arguments.milliseconds(None if end is None else seconds_left(end)),
                timeout=timeout,
                before=lambda handle: self._await_tickets(handle, end),
            )
        except TimedOutError as error:
            if self._cell:
                raise
            raise TimedOutError(
                f"the tier is closed, but a path has not responded, and its operations have not ended: {error}; the memory of these "
                "operations stays allocated, and the files stay locked until they end"
            ) from None

    def destroy(self) -> None:
        """Closes the tier, after commits that are in flight, and removes its files."""
        self.handle
        self._end_turns()
        for commit in self._commits.list():
            commit.finish()
        self._end(closer="spw_tier_destroy", before=lambda handle: self._await_tickets(handle, None))

    def _end_turns(self) -> None:
        """Lets transfers begin without turns from now on: the end of a program waits for no other process. Does nothing if the tier is
        closed, or in a forked child."""
        if self._cell and self._process == os.getpid():
            # Another thread may close it at this moment.
            with suppress(InvalidArgumentError):
                self._call("spw_tier_end_turns")

    def _opened(self) -> Opened:
        info = _abi.sized(_abi.TierOpenedInfo)
        self._call("spw_tier_get_opened", ctypes.byref(info), None, 0)
        payload = ctypes.create_string_buffer(info.payload_bytes)
        self._call("spw_tier_get_opened", ctypes.byref(info), payload, info.payload_bytes)
        step = info.step if info.resumed else None
        return Opened(step, payload.raw, info.missing_paths, info.lost_extents)

    def _addresses(self, extent: int, arrays: Sequence[Any], optional: bool) -> Any:
        sizes = self._streams.get(extent)
        if sizes is None:
            raise InvalidArgumentError(f"Tier: extent {extent} is unknown to this object; call define() first")
        if len(arrays) != len(sizes):
            raise InvalidArgumentError(f"Tier: {len(arrays)} arrays for extent {extent}, which has {len(sizes)} streams; pass one for each")
        addresses = (ctypes.c_void_p * len(sizes))()
        for n, (array, size) in enumerate(zip(arrays, sizes)):
            if array is None and optional:
                continue
            addresses[n], given = _arrays.memory(array, f"arrays[{n}]", optional)
            if given != size:
                raise InvalidArgumentError(
                    f"Tier: arrays[{n}] has {given} bytes, stream {n} of extent {extent} has {size}; pass an array of the stream's size"
                )
        return addresses

    def _all(self, function: str, structure_type: Any) -> list[tuple[Any, str]]:
        found: list[tuple[Any, str]] = []
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        while True:
            info = _abi.sized(structure_type)
            try:
                self._call(function, len(found), ctypes.byref(info), buffer, _TEXT_BYTES, None)
            except NotFoundError:
                return found
            found.append((info, buffer.value.decode("utf-8", "replace")))


_opened_tiers = _kept.Living()


@atexit.register
def _end_all_turns() -> None:
    """At the end of the interpreter objects are closed in any order, and a commit or a snapshot waits for transfers too."""
    for opened in _opened_tiers.list():
        opened._end_turns()


def _patterns(names: Sequence[str] | None) -> bytes | None:
    """Patterns as C takes them, one per line."""
    if names is None:
        return None
    if isinstance(names, str) or not names or any("\n" in name for name in names):
        raise InvalidArgumentError(f"Tier: names is {names!r}; pass a list of patterns without line breaks, or None for all")
    return b"\n".join(text(name, "names") for name in names)


def steps(
    paths: Iterable[str | os.PathLike[str] | TierPath | None],
    *,
    job: str,
    host: str | None = None,
    rank: int = 0,
    world: int = 1,
    degraded: bool = False,
    mode: str = "auto",
) -> Steps:
    """Returns the steps at which a tier can be opened, without changing it.

    Ranks that commit independently must call this before they open the tier, because an open discards the other step.

    Args:
        paths, job, host, rank, world, degraded: As for Tier.
        mode: With "read" the tier is not locked during the call."""
    info = _abi.sized(_abi.TierStepsInfo)
    options = tier_options(paths, job, host, rank, world, degraded)
    options.mode = choice(MODES, mode, "mode")
    _native.call("spw_tier_get_steps", ctypes.byref(options), ctypes.byref(info))
    last, before = info.last if info.committed else None, info.before if info.has_before else None
    return Steps(last, before, bool(info.first), bool(info.exists), info.last_tag, info.before_tag)


def collect(directory: str | os.PathLike[str], *, job: str, host: str | None = None, rank: int = 0) -> bool:
    """Removes the files of a dead run from a directory or object store.

    Args:
        directory: A directory, or "s3://BUCKET/PREFIX".
        job, host, rank: As for Tier.

    Returns:
        False if there are none.

    Raises:
        TierLockedError: A live process holds the run's tier."""
    name = None if host is None else text(host, "host")
    try:
        _native.call("spw_tier_collect", _arguments.path("collect: directory", directory), text(job, "job"), name, rank)
    except NotFoundError:
        return False
    return True
