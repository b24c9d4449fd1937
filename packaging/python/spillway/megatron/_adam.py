"""The CPU optimizers inside of a HybridDeviceOptimizer: spillway.torch's classes with gradients and copies of other dtypes.

torch accepts no 16-bit tensor as `grad` of a float32 parameter in all versions. So a gradient is in `decoupled_grad`, the attribute that
Megatron uses for the same purpose. A step of a float32 parameter also writes its 16-bit copy, in the same pass over memory."""

from __future__ import annotations

from typing import Any

import torch

import spillway.torch

from ..torch import inner


class _Memory(inner.Memory):
    """States in host memory, whose steps take and write what a HybridDeviceOptimizer has."""

    grad_name = "decoupled_grad"
    serves_all = True
    rest_words = (
        "cannot be stepped by Spillway: its group has amsgrad, capturable or differentiable, or its gradient is not contiguous; leave "
        "these out, or call spillway.megatron.uninstall() before the optimizer is built"
    )


_Mixed: Any = object


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
