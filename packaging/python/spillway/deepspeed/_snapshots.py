"""Checkpoints whose optimizer states are a snapshot of the tier: "snapshot_checkpoints" in the spillway block.

save_checkpoint() commits, removes an older snapshot of the tag, begins a snapshot in its folder, and saves the rest as DeepSpeed does. The
states are written while training continues. The file `latest` names the tag once the parts of all ranks are finished: each rank that sees
them all writes it. A run that is killed before has the `latest` of before."""

from __future__ import annotations

import contextlib
import os
import weakref

from .. import _snapshot
from ..errors import InvalidArgumentError, SpillwayError

#: The folder of the snapshot in that of the tag, and the entry of a checkpoint's optimizer states that says so.
FOLDER, ENTRY = "spillway-snapshot", "spillway_snapshot"


class Snapshots:
    """The snapshots of one TierSwapper.

    Args:
        tiered: Its open tier.
        bytes_per_second: Limit of the speed of a rank; 0: no limit.

    Attributes:
        saving: True while DeepSpeed saves a checkpoint whose states are in a snapshot."""

    def __init__(self, tiered, bytes_per_second):
        self._tiered, self._bytes_per_second, self.saving = tiered, bytes_per_second, False
        # The one that is being written.
        self._writing: list[_Writing] = []
        # Also at the end of the interpreter, before the tier closes.
        weakref.finalize(self, _finish, self._writing)

    def clear(self, folder):
        """Removes a finished snapshot of this folder in all ranks. None of its parts may count as one of the snapshot that replaces it."""
        together = self._tiered.place.together
        together(self.wait)
        together(lambda: _snapshot.remove(self._tiered.part_of(folder)))

    def begin(self, folder):
        """Begins a snapshot of the last commit, in a folder that clear() has served."""
        tiered, together = self._tiered, self._tiered.place.together
        snapshot = together(lambda: tiered.snapshot(folder, self._bytes_per_second, None), _snapshot.Snapshot.close)
        self._writing.append(_Writing(snapshot, folder, tiered.place))

    def name(self, save_dir, tag):
        """`latest` in this folder names the tag once the snapshot is finished."""
        self._writing[-1].latest = os.path.join(save_dir, "latest"), tag
        self.poll()

    def poll(self):
        """Notes the end of a snapshot; raises its error."""
        if self._writing and self._writing[0].snapshot.progress().ended:
            self.wait()

    def wait(self):
        """Waits for the end of a snapshot; raises its error."""
        _finish(self._writing)

    def rest(self):
        """Waits for the end of a snapshot, whose error wait() raises."""
        for writing in self._writing:
            with contextlib.suppress(SpillwayError):
                writing.snapshot.wait()


class _Writing:
    def __init__(self, snapshot, folder, place):
        self.snapshot, self._folder, self._place = snapshot, folder, place
        self.latest, self._process = None, os.getpid()

    def finish(self):
        if os.getpid() != self._process:
            return
        self.snapshot.wait()
        if self.latest is None or not _snapshot.is_finished(self._folder, self._place.world):
            return
        file, tag = self.latest
        # Several ranks may write it at once.
        part = f"{file}.rank-{self._place.rank}.part"
        with open(part, "w") as latest:
            latest.write(tag)
            latest.flush()
            os.fsync(latest.fileno())
        os.replace(part, file)


def _finish(writing):
    while writing:
        first = writing[0]
        try:
            first.finish()
        except (SpillwayError, OSError):
            _end(writing, first)
            raise
        # An interrupt ends the wait, not the snapshot: the entry stays, and the next call waits for it.
        _end(writing, first)


def _end(writing, first):
    writing.remove(first)
    first.snapshot.close()


def check(engine):
    """Raises InvalidArgumentError if checkpoints of this engine cannot have snapshots."""
    if getattr(engine.checkpoint_engine, "is_decoupled", lambda: False)():
        raise InvalidArgumentError(
            "spillway.snapshot_checkpoints is true, and a decoupled checkpoint engine writes `latest` itself; take one of them out"
        )
