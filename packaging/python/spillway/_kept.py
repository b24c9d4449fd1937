"""Memory that the library may access. It stays allocated until release(), also beyond the end of the interpreter, which frees
everything that modules hold while threads of the library still run."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from . import _abi

_Container = TypeVar("_Container")

_containers: dict[int, Any] = {}
# One reference that nobody gives back: neither the end of the interpreter nor the garbage collector frees the containers.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_containers))


def keep(container: _Container) -> _Container:
    """Keeps a list or dictionary and all that it holds, now and later. The content must not refer to the owner of the container:
    the owner would never be collected and closed."""
    _containers[id(container)] = container
    return container


def release(container: Any) -> None:
    """Ends keep(); a second call does nothing."""
    _containers.pop(id(container), None)


class Living:
    """Weak references to objects that threads may add while another one lists them, which ends the iteration of a WeakSet by an error."""

    def __init__(self) -> None:
        self._objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def add(self, added: Any) -> None:
        """Adds an object."""
        self._objects[id(added)] = added

    def list(self) -> list[Any]:
        """The objects that are alive at this moment."""
        return [found for reference in self._objects.valuerefs() if (found := reference()) is not None]


#: Statuses with which a job ends, or is refused, whose memory the system may still access: deadline exceeded, engine lost.
IN_USE = (_abi.ERR_DEADLINE, _abi.ERR_SYSTEM)
# The memory of such jobs.
_stuck: list[Any] = keep([])


class Submitted(dict[Any, tuple[Any, list[int]]]):
    """Memory of jobs that the library runs, each with the outcome of the call that submitted it."""

    def submit(self, memory: Any, call: Callable[[list[int]], None], token: Any = None) -> None:
        """Runs call(outcome), which submits a job and stores the status of the library's call in `outcome`. `token` names the job."""
        token, outcome = object() if token is None else token, list[int]()
        # Before the call, so that an interrupt cannot free memory that the library uses.
        try:
            self[token] = memory, outcome
            call(outcome)
        finally:
            if outcome != [0]:
                self._refused(token, outcome)

    def _refused(self, token: Any, outcome: list[int]) -> None:
        (self.lose if outcome and outcome[0] in IN_USE else self.over)([token])

    def end_refused(self, token: Any) -> None:
        """Frees the memory of a job that the library has refused, if a signal handler ended submit() before it did so."""
        _, outcome = self.get(token, (None, []))
        if outcome and outcome != [0]:
            self._refused(token, outcome)

    def tokens(self) -> list[Any]:
        """The jobs at this moment. Other threads may submit and free jobs meanwhile, also in an interpreter without a global lock, where a
        list of a subclass of dict is not made in one step, and one of its keys is."""
        return list(self.keys())

    def begun(self) -> list[Any]:
        """The jobs that are submitted. A wait for the end of all jobs, begun after this call, covers these."""
        return [token for token, (_, outcome) in list(self.items()) if outcome == [0]]

    def over(self, tokens: Iterable[Any]) -> None:
        """Frees the memory of jobs that have ended. Another thread may have submitted further jobs meanwhile."""
        for token in tokens:
            self.pop(token, None)

    def lose(self, tokens: Iterable[Any]) -> None:
        """As over(), for memory that the system may still access: it is never freed."""
        lost = list(tokens)
        # Another thread may lose the same ones.
        _stuck.extend(held for token in lost if (held := self.get(token)) is not None)
        self.over(lost)
