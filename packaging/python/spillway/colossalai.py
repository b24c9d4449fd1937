"""ColossalAI's CPU Adam kernel, done by Spillway.

    from colossalai.kernel.kernel_loader import CPUAdamLoader
    import spillway.colossalai

    CPUAdamLoader.register_extension(spillway.colossalai.Extension)

`CPUAdam` and `HybridAdam` of ColossalAI then step with Spillway, and nothing is compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import _native
from .optim import Adam

if TYPE_CHECKING:
    import torch


class CPUAdamOptimizer:
    """ColossalAI's `CPUAdamOptimizer`.

    Args:
        lr, beta1, beta2, eps, weight_decay: Ignored; each step passes its own.
        adamw_mode: The weight decay scales the parameter (AdamW); otherwise it is added to the gradient."""

    def __init__(self, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, adamw_mode: bool):
        self._adam = Adam(lr, (beta1, beta2), eps, weight_decay, weight_decay_mode="decoupled" if adamw_mode else "l2")

    def step(self, step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, bias_correction: bool,
             param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, loss_scale: float = -1.0) -> None:
        """Steps one parameter in place. A `loss_scale` above 0 divides the gradient.

        Raises:
            InvalidArgumentError: A tensor does not fit; nothing was written.
            UnsupportedError: The combination of dtypes is not supported; nothing was written."""
        adam, options = self._adam, self._adam._options
        adam.lr, adam.eps, adam.weight_decay = lr, eps, weight_decay
        options.beta1, options.beta2, options.no_bias_correction = beta1, beta2, not bias_correction
        adam.step([(param, grad, exp_avg, exp_avg_sq)], grad_scale=1.0 / loss_scale if loss_scale > 0 else 1.0, number=step)


class Extension:
    """What ColossalAI's `CPUAdamLoader.register_extension` takes."""

    name = "cpu_adam_spillway"
    #: Above the priority of ColossalAI's own kernels, which is 1.
    priority = 10
    CPUAdamOptimizer = CPUAdamOptimizer

    def is_available(self) -> bool:
        """True: the library has a kernel for every processor."""
        return True

    def assert_compatible(self) -> None:
        """Raises an error if the library cannot be loaded."""
        _native.library()

    def load(self) -> Extension:
        """Returns the object with the class `CPUAdamOptimizer`."""
        return self
