"""Commits that a thread of the library makes beside the calls of the program."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ._native_handle import _NativeHandle
from .errors import SpillwayError, TimedOutError


class Commit(_NativeHandle):
    """A commit in flight beside the program. Made by commit(wait=False) of Tier, Swap, the optimizers of spillway.torch and
    Megatron's OptimizerStateStore. Thread-safe.

    The end of a with block, close() and the destructor wait for the end of the commit. They raise its error if wait() has not.

    Example:
        commit = optimizer.commit(wait=False)
        train()
        commit.wait()"""

    closer = "spw_tier_task_close"

    def __init__(self, succeeded: Callable[[], object] = lambda: None):
        self._succeeded = succeeded
        self._error: SpillwayError | None = None
        self._known = self._told = False
        self._step: int | None = None

    @staticmethod
    def done() -> Commit:
        """A commit that has succeeded already."""
        commit = Commit()
        commit._known = True
        return commit

    def _begin(self, tier: Any, owner: Any, function: str, step: int, payload: bytes) -> Commit:
        """Begins the commit by this C function of the owner's handle. If a signal handler raises, `begun` says whether it did."""
        tier._commits.add(self)
        self._step = step
        owner._through(lambda handle: self._hold(function, handle, step, payload, len(payload)))
        return self

    def _facts(self) -> dict[str, Any]:
        return {"step": self._step, "error": self._error}

    def _state(self) -> str:
        if self._known:
            return "failed" if self._error else "succeeded"
        return "in flight when last asked" if self.begun else "not begun"

    @property
    def begun(self) -> bool:
        """True once the library makes the commit."""
        return self._known or bool(self._cell and self._cell[0])

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the commit has ended, and its state is durable.

        Args:
            timeout: Longest wait in seconds; None: no limit.

        Raises:
            TimedOutError: The commit continues.
            SpillwayError: The commit failed; the last commit is intact, and what was to be committed is there, uncommitted."""
        self._learn(timeout)
        self._told = True
        if self._error is not None:
            # A copy: a raised error refers to this object by its traceback.
            raise copy.copy(self._error)

    @property
    def error(self) -> SpillwayError | None:
        """The error of a commit that has ended without success."""
        return self._error if self.ended else None

    def superseded(self) -> None:
        """A later commit has what this one was to commit: close() raises no error any more."""
        self._told = True

    @property
    def ended(self) -> bool:
        """True once the commit has ended, with or without success."""
        with suppress(TimedOutError):
            self._learn(0)
        return self._known

    @property
    def succeeded(self) -> bool:
        """True once the commit has ended with success."""
        return self.ended and self._error is None

    def finish(self, timeout: float | None = None) -> None:
        """Waits until the commit has ended, with or without success. Does nothing for one that has not begun, or in a forked child."""
        if self._cell and self._process == os.getpid():
            self._learn(timeout)

    def _learn(self, timeout: float | None) -> None:
        """Waits for the outcome, and notes it."""
        if self._known:
            return
        try:
            self._wait_by(timeout, "spw_tier_task_wait", after=(None,))
            self._succeeded()
        except TimedOutError:
            raise
        except SpillwayError as error:
            self._error = error.with_traceback(None)
        self._known = True

    def close(self) -> None:
        """Waits for the end of the commit, and frees it."""
        self.finish()
        self._end()
        if self._error is not None and not self._told:
            self.wait()
