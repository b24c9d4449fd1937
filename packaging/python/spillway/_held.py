"""Base class of Python objects that own an object of the library: opened once, closed once by close(), a with block or
the destructor.

Thread-safe: a close refuses new calls and waits for calls in flight before it frees the object. Signal handlers may
raise between any two bytecodes, so two operations are one step in C: entering a call (`with` on a lock), and making a C
call and storing its outcome (`record`).

A forked child has an unusable copy of the object: every call raises there, and close() does nothing."""

import ctypes
import itertools
import os
import threading
import time

from . import _native
from .errors import Busy, InvalidArgument, TimedOut

# Period in seconds at which a close polls for calls in flight.
LOOK_SECONDS = 0.002


def record(outcome, function, *arguments):
    """Calls a C function and appends its status to the list `outcome`; no signal handler runs in between."""
    outcome.extend(map(function, *((argument,) for argument in arguments)))


class Held:
    """Subclasses define `what`, the object's name in messages, and `closer`, the C function that ends it."""

    what = "object"
    closer = ""
    _cell = ()

    def _hold(self, opener, *arguments):
        # Set before the call: if the call is interrupted, __del__ still finds and closes the handle.
        handle = ctypes.c_void_p()
        self._process, self._closed, self._inside, self._closing = os.getpid(), False, {}, threading.RLock()
        self._cell = [handle]
        _native.check(getattr(_native.library(), opener)(*arguments, ctypes.byref(handle)))

    @property
    def handle(self):
        """The C handle; raises InvalidArgument if the object is closed or belongs to the parent process."""
        cell = self._cell
        if cell:
            self._check_process()
        if not cell or not cell[0] or self._closed:
            raise InvalidArgument(f"the {self.what} is closed")
        return cell[0]

    def _through(self, work):
        """Returns work(handle). A close waits until `work` has returned."""
        self.handle
        lock = threading.Lock()
        self._inside[lock] = threading.get_ident()
        try:
            with lock:
                return work(self.handle)
        finally:
            self._inside.pop(lock, None)

    def _call(self, function, *arguments):
        self._through(lambda handle: _native.check(getattr(_native.library(), function)(handle, *arguments)))

    def _end(self, *arguments, timeout=None, closer=None, before=None):
        """Waits up to `timeout` seconds for calls in flight, then calls before(handle) and the closer; False if already
        closed."""
        if not self._cell or self._process != os.getpid() or self._closing._is_owned():
            return False
        end = None if timeout is None else time.monotonic() + timeout
        with self._closing:
            if not self._cell or not self._cell[0]:
                return False
            self._closed = True
            try:
                self._drain(end)
                if before is not None:
                    before(self._cell[0])
                function, status = getattr(_native.library(), closer or self.closer), []
                rest = [(argument() if callable(argument) else argument,) for argument in arguments]
                # One step removes the handle from its cell and passes it to C: it is neither lost nor freed twice.
                status.extend(itertools.islice(map(function, iter(self._cell.pop, None), *rest), 1))
            finally:
                self._closed = not self._cell
            _native.check(status[0])
        return True

    def _drain(self, end):
        while inside := [thread for lock, thread in list(self._inside.items()) if lock.locked()]:
            if threading.get_ident() in inside:
                raise Busy(f"the {self.what} cannot be closed from inside one of its own calls, by a callback or signal handler")
            if end is not None and time.monotonic() >= end:
                raise TimedOut(f"the {self.what} is still open: {len(inside)} calls of other threads have not returned")
            time.sleep(LOOK_SECONDS)

    def _check_process(self):
        if self._process != os.getpid():
            raise InvalidArgument(f"the {self.what} was opened by process {self._process} and is not usable in its forked child "
                                  f"{os.getpid()}; open one in the child")

    def close(self):
        """Closes the object after calls of other threads have returned; a second call does nothing."""
        self._end()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        if self._cell and self._cell[0]:
            self.close()
