"""The home of states on a tier: f32 masters, moments and their commits.

Calls of several threads run one after another, so that each sees the states between two steps."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import torch

from .._commit import Commit
from .._groups import TORCHS, Rule
from .._snapshot import Snapshot
from .._tier_options import payload_of
from ..errors import InvalidArgumentError, SpillwayError, UnsupportedError
from ._beside import Beside
from ._home import ByTorch, Call, Home
from ._keywords import TierOptions, check_steps
from ._states import Precision
from ._tier_rows import TierTable
from ._tier_states import TierStates
from ._tier_values import Value, check_loaded, value_of, whole_states, write_through

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
        overlap: A step starts during backward.

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
        overlap: bool,
    ):
        super().__init__(name, rule, precision)
        _check_keywords(name, rule, precision, undo, groups)
        self._lock = threading.RLock()
        self.on_tier = TierStates(name, groups, precision, TierOptions.of(given), memory_budget)
        self.on_tier.begin(states)
        self.tiered = self.on_tier.tiered
        self.resumed_step = self.tiered.resumed_step
        self.payload = b"" if self.tiered.committed is None else self.tiered.committed.payload
        self._beside: Beside | None = None
        self._placeholders: list[Value] | None = None
        # Hooks live as long as their parameters; they are removed with the optimizer.
        self._hooks: list[Any] = []
        weakref.finalize(self, _remove, self._hooks)
        if overlap:
            self._beside = Beside(self.on_tier, rule)
            self._beside.use(groups, states)
            for number, param in enumerate(self.on_tier.params):
                if self.on_tier.stated[number] and param.requires_grad:
                    self._hooks.append(param.register_post_accumulate_grad_hook(partial(_hooked, weakref.ref(self), number)))

    def arrived(self, number: int) -> None:
        """Called when backward has completed a parameter's gradient, with `overlap`."""
        if self._beside is not None and not self.tiered.closed:
            self.alone(partial(self._beside.arrived, number))

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
        if self._beside is not None:
            self._beside.use(groups, states)
        return TierTable(self.on_tier, groups, states, self._beside is not None)

    def step(self, rows: Any, options: Any) -> None:
        """Steps the rows of a table. With `overlap`, those that were not submitted during backward are."""
        beside = self._beside
        if beside is None or not self._prepared(beside, rows):
            super().step(rows, options)
        else:
            # Held before the verdict: a signal handler may raise after it.
            self._pending = call = Call(rows, 1)
            try:
                beside.decide(rows, call.status)
            finally:
                self.settle()
        self._next()

    def _prepared(self, beside: Beside, rows: TierTable) -> bool:
        """False if the library refuses a row; the step of all then raises the error that names it."""
        beside.scale = self.scale
        try:
            beside.prepare(rows)
        except SpillwayError:
            beside.abandon()
            return False
        return True

    def _next(self) -> None:
        """Begins the next step. It raises its errors itself."""
        if self._beside is not None:
            with suppress(SpillwayError):
                self._beside.stepped()

    def skipped(self) -> None:
        """A step was skipped: what was submitted of it is taken back."""
        if self._beside is not None:
            self._beside.abandon()
            self._next()

    def settle(self) -> None:
        """Notes the result of a call, also of a step whose verdict was given before a signal handler raised."""
        try:
            if self._beside is not None:
                self._beside.complete()
        finally:
            if self._pending is not None and self._pending.status == [0]:
                self.on_tier.weights.give_all()
            super().settle()

    def _rest(self, also_mixed: bool = False) -> None:
        """Before a use of the states: takes back what was submitted of the next step, which then waits for step()."""
        self.tiered.check(also_mixed)
        if self._beside is not None:
            self._beside.abandon()

    def close(self) -> None:
        """Closes the tier."""
        _remove(self._hooks)
        if self._beside is not None:
            self._beside.close()
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
        placeholders = self._placeholders
        # A load that mends mixed states begins with placeholders.
        self._rest(also_mixed=placeholders is not None)
        whole = whole_states(self.on_tier, states, None if placeholders is None else self._read)
        if placeholders is not None:
            placeholders += [value for state in whole.values() for tensor in state.values() if (value := value_of(tensor)) is not None]
        return whole

    @contextmanager
    def with_placeholders(self) -> Iterator[list[Value]]:
        """While this is open, state dicts have placeholders for the values on the tier. Adds their Values to the list."""
        self._placeholders = []
        try:
            yield self._placeholders
        finally:
            self._placeholders = None

    def _read(self, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        def work() -> torch.Tensor:
            self._rest()
            return read()

        return self.alone(work)

    def load(self, by_torch: ByTorch) -> None:
        """Loads a state dict to the tier, subgroup by subgroup."""
        self._rest(also_mixed=True)
        found: dict[int, dict[str, Any]] = {}

        def take(loaded: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
            """Takes the states, so that torch loads the groups only."""
            check_steps(loaded, True)
            found.update(check_loaded(self.on_tier, groups, loaded))
            return {**loaded, "state": {}}

        groups, states = by_torch(take, True)
        self.tiered.whole(lambda: write_through(self.on_tier, states, found))
        if self._beside is not None:
            self._beside.use(groups, states)

    def rollback(self, states: Any) -> None:
        """Restores the last commit."""
        self.tiered.finish()
        self.tiered.check(also_mixed=True)
        committed = self.tiered.committed
        if committed is None:
            raise InvalidArgumentError(f"{self.name}.rollback: nothing was committed to the tier; construct the optimizer again")

        def back() -> None:
            if self._beside is not None:
                self._beside.stop()
            self.tiered.rollback()
            if self._beside is not None:
                self._beside.reset()
            self.on_tier.restore(states, committed)

        self.tiered.whole(back)

    def master(self, param: torch.Tensor, states: Any) -> torch.Tensor:
        """The master of a parameter: the parameter itself if it is float32, or frozen."""
        self._rest()
        return self.on_tier.master(param)

    def commit(self, states: Any, step: int | None, payload: bytes, wait: bool) -> Commit | None:
        """Makes the present states durable; returns after all ranks have committed, or with a commit beside steps."""
        self._rest()
        self.on_tier.take_written()
        facts = self.on_tier.facts(states)
        commit = self.tiered.commit if wait else self.tiered.begin_commit
        begun = commit(self.on_tier.count if step is None else step, facts, payload_of(payload))
        if self._beside is not None:
            with suppress(SpillwayError):
                self._beside.resume()
        return begun

    def snapshot(self, directory: Any, bytes_per_second: int, keep: int | None) -> Snapshot:
        """Starts to write the last commit to a directory."""
        return self.tiered.snapshot(directory, bytes_per_second, keep)

    def restore(self, states: Any, directory: Any) -> int:
        """Returns to a snapshot."""
        found = self.tiered.snapshot_of(directory, self.on_tier.check_record)
        # The payload of the last commit belongs to an older step.
        self.tiered.keep(found, self.on_tier.count, lambda: self.commit(states, None, b"", True))

        def take() -> None:
            if self._beside is not None:
                self._beside.stop()
            try:
                self.tiered.take(found)
            except BaseException:
                # After an error the states are those of the last commit.
                if self.tiered.committed is not None and not self.tiered.apart:
                    self.rollback(states)
                raise
            if self._beside is not None:
                self._beside.reset()
            self.on_tier.restore(states, found.record)

        self.tiered.whole(take)
        self.payload = found.record.payload
        return found.step


def _hooked(owner: weakref.ref[TierHome], number: int, _: torch.Tensor) -> None:
    home = owner()
    if home is not None:
        home.arrived(number)


def _remove(hooks: list[Any]) -> None:
    while hooks:
        hooks.pop().remove()


def _check_keywords(name: str, rule: Rule, precision: Precision, undo: bool, groups: list[dict[str, Any]]) -> None:
    refused = {"undo": undo, 'master="split"': precision.master == "split"}
    for group in groups:
        refused.update({flag: True for flag in TORCHS if group.get(flag)})
    if rule.c_name != "adam":
        raise UnsupportedError(f"{name}: states on a tier are for Adam and AdamW; leave out tier")
    for keyword, given in refused.items():
        if given:
            raise UnsupportedError(f"{name}: {keyword} cannot be combined with tier, which keeps f32 masters; leave out one of them")
