"""An optimizer whose masters and states are in host memory, for parameters on any device. Its steps start during backward.

Order of a step, with overlap:

1. Hooks copy the gradients of a bucket to the host as backward completes its last one. The bucket is stepped at once, speculatively.
2. step() checks that nothing has changed since: options, gradients, weights. Otherwise it rolls back what was stepped, and steps all now.
3. The norm of all gradients is known when the last bucket is measured. It confirms the steps, or rolls them back and repeats them clipped.
4. Each bucket's new weights return to the parameters as it becomes final.

A step without overlap is the same step, whose buckets start in step(). Both have the same bits.

With verdict="forward", step() ends after 2, and the next forward of the model begins with 3 and 4. The norm is measured by the pass that
steps a bucket, so that the verdict is known as soon as there are weights to begin a forward with: no forward is a guess.

The buckets of a tail are not copied to the host: they are measured in step(), and stepped on their device with 4.

Of a DTensor, each process steps its part. The norm is that of all processes, which _norm.py sums up and in which a part counts once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ..._timeline import span
from ...errors import InvalidArgumentError, OutOfOrderError, SpillwayError, UnsupportedError, is_own
from .. import _norm
from .._low_bits import Aside, put_back
from .._optimizer import scaler_of
from .._tensors import averages_later, is_trained, local, without_gradients
from .parameters import Parameters
from .plan import Plan
from .prepared import Prepared
from .slot import Slot
from .tail import apart_in_bits, room


class OffloadSteps(Parameters):
    """Base of the optimizer: its steps. The subclass sets the attributes."""

    _bucket_bytes: int
    _grad_norm: float | None
    _skipped: bool
    _plan: Plan | None
    _arrivals: Iterator[int]
    #: Whether steps overlap, and the bytes for their logs, of the last step.
    _logs: tuple[bool | None, float]
    #: The program accumulates gradients, and the last factor of a GradScaler.
    _accumulates: bool
    _scale: float
    #: Waits for the verdict of a step that has returned; None: there is none.
    _verdict_due: Callable[[], Any] | None
    _next: Any
    #: Low bits that were settled since the last step.
    _aside: dict[torch.Tensor, Aside]

    # During backward.

    def _arrived(self, param: torch.Tensor) -> None:
        """Called when backward has completed a parameter's gradient."""
        slot, plan = self._slots[param], self._plan
        slot.arrived = next(self._arrivals)
        if self._verdict_due is not None or (plan is not None and plan.verdict is not None):
            raise self._late(slot)
        # The first step has no plan yet: it makes states for the parameters that have gradients. That of another tail is made by step().
        if plan is None or plan.tail != self._tail.buckets or self._accumulates or plan.waits:
            return
        if not self._overlaps(slot) or averages_later(slot.param):
            return
        try:
            self._start(slot, plan)
        except BaseException as error:
            self._interrupt()
            # Backward continues after an error of the package, which step() raises if it is still there. It would not raise that of a
            # signal handler.
            if not is_own(error):
                raise

    def _late(self, slot: Slot) -> OutOfOrderError:
        """The forward of this backward did not have the weights of the last step. To give them to it now is too late."""
        if self._verdict_due is not None:
            why = "no forward or other use of the model has completed the last step"
            cure = "Call it before code that runs no forward of a module, such as a traced or exported model or a captured graph"
        else:
            why, cure = "an exception has interrupted the last step after its verdict", "Call it after the exception"
        return OutOfOrderError(
            f"offload: {slot.name} gets a gradient of a forward with old weights: {why}. {cure}: optimizer.settle(). Then repeat forward "
            "and backward"
        )

    def _start(self, slot: Slot, plan: Plan) -> None:
        bucket = plan.bucket_of(slot)
        if bucket is not None and bucket.stays:
            return
        # Not if this is another backward, while the first one's gradients are in use.
        if bucket is None or bucket.is_taken or slot in plan.arrivals:
            return self._interrupt()
        is_complete = bool(plan.arrivals.note([slot]))
        # A backward may compute the gradients of one bucket on several streams.
        slot.link.follow()
        if not is_complete:
            return
        if not bucket.is_as_stepped(self._states):
            return self._interrupt()
        with span("offload.take", bucket.number):
            bucket.take(marked=True)
        if not plan.is_open:
            # The lanes are those of the groups of the last step.
            if plan.prepared is None or not plan.prepared.has_groups(self.param_groups):
                return self._interrupt()
            numbers = self._numbers(plan.slots, plan.prepared.counts)
            if not plan.keeps_lanes(numbers):
                return self._interrupt()
            plan.open(numbers, self._all_options(plan, numbers, self._scale), self._limit)
        plan.start(bucket, early=True)

    def _interrupt(self) -> None:
        """Rolls back what was stepped since the last step; the next step does not overlap."""
        self._complete()
        if self._plan is not None and self._plan.is_used:
            self._plan.abandon()

    # The step.

    def _step(self) -> None:
        # The processes that wait for this one's norm.
        others = self._others()
        # A verdict in the next forward is that of the options of now.
        measures, skips = self._measures, self.skip_nonfinite
        try:
            try:
                self._complete()
                self._tail.start(self._begun)
                scale, found_inf = scaler_of(self)
                if not found_inf:
                    self._submit(scale, others)
                # Whom no other process waits for can measure later.
                here = None if found_inf or (self._next is not None and others is None) else self._measure(measures)
            except Exception:
                _norm.tell_refusal(others)
                raise
            if found_inf:
                _norm.tell_found_inf(others)
                self._interrupt()
                self._skipped, self._grad_norm = True, math.inf
                return
            reduced = None if here is None else _norm.reducing(here, others, "offload")
            decide = partial(self._decide, reduced, measures, skips)
            if self._next is not None:
                self._await(self._next, decide)
            else:
                decide()
                self._complete(at_once=True)
        except BaseException:
            # With its verdict the step happens, because a forward may follow; without one it does not.
            if self._verdict_due is None:
                self._interrupt()
            raise

    def _await(self, following: Any, decide: Callable[[], Any]) -> None:
        """Leaves the rest of the step to the next forward."""
        if self._plan is not None and self._plan.is_open:
            self._plan.release()
        following.expect()
        self._tail.pause()
        self._verdict_due = decide

    def _submit(self, scale: float, others: Any) -> None:
        """Has all buckets stepped."""
        if self._aside:
            self._put_back()
        plan = self._plan
        prepared = plan.prepared if plan is not None else None
        if plan is not None:
            plan.check_process()
        is_prepared = prepared is not None and prepared.holds(self.param_groups, self._states)
        live = plan.slots if plan is not None and is_prepared else self._live()
        numbers = prepared.numbers() if prepared is not None and is_prepared else None
        if not live:
            return self._interrupt()
        if plan is not None and plan.is_open:
            if plan.waits or scale != self._scale or not self._stands(plan, live, others, numbers):
                changed = plan.edited()
                plan.abandon()
                if changed is not None:
                    raise InvalidArgumentError(
                        f"offload: the moments of {changed.name} were written between backward and step(), through tensors that were "
                        "fetched before, and may hold a step that was rolled back; load a state dict, and read optimizer.state after "
                        "backward"
                    )
        if not is_prepared:
            self._check_fits()
            self._use_states(live)
        numbers = self._numbers(live) if numbers is None else numbers
        if not is_prepared or self._logs[0] is not self.overlap:
            self._logs = self.overlap, self._log_bytes(live)
        log_bytes = self._logs[1]
        if plan is None or not plan.is_of(live, numbers, others, self.tail, log_bytes):
            parts, before = self._parts(), plan

            def counts(slot: Slot) -> bool:
                return parts is None or parts.count(slot.param, slot.name)

            plan = self._plan = Plan(live, numbers, counts, others, self._bucket_bytes, self.tail, log_bytes)
            if before is not None:
                before.close()
            # The states of the tail go to its device.
            self._use_states(live)
            is_prepared = False
        if not is_prepared:
            plan.prepared = Prepared(self.param_groups, live, plan.buckets, self._states)
        for bucket in plan.buckets:
            # `stands` has compared the gradients of submitted buckets.
            if not bucket.submitted and not bucket.is_current():
                with span("offload.take", bucket.number):
                    bucket.take(marked=False)
        if not plan.is_open:
            plan.open(numbers, self._all_options(plan, numbers, scale), self._limit)
        self._scale = scale
        for bucket in plan.buckets:
            plan.start(bucket)

    def _live(self) -> list[Slot]:
        """The parameters that have gradients, which fit them.

        Raises:
            InvalidArgumentError, UnsupportedError: One does not; nothing was stepped."""
        live = [slot for slot in self._sync_slots() if slot.param.grad is not None]
        if live and self._tail.search is not None and (device := apart_in_bits(slot.param for slot in live)) is not None:
            self._interrupt()
            raise UnsupportedError(
                f"offload: tail is 'auto' with several processes and parameters on {device}, which torch steps: replicas could differ by "
                "roundings; pass the same number of buckets in all processes"
            )
        for slot in live:
            if reason := slot.refusal():
                self._interrupt()
                raise InvalidArgumentError(f"offload: {slot.name} has a gradient that {reason}; nothing was stepped")
        return live

    def _measure(self, tail: bool) -> _norm.Measured:
        """Waits until the gradients of all buckets are measured, and with `tail` those of the tail."""
        if self._plan is None or not self._plan.is_open:
            return _norm.Measured(0.0, False, "")
        nonfinite, total = self._plan.measured(tail)
        return _norm.Measured(total, nonfinite, "")

    def _stands(self, plan: Plan, live: list[Slot], others: Any, numbers: Sequence[int] | None) -> bool:
        """True if what was stepped is what a step would do now. `numbers`: those of the steps; None: the states may be others."""
        if numbers is None:
            if not all(slot.holds(self._states.get(slot.param)) for slot in live):
                return False
            numbers = self._numbers(live)
        # The options of a lane are those of the group that it was made for.
        if not plan.is_of(live, numbers, others, self.tail, self._log_bytes(live)):
            return False
        return plan.stands(numbers, self._all_options(plan, numbers, self._scale), self._limit)

    def _decide(self, reduced: Callable[[], tuple[float, bool, bool]] | None, measures: bool, skips: bool) -> None:
        """The verdict that follows from the norm, if the step `measures` it. `skips`: Inf or NaN skips the step."""
        plan = self._plan if self._plan is not None and self._plan.is_open else None
        if reduced is None:
            reduced = _norm.reducing(self._measure(measures), None, "offload")
        verdict = _norm.Verdict(False, None)
        if measures:
            slots = plan.slots if plan is not None else []
            verdict = _norm.verdict(reduced(), skips, partial(_culprit, slots), "offload: ")
        if plan is not None:
            plan.verdict = verdict
        else:
            self._report(verdict)

    def _complete(self, at_once: bool = False) -> None:
        """Finishes a step whose verdict is known, also one that a signal interrupted, or that the next forward waits for. `at_once`: the
        program has not run since step() began."""
        if self._verdict_due is not None:
            self._tail.resume()
            self._hear(self._verdict_due)
        plan = self._plan
        if plan is None or plan.verdict is None:
            return self._ended(None)
        self._report(plan.verdict)
        try:
            without_gradients(partial(plan.complete, at_once))
        except SpillwayError:
            # A bucket has failed after the verdict, and others have stepped. Raised once, so that a state dict can be loaded.
            plan.drop()
            self._ended(plan)
            raise
        clipped = bool(plan.limit and (self._grad_norm or 0.0) > plan.limit)
        self._tail.stop(not (self._skipped or clipped), len(plan.buckets), partial(room, plan))
        self._ended(plan)

    def _ended(self, plan: Plan | None) -> None:
        """A step is over, or there is none. Until the end of this call the next forward comes here again if a signal interrupts it."""
        self._verdict_due = None
        if plan is not None:
            plan.begin()
        if self._next is not None:
            self._next.completed()

    def _begun(self) -> tuple[bool, float | None]:
        """Whether a step began during backward, all of it but the tail, and when. The devices have done what they had to do."""
        for device in {local(param).device for param in filter(is_trained, self._slots)}:
            if device.type != "cpu":
                torch.accelerator.current_stream(device).synchronize()
        if (plan := self._plan) is None:
            return False, None
        return plan.tail == self.tail and all(bucket.submitted or bucket.stays for bucket in plan.buckets), plan.began()

    def _hear(self, verdict: Callable[[], Any]) -> None:
        """Waits for the verdict of a step that has returned."""
        plan = self._plan
        try:
            # A signal may have come between this and the end.
            if plan is None or plan.verdict is None:
                if plan is not None and plan.is_open and (written := plan.written()) is not None:
                    raise InvalidArgumentError(
                        f"offload: {written.name} was written to after step(), which the next forward was to complete; nothing was "
                        "stepped. Call optimizer.settle() before the program writes to parameters"
                    )
                verdict()
        except (SpillwayError, RuntimeError):
            # The step is given up. Other exceptions are those of signal handlers: the verdict is still due.
            self._verdict_due = None
            self._interrupt()
            if self._plan is not None:
                self._plan.waits = False
            raise

    def _report(self, verdict: _norm.Verdict) -> None:
        self._skipped = verdict.skips
        self._grad_norm = None if verdict.total is None else math.sqrt(verdict.total)

    @property
    def tail(self) -> int:
        """The number of buckets that stay on the device at the next step. With `tail="auto"` it changes during the first steps that
        overlap, until no other number is better."""
        return self._tail.buckets

    def exposed_seconds(self) -> float:
        """Seconds that steps have waited for buckets, since the set of parameters that have gradients last changed."""
        return 0.0 if self._plan is None else self._plan.exposed_seconds()

    def _put_back(self) -> None:
        aside, self._aside = self._aside, {}
        put_back(aside, self._states)


def _culprit(slots: Sequence[Slot]) -> str:
    """The name of the first parameter whose gradient has Inf or NaN; empty if it is one of another process."""
    return next((slot.name for slot in slots if not bool(torch.isfinite(slot.grad).all())), "")
