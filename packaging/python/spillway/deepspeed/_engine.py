"""One I/O engine of the library, as DeepSpeed's handles use it: submit, one wait for all, and what was served.

Every call into the library lets go of the GIL. Memory under way is held here, so that neither a tensor that is dropped
nor one that gets other storage takes it away from the system."""

import ctypes
import os
import threading
import weakref

from .. import _abi, _native
from ..errors import SystemFailure, TimedOut

# A wait comes up for air this often, so that Ctrl-C works while a device hangs.
_BREATH_MS = 500
# What is under way when a handle is dropped gets this long; afterwards its memory is never let go.
_PATIENCE_MS = 30_000
_COUNTED = ("reads", "writes", "read_bytes", "written_bytes", "failed")
_REQUEST_SIZE = ctypes.sizeof(_abi.IoRequest)

_stuck = []


class Engine:
    """Opens at the first operation, and anew in a forked child, to which its parent's threads are not copied."""

    def __init__(self, op, block_bytes, depth):
        self._op = op
        self._options = _abi.sized(_abi.IoOptions)
        self._options.block_bytes, self._options.queue_depth = block_bytes, depth
        self._start()

    def _start(self):
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._under_way = _UnderWay()

    def read(self, path, fd, offset, address, size, held, after=None, owner=None):
        """Begins to read `size` bytes into `address`. `held` keeps the memory; `after` is called when a wait finds that
        everything succeeded. With an `owner`, a thread's ident, no other thread's wait takes the outcome."""
        self._submit(_native.library().spw_io_read, path, fd, offset, address, size, held, after, owner)

    def write(self, path, fd, offset, address, size, held, after=None, owner=None):
        """Begins to write, as read()."""
        self._submit(_native.library().spw_io_write, path, fd, offset, address, size, held, after, owner)

    def _submit(self, function, path, fd, offset, address, size, held, after, owner):
        if self._process != os.getpid():
            self._start()
        under_way = self._under_way
        io = under_way.io or self._open()
        request = _abi.IoRequest(_REQUEST_SIZE, fd, path, offset, address, size, 0)
        # Listed before the call: whatever interrupts this thread, the memory is held once the system has it.
        entry = (ctypes.c_uint64(), held, after, owner)
        with self._lock:
            under_way.entries.append(entry)
        status = function(io, ctypes.byref(request), ctypes.byref(entry[0]))
        if status:
            try:
                _native.check(status)
            finally:
                with self._lock:
                    under_way.entries = [other for other in under_way.entries if other is not entry]

    def _open(self):
        under_way = self._under_way
        with self._lock:
            if under_way.io is None:
                io = ctypes.c_void_p()
                _native.check(_native.library().spw_io_open(ctypes.byref(self._options), ctypes.byref(io)))
                under_way.io = io.value
                weakref.finalize(self, _close, self._op, under_way)
                _open_engines[id(under_way)] = (self._op, under_way)
        return under_way.io

    def wait(self):
        """Waits for everything that was submitted; its number. An operation that failed is its exception, after all
        have ended."""
        if self._process != os.getpid():
            self._start()
        under_way, owners = self._under_way, (None, threading.get_ident())
        with self._lock:
            # A handle of 0 is being submitted by another thread at this moment, which will wait for it.
            mine = [entry for entry in under_way.entries if entry[0].value and entry[3] in owners]
            under_way.entries = [entry for entry in under_way.entries if not entry[0].value or entry[3] not in owners]
        if not mine:
            return 0
        try:
            _wait(under_way.io, [entry[0].value for entry in mine])
        except KeyboardInterrupt:
            with self._lock:
                under_way.entries[:0] = [entry for entry in mine if _in_use(under_way.io, entry[0].value)]
            raise
        except SystemFailure:
            # The engine is lost, and nobody knows what the system still does with the memory.
            _stuck.append(mine)
            raise
        for _, _, after, _ in mine:
            if after is not None:
                after()
        return len(mine)


class _UnderWay:
    """What has to outlive an Engine: the library's engine and the memory it works on."""

    def __init__(self):
        self.process = os.getpid()
        self.io = None
        self.entries = []


def _wait(io, handles):
    wait_many, count = _native.library().spw_io_wait_many, len(handles)
    handles = (ctypes.c_uint64 * count)(*handles)
    while True:
        try:
            return _native.check(wait_many(io, handles, count, _BREATH_MS))
        except TimedOut:
            pass


def _in_use(io, handle):
    holds = ctypes.c_uint32()
    _native.check(_native.library().spw_io_holds_memory(io, handle, ctypes.byref(holds)))
    return holds.value


def _close(op, under_way):
    """Runs when an Engine is dropped, in whatever thread the garbage collector is in, or when the process ends. Python
    reports what it raises: an operation that failed and that nobody waited for."""
    if under_way.process != os.getpid():
        return
    io, entries = under_way.io, under_way.entries
    with _totals_lock:
        _open_engines.pop(id(under_way), None)
        _add(_totals.setdefault(op, dict.fromkeys(_COUNTED, 0)), io)
    under_way.io, under_way.entries = None, []
    try:
        _native.check(_native.library().spw_io_close(io, _PATIENCE_MS))
    except TimedOut:
        _stuck.append(entries)
        raise


# Reentrant: the garbage collector may run _close while this thread holds it.
_totals_lock = threading.RLock()
_totals = {}
_open_engines = {}


def served(op):
    """Operations and bytes of an op in this process."""
    with _totals_lock:
        counts = dict(_totals.get(op, dict.fromkeys(_COUNTED, 0)))
        for of, under_way in list(_open_engines.values()):
            if of == op:
                _add(counts, under_way.io)
        return counts


def _add(counts, io):
    stats = _abi.sized(_abi.IoStats)
    _native.check(_native.library().spw_io_stats_get(io, ctypes.byref(stats)))
    for name in _COUNTED:
        counts[name] += getattr(stats, name)


def describe():
    """The backend of an engine that is open, in words; None if none is."""
    with _totals_lock:
        for _, under_way in list(_open_engines.values()):
            text = ctypes.create_string_buffer(400)
            _native.check(_native.library().spw_io_describe(under_way.io, text, len(text)))
            return text.value.decode("utf-8", "replace")
    return None


def _forget_parent():
    """A child starts its own count; the parent's lock may be held for ever."""
    global _totals_lock
    _totals_lock = threading.RLock()
    _totals.clear()
    _open_engines.clear()


os.register_at_fork(after_in_child=_forget_parent)
