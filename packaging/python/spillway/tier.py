"""A virtual tier over several directories: named extents that survive a crash, whole and checked.

    with spillway.Tier(["/mnt/nvme", "/mnt/pfs"], job="run7") as tier:
        weights = tier.define("weights", [array.nbytes])
        tier.wait(tier.put(weights, [array]))
        tier.commit(step=1, payload=b"what the next open finds")
        tier.wait(tier.get(weights, [array]))

Until a commit an open finds what the last one left, whatever was put since."""

import ctypes
import os
import threading
import time
from typing import NamedTuple

from . import _abi, _arrays, _native
from ._held import Held
from .errors import InvalidArgument, NotFound, SpillwayError, TimedOut

MODES = {"auto": 0, "create": 1, "resume": 2}
DURABILITIES = {"data": 0, "process": 1, "full": 2}
BACKENDS = {"auto": 0, "uring": 1, "threads": 2}
HEALTH = ("healthy", "draining", "failed", "missing")
_DEGRADED, _NO_DIRECT, _AT_STEP = 1, 2, 4
_DIRECTORY, _MEMORY = 0, 1
_TEXT_BYTES = 4096
_TIMEOUT = 23
# A deadline that passed, an engine that is lost: the ticket is done with, and the system may still have its memory.
_IN_USE = (26, 11)

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
        self._lock, self._under_way, self._streams = threading.Lock(), {}, {}
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
        for wait(). The arrays stay as they are until then."""
        streams = self._addresses(extent, arrays, False)
        return self._begin("spw_tier_put", extent, arrays, streams, -1 if path is None else path)

    def put_striped(self, extent, arrays, path_blocks):
        """put(), in pieces: how many blocks each path takes."""
        streams, blocks = self._addresses(extent, arrays, False), (ctypes.c_uint32 * len(path_blocks))(*path_blocks)
        return self._begin("spw_tier_put_striped", extent, arrays, streams, blocks, len(blocks))

    def get(self, extent, arrays):
        """Begins to read an extent into one array for each stream; None leaves a stream out. A ticket for wait()."""
        return self._begin("spw_tier_get", extent, arrays, self._addresses(extent, arrays, True))

    def wait(self, ticket, timeout=None):
        """Waits for a put or a get; its generation. TimedOut leaves it under way. After an IoFailure of status 26, a path that
        gave no answer in time, the arrays stay allocated for good, and what is in them may still change."""
        generation = ctypes.c_uint64()
        milliseconds = -1 if timeout is None else max(0, round(timeout * 1000))
        status = _native.library().spw_tier_wait(self.handle, ticket, milliseconds, ctypes.byref(generation))
        if status != _TIMEOUT:
            self._done(ticket, status in _IN_USE)
        _native.check(status)
        return generation.value

    def commit(self, step, payload=b""):
        """Makes everything put so far durable as `step`, with up to 1 MiB that the next open finds."""
        self._call("spw_tier_commit", step, payload, len(payload))

    def rollback(self):
        """Forgets everything put since the last commit."""
        self._call("spw_tier_rollback")

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
        self._settle(end)
        left = _left(end)
        self._end(-1 if left is None else round(left * 1000))

    def destroy(self):
        """Removes the tier's files and closes it."""
        self._settle(None)
        handle, self._handle = self.handle, None
        _native.check(_native.library().spw_tier_destroy(handle))

    def _done(self, ticket, in_use):
        with self._lock:
            held = self._under_way.pop(ticket, None)
        if in_use and held is not None:
            _stuck.append(held)

    def _settle(self, end):
        """Waits for the tickets that nobody waited for: only a ticket's own status says whether its memory is free."""
        for ticket in list(self._under_way) if self._handle else ():
            try:
                self.wait(ticket, _left(end))
            except TimedOut:
                self._done(ticket, True)
            except SpillwayError:
                # A put that failed is lost with all that was not committed.
                pass

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

    def _begin(self, function, extent, arrays, streams, *arguments):
        ticket = ctypes.c_uint64()
        held = [_arrays.held(array) for array in arrays]
        try:
            self._call(function, extent, streams, *arguments, ctypes.byref(ticket))
        except SpillwayError as error:
            if error.status in _IN_USE:
                _stuck.append(held)
            raise
        with self._lock:
            self._under_way[ticket.value] = held
        return ticket.value

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
