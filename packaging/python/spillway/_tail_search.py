"""How many buckets a tail has whose number is "auto": at first by SuperOffload's Eq. 4-5 for measured times, extended to a CPU that is
slower than backward; then by measured exposed seconds. A bucket of torch's offload() is a sub-group of DeepSpeed's SuperOffload."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

#: Steps of which the exposed seconds of a tail are the median.
_STEPS = 3
#: The part of backward, or of the exposed seconds, that a longer tail must save.
_WORTH = 0.05


def first(buckets: int, step: float, backward: float) -> int:
    """The least tail that hides the steps of the others, for `step` seconds of a bucket on the host, its copies included, and `backward`
    seconds of a bucket. The printed condition is that of the last bucket. On a CPU that cannot keep up, buckets queue too."""
    last = step / backward
    queued = buckets - buckets * backward / step + 1 if step > backward else 0.0
    return min(buckets, math.ceil(max(last, queued)))


def is_tail(given: Any) -> bool:
    """True for what a program may ask for: a number of buckets, or "auto"."""
    return given == "auto" or (type(given) is int and given >= 0)


def room(buckets: int, state_bytes: int, kept_bytes: int, unused_bytes: int) -> int:
    """The number of buckets whose states fit in half of the memory of a device that no backward has used.

    Args:
        buckets: Number of buckets.
        state_bytes: Bytes of the states of all of them.
        kept_bytes: Bytes of those that are on the device.
        unused_bytes: Bytes of the device that no backward has used."""
    return int((kept_bytes + unused_bytes / 2) * buckets / state_bytes)


class TailSearch:
    """Finds the shortest tail whose exposed seconds are not worse than those of any other that was tried.

    Attributes:
        tail: The tail of the next steps.
        done: True once no tail is left to try."""

    def __init__(self) -> None:
        self.tail, self.done = 0, False
        self._costs: dict[int, float] = {}
        self._seen: list[float] = []
        self._waited, self._backward = math.inf, 0.0

    def step(self, timed: Any, buckets: int, most: int) -> None:
        """Takes the seconds of a step.

        Args:
            timed: The seconds.
            buckets: Number of buckets.
            most: The longest tail that there is room for."""
        if not timed.overlaps:
            self._waited = min(self._waited, timed.seconds)
            return
        self._seen.append(timed.seconds)
        if len(self._seen) < _STEPS:
            return
        backward = self._backward = timed.backward or self._backward
        self._costs[self.tail], self._seen = statistics.median(self._seen), []
        least = min(self._costs.values())
        worth = _WORTH * max(least, backward)
        best = min(tail for tail, cost in self._costs.items() if cost <= least + worth)
        # If a step is exposed, the host works for backward and the exposed seconds, on the buckets that are not of the tail.
        spent = (backward + self._costs[best]) / max(1, buckets - best)
        step = min(self._waited / buckets, spent)
        longer = best + max(1, int(self._costs[best] / step))
        # Without a backward no step has begun before step().
        if self._costs == {0: least} and backward:
            longer = first(buckets, step, backward / buckets)
        shorter = (best + max((tail for tail in self._costs if tail < best), default=best)) // 2
        tries = [min(longer, most)] if self._costs[best] > worth else []
        self.tail = next((tail for tail in (*tries, shorter) if tail not in self._costs), best)
        self.done = self.tail == best


class AskedTail:
    """A tail that a program has asked for, as `is_tail` has it, and the seconds that it waits for a step, which correct "auto".

    Attributes:
        search: Corrects the tail; None: it is fixed.
        overlaps: The step began during backward.
        backward: Seconds from the moment when its first bucket was on the host to step(); 0 if there is none.
        seconds: What the program has waited."""

    overlaps, backward, seconds = False, 0.0, 0.0

    def __init__(self, asked: int | str):
        self.search = TailSearch() if asked == "auto" else None
        self._fixed, self._is_timed, self._since = asked if isinstance(asked, int) else 0, False, 0.0

    @property
    def buckets(self) -> int:
        """The buckets of the tail at the next step."""
        return self._fixed if self.search is None else self.search.tail

    def start(self, begun: Callable[[], tuple[bool, float | None]]) -> None:
        """The program waits for a step from now on, if its seconds are of use. `begun` returns whether the step began during backward, and
        when its first bucket was on the host; None: all buckets stay on the device."""
        self._is_timed = self.search is not None and not self.search.done
        if self._is_timed:
            self.overlaps, started = begun()
            self.seconds, self._since = 0.0, time.perf_counter()
            self.backward = 0.0 if started is None else self._since - started

    def pause(self) -> None:
        """The program does not wait from now on."""
        if self._since:
            self.seconds, self._since = self.seconds + time.perf_counter() - self._since, 0.0

    def resume(self) -> None:
        """The program waits again."""
        self._since = self._since or time.perf_counter()

    def stop(self, stands: bool, buckets: int, most: Callable[[], int]) -> None:
        """The step is over. `stands`: nothing was repeated or skipped. `buckets`, `most`: as for TailSearch."""
        self.pause()
        if self.search is not None and self._is_timed and stands:
            self.search.step(self, buckets, most())
        self._is_timed = False
