"""What completes a step before its weights are used: forwards and dicts of parameters that take the place of a module's own.

Invariants:
- Code that was compiled before, and code that another instance of a class has compiled, completes the step too. torch's compiler does not
  guard hooks of modules; it does guard whether a module has a `forward` of its own.
- The model always has such a forward, so that it is compiled once. A part has one only while a step waits: no step waits when a part runs
  within the model, so that it is compiled as without this optimizer.
- Code that reads a parameter of a module, in whatever way, reads the dict of the module's parameters.
- A copy of a module has its own plain forward and dict.

The import of this file imports torch's compiler, which takes seconds."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from functools import update_wrapper
from types import CodeType, MethodType
from typing import Any

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
        self.module: torch.nn.Module = module
        self.name: str = name
        self.own: Any = None

    def put(self) -> None:
        """Takes the place."""
        self.own, self.plain = self.module.__dict__.get(self.name), getattr(self.module, self.name)
        update_wrapper(self, self.plain, updated=())
        # Tracers look at it before they call.
        self.__code__: Any = getattr(self.plain, "__code__", None)
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


class Parameters(dict[str, Any]):
    """The parameters of a module, in the place of its own dict while a step waits. A read completes the step first, except one by
    zero_grad(). The module then has its own dict again.

    Args:
        module: The module.
        hook: Completes the step."""

    def __init__(self, module: torch.nn.Module, hook: Hook):
        super().__init__(module._parameters)
        self._module, self._own, self.complete = module, module._parameters, hook

    def put(self) -> None:
        """Takes the place."""
        self._module.__dict__["_parameters"] = self

    def remove(self) -> None:
        """Gives the module its own dict again."""
        if self._module.__dict__["_parameters"] is self:
            self._module.__dict__["_parameters"] = self._own

    def __reduce_ex__(self, _: Any) -> Any:
        self.complete()
        return (dict, (self._own,))


def _after_completion(name: str) -> Callable[..., Any]:
    plain = getattr(dict, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _resets():
            self.complete()
        return plain(self._own, *args, **kwargs)

    return method


# Not those that ask for names only. With `__iter__`, dict() and ** of it call methods, too.
for _name in ("__getitem__", "__setitem__", "__delitem__", "__iter__", "__eq__", "__or__", "__ror__", "__ior__"):
    setattr(Parameters, _name, _after_completion(_name))
for _name in ("get", "items", "values", "pop", "popitem", "setdefault", "update", "clear", "copy"):
    setattr(Parameters, _name, _after_completion(_name))


_RESET: CodeType = torch.nn.Module.zero_grad.__code__
_FILE = _RESET.co_filename


def _resets() -> bool:
    """True within a zero_grad() of a module, which reads gradients only."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == _FILE and frame.f_code is not _RESET:
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
        self._lasting: list[Any] = []
        self._passing: list[Any] = []
        #: Those of the parts: compiled code knows these objects.
        self._forwards: dict[torch.nn.Module, Completing] = {}
        forward = Completing(model, self._hook)
        # The hook runs before those of wrappers such as FSDP2, which gather the weights. A load by a wrapper of the model calls no method
        # of it.
        self._lasting += (
            forward,
            model.register_forward_pre_hook(self._hook, prepend=True),
            model.register_load_state_dict_pre_hook(self._hook),
        )
        forward.put()

    def expect(self) -> None:
        """A step is to be completed before a forward. A program may drop its optimizer meanwhile."""
        method = self._method()
        self._hook.call = None if method is None else lambda *_: method()
        if self._passing:
            return
        known, parts = self._forwards, [*self._model.modules()]
        self._forwards = {part: known.get(part) or Completing(part, self._hook) for part in parts if part is not self._model}
        for part, forward in self._forwards.items():
            self._passing.append(part.register_forward_pre_hook(self._hook, prepend=True))
            self._put(forward)
        for part in parts:
            if part._parameters:
                self._put(Parameters(part, self._hook))

    def _put(self, own: Completing | Parameters) -> None:
        self._passing.append(own)
        own.put()

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

    # Not a finalizer of weakref: while a step waits, a hook has the optimizer, and a finalizer would have the hook for ever.
    def __del__(self) -> None:
        self.remove()
