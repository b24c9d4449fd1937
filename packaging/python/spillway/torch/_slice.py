"""Some consecutive parameters of a table, which are compared with their tensors of the step before.

The comparisons are passes over whole lists without Python code per tensor. A slice is small enough that the objects of its tensors stay
in a processor's cache over all passes: with 10,000 parameters most of the time is the loading of these objects from memory."""

from __future__ import annotations

from array import array
from itertools import compress
from operator import attrgetter, itemgetter
from typing import Any

import torch

from ._precision import MASTER
from ._rows import DTensor, Row, local
from ._same import properties_of

#: Most parameters of a slice.
LENGTH = 256
_data_ptr = torch.Tensor.data_ptr
_step = itemgetter("step")
_version = attrgetter("_version")


class Slice:
    """Parameters, of which `rows` are stepped by Spillway.

    Args:
        optimizer: The torch optimizer.
        params: All parameters of the slice.
        mask: For each of them whether it has a row.
        rows: The rows, in the order of the parameters.
        keys: Names of the states.
        first: Number of the first row in the table.
        masters: The rows have masters.
        grad_name: Attribute of a parameter that holds its gradient."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: list[torch.Tensor], mask: list[bool], rows: list[Row], keys: list[str],
                 first: int, masters: bool, grad_name: str):
        self._params, self._mask = params, None if all(mask) else mask
        self._grad = attrgetter(grad_name)
        self.rows = range(first, first + len(rows))
        self._types = list(map(type, map(self._grad, params)))
        self.owners = list(compress(params, mask))
        self._distributed = [at for at, owner in enumerate(self.owners) if isinstance(owner, DTensor)]
        self.inner = [optimizer.state[owner] for owner in self.owners]
        self._getters = [itemgetter(key) for key in keys]
        self._params_same = properties_of([row.param for row in rows])
        self._grads_same = properties_of([row.grad for row in rows])
        self._addresses = [array("Q", [row.param.data_ptr() for row in rows])]
        self._addresses += [array("Q", [row.states[at].data_ptr() for row in rows]) for at in range(len(keys))]
        self.grad_addresses = array("Q", [row.grad.data_ptr() for row in rows])
        self.grads: list[torch.Tensor] = []
        self._step_ids: list[int] = []
        self._versions: list[int] | None = None
        if masters:
            self._getters.append(itemgetter(MASTER))
            self._addresses.append(array("Q", [row.master.data_ptr() for row in rows if row.master is not None]))
            self._versions = list(map(_version, self.local(self.owners)))

    def note_steps(self) -> None:
        """Remembers the tensors of the step counts."""
        self._step_ids = list(map(id, map(_step, self.inner)))

    def note_versions(self) -> None:
        """Remembers the versions of parameters with masters. A parameter that is written to later gives its master new values."""
        if self._versions is not None:
            self._versions = list(map(_version, self.local(self.owners)))

    def is_same(self) -> bool:
        """True if parameters and states are those of the last step."""
        params = self.local(self.owners)
        own, *states = self._addresses
        if not self._params_same(params) or array("Q", map(_data_ptr, params)) != own:
            return False
        if self._versions is not None and list(map(_version, params)) != self._versions:
            return False
        if self._step_ids and list(map(id, map(_step, self.inner))) != self._step_ids:
            return False
        return all(array("Q", map(_data_ptr, self.local(list(map(getter, self.inner))))) == addresses
                   for getter, addresses in zip(self._getters, states))

    def take_grads(self) -> bool | None:
        """Takes the present gradients. True if their addresses are new, None if they do not fit the rows."""
        grads = list(map(self._grad, self._params))
        if list(map(type, grads)) != self._types:
            return None
        if self._mask is not None:
            grads = list(compress(grads, self._mask))
        if any(grads[at].placements != self.owners[at].placements for at in self._distributed):
            return None
        grads = self.local(grads)
        if not self._grads_same(grads):
            return None
        self.grads, addresses = grads, array("Q", map(_data_ptr, grads))
        if addresses == self.grad_addresses:
            return False
        self.grad_addresses = addresses
        return True

    def local(self, tensors: list[Any]) -> list[Any]:
        """The local parts of DTensors."""
        return list(map(local, tensors)) if self._distributed else tensors
