"""torch optimizers that step CPU parameters with Spillway's kernels.

    from spillway.torch import AdamW

    optimizer = AdamW(model.parameters(), lr=1e-3)      # instead of torch.optim.AdamW
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

`AdamW`, `Adam` and `Adagrad` are subclasses of torch's classes with the same arguments, state and `state_dict`. A checkpoint of one
loads into the other. `Lion` is a `torch.optim.Optimizer`. One step of all parameters is one call of the library.

Spillway steps parameters and gradients that are contiguous in CPU memory, in float32, bfloat16 or float16, DTensors included.
Other parameters (on a GPU, float64, complex, sparse gradients) and groups with `amsgrad`, `capturable` or `differentiable` are
stepped by torch's own code. `foreach` and `fused` choose that code; they do not change Spillway's.

Keywords beyond torch, for all classes:

| keyword | meaning |
|---|---|
| `max_norm` | gradients are clipped to this global norm within the step; `grad_norm` is the norm before |
| `process_group` | with `max_norm` and `skip_nonfinite`: squares and verdict are summed over this group |
| `skip_nonfinite` | a step with Inf or NaN in a gradient is skipped; `skipped` is then True |
| `undo` | `rollback()` restores all bits of the last step |
| `moment_dtype` | `torch.bfloat16`: moments take 2 bytes per element each instead of 4 |
| `moment_rounding` | `"stochastic"`: Adam's bf16 moments are rounded at random, without bias; default `"nearest"` |
| `rounding_seed` | seed of these random bits, which depend on it, the parameter's number, the step and the element only |
| `master` | `"f32"`: 16-bit parameters have an f32 master in their state; a step writes both |
| `master` | `"split"`: bf16 parameters have an f32 master in the parameter and 16 low bits in their state |
| `tier` | Adam and AdamW: a path, a list of paths or `TierOptions`; masters and moments are kept there, of parameters on any device |
| `memory_budget` | host memory for states on a tier, in bytes |
| `overlap` | with `tier`: a step starts during backward, and the library writes to the tier during the next forward |

A checkpoint keeps bf16 moments and masters. A master takes the value of its parameter where the program wrote to the parameter, except by
`param.data`, which leaves no trace.

`offload` makes an optimizer for parameters on any device: masters and moments are in host memory, and its steps start during backward.
`Flow` keeps the weights of a model in host memory, and on the device those that are used. The module `spillway.torch.dcp` saves and loads
checkpoints of torch.distributed.checkpoint, whose values move one by one between a tier and the files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import _abi
from .._groups import Rule
from ..errors import InvalidArgumentError
from ._offload.optimizer import offload
from ._optimizer import SpillwayOptimizer, take_beyond
from ._states import MOMENTS
from ._tier_states import TierOptions

if TYPE_CHECKING:
    from ._offload.flow import Flow

__all__ = ["Adagrad", "Adam", "AdamW", "Flow", "Lion", "TierOptions", "offload"]

_ADAM = Rule("adam", _abi.AdamOptions, {key: key for key in MOMENTS}, ("lr", "eps", "weight_decay", "betas"), decoupled=False)


def __getattr__(name: str) -> Any:
    if name == "Flow":
        # It imports torch's compiler, whose import takes seconds.
        from ._offload.flow import Flow

        return Flow
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Adam(SpillwayOptimizer, torch.optim.Adam):
    """torch.optim.Adam; see the module for what Spillway steps and for the keywords.

    Args:
        params: Parameters, or groups of parameters.
        lr, betas, eps, weight_decay: As in torch.optim.Adam.
        options: The keywords beyond torch (see the module), and further arguments of torch.optim.Adam.

    Example:
        optimizer = spillway.torch.Adam(model.parameters(), lr=1e-3, max_norm=1.0)"""

    _rule, _torch_class = _ADAM, torch.optim.Adam


class AdamW(SpillwayOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW; see the module for what Spillway steps and for the keywords.

    Args:
        params: Parameters, or groups of parameters.
        lr, betas, eps, weight_decay: As in torch.optim.AdamW.
        options: The keywords beyond torch (see the module), and further arguments of torch.optim.AdamW.

    Example:
        optimizer = spillway.torch.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)"""

    _rule, _torch_class = _ADAM._replace(decoupled=True), torch.optim.AdamW


class Adagrad(SpillwayOptimizer, torch.optim.Adagrad):
    """torch.optim.Adagrad; see the module for what Spillway steps and for the keywords.

    Args:
        params: Parameters, or groups of parameters.
        lr, lr_decay, weight_decay, initial_accumulator_value, eps: As in torch.optim.Adagrad.
        options: The keywords beyond torch (see the module), and further arguments of torch.optim.Adagrad."""

    _rule = Rule(
        "adagrad",
        _abi.AdagradOptions,
        {"sum": "exp_avg_sq"},
        ("lr", "lr_decay", "eps", "weight_decay"),
        sparse=True,
        start="initial_accumulator_value",
    )
    _torch_class = torch.optim.Adagrad


class Lion(SpillwayOptimizer):
    """Lion (Chen et al., Symbolic Discovery of Optimization Algorithms), with decoupled weight decay.

    Args:
        params: Parameters, or groups of parameters.
        lr: Learning rate.
        betas: Decay rates of the interpolation and of the moment.
        weight_decay: Decoupled weight decay.
        maximize: Maximize instead of minimize.
        options: The keywords beyond torch; see the module.

    Raises:
        InvalidArgumentError: A hyper-parameter is out of range."""

    _rule = Rule("lion", _abi.LionOptions, {"exp_avg": "exp_avg"}, ("lr", "weight_decay", "betas"), counted=False)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Any,
    ):
        beyond = take_beyond(options)
        if options:
            raise TypeError(f"Lion has no argument {next(iter(options))!r}")
        for name, value, fits in [
            ("lr", lr, lr >= 0),
            ("betas[0]", betas[0], 0 <= betas[0] < 1),
            ("betas[1]", betas[1], 0 <= betas[1] < 1),
            ("weight_decay", weight_decay, weight_decay >= 0),
        ]:
            if not fits:
                raise InvalidArgumentError(f"Lion: {name} is {value!r}, which is out of range")
        torch.optim.Optimizer.__init__(self, params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})
        self._keep(**beyond)

    def _torch_step(self) -> None:
        """Lion in torch operations, for parameters that Spillway does not serve."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                grad = -param.grad if group["maximize"] else param.grad
                state = self.state[param]
                if not state:
                    state.update(self._home.precision.new_state(self._rule, group, param))
                average = state["exp_avg"]
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(torch.lerp(grad, average, beta1).sign_(), alpha=-float(group["lr"]))
                average.lerp_(grad, 1 - beta2)
