"""The HybridDeviceOptimizer whose CPU parameters Spillway steps.

Megatron's class does everything that concerns the GPU's share of the parameters, groups, states and checkpoints. The subclass here changes
the way of gradients and parameters of the CPU's share:

    Megatron:   gradient -> float32 in host memory -> step -> float32 parameter -> converted on the way back
    Spillway:   gradient -> its own dtype in host memory -> step, which also writes a 16-bit copy -> copied back

Order on the streams: a step reads a gradient after its bucket's event, and the copies of the step before have ended by then. The event
follows the gradient's copy, which follows the current stream, which waited for the copies back. So one pinned copy for each parameter
is enough.

The CPU's optimizers are spillway.torch's classes with gradients and copies of other dtypes. torch accepts no 16-bit tensor as `grad` of a
float32 parameter in all versions. So a gradient is in `decoupled_grad`, the attribute that Megatron uses for the same purpose. A step of a
float32 parameter also writes its 16-bit copy, in the same pass over memory.

A checkpoint names torch's class in its groups and has the float32 master in the state `master_param`, as without Spillway."""

from __future__ import annotations

import copyreg
from typing import Any

import torch

import spillway.torch

from .._groups import TORCHS
from ..torch import inner
from ..torch.inner import CODES, DTensor
from . import _versions

#: Bytes of float32 parameters after which a bucket is full.
BUCKET_BYTES = 64 << 20

#: Counters of this process, for active().
counts = {"optimizers": 0, "steps": 0, "elements": 0, "grad_bytes": 0, "param_bytes": 0}

_subclasses: dict[type, type] = {}
_Mixed: Any = object


class _Memory(inner.Memory):
    """States in host memory, whose steps take and write what a HybridDeviceOptimizer has."""

    grad_name = "decoupled_grad"
    serves_all = True
    rest_words = (
        "cannot be stepped by Spillway: its group has amsgrad, capturable or differentiable, or its gradient is not contiguous; leave "
        "these out, or call spillway.megatron.uninstall() before the optimizer is built"
    )


class _Offloaded(_Mixed):
    """Mixed into spillway.torch's classes."""

    _memory: type[inner.Memory] = _Memory

    @property
    def copies(self):
        """The 16-bit copies that a step writes, by parameter. Those of a pickled optimizer belonged to the parameters of its
        HybridDeviceOptimizer."""
        return self._home.copies

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        for param in self.params():
            if not hasattr(param, "decoupled_grad"):
                param.decoupled_grad = None

    def params(self):
        """All parameters."""
        return [param for group in self.param_groups for param in group["params"]]

    def _log_name(self):
        return "megatron", "HybridDeviceOptimizer"


class AdamW(_Offloaded, spillway.torch.AdamW):
    """The AdamW of a HybridDeviceOptimizer."""


class Adam(_Offloaded, spillway.torch.Adam):
    """The Adam of a HybridDeviceOptimizer."""


#: For each class that Megatron is given: torch's class, which checkpoints name, and Spillway's.
CLASSES = {
    torch.optim.AdamW: (torch.optim.AdamW, AdamW),
    spillway.torch.AdamW: (torch.optim.AdamW, AdamW),
    torch.optim.Adam: (torch.optim.Adam, Adam),
    spillway.torch.Adam: (torch.optim.Adam, Adam),
}


def take(optimizer):
    """Makes a HybridDeviceOptimizer, which is being built, one that Spillway serves. False if Megatron's own code has to do it."""
    reason = _lacks(optimizer)
    if reason:
        _versions.leave("a HybridDeviceOptimizer", reason)
        return False
    base = type(optimizer)
    if base not in _subclasses:
        names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__, "_spillway_base": base}
        _subclasses[base] = type(base.__name__, (Served, base), names)
    optimizer.__class__ = _subclasses[base]
    counts["optimizers"] += 1
    return True


def _lacks(optimizer):
    """The reason why Spillway does not serve an optimizer, or None."""
    given = optimizer.cpu_optimizer_cls
    if given not in CLASSES:
        return f"its CPU optimizer is {getattr(given, '__name__', given)}, and Spillway has Adam and AdamW"
    for group in optimizer.param_groups:
        flags = [flag for flag in TORCHS if group.get(flag)]
        if flags:
            return f"a group has {flags[0]}, which Spillway's Adam does not support"
        for param in group["params"]:
            if not param.is_cuda:
                return "a parameter is in host memory, and Megatron offloads parameters of a GPU"
            if isinstance(param, DTensor) or param.dtype not in CODES or not param.is_contiguous():
                return "a parameter is a DTensor, is not contiguous, or is not of float32, bfloat16 or float16"
    return None


class Served(_Mixed):
    """Mixed into Megatron's class, in front of it."""

    _spillway_base: type
    cpu_optimizer_cls: Any
    cpu_optimizers: Any

    def __reduce_ex__(self, protocol):
        # A copy is of Megatron's class, by whose name it is found.
        return copyreg.__newobj__, (self._spillway_base,), self.__getstate__()  # type: ignore[attr-defined]

    def _init_sub_optimizers(self):
        theirs, ours = CLASSES[self.cpu_optimizer_cls]
        for options in (self.defaults, *self.param_groups):
            options["cpu_optimizer_cls"] = theirs
        self.cpu_optimizer_cls = ours
        try:
            super()._init_sub_optimizers()
        finally:
            self.cpu_optimizer_cls = theirs
        if self.gpu_optimizer is not None:
            _versions.leave("parameters that stay on the GPU", f"they are stepped by {type(self.gpu_optimizer).__name__} there")

    @staticmethod
    def build_cpu_optimizer_list(cpu_optimizer_cls, cpu_param_groups):
        """Divides the CPU parameters into buckets, in order, with an optimizer each."""
        buckets: list[list[Any]] = [[]]
        taken = 0
        for group in cpu_param_groups:
            options, params = {**group}, group["params"]
            options.pop("params")
            for param in [params] if isinstance(params, torch.Tensor) else params:
                if taken >= BUCKET_BYTES:
                    buckets.append([])
                    taken = 0
                if not buckets[-1] or buckets[-1][-1][0] is not group:
                    buckets[-1].append((group, {**options, "params": []}))
                buckets[-1][-1][1]["params"].append(param)
                taken += 4 * param.numel()
        return [cpu_optimizer_cls([options for _, options in bucket]) for bucket in buckets if bucket]

    def _set_sub_optimizer_grads(self):
        ours, self.cpu_optimizers = self.cpu_optimizers, []
        try:
            super()._set_sub_optimizer_grads()
        finally:
            self.cpu_optimizers = ours
        for optimizer in ours:
            for param in optimizer.params():
                self._send_grad(param)
            self._cpu_optimizer_map_data_event[optimizer] = self._d2h_stream.record_event()

    def _send_grad(self, param):
        """Starts the copy of a gradient to host memory. A parameter without a gradient is not stepped."""
        gpu_param = self.cpu_copys_map_gpu_param[param]
        grad = getattr(gpu_param, "decoupled_grad", gpu_param.grad)
        param.requires_grad = False
        if grad is None:
            param.decoupled_grad = None
            return
        # A float32 parameter steps with a gradient of 16 bits as it is.
        dtype = grad.dtype if param.dtype is torch.float32 and grad.dtype in CODES else param.dtype
        buffer = self.cpu_copy_map_grad.get(param)
        if buffer is None or buffer.dtype is not dtype:
            buffer = torch.empty(param.shape, dtype=dtype, pin_memory=self.pin_cpu_grads, device="cpu")
            self.cpu_copy_map_grad[param] = buffer
        buffer.copy_(grad.detach(), non_blocking=True)
        param.decoupled_grad = buffer
        counts["grad_bytes"] += buffer.nbytes

    def _register_param_copy_back_gpu_hook(self):
        ours, self.cpu_optimizers = self.cpu_optimizers, []
        try:
            super()._register_param_copy_back_gpu_hook()
        finally:
            self.cpu_optimizers = ours
        for optimizer in ours:
            for param in optimizer.params():
                dtype = self.cpu_copys_map_gpu_param[param].dtype
                if param.dtype is torch.float32 and dtype is not torch.float32:
                    optimizer.copies[param] = torch.empty(param.shape, dtype=dtype, pin_memory=self.pin_cpu_params, device="cpu")
            optimizer.register_step_post_hook(self._copy_back)

    def _copy_back(self, optimizer, args, kwargs):
        """Starts the copies of a bucket's parameters to the GPU, after its step."""
        counts["steps"] += 1
        self._h2d_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._h2d_stream):
            for param in optimizer.params():
                stepped = param.decoupled_grad is not None
                # The copy of a parameter without a gradient is older than its master.
                source = optimizer.copies.get(param, param) if stepped else param
                self.cpu_copys_map_gpu_param[param].data.copy_(source.data, non_blocking=True)
                counts["elements"] += param.numel() * stepped
                counts["param_bytes"] += source.nbytes
        self._h2d_stream.record_event().wait(torch.cuda.current_stream())
