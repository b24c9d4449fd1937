"""The puts and gets of a tier: from the call that begins one to its outcome.

Invariants:
- Memory of a put or get is kept until it has ended, also if a signal handler raises between any two steps.
- A caller that has a ticket gets its outcome once: from its own wait, or from a commit that has collected it.
- A put or get whose ticket was lost ends before the next one begins.
- A commit raises the error of a put that failed before it, until the caller has seen it or rolled back."""

from __future__ import annotations

import copy
import ctypes
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from . import _arguments, _arrays, _kept, _native
from ._native_handle import POLL_SECONDS, SLICE_MS, TIMEOUT, _NativeHandle
from ._ticket import ELSEWHERE, Ticket
from .errors import SpillwayError, TimedOutError, from_status

# Beyond _MOST_IN_FLIGHT tickets in flight, a put releases finished puts; the last _MOST_ENDED outcomes are kept.
_MOST_IN_FLIGHT, _MOST_ENDED = 256, 4096


class TransferHandle(_NativeHandle):
    """A handle with puts and gets in flight. Threads, and signal handlers between any two bytecodes, may use it at once."""

    def _begin_transfers(self) -> None:
        """Call before the handle is opened, which keeps `_in_flight`."""
        self._in_flight = _kept.Submitted()
        self._by_number: dict[int, Ticket] = {}
        #: Puts and gets that were begun, and whose ticket the caller does not have: each until _begin returns it.
        self._unclaimed: dict[Ticket, None] = {}
        #: Of puts that a commit has collected the versions that they have written, and the errors.
        self._ended: dict[int, int] = {}
        self._failed: dict[int, SpillwayError] = {}

    def _begin(self, put: bool, function: str, extent: int, arrays: Sequence[Any], streams: Any, *arguments: Any) -> int:
        if len(self._in_flight) > _MOST_IN_FLIGHT:
            for entry in self._in_flight.tokens()[: _MOST_IN_FLIGHT // 4]:
                if entry.put:
                    self._reap(entry)
        self._end_lost()
        entry = Ticket(put)

        def begin(outcome: list[int]) -> None:
            self._unclaimed[entry] = None
            self._recorded(outcome, function, extent, streams, *arguments, ctypes.byref(entry.number))

        try:
            self._in_flight.submit([_arrays.held(array) for array in arrays], begin, entry)
            self._by_number[entry.number.value] = entry
            if entry not in self._in_flight:
                # A commit in another thread has already released the entry.
                self._by_number.pop(entry.number.value, None)
            # No call follows, in which a signal handler could raise: from here on the caller has the ticket.
            del self._unclaimed[entry]
        except BaseException:
            entry.lost = True
            raise
        return entry.number.value

    def _end_lost(self) -> None:
        """Waits for the puts and gets whose ticket was lost: a signal handler raised before the caller had it. Without this wait their
        extents would be busy, and a get could still write to an array that the caller uses again."""
        for entry in list(self._unclaimed):
            # Not lost: another thread, or what this signal handler interrupts, is inside of _begin, and gets the ticket later.
            if not entry.lost:
                continue
            self._in_flight.end_refused(entry)
            if entry in self._in_flight and entry.number.value:
                # A commit fails if the extent of a put that failed is not put again.
                with suppress(SpillwayError):
                    self._outcome(entry.number.value, None)
            self._unclaimed.pop(entry, None)

    def _outcome(self, ticket: int, timeout: float | None) -> int:
        """Waits for a put or a get, and returns the version; see Tier.wait()."""
        entry, end = self._by_number.get(ticket), end_of(timeout)
        if entry is None and (generation := self._outcome_of(ticket)) is not None:
            return generation
        # A put or get that a signal handler interrupted may be in _in_flight but not yet in _by_number.
        entry = (
            entry
            or next((other for other in self._in_flight.tokens() if other.number.value == ticket), None)
            or Ticket(False, False, ticket)
        )
        while entry.outcome() is None:
            left = None if end is None else seconds_left(end) * 1000
            slice_ms: float = SLICE_MS if left is None else min(SLICE_MS, left)
            status = self._through(lambda handle: entry.wait(handle, slice_ms))
            if status == TIMEOUT and slice_ms == left:
                _native.check(status)
            elif entry.own and status == ELSEWHERE and entry.outcome() is None:
                # Another thread has taken the outcome, and records it as soon as it runs.
                if left == 0:
                    raise TimedOutError(f"timed out: another thread is waiting for ticket {ticket}; let one thread wait for it")
                time.sleep(POLL_SECONDS)
            elif status and status == entry.outcome():
                try:
                    _native.check(status)
                finally:
                    self._release(entry)
        self._release(entry)
        if outcome := entry.outcome():
            raise from_status(
                outcome,
                f"ticket {ticket} failed, and a signal handler interrupted the wait that had its message; the status names the cause",
            )
        return entry.generation.value

    def _transfer(self, tickets: Iterable[int]) -> None:
        """Waits for puts and gets, which the iterable begins. None of this tier is in flight afterwards, also after an error."""
        # An interrupt may have ended this function before.
        self._through(lambda handle: self._await_tickets(handle, None))
        try:
            for ticket in list(tickets):
                self._outcome(ticket, None)
        except BaseException:
            self._through(lambda handle: self._await_tickets(handle, None))
            raise

    def _puts_end(self) -> Callable[[], None]:
        """What to call after a commit that begins now: all earlier puts have ended then, and their arrays are free. Raises the error of a
        put that failed."""
        before = [entry for entry in self._in_flight.tokens() if entry.put]
        for entry in before:
            if entry.outcome():
                self._reap(entry)
        for failed in list(self._failed.values()):
            # A copy, because a raised error refers to this tier by its traceback, and the tier to the error.
            raise copy.copy(failed)

        def ended() -> None:
            for entry in before:
                self._reap(entry)

        return ended

    def _forget_failures(self) -> None:
        """After a rollback puts that failed are no part of the next commit."""
        self._failed.clear()

    def _await_tickets(self, handle: Any, end: float | None) -> None:
        """Waits for the tickets in flight: only a ticket's own status shows whether its memory is free. A failed put is
        ignored: everything not committed is lost, or put again."""
        for entry in self._in_flight.tokens():
            if (
                entry.number.value
                and entry.outcome() is None
                and entry.wait(handle, _arguments.milliseconds(None if end is None else seconds_left(end))) == TIMEOUT
            ):
                raise TimedOutError(
                    f"timed out while closing this Tier: {len(self._in_flight)} puts and gets are in flight; it is still open, "
                    "close it again later"
                )
            self._release(entry)

    def _reap(self, entry: Ticket) -> None:
        """Releases a put that has ended, and records its outcome."""
        if not entry.number.value:
            return
        if entry.outcome() is None:
            self._through(lambda handle: entry.wait(handle, 0))
        status = entry.outcome()
        if status is None:
            return
        try:
            _native.check(status)
        except SpillwayError as error:
            # The next commit would silently lack this put, so `committing` raises the error.
            self._failed[entry.number.value] = error.with_traceback(None)
        self._ended[entry.number.value] = entry.generation.value
        if len(self._ended) > _MOST_ENDED:
            # Several threads may do so at once.
            for oldest in list(self._ended)[: _MOST_ENDED // 4]:
                self._ended.pop(oldest, None)
        self._release(entry)

    def _outcome_of(self, ticket: int) -> int | None:
        """The version that a put has written that a commit has collected; None: there is no such put, or another thread has taken it."""
        generation = self._ended.pop(ticket, None)
        failed = None if generation is None else self._failed.pop(ticket, None)
        if failed is not None:
            # A copy, as for a commit.
            raise copy.copy(failed)
        return generation

    def _release(self, entry: Ticket) -> None:
        # In this order: after an interrupt in between the entry is still in _in_flight, where it is found again.
        self._by_number.pop(entry.number.value, None)
        (self._in_flight.lose if entry.in_use() else self._in_flight.over)([entry])


def end_of(timeout: float | None) -> float | None:
    """The moment at which a timeout in seconds is over; None: never."""
    seconds = _arguments.seconds(timeout)
    return None if seconds is None else time.monotonic() + seconds


def seconds_left(end: float) -> float:
    """The seconds until a moment, at least 0."""
    return max(0.0, end - time.monotonic())
