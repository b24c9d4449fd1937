"""What an operation of many bytes tells while it runs: a callback of the program, or a line on a terminal after two seconds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType

#: Called with the bytes that were moved, and those that will be.
Told = Callable[[int, int], object]
#: Seconds before the first line, and between two.
_FIRST, _NEXT = 2.0, 0.2


#: Seconds between two looks at an operation that a thread of the library does.
LOOK = 0.2


class Progress:
    """The progress of one operation, as a context.

    Args:
        what: What it does, such as "filling the tier".
        total: Its bytes.
        told: The program's callback. None: a line on standard error, if that is a terminal and this the first process of a machine."""

    def __init__(self, what: str, total: int, told: Told | None = None):
        self._what, self._total, self._told, self._done = what, total, told, 0
        # Python has no standard error if its descriptor was closed before it began.
        self._shows = told is None and sys.stderr is not None and sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0"
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
