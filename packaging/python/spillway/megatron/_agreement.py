"""What the processes of a run need to agree on a step of their tiers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..errors import InvalidArgumentError
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


def check_ranks(world: int, group: Any) -> None:
    """Raises InvalidArgumentError if `world` processes cannot agree."""
    if world == 1:
        return
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        raise InvalidArgumentError(
            f"OptimizerStateStore: world is {world}, and the processes agree by torch.distributed, which is not initialized; call "
            "torch.distributed.init_process_group first"
        )
    if distributed.get_world_size(group) != world:
        raise InvalidArgumentError(
            f"OptimizerStateStore: world is {world}, and the process group has {distributed.get_world_size(group)} processes; pass "
            "the number of processes of process_group"
        )
