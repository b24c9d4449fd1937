"""A thread that serves a queue in its order, and flags that threads wait for.

A signal handler of the program may raise between any two bytecodes of a method here. ThreadPoolExecutor has locks of Python, which such a
handler can leave locked for good. Here the queue is one of C, and a wait for a lock looks again and again at what the lock stands for.

Invariant: `Flag.is_set` is True before its lock is released."""

from __future__ import annotations

import _thread
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

#: Seconds after which a wait looks again.
_LOOK = 0.1
_Item = TypeVar("_Item")


class Flag:
    """Tells a waiting thread that something is over."""

    def __init__(self) -> None:
        self.is_set = False
        self._lock = _thread.allocate_lock()
        self._lock.acquire()

    def set(self) -> None:
        """Ends the waits. Called once."""
        self.is_set = True
        self._lock.release()

    def wait(self) -> None:
        """Waits until it is set."""
        while not self.wait_for(_LOOK):
            pass

    def wait_for(self, seconds: float) -> bool:
        """Waits until it is set, and no longer than `seconds`; True if it is set."""
        if not self.is_set and self._lock.acquire(timeout=seconds):
            self._lock.release()
        return self.is_set


class Worker(Generic[_Item]):
    """A thread for the items of a queue.

    Args:
        serve: What the thread calls with the queue. It returns after it has taken None from it.

    Attributes:
        calls: The queue."""

    def __init__(self, serve: Callable[[SimpleQueue[_Item | None]], object]) -> None:
        self.calls: SimpleQueue[_Item | None] = SimpleQueue()
        self._ended, self._process, self._ends = Flag(), os.getpid(), False
        _thread.start_new_thread(_run, (serve, self.calls, self._ended))
        _workers.add(self)

    @property
    def is_parents(self) -> bool:
        """True in a forked child, which waits for nothing of this thread."""
        return self._process != os.getpid()

    @property
    def serves(self) -> bool:
        """False in a forked child, which has no such thread, and once the thread ends."""
        return not self.is_parents and not self._ends

    def end(self) -> None:
        """Ends the thread after its items. In a forked child it does nothing."""
        if not self.is_parents:
            self._ends = True
            self.calls.put(None)
            self._ended.wait()


def _run(serve: Callable[[Any], object], calls: Any, ended: Flag) -> None:
    try:
        serve(calls)
    finally:
        ended.set()


_workers: weakref.WeakSet[Worker[Any]] = weakref.WeakSet()


def _end_all() -> None:
    for worker in [*_workers]:
        worker.end()


# As ThreadPoolExecutor does it: before anything that an item uses is closed.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]
