"""The `interleave` object in the `spillway` block of a DeepSpeed configuration: CPU and GPU step ZeRO-3's sub-groups at
the same time; their states are in host memory.

    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true}},
    "spillway": {"interleave": {"plan": "stride", "plan_argument": 2, "gradient_transfers": true}}

Results are bit-identical to DeepSpeedCPUAdam on Spillway's op. When a step returns, all states are in host memory."""

from __future__ import annotations

import collections
import weakref

from .. import _abi, _native
from .. import gpu as _gpu
from ..errors import InvalidArgumentError
from ..interleave import Interleave, Rates, Subgroup, plan
from . import _call, _lifetime, _tier_config, _versions
from ._superoffload import gradient_factor, with_data

_updates: weakref.WeakSet[Update] = weakref.WeakSet()


def parse(block):
    """The interleave object of a `spillway` block; None if it has none. _block.InterleaveBlock has the settings."""
    if not block or block.get("interleave") is None:
        return None
    # pydantic is installed with DeepSpeed; it is imported only if a block is given.
    from . import _block

    return _block.read(block).interleave


def served():
    """Counters of steps and of sub-groups per processor, summed over all optimizers of this process."""
    total = {}
    for update in _updates:
        for name, value in update.counts.items():
            total[name] = total.get(name, 0) + value
    return total


class Update:
    """The interleaved update of one stage-3 optimizer."""

    def __init__(self, stage3, settings):
        reason = _unfit(stage3)
        if reason:
            raise InvalidArgumentError(f"spillway.interleave: {reason}")
        self._stage3, self.settings = weakref.proxy(stage3), settings
        self.gpu = _gpu.Gpu(_ordinal()) if settings.backend == "cuda" else None
        self._interleave, self._arrays, self._copies, self._closed = None, None, collections.deque(), False
        # The last step's factor, which the gradients in host memory do not have yet.
        self._factor = 1.0
        self._with_data = len(set().union(*(with_data(stage3, group) for group in stage3.fp16_groups)))
        _lifetime.opened(self)
        self.counts = {"steps": 0, "cpu": 0, "gpu": 0}
        _updates.add(self)

    def step(self, factor):
        """Starts the step of all sub-groups; `factor` multiplies the gradients."""
        self._open()
        stream = self._stream()
        self.scale_old_gradients()
        for copy in self._copies:
            copy.stream_wait(stream)
        update, placements = self._interleave, self._interleave.get_plan()
        for index in range(len(placements)):
            update.grad_ready(index, stream)
        update.begin_ds(self._stage3.optimizer.opt_id, [self._call_of(index, factor) for index in range(len(placements))], stream)
        self.counts["steps"] += 1
        for index, placement in enumerate(placements):
            self.counts[placement] += 1
            _call.count("cpu_adam", self._stage3.fp32_partitioned_groups_flat[index].numel())
        self._factor = factor

    def scale_old_gradients(self):
        """Multiplies the gradients of parameters that had none since the last step by that step's factor, as every step of
        DeepSpeed does. Called before such a gradient is used, read or set."""
        stage3, factor, self._factor = self._stage3, self._factor, 1.0
        if factor == 1.0 or len(stage3.norm_for_param_grads) >= self._with_data:
            return
        for group in stage3.fp16_groups:
            for param in group:
                if stage3.get_param_id(param) not in stage3.norm_for_param_grads:
                    index, offset, count = stage3.grad_position[stage3.get_param_id(param)]
                    stage3.fp32_partitioned_groups_flat[index].grad.narrow(0, offset, count).mul_(factor)

    def publish(self, index):
        """Makes the current stream wait for a sub-group's new weights. After the last sub-group all states are in host
        memory."""
        self._interleave.stream_wait_params(index, self._stream())
        if index == len(self._interleave) - 1:
            self._interleave.drain()
            self._copies.clear()
            if self.settings.replan:
                self._interleave.replan()

    def gradient_out(self, grad, host):
        """Starts copying a gradient to host memory."""
        if grad.dtype != host.dtype and host.element_size() != 4:
            raise InvalidArgumentError(
                f"spillway.interleave: a gradient of {grad.dtype} cannot be copied to {host.dtype}; use float32 "
                "master gradients, or the gradient's dtype"
            )
        # Each copy keeps its gradient on the GPU alive until it ends. Copies end in the order of their start.
        while self._copies and self._copies[0].done():
            self._copies.popleft()
        self._copies.append(self.gpu.copy_out(grad.contiguous(), host, after=self._stream()))

    def skip(self):
        """Waits for the gradient copies of a step that is skipped."""
        while self._copies:
            self._copies.popleft().wait()

    def _stream(self):
        if self.gpu is None:
            return None
        import torch

        return torch.cuda.current_stream()

    def _open(self):
        """Opens the update at the first step, and reopens it if a checkpoint has replaced tensors."""
        arrays = [self._subgroup(index) for index in range(len(self._stage3.fp16_groups))]
        addresses = [[array.data_ptr() for array in group if array is not None] for group in arrays]
        if self._closed:
            raise InvalidArgumentError("spillway.interleave: the update was closed with its engine; make a new engine")
        if addresses == self._arrays:
            return
        self._end()
        settings, sizes = self.settings, [group.param.numel() for group in arrays]
        self._interleave = Interleave(
            arrays, gpu=self.gpu, transfer_dtype="delivered", fetch_gradients=True, slots=settings.slots, chunk=settings.chunk
        )
        rates = Rates(**settings.rates.model_dump()) if settings.rates else Rates(1.0, 1.0, 1.0, 1.0)
        found = plan(
            rates,
            sizes,
            mode=settings.plan,
            argument=settings.plan_argument,
            transfer_dtype="delivered",
            fetch_gradients=True,
            slots=settings.slots,
            chunk=settings.chunk,
        )
        self._interleave.set_plan(found.placements)
        if settings.rates:
            self._interleave.calibrate(rates)
        self._arrays = addresses

    def _subgroup(self, index):
        stage3 = self._stage3
        master, weights = stage3.fp32_partitioned_groups_flat[index], stage3.fp16_partitioned_groups_flat[index]
        state = stage3.optimizer.state[master]
        if "exp_avg" not in state:
            import torch

            state.update(step=state.get("step", 0), exp_avg=torch.zeros_like(master), exp_avg_sq=torch.zeros_like(master))
        if self.gpu is None:
            return Subgroup(master.data, state["exp_avg"], state["exp_avg_sq"], master.grad.data, weights)
        master.data, master.grad = _pinned(master.data), _pinned(master.grad.data)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = _pinned(state[name])
        return Subgroup(master.data, state["exp_avg"], state["exp_avg_sq"], None, weights, master.grad.data)

    def _call_of(self, index, factor):
        stage3 = self._stage3
        group = stage3.optimizer.param_groups[stage3.sub_group_to_group_id[index]]
        state = stage3.optimizer.state[stage3.fp32_partitioned_groups_flat[index]]
        state["step"] += 1
        call = _abi.sized(_abi.DsAdamCall)
        call.step, call.bias_correction, call.grad_scale = state["step"], int(group["bias_correction"]), factor
        call.lr, (call.beta1, call.beta2) = group["lr"], group["betas"]
        call.eps, call.weight_decay = group["eps"], group["weight_decay"]
        return call

    def close(self):
        """Closes the update and the GPU; the states stay in host memory."""
        self._closed = True
        self._end()
        if self.gpu is not None:
            self.gpu.close()

    def _end(self):
        if self._interleave is not None:
            self._interleave.close()
            self._interleave = self._arrays = None


def overrides(stage3):
    """Methods for DeepSpeedZeroOptimizer_Stage3, by name; without an Update each runs DeepSpeed's own method."""
    own = {name: getattr(stage3, name) for name in _versions.methods("interleave")}

    def initialize_optimizer_states(self):
        settings = parse(_tier_config.block())
        self._spillway_interleave = Update(self, settings) if settings else None
        own["initialize_optimizer_states"](self)

    def unscale_and_clip_grads(self, sub_group_id, total_norm):
        update = interleaved(self)
        if update is None:
            own["unscale_and_clip_grads"](self, sub_group_id, total_norm)
        elif sub_group_id == 0:
            update.step(gradient_factor(self, total_norm))

    def optimizer_step(self, sub_group_id):
        if interleaved(self) is None:
            own["_optimizer_step"](self, sub_group_id)

    def reassign(self, sub_group_id):
        update = interleaved(self)
        if update is None:
            return own["_reassign_or_swap_out_partitioned_parameters"](self, sub_group_id)
        update.publish(sub_group_id)
        self._unflatten_partitioned_parameters(sub_group_id)

    def overflow_clean_up(self, prev_scale):
        update = interleaved(self)
        if update is not None:
            # While the parameters whose gradients are new are known.
            update.scale_old_gradients()
        own["_overflow_clean_up"](self, prev_scale)
        if update is not None:
            update.skip()

    def seeing_gradients(name):
        def method(self, *arguments, **named):
            update = interleaved(self)
            if update is not None:
                update.scale_old_gradients()
            return own[name](self, *arguments, **named)

        return method

    def at_boundary(self, param, grad_buffer, *gradients):
        update = interleaved(self)
        if update is None or not update.settings.gradient_transfers:
            return own["_offload_grad_partition_at_boundary"](self, param, grad_buffer, *gradients)
        index, offset, _ = self.grad_position[self.get_param_id(param)]
        self.norm_for_param_grads[self.get_param_id(param)] = self._constant_buffered_norm2(grad_buffer)
        host = self.fp32_partitioned_groups_flat[index].grad.narrow(0, offset, grad_buffer.numel())
        update.gradient_out(grad_buffer, host)

    return {
        "initialize_optimizer_states": initialize_optimizer_states,
        "unscale_and_clip_grads": unscale_and_clip_grads,
        "_optimizer_step": optimizer_step,
        "_reassign_or_swap_out_partitioned_parameters": reassign,
        "_offload_grad_partition_at_boundary": at_boundary,
        "_overflow_clean_up": overflow_clean_up,
        **{
            name: seeing_gradients(name)
            for name in ("_get_fp32_grad_state_partition", "get_fp32_grad_partitions", "update_fp32_grad_for_param_vectorized")
        },
    }


def interleaved(stage3):
    """The Update of an optimizer, or None."""
    return getattr(stage3, "_spillway_interleave", None)


def _unfit(stage3):
    """The reason why this optimizer's sub-groups cannot be interleaved; None if they can."""
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer = stage3.optimizer
    if not isinstance(optimizer, DeepSpeedCPUAdam) or not getattr(optimizer.ds_opt_adam, "__spillway__", False):
        return f"the optimizer is {type(optimizer).__name__}; DeepSpeedCPUAdam on Spillway's op is needed"
    if stage3.swap_optimizer or any(flat is None for flat in stage3.fp16_partitioned_groups_flat):
        return "states or parameters are in files; put offload_optimizer on the device cpu and offload_param off nvme"
    if any(master.dtype is not torch.float32 for master in stage3.fp32_partitioned_groups_flat):
        return "master weights have 16 bits; 32-bit master weights are needed"
    if any(flat.element_size() != 2 for flat in stage3.fp16_partitioned_groups_flat):
        return "the model's weights have 32 bits; a 16-bit model is needed (bf16 or fp16)"
    if getattr(stage3, "torch_autocast_gradscaler", None) is not None:
        return "torch's gradient scaler unscales the gradients before the step; take torch_autocast out, or use bfloat16"
    if getattr(stage3, "partial_offload", 1.0) != 1.0:
        return "offload_optimizer.ratio is not 1; set it to 1"
    return (
        "SuperOffload runs its own update; take super_offload or interleave out" if hasattr(stage3, "superoffload_cpu_optimizer") else None
    )


def _ordinal():
    """The Gpu that torch uses; raises InvalidArgumentError if torch has no CUDA."""
    _gpu.gpu_count()
    import torch

    if not torch.cuda.is_available():
        raise InvalidArgumentError('spillway.interleave: this torch has no CUDA; with "backend": "host" threads take its part')
    return torch.cuda.current_device()


def _pinned(tensor):
    """The tensor, or a copy in page-locked memory if it is not page-locked."""
    import torch

    known = _abi.c_uint32()
    address, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    _native.call("spw_pinned_contains", address, size, known)
    if known.value or tensor.is_pinned():
        return tensor
    locked = torch.from_numpy(_gpu.pinned(tensor.numel()))
    locked.copy_(tensor)
    return locked
