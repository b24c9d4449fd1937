"""The trees of states as plain values, as the record of a commit has them.

A tensor's class is recorded by its name. The class must be loaded when the states are read: the record of a tier makes no program import a
module. A DTensor is recorded as a part that is placed as its parameter is."""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any

import torch

from ... import _values
from ...errors import CorruptError, InvalidArgumentError, UnsupportedError
from .._tensors import DTensor, apart, like, local
from .chunk import Chunk, Entry
from .leaves import Collected, Leaf, Place, Wrapped, put_together

_KINDS = {"dict": dict, "ordered": OrderedDict, "list": list, "tuple": tuple}
_NAMES = {kind: name for name, kind in _KINDS.items()}


class Placed:
    """A DTensor in a tree that was read: it is placed as the parameter."""

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], context: Any, _shape: Any, _stride: Any) -> torch.Tensor:
        """The DTensor with this part."""
        return like(context, parts["part"])


def written(chunk: Chunk, numbers: dict[torch.Tensor, int]) -> list[Any]:
    """The entries of a chunk in words: trees and kinds of memory once each, and for each parameter the numbers of its own.

    Args:
        numbers: Those of the parameters.

    Raises:
        UnsupportedError: A tensor's class, or its placement, cannot be recorded."""
    trees, kinds = _Once(), _Once()
    entries = []
    for param, entry in chunk.entries.items():
        tree = trees.number(_tree_in_words(entry.tree, entry))
        own = [kinds.number(_leaf_in_words(leaf, param)) for leaf in entry.leaves]
        entries.append([numbers[param], entry.stated, chunk.start(param), tree, *own])
    return [trees.words, kinds.words, entries]


def read(words: list[Any], size: int, params: list[torch.Tensor], names: list[str]) -> Chunk:
    """The chunk that was written.

    Raises:
        InvalidArgumentError: A tensor's class is not loaded."""
    trees, kinds, entries = words
    found = []
    for number, stated, start, tree, *own in entries:
        param, name = params[number], names[number]
        leaves = tuple(_leaf_of_words(kinds[kind], param) for kind in own)
        found.append((Entry(param, name, stated, _tree_of_words(trees[tree], param, name), leaves), start))
    return Chunk.placed(found, size)


class _Once:
    """Words without repetitions."""

    def __init__(self) -> None:
        self.words: list[Any] = []
        self._numbers: dict[str, int] = {}

    def number(self, words: Any) -> int:
        """The number of these words in the list."""
        text = repr(words)
        if text not in self._numbers:
            self._numbers[text] = len(self.words)
            self.words.append(words)
        return self._numbers[text]


def _leaf_in_words(leaf: Leaf, param: torch.Tensor) -> list[Any]:
    return [str(leaf.dtype).removeprefix("torch."), list(leaf.shape), list(leaf.stride), leaf.device == local(param).device, leaf.size]


def _leaf_of_words(words: list[Any], param: torch.Tensor) -> Leaf:
    dtype, shape, stride, beside, size = words
    return Leaf(getattr(torch, dtype), tuple(shape), tuple(stride), local(param).device if beside else torch.device("cpu"), size)


def _tree_in_words(tree: Any, entry: Entry) -> Any:
    if isinstance(tree, Place):
        return ["place", tree.number]
    if isinstance(tree, Wrapped):
        if isinstance(tree.kind, type) and issubclass(tree.kind, DTensor) or tree.kind is Placed:
            return ["placed", _part_in_words(tree, entry)]
        parts = {name: _tree_in_words(part, entry) for name, part in tree.parts.items()}
        return [
            "wrapped",
            tree.kind.__module__,
            tree.kind.__qualname__,
            parts,
            _plain(tree.context, entry),
            list(tree.shape),
            list(tree.stride),
        ]
    if isinstance(tree, Collected):
        if tree.kind not in _NAMES:
            raise UnsupportedError(
                f"the state of {entry.name} has a {tree.kind.__qualname__}, which no commit records; pass no tier, or use the class itself"
            )
        return [_NAMES[tree.kind], tree.keys, [_tree_in_words(item, entry) for item in tree.items]]
    return ["value", _plain(tree, entry)]


def _plain(value: Any, entry: Entry) -> Any:
    """The value, if a commit can store it."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    try:
        _values.pack(value)
    except InvalidArgumentError as error:
        raise UnsupportedError(
            f"the state of {entry.name} has a value that a commit cannot store ({error}); pass no tier, or use the class itself"
        ) from None
    return value


def _part_in_words(tree: Wrapped, entry: Entry) -> Any:
    if tree.kind is not Placed:
        # A DTensor without memory, for its placement.
        shaped = [torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in entry.leaves]
        whole = put_together(tree, shaped)
        if apart(entry.param, whole) or whole.shape != entry.param.shape:
            raise UnsupportedError(
                f"the state of {entry.name} has a DTensor of shape {tuple(whole.shape)} that is not placed as the parameter is, "
                "which no commit records; pass no tier, or use the class itself"
            )
    return _tree_in_words(next(iter(tree.parts.values())), entry)


def _tree_of_words(words: Any, param: torch.Tensor, name: str) -> Any:
    kind, *rest = words
    if kind == "place":
        return Place(rest[0])
    if kind == "value":
        return rest[0]
    if kind == "placed":
        return Wrapped(Placed, {"part": _tree_of_words(rest[0], param, name)}, param, param.shape, param.stride())
    if kind == "wrapped":
        module, qualified, parts, context, shape, stride = rest
        inner = {key: _tree_of_words(part, param, name) for key, part in parts.items()}
        return Wrapped(_class_of(module, qualified, name), inner, context, torch.Size(shape), tuple(stride))
    if kind in _KINDS:
        keys, items = rest
        return Collected(_KINDS[kind], keys, [_tree_of_words(item, param, name) for item in items])
    raise CorruptError(f"the record of the commit has a {kind!r} in the state of {name}; the tier was written by another version")


def _class_of(module: str, qualified: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, torch.Tensor) and hasattr(found, "__tensor_unflatten__")):
        raise InvalidArgumentError(
            f"the state of {name} on the tier has tensors of {module}.{qualified}, which is not loaded; import {module} before Staged is "
            "constructed"
        )
    return found
