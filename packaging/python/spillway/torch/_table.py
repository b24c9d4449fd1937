"""The C table of all parameters of an optimizer, which is verified and patched before each step.

Frameworks replace gradients at every step, and sometimes parameters, states and groups. A table is therefore never used unchecked:
`Table.refresh` compares every pointer and property that the kernels rely on with the tensors of now. New gradients of the same shape are
patched in; after any other difference the caller builds a new table.

The step counts of all rows lie in one tensor, and each `state["step"]` is a view of one element. Counting a step is one addition."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from operator import is_
from typing import Any

import torch

from .. import _abi, _native
from .._native_handle import record
from ..errors import InvalidArgumentError
from ._arguments import is_count
from ._rows import CODES, Row, name_of
from ._slice import LENGTH, Slice

_WORDS = ctypes.sizeof(_abi.Tensor) // 8
_GRAD = _abi.Tensor.grad.offset // 8


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

    def __init__(self, optimizer: torch.optim.Optimizer, rows: list[Row], keys: dict[str, str],
                 make_options: Callable[[tuple[int, int]], Any], own_options: bool = False, master: str = "", grad_name: str = "grad"):
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
            kinds = [chosen.get(place) for place in places[at:at + LENGTH]]
            kind = next((kind for kind in kinds if kind is not None), False)
            length = next((number for number, other in enumerate(kinds) if other is (not kind)), len(kinds))
            mask = [other is not None for other in kinds[:length]]
            end = first + sum(mask)
            slices.append(Slice(self._optimizer, params[at:at + length], mask, rows[first:end], keys, first,
                                self._master if kind else None, grad_name))
            first, at = end, at + length
        return slices

    def _fill(self, rows: list[Row], fields: list[str]) -> None:
        for entry, row in zip(self.entries, rows):
            entry.struct_size, entry.n = ctypes.sizeof(_abi.Tensor), row.param.numel()
            entry.param_dtype, entry.grad_dtype = CODES[row.param.dtype], CODES[row.grad.dtype]
            entry.state_dtype = CODES[row.states[0].dtype]
            entry.param, entry.grad = row.param.data_ptr(), row.grad.data_ptr()
            if row.master is not None and row.master.dtype is torch.int16:
                entry.param_low = row.master.data_ptr()
            elif row.master is not None:
                entry.param, entry.param_dtype = row.master.data_ptr(), _abi.DTYPE_F32
                entry.param_copy, entry.copy_dtype = row.param.data_ptr(), CODES[row.param.dtype]
            elif row.copy is not None:
                entry.param_copy, entry.copy_dtype = row.copy.data_ptr(), CODES[row.copy.dtype]
            for field, state in zip(fields, row.states):
                setattr(entry, field, state.data_ptr())

    def _gather_steps(self) -> None:
        """Moves the step counts into one tensor."""
        inner = [state for part in self._slices for state in part.inner]
        self._counting = bool(inner) and all("step" in state for state in inner)
        if not self._counting:
            self.steps = torch.zeros(len(inner), device="cpu")
            return
        for number, state in enumerate(inner):
            if not isinstance(state["step"], torch.Tensor) or not is_count(state["step"]):
                raise InvalidArgumentError(f"{self.name(number)}: its state 'step' is {state['step']!r}; set a tensor with the number of steps, or "
                                           "load the state again")
        self.steps = torch.stack([state["step"].detach().cpu() for state in inner])
        for state, step in zip(inner, self.steps.unbind()):
            state["step"] = step
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
            return self._same_lists() and all(part.is_same() and part.take_grads(self._grads[part.rows.start:part.rows.stop])
                                                for part in self._slices)
        except (KeyError, RuntimeError, NotImplementedError, AttributeError):
            # A state was removed, or a tensor has no address any more; building the table again names the reason.
            return False

    def _same_lists(self) -> bool:
        groups = self._optimizer.param_groups
        return (len(groups) == len(self._lists)
                and all(len(group["params"]) == len(known) and all(map(is_, group["params"], known))
                        for group, known in zip(groups, self._lists))
                and len(self._optimizer.state) == len(self._states)
                and all(map(is_, self._optimizer.state.values(), self._states))
                and (not self._counting or torch.equal(self.steps, self._known)))

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
        function = getattr(_native.library(), f"spw_{c_name}_step")
        record(status, function, ctypes.byref(options), ctypes.addressof(self.entries), len(self.places), None)

    def counted(self, by: int) -> tuple[torch.Tensor, dict[tuple[int, int, int], Any]]:
        """Step counts and options after `by` more steps, for `set_counts`."""
        return (self.steps + by if self._counting else self.steps.clone(),
                {(group, step + by, place): options for (group, step, place), options in self.options.items()})

    def set_counts(self, counts: tuple[torch.Tensor, dict[tuple[int, int, int], Any]]) -> None:
        """Sets the step counts."""
        steps, self.options = counts
        self.steps.copy_(steps)
        self._known.copy_(steps)

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
