"""Calls that wait for events of a device in a thread, so that the program does not wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class AfterEvents:
    """Runs calls in their order, each after its events. Its thread begins with the first call that has events."""

    def __init__(self, name: str):
        self._name = name
        self._thread: ThreadPoolExecutor | None = None
        self._begun: list[Future[BaseException | None]] = []
        # True from the begin of a forget() to its end, which a signal handler may keep it from.
        self._ending = False

    def call(self, events: Sequence[Any], function: Callable[..., Any], *arguments: Any) -> None:
        """Calls a function after `synchronize()` of each event has returned; without events at once, after the earlier calls."""
        if not events:
            self.wait()
            function(*arguments)
            return
        if self._ending:
            self.forget()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, self._name)
        self._begun.append(self._thread.submit(_after, events, function, arguments))

    def wait(self) -> None:
        """Waits for all calls; raises the error of the first that failed, as if it had failed here."""
        while self._begun:
            error = self._begun[0].result()
            if error is not None:
                try:
                    raise error
                finally:
                    # The frames of the error refer to this frame.
                    del error
            del self._begun[0]

    def forget(self) -> None:
        """Waits for all calls, also for one whose `call` a signal handler has ended; an error of one is that of what does not happen."""
        if self._thread is not None:
            self._ending = True
            # Not by one more call: the garbage collector may have ended the thread, and shutdown() returns then too.
            self._thread.shutdown()
            self._thread = None
        self._begun.clear()
        self._ending = False

    def close(self) -> None:
        """Ends the thread."""
        if self._thread is not None:
            self._thread.shutdown()


def _after(events: Sequence[Any], function: Callable[..., Any], arguments: Sequence[Any]) -> BaseException | None:
    # Not raised through the executor: `is_own` would take its frames for those of the program.
    try:
        for event in events:
            event.synchronize()
        function(*arguments)
    except BaseException as error:
        return error
    return None
