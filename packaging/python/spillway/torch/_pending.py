"""A call of the library that steps or rolls back, until the optimizer has noted its result.

A signal handler may raise between any two bytecodes, also after the library has written the parameters. Invariants:
- The optimizer holds the call before the library is entered. The library's status and the new versions are stored without a bytecode
  between the call and the store.
- `settle` may be repeated: it sets step counts and versions to values that were computed once."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ._undo import RecordedStep

_version = attrgetter("_version")
_increment = torch._C._increment_version


class Pending:
    """A call of the library for all rows of a table.

    Args:
        table: A Table or a TierTable.
        by: What the call adds to the step counts.
        record: The record of a step that can be rolled back.

    Attributes:
        status: Receives the status of the call.
        last: The record, once the step is noted; None for a rollback."""

    def __init__(self, table: Any, by: int, record: RecordedStep | None = None):
        self.status: list[int] = []
        self.last = record if by > 0 else None
        self._table, self._counts = table, table.counted(by)
        self._params, self._watched = table.params(), table.watched()
        self._recorded = len(self._watched)
        if self.last is not None:
            self._watched = [*self._watched, *self.last.written]
        self._before = list(map(_version, self._watched))
        self._after: list[Any] = []
        self._now: list[int] = []

    def settle(self) -> bool:
        """Notes step counts and versions of a call that succeeded; True if it did."""
        if self.status != [0]:
            return False
        if not self._after:
            self._now = list(map(_version, self._watched))
            self._after.extend(chain(map(_increment, (self._params,)), map(_version, self._watched)))
        versions = self._after[1:]
        if self._now != self._before:
            # The program has written to a parameter since an interrupted call: no version marks the values of the step.
            versions = [after if now == before else -1 for after, now, before in zip(versions, self._now, self._before)]
        self._table.set_counts(self._counts)
        self._table.note_versions(versions[: self._recorded])
        if self.last is not None:
            self.last.note_versions(versions[self._recorded :])
        return True
