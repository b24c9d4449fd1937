"""Which elements of the parameters a rank has under ZeRO-3, and where they are in its sub-groups.

Stage 3 gives each rank a partition of every flat parameter. The last partition of a parameter is padded, and the padding belongs to no
parameter. Sub-groups have the partitions of consecutive parameters, in the order of the parameter groups, whatever the number of ranks."""

from __future__ import annotations

from .._holdings import Held, Holding
from ..errors import InvalidArgumentError, UnsupportedError
from ._sub_groups import SubGroupParts


def of(stage3):
    """For each parameter its shape, the first element and the number of elements of this rank's partition, and sub-group and place there.
    Plain data, which a commit stores. None if ranks divide parameters in another way than among all of them."""
    from deepspeed import comm as dist

    world, found = dist.get_world_size(), []
    # Versions without these divide all parameters among the same ranks.
    divided = getattr(stage3, "_get_param_partition_world_size", lambda _: stage3.partition_count)
    place = getattr(stage3, "_get_param_partition_rank", lambda _: dist.get_rank(group=stage3.dp_process_group))
    for index, params in enumerate(stage3.fp16_groups):
        at = 0
        for param in params:
            count, rank = param.partition_numel(), place(param)
            if divided(param) != world:
                return None
            start = min(count * rank, param.ds_numel)
            found.append([list(param.ds_shape), start, min(count, param.ds_numel - start), index, at])
            at += count
    return found


def holding(facts):
    """What the rank with these facts holds. The tensors are the parameters by their number."""
    if facts["held"] is None or facts["split_master"]:
        reason = "master weights are split" if facts["split_master"] else "parameters are divided among some of the ranks only"
        raise UnsupportedError(
            f"spillway.begin_from: {reason}; save a checkpoint, convert it with DeepSpeed's ds_to_universal, and load it with another job"
        )
    parts = SubGroupParts(facts["elements"], facts["part_elements"])
    held = {}
    for number, (shape, start, count, index, at) in enumerate(facts["held"]):
        pieces = parts.pieces(index, at, count) if count else []
        held[number] = Held(f"parameter number {number}", f"of shape {tuple(shape)}", _one(start, count), pieces, facts["steps"][index])
    return Holding(parts.sizes, facts["moment_dtype"], held)


def _one(start, count):
    return lambda: [(start, count)] if count else []


def steps(own, found, sub_groups):
    """The number of steps of each sub-group, from that of each parameter."""
    known = set(found.values())
    if len(known) > 1:
        raise InvalidArgumentError(
            f"spillway.begin_from: parameters have had {sorted(known)} steps, and a sub-group steps as one; pass a run that has stepped all"
        )
    return [int(step) for step in known or {0}] * sub_groups
