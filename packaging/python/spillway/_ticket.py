"""What a tier knows of a put or a get: known even if a signal handler raised between two steps."""

import contextlib
import ctypes

from . import _native
from ._held import record

TIMEOUT = 23
# To a wait for a ticket that was given: the call of another thread takes the outcome at this moment.
ELSEWHERE = 1
# A deadline that passed, an engine that is lost: the ticket is done with, and the system may still have its memory.
IN_USE = (26, 11)


class Ticket:
    """A put or a get: its memory, the status of the call that began it, and of the waits that did not run out of time."""

    __slots__ = ("number", "held", "put", "begun", "ended", "generation")

    def __init__(self, held, put, number=0):
        self.number, self.generation = ctypes.c_uint64(number), ctypes.c_uint64()
        self.held, self.put, self.begun, self.ended = held, put, [], []

    def wait(self, handle, milliseconds):
        """Waits in C; the status."""
        record(self.ended, _native.library().spw_tier_wait, handle, self.number.value, round(milliseconds),
               ctypes.byref(self.generation))
        status = self.ended[-1]
        for passing in (TIMEOUT, ELSEWHERE) if self.begun else (TIMEOUT,):
            with contextlib.suppress(ValueError):
                while True:
                    self.ended.remove(passing)
        return status

    def outcome(self):
        """The status of a ticket that is over, else None."""
        passing = (TIMEOUT, ELSEWHERE) if self.begun else (TIMEOUT,)
        return next((status for status in list(self.ended) if status not in passing), None)

    def in_use(self):
        """Whether the system may have the memory for good: the ticket ended so, or a close could not wait for its end."""
        ends = self.begun[:1] if not self.number.value else [self.outcome()]
        return ends[:1] == [None] or any(status in IN_USE for status in ends)
