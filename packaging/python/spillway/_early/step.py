"""A step whose buckets may be stepped before its verdict. Its states are in host memory (`MemoryStep`) or on a tier (`TierStep`).

| the step is | what holds | how it goes on |
|---|---|---|
| empty | nothing was submitted | `submit` |
| submitted | buckets are stepped without a verdict | `abandon` rolls them back, or the verdict comes |
| decided | the step will be done | `carry_out`, again after a signal handler that raised |

Before the verdict nothing is final: each error, and each access to the states, takes the steps back, and what is left of the step waits.
After it the step will be done."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

from .round import Round

_Bucket = TypeVar("_Bucket", bound=Hashable)


class EarlyStep(Round[_Bucket]):
    """The present step of an optimizer. A subclass knows where the states are; its own subclass knows whose they are.

    Args:
        arrivals: The gradients that backward has completed since the last step.

    Attributes:
        waits: The program does what no step during backward can follow, as a second backward or a use of the states. From that moment on
            nothing of this step starts, and nothing is noted for it. The next step has another value."""

    def __init__(self, arrivals: Any):
        self.waits, self.arrivals = False, arrivals
        super().__init__()

    # What depends on the place of the states.

    @property
    def is_used(self) -> bool:
        """True if a part of this step has begun, which `abandon` rolls back."""
        return bool(self.submitted)

    def take_back(self) -> None:
        """Rolls back what was stepped without a verdict. If a step has failed after its verdict, waits until the library has ended it."""
        raise NotImplementedError

    def resolve(self) -> None:
        """Gives the library the verdict, unless it has it."""
        raise NotImplementedError

    def final(self) -> Iterable[_Bucket]:
        """The buckets in the order in which they become final, each once `give` of `carry_out` may wait for it."""
        raise NotImplementedError

    def finish(self) -> None:
        """Waits until the memory of all buckets belongs to the caller again."""
        raise NotImplementedError

    # What does not.

    def abandon(self) -> None:
        """Rolls back what was stepped: the states are those before the step. The other buckets wait for step()."""
        if self.is_used:
            # Set first: if a signal handler raises below, step() must not keep what is left of this step.
            self.waits = True
        self.drop()

    def drop(self) -> None:
        """Takes back what was stepped, or ends a step that has failed after its verdict, whose error is raised once."""
        self.forget()
        self.take_back()
        self.begin()

    def carry_out(self, give: Callable[[_Bucket], None]) -> None:
        """Does what the verdict says. `give` gives the model the weights of a bucket."""
        self.resolve()
        for bucket in self.final():
            give(bucket)
        self.finish()

    def next(self) -> None:
        """The next step begins: nothing has arrived."""
        self.begin()
        self.waits = False
        self.arrivals.clear()
