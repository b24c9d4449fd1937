"""Tensor versions at the last step: they show which parameters the program has written since.

Versions: a split master is the parameter and its low bits, so low bits are stale once the program has written to the parameter. The version
of each parameter with low bits is noted at its last step. The present table has these versions, and `_noted` those of parameters that a
former table has stepped. A version is valid for the dict of states with which it was noted, because `load_state_dict` brings new low
bits."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import torch

from ..errors import InvalidArgumentError
from ._pending import Pending
from ._precision import LOW, Precision
from ._rows import local
from ._table import Table
from ._undo import RecordedStep

_Method = TypeVar("_Method", bound=Callable[..., Any])


def of_itself(method: _Method) -> _Method:
    """A method that runs on the optimizer itself if a wrapper calls it with the wrapper in its place."""

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        own = self._itself()
        return method(heir_of(self) if own is None else own, *arguments, **options)

    return cast(_Method, call)


def heir_of(other: Any) -> Any:
    """An object with the attributes of an optimizer that was deleted: it takes the place of the optimizer if the attributes are the same
    dict. A copy of that dict does not have what the optimizer noted after the copy was made."""
    if id(other.__dict__) != other._attributes:
        raise InvalidArgumentError(
            f"{type(other).__name__}: this object has a copy of the attributes of an optimizer that was deleted; keep the "
            "optimizer as long as the object is used"
        )
    other._itself = weakref.ref(other)
    return other


class Notes(torch.optim.Optimizer):
    """Base of the optimizers of this package; not for direct use."""

    #: A step is recorded, so that it can be rolled back.
    undo: bool
    _precision: Precision
    _table: Table | None
    _last: RecordedStep | None
    _pending: Pending | None
    _noted: dict[torch.Tensor, tuple[int, dict[str, Any]]]
    #: The log has a line about the first step of this class.
    _said: bool
    #: This optimizer, for calls through a wrapper.
    _itself: Callable[[], Any]
    #: The identity of this optimizer's `__dict__`.
    _attributes: int

    def __new__(cls, *_: Any, **__: Any) -> Any:
        # Wrappers inherit from the class of the optimizer that they wrap, and look in it for the attributes that they lack. An attribute of
        # the class would be found before that of the wrapped optimizer.
        made: Any = super().__new__(cls)
        made.__dict__.update(
            {
                "undo": False,
                "max_norm": None,
                "process_group": None,
                "skip_nonfinite": False,
                "grad_norm": None,
                "skipped": False,
                "resumed_step": None,
                "payload": b"",
                "_precision": Precision(),
                "_table": None,
                "_last": None,
                "_pending": None,
                "_noted": {},
                "_tier": None,
                "_rest": [],
                "_tried": [],
                "_flags": [],
                "_itself": weakref.ref(made),
                "_attributes": id(made.__dict__),
                "_said": False,
            }
        )
        return made

    def _settle(self) -> None:
        """Notes the result of a call of the library after which a signal handler has raised."""
        pending = self._pending
        # Without a status, the library was not called, or this is a signal handler during the call.
        if pending is not None and pending.status:
            if pending.settle():
                self._last = pending.last
            self._pending = None

    def _forget_low_bits(self) -> None:
        """Makes parameters that the program has written to since their last step their own split masters."""
        if self._precision.master != "split":
            return
        known = {**self._noted, **dict(self._table.noted() if self._table is not None else ())}
        self._noted = {param: note for param, note in known.items() if self.state.get(param) is note[1] and LOW in note[1]}
        for param, (version, state) in self._noted.items():
            if local(param)._version != version:
                local(state[LOW]).zero_()
                self._noted[param] = local(param)._version, state

    def _note_versions(self) -> None:
        """Notes that all low bits belong to the present values of their parameters."""
        self._noted = {param: (local(param)._version, state) for param, state in self.state.items() if LOW in state}

    @contextmanager
    def _before_loading(self, hook: Callable[[Any, dict[str, Any]], Any]) -> Iterator[None]:
        """Registers a hook that sees a state dict as the other hooks have made it."""
        # A signal handler that raised may have left one.
        self._remove_hooks()
        try:
            self.register_load_state_dict_pre_hook(_Hook(hook))
            yield
        finally:
            self._remove_hooks()

    def _remove_hooks(self) -> None:
        hooks = self._optimizer_load_state_dict_pre_hooks
        for number in [number for number, hook in hooks.items() if isinstance(hook, _Hook)]:
            del hooks[number]


class _Hook(NamedTuple):
    """A hook of one call, distinct from the hooks of the program."""

    function: Callable[[Any, dict[str, Any]], Any]

    def __call__(self, optimizer: Any, loaded: dict[str, Any]) -> Any:
        return self.function(optimizer, loaded)
