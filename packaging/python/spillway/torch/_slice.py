"""Some consecutive parameters of a table, which are compared with their tensors of the step before.

The comparisons are passes over whole lists without Python code per tensor. A slice is small enough that the objects of its tensors stay
in a processor's cache over all passes: with 10,000 parameters most of the time is the loading of these objects from memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import chain, compress
from operator import attrgetter, itemgetter
from typing import Any

import torch

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
        master: Name of the state that holds the rows' masters, if they have masters.
        grad_name: Attribute of a parameter that holds its gradient."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: list[torch.Tensor],
        mask: list[bool],
        rows: list[Row],
        keys: list[str],
        first: int,
        master: str | None,
        grad_name: str,
    ):
        self._params, self._mask = params, None if all(mask) else mask
        self._grad = attrgetter(grad_name)
        self.rows = range(first, first + len(rows))
        self._types = list(map(type, map(self._grad, params)))
        self.owners = list(compress(params, mask))
        self._distributed = [at for at, owner in enumerate(self.owners) if isinstance(owner, DTensor)]
        self.inner = [optimizer.state[owner] for owner in self.owners]
        self._params_same = properties_of([row.param for row in rows])
        self._grads_same = properties_of([row.grad for row in rows])
        # Comparing lists takes two thirds of the time of making arrays.
        self._addresses = [row.param.data_ptr() for row in rows]
        #: The addresses of gradients in the C table; None while they are written.
        self._grad_addresses: list[int] | None = [row.grad.data_ptr() for row in rows]
        self.grads: list[torch.Tensor] = []
        self._step_addresses: list[int] = []
        self.has_masters = master is not None
        #: The versions of parameters with masters after the last step.
        self.versions: list[int] = []
        states = [tensor for row in rows for tensor in (row.states if row.master is None else (*row.states, row.master))]
        # An address alone does not tell a state from another one that lies there now.
        self._states_same, self._state_addresses = properties_of(states), list(map(_data_ptr, states))
        names = keys if master is None else [*keys, master]
        self._single, self._states_of = len(names) == 1, itemgetter(*names)
        if master is not None:
            self.versions = list(map(_version, self.local(self.owners)))

    def note_steps(self) -> None:
        """Remembers where the step counts lie."""
        self._step_addresses = list(map(_data_ptr, map(_step, self.inner)))

    def is_same(self) -> bool:
        """True if parameters and states are those of the last step."""
        params = self.local(self.owners)
        if not self._params_same(params) or list(map(_data_ptr, params)) != self._addresses:
            return False
        if self.has_masters and list(map(_version, params)) != self.versions:
            return False
        if self._step_addresses and list(map(_data_ptr, map(_step, self.inner))) != self._step_addresses:
            return False
        of_each: Any = map(self._states_of, self.inner)
        states = list(self.local(of_each if self._single else chain.from_iterable(of_each)))
        return self._states_same(states) and list(map(_data_ptr, states)) == self._state_addresses

    def take_grads(self, words: torch.Tensor) -> bool:
        """Takes the present gradients, and writes their addresses to `words`, one for each row; False if they do not fit the rows."""
        grads = list(map(self._grad, self._params))
        if self._mask is not None:
            # A gradient that came or went; without a mask, the comparison of properties finds it.
            if list(map(type, grads)) != self._types:
                return False
            grads = list(compress(grads, self._mask))
        if any(grads[at].placements != self.owners[at].placements for at in self._distributed):
            return False
        grads = self.local(grads)
        if not self._grads_same(grads):
            return False
        self.grads, addresses = grads, list(map(_data_ptr, grads))
        if addresses != self._grad_addresses:
            # A signal handler may raise between two of these lines: the next step then writes all addresses again.
            self._grad_addresses = None
            if addresses:
                words.copy_(torch.frombuffer(array("Q", addresses), dtype=torch.int64))
            self._grad_addresses = addresses
        return True

    def local(self, tensors: Iterable[Any]) -> Any:
        """The local parts of DTensors."""
        return list(map(local, tensors)) if self._distributed else tensors
