"""States in host memory: the table of the present tensors, and masters of parameters that the program has written to.

A table is built of the parameters that Spillway serves, and again after a change that a table cannot take.

Versions: a split master is the parameter and its low bits, so low bits are stale once the program has written to the parameter. The version
of each parameter with low bits is noted at its last step. The present table has these versions, and `_noted` those of parameters that a
former table has stepped. A version is valid for the dict of states with which it was noted, because `load_state_dict` brings new low
bits."""

from __future__ import annotations

from typing import Any

import torch

from .._groups import Rule, is_torchs
from ..errors import InvalidArgumentError, SpillwayError, UnsupportedError
from ._home import ByTorch, Call, Home
from ._keywords import check_steps
from ._norm import part_of
from ._states import LOW, Precision, join, master_of
from ._table import Table
from ._tensors import (
    Row,
    check_complete,
    check_kinds,
    check_layout,
    check_memory,
    check_state,
    check_versions,
    is_served,
    lay_out,
    local,
    name_of,
)


class Memory(Home):
    """States in host memory; arguments as for Home.

    Attributes:
        copies: 16-bit tensors to which a step of a float32 parameter also writes, by the parameter."""

    #: Attribute of a parameter that holds its gradient.
    grad_name = "grad"
    #: No parameter is left to torch's step, and what the error about one says.
    serves_all = False
    rest_words = (
        "is stepped by torch, which cannot roll a step back and keeps no moments or masters of other dtypes; leave out undo, "
        "moment_dtype and master, or pass contiguous CPU parameters and gradients of 16 or 32 bits"
    )

    def __init__(self, name: str, rule: Rule, precision: Precision):
        super().__init__(name, rule, precision)
        self.copies: dict[torch.Tensor, torch.Tensor] = {}
        self._table: Table | None = None
        self._noted: dict[torch.Tensor, tuple[int, dict[str, Any]]] = {}

    def rows(self, groups: list[dict[str, Any]], states: Any) -> Table:
        """The table of the present tensors."""
        table = self._table
        # Another default device must not apply to the table.
        with torch._C.DisableTorchFunction():
            if table is None or not table.refresh(groups, states) or (table.rest and _can_be_served(table.rest, groups)):
                self._forget_low_bits(states)
                table = self._table = None
                table = self._built(groups, states)
                if not table.refresh(groups, states):
                    raise SpillwayError(f"{self.name}: parameters, gradients or states change while a step reads them")
                self._table = table
        return table

    def _built(self, groups: list[dict[str, Any]], states: Any) -> Table:
        rows: list[Row] = []
        rest: list[tuple[int, int]] = []
        seeds: list[int] | None = [] if self.precision.stochastic else None
        before = 0
        for number, group in enumerate(groups):
            for index, param in enumerate(group["params"]):
                grad = getattr(param, self.grad_name, None)
                if grad is None:
                    continue
                name = name_of(group, number, index)
                check_layout(grad, name, self.name, self.rule.sparse)
                check_kinds(states.get(param, {}), (*self.rule.keys, self.precision.master_state[0]), name)
                if is_torchs(group) or not is_served(param, grad, name):
                    # States lie in the order of the parameters, as torch creates them.
                    states[param]
                    rest.append((number, index))
                    continue
                rows.append(self._row(groups, states, number, index, name))
                if seeds is not None:
                    seeds.append(self.precision.seed_of(before + index, part_of(param)))
            before += len(group["params"])
        if rest and (self.serves_all or self.undo or self.precision.beyond_torch):
            number, index = rest[0]
            raise UnsupportedError(f"{name_of(groups[number], number, index)} {self.rest_words}")
        written = [
            (tensor, at, True)
            for at, row in enumerate(rows)
            for tensor in (row.param, *row.states, *([] if row.master is None else [row.master]))
        ]
        check_memory(written, lambda at: name_of(groups[rows[at].group], rows[at].group, rows[at].place))
        return Table(groups, states, rows, rest, self.rule, seeds, self.precision.master_state[0], self.grad_name)

    def _row(self, groups: list[dict[str, Any]], states: Any, number: int, index: int, name: str) -> Row:
        param = groups[number]["params"][index]
        own, master = self._states_of(groups[number], param, states[param], name), None
        if self.precision.has_master(param):
            key, dtype = self.precision.master_state
            if key == LOW and param.dtype is not torch.bfloat16:
                raise UnsupportedError(
                    f'{name} is {param.dtype}, and master="split" is for torch.bfloat16; pass master="f32", or cast the parameter'
                )
            lay_out(param, states[param], [key])
            master = master_of(self.precision, param, states[param])
            check_state(local(param), master, key, name, (dtype,))
        row = Row(number, index, local(param), local(getattr(param, self.grad_name)), own, master, self.copies.get(param))
        if self.undo or master is not None:
            check_versions([row.param, row.grad, *own, *([] if master is None else [master])], name)
        return row

    def _states_of(self, group: dict[str, Any], param: torch.Tensor, state: dict[str, Any], name: str) -> tuple[torch.Tensor, ...]:
        rule, precision = self.rule, self.precision
        if not state:
            # Made apart: a signal handler that raises leaves all states or none.
            new = precision.new_state(rule, group, param)
            state.update(new)
        lay_out(param, state, list(rule.keys))
        check_complete(state, rule.names, name)
        found = tuple(local(state[key]) for key in rule.keys)
        dtypes = (precision.of_moments(param),) if precision.beyond_torch else (torch.float32, param.dtype)
        for key, tensor in zip(rule.keys, found):
            check_state(local(param), tensor, key, name, dtypes)
        return found

    def saved(self, states: Any) -> Any:
        """The states; low bits belong to the present parameters."""
        self._forget_low_bits(states)
        return states

    def load(self, by_torch: ByTorch) -> None:
        """Loads a state dict; states keep the dtypes of this optimizer."""
        seen: list[dict[str, Any]] = []

        def see(loaded: dict[str, Any], _: list[dict[str, Any]]) -> None:
            check_steps(loaded, self.rule.counted)
            seen.append(dict(loaded))

        groups, states = by_torch(see, False)
        self.precision.load(groups, states, seen[0], list(self.rule.keys))

    def forget(self) -> None:
        """Forgets the tensors of before: a pickle or torch's `load_state_dict` has brought others."""
        self._table, self._last = None, None

    def note_versions(self, states: Any) -> None:
        """Notes that all low bits belong to the present values of their parameters."""
        self._noted = {param: (local(param)._version, state) for param, state in states.items() if LOW in state}

    def _forget_low_bits(self, states: Any) -> None:
        """Makes parameters that the program has written to since their last step their own split masters."""
        if self.precision.master != "split":
            return
        known = {**self._noted, **dict(self._table.noted() if self._table is not None else ())}
        self._noted = {param: note for param, note in known.items() if states.get(param) is note[1] and LOW in note[1]}
        for param, (version, state) in self._noted.items():
            if local(param)._version != version:
                local(state[LOW]).zero_()
                self._noted[param] = local(param)._version, state

    def rollback(self, states: Any) -> None:
        """Restores the parameters and states before the last step."""
        last = self._last
        if last is None:
            raise InvalidArgumentError(
                f"{self.name}.rollback: no step is recorded; construct the optimizer with undo=True, and "
                "call rollback() at most once after a step"
            )
        self._pending = call = Call(last.table, -1)
        try:
            last.rollback(call.status)
        except SpillwayError:
            self._last = None
            raise
        finally:
            self.settle()
        last.close()

    def master(self, param: torch.Tensor, states: Any) -> torch.Tensor:
        """The float32 master of a parameter; the parameter itself if it has none."""
        if not self.precision.has_master(param):
            return param.detach()
        state, own = states.get(param), local(param).detach()
        if not state:
            return own.to(torch.float32)
        with torch.no_grad():
            self._forget_low_bits(states)
            kept = master_of(self.precision, param, state)
        return join(own, kept) if self.precision.master == "split" else kept

    def fresh(self, states: Any) -> Home:
        """A home for a copy of the optimizer."""
        self._forget_low_bits(states)
        return type(self)(self.name, self.rule, self.precision)


def _can_be_served(rest: list[tuple[int, int]], groups: list[dict[str, Any]]) -> bool:
    """True if a parameter that torch stepped can be stepped by Spillway now."""
    for number, index in rest:
        group = groups[number]
        param = group["params"][index]
        if not is_torchs(group) and is_served(param, param.grad, name_of(group, number, index)):
            return True
    return False
