"""Gradients and weights of parameters as the library reads and writes them: where they are, or, of parameters that are not in host memory,
as copies in it.

A copy has the dtype of the gradient or the parameter. Its memory is used again at the next step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from .._words import sum_of_words
from ._link import HostLink, link_to, wait
from ._tensors import local


class Taken(NamedTuple):
    """A gradient that was passed to the library.

    Attributes:
        grad: The tensor that the parameter had.
        memory: Where the library reads its values.
        mark: What gradient and parameter were then; None if nobody asks."""

    grad: torch.Tensor
    memory: torch.Tensor
    mark: tuple[Any, ...] | None


class Gradients:
    """The gradients of a step.

    Args:
        params: All parameters of the optimizer.

    Attributes:
        taken: The gradients that were taken, by the number of their parameter."""

    def __init__(self, params: Sequence[torch.Tensor]):
        self._params = params
        self.taken: dict[int, Taken] = {}
        self._memory: dict[int, torch.Tensor] = {}

    def take(self, number: int, marked: bool) -> Taken:
        """The gradient of a parameter as it is now. A copy is started, and `fences` says when it is done. `marked`: the next call can tell
        whether the gradient has changed; otherwise it takes it again."""
        param, last = self._params[number], self.taken.get(number)
        assert param.grad is not None
        if last is not None and self._is_now(param, last):
            return last
        link, grad = link_to(param), local(param.grad).detach()
        memory = grad
        if link.is_apart:
            memory = self._free(number, link, grad)
            link.out(memory, grad)
        self.taken[number] = taken = Taken(param.grad, memory, _mark(param, link) if marked else None)
        return taken

    def _free(self, number: int, link: HostLink, grad: torch.Tensor) -> torch.Tensor:
        """Memory for a copy that the library does not use: it may have that of a gradient that was taken."""
        memory = self._memory.get(number)
        if memory is None or number in self.taken or (memory.dtype, memory.shape) != (grad.dtype, grad.shape):
            memory = self._memory[number] = link.memory(grad.shape, grad.dtype)
        return memory

    def _is_now(self, param: torch.Tensor, taken: Taken) -> bool:
        """True if a gradient that was taken is still that of the parameter, unchanged."""
        if taken.mark is None or param.grad is not taken.grad:
            return False
        link, (facts, values) = link_to(param), taken.mark
        if not link.is_apart:
            return taken.mark == _mark(param, link)
        return facts == _facts(param) and not link.differs(local(param.grad).detach(), taken.memory, values)

    def fences(self, numbers: Iterable[int]) -> list[Any]:
        """What has to be waited for until the copies of these gradients are done."""
        links = {link_to(self._params[number]) for number in numbers}
        return [fence for link in links if link.is_apart and (fence := link.fence()) is not None]

    def wait(self) -> None:
        """Waits until all copies are done."""
        for fence in self.fences(self.taken):
            fence.synchronize()

    def forget(self) -> None:
        """The library uses no gradient any more."""
        self.taken = {}


def _mark(param: torch.Tensor, link: HostLink) -> tuple[Any, ...]:
    """Also a write by `.data` changes the second entry: a sum over the memory of a gradient, or what the link compares copies by."""
    grad = local(param.grad).detach()
    return _facts(param), link.mark(grad) if link.is_apart else sum_of_words(grad)


def _facts(param: torch.Tensor) -> tuple[Any, ...]:
    """Version and address of a gradient; address and dtype of its parameter, which `param.data = ...` changes."""
    own, grad = local(param), local(param.grad)
    return grad._version, grad.data_ptr(), own.data_ptr(), own.dtype


class Weights:
    """New weights of parameters, in memory of the optimizer until they return to the parameters.

    Args:
        params: All parameters of the optimizer."""

    def __init__(self, params: Sequence[torch.Tensor]):
        self._params = params
        self._memory: dict[int, torch.Tensor] = {}
        #: The parameters of a step with their versions, the pieces whose weights did not return yet, and the copies that may not be done.
        self._targets: dict[int, tuple[torch.Tensor, int]] = {}
        self._left: dict[int, list[Any]] = {}
        self._returning: list[Any] = []

    def of(self, number: int) -> torch.Tensor:
        """Memory for the new weights of a parameter."""
        while self._returning:
            wait(self._returning.pop())
        own, memory = local(self._params[number]), self._memory.get(number)
        if memory is None or memory.dtype is not own.dtype:
            memory = self._memory[number] = link_to(own).memory(own.shape, own.dtype)
        return memory

    def expect(self, numbers: Iterable[int], pieces: Sequence[Sequence[Any]]) -> None:
        """Before a step that writes the weights of these parameters. `pieces`: those of each subgroup."""
        owners = {number: local(self._params[number]) for number in numbers}
        self._targets = {number: (own, own._version) for number, own in owners.items()}
        self._left = {at: found for at, own in enumerate(pieces) if (found := [piece for piece in own if piece.parameter in owners])}

    def give(self, subgroup: int) -> None:
        """The weights of a subgroup are final, and return to the parameters. What the program has written since is newer."""
        for piece in self._left.get(subgroup, ()):
            own, version = self._targets[piece.parameter]
            # The caller counts the version.
            if own._version == version:
                to, weights = (
                    whole.view(-1)[piece.start : piece.start + piece.count] for whole in (own.data, self._memory[piece.parameter])
                )
                link_to(own).back(to, weights)
        self._left.pop(subgroup, None)

    def give_all(self) -> None:
        """As `give` for all subgroups whose weights did not return yet."""
        for subgroup in [*self._left]:
            self.give(subgroup)
        self._returning += [link.fence() for link in {link_to(own) for own, _ in self._targets.values()}]
        self._targets = {}
