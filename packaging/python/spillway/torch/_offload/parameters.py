"""The parameters of an offload() optimizer, their memory and states, and what a step of them needs to know."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from ... import _abi
from ..._early.arrivals import tell
from ..._groups import TORCHS, Rule
from ..._progress import each
from ..._tail_search import AskedTail
from ...errors import UnsupportedError
from ...swap import UNROUNDED
from .. import _norm
from .._states import Precision
from .._tensors import DTensor, has_dtensors, is_partial, is_trained, lasting, local
from .counts import Counts, next_steps
from .memory import check_fits, needed
from .plan import Plan
from .slot import FLOATS, Slot
from .tail import serves_narrow

_param = attrgetter("param")


class Parameters(torch.optim.Optimizer):
    """Base of the optimizer: its parameters. The subclass sets the attributes."""

    max_norm: float | None
    process_group: Any
    skip_nonfinite: bool
    overlap: bool | None
    _precision: Precision
    _host_memory: int | None
    _waits_in_forward: bool
    _rule: Rule
    _tail: AskedTail
    #: The memory of each parameter, and its hook, which lives as long as the parameter.
    _slots: dict[torch.Tensor, Slot]
    _hooks: dict[torch.Tensor, Any]
    _states: dict[torch.Tensor, dict[str, Any]]

    def _check_fits(self) -> None:
        if self._host_memory is not None:
            check_fits(self._trained(), self._precision, self._host_memory)

    def _trained(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"] if is_trained(param)]

    def _sync_slots(self) -> list[Slot]:
        """Makes slots and hooks for new parameters, and drops those of others. Returns the slots in the order of the groups."""
        found: list[Slot] = []
        for number, group in enumerate(self.param_groups):
            check_group(group, self._precision, bool(self.tail or self._tail.search))
            for param in group["params"]:
                slot = self._slots.get(param)
                if slot is None:
                    slot = self._slots[param] = Slot(param, len(self._slots), self._precision)
                if param.requires_grad and param not in self._hooks:
                    self._hooks[param] = tell(param, self._arrived)
                slot.group, slot.number, slot.maximizes = number, len(found), bool(group.get("maximize"))
                found.append(slot)
        if len(found) != len(self._slots):
            for param in self._slots.keys() - {slot.param for slot in found}:
                del self._slots[param]
                remove({param: self._hooks.pop(param, None)})
        return found

    def _numbers(self, slots: Sequence[Slot], counts: Counts | None = None) -> list[int]:
        """Number of the next step of each parameter. `counts`: memory for as many counts."""
        states = [*map(self._states.get, map(_param, slots))]
        if all(states):
            return (next_steps if counts is None else counts.following)([state["step"] for state in states if state])
        return [int(state["step"]) + 1 if state else 1 for state in states]

    @lasting
    def _use_states(self, live: list[Slot]) -> None:
        """Checks the states of these parameters, then makes those that are missing."""
        lacking = [slot for slot in live if not self._states.get(slot.param)]
        for slot in each("taking host memory", [slot for slot in live if self._states.get(slot.param)], Slot.copies_bytes):
            slot.use(self._states[slot.param])
        for slot in each("making states in host memory", lacking, lambda slot: slot.copies_bytes() + slot.state_bytes()):
            self._states[slot.param] = state = {"step": torch.zeros((), dtype=torch.float32), **slot.new_state()}
            slot.use(state)

    def _all_options(self, plan: Plan, numbers: Sequence[int], scale: float) -> list[Any]:
        """The C options of each lane, for steps of the plan's parameters with these numbers."""
        found = []
        for lane, first in zip(plan.lanes, plan.first):
            options = _abi.sized(self._rule.options_type)
            self._rule.put_options(options, self.param_groups[lane.group], lane.group, numbers[first] - 1, scale)
            found.append(options)
        return found

    def _overlaps(self, slot: Slot) -> bool:
        """True if a step may start when backward completes this parameter."""
        return local(slot.param).device.type != "cpu" if self.overlap is None else self.overlap

    def _log_bytes(self, live: Sequence[Slot]) -> float:
        """Bytes for the logs of steps before the verdict. A step that waits for it in `step()` needs none. The log of states that are
        chosen for their few bytes is as large as they are: it needs `overlap=True`, or a limit that says what there is."""
        if not (self._waits_in_forward or any(map(self._overlaps, live))):
            return 0.0
        if self._host_memory is None:
            return 0.0 if self._precision.keeps_values and self.overlap is not True else math.inf
        return max(0.0, self._host_memory - sum(needed(self._trained(), self._precision).values()))

    @property
    def _measures(self) -> bool:
        return self.max_norm is not None or self.skip_nonfinite

    @property
    def _limit(self) -> float:
        """The norm above which gradients are clipped; 0: there is none."""
        return 0.0 if self.max_norm is None or math.isinf(self.max_norm) else self.max_norm

    def _others(self) -> Any:
        """The processes whose gradients are one norm with those of this one; None: there are none."""
        if not self._measures:
            return None
        if self.process_group is not None:
            return self.process_group
        # Not those of the slots: a program may have replaced parameters by DTensors since the last step, as accelerate does.
        params = [*itertools.chain.from_iterable(group["params"] for group in self.param_groups)]
        if not has_dtensors(params):
            return None
        return _norm.group_of((param for param in params if isinstance(param, DTensor) and is_trained(param)), "offload")

    def _parts(self) -> _norm.CountedParts | None:
        """Which parts count in this process; None: all do."""
        others = self._others()
        return None if others is None else _norm.CountedParts(filter(is_trained, self._slots), others)


def check_group(group: dict[str, Any], precision: Precision, has_tail: bool) -> None:
    check_options(group)
    if len({*map(id, group["params"])}) != len(group["params"]):
        raise UnsupportedError("offload: a group has a parameter twice, which torch would step twice; pass each parameter once")
    for param in filter(is_trained, group["params"]):
        if param.dtype not in FLOATS:
            raise UnsupportedError(f"offload: a parameter is of dtype {param.dtype}; float32, bfloat16 and float16 are served")
        if param.dtype is torch.float16 and precision.moment_dtype is torch.bfloat16:
            raise UnsupportedError(f"offload: a parameter is float16: {UNROUNDED}")
        if precision.coded and isinstance(param, DTensor):
            raise UnsupportedError(
                "offload: a parameter is a DTensor, whose parts may begin within a block of codes; pass moment_dtype='bf16'"
            )
        if param.dtype is torch.float16 and precision.master == "split":
            raise UnsupportedError("offload: a parameter is float16, and master='split' is for bfloat16; pass master='f32'")
        if param.is_meta:
            raise UnsupportedError("offload: a parameter has no memory yet; make the optimizer after model.to_empty(), which replaces it")
        if has_tail and not precision.is_plain and not serves_narrow(device := local(param).device):
            raise UnsupportedError(
                f"offload: torch steps the tail of {device}, and serves neither 8-bit moments nor split masters nor rounding at "
                "random; pass tail=0"
            )
        if is_partial(param):
            raise UnsupportedError(f"offload: a parameter is placed as {param.placements}, as terms of a sum; redistribute it")


def check_options(group: dict[str, Any]) -> None:
    for name in TORCHS:
        if group.get(name):
            raise UnsupportedError(f"offload: {name} is not served; set it to False")


def remove(hooks: dict[torch.Tensor, Any]) -> None:
    for hook in hooks.values():
        if hook is not None:
            hook.remove()
    hooks.clear()
