"""A step of ZeRO-3's states on a tier that runs beside backward: "overlap" in the spillway block.

As _early/ has it. A sub-group is submitted when its gradients are complete, and its weights go to memory of this module. When DeepSpeed
knows the norm, the rest is submitted."""

from __future__ import annotations

import functools
import weakref

from .._early.tier_step import TierStep
from .._groups import but_factor
from .._written import changed, sums
from . import _stage3
from ._sub_groups import floats


class Overlap(TierStep):
    """The updates of one TierSwapper.

    Attributes:
        submitted_early: Number of sub-groups that were submitted during backward, and kept."""

    def __init__(self, swapper, stage3):
        self._swapper, self._stage3 = weakref.proxy(swapper), weakref.proxy(stage3)
        #: Memory for the weights of a model that has none in 16 bits.
        self._masters = {}
        arrivals = _stage3.Arrivals(stage3, range(len(stage3.fp16_groups)))
        super().__init__(functools.partial(getattr, self._swapper, "tiered"), arrivals)
        _stage3.warn_of_one_bucket(stage3, "overlap")
        self.submitted_early = 0

    def begin(self):
        """Nothing is submitted."""
        super().begin()
        # The calls of the update. `submitted` has the sum of each gradient, once their copies have ended.
        self._calls = []

    # During backward.

    def changing(self, params):
        """Called before backward changes gradients of these parameters."""
        if any(self.arrivals.sub_group(param) in self.submitted for param in params):
            self.abandon()

    def completed(self, params):
        """Called when gradients of these parameters are complete."""
        complete = self.arrivals.complete(params)
        if self.waits or _stage3.grad_scaler(self._stage3) is not None:
            return
        if not self.submitted:
            self.fetch()
        if not complete or not self.steps_early:
            return
        events = _stage3.copies()
        for index in complete:
            gradient = self._swapper.gradients.untouched(index)
            if gradient is not None:
                if not self.submitted:
                    self._use(self._calls_of(_stage3.unclipped(self._stage3)))
                self.submit(index, events, self._submit_early, index, gradient)

    def _submit_early(self, index, gradient):
        self.submitted[index] = sums([gradient])[0]
        self._submit(index, gradient)

    def _calls_of(self, factor):
        steps = self._swapper.steps
        return [_stage3.call_of(self._stage3, index, step + 1, factor) for index, step in enumerate(steps)]

    @property
    def _update(self):
        return self._swapper.tiered.swap._update

    def _use(self, calls):
        if not self._calls:
            self._update.ds_calls(self._stage3.optimizer.opt_id, self._swapper.parts.rows(calls))
            self._calls = calls

    def _submit(self, index, gradient):
        self._swapper.parts.submit(self._update, index, gradient, self._weights_of(index), self._swapper.belonging(index))

    def _weights_of(self, index):
        weights = self._swapper.host_weights.of(index)
        if weights is None and index not in self._masters:
            self._masters[index] = floats(self._swapper.elements[index])
        return self._masters[index] if weights is None else weights

    # The step.

    def step(self, gradients, factor):
        """Runs one step, with these gradients of all sub-groups; `factor` multiplies them. The model then has the new weights."""
        try:
            self.wait()
        except BaseException:
            self.abandon()
            raise
        calls = self._calls_of(factor)
        stands = (
            self.submitted
            and [*map(but_factor, calls)] == [*map(but_factor, self._calls)]
            and all(
                (buffer := self._swapper.gradients.untouched(index)) is not None
                and gradients[index].data_ptr() == buffer.data_ptr()
                and not changed([(gradients[index], before)])
                for index, before in self.submitted.items()
            )
        )
        if self.submitted and not stands:
            self.abandon()
        repeats = bool(stands) and factor != self._calls[0].grad_scale
        self.judge(repeats=factor != _stage3.unclipped(self._stage3))
        self.submitted_early += len(self.submitted)
        self.fetch()
        self._use(calls)
        for index, gradient in enumerate(gradients):
            if index not in self.submitted:
                self._submit(index, gradient)
        #: The parts of each sub-group that are not final.
        self._missing = self._swapper.parts.counts()
        self.conclude(factor if repeats else None, self, [])
        self.next()

    def give(self, subgroup):
        """A part of a sub-group is final."""
        index = self._swapper.parts.sub_group(subgroup)
        self._missing[index] -= 1
        if not self._missing[index] and not self._swapper.host_weights.publish(index):
            self._swapper.show(index, self._masters[index])

    def give_all(self):
        """All parts are final, and the copies to the model have begun."""
        _stage3.wait_for_copies()

    def skip(self):
        """The step does not happen."""
        self.abandon()
        self.next()
