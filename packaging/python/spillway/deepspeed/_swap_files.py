"""Checkpoints of DeepSpeed's own NVMe swapper, whose optimizer states are copies of its swap files. A run on a tier takes them over.

Below `TAG/offloaded_tensors/rankN` a sub-group has the files `ID.tensor.swp`, `exp_avg-ID.tensor.swp` and `exp_avg_sq-ID.tensor.swp`, or
with Muon `momentum_buffer-ID.tensor.swp`, where ID names its first and last parameter. A file has the float32 values, and bytes up to the
swapper's alignment. The checkpoint itself has empty tensors in their place; small sub-groups are not swapped, and are in it.

When DeepSpeed's own swapper loads a checkpoint, it copies these files and does not read the checkpoint itself. A new process then lacks
Adam's step numbers and moments, and the states of small sub-groups: training continues with other weights, without an error. `restore`
gives it all."""

import os
import re

import torch

from ..errors import InvalidArgumentError, UnsupportedError
from . import _stage3

FOLDER = "offloaded_tensors"
#: The file of the masters of a sub-group.
_MASTER = re.compile(r"(\d+)_(\d+)\.tensor\.swp")


def of_rank(engine, folder):
    """The directory of this rank's swap files in a checkpoint."""
    rank = engine.local_rank if engine.use_node_local_storage() else engine.global_rank
    return os.path.join(folder, FOLDER, f"rank{rank:0>2d}")


def taken_over(stage3, elements, files, masters, states, order):
    """Masters and states of a checkpoint, with those of the swap files in the directory `files` mapped into memory; the same ones if none
    is in a file. `elements` has the number of each sub-group.

    Raises:
        InvalidArgumentError: A file is missing or too short.
        UnsupportedError: The swap files have masters of 16 bits."""
    swapped = [place for place, index in enumerate(order) if elements[index] and not masters[place].numel()]
    if not swapped or files is None or not os.path.isdir(files):
        return masters, states
    if getattr(stage3, "fp16_master_weights_and_gradients", False):
        raise UnsupportedError("swap files with 16-bit masters are not read; save the checkpoint with float32 masters")
    masters, states = [*masters], dict(states)
    names = _names(files, {place: stage3.fp16_partitioned_groups_flat_id[order[place]] for place in swapped})
    for place, name in names.items():
        count = elements[order[place]]
        masters[place] = _values(files, name, count)
        state = states[place] = dict(states.get(place, {}))
        for moment, value in state.items():
            if isinstance(value, torch.Tensor) and not value.numel():
                state[moment] = _values(files, f"{moment}-{name}", count)
    return masters, states


def _names(folder, ids):
    """The ID in the files of each place. Numbers of parameters count all models of a process: another run has the same ones in the same
    order, perhaps from another number on."""
    ranges = {place: (own[0], own[-1]) for place, own in ids.items()}
    found = sorted((int(match[1]), int(match[2])) for file in os.listdir(folder) if (match := _MASTER.fullmatch(file)))
    if not set(ranges.values()) <= set(found):
        if len(found) != len(ranges):
            raise InvalidArgumentError(
                f"{folder} has swap files of {len(found)} sub-groups, and this run has {len(ranges)} in their place; use the model, the "
                "sub_group_size and the number of ranks of the run that saved the checkpoint"
            )
        ranges = dict(zip(sorted(ranges, key=ranges.__getitem__), found))
    return {place: f"{first}_{last}" for place, (first, last) in ranges.items()}


def _values(folder, name, count):
    file = os.path.join(folder, f"{name}.tensor.swp")
    size = os.path.getsize(file) if os.path.exists(file) else 0
    if size < 4 * count:
        raise InvalidArgumentError(
            f"{file} has {size} bytes, and {4 * count} are needed: the checkpoint of DeepSpeed's NVMe swapper is not whole, or of another "
            "model, sub_group_size or number of ranks; load another tag"
        )
    return torch.from_file(file, shared=False, size=count, dtype=torch.float32)


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
    files = of_rank(engine, folder)
    masters, states = taken_over(stage3, elements, files, saved["fp32_flat_groups"], of_optimizer["state"], order)
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
