"""State of a tier's put or get, consistent even if a signal handler raised between two steps."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

from ._kept import IN_USE
from ._native_handle import TIMEOUT, record

# Status of a wait for a begun ticket whose outcome another thread is taking at this moment.
ELSEWHERE = 1


class Ticket:
    """A put or a get, and the statuses of the waits that did not time out. `own`: its Tier began it."""

    __slots__ = ("number", "put", "own", "ended", "generation")

    def __init__(self, put: bool, own: bool = True, number: int = 0):
        self.number, self.generation = ctypes.c_uint64(number), ctypes.c_uint64()
        self.put, self.own = put, own
        self.ended: list[int] = []

    def wait(self, handle: Any, milliseconds: float) -> int:
        """Waits in C and returns the status."""
        record(self.ended, "spw_tier_wait", handle, self.number.value, round(milliseconds), ctypes.byref(self.generation))
        status = self.ended[-1]
        for passing in self._passing():
            while passing in self.ended:
                # Another thread may remove it at this moment.
                with contextlib.suppress(ValueError):
                    self.ended.remove(passing)
        return status

    def outcome(self) -> int | None:
        """The status of a ticket that has ended, else None."""
        # Another thread may remove a status meanwhile.
        for status in list(self.ended):
            if status not in self._passing():
                return status
        return None

    def _passing(self) -> tuple[int, ...]:
        """The statuses of waits after which the ticket is still in flight."""
        return (TIMEOUT, ELSEWHERE) if self.own else (TIMEOUT,)

    def in_use(self) -> bool:
        """True if the system may access the memory for good: such a status, or a close that could not wait for the
        end."""
        outcome = self.outcome()
        return bool(self.number.value) and (outcome is None or outcome in IN_USE)
