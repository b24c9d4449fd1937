"""Restores what DeepSpeed's ZeRO-3 omits when it loads a checkpoint of a run with Muon.

With states in files, DeepSpeed copies the swap files and does not read the optimizer's file. A new process then has neither Adam's step
numbers nor its moments, nor the states of sub-groups that are too small for a file. With `save_muon_momentum_buffer_in_memory` the momentum
stays zero, for states in host memory as well. In either case training continues with other weights, without an error."""

import os

import torch

from ..errors import InvalidArgumentError
from . import _stage3, _swap_files


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


def restore(engine, folder, saved):
    """Gives the sub-groups of an optimizer on DeepSpeed's own swapper all that a checkpoint has. `folder` is its directory, and `saved`
    stage 3's part of it."""
    stage3 = engine.optimizer
    stage3.loss_scaler, stage3.dynamic_loss_scale = saved["loss_scaler"], saved["dynamic_loss_scale"]
    stage3.overflow = saved["overflow"]
    of_optimizer = saved["optimizer_state_dict"]
    for group, before in zip(stage3.optimizer.param_groups, of_optimizer["param_groups"], strict=True):
        group.update({name: value for name, value in before.items() if name != "params"})
    order, elements = _stage3.order(stage3), [int(count) for count in stage3.fp16_partitioned_groups_flat_numel]
    files = _swap_files.of_rank(engine, folder)
    masters, states = _swap_files.taken_over(stage3, elements, files, saved["fp32_flat_groups"], of_optimizer["state"], order)
    _stage3.check_masters(elements, masters, order)
    for place, index in enumerate(order):
        _give(stage3, index, masters[place], states.get(place, {}))


def _give(stage3, index, master, state):
    """Sets master weights and states of a sub-group, and publishes the weights."""
    own, swapped = stage3.fp32_partitioned_groups_flat[index], stage3._swappable_optimizer_subgroup(index)
    if swapped:
        stage3._optimizer_states_and_gradient_swap_in(index)
    own.data.copy_(master)
    held = stage3.optimizer.state[own]
    # A checkpoint before the first step has no moments.
    for name in held.keys() - state.keys():
        held[name] = held[name].zero_() if isinstance(held[name], torch.Tensor) else 0
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and name in held:
            held[name].data.copy_(value)
        else:
            held[name] = value.clone() if isinstance(value, torch.Tensor) else value
    stage3._reassign_or_swap_out_partitioned_parameters(index)
    if swapped:
        stage3._writeback_swap_state(index, True, False)


def saved_by(engine, folder):
    """Stage 3's part of the checkpoint in a directory."""
    file = engine._get_zero_ckpt_name(os.path.dirname(folder), os.path.basename(folder))
    return engine.checkpoint_engine.load(file, map_location="cpu")["optimizer_state_dict"]
