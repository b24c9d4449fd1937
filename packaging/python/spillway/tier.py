"""Crash-safe storage of named extents over several directories, with checksums.

    with spillway.Tier(["/mnt/nvme", "/mnt/pfs"], job="run7") as tier:
        weights = tier.define("weights", [array.nbytes])
        tier.wait(tier.put(weights, [array]))
        tier.commit(step=1, payload=b"returned by the next open")
        tier.wait(tier.get(weights, [array]))

An extent has one or more streams (arrays) of fixed size. After a crash an open finds the state of the last commit; puts
since then are lost."""

import ctypes
import itertools
import os
import time
from typing import NamedTuple

from . import _abi, _arrays, _native
from ._held import LOOK_SECONDS, Held, record
from ._ticket import ELSEWHERE, TIMEOUT, Ticket
from .errors import InvalidArgument, NotFound, SpillwayError, TimedOut, from_status

MODES = {"auto": 0, "create": 1, "resume": 2}
DURABILITIES = {"data": 0, "process": 1, "full": 2}
BACKENDS = {"auto": 0, "uring": 1, "threads": 2}
HEALTH = ("healthy", "draining", "failed", "missing")
_DEGRADED, _NO_DIRECT, _AT_STEP = 1, 2, 4
_DIRECTORY, _MEMORY = 0, 1
_TEXT_BYTES = 4096

# Longest wait in C, in milliseconds: in between Python runs signal handlers.
_SLICE_MS = 500
# Beyond _MOST_UNDER_WAY tickets in flight, begin() releases finished puts; the last _MOST_OVER outcomes are kept.
_MOST_UNDER_WAY, _MOST_OVER = 256, 4096

# Memory of tickets that ended in a deadline or a lost engine. It is never freed: the system may still access it.
_stuck = []


class TierPath(NamedTuple):
    """A path of a tier. `directory` is a directory, "s3://BUCKET/PREFIX" for an object store, or None for memory of
    this process. `limit_bytes` limits the path's data file (0: no limit); `reserve_bytes` are allocated at open."""

    directory: str | None
    limit_bytes: int = 0
    reserve_bytes: int = 0


class Steps(NamedTuple):
    """The steps at which a tier can be opened: `last`, the last committed step, and `before`, the one before it; None
    if there is none. `first` if `last` was the tier's first commit. `exists` if there is a tier, committed or not."""

    last: int | None
    before: int | None
    first: bool
    exists: bool


class Opened(NamedTuple):
    """What an open found: the committed step, or None, and the payload of its commit; the numbers of missing paths and
    of lost extents."""

    step: int | None
    payload: bytes
    missing_paths: int
    lost_extents: int


class Extent(NamedTuple):
    """An extent. Its `generation` is 0 until the first put."""

    number: int
    name: str
    bytes: int
    generation: int
    streams: int
    committed: bool
    lost: bool
    blocks: int


class PathReport(NamedTuple):
    """Health and traffic of a path since the open, in bytes and seconds; `wear_bytes` counts writes since the tier was
    created."""

    directory: str
    health: str
    read_bytes: int
    written_bytes: int
    reading_seconds: float
    writing_seconds: float
    wear_bytes: int
    file_bytes: int
    free_bytes: int
    blocks: int


class Tier(Held):
    """An open tier. Thread-safe: threads may use one tier concurrently.

    - `paths`: existing directories, "s3://BUCKET/PREFIX", None for memory, or TierPath.
    - `mode`: "auto" resumes a committed state and otherwise creates the tier, unless the rank's state is stored under
      another host's name; "create" refuses a committed state, "resume" requires one.
    - `durability`: "data" survives a power failure, "process" only the end of the process, "full" also syncs
      directories.
    - `at_step` opens the tier at this step, one of steps(). Opening at the step before the last discards the last step.
      It raises NoStep if something was put since the last commit.
    - 0 selects the default of a numeric option."""

    what, closer = "tier", "spw_tier_close"

    def __init__(self, paths, *, job, host=None, rank=0, world=1, mode="auto", durability="data", degraded=False,
                 direct=True, block_bytes=0, stall_seconds=0.0, queue_depth=0, backend="auto", at_step=None):
        options = _options(paths, job, host, rank, world, degraded)
        options.mode = _choice(MODES, mode, "mode")
        options.durability = _choice(DURABILITIES, durability, "durability")
        options.io_backend = _choice(BACKENDS, backend, "backend")
        options.flags |= _NO_DIRECT * (not direct) + _AT_STEP * (at_step is not None)
        options.block_bytes, options.queue_depth = block_bytes, queue_depth
        options.stall_ms = round(stall_seconds * 1000)
        options.at_step = at_step or 0
        self._streams, self._under_way, self._by_number, self._over, self._failed = {}, {}, {}, {}, {}
        self._hold("spw_tier_open", ctypes.byref(options))
        self.opened = self._opened()

    def define(self, name, stream_bytes):
        """Returns the number of the extent with this name and these stream sizes in bytes; creates a missing extent."""
        sizes = (ctypes.c_uint64 * len(stream_bytes))(*stream_bytes)
        number = ctypes.c_uint32()
        self._call("spw_tier_define", _text(name, "name"), sizes, len(sizes), ctypes.byref(number))
        self._streams[number.value] = tuple(stream_bytes)
        return number.value

    def remove(self, extent):
        """Removes an extent; the removal is durable with the next commit."""
        self._call("spw_tier_remove", extent)

    def put(self, extent, arrays, *, path=None):
        """Starts writing an extent, one array per stream, and returns a ticket for wait(). `path` is the number of the
        path to write to; None chooses the best one. Do not change the arrays until the wait returns or a commit
        succeeds."""
        streams = self._addresses(extent, arrays, False)
        return self._begin(True, "spw_tier_put", extent, arrays, streams, -1 if path is None else path)

    def put_striped(self, extent, arrays, path_blocks):
        """Like put(), distributed over the paths: `path_blocks` has the number of blocks for each path."""
        streams, blocks = self._addresses(extent, arrays, False), (ctypes.c_uint32 * len(path_blocks))(*path_blocks)
        return self._begin(True, "spw_tier_put_striped", extent, arrays, streams, blocks, len(blocks))

    def get(self, extent, arrays):
        """Starts reading an extent into one array per stream and returns a ticket for wait(); None skips a stream."""
        return self._begin(False, "spw_tier_get", extent, arrays, self._addresses(extent, arrays, True))

    def wait(self, ticket, timeout=None):
        """Waits for a put or a get; returns the extent's generation. After TimedOut the operation is still in flight.
        After an IoFailure of status 26 (the path did not respond in time) the arrays stay allocated for good, and the
        system may still change their content."""
        entry, end = self._by_number.get(ticket), None if timeout is None else time.monotonic() + timeout
        if entry is None and ticket in self._over:
            return self._outcome_of(ticket)
        # A put or get that a signal handler interrupted may be in _under_way but not yet in _by_number.
        entry = entry or next((other for other in list(self._under_way) if other.number.value == ticket), None) \
            or Ticket(None, False, ticket)
        while entry.outcome() is None:
            left = None if end is None else _left(end) * 1000
            patience = _SLICE_MS if left is None else min(_SLICE_MS, left)
            status = self._through(lambda handle: entry.wait(handle, patience))
            if status == TIMEOUT and patience == left:
                _native.check(status)
            elif entry.begun and status == ELSEWHERE and entry.outcome() is None:
                # Another thread has taken the outcome, and records it as soon as it runs.
                if left == 0:
                    raise TimedOut(f"ticket {ticket} is being taken by another thread")
                time.sleep(LOOK_SECONDS)
            elif status and status == entry.outcome():
                try:
                    _native.check(status)
                finally:
                    self._release(entry)
        self._release(entry)
        if entry.outcome():
            raise from_status(entry.outcome(), f"ticket {ticket} failed in a wait that was interrupted")
        return entry.generation.value

    def commit(self, step, payload=b""):
        """Makes all earlier puts durable as `step`, and ends them. `payload`, up to 1 MiB, is returned by the next
        open."""
        self.committing(lambda: self._call("spw_tier_commit", step, payload, len(payload)))

    def committing(self, commit):
        """Runs `commit`, which commits the tier. Afterwards all earlier puts have ended and their arrays are free."""
        before = [entry for entry in list(self._under_way) if entry.put]
        for entry in before:
            if entry.outcome():
                self._reap(entry)
        for error in list(self._failed.values()):
            raise error
        commit()
        for entry in before:
            self._reap(entry)

    def rollback(self):
        """Discards everything put since the last commit."""
        self._call("spw_tier_rollback")
        self._failed.clear()

    def extents(self):
        """All extents, as a list of Extent."""
        return [Extent(info.extent, name, info.bytes, info.generation, info.streams, bool(info.committed), bool(info.lost),
                       info.blocks) for info, name in self._all("spw_tier_extent_get", _abi.TierExtentInfo)]

    def paths(self):
        """All paths, as a list of PathReport in order of their numbers."""
        return [PathReport(words, HEALTH[info.health], info.read_bytes, info.written_bytes, info.reading_ns / 1e9,
                           info.writing_ns / 1e9, info.wear_bytes, info.file_bytes, info.free_bytes, info.blocks)
                for info, words in self._all("spw_tier_path_get", _abi.TierPathInfo)]

    def set_health(self, path, health):
        """Sets a path's health: "draining" stops new writes to it, "healthy" allows them again."""
        self._call("spw_tier_path_set", path, _choice({name: n for n, name in enumerate(HEALTH)}, health, "health"))

    def evacuate(self, path):
        """Moves all blocks off a path."""
        self._call("spw_tier_evacuate", path)

    def verify(self):
        """Reads all blocks and verifies their checksums; returns the number of blocks. Raises Corrupt for the first
        damaged block."""
        checked = _abi.sized(_abi.TierChecked)
        self._call("spw_tier_verify", ctypes.byref(checked))
        return checked.blocks

    def export(self, directory):
        """Writes the committed state as plain files into a new directory; returns its step."""
        return self._step("spw_tier_export", directory)

    def import_from(self, directory):
        """Reads an exported directory and commits it; returns its step."""
        return self._step("spw_tier_import", directory)

    def close(self, timeout=None):
        """Closes the tier; everything not committed is lost."""
        end = None if timeout is None else time.monotonic() + timeout
        self._end(lambda: -1 if end is None else round(_left(end) * 1000), timeout=timeout,
                  before=lambda handle: self._settle(handle, end))

    def destroy(self):
        """Closes the tier and removes its files."""
        self.handle
        self._end(closer="spw_tier_destroy", before=lambda handle: self._settle(handle, None))

    def _settle(self, handle, end):
        """Waits for the tickets in flight: only a ticket's own status shows whether its memory is free. A failed put is
        ignored, since everything not committed is lost."""
        for entry in list(self._under_way):
            if entry.number.value and entry.outcome() is None:
                entry.wait(handle, -1 if end is None else _left(end) * 1000)
            self._release(entry)

    def _reap(self, entry):
        """Releases a put that has ended, and records its outcome."""
        if not entry.number.value:
            return
        if entry.outcome() is None:
            self._through(lambda handle: entry.wait(handle, 0))
            if entry.outcome() is None:
                return
        try:
            _native.check(entry.outcome())
        except SpillwayError as error:
            # The next commit would silently lack this put, so `committing` raises the error.
            self._failed[entry.number.value] = error.with_traceback(None)
        self._over[entry.number.value] = entry.generation.value
        while len(self._over) > _MOST_OVER:
            self._over.pop(next(iter(self._over)), None)
        self._release(entry)

    def _outcome_of(self, ticket):
        generation, error = self._over.pop(ticket), self._failed.pop(ticket, None)
        if error is not None:
            raise error
        return generation

    def _release(self, entry):
        if entry in self._under_way and entry.in_use():
            _stuck.append(entry.held)
        # In this order: after an interrupt in between the entry is still in _under_way, where it is found again.
        self._by_number.pop(entry.number.value, None)
        self._under_way.pop(entry, None)

    def _opened(self):
        info = _abi.sized(_abi.TierOpenedInfo)
        self._call("spw_tier_opened", ctypes.byref(info), None, 0)
        payload = ctypes.create_string_buffer(info.payload_bytes)
        self._call("spw_tier_opened", ctypes.byref(info), payload, info.payload_bytes)
        step = info.step if info.resumed else None
        return Opened(step, payload.raw, info.missing_paths, info.lost_extents)

    def _addresses(self, extent, arrays, optional):
        sizes = self._streams.get(extent)
        if sizes is None:
            raise InvalidArgument(f"extent {extent} was not defined by this object")
        if len(arrays) != len(sizes):
            raise InvalidArgument(f"{len(arrays)} arrays for an extent of {len(sizes)} streams")
        addresses = (ctypes.c_void_p * len(sizes))()
        for n, (array, size) in enumerate(zip(arrays, sizes)):
            if array is None and optional:
                continue
            addresses[n], given = _arrays.memory(array, f"arrays[{n}]", optional)
            if given != size:
                raise InvalidArgument(f"arrays[{n}] has {given} bytes, the stream {size}")
        return addresses

    def _begin(self, put, function, extent, arrays, streams, *arguments):
        if len(self._under_way) > _MOST_UNDER_WAY:
            for entry in list(itertools.islice(self._under_way, _MOST_UNDER_WAY // 4)):
                if entry.put:
                    self._reap(entry)
        entry = Ticket([_arrays.held(array) for array in arrays], put)

        def begin(handle):
            # Enter the ticket before the call, so that an interrupt cannot free memory that the system uses.
            self._under_way[entry] = None
            record(entry.begun, getattr(_native.library(), function), handle, extent, streams, *arguments,
                   ctypes.byref(entry.number))
            _native.check(entry.begun[0])

        try:
            self._through(begin)
        finally:
            if not entry.number.value:
                self._release(entry)
        self._by_number[entry.number.value] = entry
        if entry not in self._under_way:
            # A commit in another thread has already released the entry.
            self._by_number.pop(entry.number.value, None)
        return entry.number.value

    def _all(self, function, structure_type):
        found, words = [], ctypes.create_string_buffer(_TEXT_BYTES)
        while True:
            info = _abi.sized(structure_type)
            try:
                self._call(function, len(found), ctypes.byref(info), words, _TEXT_BYTES)
            except NotFound:
                return found
            found.append((info, words.value.decode("utf-8", "replace")))

    def _step(self, function, directory):
        step = ctypes.c_uint64()
        self._call(function, os.fsencode(directory), ctypes.byref(step))
        return step.value


def steps(paths, *, job, host=None, rank=0, world=1, degraded=False):
    """Returns the Steps of a tier without changing it; empty if there is no tier. Ranks that commit independently must
    call this before they open the tier, because an open discards the other step."""
    info = _abi.sized(_abi.TierStepsInfo)
    options = _options(paths, job, host, rank, world, degraded)
    _native.check(_native.library().spw_tier_steps(ctypes.byref(options), ctypes.byref(info)))
    return Steps(info.last if info.committed else None, info.before if info.has_before else None, bool(info.first),
                 bool(info.exists))


def collect(directory, *, job, host=None, rank=0):
    """Removes the files of a dead run from a directory or object store; False if there are none. Raises TierLocked for
    a live run."""
    name = None if host is None else _text(host, "host")
    try:
        _native.check(_native.library().spw_tier_collect(os.fsencode(directory), _text(job, "job"), name, rank))
    except NotFound:
        return False
    return True


def _left(end):
    return None if end is None else max(0, end - time.monotonic())


def _options(paths, job, host, rank, world, degraded):
    options = _abi.sized(_abi.TierOptions)
    options.job, options.host = _text(job, "job"), None if host is None else _text(host, "host")
    options.rank, options.world, options.flags = rank, world, _DEGRADED * bool(degraded)
    rows = [_path(path) for path in paths]
    options.paths, options.path_count = (_abi.TierPath * len(rows))(*rows), len(rows)
    return options


def _path(given):
    path = given if isinstance(given, TierPath) else TierPath(given)
    kind, directory = (_MEMORY, None) if path.directory is None else (_DIRECTORY, os.fsencode(path.directory))
    return _abi.TierPath(ctypes.sizeof(_abi.TierPath), kind, directory, path.limit_bytes, path.reserve_bytes)


def _choice(choices, value, argument):
    if value not in choices:
        raise InvalidArgument(f"{argument} is {value!r}; one of {', '.join(choices)} expected")
    return choices[value]


def _text(value, argument):
    if not isinstance(value, str) or "\0" in value:
        raise InvalidArgument(f"{argument} is {value!r}; a string is needed")
    return value.encode()
