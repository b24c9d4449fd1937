"""Reads DeepSpeed's universal checkpoints into a tier: a folder for each parameter, with the whole parameter and its moments.

Number of ranks and sub_group_size may be others than those of the run that saved. One sub-group is gathered and written at a time."""

from __future__ import annotations

import os

from ..errors import InvalidArgumentError

_STATES = ("fp32", "exp_avg", "exp_avg_sq")


def load(stage3, swapper, folder, load_optimizer_states, load_from_fp32_weights):
    """Sets the states of all sub-groups, and the model's weights.

    Args:
        stage3: The optimizer.
        swapper: Its TierSwapper.
        folder: The checkpoint's folder of this tag.
        load_optimizer_states: False leaves moments and steps as they are.
        load_from_fp32_weights: Without optimizer states: False rounds the masters to the dtype of the model.

    Raises:
        InvalidArgumentError: The checkpoint lacks a parameter of the model; nothing was changed."""
    folder = os.path.join(folder, "zero")
    names = _STATES if load_optimizer_states else _STATES[:1]
    _check(stage3, folder, names, load_optimizer_states)
    step = _take_options(stage3, folder) if load_optimizer_states else None
    for index, params in enumerate(stage3.fp16_groups):
        parts = [_gathered(stage3, params, swapper.elements[index], folder, name) for name in names]
        if not load_optimizer_states and not load_from_fp32_weights:
            parts = [parts[0].to(params[0].dtype).float()]
        swapper.give(index, *parts, *[None] * (len(_STATES) - len(parts)), step)
    swapper.publish_all()


def _check(stage3, folder, names, with_options):
    files = [os.path.join(folder, "optimizer_state.pt")] if with_options else []
    for param in (param for params in stage3.fp16_groups for param in params):
        files += [os.path.join(folder, stage3.param_names[param], f"{name}.pt") for name in names]
    missing = [file for file in files if not os.path.isfile(file)]
    if missing:
        raise InvalidArgumentError(
            f"the universal checkpoint lacks {missing[0]}, and {len(missing) - 1} more files that this model needs; pass one that "
            "DeepSpeed's ds_to_universal made from a checkpoint of this model"
        )


def _take_options(stage3, folder):
    """Takes over the options of the parameter groups and the loss scale; returns the number of steps."""
    import torch

    found = torch.load(os.path.join(folder, "optimizer_state.pt"), weights_only=False)
    stage3._load_global_state_stage3(found)
    saved, groups = found["optimizer_state_dict"], stage3.optimizer.param_groups
    # DeepSpeed gives all groups the options of the first one. Other numbers of groups leave no better choice.
    options = saved["param_groups"] if len(saved["param_groups"]) == len(groups) else saved["param_groups"][:1] * len(groups)
    for group, before in zip(groups, options):
        group.update({name: value for name, value in before.items() if name != "params"})
    # A checkpoint from before the first step has no state of a parameter.
    return next((int(state["step"]) for state in saved["state"].values()), 0)


def _gathered(stage3, params, elements, folder, name):
    """This rank's part of one state of a sub-group."""
    import torch

    flat, first = torch.zeros(elements, dtype=torch.float32), 0
    for param in params:
        part = stage3.load_hp_checkpoint_state(os.path.join(folder, stage3.param_names[param]), name, **_of(stage3, param))
        flat.narrow(0, first, part.numel()).copy_(part)
        first += part.numel()
    return flat


def _of(stage3, param):
    """The argument that names the parameter; older versions have none, and no groups of their own for parameters."""
    return {"param": param} if "param" in stage3.load_hp_checkpoint_state.__code__.co_varnames else {}
