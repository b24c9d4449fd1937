"""The last step of an optimizer, which can be rolled back."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from .. import _abi, _native
from .._native_handle import _NativeHandle, record
from ..errors import InvalidArgumentError

if TYPE_CHECKING:
    from ._base import SpillwayOptimizer
    from ._table import Table


class LastStep(_NativeHandle):
    """A recorded step of a table's rows. It keeps the gradients, which a rollback reads, until the next step."""

    closer = "spw_undo_close"

    def __init__(self, optimizer: SpillwayOptimizer, table: Table, count: int, status: list[int]):
        self._table = table
        self._grads, self._versions = table.grads, [grad._version for grad in table.grads]
        self._addresses = [grad.data_ptr() for grad in table.grads]
        options: Any = _abi.sized(_abi.UndoOptions)
        options.mode, options.tensors = 1, count
        options.elements = sum(entry.n for entry in table.entries)
        self._hold("spw_undo_open", ctypes.byref(options))
        some = next(iter(table.options.values()))
        step = getattr(_native.library(), f"spw_undo_{optimizer.c_name}_step")
        self._through(lambda handle: record(status, step, handle, ctypes.byref(some), ctypes.addressof(table.entries), count, None))

    def rollback(self) -> None:
        """Restores every bit of parameters and states."""
        same = [grad._version for grad in self._grads] == self._versions
        if not same or [grad.data_ptr() for grad in self._grads] != self._addresses:
            raise InvalidArgumentError("rollback: a gradient was written to since the step, and a rollback reads it; roll back before "
                                       "zero_grad(set_to_none=False) and before the next backward")
        self._call("spw_undo_rollback")
        self._table.count_step(-1)
        self._table.written()
        self.close()
