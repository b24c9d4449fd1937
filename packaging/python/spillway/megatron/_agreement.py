"""What the processes of a run need to agree on a step of their tiers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..tier import TierPath
from ..tiered import Place

#: What to do if the processes have no step in common.
CURE = "pass another job, and load_from() a directory that save_to() wrote"


def place_of(
    paths: Iterable[Any], job: str, host: str | None, rank: int, world: int, group: Any, tier_options: Mapping[str, Any] | None
) -> Place:
    """Where the tier of a process is."""
    options = {"turns": 1, **(tier_options or {})}
    return Place([path if isinstance(path, TierPath) else TierPath(path) for path in paths], job, host, rank, world, group, options)
