"""torch's own step of the parameters that Spillway does not serve: those of a group that only torch can step, and those that are no row of the
C table (see _rows.py)."""

from __future__ import annotations

from typing import Any

import torch

from ._notes import Notes
from ._rows import is_served, name_of


class TorchStep(Notes):
    """Base of the optimizers of this package; not for direct use."""

    #: torch's class, whose step serves the other parameters.
    _torch_class: type[torch.optim.Optimizer]
    #: Places of these parameters: number of the group, index in the group.
    _rest: list[tuple[int, int]] = []
    param_groups: list[dict[str, Any]]

    def _step_rest(self, factor: float) -> None:
        """torch's step of the parameters that Spillway does not serve."""
        groups = [{**group, "params": [group["params"][index] for at, index in self._rest if at == number]}
                  for number, group in enumerate(self.param_groups)]
        groups = [group for group in groups if group["params"]]
        if factor != 1.0:
            for group in groups:
                for param in group["params"]:
                    # A zero tensor has no memory to write to, and stays zero.
                    if not param.grad._is_zerotensor():
                        param.grad.mul_(factor)
        hidden: dict[str, Any] = {name: self.__dict__.pop(name) for name in ("grad_scale", "found_inf") if name in self.__dict__}
        whole, self.param_groups = self.param_groups, groups
        try:
            self._torch_step()
        finally:
            self.param_groups = whole
            self.__dict__.update(**hidden)

    def _torch_step(self) -> None:
        step = self._torch_class.step
        # The hooks of this optimizer have run already.
        step = step.__wrapped__ if getattr(step, "hooked", False) else step
        step(self)

    def _rest_changed(self) -> bool:
        """True if a parameter that torch stepped can be stepped by Spillway now."""
        for number, index in self._rest:
            group = self.param_groups[number]
            param = group["params"][index]
            if not is_torchs(group) and is_served(param, param.grad, name_of(group, number, index)):
                return True
        return False


def is_torchs(group: dict[str, Any]) -> bool:
    """True if only torch has what a group asks for."""
    return bool(group.get("amsgrad") or group.get("capturable") or group.get("differentiable"))
