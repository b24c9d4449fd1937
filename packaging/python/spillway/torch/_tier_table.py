"""The C table of one step of states on a tier: a row for each piece of a parameter in a subgroup."""

from __future__ import annotations

import ctypes
from array import array
from typing import TYPE_CHECKING, Any

import torch

from .. import _abi, _native, _tensor_rows
from .._native_handle import record
from ..errors import SpillwayError, UnsupportedError
from ._rows import CODES, is_served, local, name_of
from ._table import named

if TYPE_CHECKING:
    from ._building import Building
    from ._tier_states import TierStates


class TierTable:
    """The parameters of one step, with the interface of `Table`. It is made for each step: the tier's transfers take far longer.

    Raises:
        InvalidArgumentError, UnsupportedError: A parameter or its gradient does not fit; nothing was stepped."""

    def __init__(self, optimizer: Building, states: TierStates):
        self._optimizer, self._states = optimizer, states
        #: A process group, and for each gradient of the step whether it counts in the group's norm.
        self.counts: tuple[Any, list[bool] | None] = (None, None)
        self.places: list[tuple[int, int]] = []
        self.grads: list[torch.Tensor] = []
        self._numbers: list[int] = []
        for number, group in enumerate(optimizer.param_groups):
            for place, param in enumerate(group["params"]):
                if param.grad is not None:
                    self._add(number, place, group, param)
        #: A row for each gradient, for its norm.
        self.entries = (_abi.Tensor * len(self.grads))()
        for entry, grad in zip(self.entries, self.grads):
            _tensor_rows.put(
                _tensor_rows.begin(entry, grad.numel()), "grad", (grad.data_ptr(), grad.numel(), CODES[grad.dtype]), "gradient"
            )
        self._options: dict[tuple[int, int, int], Any] = {}
        self._rows = self._make_rows()

    def _add(self, number: int, place: int, group: dict[str, Any], param: torch.Tensor) -> None:
        name = name_of(group, number, place)
        parameter = self._states.check(param, name)
        if any(group.get(flag) for flag in ("amsgrad", "capturable", "differentiable")) or not is_served(param, param.grad, name):
            raise UnsupportedError(
                f"{name}: states on a tier need contiguous CPU tensors of 16 or 32 bits, as parameter and as gradient, without "
                "amsgrad, capturable or differentiable"
            )
        self.places.append((number, place))
        self._numbers.append(parameter)
        self.grads.append(local(param.grad))

    def _make_rows(self) -> Any:
        """The rows, sorted by subgroup; those of one group and step count share options."""
        pieces = sorted(
            (piece.subgroup, piece.first, at, piece)
            for at, number in enumerate(self._numbers)
            for piece in self._states.layout.of_parameter[number]
        )
        self._of_row = [at for _, _, at, _ in pieces]
        self._subgroups = array("Q", [subgroup for subgroup, *_ in pieces])
        self._firsts = array("Q", [first for _, first, *_ in pieces])
        self._counts = [self._states.step_count(self._optimizer, number) for number in self._numbers]
        steps = [int(count) for count in self._counts]
        keys = [(group, step, -1) for (group, _), step in zip(self.places, steps)]
        self._options = {key: self._optimizer._new_options((key[0], -1)) for key in dict.fromkeys(keys)}
        rows = (_abi.Tensor * len(pieces))()
        for row, (_, _, at, piece) in zip(rows, pieces):
            grad, param = self.grads[at], local(self._states.params[self._numbers[at]])
            _tensor_rows.begin(row, piece.count)
            row.param_dtype = row.state_dtype = _abi.DTYPE_F32
            for field, tensor in (("grad", grad), ("param_copy", param)):
                start = tensor.data_ptr() + piece.start * tensor.element_size()
                _tensor_rows.put(row, field, (start, piece.count, CODES[tensor.dtype]), field)
            row.options = ctypes.addressof(self._options[keys[at]])
        return rows

    @property
    def options(self) -> dict[tuple[int, int, int], Any]:
        """The C options structs by group, step count and -1."""
        return self._options

    def run(self, c_name: str, options: Any, status: list[int]) -> None:
        """Steps all rows; appends the status of the call."""
        self._states.take_written()
        self._states.swap._through(
            lambda handle: record(
                status,
                "spw_swap_adam_step_parts",
                handle,
                ctypes.byref(options),
                ctypes.addressof(self._rows),
                self._subgroups.buffer_info()[0],
                self._firsts.buffer_info()[0],
                len(self._rows),
            )
        )

    def check(self, c_name: str, options: Any) -> None:
        """Raises the error of options out of range; changes nothing. The tensors of a row are the tier's."""
        for (group, _, _), own in self._options.items():
            try:
                _native.call("spw_adam_check", ctypes.byref(own), None, 0)
            except SpillwayError as error:
                raise named(error, self.row_name, group) from None

    def counted(self, by: int) -> tuple[list[float], int]:
        """Step counts of the parameters and of the optimizer after `by` more steps, for `set_counts`."""
        return [float(count) + by for count in self._counts], self._states.count + by

    def set_counts(self, counts: tuple[list[float], int]) -> None:
        """Sets the step counts."""
        steps, self._states.count = counts
        for count, step in zip(self._counts, steps):
            count.fill_(step)

    def params(self) -> list[torch.Tensor]:
        """The parameters that are stepped."""
        return [local(self._states.params[number]) for number in self._numbers]

    def watched(self) -> list[torch.Tensor]:
        """The parameters whose versions show if the program has written to them."""
        return self.params()

    def note_versions(self, versions: list[int]) -> None:
        """Remembers the versions of `watched` after a step."""
        for number, version in zip(self._numbers, versions):
            self._states.set_version(number, version)

    def release_grads(self) -> None:
        """Drops the references to the gradients."""
        self.grads = []

    def name(self, number: int) -> str:
        """The name of a parameter in messages, by its place in `grads`."""
        group, place = self.places[number]
        return name_of(self._optimizer.param_groups[group], group, place)

    def row_name(self, row: int) -> str:
        """The name of the parameter of a row."""
        return self.name(self._of_row[row])
