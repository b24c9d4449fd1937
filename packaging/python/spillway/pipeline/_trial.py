"""Tries options and states of an optimizer on other parameters, before a step of the pipeline depends on them. An optimizer
that raises during a step ends the pipeline, with the weights of half a step.

Invariants:
- A trial touches neither the parameters nor the states of the optimizer.
- The memory of a trial is freed when it returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Trial:
    """Trials of a stage's optimizer.

    Args:
        make: Makes an optimizer for a list of parameters.
        optimizer: The optimizer of the stage.
        parameters: Its parameters, in the order in which `make` got them.
        rolls_back: A step must be followed by rollback()."""

    def __init__(self, make: Callable[..., Any], optimizer: Any, parameters: Sequence[torch.Tensor], rolls_back: bool):
        self._make, self._optimizer, self._parameters, self._rolls_back = make, optimizer, parameters, rolls_back

    def of_options(self, options: dict[str, Any]) -> str | None:
        """Returns the reason why steps with these options fail; None: there is none. The trial has parameters of one element:
        its time does not depend on the size of the stage."""
        unknown = sorted({one for group in self._optimizer.param_groups for one in options if one not in group or one == "params"})
        if unknown:
            return f"has no option {', '.join(unknown)}"
        try:
            if found := _unusable(options, self._optimizer.param_groups):
                return f"cannot step with {found}"
            trial = self._other(whole=False)
            if sizes(trial) != sizes(self._optimizer):
                # The function that makes optimizers looks at the shapes.
                trial = self._other(whole=True)
            for ours, theirs in zip(trial.param_groups, self._optimizer.param_groups):
                ours.update({name: value for name, value in theirs.items() if name != "params"})
            if self._optimizer.state:
                # The options must fit states that were made without them.
                trial.step()
            for group in trial.param_groups:
                group.update(options)
            self._step(trial)
        except Exception as error:
            return f"cannot step with these options: {type(error).__name__}: {error}"
        return None

    def of_state(self, state: Any) -> str | None:
        """Returns the reason why steps after load_state_dict(state) fail; None: there is none. Changes the state."""
        try:
            fits = isinstance(state["state"], dict) and [len(group["params"]) for group in state["param_groups"]] == sizes(self._optimizer)
        except (KeyError, TypeError, IndexError):
            fits = False
        if not fits:
            return "does not have these parameter groups"
        try:
            for group, own in zip(state["param_groups"], self._optimizer.param_groups):
                if found := _unusable(group, [own]):
                    return f"cannot step with {found}"
            trial = self._other(whole=True)
            trial.load_state_dict(state)
            self._step(trial)
        except Exception as error:
            return f"cannot step with this state: {type(error).__name__}: {error}"
        return None

    def _other(self, whole: bool) -> Any:
        """An optimizer of other parameters, whose values and gradients are 0; each has one element, unless `whole`."""
        parameters = []
        for parameter in self._parameters:
            shape = parameter.shape if whole else [min(1, length) for length in parameter.shape]
            parameters.append(torch.nn.Parameter(torch.zeros(shape, dtype=parameter.dtype)))
            parameters[-1].grad = torch.zeros_like(parameters[-1])
        return self._make(parameters)

    def _step(self, trial: Any) -> None:
        trial.step()
        if self._rolls_back:
            trial.rollback()


def sizes(optimizer: Any) -> list[int]:
    """The number of parameters of each group."""
    return [len(group["params"]) for group in optimizer.param_groups]


def _unusable(options: dict[str, Any], groups: Sequence[dict[str, Any]]) -> str:
    """The options, with their values, that are NaN or have one, and those that are infinite where a group has a finite number: torch's
    classes would step with them. An option that is infinite now, such as a limit, may be so again."""
    found = []
    for name, value in options.items():
        finite = any(name in group and _all(math.isfinite, group[name]) for group in groups)
        fits = _all(math.isfinite if finite else lambda number: not math.isnan(number), value)
        if name != "params" and fits is False:
            found.append(f"{name} = {value!r}")
    return ", ".join(found)


def _all(test: Callable[[float], bool], value: Any) -> bool | None:
    """True if all numbers of a value pass a test; None if it has something else than numbers."""
    if hasattr(value, "tolist"):
        # A tensor or a numpy array.
        value = value.tolist()
    if isinstance(value, (tuple, list)):
        results = [_all(test, one) for one in value]
        return False if False in results else None if None in results else True
    return test(float(value)) if hasattr(value, "__float__") else None
