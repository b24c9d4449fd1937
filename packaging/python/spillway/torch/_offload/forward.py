"""What completes a step before its weights are used: methods of the model that take the place of its own while a step waits.

Invariants:
- Code that was compiled before, and code that another instance of a class has compiled, completes the step too. torch's compiler does not
  guard hooks of modules; it does guard whether a module has a `forward` of its own.
- The model always has such a forward, so that it is compiled once. A part has one only while a step waits: no step waits when a part runs
  within the model, so that it is compiled as without this optimizer.
- A copy of a module has its own plain methods.

The import of this file imports torch's compiler, which takes seconds."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from functools import update_wrapper
from types import CodeType, MethodType
from typing import Any, ClassVar

import torch


class Hook:
    """A hook of a module, which torch's compiler does not look into. A copy of the model has one that does nothing."""

    def __init__(self, call: Callable[..., Any] | None = None):
        self.call = call

    @torch.compiler.disable
    def __call__(self, *arguments: Any) -> Any:
        return None if self.call is None else self.call(*arguments)

    def __reduce__(self) -> Any:
        return (Hook, ())


class Method:
    """An object in the place of a method of a module.

    Args:
        module: The module.
        name: The name of the method.

    Attributes:
        own: What the module itself has under that name; None: its class has it.
        plain: The method."""

    plain: Any

    def __init__(self, module: torch.nn.Module, name: str):
        self.module, self.name = module, name
        self.own: Any = None

    def put(self) -> None:
        """Takes the place."""
        self.own, self.plain = self.module.__dict__.get(self.name), getattr(self.module, self.name)
        update_wrapper(self, self.plain, updated=())
        # Tracers look at it before they call.
        self.__code__ = getattr(self.plain, "__code__", None)
        self.module.__dict__[self.name] = self

    def remove(self) -> None:
        """Gives the module its own method again, unless the program has put another one there."""
        at = self.module.__dict__.get(self.name)
        if at is not self:
            above = next((other for other in Method.chain(self.module, self.name) if other.own is self), None)
            if above is not None:
                above.own, above.plain = self.own, self.plain
        elif self.own is None:
            del self.module.__dict__[self.name]
        else:
            self.module.__dict__[self.name] = self.own

    @staticmethod
    def chain(module: torch.nn.Module, name: str) -> Iterator[Method]:
        """The objects in the place of a method, from the one that is called first."""
        at = module.__dict__.get(name)
        while isinstance(at, Method):
            yield at
            at = at.own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain(*args, **kwargs)

    def __reduce__(self) -> Any:
        return (_plain, (self.module, self.name, self.own))


def _plain(module: torch.nn.Module, name: str, own: Any) -> Any:
    """The method of a copy."""
    return own if own is not None else MethodType(getattr(type(module), name), module)


class Completing(Method):
    """A forward that completes a step first. What it calls may be compiled."""

    def __init__(self, module: torch.nn.Module, hook: Hook):
        super().__init__(module, "forward")
        self.complete = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.complete()
        return self.plain(*args, **kwargs)


class Reading(Method):
    """A method by which a program reads, converts or loads parameters. It completes a step first, unless it is called by zero_grad()."""

    #: All of them. A wrapper of a model calls `named_modules` of it, and copies and pickles call `__getstate__`.
    NAMES: ClassVar = ("named_parameters", "named_modules", "state_dict", "load_state_dict", "_apply", "__getstate__", "__deepcopy__")

    def __init__(self, module: torch.nn.Module, name: str, hook: Hook):
        super().__init__(module, name)
        self.complete = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _resets():
            self.complete()
        return self.plain(*args, **kwargs)


_RESET: CodeType = torch.nn.Module.zero_grad.__code__
_FILE = _RESET.co_filename


def _resets() -> bool:
    """True within a zero_grad() of a module, which reads gradients only."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in (_FILE, __file__) and frame.f_code is not _RESET:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code is _RESET


class NextForward:
    """Hooks and methods of a model and its parts. They keep the optimizer from `expect()` to `completed()` only.

    Those of `expect()` are gone before a part runs within the model.

    Args:
        model: The model.
        complete: Completes a step; a method of the optimizer, to which this object holds no reference."""

    def __init__(self, model: torch.nn.Module, complete: Callable[[], Any]):
        self._model, self._method = model, weakref.WeakMethod(complete)
        self._hook = Hook()
        forward = Completing(model, self._hook)
        # The hook runs before those of wrappers such as FSDP2, which gather the weights. A load by a wrapper of the model calls no method
        # of it.
        self._lasting: list[Any] = [
            forward,
            model.register_forward_pre_hook(self._hook, prepend=True),
            model.register_load_state_dict_pre_hook(self._hook),
        ]
        forward.put()
        #: The methods of each module: compiled code knows these objects.
        self._methods: dict[torch.nn.Module, list[Method]] = {}
        self._passing: list[Any] = []

    def expect(self) -> None:
        """A step is to be completed before a forward. A program may drop its optimizer meanwhile."""
        method = self._method()
        self._hook.call = None if method is None else lambda *_: method()
        if self._passing:
            return
        known = self._methods
        self._methods = {part: known.get(part) or self._methods_of(part) for part in [*self._model.modules()]}
        for part, methods in self._methods.items():
            if part is not self._model:
                self._passing.append(part.register_forward_pre_hook(self._hook, prepend=True))
            for own in methods:
                self._passing.append(own)
                own.put()

    def _methods_of(self, part: torch.nn.Module) -> list[Method]:
        reading: list[Method] = [Reading(part, name, self._hook) for name in Reading.NAMES if hasattr(part, name)]
        return reading if part is self._model else [Completing(part, self._hook), *reading]

    def completed(self) -> None:
        """No step is to be completed."""
        # Those that were put last first: an interrupted call has left some.
        while self._passing:
            self._passing[-1].remove()
            del self._passing[-1]
        self._hook.call = None

    def remove(self) -> None:
        """Removes all hooks."""
        self.completed()
        while self._lasting:
            self._lasting.pop().remove()
