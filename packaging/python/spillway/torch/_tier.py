"""The home of states on a tier: f32 masters, moments and their commits.

Calls of several threads run one after another, so that each sees the states between two steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .._groups import TORCHS
from .._snapshot import Snapshot
from .._tier_options import payload_of
from ..errors import InvalidArgumentError, UnsupportedError
from ._home import ByTorch, Home
from ._keywords import TierOptions, check_steps
from ._states import Precision, Rule
from ._tier_rows import TierTable, check_loaded, whole_states, write_through
from ._tier_states import TierStates

_Result = TypeVar("_Result")


class TierHome(Home):
    """States on a tier.

    Args:
        name, rule, precision: As for Home.
        undo: The optimizer's `undo`.
        groups: All its groups.
        states: Its states, of which there are none; receives the step counts.
        given: The `tier` argument.
        memory_budget: Limit of the host memory for states, in bytes; None: the least that keeps every path busy.

    Raises:
        InvalidArgumentError: The tier holds states of other parameters, or the budget is too small.
        UnsupportedError: A parameter cannot have its states on a tier, or a keyword cannot be combined with it."""

    def __init__(
        self,
        name: str,
        rule: Rule,
        precision: Precision,
        undo: bool,
        groups: list[dict[str, Any]],
        states: Any,
        given: Any,
        memory_budget: int | None,
    ):
        super().__init__(name, rule, precision)
        _check_keywords(name, rule, precision, undo, groups)
        self._lock = threading.RLock()
        self.on_tier = TierStates(name, groups, TierOptions.of(given), memory_budget)
        self.on_tier.begin(states)
        self.tiered = self.on_tier.tiered
        self.resumed_step = self.tiered.resumed_step
        self.payload = b"" if self.tiered.committed is None else self.tiered.committed.payload

    def alone(self, work: Callable[[], _Result]) -> _Result:
        """Returns work(), during which no other thread uses the states. In a forked child no thread would free the lock; the handles refuse
        every call there."""
        if not self.tiered.is_own:
            return super().alone(work)
        with self._lock:
            return super().alone(work)

    def rows(self, groups: list[dict[str, Any]], states: Any) -> TierTable:
        """The table of the present tensors. A refusal here is told to the processes that wait for this one's norm."""
        self.tiered.check()
        return TierTable(self.on_tier, groups, states)

    def close(self) -> None:
        """Closes the tier."""
        self.tiered.close()

    def check_new_group(self) -> None:
        """Raises an error: no group can be added."""
        raise UnsupportedError(
            f"{self.name}.add_param_group: the layout of states on a tier is fixed at construction; pass all groups to the constructor"
        )

    def fresh(self, states: Any) -> Home:
        """Raises an error: the optimizer cannot be copied."""
        raise TypeError(f"an {self.name} with states on a tier cannot be copied or pickled; save its state_dict()")

    def saved(self, states: Any) -> Any:
        """The states with all values, which are read subgroup by subgroup."""
        return whole_states(self.on_tier, states)

    def load(self, by_torch: ByTorch) -> None:
        """Loads a state dict to the tier, subgroup by subgroup."""
        self.tiered.check()
        found: dict[int, dict[str, Any]] = {}

        def take(loaded: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
            """Takes the states, so that torch loads the groups only."""
            check_steps(loaded, True)
            found.update(check_loaded(self.on_tier, groups, loaded))
            return {**loaded, "state": {}}

        _, states = by_torch(take, True)
        write_through(self.on_tier, states, found)

    def rollback(self, states: Any) -> None:
        """Restores the last commit."""
        self.tiered.check()
        committed = self.tiered.committed
        if committed is None:
            raise InvalidArgumentError(f"{self.name}.rollback: nothing was committed to the tier; construct the optimizer again")
        self.tiered.rollback()
        self.on_tier.restore(states, committed)

    def master(self, param: torch.Tensor, states: Any) -> torch.Tensor:
        """The master of a parameter: the parameter itself if it is float32, or frozen."""
        self.tiered.check()
        return self.on_tier.master(param)

    def commit(self, states: Any, step: int | None, payload: bytes) -> None:
        """Makes the present states durable; returns after all ranks have committed."""
        self.tiered.check()
        self.on_tier.take_written()
        facts = self.on_tier.facts(states)
        self.tiered.commit(self.on_tier.count if step is None else step, facts, payload_of(payload))

    def snapshot(self, directory: Any, bytes_per_second: int) -> Snapshot:
        """Starts to write the last commit to a directory."""
        return self.tiered.snapshot(directory, bytes_per_second)


def _check_keywords(name: str, rule: Rule, precision: Precision, undo: bool, groups: list[dict[str, Any]]) -> None:
    refused = {"undo": undo, "moment_dtype": precision.moment_dtype is not None, 'master="split"': precision.master == "split"}
    for group in groups:
        refused.update({flag: True for flag in TORCHS if group.get(flag)})
    if rule.c_name != "adam":
        raise UnsupportedError(f"{name}: states on a tier are for Adam and AdamW; leave out tier")
    for keyword, given in refused.items():
        if given:
            raise UnsupportedError(
                f"{name}: {keyword} cannot be combined with tier, which keeps f32 masters and moments; leave out one of them"
            )
