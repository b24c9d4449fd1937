"""What Lion and Signum have in common: each element moves by the learning rate, in the direction of a sign. torch has no such class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InvalidArgumentError
from ._keywords import take_beyond
from ._optimizer import SpillwayOptimizer

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

    from ._keywords import Beyond


class SignOptimizer(SpillwayOptimizer):
    """The base of Lion and Signum. A group has two `betas`, or one `momentum` in the place of both."""

    def _begin(self, params: ParamsT, beyond: Beyond, **arguments: Any) -> None:
        name, further = type(self).__name__, {**beyond}
        own = take_beyond(further)
        if further:
            raise TypeError(f"{name}.__init__() got an unexpected keyword argument {next(iter(further))!r}")
        for argument, value, fits in _checked(arguments):
            if not fits:
                raise InvalidArgumentError(f"{name}: {argument} is {value!r}, which is out of range")
        torch.optim.Optimizer.__init__(self, params, arguments)
        self._keep(**own)

    def _torch_step(self) -> None:
        """The step in torch operations, for parameters that Spillway does not serve."""
        for group in self.param_groups:
            beta1, beta2 = group.get("betas") or (group["momentum"],) * 2
            for param in group["params"]:
                grad = -param.grad if group["maximize"] else param.grad
                state = self.state[param]
                if not state:
                    state.update(self._home.precision.new_state(self._rule, group, param))
                average = state["exp_avg"]
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(torch.lerp(grad, average, beta1).sign_(), alpha=-float(group["lr"]))
                average.lerp_(grad, 1 - beta2)


def _checked(arguments: dict[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Name and value of each number among the arguments, and whether it is in range."""
    for name in ("lr", "weight_decay"):
        yield name, arguments[name], arguments[name] >= 0
    for number, beta in enumerate(arguments.get("betas", ())):
        yield f"betas[{number}]", beta, 0 <= beta < 1
    if "momentum" in arguments:
        yield "momentum", arguments["momentum"], 0 <= arguments["momentum"] < 1
