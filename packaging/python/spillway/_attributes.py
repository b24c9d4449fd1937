"""The public side of an object: attributes that the constructor sets, and the repr.

A public attribute can be set if that has an effect; any other one is `Fixed`, or a property without a setter.

A repr never raises, never waits and calls nothing of the library: debuggers and logs ask for it at any moment, also for an object that is
closed, half constructed, or another process's."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, overload

_T = TypeVar("_T")

_shortened = reprlib.Repr()
_shortened.maxlist = _shortened.maxtuple = _shortened.maxdict = 8
_shortened.maxstring = _shortened.maxother = 200


class Fixed(Generic[_T]):
    """An attribute that the constructor sets, and nothing afterwards.

    Args:
        doc: Its description."""

    def __init__(self, doc: str):
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        # Not in instance.__dict__: Python reads all attributes of an instance slower once a program has asked for that dict.
        self._name, self._kept = name, f"_fixed_{name}"

    @overload
    def __get__(self, instance: None, owner: Any) -> Fixed[_T]: ...

    @overload
    def __get__(self, instance: Any, owner: Any) -> _T: ...

    def __get__(self, instance: Any, owner: Any) -> Any:
        if instance is None:
            return self
        try:
            return getattr(instance, self._kept)
        except AttributeError:
            raise AttributeError(f"{type(instance).__name__} has no {self._name} yet") from None

    def __set__(self, instance: Any, value: _T) -> None:
        if hasattr(instance, self._kept):
            raise AttributeError(f"{type(instance).__name__}.{self._name} is fixed at construction; make another {type(instance).__name__}")
        setattr(instance, self._kept, value)


def described(name: str, facts: Callable[[], Mapping[str, Any]], state: str = "") -> str:
    """The repr of an object.

    Args:
        name: Its class.
        facts: Returns the facts to show, by name. A fact that is None is left out.
        state: The state of the object, such as "closed"."""
    try:
        told = [f"{fact}={_shortened.repr(value)}" for fact, value in facts().items() if value is not None]
    except Exception:
        # Half constructed, or a fact's own repr has failed.
        told = ["not constructed"]
    return f"<{name}{' ' if told else ''}{', '.join(told)}{f', {state}' if state else ''}>"
