"""Whether groups, parameters, gradients and states are those for which a plan was made. A step of thousands of parameters then asks for
each list once, and not for each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch

from ..._groups import TORCHS
from ..._written import Facts, facts_of
from .._copies import Alike, Placed
from .._tensors import DTensor, properties_of
from .counts import Counts
from .slot import Slot

#: Parameters whose lists are asked for at once: their tensors stay in the processor's cache from one question to the next.
_AT_ONCE = 128
_grad, _trained, _values = attrgetter("grad"), attrgetter("requires_grad"), methodcaller("values")
_data_ptr = torch.Tensor.data_ptr


class _Block:
    """Some of the parameters of a Checked, and the state of each."""

    def __init__(self, params: Sequence[torch.Tensor], states: Sequence[dict[str, Any]]):
        self._params, self._states = params, states
        self._values = [*chain.from_iterable(map(_values, states))]
        tensors = [*params, *map(_grad, params), *self._values]
        # Parts of DTensors and gradients with gaps are checked one by one.
        self.is_simple = all(isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor) for tensor in tensors)
        self.is_simple = self.is_simple and all(tensor.layout is torch.strided for tensor in tensors)
        if self.is_simple:
            self._same, self._addresses = properties_of(tensors), [*map(_data_ptr, self._values)]

    def holds(self, found: list[torch.Tensor]) -> bool:
        """True if another check would find what it found before, given the same states. Adds the gradients to a list."""
        values = [*chain.from_iterable(map(_values, self._states))]
        if len(values) != len(self._values) or not all(map(is_, values, self._values)):
            return False
        grads = [*map(_grad, self._params)]
        if not self._same(*self._params, *grads, *values) or [*map(_data_ptr, values)] != self._addresses:
            return False
        found += grads
        return True


class Checked:
    """The parameters of a bucket, whose gradients and states were just checked one by one.

    Args:
        params: The parameters.
        states: The states of all parameters.
        uses: The uses of their slots.

    Attributes:
        is_simple: False if each step must check them again.
        steps: The step counts, while nothing has changed.
        facts: The facts of the parameters then."""

    def __init__(self, params: Sequence[torch.Tensor], states: Any, uses: Sequence[int]):
        self._params, self._uses, self._states = params, uses, [states[param] for param in params]
        places = range(0, len(params), _AT_ONCE)
        self._blocks = [_Block(params[at : at + _AT_ONCE], self._states[at : at + _AT_ONCE]) for at in places]
        self.is_simple = all(block.is_simple for block in self._blocks)
        self.steps = Placed(state["step"] for state in self._states) if self.is_simple else Placed([])
        self.facts: Facts = facts_of(params) if self.is_simple else ()

    def has(self, states: Any) -> bool:
        """True if these parameters have the same states among those of all parameters."""
        return all(map(is_, map(states.get, self._params), self._states))

    def gradients(self, uses: Sequence[int]) -> Alike | None:
        """The gradients, if another check would find what it found before, given the same states; None: it may not."""
        if not self.is_simple or uses != self._uses:
            return None
        found = Alike([], self)
        return found if all(block.holds(found) for block in self._blocks) else None


class Prepared:
    """The lists of a step whose parameters, gradients and states were checked one by one.

    Args:
        groups: The optimizer's `param_groups`.
        live: The parameters that have gradients.
        buckets: Their buckets, which remember what was checked.
        states: The state of each parameter.

    Attributes:
        counts: Memory for the step counts of the parameters that have gradients."""

    def __init__(self, groups: Sequence[dict[str, Any]], live: Sequence[Slot], buckets: Sequence[Any], states: Any):
        self._lists, self._flags = [[*group["params"]] for group in groups], [*map(_flags, groups)]
        self._params, self._buckets = [*chain.from_iterable(self._lists)], buckets
        known = {slot.param for slot in live}
        self._idle = [param for param in self._params if param not in known]
        # The others are trained while they have gradients.
        self._asked = [param for param in self._params if param not in known or not param.requires_grad]
        self._is_trained = [*map(_trained, self._asked)]
        self._all, steps = [*states.values()], [states[slot.param]["step"] for slot in live]
        self.counts = Counts(len(steps))
        remembered = [bucket.remember(states) for bucket in buckets]
        self._is_simple = all(remembered)
        self._steps = Placed(steps) if self._is_simple else steps

    def holds(self, groups: Sequence[dict[str, Any]], states: Any) -> bool:
        """True if a check of each parameter, gradient and state would find what it found before."""
        if not self._is_simple or not self.has_groups(groups):
            return False
        if any(grad is not None for grad in map(_grad, self._idle)) or [*map(_trained, self._asked)] != self._is_trained:
            return False
        # Of the same parameters, since nothing but a new state adds one, and only a new dict has others.
        if len(states) != len(self._all) or not all(map(is_, states.values(), self._all)):
            return False
        return all(bucket.holds() for bucket in self._buckets)

    def has_groups(self, groups: Sequence[dict[str, Any]]) -> bool:
        """True if the groups have the parameters, and the options that say who steps them, which they had."""
        if len(groups) != len(self._lists) or [*map(_flags, groups)] != self._flags:
            return False
        params = [group["params"] for group in groups]
        return [*map(len, params)] == [*map(len, self._lists)] and all(map(is_, chain.from_iterable(params), self._params))

    def numbers(self) -> list[int]:
        """Numbers of the next steps of the parameters that have gradients, if `holds`."""
        return self.counts.following(self._steps)


def _flags(group: dict[str, Any]) -> tuple[bool, ...]:
    return (bool(group.get("maximize")), *(bool(group.get(name)) for name in TORCHS))
