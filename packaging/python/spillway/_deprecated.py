"""Old public names. They work for one release and give a DeprecationWarning that names the new spelling.

Every alias of the package is declared by a function of this module. `DECLARED` lists all of them for the tests. To
remove the aliases, remove this module and its uses."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, cast



class Old(NamedTuple):
    """An old spelling: its kind ("name", "argument", "attribute", "property" or "dict"), its owner (a module's name, a
    function, or a class's name), and the old and the new name."""

    kind: str
    owner: Any
    old: str
    new: str


# All old spellings of the package.
DECLARED: list[Old] = []

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)


def _warn(old: str, new: str, category: type[Warning] = DeprecationWarning) -> None:
    warnings.warn(f"spillway: {old} is deprecated and will be removed in the next release; use {new}", category, stacklevel=3)


def module_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a module `__getattr__` that serves old names of a module's attributes."""
    DECLARED.extend(Old("name", module, old, new) for old, new in names.items())

    def module_getattr(name: str) -> Any:
        new = names.get(name)
        if new is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        _warn(f"{module}.{name}", f"{module}.{new}")
        return getattr(sys.modules[module], new)

    return module_getattr


def keywords(**names: str) -> Callable[[_Function], _Function]:
    """Decorates a function that also accepts old names of its keyword arguments: keywords(old="new")."""
    def decorate(function: _Function) -> _Function:
        label = function.__qualname__.removesuffix(".__init__").lstrip("_")

        @functools.wraps(function)
        def accept(*arguments: Any, **named: Any) -> Any:
            if named and not names.keys().isdisjoint(named):
                for old, new in names.items():
                    if old in named:
                        if new in named:
                            raise TypeError(f"{label}() got both {new} and its old name {old}; pass {new} alone")
                        _warn(f"the argument {old} of {label}()", new)
                        named[new] = named.pop(old)
            return function(*arguments, **named)

        DECLARED.extend(Old("argument", accept, old, new) for old, new in names.items())
        return cast(_Function, accept)
    return decorate


class attribute:
    """An old name of an attribute or method, in a class body: `old = attribute("Class.old", "new")`."""

    def __init__(self, label: str, new: str):
        self._label, self._new = label, new
        self.__doc__ = f"Deprecated name of `{new}`."
        owner, _, old = label.partition(".")
        DECLARED.append(Old("attribute", owner, old, new))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        _warn(self._label, f"{self._label.rpartition('.')[0]}.{self._new}")
        return getattr(instance, self._new)


def add_attribute(kind: type, old: str, new: str) -> None:
    """Gives a named tuple an old name of a field, which its class body cannot have."""
    setattr(kind, old, attribute(f"{kind.__name__}.{old}", new))


def was_property(label: str) -> Callable[[_Function], _Function]:
    """Decorates a method without arguments that was a property: the value's attributes work without the call too."""
    DECLARED.append(Old("property", *label.split("."), f"{label}()"))
    return lambda method: cast(_Function, _WasProperty(method, label))


class _WasProperty:
    def __init__(self, method: Callable[[Any], Any], label: str):
        self._method, self._label = method, label
        self.__doc__ = method.__doc__

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self._method if instance is None else _Value(functools.partial(self._method, instance), self._label)


class _Value:
    """A bound method that was a property. Called, it returns the value; used as the value, it warns."""

    def __init__(self, method: Callable[[], Any], label: str):
        self._method, self._label = method, label

    def __call__(self) -> Any:
        return self._method()

    def __getattr__(self, name: str) -> Any:
        _warn(f"{self._label} without a call", f"{self._label}()")
        return getattr(self._method(), name)

    def __getitem__(self, index: Any) -> Any:
        _warn(f"{self._label} without a call", f"{self._label}()")
        return self._method()[index]

    def __iter__(self) -> Iterator[Any]:
        _warn(f"{self._label} without a call", f"{self._label}()")
        return iter(self._method())


def was_dict(label: str, **names: str) -> Callable[[_Class], _Class]:
    """Decorates a named tuple that was a dict: `value["field"]`, keys(), values(), items() and get() work too.

    `names` maps keys to fields that have another name."""
    def decorate(kind: _Class) -> _Class:
        DECLARED.append(Old("dict", kind, label, "the fields"))
        fields = {**{field: field for field in kind._fields if field not in names.values()}, **names}
        by_index = kind.__getitem__

        def by_key(value: Any, key: Any) -> Any:
            if not isinstance(key, str):
                return by_index(value, key)
            _warn(f"{label}[{key!r}]", f".{fields[key]}")
            return getattr(value, fields[key])

        def whole(method: str) -> Callable[..., Any]:
            def call(value: Any, *arguments: Any) -> Any:
                _warn(f"{label}.{method}()", "the fields of the named tuple")
                return getattr({key: getattr(value, field) for key, field in fields.items()}, method)(*arguments)
            return call

        setattr(kind, "__getitem__", by_key)
        for method in ("keys", "values", "items", "get"):
            setattr(kind, method, whole(method))
            getattr(kind, method).__doc__ = "Deprecated method of the dict that this named tuple was; use the fields."
        return kind
    return decorate


def json_key(old: str, new: str) -> None:
    """Warns of an old key in a configuration file; a FutureWarning, which Python shows to users by default."""
    warnings.warn(f"spillway: {old} is deprecated and will be removed in the next release; write {new}", FutureWarning,
                  stacklevel=2)
