"""A step of ZeRO-3's states on a tier that runs beside backward: "overlap" in the spillway block.

A sub-group whose gradients are complete is submitted to the update, as a step that can be taken back. Its weights go to memory of this
module. When DeepSpeed knows the norm, the rest is submitted, and the steps become final, or are repeated with the factor that clips. If
gradients or options have changed since, they are taken back and submitted again. So the bits are those of the step that waits.

On a GPU a thread waits for the gradients of a sub-group, and not the trainer's. From the first submit of a step to `AfterEvents.wait` or
`forget`, that thread alone uses the update.

Before the step, each access to the states takes the steps back."""

from __future__ import annotations

import ctypes
import weakref

from .._after_events import AfterEvents
from .._written import Comparison, sums
from . import _stage3
from ._sub_groups import floats

# After this number of steps in a row that were submitted in vain, sub-groups wait for the step, until one is not clipped.
_MISSED_IN_A_ROW = 2


class Overlap:
    """The updates of one TierSwapper."""

    def __init__(self, swapper, stage3):
        self._swapper, self._stage3 = weakref.proxy(swapper), weakref.proxy(stage3)
        self._arrivals = _stage3.Arrivals(stage3, range(len(stage3.fp16_groups)))
        #: Memory for the weights of a model that has none in 16 bits.
        self._masters, self._missed = {}, 0
        self._starting = AfterEvents()
        _stage3.warn_of_one_bucket(stage3, "overlap")
        #: Sub-groups that were submitted during backward, and kept.
        self.submitted_early = 0
        self._end()

    def _end(self):
        # The sums of the gradients that are submitted, None until their copies have ended; the calls of the update.
        self._sums, self._calls, self._waits = {}, [], False
        self._arrivals.clear()

    # During backward.

    def changing(self, params):
        """Called before backward changes gradients of these parameters."""
        if any(self._arrivals.sub_group(param) in self._sums for param in params):
            self.abandon()

    def completed(self, params):
        """Called when gradients of these parameters are complete."""
        complete = self._arrivals.add(params)
        if self._waits or _stage3.grad_scaler(self._stage3) is not None:
            return
        if not self._sums:
            self._swapper.tiered.early()
        if not complete or self._missed >= _MISSED_IN_A_ROW:
            return
        events = _stage3.copies()
        for index in complete:
            gradient = self._swapper.gradients.untouched(index)
            if gradient is not None:
                if not self._sums:
                    self._use(self._calls_of(self._unclipped()))
                self._sums[index] = None
                self._starting.call(events, self._submit_early, index, gradient)

    def _submit_early(self, index, gradient):
        self._sums[index] = sums([gradient])
        self._submit(index, gradient)

    def _unclipped(self):
        return ctypes.c_float(float(1.0 / self._stage3.loss_scale)).value

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
            self._starting.wait()
        except BaseException:
            self.abandon()
            raise
        calls = self._calls_of(factor)
        stands = (
            self._sums
            and all(map(_same, calls, self._calls))
            and all(
                gradients[index] is not None
                and gradients[index].data_ptr() == self._untouched(index)
                and not Comparison(sums([gradients[index]]), before)
                for index, before in self._sums.items()
            )
        )
        if self._sums and not stands:
            self.abandon()
        repeats = bool(stands) and factor != self._calls[0].grad_scale
        self._missed = self._missed + 1 if repeats else self._missed if factor != self._unclipped() else 0
        self.submitted_early += len(self._sums)
        self._swapper.tiered.early()
        self._use(calls)
        for index, gradient in enumerate(gradients):
            if index not in self._sums:
                self._submit(index, gradient)
        update = self._update
        update.verdict("redo", factor) if repeats else update.verdict("commit")
        missing = self._swapper.parts.counts()
        for place in update.published():
            index = self._swapper.parts.sub_group(place)
            missing[index] -= 1
            if not missing[index]:
                self._show(index)
        update.finish()
        _stage3.wait_for_copies()
        self._end()

    def _untouched(self, index):
        gradient = self._swapper.gradients.untouched(index)
        return None if gradient is None else gradient.data_ptr()

    def _show(self, index):
        """Gives the model the weights of a sub-group."""
        if not self._swapper.host_weights.publish(index):
            self._swapper.show(index, self._masters[index])

    def abandon(self):
        """Takes back what was submitted; the states are those before the step. What is left of it waits for the step."""
        self._starting.forget()
        self._swapper.tiered.take_back()
        if self._sums:
            self._waits, self._missed = True, self._missed + 1
        self._sums, self._calls = {}, []

    def close(self):
        """Ends the thread. The states are not used any more."""
        self._starting.close()

    def skip(self):
        """The step does not happen."""
        self.abandon()
        self._end()


def _same(one, other):
    """True if two calls differ in the factor of the gradients at most."""
    return all(getattr(one, name) == getattr(other, name) for name, *_ in one._fields_ if name != "grad_scale")
