"""The base of what holds an object of the library: opened once, closed once, in a with block or at the end of its life.

Thread-safe: a close refuses new calls and waits for the calls inside before it frees the object. Signal handlers may raise
between any two bytecodes, so the two steps that must not come apart are one step in C: to enter a call (`with` on a lock), and
to make a C call and to note its outcome (`record`). A forked child has a copy of the object that is not its own: every call
raises there, and close() does nothing."""

import ctypes
import itertools
import os
import threading
import time

from . import _native
from .errors import Busy, InvalidArgument, TimedOut

# How often a close looks for calls that have not returned.
LOOK_SECONDS = 0.002


def record(outcome, function, *arguments):
    """Calls a C function and appends its status to the list `outcome`; no signal handler runs in between."""
    outcome.extend(map(function, *((argument,) for argument in arguments)))


class Held:
    """A subclass names what messages call it, and the function that ends the object."""

    what = "object"
    closer = ""
    _cell = ()

    def _hold(self, opener, *arguments):
        # In place before the call, so that an interrupted one leaves nothing open.
        handle = ctypes.c_void_p()
        self._process, self._closed, self._inside, self._closing = os.getpid(), False, {}, threading.RLock()
        self._cell = [handle]
        _native.check(getattr(_native.library(), opener)(*arguments, ctypes.byref(handle)))

    @property
    def handle(self):
        """What C knows it by."""
        cell = self._cell
        if cell:
            self._check_process()
        if not cell or not cell[0] or self._closed:
            raise InvalidArgument(f"the {self.what} is closed")
        return cell[0]

    def _through(self, work):
        """What work(handle) returns. The object stays open until then."""
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
        """Waits for the calls inside, at most so long, calls before(handle) and the closer; False if the object is closed."""
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
                # The handle leaves its cell and goes to C in one step: it is neither lost nor freed twice.
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
        """Ends the object, once the calls of other threads have returned; a second call does nothing."""
        self._end()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        if self._cell and self._cell[0]:
            self.close()
