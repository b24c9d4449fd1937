"""torch optimizers that step CPU parameters with Spillway's kernels.

    from spillway.torch import AdamW

    optimizer = AdamW(model.parameters(), lr=1e-3)      # instead of torch.optim.AdamW
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

`AdamW`, `Adam` and `Adagrad` are subclasses of torch's classes with the same arguments, state and `state_dict`. A checkpoint of one
loads into the other. `Lion` and `Signum` are optimizers of torch. One step of all parameters is one call of the library.

Spillway steps parameters and gradients that are contiguous in CPU memory, in float32, bfloat16 or float16, DTensors included.
Other parameters (on a GPU, float64, complex, sparse gradients) and groups with `amsgrad`, `capturable` or `differentiable` are
stepped by torch's own code. `foreach` and `fused` choose that code; they do not change Spillway's.

The classes describe their keywords beyond torch, such as `max_norm`, `undo`, `master` and `tier`.

A checkpoint keeps bf16 moments and masters. A master takes the value of its parameter where the program wrote to the parameter, except by
`param.data`, which leaves no trace.

`offload` makes an optimizer for parameters on any device: masters and moments are in host memory, and its steps start during backward.
`Staged` keeps the states of any other torch optimizer in host memory or on a tier.
`Flow` keeps the weights of a model in host memory, and on the device those that are used. The module `spillway.torch.dcp` saves and loads
checkpoints of torch.distributed.checkpoint, whose values move one by one between a tier and the files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import _abi
from .._groups import Rule
from ._offload.entry import offload
from ._optimizer import SpillwayOptimizer
from ._signs import SignOptimizer
from ._staged.optimizer import Staged
from ._states import ADAM, ADAMW
from ._tier_states import TierOptions
from ._to_foreign import bitsandbytes_state_dict, torchao_state_dict
from ._wide import wide_state_dict

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT
    from typing_extensions import Unpack

    from ._keywords import Beyond
    from ._offload.flow import Flow

__all__ = [
    "Adagrad",
    "Adam",
    "AdamW",
    "Flow",
    "Lion",
    "Signum",
    "Staged",
    "TierOptions",
    "bitsandbytes_state_dict",
    "offload",
    "torchao_state_dict",
    "wide_state_dict",
]


def __getattr__(name: str) -> Any:
    if name == "Flow":
        # It imports torch's compiler, whose import takes seconds.
        from ._offload.flow import Flow

        return Flow
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Adam(SpillwayOptimizer, torch.optim.Adam):
    """torch.optim.Adam; the module describes which parameters Spillway steps.

    Args:
        params: Parameters, or groups of parameters.
        lr, betas, eps, weight_decay, amsgrad: As in torch.optim.Adam.
        foreach, maximize, capturable, differentiable, fused, decoupled_weight_decay: As in torch.optim.Adam.
        max_norm: Gradients are clipped to this global norm within the step, and `grad_norm` is the norm before; None: no clipping.
        process_group: With `max_norm` or `skip_nonfinite`: squares and verdict are summed over this group of processes.
        skip_nonfinite: A step with Inf or NaN in a gradient is skipped; `skipped` is then True.
        undo: rollback() restores all bits of the last step.
        moment_dtype: "bf16" or torch.bfloat16: moments take 2 bytes per element each instead of 4. "int8": 1.06 bytes.
        moment_rounding: "stochastic": narrow moments are rounded at random, without bias; "nearest": to nearest even. None: at random for
            "int8", else to the nearest.
        rounding_seed: Seed of these random bits, which depend on it, the parameter's number, the step and the element only.
        master: "f32": 16-bit parameters have an f32 master in their state, and a step writes both. "split": bf16 parameters have an f32
            master in the parameter and 16 low bits in their state. None: no master.
        tier: A directory, a list of directories or TierOptions: masters and moments are kept there, of parameters on any device. None:
            host memory.
        host_memory: With `tier`: limit of the host memory for states, in bytes; None: the least that keeps every path busy; "auto": half of
            what the machine, and a cgroup, have left for this rank. What exceeds the least caches states.
        overlap: With `tier`: a step starts during backward, and the library writes to the tier during the next forward.

    Raises:
        InvalidArgumentError: A keyword beyond torch has a wrong value, or a tier holds the states of other parameters.
        UnsupportedError: Keywords cannot be combined, or the parameters cannot have them.

    Example:
        optimizer = spillway.torch.Adam(model.parameters(), lr=1e-3, max_norm=1.0)"""

    _rule, _torch_class = ADAM, torch.optim.Adam

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **beyond: Unpack[Beyond],
    ) -> None:
        self._begin(
            params,
            beyond,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )


class AdamW(SpillwayOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW; the module describes which parameters Spillway steps.

    Args:
        params: Parameters, or groups of parameters.
        lr, betas, eps, weight_decay, amsgrad: As in torch.optim.AdamW.
        maximize, foreach, capturable, differentiable, fused: As in torch.optim.AdamW.
        max_norm: Gradients are clipped to this global norm within the step, and `grad_norm` is the norm before; None: no clipping.
        process_group: With `max_norm` or `skip_nonfinite`: squares and verdict are summed over this group of processes.
        skip_nonfinite: A step with Inf or NaN in a gradient is skipped; `skipped` is then True.
        undo: rollback() restores all bits of the last step.
        moment_dtype: "bf16" or torch.bfloat16: moments take 2 bytes per element each instead of 4. "int8": 1.06 bytes.
        moment_rounding: "stochastic": narrow moments are rounded at random, without bias; "nearest": to nearest even. None: at random for
            "int8", else to the nearest.
        rounding_seed: Seed of these random bits, which depend on it, the parameter's number, the step and the element only.
        master: "f32": 16-bit parameters have an f32 master in their state, and a step writes both. "split": bf16 parameters have an f32
            master in the parameter and 16 low bits in their state. None: no master.
        tier: A directory, a list of directories or TierOptions: masters and moments are kept there, of parameters on any device. None:
            host memory.
        host_memory: With `tier`: limit of the host memory for states, in bytes; None: the least that keeps every path busy; "auto": half of
            what the machine, and a cgroup, have left for this rank. What exceeds the least caches states.
        overlap: With `tier`: a step starts during backward, and the library writes to the tier during the next forward.

    Raises:
        InvalidArgumentError: A keyword beyond torch has a wrong value, or a tier holds the states of other parameters.
        UnsupportedError: Keywords cannot be combined, or the parameters cannot have them.

    Example:
        optimizer = spillway.torch.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)"""

    _rule, _torch_class = ADAMW, torch.optim.AdamW

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **beyond: Unpack[Beyond],
    ) -> None:
        self._begin(
            params,
            beyond,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )


class Adagrad(SpillwayOptimizer, torch.optim.Adagrad):
    """torch.optim.Adagrad; the module describes which parameters Spillway steps.

    Args:
        params: Parameters, or groups of parameters.
        lr, lr_decay, weight_decay, initial_accumulator_value, eps: As in torch.optim.Adagrad.
        foreach, maximize, differentiable, fused: As in torch.optim.Adagrad.
        max_norm: Gradients are clipped to this global norm within the step, and `grad_norm` is the norm before; None: no clipping.
        process_group: With `max_norm` or `skip_nonfinite`: squares and verdict are summed over this group of processes.
        skip_nonfinite: A step with Inf or NaN in a gradient is skipped; `skipped` is then True.
        undo: rollback() restores all bits of the last step.
        moment_dtype: "bf16" or torch.bfloat16: moments take 2 bytes per element each instead of 4.
        moment_rounding, rounding_seed: For Adam and AdamW; the defaults here.
        master: "f32": 16-bit parameters have an f32 master in their state, and a step writes both. "split": bf16 parameters have an f32
            master in the parameter and 16 low bits in their state. None: no master.
        tier, host_memory, overlap: For Adam and AdamW; the defaults here.

    Raises:
        InvalidArgumentError: A keyword beyond torch has a wrong value, or a tier holds the states of other parameters.
        UnsupportedError: Keywords cannot be combined, or the parameters cannot have them.

    Example:
        optimizer = spillway.torch.Adagrad(model.parameters(), lr=1e-2)"""

    _rule = Rule(
        "adagrad",
        _abi.AdagradOptions,
        {"sum": "exp_avg_sq"},
        ("lr", "lr_decay", "eps", "weight_decay"),
        sparse=True,
        start="initial_accumulator_value",
    )
    _torch_class = torch.optim.Adagrad

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **beyond: Unpack[Beyond],
    ) -> None:
        self._begin(
            params,
            beyond,
            lr=lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
            foreach=foreach,
            maximize=maximize,
            differentiable=differentiable,
            fused=fused,
        )


class Lion(SignOptimizer):
    """Lion (Chen et al., Symbolic Discovery of Optimization Algorithms), with decoupled weight decay.

    Args:
        params: Parameters, or groups of parameters.
        lr: Learning rate.
        betas: Decay rates of the interpolation and of the moment.
        weight_decay: Decoupled weight decay.
        maximize: Maximize instead of minimize.
        max_norm: Gradients are clipped to this global norm within the step, and `grad_norm` is the norm before; None: no clipping.
        process_group: With `max_norm` or `skip_nonfinite`: squares and verdict are summed over this group of processes.
        skip_nonfinite: A step with Inf or NaN in a gradient is skipped; `skipped` is then True.
        undo: rollback() restores all bits of the last step.
        moment_dtype: "bf16" or torch.bfloat16: moments take 2 bytes per element each instead of 4.
        moment_rounding, rounding_seed: For Adam and AdamW; the defaults here.
        master: "f32": 16-bit parameters have an f32 master in their state, and a step writes both. "split": bf16 parameters have an f32
            master in the parameter and 16 low bits in their state. None: no master.
        tier, host_memory, overlap: For Adam and AdamW; the defaults here.

    Raises:
        InvalidArgumentError: An argument is out of range.
        UnsupportedError: Keywords cannot be combined, or the parameters cannot have them.

    Example:
        optimizer = spillway.torch.Lion(model.parameters(), lr=1e-4)"""

    _rule = Rule("lion", _abi.LionOptions, {"exp_avg": "exp_avg"}, ("lr", "weight_decay", "betas"), counted=False)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **beyond: Unpack[Beyond],
    ) -> None:
        self._begin(params, beyond, lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize)


class Signum(SignOptimizer):
    """Signum, SGD by the sign of the momentum (Bernstein et al. 2018), with decoupled weight decay.

    Args:
        params: Parameters, or groups of parameters.
        lr: Learning rate: each element of a parameter moves by it.
        momentum: Decay rate of exp_avg, the mean of the gradients.
        weight_decay: Decoupled weight decay.
        maximize: Maximize instead of minimize.
        max_norm: Gradients are clipped to this global norm within the step, and `grad_norm` is the norm before; None: no clipping.
        process_group: With `max_norm` or `skip_nonfinite`: squares and verdict are summed over this group of processes.
        skip_nonfinite: A step with Inf or NaN in a gradient is skipped; `skipped` is then True.
        undo: rollback() restores all bits of the last step.
        moment_dtype: "bf16" or torch.bfloat16: moments take 2 bytes per element each instead of 4.
        moment_rounding, rounding_seed: For Adam and AdamW; the defaults here.
        master: "f32": 16-bit parameters have an f32 master in their state, and a step writes both. "split": bf16 parameters have an f32
            master in the parameter and 16 low bits in their state. None: no master.
        tier, host_memory, overlap: For Adam and AdamW; the defaults here.

    Raises:
        InvalidArgumentError: An argument is out of range.
        UnsupportedError: Keywords cannot be combined, or the parameters cannot have them.

    Example:
        optimizer = spillway.torch.Signum(model.parameters(), lr=1e-4)"""

    _rule = Rule("signum", _abi.SignumOptions, {"exp_avg": "exp_avg"}, ("lr", "weight_decay", "momentum"), counted=False)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **beyond: Unpack[Beyond],
    ) -> None:
        self._begin(params, beyond, lr=lr, momentum=momentum, weight_decay=weight_decay, maximize=maximize)
