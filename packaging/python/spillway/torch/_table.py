"""The C table of all parameters of an optimizer, which is verified and patched before each step.

Frameworks replace gradients at every step, and sometimes parameters, states and groups. A table is therefore never used unchecked:
`Table.refresh` compares every pointer and property that the kernels rely on with the tensors of now, in passes over whole lists
without Python code per tensor. New gradients of the same shape are patched in; after any other difference the caller builds a new table.

The step counts of all rows lie in one tensor, and each `state["step"]` is a view of one element. Counting a step is one addition."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from itertools import compress
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch

from .. import _abi
from ._rows import CODES, DTensor, Row, local, name_of
from ._same import properties_of

_WORDS = ctypes.sizeof(_abi.Tensor) // 8
_data_ptr = torch.Tensor.data_ptr
_grad = attrgetter("grad")


class Table:
    """Rows of an optimizer.

    Args:
        optimizer: The torch optimizer, whose state has every key of `keys` for each row.
        rows: The parameters that Spillway steps.
        keys: Names of the states, with the fields of the C struct.
        make_options: Makes a C options struct of a group at a step number."""

    def __init__(self, optimizer: torch.optim.Optimizer, rows: list[Row], keys: dict[str, str], make_options: Callable[[], Any]):
        self._optimizer, self._keys = optimizer, keys
        # The rows themselves hold gradients and states, which must not live longer than their owners keep them.
        self.places = [(row.group, row.place) for row in rows]
        self._lists = [list(group["params"]) for group in optimizer.param_groups]
        params = [param for params in self._lists for param in params]
        self._params = params
        self._types = [type(param.grad) for param in params]
        chosen, places = set(self.places), [(number, index) for number, params in enumerate(self._lists) for index in range(len(params))]
        self._mask = None if len(chosen) == len(params) else [place in chosen for place in places]
        self.owners = [self._lists[number][index] for number, index in self.places]
        self._distributed = [at for at, owner in enumerate(self.owners) if isinstance(owner, DTensor)]
        self._inner = [optimizer.state[owner] for owner in self.owners]
        self.grads: list[torch.Tensor] = []
        self._state_ids = list(map(id, optimizer.state.values()))
        self._params_same = properties_of([row.param for row in rows])
        self._grads_same = properties_of([row.grad for row in rows])
        self.entries = (_abi.Tensor * len(rows))()
        self._words = torch.frombuffer(self.entries, dtype=torch.int64).view(-1, _WORDS) if rows else torch.empty(0, _WORDS)
        self._fill(rows)
        self._gather_steps()
        self._make_options(make_options)

    def _fill(self, rows: list[Row]) -> None:
        for entry, row in zip(self.entries, rows):
            entry.struct_size, entry.n = ctypes.sizeof(_abi.Tensor), row.param.numel()
            entry.param_dtype, entry.grad_dtype = CODES[row.param.dtype], CODES[row.grad.dtype]
            entry.state_dtype = CODES[row.states[0].dtype]
            entry.param, entry.grad = row.param.data_ptr(), row.grad.data_ptr()
            for field, state in zip(self._keys.values(), row.states):
                setattr(entry, field, state.data_ptr())
        self._addresses = {"param": array("Q", [row.param.data_ptr() for row in rows]),
                           "grad": array("Q", [row.grad.data_ptr() for row in rows])}
        for at, key in enumerate(self._keys):
            self._addresses[key] = array("Q", [row.states[at].data_ptr() for row in rows])

    def _gather_steps(self) -> None:
        """Moves the step counts into one tensor."""
        self._counting = all("step" in inner for inner in self._inner)
        if not self._counting or not self._inner:
            self.steps = torch.zeros(len(self._inner))
            self._step_ids: list[int] = []
            return
        self.steps = torch.stack([inner["step"].detach().cpu() for inner in self._inner])
        for inner, step in zip(self._inner, self.steps.unbind()):
            inner["step"] = step
        self._step_ids = list(map(id, map(itemgetter("step"), self._inner)))

    def _make_options(self, make_options: Callable[[], Any]) -> None:
        """One C options struct for each pair of group and step count."""
        self._known = self.steps.clone()
        pairs = [(number, int(step)) for (number, _), step in zip(self.places, self.steps.tolist())]
        self.options = {pair: make_options() for pair in dict.fromkeys(pairs)}
        for entry, pair in zip(self.entries, pairs):
            entry.options = ctypes.addressof(self.options[pair])

    def refresh(self) -> bool:
        """Patches new gradients in; False if the table no longer describes the optimizer's tensors."""
        try:
            return self._same_lists() and self._same_params() and self._same_states() and self._new_grads()
        except (KeyError, RuntimeError, NotImplementedError, AttributeError):
            # A state was removed, or a tensor has no address any more; building the table again names the reason.
            return False

    def _same_lists(self) -> bool:
        groups = self._optimizer.param_groups
        return len(groups) == len(self._lists) and all(
            len(group["params"]) == len(known) and all(map(is_, group["params"], known))
            for group, known in zip(groups, self._lists))

    def _same_params(self) -> bool:
        params = self._local(self.owners)
        return self._params_same(params) and array("Q", map(_data_ptr, params)) == self._addresses["param"]

    def _same_states(self) -> bool:
        if list(map(id, self._optimizer.state.values())) != self._state_ids:
            return False
        if self._counting and (list(map(id, map(itemgetter("step"), self._inner))) != self._step_ids
                               or not torch.equal(self.steps, self._known)):
            return False
        return all(array("Q", map(_data_ptr, self._local(list(map(itemgetter(key), self._inner))))) == self._addresses[key]
                   for key in self._keys)

    def _new_grads(self) -> bool:
        grads = list(map(_grad, self._params))
        if list(map(type, grads)) != self._types:
            return False
        if self._mask is not None:
            grads = list(compress(grads, self._mask))
        if any(grads[at].placements != self.owners[at].placements for at in self._distributed):
            return False
        grads = self._local(grads)
        if not self._grads_same(grads):
            return False
        self.grads, addresses = grads, array("Q", map(_data_ptr, grads))
        if grads and addresses != self._addresses["grad"]:
            self._words[:, _abi.Tensor.grad.offset // 8] = torch.frombuffer(addresses, dtype=torch.int64)
            self._addresses["grad"] = addresses
        return True

    def _local(self, tensors: list[Any]) -> list[Any]:
        return list(map(local, tensors)) if self._distributed else tensors

    def release_grads(self) -> None:
        """Drops the references to the gradients, so that `zero_grad` frees their memory."""
        self.grads = []

    def count_step(self, by: int = 1) -> None:
        """Adds to the step counts. After an interruption by a signal handler, `refresh` finds that the counts disagree."""
        if self._counting:
            self.steps.add_(by)
        self.options = {(group, step + by): options for (group, step), options in self.options.items()}
        if self._counting:
            self._known.add_(by)

    def written(self) -> None:
        """Tells autograd that the parameters have new values."""
        torch.autograd.graph.increment_version(self._local(self.owners))

    def name(self, number: int) -> str:
        """The name of a row in messages."""
        group, index = self.places[number]
        return name_of(self._optimizer.param_groups[group], group, index)
