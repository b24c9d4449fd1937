"""Hooks of a model that complete a step before its weights are used: by the next forward, or by a state dict of the model.

The import of this file imports torch's compiler, which takes seconds."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch


class NextForward:
    """The hooks of a model and its parts. They keep the optimizer from `expect()` to `completed()` only.

    The hook of the model stays, so that torch.compile does not compile it again. Those of its parts are there from `expect()` on, so that
    a compiled part has none when it runs within the model.

    Args:
        model: The model.
        complete: A bound method of the optimizer."""

    def __init__(self, model: torch.nn.Module, complete: Callable[[], Any]):
        self._model, self._method = weakref.ref(model), weakref.WeakMethod(complete)
        self._hook = Hook()
        self._lasting = [
            # Before those of wrappers such as FSDP2, which gather the weights in theirs.
            model.register_forward_pre_hook(self._hook, prepend=True),
            model.register_state_dict_pre_hook(self._hook),
            model.register_load_state_dict_pre_hook(self._hook),
        ]
        self._passing: list[Any] = []

    def expect(self) -> None:
        """A step is to be completed before a forward. A program may drop its optimizer meanwhile."""
        method = self._method()
        self._hook.call = None if method is None else lambda *_: method()
        model = self._model()
        if model is not None and not self._passing:
            parts = (part for part in model.modules() if part is not model)
            self._passing = [part.register_forward_pre_hook(self._hook, prepend=True) for part in parts]

    def completed(self) -> None:
        """No step is to be completed."""
        while self._passing:
            self._passing.pop().remove()
        self._hook.call = None

    def remove(self) -> None:
        """Removes all hooks."""
        self.completed()
        while self._lasting:
            self._lasting.pop().remove()


class Hook:
    """A hook of a module, which torch's compiler does not look into. A copy of the model has one that does nothing."""

    def __init__(self, call: Callable[..., Any] | None = None):
        self.call = call

    @torch.compiler.disable
    def __call__(self, *arguments: Any) -> Any:
        return None if self.call is None else self.call(*arguments)

    def __reduce__(self) -> Any:
        return (Hook, ())
