"""A step over states in host memory. Buckets are submitted to engines of the library, which step them at once, and get one verdict. If the
early steps of the last two rounds were in vain, the engines only measure a bucket, and step it after the verdict."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

from ..errors import OwnSuppressed
from ..speculate import Speculation
from .step import EarlyStep

_Bucket = TypeVar("_Bucket", bound=Hashable)


class MemoryStep(EarlyStep[_Bucket]):
    """Base of the steps of an optimizer.

    Args:
        arrivals: The gradients that backward has completed since the last step.

    Attributes:
        speculations: The engines.
        is_open: A round of the engines has begun, and the step has not ended.
        verdict: The verdict; None until it is known."""

    speculations: Sequence[Speculation] = ()
    is_open: bool
    verdict: Any

    def __init__(self, arrivals: Any):
        # The status of the library's call with the verdict, of each engine.
        self._given: list[list[int]] = []
        super().__init__(arrivals)

    def begin(self) -> None:
        """Nothing is submitted."""
        super().begin()
        self.is_open, self.verdict = False, None
        self._given.clear()

    @property
    def is_used(self) -> bool:
        """True if a round is open, or gradients have arrived since the last step."""
        return self.is_open or bool(self.arrivals)

    @property
    def is_resolved(self) -> bool:
        """True if an engine has the verdict."""
        return any(status == [0] for status in self._given)

    def check_process(self) -> None:
        """Raises an error in a forked child of the process that has opened the engines."""
        for speculation in self.speculations:
            speculation.handle

    def take_back(self) -> None:
        """As of the base."""
        if not self.is_open:
            return
        for speculation in self.speculations:
            # Out of order if the engine has its verdict, or was not begun.
            with OwnSuppressed():
                speculation.abort()
            with OwnSuppressed():
                speculation.finish()

    def resolve(self) -> None:
        """As of the base."""
        self._given += ([] for _ in self.speculations[len(self._given) :])
        for speculation, status in zip(self.speculations, self._given):
            if status != [0]:
                status.clear()
                self._give_verdict(speculation, status)

    def _give_verdict(self, speculation: Speculation, status: list[int]) -> None:
        """Gives an engine the verdict; `status` receives the status of the library's call."""
        raise NotImplementedError

    def final(self) -> Iterable[_Bucket]:
        """Those that were submitted last first: the engines complete them in this order."""
        return reversed(self.submitted)

    def finish(self) -> None:
        """As of the base."""
        for speculation in self.speculations:
            speculation.finish()

    def began(self) -> float | None:
        """When the first bucket of the open or the last round began, by time.perf_counter(); None if none has begun."""
        return min((began for speculation in self.speculations if (began := speculation._began()) is not None), default=None)

    def close(self) -> None:
        """Closes the engines; an open round is rolled back."""
        super().close()
        for speculation in self.speculations:
            speculation.close()
