"""Snapshots of a tier, which a thread of the library writes beside the steps."""

from __future__ import annotations

import ctypes
import os
from typing import Any, NamedTuple

from . import _abi, _arguments
from ._native_handle import _NativeHandle


class SnapshotProgress(NamedTuple):
    """How far a Snapshot is."""

    step: int
    written: int
    bytes: int
    ended: bool


class Snapshot(_NativeHandle):
    """An export of a tier's last commit that is written while the tier is used. Made by Tier.snapshot(). Thread-safe.

    Example:
        with tier.snapshot("/mnt/pfs/step-100", bytes_per_second=200_000_000) as snapshot:
            train()
            snapshot.wait()"""

    closer = "spw_tier_snapshot_close"

    def __init__(self, tier: Any, directory: str | os.PathLike[str], bytes_per_second: int):
        name = _arguments.path("Tier.snapshot: directory", directory)
        tier._through(lambda handle: self._hold("spw_tier_snapshot_begin", handle, name, bytes_per_second))

    def wait(self, timeout: float | None = None) -> int:
        """Waits until the directory is complete; returns its step.

        Args:
            timeout: Longest wait in seconds; None: no limit.

        Raises:
            TimedOutError: The snapshot is still being written.
            SpillwayError: The snapshot failed, and nothing of it is left."""
        step = ctypes.c_uint64()
        self._wait_by(timeout, "spw_tier_snapshot_wait", after=(ctypes.byref(step),))
        return step.value

    def progress(self) -> SnapshotProgress:
        """Returns the committed step, the bytes written so far, the bytes of the whole state, and whether the snapshot has ended."""
        info = _abi.sized(_abi.TierSnapshotInfo)
        self._call("spw_tier_snapshot_get_progress", ctypes.byref(info))
        return SnapshotProgress(info.step, info.written, info.bytes, bool(info.ended))

    def close(self) -> None:
        """Frees the snapshot. One that has not ended is cancelled, and nothing of it is left."""
        self._end()
