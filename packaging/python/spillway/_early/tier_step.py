"""A step over states on a tier. Subgroups are submitted to an update of the library, which can be taken back.

A step that starts during backward is in vain if the verdict has it repeated, or if the program has it taken back. It costs more than one
that waits. After two in a row steps wait, until one would not have been in vain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .._timeline import span
from ..errors import OwnSuppressed
from ..optim import Adam
from ..swap import SwapUpdate
from ..tiered import Tiered
from .step import EarlyStep

#: The steps in a row that are made in vain before the next ones wait.
_IN_A_ROW = 2


class TierStep(EarlyStep[int]):
    """Base of the steps of an optimizer.

    Args:
        tiered: Returns its open tier.
        arrivals: Its gradients."""

    def __init__(self, tiered: Callable[[], Tiered], arrivals: Any):
        self._tiered, self._in_vain = tiered, 0
        #: The update that has its verdict or gets it, what gives its weights, and the status of its step.
        self._decided: tuple[SwapUpdate, Any, list[int]] | None = None
        super().__init__(arrivals)

    @property
    def steps_early(self) -> bool:
        """True if a subgroup is submitted once its gradients are there."""
        return not self.waits and self._in_vain < _IN_A_ROW

    def judge(self, repeats: bool) -> None:
        """A step has its verdict, which repeats what has started, or would have started. A step that waits because of the program shows
        nothing of that."""
        if not self.waits:
            self._in_vain = self._in_vain + 1 if repeats else 0

    def abandon(self) -> None:
        """As of the base. What was stepped was in vain."""
        self._in_vain += bool(self.submitted)
        super().abandon()

    def fetch(self) -> SwapUpdate:
        """The open update, or a new one. The library fetches its subgroups, and every part that is submitted has options of its own."""
        swap = self._tiered().swap
        update = swap._update
        if update is not None and update._is_open():
            return update
        return swap.begin(Adam(lr=0.0), speculative=True, restore=False)

    def submit(self, bucket: int, events: Sequence[Any], send: Callable[..., Any], *arguments: Any) -> None:
        """Submits a subgroup, as of the base."""
        with span("tier.submit", bucket):
            super().submit(bucket, events, send, *arguments)

    def take_back(self) -> None:
        """As of the base."""
        self._decided = None
        update = self._tiered().swap._update
        if update is not None and update._is_open():
            if update._verdict is None:
                update.verdict("skip")
            update.finish()

    def conclude(self, factor: float | None, weights: Any, status: list[int]) -> None:
        """Makes a step final whose subgroups were all submitted, and waits for its end.

        Args:
            factor: The factor of the gradients with which all are repeated; None: what was stepped is kept.
            weights: Its give(subgroup) gives the model the weights of a subgroup once they are final, and its give_all() ends that.
            status: Receives the status of the step."""
        update = self.fetch()
        self._decided = update, weights, status
        update.verdict("commit") if factor is None else update.verdict("redo", factor)
        self.complete()

    def complete(self) -> None:
        """Ends a step that has its verdict. What is left of backward waits."""
        if self._decided is None or self._decided[0]._verdict is None:
            return
        update, weights, status = self._decided
        if update._is_open():
            self.carry_out(weights.give)
        if update._ended == 0:
            weights.give_all()
        if not status and update._ended is not None:
            status.append(update._ended)
        self.begin()
        self.waits = True
        self._decided = None

    def resolve(self) -> None:
        """Nothing is left: `conclude` has given the verdict."""

    def final(self) -> Iterable[int]:
        """As of the base."""
        assert self._decided is not None
        # finish() ends a step that has failed, and raises its error.
        with OwnSuppressed():
            for subgroup in self._decided[0].published():
                with span("tier.publish", subgroup):
                    yield subgroup

    def finish(self) -> None:
        """As of the base."""
        assert self._decided is not None
        with span("tier.finish"):
            self._decided[0].finish()
