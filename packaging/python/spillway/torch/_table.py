"""The C table of all parameters of an optimizer, which is verified and patched before each step.

Frameworks replace gradients at every step, and sometimes parameters, states and groups. A table is therefore never used unchecked:
`Table.refresh` compares every pointer and property that the kernels rely on with the tensors of now. New gradients of the same shape are
patched in; after any other difference the caller builds a new table.

The step counts of all rows lie in one piece of memory, and each `state["step"]` is one element of it. Counting a step is one addition."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from operator import is_
from typing import Any

import torch

from .. import _abi, _native, _tensor_rows
from .._native_handle import record_own
from ..errors import InvalidArgumentError, SpillwayError
from ._arguments import is_count
from ._rows import CODES, Row, name_of
from ._slice import LENGTH, Slice

_WORDS = ctypes.sizeof(_abi.Tensor) // 8
_GRAD = _abi.Tensor.grad.offset // 8
#: How the library names a row, an option of a row, and an option of the call; names of options that differ from torch's.
_PLACES = re.compile(r"tensors\[(\d+)\](?:\.options\.(\w+))?|^options\.(\w+)")
_OPTION_NAMES = {"beta1": "betas[0]", "beta2": "betas[1]", "grad_scale": "grad_scale (of the scaler and of max_norm)"}
#: Dtypes in which step counts are kept as they were found.
_COUNTS = (torch.float32, torch.float64, torch.int32, torch.int64)


class Table:
    """Rows of an optimizer.

    Args:
        optimizer: The torch optimizer, whose state has every key of `keys` for each row.
        rows: The parameters that Spillway steps, in the order of the groups.
        keys: Names of the states, with the fields of the C struct.
        make_options: Makes a C options struct, of the group of a place.
        own_options: Each row has options of its own, else the rows of one group and step count share them.
        master: Name of the state that holds masters.
        grad_name: Attribute of a parameter that holds its gradient."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rows: list[Row],
        keys: dict[str, str],
        make_options: Callable[[tuple[int, int]], Any],
        own_options: bool = False,
        master: str = "",
        grad_name: str = "grad",
    ):
        self._optimizer, self._master = optimizer, master
        #: A process group, and for each gradient of the step whether it counts in the group's norm.
        self.counts: tuple[Any, list[bool] | None] = (None, None)
        # The rows themselves hold gradients and states, which must not live longer than their owners keep them.
        self.places = [(row.group, row.place) for row in rows]
        self._copies = [row.copy for row in rows if row.copy is not None]
        self._lists = [list(group["params"]) for group in optimizer.param_groups]
        self._states = list(optimizer.state.values())
        self._slices = self._cut(rows, list(keys), grad_name)
        self.entries = (_abi.Tensor * len(rows))()
        words = torch.frombuffer(self.entries, dtype=torch.int64).view(-1, _WORDS) if rows else torch.empty(0, _WORDS, device="cpu")
        self._grads = words[:, _GRAD]
        self._fill(rows, list(keys.values()))
        self._gather_steps()
        self._make_options(make_options, own_options)

    def _cut(self, rows: list[Row], keys: list[str], grad_name: str) -> list[Slice]:
        params = [param for params in self._lists for param in params]
        places = [(number, place) for number, params in enumerate(self._lists) for place in range(len(params))]
        chosen = {place: row.master is not None for place, row in zip(self.places, rows)}
        slices, first, at = [], 0, 0
        while at < len(params):
            # Rows with and without a master have other states: none of the other kind is in the slice.
            kinds = [chosen.get(place) for place in places[at : at + LENGTH]]
            kind = next((kind for kind in kinds if kind is not None), False)
            length = next((number for number, other in enumerate(kinds) if other is (not kind)), len(kinds))
            mask = [other is not None for other in kinds[:length]]
            end = first + sum(mask)
            slices.append(
                Slice(
                    self._optimizer, params[at : at + length], mask, rows[first:end], keys, first, self._master if kind else None, grad_name
                )
            )
            first, at = end, at + length
        return slices

    def _fill(self, rows: list[Row], fields: list[str]) -> None:
        for at, (entry, row) in enumerate(zip(self.entries, rows)):
            try:
                self._fill_row(_tensor_rows.begin(entry, row.param.numel()), row, fields)
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"{self.name(at)}: its {error}; nothing was stepped") from None

    @staticmethod
    def _fill_row(entry: Any, row: Row, fields: list[str]) -> None:
        param, copy = row.param, row.copy
        if row.master is not None and row.master.dtype is torch.float32:
            param, copy = row.master, row.param
        elif row.master is not None:
            entry.param_low = row.master.data_ptr()
        _tensor_rows.put(entry, "param", _span(param), "parameter or master")
        _tensor_rows.put(entry, "grad", _span(row.grad), "gradient")
        if copy is not None:
            _tensor_rows.put(entry, "param_copy", _span(copy), "copy")
        for field, state in zip(fields, row.states):
            _tensor_rows.put(entry, field, _span(state), f"state of the C field {field}")

    def _gather_steps(self) -> None:
        """Moves the step counts into one piece of memory, where counting a step is one addition. Each has a storage of its own there: a
        count that is pickled takes no other one along."""
        inner = [state for part in self._slices for state in part.inner]
        #: Step counts that other processes see too: by the number of the row. They stay where they are.
        self._shared: dict[int, torch.Tensor] = {}
        self._counting = bool(inner) and all("step" in state for state in inner)
        if not self._counting:
            self.steps = torch.zeros(len(inner), device="cpu")
            return
        found = [state["step"] for state in inner]
        for number, step in enumerate(found):
            if not isinstance(step, torch.Tensor) or not is_count(step):
                raise InvalidArgumentError(
                    f"{self.name(number)}: its state 'step' is {step!r}; set a tensor with the number of steps, or load the state again"
                )
        dtype = found[0].dtype if found[0].dtype in _COUNTS else torch.float32
        memory = bytearray(len(found) * dtype.itemsize)
        self.steps = torch.frombuffer(memory, dtype=dtype)
        self.steps.copy_(torch.tensor([float(step) for step in found], dtype=torch.float64, device="cpu"))
        for number, (state, step) in enumerate(zip(inner, found)):
            if step.is_cpu and step.is_shared():
                self._shared[number] = step
            else:
                state["step"] = torch.frombuffer(memory, dtype=dtype, count=1, offset=number * dtype.itemsize).view(())
        for part in self._slices:
            part.note_steps()

    def _make_options(self, make_options: Callable[[tuple[int, int]], Any], own_options: bool) -> None:
        """The C options structs by group, step count and, for rows with options of their own, the place in the group."""
        self._known = self.steps.clone()
        keys = [(number, int(step), place if own_options else -1) for (number, place), step in zip(self.places, self.steps.tolist())]
        self.options = {key: make_options((key[0], key[2])) for key in dict.fromkeys(keys)}
        for entry, key in zip(self.entries, keys):
            entry.options = ctypes.addressof(self.options[key])

    def refresh(self) -> bool:
        """Patches new gradients in; False if the table no longer describes the optimizer's tensors."""
        try:
            return self._same_lists() and all(
                part.is_same() and part.take_grads(self._grads[part.rows.start : part.rows.stop]) for part in self._slices
            )
        except (KeyError, RuntimeError, NotImplementedError, AttributeError, TypeError):
            # A state was removed, or a tensor has no address any more; building the table again names the reason.
            return False

    def _same_lists(self) -> bool:
        groups = self._optimizer.param_groups
        return (
            len(groups) == len(self._lists)
            and all(
                len(group["params"]) == len(known) and all(map(is_, group["params"], known)) for group, known in zip(groups, self._lists)
            )
            and len(self._optimizer.state) == len(self._states)
            and all(map(is_, self._optimizer.state.values(), self._states))
            and (not self._counting or torch.equal(self.steps, self._known))
            and all(float(step) == float(self.steps[number]) for number, step in self._shared.items())
        )

    @property
    def grads(self) -> list[torch.Tensor]:
        """The gradients of the rows, between `refresh` and `release_grads`."""
        return [grad for part in self._slices for grad in part.grads]

    def release_grads(self) -> None:
        """Drops the references to the gradients, so that `zero_grad` frees their memory."""
        for part in self._slices:
            part.grads = []

    def run(self, c_name: str, options: Any, status: list[int]) -> None:
        """Steps all rows; appends the status of the call."""
        record_own(status, f"spw_{c_name}_step", ctypes.byref(options), ctypes.addressof(self.entries), len(self.places), None)

    def check(self, c_name: str, options: Any) -> None:
        """Raises the error with which `run` would refuse; changes nothing."""
        _native.call(f"spw_{c_name}_check", ctypes.byref(options), ctypes.addressof(self.entries), len(self.places))

    def counted(self, by: int) -> tuple[torch.Tensor, dict[tuple[int, int, int], Any]]:
        """Step counts and options after `by` more steps, for `set_counts`."""
        return (
            self.steps + by if self._counting else self.steps.clone(),
            {(group, step + by, place): options for (group, step, place), options in self.options.items()},
        )

    def set_counts(self, counts: tuple[torch.Tensor, dict[tuple[int, int, int], Any]]) -> None:
        """Sets the step counts."""
        steps, self.options = counts
        self.steps.copy_(steps)
        self._known = steps
        for number, step in self._shared.items():
            step.fill_(float(steps[number]))

    def params(self) -> list[torch.Tensor]:
        """The parameters of the rows."""
        return [param for part in self._slices for param in part.local(part.owners)]

    def watched(self) -> list[torch.Tensor]:
        """The parameters whose versions show if the program has written to them."""
        return [param for part in self._slices if part.has_masters for param in part.local(part.owners)]

    def note_versions(self, versions: list[int]) -> None:
        """Remembers the versions of `watched` after a step."""
        for part in self._slices:
            if part.has_masters:
                count = len(part.owners)
                part.versions, versions = versions[:count], versions[count:]

    def noted(self) -> Iterator[tuple[torch.Tensor, tuple[int, dict[str, Any]]]]:
        """Each parameter with a master, its version after the last step, and its states."""
        for part in self._slices:
            if part.has_masters:
                yield from zip(part.owners, zip(part.versions, part.inner))

    def name(self, number: int) -> str:
        """The name of a row in messages."""
        group, place = self.places[number]
        return name_of(self._optimizer.param_groups[group], group, place)

    row_name = name


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    return tensor.data_ptr(), tensor.numel(), CODES[tensor.dtype]


def named(error: SpillwayError, name: Callable[[int], str], group: int | None = None) -> SpillwayError:
    """An error of the library with names of parameters and groups. `group`: the group whose options the call itself had."""

    def place(match: re.Match[str]) -> str:
        row, of_row, of_call = match.groups()
        option = _OPTION_NAMES.get(of_row or of_call, of_row or of_call)
        where = f"param_groups[{group}]" if row is None else name(int(row))
        return where if option is None else f"{where}, option {option}"

    return type(error)(_PLACES.sub(place, str(error)), error.status)
