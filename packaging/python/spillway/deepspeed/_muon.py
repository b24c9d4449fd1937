"""What DeepSpeed's ZeRO-3 omits for Muon: with `save_muon_momentum_buffer_in_memory` the momentum stays zero after a load of a checkpoint,
and training continues with other weights, without an error. _swap_files.py restores states in files."""

from ..errors import InvalidArgumentError


def refuse_superoffload(engine):
    """Raises InvalidArgumentError for Muon with SuperOffload, where DeepSpeed ends with KeyError: 'betas'."""
    offload = engine._config.zero_config.offload_optimizer
    if engine.optimizer_name() == "muon" and getattr(offload, "super_offload", False):
        raise InvalidArgumentError(
            'the optimizer is Muon, and SuperOffload steps every parameter by Adam; take "super_offload" out of offload_optimizer, or use '
            "AdamW"
        )


def is_muon(stage3):
    """True for an optimizer of stage 3 whose matrices Muon steps."""
    return getattr(stage3, "use_muon", False)


def relink(stage3):
    """Gives the momentum that stays in memory the values that the optimizer's state has after a load."""
    for index, buffer in getattr(stage3, "muon_momentum_buffer_partitioned_groups_flat", {}).items():
        state = stage3.optimizer.state[stage3.fp32_partitioned_groups_flat[index]]
        buffer.copy_(state["momentum_buffer"])
        state["momentum_buffer"] = buffer
