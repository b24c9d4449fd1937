"""The `interleave` object in the `spillway` block of a DeepSpeed configuration: CPU and GPU step ZeRO-3's sub-groups at
the same time; their states are in host memory.

    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true}},
    "spillway": {"interleave": {"plan": "stride", "plan_argument": 2, "gradient_transfers": true}}

Results are bit-identical to DeepSpeedCPUAdam on Spillway's op. When a step returns, all states are in host memory."""

from __future__ import annotations

import collections
import contextlib
import weakref
from typing import Any

from .. import _pinned
from .. import gpu as _gpu
from ..errors import InvalidArgumentError
from ..interleave import Interleave, Rates, Subgroup, plan
from . import _installed, _lifetime, _optimizer_ops, _stage3

_updates: weakref.WeakSet[InterleavedUpdate] = weakref.WeakSet()


def served():
    """Counters of steps and of sub-groups per processor, summed over all optimizers of this process."""
    total: dict[str, int] = {}
    for update in _updates:
        for name, value in update.counts.items():
            total[name] = total.get(name, 0) + value
    return total


_installed.counted(lambda: {"interleave": found} if (found := served()) else {})


class InterleavedUpdate:
    """The interleaved update of one stage-3 optimizer."""

    def __init__(self, stage3, settings):
        reason = _unfit(stage3)
        if reason:
            raise InvalidArgumentError(f"spillway.interleave: {reason}")
        self._stage3, self.settings = weakref.proxy(stage3), settings
        self.gpu: Any = _gpu.Gpu(_ordinal()) if settings.backend == "cuda" else None
        self._interleave: Any = None
        self._arrays: Any = None
        self._copies: collections.deque[_gpu.Copy] = collections.deque()
        self._closed = False
        # The last step's factor, which the gradients in host memory do not have yet.
        self._factor = 1.0
        self._with_data = len(set().union(*(_stage3.with_data(stage3, group) for group in stage3.fp16_groups)))
        _lifetime.opened(self)
        self.counts = {"steps": 0, "cpu": 0, "gpu": 0}
        _updates.add(self)

    def step(self, factor):
        """Starts the step of all sub-groups; `factor` multiplies the gradients."""
        self._open()
        stream = self._stream()
        self.reading()
        for copy in self._copies:
            copy.stream_wait(stream)
        update, placements = self._interleave, self._interleave.get_plan()
        for index in range(len(placements)):
            update.grad_ready(index, stream)
        update.begin_ds(self._stage3.optimizer.opt_id, [self._next_call(index, factor) for index in range(len(placements))], stream)
        self.counts["steps"] += 1
        for index, placement in enumerate(placements):
            self.counts[placement] += 1
            _optimizer_ops.count("cpu_adam", self._stage3.fp32_partitioned_groups_flat[index].numel())
        self._factor = factor

    def reading(self):
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
        self._stage3._unflatten_partitioned_parameters(index)

    @contextlib.contextmanager
    def setting(self, params):
        """Open while stage 3 sets gradients of these parameters."""
        self.reading()
        yield

    def accumulating(self, params):
        """No-op: the gradients are in stage 3's buffer."""

    def gradient(self, param, grad):
        """Starts copying a gradient to host memory, with gradient_transfers."""
        if not self.settings.gradient_transfers:
            return False
        index, offset, _ = self._stage3.grad_position[self._stage3.get_param_id(param)]
        self._copy_out(grad, self._stage3.fp32_partitioned_groups_flat[index].grad.narrow(0, offset, grad.numel()))
        return True

    def _copy_out(self, grad, host):
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
        addresses = [[(array.data_ptr(), array.numel(), array.dtype) for array in group if array is not None] for group in arrays]
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
        state = _stage3.state_of(stage3, master)
        if self.gpu is None:
            return Subgroup(master.data, state["exp_avg"], state["exp_avg_sq"], master.grad.data, weights)
        master.data, master.grad = _locked(master.data), _locked(master.grad.data)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = _locked(state[name])
        return Subgroup(master.data, state["exp_avg"], state["exp_avg_sq"], None, weights, master.grad.data)

    def _next_call(self, index, factor):
        state = self._stage3.optimizer.state[self._stage3.fp32_partitioned_groups_flat[index]]
        state["step"] += 1
        return _stage3.call_of(self._stage3, index, state["step"], factor)

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


def _unfit(stage3):
    """The reason why this optimizer's sub-groups cannot be interleaved; None if they can."""
    if reason := _stage3.optimizer_lacks(stage3) or _stage3.offload_lacks(stage3) or _stage3.scaler_lacks(stage3):
        return reason
    if stage3.swap_optimizer or any(flat is None for flat in stage3.fp16_partitioned_groups_flat):
        return "states or parameters are in files; put offload_optimizer on the device cpu and offload_param off nvme"
    if any(flat.element_size() != 2 for flat in stage3.fp16_partitioned_groups_flat):
        return "the model's weights have 32 bits; a 16-bit model is needed (bf16 or fp16)"
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


def _locked(tensor):
    """The tensor, or a copy in page-locked memory if it is not page-locked."""
    import torch

    if _pinned.contains(tensor.data_ptr(), tensor.numel() * tensor.element_size()) or tensor.is_pinned():
        return tensor
    locked = torch.from_numpy(_gpu.pinned(tensor.numel()))
    locked.copy_(tensor)
    return locked
