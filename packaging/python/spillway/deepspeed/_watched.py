"""Code outside of an update's own methods sees masters and optimizer states as after the last step.

DeepSpeed's list of master weights and the `state` of its optimizer are properties. They tell the watcher of a stage-3 optimizer before code
outside sees them: checkpoints, safe_get_... and safe_set_..., the program, or another thread."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any, Protocol

#: DeepSpeed's list of master weights.
MASTERS = "fp32_partitioned_groups_flat"
_WATCHER, _INSIDE, _OWNER = "_spillway_watcher", "_spillway_inside", "_spillway_owner"


class Watcher(Protocol):
    """An update whose masters and states are not always those after the last step.

    Attributes:
        lock: An RLock, held while masters, states or gradients are used: another thread that reads them waits."""

    lock: Any

    def seen(self) -> None:
        """Called before code outside sees masters or states; makes them those after the last step."""


def watch(stage3: Any, watcher: Watcher) -> None:
    """From now on tells `watcher` before code outside sees masters or states of this optimizer. Its class has `masters()`."""
    stage3.__dict__[_WATCHER] = watcher
    optimizer = stage3.optimizer
    optimizer.__dict__[_OWNER] = weakref.ref(stage3)
    kind = type(optimizer)
    if not hasattr(kind, _OWNER):
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "state": _states(), _OWNER: None}
        optimizer.__class__ = type(kind.__name__, (kind,), names)


def _states() -> property:
    """The `state` of DeepSpeed's optimizer, as a property that tells the watcher."""

    def get(self):
        stage3 = self.__dict__[_OWNER]()
        if stage3 is not None:
            _tell(stage3)
        return self.__dict__["state"]

    def put(self, value):
        self.__dict__["state"] = value

    return property(get, put)


def masters() -> property:
    """DeepSpeed's list of master weights, as a property that tells the watcher."""

    def get(self):
        _tell(self)
        try:
            return self.__dict__[MASTERS]
        except KeyError:
            raise AttributeError(MASTERS) from None

    def put(self, value):
        self.__dict__[MASTERS] = value

    return property(get, put)


def _tell(stage3: Any) -> None:
    watcher = stage3.__dict__.get(_WATCHER)
    if watcher is not None and stage3.__dict__.get(_INSIDE) != threading.get_ident():
        watcher.seen()


@contextlib.contextmanager
def inside(stage3: Any):
    """While it is open, this thread alone uses masters and states, and the watcher is not told. Without a watcher it does nothing."""
    watcher = stage3.__dict__.get(_WATCHER)
    if watcher is None:
        yield
        return
    with watcher.lock:
        before, stage3.__dict__[_INSIDE] = stage3.__dict__.get(_INSIDE), threading.get_ident()
        try:
            yield
        finally:
            stage3.__dict__[_INSIDE] = before
