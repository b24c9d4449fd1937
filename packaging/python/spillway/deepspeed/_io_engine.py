"""A library I/O engine for DeepSpeed's handles: submission, one wait for all operations, and counters.

Every call into the library releases the GIL. The memory of operations in flight is referenced here, so it stays
allocated even if a tensor is dropped or gets other storage."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from functools import partial
from typing import Any

from .. import _abi, _kept, _log, _native
from .._native_handle import SLICE_MS, TIMEOUT, record
from ..errors import InvalidArgumentError, SystemCallError
from . import _installed, _lifetime

# Time for the operations in flight when a handle is dropped; after a timeout their memory is never freed.
_CLOSE_TIMEOUT_MS = 30_000
_COUNTED = ("reads", "writes", "read_bytes", "written_bytes", "failed")
_REQUEST_SIZE = ctypes.sizeof(_abi.IoRequest)


class Engine:
    """Opens the library's engine at the first operation, and a new one in a forked child, which lacks the parent's
    threads."""

    def __init__(self, op, block_bytes, depth):
        self._op = op
        self._options = _abi.sized(_abi.IoOptions)
        self._options.block_bytes, self._options.queue_depth = block_bytes, depth
        self._closed = False
        self._start()
        _lifetime.opened(self)

    def _start(self):
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._in_flight = _InFlight()

    def read(self, path, fd, offset, address, size, held, after=None, owner=None):
        """Starts reading `size` bytes into `address`. `held` keeps the memory alive; a wait calls `after` once
        everything succeeded. With an `owner`, a thread's ident, only that thread's wait takes the outcome."""
        self._submit("spw_io_read", path, fd, offset, address, size, held, after, owner)

    def write(self, path, fd, offset, address, size, held, after=None, owner=None):
        """Starts writing, like read()."""
        self._submit("spw_io_write", path, fd, offset, address, size, held, after, owner)

    def _submit(self, function, path, fd, offset, address, size, held, after, owner):
        if self._process != os.getpid():
            self._start()
        in_flight = self._in_flight
        io = in_flight.io or self._open()
        request = _abi.IoRequest(_REQUEST_SIZE, fd, path, offset, address, size, 0)
        entry = _Entry(after, owner)

        def submit(status):
            record(status, function, io, ctypes.byref(request), ctypes.byref(entry.handle))
            _native.check(status[0])

        in_flight.entries.submit(held, submit, entry)

    def _open(self):
        in_flight = self._in_flight
        with self._lock:
            if self._closed:
                raise InvalidArgumentError("this I/O handle was closed with the engine that made it; make a new handle")
            if in_flight.io is None:
                io = ctypes.c_void_p()
                _native.call("spw_io_open", ctypes.byref(self._options), ctypes.byref(io))
                in_flight.io = io.value
                in_flight.finalizer = weakref.finalize(self, _close, self._op, in_flight)
                _open_engines[id(in_flight)] = (self._op, in_flight)
                _kept.keep(in_flight)
        _log.first_served("deepspeed", self._op)
        return in_flight.io

    def wait(self):
        """Waits for all submitted operations and returns their number. Raises the exception of a failed operation after
        all have ended."""
        if self._process != os.getpid():
            self._start()
        in_flight, me = self._in_flight, threading.get_ident()
        wait = _Wait(me)
        with self._lock:
            # Skip entries with handle 0: another thread is submitting them and will wait for them. Entries that
            # already have a wait of this thread belong to a wait that was interrupted.
            mine = [
                entry
                for entry in in_flight.entries.tokens()
                if entry.handle.value and entry.owner in (None, me) and (entry.wait is None or entry.wait.thread == me)
            ]
            left = [entry for entry in mine if not entry.is_over()]
            for entry in left:
                entry.wait = wait
        if not mine:
            return 0
        try:
            if left:
                wait.run(in_flight.io, [entry.handle.value for entry in left])
            for entry in mine:
                entry.finish()
        except SystemCallError:
            # The engine is lost; the system may still access the memory.
            in_flight.entries.lose(mine)
            raise
        except Exception:
            in_flight.entries.over(entry for entry in mine if entry.is_over())
            raise
        in_flight.entries.over(mine)
        return len(mine)

    def close(self):
        """Waits for operations in flight and closes the library's engine; later operations raise an error."""
        with self._lock:
            self._closed, in_flight = True, self._in_flight
            if self._process != os.getpid() or in_flight.io is None:
                return
        in_flight.finalizer()


class _InFlight:
    """State that must outlive an Engine: the library's engine and the memory of its operations."""

    def __init__(self):
        self.process = os.getpid()
        self.io: int | None = None
        self.finalizer: Any = None
        self.entries = _kept.Submitted()


class _Entry:
    """An operation: its handle, the callback after success, the thread that may take its outcome, and its wait."""

    def __init__(self, after, owner):
        self.handle = ctypes.c_uint64()
        self.wait: _Wait | None = None
        self.after, self.owner = after, owner

    def is_over(self):
        return self.wait is not None and self.wait.outcome() is not None

    def finish(self):
        if self.after is not None and self.wait is not None and self.wait.outcome() == 0:
            self.after()
            self.after = None


class _Wait:
    """A thread's wait for several operations and its outcome, which stays consistent if a signal handler raises."""

    def __init__(self, thread):
        self.thread, self._statuses = thread, []

    def run(self, io, handles):
        count = len(handles)
        handles = (ctypes.c_uint64 * count)(*handles)
        while self.outcome() is None:
            self._statuses.clear()
            record(self._statuses, "spw_io_wait", io, handles, count, SLICE_MS, None)
            if self._statuses[0] != TIMEOUT:
                _native.check(self._statuses[0])

    def outcome(self):
        return next((status for status in self._statuses if status != TIMEOUT), None)


def _close(op, in_flight):
    """Finalizer of an Engine; runs in any thread or at the end of the process. Python reports its exception, that of an
    operation that failed without a wait."""
    if in_flight.process != os.getpid():
        return
    with _totals_lock:
        io, in_flight.io = in_flight.io, None
        _open_engines.pop(id(in_flight), None)
        _add(_totals.setdefault(op, dict.fromkeys(_COUNTED, 0)), io)
    # The memory stays if the system may still use it: after an interrupt or a timeout.
    status: list[int] = []
    record(status, "spw_io_close", io, _CLOSE_TIMEOUT_MS)
    if status[0] != TIMEOUT:
        _kept.release(in_flight)
    _native.check(status[0])


# Reentrant: the garbage collector may run _close while this thread holds the lock.
_totals_lock = threading.RLock()
_totals: dict[str, dict[str, int]] = {}
_open_engines: dict[int, tuple[str, _InFlight]] = {}


def served(op):
    """Number of operations and bytes of an op in this process."""
    with _totals_lock:
        counts = dict(_totals.get(op, dict.fromkeys(_COUNTED, 0)))
        for of, in_flight in list(_open_engines.values()):
            # The garbage collector may have closed it during the loop.
            if of == op and in_flight.io is not None:
                _add(counts, in_flight.io)
        return counts


def _add(counts, io):
    stats = _abi.sized(_abi.IoStats)
    _native.call("spw_io_get_stats", io, ctypes.byref(stats))
    for name in _COUNTED:
        counts[name] += getattr(stats, name)


def describe():
    """Description of an open engine's backend; None if no engine is open."""
    with _totals_lock:
        for _, in_flight in list(_open_engines.values()):
            if in_flight.io is None:
                continue
            text = ctypes.create_string_buffer(400)
            _native.call("spw_io_describe", in_flight.io, text, len(text), None)
            return text.value.decode("utf-8", "replace")
    return None


def _forget_parent():
    """A child starts its own counters and lock; the parent's lock may be locked for ever."""
    global _totals_lock
    _totals_lock = threading.RLock()
    _totals.clear()
    _open_engines.clear()


os.register_at_fork(after_in_child=_forget_parent)


def _served(op):
    return {op: served(op)}


for _op in ("async_io", "gds"):
    _installed.counted(partial(_served, _op), _op)
_installed.counted(lambda: {"io": describe()}, "async_io")
