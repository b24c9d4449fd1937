"""Host memory through which chunks move to and from a tier.

A buffer is free, or a get fills it, or the flow has it, or a put reads it. It is used again after the put has ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

import torch

from ...errors import SpillwayError
from ...tier import Tier
from .lane import host_memory

#: Buffers that are kept: of the chunk that comes, the one that is stepped, and two that leave.
_MOST = 4


class Buffers:
    """Buffers of one size, that of the largest chunk so far.

    Args:
        tier: Returns the tier.

    Attributes:
        bytes: Those of all buffers."""

    def __init__(self, tier: Callable[[], Tier]):
        self._tier, self.bytes, self._largest = tier, 0, 0
        self._free: list[torch.Tensor] = []
        #: Puts in flight: the ticket, and the buffer.
        self._busy: deque[tuple[int, torch.Tensor]] = deque()

    def take(self, size: int, param: torch.Tensor) -> torch.Tensor:
        """A buffer of at least this size, for copies to and from the device of a parameter: a free one, one whose put has ended, or a new
        one."""
        self._largest = max(self._largest, size)
        while True:
            for number, buffer in enumerate(self._free):
                if len(buffer) >= size:
                    return self._free.pop(number)
            # Those that are free are too small.
            self.bytes -= sum(map(len, self._free))
            self._free = []
            if not self._busy or self.bytes + self._largest <= _MOST * self._largest:
                self.bytes += self._largest
                return host_memory(self._largest, param)
            self._end_put()

    def give(self, buffer: torch.Tensor) -> None:
        """A buffer is free."""
        self._free.append(buffer)

    def leave(self, ticket: int, buffer: torch.Tensor) -> None:
        """A put that has begun reads a buffer."""
        self._busy.append((ticket, buffer))

    def lose(self, buffer: torch.Tensor) -> None:
        """The library may still write to a buffer, whose get has failed."""
        self.bytes -= len(buffer)

    def end_until(self, ticket: int) -> None:
        """Waits for a put, and for those before it. One that has ended before is no error."""
        while any(ticket == own for own, _ in self._busy):
            self._end_put()

    def end_all(self) -> None:
        """Waits for all puts."""
        while self._busy:
            self._end_put()

    def _end_put(self) -> None:
        """Waits for the oldest put."""
        ticket, buffer = self._busy[0]
        try:
            self._tier().wait(ticket)
        except Exception:
            self.bytes -= len(buffer)
            self._busy.popleft()
            raise
        # In this order: after an interrupt in between the put is waited for again.
        self._busy.popleft()
        self._free.append(buffer)

    def forget(self) -> None:
        """Ends all puts without their errors. Nobody uses a buffer any more."""
        while self._busy:
            with suppress(SpillwayError):
                self._end_put()
        self._free, self.bytes = [], 0

    def close(self) -> None:
        """The tier is closed, and has ended all transfers."""
        self._free, self.bytes = [], 0
        self._busy.clear()
