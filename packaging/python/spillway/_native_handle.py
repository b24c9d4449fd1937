"""Base class of Python objects that own an object of the library: opened once, closed once by close(), a with block or
the destructor.

Thread-safe: a close refuses new calls and waits for calls in flight before it frees the object. Signal handlers may
raise between any two bytecodes, so two operations are one step in C: entering a call (`with` on a lock), and making a C
call and storing its outcome (`record`).

Memory that the library accesses while the object is open is in containers that `_hold` keeps. It is freed with the object,
not before: neither a close that timed out, nor a lost object, nor the end of the interpreter frees it.

Python drops an exception inside a destructor. If a signal handler raises there, the object stays open, and the next open of any
object closes it.

A forked child has an unusable copy of the object: every call raises there, and close() does nothing."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from . import _abi, _arguments, _kept, _native
from ._attributes import described
from .errors import BusyError, InvalidArgumentError, TimedOutError, UnsupportedError

# Period in seconds at which a close polls for calls in flight.
POLL_SECONDS = 0.002
TIMEOUT = _abi.ERR_TIMEOUT


# Longest wait in C, in milliseconds: in between Python runs signal handlers.
SLICE_MS = 500


def in_slices(timeout: float | None, wait: Callable[[int], int]) -> int:
    """The status of `wait(milliseconds)`, a call of C that waits, called again and again until it ends or `timeout` seconds are over."""
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = None if end is None else max(0, round((end - time.monotonic()) * 1000))
        slice_ms = SLICE_MS if left is None else min(SLICE_MS, left)
        status = wait(slice_ms)
        if status != TIMEOUT or slice_ms == left:
            return status


def record(outcome: list[int], function: str, *arguments: Any) -> None:
    """Calls the C function of this name and appends its status to the list `outcome`; no signal handler runs in between.

    Raises:
        InvalidArgumentError: An integer does not fit its C type; nothing was called."""
    record_own(outcome, function, *_native.fitting(function, arguments))


def record_own(outcome: list[int], function: str, *arguments: Any) -> None:
    """As `record`, without the check: for hot paths whose integers are all made by this package."""
    outcome.extend(itertools.starmap(getattr(_native.library(), function), (arguments,)))


class _Open(NamedTuple):
    """What closes an object whose destructor was interrupted."""

    owner: Any
    cell: list[Any]
    closing: Any
    process: int
    kind: Any
    before: Callable[[Any], object] | None


_open: dict[int, _Open] = {}
# Weak references to destroyed objects. The callback that appends them is no bytecode, so no signal handler interrupts it.
_destroyed: list[Any] = []


def _close_lost() -> None:
    """Closes objects whose destructor was interrupted."""
    for owner in list(_destroyed):
        entry = _open.get(id(owner))
        if entry is not None and entry.cell and entry.cell[0] and entry.process == os.getpid():
            # The destructor may be at work in another thread.
            if not entry.closing.acquire(blocking=False):
                continue
            try:
                library = _native.library()
                if entry.before is not None:
                    entry.before(entry.cell[0])
                rest = ((argument,) for argument in entry.kind._closer_arguments)
                [*itertools.islice(map(getattr(library, entry.kind.closer), iter(entry.cell.pop, None), *rest), 1)]
            finally:
                entry.closing.release()
        _open.pop(id(owner), None)
        with contextlib.suppress(ValueError):
            _destroyed.remove(owner)


_Owner = TypeVar("_Owner", bound="_NativeHandle")
_Result = TypeVar("_Result")


class _NativeHandle:
    """Subclasses define `closer`, the C function that closes the object. Messages name the object by its class."""

    closer: str = ""
    # For an object that the program does not see: the name of the one that uses it, for messages.
    _user: str = ""
    # For an object that was lost: further arguments of the closer.
    _closer_arguments: tuple[Any, ...] = ()
    # Called with the handle before the closer. It does not refer to the object, because it is called for lost objects too.
    _before: Callable[[Any], object] | None = None
    # The C handle in a list of one item, which close() empties.
    _cell: Any = ()
    # Containers of memory that the library may access, see _kept.
    _keeps: tuple[Any, ...] = ()

    def _hold(self, opener: str, *arguments: Any, keeps: tuple[Any, ...] = ()) -> None:
        # Set before the call: if the call is interrupted, __del__ still finds and closes the handle.
        _close_lost()
        handle = ctypes.c_void_p()
        self._process, self._closed = os.getpid(), False
        self._inside: dict[Any, int] = {}
        self._closing: Any = threading.RLock()
        self._cell = [handle]
        owner = weakref.ref(self, _destroyed.append)
        _open[id(owner)] = _Open(owner, self._cell, self._closing, self._process, type(self), self._before)
        _native.call(opener, *arguments, ctypes.byref(handle))
        self._keeps = tuple(map(_kept.keep, keeps))

    @classmethod
    def _given(cls: type[_Owner], argument: str, value: Any) -> _Owner:
        """The value, if it is an object of this class: C cannot tell the handle of another one. `argument` is its name in messages."""
        if not isinstance(value, cls):
            raise InvalidArgumentError(f"{argument} is a {type(value).__name__}; pass a spillway.{cls.__name__}")
        return value

    @property
    def _kind(self) -> str:
        return self._user or type(self).__name__

    @property
    def handle(self) -> Any:
        """The C handle; raises InvalidArgumentError if the object is closed, UnsupportedError in a forked child."""
        cell = self._cell
        if cell:
            self._check_process()
        if not cell or not cell[0] or self._closed:
            raise InvalidArgumentError(f"this {self._kind} is closed; open a new one")
        return cell[0]

    def _facts(self) -> dict[str, Any]:
        """The facts that the repr shows, beside the state of the handle. Calls nothing of the library."""
        return {}

    def _state(self) -> str:
        """The state in the repr."""
        if not next(iter(self._cell), None) or self._closed:
            return "closed"
        return "open" if self._process == os.getpid() else f"of process {self._process}"

    def __repr__(self) -> str:
        return described(type(self).__name__, self._facts, self._state())

    def _through(self, work: Callable[[Any], _Result]) -> _Result:
        """Returns work(handle). A close waits until `work` has returned."""
        if not self._cell:
            self.handle
        lock = threading.Lock()
        self._inside[lock] = threading.get_ident()
        try:
            with lock:
                return work(self.handle)
        finally:
            self._inside.pop(lock, None)

    def _call(self, function: str, *arguments: Any) -> None:
        self._through(lambda handle: _native.call(function, handle, *arguments))

    def _recorded(self, outcome: list[int], function: str, *arguments: Any) -> None:
        """As `_call`, and appends the status to the list `outcome`, also if a signal handler raises after the call."""
        self._through(lambda handle: record(outcome, function, handle, *arguments))
        _native.check(outcome[0])

    def _counted(self, count: Callable[[], object], function: str, *arguments: Any, outcome: list[int] | None = None) -> None:
        """As `_recorded`, and calls count() if the call has succeeded, also if a signal handler raises after it."""
        outcome = [] if outcome is None else outcome
        try:
            self._recorded(outcome, function, *arguments)
        finally:
            if outcome == [0]:
                count()

    def _wait_by(self, timeout: Any, function: str, *arguments: Any, after: tuple[Any, ...] = (), outcome: list[int] | None = None) -> None:
        """Calls a C function that waits; its timeout comes after `arguments`. A signal handler that raises ends the wait. `outcome`: a list
        that has the status of the last call."""
        outcome = [] if outcome is None else outcome

        def wait(milliseconds: int) -> int:
            outcome.clear()
            self._through(lambda handle: record(outcome, function, handle, *arguments, milliseconds, *after))
            return outcome[0]

        _native.check(in_slices(_arguments.seconds(timeout), wait))

    def _end(
        self,
        *arguments: Any,
        timeout: float | None = None,
        closer: str | None = None,
        before: Callable[[Any], object] | None = None,
        status: list[int] | None = None,
    ) -> bool:
        """Waits up to `timeout` seconds for calls in flight, then calls before(handle) and the closer, whose status it appends to
        the list `status`; False if already closed."""
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
                name, status = closer or self.closer, [] if status is None else status
                given = _native.fitting(name, (self._cell[0], *(argument() if callable(argument) else argument for argument in arguments)))
                rest, function = [(argument,) for argument in given[1:]], getattr(_native.library(), name)
                # One step removes the handle from its cell and passes it to C: it is neither lost nor freed twice.
                status.extend(itertools.islice(map(function, iter(self._cell.pop, None), *rest), 1))
            finally:
                self._closed = not self._cell
            if status[0] != TIMEOUT:
                # After a timeout the object is closed, and the system still accesses its memory.
                for container in self._keeps:
                    _kept.release(container)
            _native.check(status[0])
        return True

    def _drain(self, end: float | None) -> None:
        while inside := [thread for lock, thread in list(self._inside.items()) if lock.locked()]:
            if threading.get_ident() in inside:
                raise BusyError(
                    f"cannot close this {self._kind} from inside one of its own calls, by a callback or a signal handler; "
                    "close it after the call has returned"
                )
            if sys.is_finalizing():
                raise BusyError(
                    f"cannot close this {self._kind} at the end of the interpreter: threads that have not ended are inside of its "
                    "calls; close it earlier"
                )
            if end is not None and time.monotonic() >= end:
                raise TimedOutError(
                    f"timed out while closing this {self._kind}: {len(inside)} calls of other threads have not "
                    "returned; it is still open, close it again later"
                )
            time.sleep(POLL_SECONDS)

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise UnsupportedError(
                f"this {self._kind} was opened by process {self._process} and is not usable in its forked "
                f"child {os.getpid()}; open a new one in the child"
            )

    def close(self) -> None:
        """Closes the object after calls of other threads have returned; a second call does nothing."""
        self._end(before=self._before)

    def __enter__(self: _Owner) -> _Owner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, _: Any) -> Any:
        # copy.copy and pickle would make a second owner of the same C object.
        raise TypeError(f"a {self._kind} cannot be copied or pickled; open another one")

    def __del__(self) -> None:
        if self._cell and self._cell[0]:
            self.close()
