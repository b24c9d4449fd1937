"""Episodes on the I/O engine, and on pinned memory, with several threads."""

import ctypes
import threading

import numpy as np

from spillway import _abi, _native

from . import content
from .episode import Defect

INVALID, SHORT, TIMEOUT, MISSING, DEADLINE = 1, 22, 23, 25, 26
PAGE = 4096


def c(episode, name, *arguments, may=(), limit=30.0, show=()):
    """One C call as a move; the Answer has no value."""
    function = getattr(_native.library(), name)
    return episode.call(name, lambda: _native.check(function(*arguments)), may=may, limit=limit, show=show)


def engine(episode):
    """Several threads read, write, sync and wait, each on a file of its own."""
    draw = episode.random("engine")
    options = _abi.sized(_abi.IoOptions)
    options.backend, options.flags = draw.choice((0, 0, 2)), draw.choice((0, 1, 2, 3))
    options.queue_depth, options.block_bytes, options.workers = (
        draw.choice((0, 1, 7)),
        draw.choice((0, 4096, 65536)),
        draw.choice((0, 1, 3)),
    )
    io = ctypes.c_void_p()
    c(episode, "spw_io_open", ctypes.byref(options), ctypes.byref(io))
    count = draw.choice((1, 2, 3))
    users = [_File(episode, io, number, count) for number in range(count)]
    if count == 1:
        users[0].run()
    else:
        workers = [threading.Thread(target=user.guarded) for user in users]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(120)
            episode.check(not worker.is_alive(), "a thread of the engine did not end within 120 s")
    for user in users:
        if user.failure:
            raise user.failure
    stats = _abi.sized(_abi.IoStats)
    c(episode, "spw_io_get_stats", io, ctypes.byref(stats))
    episode.check(stats.stuck == 0, f"{stats.stuck} operations are stuck")
    left = sum(len(user.pending) for user in users)
    c(episode, "spw_io_close", io, 20000, may=(SHORT, MISSING) if left else ())


class _File:
    """A file, its expected contents, and its operations by handle. The regions of operations in
    flight do not overlap."""

    SIZE, REGIONS = 1 << 20, 16

    def __init__(self, episode, io, number, users):
        self.episode, self.io, self.number, self.users = episode, io, number, users
        self.path = episode.path(f"file{number}").encode()
        self.holds, self.pending, self.done = {}, {}, []
        self.generation, self.failure = 0, None

    def guarded(self):
        try:
            self.run()
        except BaseException as error:
            self.failure = error

    def run(self):
        for number, _ in self.episode.steps():
            draw = self.episode.random("file", self.number, number)
            name = draw.choices(("write", "read", "sync", "wait", "wait_many", "stale", "missing"), (10, 10, 2, 16, 2, 1, 1))[0]
            getattr(self, name)(draw)
        while self.pending and self.episode.random("leave", self.number).random() < 0.7:
            self.wait(self.episode.random("end"), -1)

    def request(self, offset, array):
        request = _abi.sized(_abi.IoRequest)
        request.path, request.offset, request.fd = self.path, offset, -1
        if array is not None:
            request.buffer, request.bytes = array.ctypes.data, array.nbytes
        return request

    def region(self, draw):
        """(number, offset) of a region without an operation in flight, or None."""
        taken = {operation[1] for operation in self.pending.values()}
        free = [n for n in range(self.REGIONS) if n not in taken]
        return draw.choice(free) if free else None

    def write(self, draw):
        region = self.region(draw)
        if region is None:
            return
        self.generation += 1
        size = draw.choice((1, 511, 4096, 5000, 65536 - 16))
        skew = draw.choice((0, 0, 1, 8))
        raw = np.empty(size + 16, np.uint8)
        array = raw[skew : skew + size]
        array[:] = content.make(self.episode.seed, region, self.number, self.generation, size)
        self.begin("spw_io_write", region, array, ("write", region, raw, array, self.generation))

    def read(self, draw):
        region = self.region(draw)
        if region is None or region not in self.holds:
            return
        size = self.holds[region][1]
        raw = np.full(size + 16, 0xEE, np.uint8)
        array = raw[draw.choice((0, 1)) :][:size]
        self.begin("spw_io_read", region, array, ("read", region, raw, array, self.holds[region][0]))

    def begin(self, function, region, array, operation, may=()):
        handle = ctypes.c_uint64()
        request = self.request(region * 65536, array)
        answer = c(self.episode, function, self.io, ctypes.byref(request), ctypes.byref(handle), may=may, show=(self.number, region))
        if answer.ok:
            self.episode.check(handle.value not in self.pending, f"handle {handle.value} was returned twice")
            self.pending[handle.value] = operation
            if operation[0] == "write":
                self.holds.pop(region, None)
        return answer

    def sync(self, draw):
        if not self.holds:
            return
        handle, request = ctypes.c_uint64(), self.request(0, None)
        if c(self.episode, "spw_io_sync", self.io, ctypes.byref(request), ctypes.byref(handle), show=(self.number,)).ok:
            self.pending[handle.value] = ("sync", -1, None, None, 0)

    def wait(self, draw, timeout=None):
        if not self.pending:
            return
        handle = draw.choice(sorted(self.pending))
        timeout = draw.choice((0, 1, 50, 20000, -1)) if timeout is None else timeout
        operation, moved = self.pending[handle], ctypes.c_uint64(77)
        may = (TIMEOUT,) if 0 <= timeout < 20000 else ()
        answer = c(
            self.episode,
            "spw_io_wait",
            self.io,
            ctypes.byref(ctypes.c_uint64(handle)),
            1,
            timeout,
            ctypes.byref(moved),
            may=may,
            show=(self.number, handle, timeout),
        )
        if answer.status != TIMEOUT:
            del self.pending[handle]
            self.done.append(handle)
            self.judge(operation, answer, moved.value)

    def judge(self, operation, answer, moved):
        kind, region, raw, array, generation = operation
        if not answer.ok or kind == "sync":
            return
        if moved is not None:
            self.episode.check(moved == array.nbytes, f"a {kind} of {array.nbytes} bytes moved {moved}")
        if kind == "write":
            self.holds[region] = (generation, array.nbytes)
            return
        expected = content.make(self.episode.seed, region, self.number, generation, array.nbytes)
        if not np.array_equal(array, expected):
            raise Defect(
                f"file {self.number}, region {region}: generation {generation} was written; a read found "
                f"{content.describe(array, self.episode.seed)}"
            )
        skew = array.ctypes.data - raw.ctypes.data
        around = np.concatenate([raw[:skew], raw[skew + array.nbytes :]])
        self.episode.check((around == 0xEE).all(), "a read wrote outside its buffer")

    def wait_many(self, draw):
        chosen = draw.sample(sorted(self.pending), min(len(self.pending), draw.randrange(4)))
        timeout = draw.choice((0, 20000, -1))
        handles = (ctypes.c_uint64 * len(chosen))(*chosen)
        answer = c(
            self.episode,
            "spw_io_wait",
            self.io,
            handles,
            len(chosen),
            timeout,
            None,
            may=(TIMEOUT,) if timeout == 0 else (),
            show=(self.number, chosen, timeout),
        )
        if answer.ok:
            for handle in chosen:
                self.done.append(handle)
                self.judge(self.pending.pop(handle), answer, None)

    def stale(self, draw):
        """A handle has one result: a second wait is refused."""
        handle = draw.choice(self.done) if self.done else draw.randrange(1 << 62)
        answer = c(
            self.episode, "spw_io_wait", self.io, ctypes.byref(ctypes.c_uint64(handle)), 1, 0, None, may=(INVALID,), show=("stale", handle)
        )
        self.episode.check(not answer.ok, f"a wait for handle {handle}, which was waited for, succeeded")

    def missing(self, draw):
        request, handle = self.request(0, np.empty(10, np.uint8)), ctypes.c_uint64()
        request.path = self.path + b".missing/file"
        answer = c(self.episode, "spw_io_read", self.io, ctypes.byref(request), ctypes.byref(handle), may=(MISSING,), show=("missing",))
        self.episode.check(not answer.ok, "a read of a missing file was accepted")


def pinned(episode):
    """Several threads allocate pinned memory, of its own mapping and shared. No other thread may change it, and no part
    may be allocated twice."""
    shared = _Shared()
    users = [_User(episode, shared, number) for number in range(episode.random("pinned").choice((1, 2, 4)))]
    workers = [threading.Thread(target=user.guarded) for user in users]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    for user in users:
        if user.failure:
            raise user.failure
    left = _abi.sized(_abi.PinnedStats)
    c(episode, "spw_pinned_get_stats", ctypes.byref(left))
    episode.check(left.allocations == 0, f"{left.allocations} pinned allocations are left although all were freed")


class _Shared:
    """The sizes of all allocations of all threads, by address."""

    def __init__(self):
        self.lock, self.sizes = threading.Lock(), {}


class _User:
    def __init__(self, episode, shared, number):
        self.episode, self.shared, self.number, self.failure = episode, shared, number, None
        self.marks, self.stamp = {}, 0

    def guarded(self):
        try:
            for number, _ in self.episode.steps():
                draw = self.episode.random("user", self.number, number)
                getattr(self, draw.choice(("pin", "pin", "unpin", "look", "foreign", "pin", "unpin", "look")))(draw)
            for address in list(self.marks):
                self.unpin(None, address)
        except BaseException as error:
            self.failure = error

    def fill(self, address, size):
        self.stamp += 1
        mark = (self.number << 24 | self.stamp) & 0xFFFFFFFF
        _words(address, size)[:] = mark
        return mark

    def same(self, address, size, mark):
        if content.spoil_now() or not (_words(address, size) == mark).all():
            raise Defect(f"memory at {address:#x} changed while a thread had it: {_words(address, size)[:4]}, not {mark:#x}")

    def look(self, draw):
        for address, (size, mark) in self.marks.items():
            self.same(address, size, mark)

    def foreign(self, draw):
        """A free refuses pointers that are not the start of an allocation."""
        here = ctypes.create_string_buffer(8)
        candidates = [1, PAGE, ctypes.addressof(here), (1 << 64) - PAGE]
        candidates += [address + draw.choice((1, 64, 4095)) for address in self.marks]
        address = draw.choice(candidates)
        answer = c(self.episode, "spw_pinned_free", address, may=(INVALID,), show=(hex(address),))
        self.episode.check(not answer.ok, f"spw_pinned_free of {address:#x}, which was never allocated, succeeded")

    def pin(self, draw):
        size, start, options = draw.choice((0, 1, 100, 5000, 100000, 3 << 20)), ctypes.c_void_p(), _abi.sized(_abi.PinnedOptions)
        options.flags = draw.choice((0, 0, 0, _abi.PINNED_FLAG_NO_HUGE_PAGES, _abi.PINNED_FLAG_NO_LOCK))
        c(self.episode, "spw_pinned_alloc", ctypes.byref(options), size, ctypes.byref(start), show=(options.flags, size))
        self.episode.check(start.value % PAGE == 0, "pinned memory is not page-aligned")
        with self.shared.lock:
            for address, other in self.shared.sizes.items():
                apart = start.value + max(size, 1) <= address or address + max(other, 1) <= start.value
                self.episode.check(apart, "pinned allocations overlap")
            self.shared.sizes[start.value] = size
        self.marks[start.value] = (size, self.fill(start.value, size) if size >= 4 else 0)

    def unpin(self, draw, address=None):
        if address is None and not self.marks:
            return
        address = address or draw.choice(sorted(self.marks))
        size, mark = self.marks.pop(address)
        self.same(address, size, mark)
        with self.shared.lock:
            del self.shared.sizes[address]
        c(self.episode, "spw_pinned_free", address)


def _words(address, size):
    """Memory as an array of 32-bit words; for long memory, only its first and last pages."""
    return np.frombuffer((ctypes.c_char * (size // 4 * 4)).from_address(address), np.uint32)


KINDS = {"engine": engine, "pinned": pinned}
