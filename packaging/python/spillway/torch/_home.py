"""Where an optimizer's states are, and the calls of the library on them, until the optimizer has noted their results.

`Home` is what an optimizer asks of the home of its states. `Memory` is host memory: a table of the present tensors, which is built of the
parameters that Spillway serves, and again after a change that a table cannot take. `TierHome` is a tier. Homes get the groups and states of
the optimizer, never the optimizer.

A signal handler may raise between any two bytecodes, also after the library has written the parameters. Invariants:
- The home holds a call before the library is entered. The library's status and the new versions are stored without a bytecode between the
  call and the store.
- `Call.note` may be repeated: it sets step counts and versions to values that were computed once."""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar

import torch

from .. import _abi, _native
from .._commit import Commit
from .._groups import Rule, is_torchs
from .._live.publisher import Figures
from .._native_handle import _NativeHandle
from .._snapshot import Snapshot
from .._written import facts
from ..errors import InvalidArgumentError, SpillwayError, UnsupportedError
from ._codes import blocks_of, check_codes, is_scales
from ._foreign import as_torchs
from ._low_bits import Aside, Note, first_note, put_back, zero_stale, zero_stale_aside
from ._norm import part_of
from ._offload.memory import Memory as MemoryBytes
from ._offload.memory import of_states
from ._states import LOW, MASTER, MOMENTS, Precision, check_masters, check_steps, join, master_of, with_values
from ._table import Table
from ._tensors import (
    DTensor,
    Row,
    check_complete,
    check_kinds,
    check_layout,
    check_memory,
    check_state,
    check_versions,
    is_served,
    lasting,
    lay_out,
    local,
    name_of,
)

_version = attrgetter("_version")
_increment = torch._C._increment_version
_Result = TypeVar("_Result")
_Groups = list[dict[str, Any]]
#: Loads a state dict as torch does, after a function has seen it and the groups, or has replaced it by its result. Returns groups and
#: states. With True, the states stay those of before.
ByTorch = Callable[[Callable[[dict[str, Any], _Groups], Any], bool], tuple[_Groups, Any]]


class Home:
    """Base of the homes.

    Args:
        name: Name of the optimizer's class, for messages.
        rule: Its rule.
        precision: The dtypes of its states."""

    #: The step that a resumed optimizer begins with, and the bytes that were given to its commit.
    resumed_step: int | None = None
    payload = b""
    #: Factor of the gradients of a step before they are clipped.
    scale: float = 1.0

    def __init__(self, name: str, rule: Rule, precision: Precision):
        self.name: str = name
        self.rule: Rule = precision.rule_of(rule)
        self.precision: Precision = precision
        self.undo: bool = False
        self._last: Recorded | None = None
        self._pending: Call | None = None

    def facts(self) -> dict[str, Any]:
        """Keywords of the optimizer that only this home knows, for its repr."""
        return {}

    def memory(self, states: Any) -> MemoryBytes:
        """Bytes of the states now, by kind."""
        raise NotImplementedError

    def check_undo(self) -> None:
        """Raises UnsupportedError if steps cannot be recorded for a rollback."""

    # The step, inside of `alone` and `together`: `begin`, then `rows`, then `step`.

    def alone(self, work: Callable[[], _Result]) -> _Result:
        """Returns work(), during which no other thread uses the states, where a home keeps them apart. Notes the last call of the library
        before."""
        if self._pending is not None:
            self.note_result(late=True)
        return work()

    def together(self, work: Callable[[], None]) -> None:
        """Calls work(), a step. If processes share a commit, all of them raise where it fails in one."""
        work()

    def begin(self, groups: list[dict[str, Any]], undo: bool) -> None:
        """Begins a step: the one before cannot be rolled back any more. `undo`: this one can."""
        self._last, self._pending, self.undo = None, None, undo

    def rows(self, groups: list[dict[str, Any]], states: Any) -> Any:
        """The table of the present tensors, with everything checked that can be before the library is called: a Table or a TierTable."""
        raise NotImplementedError

    def step(self, rows: Any, options: Any) -> None:
        """Steps the rows of a table, by one call of the library. `options`: those of one of the rows."""
        last = self._recorded(rows) if self.undo else None
        # Held before the call: a signal handler may raise after the library has stepped.
        self._pending = call = Call(rows, 1, last)
        try:
            if last is None:
                rows.run(options, call.status)
            else:
                last.run(call.status)
            if call.status[0]:
                _native.check(call.status[0])
        finally:
            self.note_result()

    def _recorded(self, rows: Any) -> Recorded:
        """The next step of a table, to be run, with a record for a rollback."""
        return LastStep(rows, self.rule.c_name)

    def skipped(self) -> None:
        """A step was skipped: nothing of it happens."""

    def passed(self) -> None:
        """A step had no gradients here."""

    def note_result(self, late: bool = False) -> None:
        """Notes the result of a call of the library. `late`: a signal handler has raised, and the program has continued since."""
        call = self._pending
        # Without a status, the library was not called, or this is a signal handler during the call.
        if call is not None and call.status:
            if call.note(late):
                self._last = call.last
            self._pending = None

    # Between steps; inside of `alone`.

    def saved(self, states: Any) -> Any:
        """The states with all their values, for a state dict."""
        raise NotImplementedError

    def load(self, by_torch: ByTorch) -> None:
        """Loads a state dict."""
        raise NotImplementedError

    def forget(self) -> None:
        """Forgets the tensors of before: a pickle or torch's `load_state_dict` has brought others."""

    def note_versions(self, states: Any) -> None:
        """Notes that all masters belong to the present values of their parameters."""

    def rollback(self, states: Any) -> None:
        """Restores the parameters and states before the last step, or those of the last commit."""
        raise NotImplementedError

    def master(self, param: torch.Tensor, states: Any) -> torch.Tensor:
        """The float32 master of a parameter."""
        raise NotImplementedError

    def fresh(self, states: Any) -> Home:
        """A home for a copy of the optimizer."""
        raise NotImplementedError

    def check_new_group(self) -> None:
        """Raises an error if no group can be added."""

    def commit(self, states: Any, step: int | None, payload: bytes, wait: bool) -> Commit | None:
        """Makes the states durable."""
        raise InvalidArgumentError(f"{self.name}.commit: the states are in host memory; construct the optimizer with tier")

    def snapshot(self, directory: Any, bytes_per_second: int, keep: int | None) -> Snapshot:
        """Starts to write the last commit to a directory."""
        raise InvalidArgumentError(f"{self.name}.snapshot: the states are in host memory; construct the optimizer with tier")

    def restore(self, states: Any, directory: Any) -> int:
        """Returns to a snapshot; returns its step."""
        raise InvalidArgumentError(f"{self.name}.restore: the states are in host memory; construct the optimizer with tier")

    def close(self) -> None:
        """Closes a tier."""


class Call:
    """A call of the library for all rows of a table.

    Args:
        rows: A Table or a TierTable.
        by: What the call adds to the step counts.
        last: The record of a step that can be rolled back.

    Attributes:
        status: Receives the status of the call.
        last: The record, once the step is noted; None for a rollback."""

    def __init__(self, rows: Any, by: int, last: Recorded | None = None):
        self.status: list[int] = []
        self.last, self._rows, self._counts = last, rows, rows.counted(by)
        self._params, self._watched = rows.params(), rows.watched() if rows.has_masters else []
        self._recorded = len(self._watched)
        if last is not None:
            self._watched = [*self._watched, *last.written]
        self._before = list(map(_version, self._watched))
        self._after: list[Any] = []
        self._now: list[int] = []

    def note(self, late: bool) -> bool:
        """Notes step counts and marks of a call that succeeded; True if it did."""
        if self.status != [0]:
            return False
        if not self._after:
            self._now = list(map(_version, self._watched))
            self._after.extend(chain(map(_increment, (self._params,)), map(_version, self._watched)))
        versions = self._after[1:]
        if self._now != self._before:
            # The program has written to a parameter since an interrupted call: no version marks the values of the step.
            versions = [after if now == before else -1 for after, now, before in zip(versions, self._now, self._before)]
        self._rows.set_counts(self._counts)
        if self._recorded:
            self._rows.note(versions[: self._recorded], late)
        if self.last is not None:
            self.last.note_versions(versions[self._recorded :])
        return True


class Recorded:
    """A step of a table's rows that can be rolled back. It keeps the gradients, which a rollback reads, until the next step, and knows
    the tensors that the step wrote."""

    def __init__(self, table: Any):
        self.table = table
        self._grads, self._grads_then = table.grads, _present(table.grads)
        #: The tensors that the step writes.
        self.written: list[Any] = table.written()
        self._written_then = _present(self.written)

    def run(self, status: list[int]) -> None:
        """Makes the step, and appends the status of the call to `status`."""
        raise NotImplementedError

    def note_versions(self, versions: list[int]) -> None:
        """Remembers the versions of `written` after the step: a rollback needs the values of then."""
        self._written_then = [(own, after, *rest) for after, (own, _, *rest) in zip(versions, self._written_then)]

    def rollback(self, status: list[int]) -> None:
        """Restores every bit of parameters and states; appends the status of the call."""
        raise NotImplementedError

    def close(self) -> None:
        """Frees the record."""

    def _check_unchanged(self) -> None:
        if not self.table.has_memory() or _present(self.written) != self._written_then:
            raise InvalidArgumentError(
                "rollback: a parameter or a state was written to since the step, or replaced, so its values before the step are lost; "
                "roll back before anything else writes to them"
            )
        if not self.table.fits(self._grads) or _present(self._grads) != self._grads_then:
            raise InvalidArgumentError(
                "rollback: a gradient was written to since the step, and a rollback reads it; roll back before "
                "zero_grad(set_to_none=False) and before the next backward"
            )


class LastStep(Recorded, _NativeHandle):
    """A recorded step whose record is an spw_undo."""

    closer = "spw_undo_close"
    close = _NativeHandle.close

    def __init__(self, table: Any, c_name: str):
        super().__init__(table)
        self._c_name = c_name
        options: Any = _abi.sized(_abi.UndoOptions)
        options.mode, options.tensors = _abi.UNDO_MODE_DELTA, len(table.places)
        options.elements = sum(entry.n for entry in table.entries)
        self._hold("spw_undo_open", ctypes.byref(options))

    def run(self, status: list[int]) -> None:
        """Makes the step, and appends the status of the call to `status`."""
        table, some = self.table, next(iter(self.table.options.values()))
        step = f"spw_undo_{self._c_name}_step"
        self._recorded(status, step, ctypes.byref(some), ctypes.addressof(table.entries), len(table.places), None)

    def rollback(self, status: list[int]) -> None:
        """Restores every bit of parameters and states; appends the status of the call."""
        self._check_unchanged()
        self._recorded(status, "spw_undo_rollback")


def _present(tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    """The facts of each tensor. Sums, which see a write through `data` or numpy, would cost a third of a step."""
    return [facts(tensor) for tensor in tensors]


def _nothing() -> None:
    """There is no table."""


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
        #: Notes of parameters that a former table has stepped.
        self._noted: dict[torch.Tensor, Note] = {}
        #: Low bits that were settled since the last step.
        self._aside: dict[torch.Tensor, Aside] = {}
        #: What is published; None before the first step, because a home that was not used can be pickled.
        self._figures: Figures | None = None
        #: The bytes of the states, and the table that has them.
        self._bytes: tuple[Callable[[], Table | None], dict[str, int]] = (_nothing, {})

    def together(self, work: Callable[[], None]) -> None:
        """As of the base."""
        begun = time.perf_counter()
        work()
        if self._figures is None:
            self._figures = Figures(self.name, self, Memory._told)
        self._figures.stepped(begun)

    def memory(self, states: Any) -> MemoryBytes:
        """As of the base."""
        return of_states(states.values())

    def _told(self) -> dict[str, Any]:
        """The figures that are published. States are in the table of the last step, and are counted once for each table."""
        table, (known, sizes) = self._table, self._bytes
        if table is not None and table is not known():
            sizes = table.state_bytes()
            self._bytes = weakref.ref(table), sizes
        return {"where": "states in host memory", "memory": {"host": sizes}}

    def rows(self, groups: list[dict[str, Any]], states: Any) -> Table:
        """The table of the present tensors."""
        if self._aside:
            self._put_back(states)
        table = self._table
        # Another default device must not apply to the table.
        with torch._C.DisableTorchFunction():
            # The usual step makes no tensor that has to last.
            if table is not None and not torch.is_inference_mode_enabled() and _serves(table, groups, states):
                return table
            return self._renewed(groups, states)

    @lasting
    def _renewed(self, groups: list[dict[str, Any]], states: Any) -> Table:
        table = self._table
        if table is None or not _serves(table, groups, states):
            self._forget_low_bits(states)
            self._table = None
            table = self._built(groups, states)
            if not table.refresh(groups, states):
                raise SpillwayError(f"{self.name}: parameters, gradients or states change while a step reads them")
            self._table = table
        return table

    def step(self, rows: Any, options: Any) -> None:
        """Steps the rows of a table, by one call of the library. `options`: those of one of the rows."""
        self._aside = {}
        super().step(rows, options)

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
        own, master, sums = self._states_of(groups[number], param, states[param], name), None, None
        if self.precision.has_master(param):
            key, dtype = self.precision.master_state
            if key == LOW and param.dtype is not torch.bfloat16:
                raise UnsupportedError(
                    f'{name} is {param.dtype}, and master="split" is for torch.bfloat16; pass master="f32", or cast the parameter'
                )
            # Making the master reads the one that there is, of either kind.
            check_masters(states[param], name)
            lay_out(param, states[param], [key])
            master = master_of(self.precision, param, states[param])
            check_state(local(param), master, key, name, (dtype,))
            if key == LOW:
                known = self._noted.get(param)
                note = known.present() if known is not None and known.is_of(states[param]) else first_note(states[param])
                sums = note.sums
        row = Row(number, index, local(param), local(getattr(param, self.grad_name)), own, master, self.copies.get(param), sums)
        if self.undo or master is not None:
            check_versions([row.param, row.grad, *own, *([] if master is None else [master])], name)
        return row

    def _states_of(self, group: dict[str, Any], param: torch.Tensor, state: dict[str, Any], name: str) -> tuple[torch.Tensor, ...]:
        rule, precision = self.rule, self.precision
        if precision.coded and isinstance(param, DTensor):
            raise UnsupportedError(f'{name} is a DTensor, whose parts may begin within a block of codes; pass moment_dtype="bf16"')
        if not state:
            # Made apart: a signal handler that raises leaves all states or none.
            new = precision.new_state(rule, group, param)
            state.update(new)
        lay_out(param, state, list(rule.keys))
        check_complete(state, rule.names, name)
        found = tuple(local(state[key]) for key in rule.keys)
        dtypes = (precision.of_moments(param),) if precision.beyond_torch else (torch.float32, param.dtype)
        for key, tensor in zip(rule.keys, found):
            if is_scales(key):
                check_state(torch.empty(blocks_of(local(param).numel()), device="meta"), tensor, key, name, (torch.bfloat16,))
            else:
                check_state(local(param), tensor, key, name, dtypes)
        return found

    def saved(self, states: Any) -> Any:
        """The states; low bits belong to the present parameters."""
        self._forget_low_bits(states)
        return states

    def load(self, by_torch: ByTorch) -> None:
        """Loads a state dict; states keep the dtypes of this optimizer."""
        seen: list[dict[str, Any]] = []
        before = self._table, self._last, self._noted

        def see(loaded: dict[str, Any], _: list[dict[str, Any]]) -> dict[str, Any]:
            loaded = as_torchs(loaded, MOMENTS if self.precision.coded else list(self.rule.keys))
            check_steps(loaded, self.rule.counted)
            for number, state in loaded["state"].items():
                check_codes(state, f"state[{number!r}]")
            # torch keeps the tensors of the dict where their dtypes fit.
            seen.append({**loaded, "state": {number: _lasting(state) for number, state in loaded["state"].items()}})
            return seen[0]

        try:
            groups, states = by_torch(see, False)
            self.precision.load(groups, states, seen[0], list(self.rule.keys))
        except BaseException:
            self._table, self._last, self._noted = before
            raise

    def forget(self) -> None:
        """Forgets the tensors of before: a pickle or torch's `load_state_dict` has brought others."""
        self._table, self._last = None, None

    def note_versions(self, states: Any) -> None:
        """Notes that all low bits belong to the present values of their parameters."""
        self._noted = {param: first_note(state) for param, state in states.items() if LOW in state}
        zero_stale(self._noted.items())

    def _forget_low_bits(self, states: Any) -> None:
        """Makes low bits zero that the program has made stale, until it restores the parameter or a step is taken."""
        if self.precision.master == "split":
            self._put_back(states)
            self._noted = {param: note.present() for param, note in self._notes().items() if note.is_of(states.get(param))}
            self._aside = zero_stale_aside(self._noted.items())

    def _put_back(self, states: Any) -> None:
        aside, self._aside = self._aside, {}
        put_back(aside, states)

    def _notes(self) -> dict[torch.Tensor, Note]:
        """All notes; those of the present table come last, as they are newer."""
        return {**self._noted, **dict(self._table.noted() if self._table is not None else ())}

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
            self.note_result()
        last.close()

    def master(self, param: torch.Tensor, states: Any) -> torch.Tensor:
        """The float32 master of a parameter; the parameter itself if it has none."""
        if not self.precision.has_master(param):
            return param.detach()
        state, own = states.get(param), local(param).detach()
        if not state or not (LOW in state or MASTER in state):
            return own.to(torch.float32)
        # Nothing is written: the program may put back its weights before the next step.
        with torch.no_grad():
            if self.precision.master == "f32" and MASTER in state:
                return with_values(local(state[MASTER]), own)
            if LOW not in state:
                return own.to(torch.float32)
            note = self._notes().get(param)
            if note is None or not note.is_of(state):
                return join(own, local(state[LOW]))
            aside = self._aside.get(param)
            settled = (aside.before if aside is not None and aside.is_of(state) else note).copy()
            zero_stale([(param, settled)])
            return join(own, local(settled.low))

    def fresh(self, states: Any) -> Home:
        """A home for a copy of the optimizer."""
        self._forget_low_bits(states)
        return type(self)(self.name, self.rule, self.precision)


def _lasting(state: Any) -> Any:
    """An entry of a state dict without inference tensors, which have copies in their place."""
    if not isinstance(state, dict) or not any(isinstance(value, torch.Tensor) and value.is_inference() for value in state.values()):
        return state
    return {key: value.clone() if isinstance(value, torch.Tensor) and value.is_inference() else value for key, value in state.items()}


def _serves(table: Table, groups: list[dict[str, Any]], states: Any) -> bool:
    """True if a table is that of the present tensors."""
    return table.refresh(groups, states) and not (table.rest and _can_be_served(table.rest, groups))


def _can_be_served(rest: list[tuple[int, int]], groups: list[dict[str, Any]]) -> bool:
    """True if a parameter that torch stepped can be stepped by Spillway now."""
    for number, index in rest:
        group = groups[number]
        param = group["params"][index]
        if not is_torchs(group) and is_served(param, param.grad, name_of(group, number, index)):
            return True
    return False
