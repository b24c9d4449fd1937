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
    """A put or a get, and the statuses of its waits, each in a list of its own. `own`: its Tier began it. `lost`: the call that began it
    has raised, so its caller has no ticket to wait for."""

    __slots__ = ("number", "put", "own", "waits", "generation", "lost")

    def __init__(self, put: bool, own: bool = True, number: int = 0):
        self.number, self.generation = ctypes.c_uint64(number), ctypes.c_uint64()
        self.put, self.own, self.lost = put, own, False
        self.waits: list[list[int]] = []

    def wait(self, handle: Any, milliseconds: float) -> int:
        """Waits in C and returns the status."""
        # Other threads may wait too: each takes its own status.
        own: list[int] = []
        self.waits.append(own)
        record(own, "spw_tier_wait", handle, self.number.value, round(milliseconds), ctypes.byref(self.generation))
        if own[0] in self._passing():
            # Lists are compared by their statuses, so this one may take that of another thread out, which takes out this one.
            with contextlib.suppress(ValueError):
                self.waits.remove(own)
        return own[0]

    def outcome(self) -> int | None:
        """The status of a ticket that has ended, else None."""
        passing = self._passing()
        return next((status for own in list(self.waits) for status in own if status not in passing), None)

    def _passing(self) -> tuple[int, ...]:
        """The statuses of waits after which the ticket is still in flight."""
        return (TIMEOUT, ELSEWHERE) if self.own else (TIMEOUT,)

    def in_use(self) -> bool:
        """True if the system may access the memory for good: such a status, or a close that could not wait for the
        end."""
        outcome = self.outcome()
        return bool(self.number.value) and (outcome is None or outcome in IN_USE)
