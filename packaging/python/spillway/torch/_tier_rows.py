"""What a tiered step takes from the parameters: pieces in subgroups. The C table of one step has a row for each."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

import torch

from .. import _abi, _native, _tensor_rows
from .._groups import is_torchs
from ..errors import SpillwayError, UnsupportedError
from ._copies import Taken, link_to
from ._table import named
from ._tensors import CODES, check_memory, is_served, local, name_of
from ._tier_states import Piece, TierStates


class TierTable:
    """The parameters of one step, with the interface of `Table`. It is made for each step: the tier's transfers take far longer.

    Args:
        on_tier: The states.
        groups, states: The optimizer's.
        keeps: The gradients may be in use after the step, if it is refused.

    Raises:
        InvalidArgumentError, UnsupportedError: A parameter or its gradient does not fit; nothing was stepped."""

    #: No parameter is left to torch, all have masters, and gradients are where torch has them.
    rest: tuple[tuple[int, int], ...] = ()
    has_masters = True
    grad_name = "grad"

    def __init__(self, on_tier: TierStates, groups: list[dict[str, Any]], states: Any, keeps: bool):
        self._on_tier, self._groups, self._keeps = on_tier, groups, keeps
        # The copies with which those of now are compared.
        on_tier.gradients.wait()
        #: A process group, and for each gradient of the step whether it counts in the group's norm.
        self.counts: tuple[Any, list[bool] | None] = (None, None)
        self.places: list[tuple[int, int]] = []
        #: The gradients that were taken, and where the library reads them.
        self.taken: list[Taken] = []
        #: The number of each parameter of the step.
        self.numbers: list[int] = []
        for number, group in enumerate(groups):
            for place, param in enumerate(group["params"]):
                if param.grad is not None:
                    self._add(number, place, group, param)
        on_tier.gradients.wait()
        self.grads = [taken.memory for taken in self.taken]
        read, written = enumerate(self.grads), enumerate(self.params())
        check_memory([*((grad, at, False) for at, grad in read), *((param, at, True) for at, param in written)], self.name)
        #: A row for each gradient, for its norm.
        self.entries = (_abi.Tensor * len(self.grads))()
        for entry, grad in zip(self.entries, self.grads):
            _tensor_rows.put(
                _tensor_rows.begin(entry, grad.numel()), "grad", (grad.data_ptr(), grad.numel(), CODES[grad.dtype]), "gradient"
            )
        self._rows = self._make_rows(states)

    def _add(self, number: int, place: int, group: dict[str, Any], param: torch.Tensor) -> None:
        name = name_of(group, number, place)
        parameter = self._on_tier.check(param, name)
        if is_torchs(group) or not is_served(param, param.grad, name, True):
            raise UnsupportedError(
                f"{name}: states on a tier need contiguous tensors of 16 or 32 bits, as parameter and as gradient, without "
                "amsgrad, capturable or differentiable"
            )
        self.places.append((number, place))
        self.numbers.append(parameter)
        self.taken.append(self._on_tier.gradients.take(parameter, False))

    def _make_rows(self, states: Any) -> Any:
        """The rows, sorted by subgroup. Those of one group and step count share options, unless they round at random."""
        pieces = sorted(
            (piece.subgroup, piece.first, at, piece)
            for at, number in enumerate(self.numbers)
            for piece in self._on_tier.layout.of_parameter[number]
        )
        self._of_row = [at for _, _, at, _ in pieces]
        self._subgroups = array("Q", [subgroup for subgroup, *_ in pieces])
        self._firsts = array("Q", [first for _, first, *_ in pieces])
        self._counts = [self._on_tier.step_count(states, number) for number in self.numbers]
        steps = [int(count) for count in self._counts]
        #: The C options structs by group, step count and, for rows with options of their own, the row.
        self.options = dict[tuple[int, int, int], Any]()
        rows = (_abi.Tensor * len(pieces))()
        for number, (row, (_, _, at, piece)) in enumerate(zip(rows, pieces)):
            key = (self.places[at][0], steps[at], number if self._on_tier.precision.stochastic else -1)
            if key not in self.options:
                self.options[key] = self._on_tier.rounded(_abi.sized(_abi.AdamOptions), piece)
            weights, moment_code = self._weights(self.numbers[at]), self._on_tier.tiered.swap.moment_code
            put_piece(row, piece, self.grads[at], weights, self.options[key], moment_code)
        if not pieces and steps:
            # A process may hold no element of the parameters. The call has options all the same.
            self.options[self.places[0][0], steps[0], -1] = _abi.sized(_abi.AdamOptions)
        return rows

    def _weights(self, number: int) -> torch.Tensor:
        own = local(self._on_tier.params[number])
        return self._on_tier.weights.of(number) if link_to(own).is_apart else own

    def run(self, options: Any, status: list[int]) -> None:
        """Steps all rows; appends the status of the call. Then `weights` has those of parameters that are not in host memory."""
        params = self._on_tier.params
        apart = [number for number in self.numbers if link_to(params[number]).is_apart]
        self._on_tier.weights.expect(apart, self._on_tier.layout.of_subgroup)
        self._on_tier.take_written()
        self._on_tier.tiered.changes()
        self._on_tier.tiered.swap._recorded(
            status,
            "spw_swap_adam_step_parts",
            ctypes.byref(options),
            ctypes.addressof(self._rows),
            self._subgroups.buffer_info()[0],
            self._firsts.buffer_info()[0],
            len(self._rows),
        )

    def check(self, options: Any) -> None:
        """Raises the error of options out of range; changes nothing. The tensors of a row are the tier's."""
        for (group, _, _), own in self.options.items():
            try:
                _native.call("spw_adam_check", ctypes.byref(own), None, 0)
            except SpillwayError as error:
                raise named(error, self.row_name, group) from None

    def counted(self, by: int) -> tuple[list[float], int]:
        """Step counts of the parameters and of the optimizer after `by` more steps, for `set_counts`."""
        return [float(count) + by for count in self._counts], self._on_tier.count + by

    def set_counts(self, counts: tuple[list[float], int]) -> None:
        """Sets the step counts."""
        steps, self._on_tier.count = counts
        for count, step in zip(self._counts, steps):
            count.fill_(step)

    def params(self) -> list[torch.Tensor]:
        """The parameters that are stepped."""
        return [local(self._on_tier.params[number]) for number in self.numbers]

    def watched(self) -> list[torch.Tensor]:
        """The parameters whose versions show if the program has written to them."""
        return self.params()

    def note_versions(self, versions: list[int]) -> None:
        """Remembers the versions of `watched` after a step."""
        for number, version in zip(self.numbers, versions):
            self._on_tier.set_version(number, version)

    def release_grads(self) -> None:
        """Drops the references to the gradients, unless a step that started during backward has them."""
        self.grads, self.taken = [], []
        if not self._keeps:
            self._on_tier.gradients.forget()

    def name(self, number: int) -> str:
        """The name of a parameter in messages, by its place in `grads`."""
        group, place = self.places[number]
        return name_of(self._groups[group], group, place)

    def row_name(self, row: int) -> str:
        """The name of the parameter of a row."""
        return self.name(self._of_row[row])


def put_piece(row: Any, piece: Piece, grad: torch.Tensor, weights: torch.Tensor, options: Any, moment_code: int) -> None:
    """Writes a piece of a parameter into a row of C: its gradient, where its weights go, the struct of its options, and the code of the
    moments' dtype."""
    _tensor_rows.begin(row, piece.count)
    row.param_dtype, row.state_dtype = _abi.DTYPE_F32, moment_code
    for field, tensor in (("grad", grad), ("param_copy", weights)):
        start = tensor.data_ptr() + piece.start * tensor.element_size()
        _tensor_rows.put(row, field, (start, piece.count, CODES[tensor.dtype]), field)
    row.options = ctypes.addressof(options)
