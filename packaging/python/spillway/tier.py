"""A virtual tier over several directories: named extents that survive a crash, whole and checked.

    with spillway.Tier(["/mnt/nvme", "/mnt/pfs"], job="run7") as tier:
        weights = tier.define("weights", [array.nbytes])
        tier.wait(tier.put(weights, [array]))
        tier.commit(step=1, payload=b"what the next open finds")
        tier.wait(tier.get(weights, [array]))

Until a commit an open finds what the last one left, whatever was put since."""

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

# A wait returns to Python this often, so that signal handlers run.
_SLICE_MS = 500
# Puts that nobody waits for: beyond so many, those that are over are let go, and so many outcomes are kept.
_MOST_UNDER_WAY, _MOST_OVER = 256, 4096

# Memory of such tickets, which is never let go: nobody says when the system is done with it.
_stuck = []


class TierPath(NamedTuple):
    """A path of a tier: a directory, "s3://BUCKET/PREFIX" for an object store, or None for memory of this process; the most
    bytes of its data file, 0 for no limit; and how many it takes from the start."""

    directory: str | None
    limit_bytes: int = 0
    reserve_bytes: int = 0


class Steps(NamedTuple):
    """The steps that a tier can be opened at: the last committed one, or None, and the one before it, or None. `first` if
    the last was the first commit, so that there was nothing before it. `exists` if there is a tier, committed or not."""

    last: int | None
    before: int | None
    first: bool
    exists: bool


class Opened(NamedTuple):
    """What an open found: the committed step, or None, and the payload that was committed with it."""

    step: int | None
    payload: bytes
    missing_paths: int
    lost_extents: int


class Extent(NamedTuple):
    """An extent. `generation` 0 was never put."""

    number: int
    name: str
    bytes: int
    generation: int
    streams: int
    committed: bool
    lost: bool
    blocks: int


class PathReport(NamedTuple):
    """How a path is doing, and what went over it since the open; `wear_bytes` since the tier was made."""

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
    """An open tier. Several threads may use one.

    `paths` are directories that exist, "s3://BUCKET/PREFIX", None for memory, or TierPath. `mode`: "auto" goes on where there
    is a committed state and else begins, unless the rank's state lies under another host's name; "create" refuses one,
    "resume" needs one. `durability`: "data" survives a power cut, "process" only the end of the process, "full" syncs
    directories too. `at_step` goes on at this step, one of steps(): the one before the last is NoStep if something was put
    since the last commit, and the last is gone then. Zero is the default of every number."""

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
        """The number of the extent with this name and streams of these many bytes; it is made if it is not there."""
        sizes = (ctypes.c_uint64 * len(stream_bytes))(*stream_bytes)
        number = ctypes.c_uint32()
        self._call("spw_tier_define", _text(name, "name"), sizes, len(sizes), ctypes.byref(number))
        self._streams[number.value] = tuple(stream_bytes)
        return number.value

    def remove(self, extent):
        """Takes an extent out with the next commit."""
        self._call("spw_tier_remove", extent)

    def put(self, extent, arrays, *, path=None):
        """Begins to write an extent, one array for each stream, to the path of that number, or where it fits best; a ticket
        for wait(). The arrays stay as they are until then, or until a commit has succeeded."""
        streams = self._addresses(extent, arrays, False)
        return self._begin(True, "spw_tier_put", extent, arrays, streams, -1 if path is None else path)

    def put_striped(self, extent, arrays, path_blocks):
        """put(), in pieces: how many blocks each path takes."""
        streams, blocks = self._addresses(extent, arrays, False), (ctypes.c_uint32 * len(path_blocks))(*path_blocks)
        return self._begin(True, "spw_tier_put_striped", extent, arrays, streams, blocks, len(blocks))

    def get(self, extent, arrays):
        """Begins to read an extent into one array for each stream; None leaves a stream out. A ticket for wait()."""
        return self._begin(False, "spw_tier_get", extent, arrays, self._addresses(extent, arrays, True))

    def wait(self, ticket, timeout=None):
        """Waits for a put or a get; its generation. TimedOut leaves it under way. After an IoFailure of status 26, a path that
        gave no answer in time, the arrays stay allocated for good, and what is in them may still change."""
        entry, end = self._by_number.get(ticket), None if timeout is None else time.monotonic() + timeout
        if entry is None and ticket in self._over:
            return self._outcome_of(ticket)
        # An interrupted put or get is in one table and not yet in the other.
        entry = entry or next((other for other in list(self._under_way) if other.number.value == ticket), None) \
            or Ticket(None, False, ticket)
        while entry.outcome() is None:
            left = None if end is None else _left(end) * 1000
            patience = _SLICE_MS if left is None else min(_SLICE_MS, left)
            status = self._through(lambda handle: entry.wait(handle, patience))
            if status == TIMEOUT and patience == left:
                _native.check(status)
            elif entry.begun and status == ELSEWHERE and entry.outcome() is None:
                # The other thread has the outcome and notes it as soon as it runs.
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
        """Makes everything put so far durable as `step`, with up to 1 MiB that the next open finds. Puts before it are over."""
        self.committing(lambda: self._call("spw_tier_commit", step, payload, len(payload)))

    def committing(self, commit):
        """Calls what commits the tier; afterwards the puts before it are over, and their arrays free."""
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
        """Forgets everything put since the last commit."""
        self._call("spw_tier_rollback")
        self._failed.clear()

    def extents(self):
        """Every extent there is."""
        return [Extent(info.extent, name, info.bytes, info.generation, info.streams, bool(info.committed), bool(info.lost),
                       info.blocks) for info, name in self._all("spw_tier_extent_get", _abi.TierExtentInfo)]

    def paths(self):
        """Every path, by number."""
        return [PathReport(words, HEALTH[info.health], info.read_bytes, info.written_bytes, info.reading_ns / 1e9,
                           info.writing_ns / 1e9, info.wear_bytes, info.file_bytes, info.free_bytes, info.blocks)
                for info, words in self._all("spw_tier_path_get", _abi.TierPathInfo)]

    def set_health(self, path, health):
        """"draining" ends new writes to a path, "healthy" allows them again."""
        self._call("spw_tier_path_set", path, _choice({name: n for n, name in enumerate(HEALTH)}, health, "health"))

    def evacuate(self, path):
        """Moves everything off a path."""
        self._call("spw_tier_evacuate", path)

    def verify(self):
        """Reads everything and compares it with its checksums; the number of blocks. Damage is the exception that names
        the first."""
        checked = _abi.sized(_abi.TierChecked)
        self._call("spw_tier_verify", ctypes.byref(checked))
        return checked.blocks

    def export(self, directory):
        """Writes the committed state as plain files into a directory that does not exist; its step."""
        return self._step("spw_tier_export", directory)

    def import_from(self, directory):
        """Reads an export and commits it; its step."""
        return self._step("spw_tier_import", directory)

    def close(self, timeout=None):
        """Closes the tier; what was not committed is lost."""
        end = None if timeout is None else time.monotonic() + timeout
        self._end(lambda: -1 if end is None else round(_left(end) * 1000), timeout=timeout,
                  before=lambda handle: self._settle(handle, end))

    def destroy(self):
        """Removes the tier's files and closes it."""
        self.handle
        self._end(closer="spw_tier_destroy", before=lambda handle: self._settle(handle, None))

    def _settle(self, handle, end):
        """Waits for the tickets that nobody waited for: only a ticket's own status says whether its memory is
        free. A put that failed is lost with all that was not committed."""
        for entry in list(self._under_way):
            if entry.number.value and entry.outcome() is None:
                entry.wait(handle, -1 if end is None else _left(end) * 1000)
            self._release(entry)

    def _reap(self, entry):
        """Lets a put go if it is over; its outcome is kept for a while."""
        if not entry.number.value:
            return
        if entry.outcome() is None:
            self._through(lambda handle: entry.wait(handle, 0))
            if entry.outcome() is None:
                return
        try:
            _native.check(entry.outcome())
        except SpillwayError as error:
            # The next commit would be without it, which nobody was told.
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
        # In this order: what an interrupt leaves in the second table is found there again.
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
            # In the table before the call: whatever interrupts this thread, the memory is held once the system has it.
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
            # A commit of another thread was faster.
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
    """The Steps of a tier, which it leaves as it is; none if there is no tier. Ranks that commit each for itself look
    before they open: an open makes the step it finds the only one."""
    info = _abi.sized(_abi.TierStepsInfo)
    options = _options(paths, job, host, rank, world, degraded)
    _native.check(_native.library().spw_tier_steps(ctypes.byref(options), ctypes.byref(info)))
    return Steps(info.last if info.committed else None, info.before if info.has_before else None, bool(info.first),
                 bool(info.exists))


def collect(directory, *, job, host=None, rank=0):
    """Removes what a dead run left in a directory or object store; False if there is nothing. A live one is TierLocked."""
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
