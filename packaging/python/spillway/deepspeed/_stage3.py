"""What Spillway's updates know of DeepSpeed's ZeRO stage 3, and what stage 3 asks of them.

Stage 3's step prepares, unscales, steps, publishes and releases one sub-group after another. An update takes the place of
these steps for all sub-groups at once; _stage3_methods.py calls it. SuperOffload has a step of its own."""

from __future__ import annotations

import contextlib
import ctypes
import warnings
import weakref
from typing import Any, Protocol

from .. import _abi
from .._early import arrivals
from .._groups import put_numbers
from ..errors import InvalidArgumentError


class Update(Protocol):
    """The update of all sub-groups of one optimizer."""

    def step(self, factor: float) -> None:
        """Starts the step; `factor` multiplies the gradients."""

    def publish(self, sub_group: int) -> None:
        """Gives the model a sub-group's new weights. Called once per sub-group and step, in order."""

    def gradient(self, param: Any, buffer: Any) -> bool:
        """Takes a gradient that backward completed in `buffer`; False leaves it to stage 3."""

    def accumulating(self, params: Any) -> None:
        """Called before backward adds to gradients that are not complete."""

    def reading(self) -> None:
        """Called before stage 3 reads gradients for the program."""

    def setting(self, params: Any) -> contextlib.AbstractContextManager[None]:
        """Open while stage 3 sets gradients of these parameters for the program."""

    def skip(self) -> None:
        """Called when a step is skipped, because a gradient overflowed."""


def warn_of_one_bucket(stage3, who):
    """Warns if no gradient becomes complete before the end of backward: DeepSpeed reduces them once a bucket is full, or at the end."""
    parameters = sum(stage3.fp16_partitioned_groups_flat_numel) * stage3.partition_count
    if stage3.reduce_bucket_size >= parameters:
        warnings.warn(
            f"{who}: all gradients become complete at the end of backward, because reduce_bucket_size is {stage3.reduce_bucket_size} and "
            f"the model has {parameters} parameters; set reduce_bucket_size to sub_group_size, so that steps start during backward",
            RuntimeWarning,
            stacklevel=3,
        )


def call_of(stage3, sub_group, step, factor=1.0):
    """The C record of a sub-group's step number `step`, with the options of its parameter group; `factor` multiplies the gradients."""
    number = stage3.sub_group_to_group_id[sub_group]
    group = stage3.optimizer.param_groups[number]
    call = _abi.DsAdamCall(ctypes.sizeof(_abi.DsAdamCall), int(group["bias_correction"]), step, grad_scale=factor)
    put_numbers(call, group, f"param_groups[{number}]")
    return call


def state_of(stage3, master):
    """The entry of a sub-group's master weights in the optimizer's state, with moments."""
    import torch

    state = stage3.optimizer.state[master]
    if "exp_avg" not in state:
        state.update(step=state.get("step", 0), exp_avg=torch.zeros_like(master.data), exp_avg_sq=torch.zeros_like(master.data))
    return state


def gradient_factor(stage3, total_norm):
    """Gradient factor of DeepSpeed's unscale_and_clip_grads, in its arithmetic: the norm is an f32 tensor."""
    combined = stage3.loss_scale
    if stage3.clip_grad > 0.0:
        clip = ((total_norm / stage3.loss_scale) + 1e-6) / stage3.clip_grad
        combined = clip.clamp(min=1.0) * stage3.loss_scale
    return ctypes.c_float(float(1.0 / combined)).value


def unclipped(stage3):
    """Gradient factor of a step that does not clip."""
    return ctypes.c_float(float(1.0 / stage3.loss_scale)).value


class Arrivals(arrivals.Arrivals[int, int]):
    """The gradients that backward has completed since the last step, by sub-group.

    Args:
        stage3: The optimizer.
        sub_groups: Those of which arrivals are noted."""

    def __init__(self, stage3, sub_groups):
        super().__init__({sub_group: with_data(stage3, stage3.fp16_groups[sub_group]) for sub_group in sub_groups})
        self._stage3 = weakref.proxy(stage3)

    def sub_group(self, param):
        """The sub-group of a parameter."""
        index, *_ = self._stage3.grad_position[self._stage3.get_param_id(param)]
        return index

    def complete(self, params):
        """Notes gradients. Returns the sub-groups of which one has come and none is missing, in their order."""
        return sorted(self.note(map(self._stage3.get_param_id, params)))

    def change(self, params):
        """Forgets gradients that are about to change."""
        self.forget(map(self._stage3.get_param_id, params))


def with_data(stage3, params):
    """Ids of the parameters of which this rank holds a part."""
    return {
        stage3.get_param_id(param) for param in params if param.partition_numel() * stage3._get_param_partition_rank(param) < param.ds_numel
    }


class HostWeights:
    """Host memory for the 16-bit weights that steps write: those of a model that must not have them yet, or that is on a device."""

    def __init__(self, stage3):
        self._stage3 = weakref.proxy(stage3)
        self._memory: dict[int, Any] = {}

    def of(self, sub_group):
        """Memory for the weights of a sub-group in 16 bits; None if the model has them in float32, or not in memory."""
        import torch

        from ..torch.inner import link_to

        flat = self._stage3.fp16_partitioned_groups_flat[sub_group]
        if flat is None or flat.dtype not in (torch.bfloat16, torch.float16):
            return None
        if sub_group not in self._memory:
            self._memory[sub_group] = link_to(flat).memory(flat.shape, flat.dtype)
        return self._memory[sub_group]

    def publish(self, sub_group):
        """Begins the copy of a sub-group's weights to the model. False without such memory. The copy has half of the bytes of DeepSpeed's,
        which converts masters."""
        if sub_group not in self._memory:
            return False
        self._stage3.fp16_partitioned_groups_flat[sub_group].data.copy_(self._memory[sub_group], non_blocking=True)
        self._stage3._unflatten_partitioned_parameters(sub_group)
        return True

    def forget(self, sub_group):
        """Frees the memory of a sub-group."""
        self._memory.pop(sub_group, None)


def copies():
    """The event of the copies that were started before on the current stream of the GPU; none if they are done."""
    from deepspeed.accelerator import get_accelerator

    stream = get_accelerator().current_stream()
    return [] if stream is None else [stream.record_event()]


def wait_for_copies():
    """Waits for these copies. The gathers of DeepSpeed are on a stream that does not wait for this one."""
    for event in copies():
        event.synchronize()


def optimizer_lacks(stage3):
    """The reason why no update of Spillway steps this optimizer; None if one can."""
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer = stage3.optimizer
    if not isinstance(optimizer, DeepSpeedCPUAdam) or not getattr(optimizer.ds_opt_adam, "__spillway__", False):
        return f"the optimizer is {type(optimizer).__name__}; DeepSpeedCPUAdam on Spillway's op is needed"
    if not getattr(optimizer, "fp32_optimizer_states", True) or _master_dtype(stage3) is not torch.float32:
        return "master weights or optimizer states have 16 bits; 32 bits are needed"
    return None


def offload_lacks(stage3):
    """The reason why a part of the optimizer is not offloaded; None if all is."""
    return None if getattr(stage3, "partial_offload", 1.0) == 1.0 else "offload_optimizer.ratio is not 1; set it to 1"


def grad_scaler(stage3):
    """torch's gradient scaler, which torch_autocast with float16 uses; else None."""
    return getattr(stage3, "torch_autocast_gradscaler", None)


def scaler_lacks(stage3):
    """The reason why gradients are not as backward left them; None if they are."""
    if grad_scaler(stage3) is None:
        return None
    return "torch's gradient scaler unscales the gradients before the step; take torch_autocast out, or use bfloat16"


def _master_dtype(stage3):
    import torch

    if hasattr(stage3, "master_weights_and_grads_dtype"):
        return stage3.master_weights_and_grads_dtype
    return torch.float16 if getattr(stage3, "fp16_master_weights_and_gradients", False) else torch.float32


def order(stage3):
    """The sub-groups in the order of the optimizer's state dict: by parameter group."""
    groups = stage3.sub_group_to_group_id
    return sorted(range(len(stage3.fp16_groups)), key=lambda index: (groups[index], index))


def check_masters(elements, masters, order):
    """Raises InvalidArgumentError if the masters of a checkpoint are those of other sub-groups. A checkpoint of DeepSpeed's own NVMe
    swapper has empty ones where its swap files are missing."""
    if len(masters) != len(order):
        raise InvalidArgumentError(
            f"the checkpoint has {len(masters)} sub-groups, this run {len(order)}; use the sub_group_size and the "
            "number of ranks of the run that saved it"
        )
    if any(elements[index] and not master.numel() for index, master in zip(order, masters)):
        raise InvalidArgumentError(
            "the checkpoint was saved with DeepSpeed's own NVMe swapper, and its directory has no copies of the swap files, which belong "
            "below offloaded_tensors; copy them there, or load another tag"
        )
    found, wanted = [master.numel() for master in masters], [elements[index] for index in order]
    if found != wanted:
        raise InvalidArgumentError(
            f"the checkpoint has sub-groups of {found} elements, this run of {wanted}; use the model, the sub_group_size and the number "
            "of ranks of the run that saved it"
        )
