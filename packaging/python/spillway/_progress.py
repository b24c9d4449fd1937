"""What an operation of many bytes tells while it runs: a callback of the program, or a line on a terminal after two seconds."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TypeVar

#: Called with the bytes that were moved, and those that will be.
Told = Callable[[int, int], object]
_Item = TypeVar("_Item")
#: Seconds before the first line, and between two.
_FIRST, _NEXT = 2.0, 0.2


#: Seconds between two looks at an operation that a thread of the library does.
LOOK = 0.2


def shows() -> bool:
    """True if standard error is a terminal, and this the first process of a machine."""
    # Python has no standard error if its descriptor was closed before it began.
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0"


class Progress:
    """The progress of one operation, as a context.

    Args:
        what: What it does, such as "filling the tier".
        total: Its bytes.
        told: The program's callback. None: a line on standard error, if that is a terminal and this the first process of a machine."""

    def __init__(self, what: str, total: int, told: Told | None = None):
        self._what, self._total, self._told, self._done = what, total, told, 0
        self._shows = told is None and shows()
        self._next, self._shown = time.monotonic() + _FIRST, False

    def moved(self, size: int) -> None:
        """Adds bytes that were moved. Raises what the program's callback raises."""
        self.reached(self._done + size)

    def reached(self, done: int) -> None:
        """All bytes that were moved. Raises what the program's callback raises."""
        self._done = done
        if self._told is not None:
            self._told(self._done, self._total)
        elif self._shows and time.monotonic() >= self._next:
            self._next, self._shown = time.monotonic() + _NEXT, True
            self._write(f"\r\033[Kspillway: {self._what}: {self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._shown:
            self._write("\r\033[K")

    def _write(self, text: str) -> None:
        try:
            print(text, end="", file=sys.stderr, flush=True)
        except (OSError, ValueError):
            # A terminal that has gone is no reason to end the operation.
            self._shows = self._shown = False


def each(what: str, items: Sequence[_Item], size: Callable[[_Item], int]) -> Iterator[_Item]:
    """The items, of each of which the caller moves `size(item)` bytes. A terminal shows the progress of `what`."""
    with Progress(what, sum(map(size, items))) as progress:
        for item in items:
            moved = size(item)
            yield item
            progress.moved(moved)


class Watched:
    """The progress of one call of the library that tells none: a thread looks at it meanwhile. A context around the call. The thread calls
    the program's callback; what this raises is raised after the call.

    Args:
        what: As of Progress.
        total: Returns the bytes of the call, 0 if they are unknown. It may wait for a file system.
        done: Returns the bytes that have been moved. If it raises, nothing more is told.
        told: As of Progress."""

    def __init__(self, what: str, total: Callable[[], int], done: Callable[[], int], told: Told | None = None):
        self._what, self._total, self._done, self._told = what, total, done, told
        self._over, self._telling = threading.Event(), threading.Lock()
        self._raised: BaseException | None = None

    def __enter__(self) -> Watched:
        if self._told is not None or shows():
            threading.Thread(target=self._watch, args=(self._done(),), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        with self._telling:
            # The thread tells nothing from here on. It may still wait for a file system, which this does not.
            raised = self._raised
        if kind is not None:
            return
        if raised is not None:
            raise raised
        if self._told is not None and (total := self._total()):
            self._told(total, total)

    def _watch(self, before: int) -> None:
        total = self._total()
        with self._telling, Progress(self._what, total, self._told) as shown:
            try:
                while total and not self._over.wait(LOOK):
                    shown.reached(min(self._done() - before, total))
            except BaseException as error:
                self._raised = error
