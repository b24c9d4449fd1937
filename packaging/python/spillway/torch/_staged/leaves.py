"""The tensors of a state, and the state without them.

A state is what an optimizer's class keeps of a parameter: a dictionary of tensors, numbers, None and collections of these. `take_apart` has
its tensors, the leaves, in a list; the tree that remains has their numbers. `put_together` makes the state again of the tree and of
other tensors. Tensors of classes that torch calls traceable, such as DTensor and torchao's 8-bit states, are taken apart
into their inner tensors.
A tensor that is in a state twice is one leaf."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..._written import is_dense
from ...errors import UnsupportedError
from .._tensors import PLAIN, has_memory


class Leaf(NamedTuple):
    """The memory that a tensor needs.

    Attributes:
        dtype, shape, stride, device: Those of the tensor.
        size: Its bytes, one after another."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device
    size: int

    @staticmethod
    def of(tensor: torch.Tensor) -> Leaf:
        """The memory that a tensor needs. One with gaps, or with one value for several elements, becomes contiguous."""
        shape = tuple(tensor.shape)
        stride = tuple(tensor.stride()) if is_dense(tensor) else tuple(torch.empty(shape, device="meta").stride())
        return Leaf(tensor.dtype, shape, stride, tensor.device, tensor.numel() * tensor.element_size())

    def empty(self, device: torch.device | None = None) -> torch.Tensor:
        """A tensor of this kind without values, on another device if one is given."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device or self.device)

    def of_bytes(self, memory: torch.Tensor, start: int) -> torch.Tensor:
        """The tensor whose bytes begin at `start` of flat memory."""
        return memory[start : start + self.size].view(self.dtype).as_strided(self.shape, self.stride)


class Place(NamedTuple):
    """The number of a leaf, in the place of a plain tensor."""

    number: int


class Wrapped(NamedTuple):
    """A traceable tensor.

    Attributes:
        kind: Its class.
        parts: Its inner tensors by their names.
        context: What its class needs besides.
        shape, stride: Those of the whole."""

    kind: Any
    parts: dict[str, Any]
    context: Any
    shape: Any
    stride: Any


class Collected(NamedTuple):
    """A collection.

    Attributes:
        kind: Its class.
        keys: The keys of a dictionary; None: it is a list or a tuple.
        items: Its items."""

    kind: Any
    keys: list[Any] | None
    items: list[Any]


def take_apart(state: Any, leaves: list[torch.Tensor], name: str) -> Any:
    """The tree of a state. Adds its leaves to a list.

    Args:
        name: Names the state in messages.

    Raises:
        UnsupportedError: A tensor cannot be copied by its memory."""
    return _Taking(leaves, name).tree(state)


class _Taking:
    def __init__(self, leaves: list[torch.Tensor], name: str):
        self._leaves, self._name = leaves, name
        self._known: dict[int, Any] = {}

    def tree(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._known:
                self._known[id(value)] = self._tensor(value)
            return self._known[id(value)]
        if type(value) in (dict, OrderedDict):
            return Collected(type(value), [*value], [*map(self.tree, value.values())])
        if type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_make")):
            return Collected(type(value), None, [*map(self.tree, value)])
        return value

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if type(tensor) in PLAIN:
            if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or not has_memory(tensor):
                raise UnsupportedError(
                    f"{self._name} has a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}, which has no plain memory; Staged "
                    "keeps dense tensors; use the class itself for this parameter"
                )
            self._leaves.append(tensor.detach())
            return Place(len(self._leaves) - 1)
        if not hasattr(tensor, "__tensor_flatten__"):
            raise UnsupportedError(
                f"{self._name} has a {type(tensor).__module__}.{type(tensor).__qualname__}, a tensor without __tensor_flatten__, so its "
                "memory is unknown; use the class itself for this parameter"
            )
        names, context = tensor.__tensor_flatten__()
        parts = {name: self.tree(getattr(tensor, name)) for name in names}
        return Wrapped(type(tensor), parts, context, tensor.shape, tensor.stride())


def put_together(tree: Any, leaves: Sequence[torch.Tensor]) -> Any:
    """The state of a tree and of tensors in the place of its leaves."""
    return _put(tree, leaves, {})


def _put(tree: Any, leaves: Sequence[torch.Tensor], made: dict[int, torch.Tensor]) -> Any:
    if isinstance(tree, Place):
        return leaves[tree.number]
    if isinstance(tree, Wrapped):
        # The same tensor in two places is the same object in the tree too.
        if id(tree) not in made:
            parts = {name: _put(part, leaves, made) for name, part in tree.parts.items()}
            made[id(tree)] = tree.kind.__tensor_unflatten__(parts, tree.context, tree.shape, tree.stride)
        return made[id(tree)]
    if isinstance(tree, Collected):
        items = [_put(item, leaves, made) for item in tree.items]
        if tree.keys is not None:
            return tree.kind(zip(tree.keys, items))
        return tree.kind(*items) if hasattr(tree.kind, "_make") else tree.kind(items)
    return tree


def overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """True if two tensors share memory."""
    spans = sorted((str(one.device), one.data_ptr(), one.data_ptr() + _extent(one)) for one in tensors if one.numel())
    return any(one[0] == other[0] and other[1] < one[2] for one, other in zip(spans, spans[1:]))


def _extent(tensor: torch.Tensor) -> int:
    return (1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))) * tensor.element_size()
