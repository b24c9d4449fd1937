"""The four classes: their arguments, states and hyper-parameters."""

from __future__ import annotations

from typing import Any

import torch

from .. import _abi
from ..errors import InvalidArgumentError
from ._base import SpillwayOptimizer, take_beyond


class _AdamStates(SpillwayOptimizer):
    c_name, _options_type = "adam", _abi.AdamOptions
    _keys = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}

    def _new_state(self, group: dict[str, Any], param: torch.Tensor, state: dict[str, Any]) -> None:
        state["step"] = _step_zero()
        for key in self._keys:
            state[key] = self._zeros(param)

    def _set_options(self, options: Any, group: dict[str, Any], step: int) -> None:
        decoupled = group.get("decoupled_weight_decay", self._torch_class is torch.optim.AdamW)
        options.weight_decay_mode, options.step = _abi.WEIGHT_DECAY_MODES["decoupled" if decoupled else "l2"], step
        options.lr, options.eps, options.weight_decay = float(group["lr"]), group["eps"], group["weight_decay"]
        options.beta1, options.beta2 = map(float, group["betas"])


class Adam(_AdamStates, torch.optim.Adam):
    """torch.optim.Adam; see the module for what Spillway steps and for the keywords.

    Args:
        params: Parameters, or groups of parameters.
        lr, betas, eps, weight_decay: As in torch.optim.Adam.
        options: The keywords beyond torch (see the module), and further arguments of torch.optim.Adam.

    Example:
        optimizer = spillway.torch.Adam(model.parameters(), lr=1e-3, max_norm=1.0)"""

    _torch_class = torch.optim.Adam

    def __init__(self, params: Any, *args: Any, **options: Any):
        beyond = take_beyond(options)
        torch.optim.Adam.__init__(self, params, *args, **options)
        self._keep(**beyond)


class AdamW(_AdamStates, torch.optim.AdamW):
    """torch.optim.AdamW; see the module for what Spillway steps and for the keywords.

    Args:
        params: Parameters, or groups of parameters.
        lr, betas, eps, weight_decay: As in torch.optim.AdamW.
        options: The keywords beyond torch (see the module), and further arguments of torch.optim.AdamW.

    Example:
        optimizer = spillway.torch.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)"""

    _torch_class = torch.optim.AdamW

    def __init__(self, params: Any, *args: Any, **options: Any):
        beyond = take_beyond(options)
        torch.optim.AdamW.__init__(self, params, *args, **options)
        self._keep(**beyond)


class Adagrad(SpillwayOptimizer, torch.optim.Adagrad):
    """torch.optim.Adagrad; see the module for what Spillway steps and for the keywords.

    Args:
        params: Parameters, or groups of parameters.
        lr, lr_decay, weight_decay, initial_accumulator_value, eps: As in torch.optim.Adagrad.
        options: The keywords beyond torch (see the module), and further arguments of torch.optim.Adagrad."""

    c_name, _options_type = "adagrad", _abi.AdagradOptions
    _keys = {"sum": "exp_avg_sq"}
    _sparse = True
    _torch_class = torch.optim.Adagrad

    def __init__(self, params: Any, *args: Any, **options: Any):
        beyond = take_beyond(options)
        torch.optim.Adagrad.__init__(self, params, *args, **options)
        self._keep(**beyond)

    def _new_state(self, group: dict[str, Any], param: torch.Tensor, state: dict[str, Any]) -> None:
        state["step"] = _step_zero()
        state["sum"] = self._zeros(param).fill_(group["initial_accumulator_value"])

    def _set_options(self, options: Any, group: dict[str, Any], step: int) -> None:
        options.step, options.lr, options.lr_decay = step, float(group["lr"]), group["lr_decay"]
        options.eps, options.weight_decay = group["eps"], group["weight_decay"]


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

    c_name, _options_type = "lion", _abi.LionOptions
    _counted = False
    _keys = {"exp_avg": "exp_avg"}

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
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})
        self._keep(**beyond)

    def _new_state(self, group: dict[str, Any], param: torch.Tensor, state: dict[str, Any]) -> None:
        state["exp_avg"] = self._zeros(param)

    def _set_options(self, options: Any, group: dict[str, Any], step: int) -> None:
        options.lr, options.weight_decay = float(group["lr"]), group["weight_decay"]
        options.beta1, options.beta2 = map(float, group["betas"])

    def _torch_step(self) -> None:
        """Lion in torch operations, for parameters that Spillway does not serve."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                grad = -param.grad if group["maximize"] else param.grad
                state = self.state[param]
                if not state:
                    self._new_state(group, param, state)
                average = state["exp_avg"]
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(torch.lerp(grad, average, beta1).sign_(), alpha=-float(group["lr"]))
                average.lerp_(grad, 1 - beta2)


def _step_zero() -> torch.Tensor:
    """A step count as torch's optimizers create it."""
    return torch.zeros((), dtype=torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32, device="cpu")
