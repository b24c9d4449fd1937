"""Where an optimizer's states are, and the calls of the library on them, until the optimizer has noted their results.

`Home` is what an optimizer asks of the home of its states. `Memory` and `TierHome` are the homes. They get the groups and states of the
optimizer, never the optimizer.

A signal handler may raise between any two bytecodes, also after the library has written the parameters. Invariants:
- The home holds a call before the library is entered. The library's status and the new versions are stored without a bytecode between the
  call and the store.
- `Call.settle` may be repeated: it sets step counts and versions to values that were computed once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar

import torch

from .. import _abi, _native
from .._commit import Commit
from .._groups import Rule
from .._native_handle import _NativeHandle
from .._snapshot import Snapshot
from ..errors import InvalidArgumentError
from ._states import Precision

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
    scale = 1.0

    def __init__(self, name: str, rule: Rule, precision: Precision):
        self.name, self.rule, self.precision, self.undo = name, rule, precision, False
        self._last: Recorded | None = None
        self._pending: Call | None = None

    # The step: `begin`, then `rows`, then `step`.

    def alone(self, work: Callable[[], _Result]) -> _Result:
        """Returns work(), during which no other thread uses the states, where a home keeps them apart. Notes the last call of the library
        before."""
        if self._pending is not None:
            self.settle()
        return work()

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
            self.settle()

    def _recorded(self, rows: Any) -> Recorded:
        """The next step of a table, to be run, with a record for a rollback."""
        return LastStep(rows, self.rule.c_name)

    def skipped(self) -> None:
        """A step was skipped: nothing of it happens."""

    def settle(self) -> None:
        """Notes the result of a call of the library after which a signal handler has raised."""
        call = self._pending
        # Without a status, the library was not called, or this is a signal handler during the call.
        if call is not None and call.status:
            if call.settle():
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

    def settle(self) -> bool:
        """Notes step counts and versions of a call that succeeded; True if it did."""
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
            self._rows.note_versions(versions[: self._recorded])
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
        self.written = table.written()
        self._written_then = _present(self.written)

    def run(self, status: list[int]) -> None:
        """Makes the step, and appends the status of the call to `status`."""
        raise NotImplementedError

    def note_versions(self, versions: list[int]) -> None:
        """Remembers the versions of `written` after the step: a rollback needs the values of then."""
        self._written_then = [(version, address) for version, (_, address) in zip(versions, self._written_then)]

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
        options.mode, options.tensors = 1, len(table.places)
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


def _present(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Version and address of each tensor: a write changes one of them, except one through `data` or numpy."""
    return [(tensor._version, tensor.data_ptr()) for tensor in tensors]
