"""State of a tier's put or get, consistent even if a signal handler raised between two steps."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

from ._native_handle import TIMEOUT, record

# Status of a wait for a begun ticket whose outcome another thread is taking at this moment.
ELSEWHERE = 1
# Statuses (deadline exceeded, engine lost) of an ended ticket whose memory the system may still access.
IN_USE = (26, 11)


class Ticket:
    """A put or a get: its memory, the status of the call that began it, and the statuses of the waits that did not time
    out."""

    __slots__ = ("number", "held", "put", "begun", "ended", "generation")

    def __init__(self, held: Any, put: bool, number: int = 0):
        self.number, self.generation = ctypes.c_uint64(number), ctypes.c_uint64()
        self.held, self.put = held, put
        self.begun: list[int] = []
        self.ended: list[int] = []

    def wait(self, handle: Any, milliseconds: float) -> int:
        """Waits in C and returns the status."""
        record(self.ended, "spw_tier_wait", handle, self.number.value, round(milliseconds), ctypes.byref(self.generation))
        status = self.ended[-1]
        for passing in (TIMEOUT, ELSEWHERE) if self.begun else (TIMEOUT,):
            with contextlib.suppress(ValueError):
                while True:
                    self.ended.remove(passing)
        return status

    def outcome(self) -> int | None:
        """The status of a ticket that has ended, else None."""
        passing = (TIMEOUT, ELSEWHERE) if self.begun else (TIMEOUT,)
        return next((status for status in list(self.ended) if status not in passing), None)

    def in_use(self) -> bool:
        """True if the system may access the memory for good: such a status, or a close that could not wait for the
        end."""
        ends: list[int | None] = [*self.begun[:1]] if not self.number.value else [self.outcome()]
        return ends[:1] == [None] or any(status in IN_USE for status in ends)
