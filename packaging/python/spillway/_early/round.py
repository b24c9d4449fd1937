"""The buckets of a step that were submitted before its verdict. A bucket whose gradients are being copied from a device is submitted by a
thread, after the copy, so that the program does not wait for the device. Where the library waits for the device, see gpu_events.py, there
is no thread.

A signal handler of the program may raise between any two bytecodes of a method here.

Invariant: a call is in the queue before it is among those that are waited for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from ..errors import UnsupportedError
from .worker import Flag, Worker

_Bucket = TypeVar("_Bucket", bound=Hashable)


class _Call:
    """One call, its events, and its error."""

    def __init__(self, events: Sequence[Any], function: Callable[..., Any], arguments: Sequence[Any]):
        self._events, self._function, self._arguments = events, function, arguments
        self.error: BaseException | None = None
        self.over = Flag()

    def run(self) -> None:
        """Waits for the events, and makes the call. Its error is kept: `is_own` would take frames of another thread for the program's."""
        try:
            for event in self._events:
                event.synchronize()
            self._function(*self._arguments)
        except BaseException as error:
            self.error = error
        finally:
            self._events, self._arguments = (), ()
            self.over.set()


def _serve(calls: SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        call.run()
        # A thread that waits for the next call keeps nothing of this one.
        del call


class Round(Generic[_Bucket]):
    """The submissions of a round, in their order. The thread begins with the first one that has events. From then on to `wait` or `forget`
    it alone uses what steps the buckets.

    Attributes:
        submitted: The buckets, each with a note of the caller."""

    def __init__(self) -> None:
        self._worker: Worker[_Call] | None = None
        self._begun: list[_Call] = []
        # True from the begin of a forget() to its end, which a signal handler may keep it from.
        self._ending = False
        self.begin()

    def begin(self) -> None:
        """Begins the next round."""
        self.submitted: dict[_Bucket, Any] = {}

    def submit(self, bucket: _Bucket, events: Sequence[Any], send: Callable[..., Any], *arguments: Any) -> None:
        """Calls `send`, which submits a bucket or a portion of it, after `synchronize()` of each event has returned; without events at
        once, after the earlier calls."""
        self.submitted[bucket] = None
        if not events:
            self.wait()
            send(*arguments)
            return
        if self._ending:
            self.forget()
        if self._worker is None:
            self._worker = Worker(_serve)
        call = _Call(events, send, arguments)
        self._worker.calls.put(call)
        self._begun.append(call)

    def is_over(self, within: float) -> bool:
        """True if all calls are over. Waits for that, and no longer than `within` seconds."""
        self._check_process()
        return not self._begun or self._begun[-1].over.wait_for(within)

    def wait(self) -> None:
        """Waits for all calls; raises the error of the first that failed, as if it had failed here."""
        self._check_process()
        while self._begun:
            self._begun[0].over.wait()
            error = self._begun[0].error
            if error is not None:
                try:
                    raise error
                finally:
                    # Its frames refer to this one.
                    del error
            del self._begun[0]

    def _check_process(self) -> None:
        if self._begun and self._worker is not None and self._worker.is_parents:
            raise UnsupportedError("a step that another process has begun does not end in its forked child; make an optimizer in the child")

    def forget(self) -> None:
        """Waits for all calls, also for one whose `submit` a signal handler has ended; an error of one is that of what does not happen."""
        if self._worker is not None:
            self._ending = True
            self._worker.end()
            self._worker = None
        self._begun.clear()
        self._ending = False

    def close(self) -> None:
        """Ends the thread, after its calls."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def __del__(self) -> None:
        # Without a wait: the garbage collector may run anywhere.
        if (worker := getattr(self, "_worker", None)) is not None:
            worker.calls.put(None)
