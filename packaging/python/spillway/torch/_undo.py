"""The last step of an optimizer, which can be rolled back."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import _abi, _native
from .._native_handle import _NativeHandle, record
from ..errors import InvalidArgumentError
from ._rows import local

if TYPE_CHECKING:
    from ._table import Table


class RecordedStep:
    """A step of a table's rows that can be rolled back. It keeps the gradients, which a rollback reads, until the next step, and knows
    the tensors that the step wrote."""

    def __init__(self, optimizer: torch.optim.Optimizer, table: Table):
        self._optimizer, self.table = optimizer, table
        self._grads, self._grads_then = table.grads, _present(table.grads)
        params = [optimizer.param_groups[number]["params"][place] for number, place in table.places]
        states = [
            value
            for param in params
            for name, value in optimizer.state[param].items()
            if name != "step" and isinstance(value, torch.Tensor)
        ]
        #: The tensors that the step writes.
        self.written = [local(tensor) for tensor in [*params, *states]]
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
        if _present(self.written) != self._written_then:
            raise InvalidArgumentError(
                "rollback: a parameter or a state was written to since the step, so its values before the step are lost; "
                "roll back before anything else writes to them"
            )
        if _present(self._grads) != self._grads_then:
            raise InvalidArgumentError(
                "rollback: a gradient was written to since the step, and a rollback reads it; roll back before "
                "zero_grad(set_to_none=False) and before the next backward"
            )


class LastStep(RecordedStep, _NativeHandle):
    """A recorded step whose record is an spw_undo."""

    closer = "spw_undo_close"
    close = _NativeHandle.close

    def __init__(self, optimizer: torch.optim.Optimizer, table: Table, c_name: str):
        super().__init__(optimizer, table)
        self._c_name = c_name
        options: Any = _abi.sized(_abi.UndoOptions)
        options.mode, options.tensors = 1, len(table.places)
        options.elements = sum(entry.n for entry in table.entries)
        self._hold("spw_undo_open", ctypes.byref(options))

    def run(self, status: list[int]) -> None:
        """Makes the step, and appends the status of the call to `status`."""
        table, some = self.table, next(iter(self.table.options.values()))
        step = f"spw_undo_{self._c_name}_step"
        self._through(
            lambda handle: record(status, step, handle, ctypes.byref(some), ctypes.addressof(table.entries), len(table.places), None)
        )

    def rollback(self, status: list[int]) -> None:
        """Restores every bit of parameters and states; appends the status of the call."""
        self._check_unchanged()
        self._through(lambda handle: record(status, "spw_undo_rollback", handle))
        _native.check(status[0])


def _present(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Version and address of each tensor: a write changes one of them, except one through `data` or numpy."""
    return [(tensor._version, tensor.data_ptr()) for tensor in tensors]
