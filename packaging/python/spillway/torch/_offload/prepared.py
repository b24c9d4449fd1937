"""Whether groups, parameters, gradients and states are those for which a plan was made. A step of thousands of parameters then asks for
each list once, and not for each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, compress
from operator import attrgetter, is_
from typing import Any

import torch

from ..._groups import TORCHS
from .._tensors import DTensor, properties_of
from .counts import Counts
from .slot import Slot

_grad, _trained = attrgetter("grad"), attrgetter("requires_grad")
_data_ptr = torch.Tensor.data_ptr


class Prepared:
    """The lists of a step whose parameters, gradients and states were checked one by one.

    Args:
        groups: The optimizer's `param_groups`.
        live: The parameters that have gradients.
        states: The state of each parameter."""

    def __init__(self, groups: Sequence[dict[str, Any]], live: Sequence[Slot], states: Any):
        self._lists, self._flags = [[*group["params"]] for group in groups], [*map(_flags, groups)]
        self._params = [*chain.from_iterable(self._lists)]
        known = {slot.param for slot in live}
        self._mask = [param in known for param in self._params]
        self._is_trained = [*map(_trained, self._params)]
        #: In the order of the groups, which is that of the slots.
        self._live = [*compress(self._params, self._mask)]
        inner = [states[param] for param in self._live]
        self._all, self._steps = [*states.values()], [state["step"] for state in inner]
        self._inner, self._values = inner, [*chain.from_iterable(state.values() for state in inner)]
        # Step counts are checked where they are read.
        self._tensors = [value for state in inner for name, value in state.items() if name != "step"]
        self._counts = Counts(len(self._steps))
        # Parts of DTensors and gradients with gaps are checked one by one.
        grads = [*map(_grad, self._live)]
        self._is_simple = not any(isinstance(tensor, DTensor) for tensor in (*self._params, *grads))
        self._is_simple = self._is_simple and all(isinstance(value, torch.Tensor) for value in self._values)
        if self._is_simple:
            self._addresses = [*map(_data_ptr, self._tensors)]
            self._params_same, self._grads_same = properties_of(self._live), properties_of(grads)
            self._tensors_same = properties_of(self._tensors)

    def holds(self, groups: Sequence[dict[str, Any]], states: Any) -> bool:
        """True if a check of each parameter, gradient and state would find what it found before."""
        if not self._is_simple or not self.has_groups(groups):
            return False
        grads = [*map(_grad, self._params)]
        if [grad is not None for grad in grads] != self._mask or [*map(_trained, self._params)] != self._is_trained:
            return False
        if not self._params_same(*self._live) or not self._grads_same(*compress(grads, self._mask)):
            return False
        # Of the same parameters, since nothing but a new state adds one, and only a new dict has others.
        if len(states) != len(self._all) or not all(map(is_, states.values(), self._all)):
            return False
        values = [*chain.from_iterable(state.values() for state in self._inner)]
        if len(values) != len(self._values) or not all(map(is_, values, self._values)):
            return False
        return [*map(_data_ptr, self._tensors)] == self._addresses and self._tensors_same(*self._tensors)

    def has_groups(self, groups: Sequence[dict[str, Any]]) -> bool:
        """True if the groups have the parameters, and the options that say who steps them, which they had."""
        if len(groups) != len(self._lists) or [*map(_flags, groups)] != self._flags:
            return False
        params = [group["params"] for group in groups]
        return [*map(len, params)] == [*map(len, self._lists)] and all(map(is_, chain.from_iterable(params), self._params))

    def numbers(self) -> list[int]:
        """Numbers of the next steps of the parameters that have gradients."""
        return self._counts.following(self._steps)


def _flags(group: dict[str, Any]) -> tuple[bool, ...]:
    return (bool(group.get("maximize")), *(bool(group.get(name)) for name in TORCHS))
