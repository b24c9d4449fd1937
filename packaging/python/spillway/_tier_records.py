"""Argument and result types of a tier."""

from __future__ import annotations

import os
from typing import NamedTuple


class TierPath(NamedTuple):
    """A path of a tier.

    Attributes:
        directory: A directory, "s3://BUCKET/PREFIX" for an object store, or None for memory of this process.
        limit_bytes: Largest size of the path's data file; 0: no limit.
        reserve_bytes: Bytes that are allocated at open.
        node: For memory: the NUMA node whose memory is used while it has some; None: any.

    Example:
        spillway.Tier([TierPath("/mnt/nvme", limit_bytes=1 << 40), "/mnt/pfs"], job="run7")"""

    directory: str | os.PathLike[str] | None
    limit_bytes: int = 0
    reserve_bytes: int = 0
    node: int | None = None


class Steps(NamedTuple):
    """The steps at which a tier can be opened.

    Attributes:
        last: The last committed step; None if there is none.
        before: The step of the commit before it, which is `last` if that step was committed twice; None if there is none.
        first: True if `last` was the tier's first commit.
        exists: True if there is a tier, committed or not.
        last_tag, before_tag: Checksums of the first 48 bytes of the payloads of these commits; 0 without a payload."""

    last: int | None
    before: int | None
    first: bool
    exists: bool
    last_tag: int = 0
    before_tag: int = 0


class Opened(NamedTuple):
    """Result of an open.

    Attributes:
        step: The committed step; None for a new tier.
        payload: The payload of its commit.
        missing_paths: Number of missing paths.
        lost_extents: Number of extents with a part on a missing path."""

    step: int | None
    payload: bytes
    missing_paths: int
    lost_extents: int


class Extent(NamedTuple):
    """An extent.

    Attributes:
        number: Number of the extent.
        name: Name of the extent.
        bytes: Bytes of all streams.
        generation: Number of the put that wrote the contents, counted over all extents of the tier; 0 until the first.
        streams: Number of streams.
        committed: True if a commit has it.
        lost: True if blocks are on a missing path.
        blocks: Number of blocks."""

    number: int
    name: str
    bytes: int
    generation: int
    streams: int
    committed: bool
    lost: bool
    blocks: int


class PathReport(NamedTuple):
    """Health and traffic of a path since the open.

    Attributes:
        directory: The path, as given at open.
        health: "healthy", "draining", "failed" or "missing".
        read_bytes: Bytes read.
        written_bytes: Bytes written, including headers.
        reading_seconds: Seconds with a read in flight.
        writing_seconds: Seconds with a write in flight.
        wear_bytes: Bytes written since the tier was created.
        file_bytes: Size of the data file.
        free_bytes: Free bytes in the data file.
        blocks: Number of blocks on the path."""

    directory: str
    health: str
    read_bytes: int
    written_bytes: int
    reading_seconds: float
    writing_seconds: float
    wear_bytes: int
    file_bytes: int
    free_bytes: int
    blocks: int
