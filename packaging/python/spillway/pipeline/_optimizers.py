"""The optimizers of a device's stages: their steps, the verdict on the gradients, and what the verdict keeps or rolls back.

| optimizers | order |
|---|---|
| asynchronous | check and step of each stage, verdict of all devices, keep or roll back |
| synchronous, of torch's classes | check, verdict of all devices, step |
| synchronous, StageAdam and StageAdamW, whose step is the check | check and step, verdict of all devices, keep or roll back |

Invariants:
- A write of a stage's regions in the arena lasts from the begin of its step to the verdict of all devices.
- No stage keeps a step if a gradient of any stage has Inf or NaN."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._plan import Plan
from ._stage_optimizer import StageOptimizer
from ._store import Store
from ._trial import Trial


class Optimizers:
    """The optimizers of one device.

    Args:
        plan: The plan.
        device: The device.
        store: The parameters of all units.
        make: Makes the optimizer of a list of parameters.
        check: Validate gradients."""

    def __init__(self, plan: Plan, device: int, store: Store, make: Callable[..., Any], check: bool):
        self._async, self._store, self._make, self._check = plan.async_optimizer, store, make, check
        self._lock = threading.Lock()
        #: By the first unit of a stage: its optimizer, None without trained parameters; its parameters; its units.
        self._optimizers: dict[int, Any] = {}
        self._owned: dict[int, list[torch.nn.Parameter]] = {}
        self._units: dict[int, range] = {}
        for operation in plan.operations:
            if operation.device != device or operation.kind != "optimize":
                continue
            first, units = operation.first_unit, range(operation.first_unit, operation.first_unit + operation.units)
            flags = [flag for unit in units for flag in store.trained(unit)]
            owned = [torch.nn.Parameter(tensor, flag) for tensor, flag in zip([t for unit in units for t in store.tensors(unit)], flags)]
            trained = [parameter for parameter in owned if parameter.requires_grad]
            self._owned[first], self._units[first] = owned, units
            self._optimizers[first] = make(trained) if trained else None

    def begin(self, steps: int) -> None:
        """Begins an iteration, after `steps` steps that were kept."""
        self._steps, self._go = steps, True
        self._finite: dict[int, bool] = {}
        self._stepped: list[int] = []

    def finish(self) -> bool:
        """Ends an iteration: frees the gradients. Returns the verdict."""
        for parameters in self._owned.values():
            for parameter in parameters:
                parameter.grad = None
        return self._go

    def give(self, first: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Gives the parameters of a stage their gradients, and checks them, unless the step does."""
        for owned, gradient in zip(self._owned[first], gradients):
            owned.grad = gradient
        unchecked = gradients if self._check and not self._step_checks(first) else ()
        finite = all(bool(torch.isfinite(gradient).all()) for gradient in unchecked if gradient is not None)
        with self._lock:
            self._finite[first] = finite

    def optimize(self, first: int) -> None:
        """Runs the optimizer of a stage, unless the stage's own gradients, or before synchronous optimizers those of all stages,
        are refused, or the verdict has needed the step."""
        if self._go and self._finite[first] and self._optimizers[first] is not None and (self._async or not self._step_checks(first)):
            self._step(first)

    def verdict(self) -> bool:
        """The verdict on the gradients of this device."""
        for first in self._owned if not self._async else ():
            if self._step_checks(first):
                self._step(first)
        return all(self._finite.values())

    def validated(self, verdict: bool) -> None:
        """Takes the verdict of all devices: keeps what was stepped, or rolls it back; or prevents the steps."""
        self._go = verdict
        for first in self._stepped:
            optimizer = self._optimizers[first]
            # A step without any gradient has changed nothing, and recorded nothing.
            if not verdict and any(parameter.grad is not None for parameter in self._owned[first]):
                optimizer.rollback()
            elif isinstance(optimizer, StageOptimizer):
                optimizer.keep()
            self._store.end(self._units[first], verdict)
        self._stepped.clear()

    def _step_checks(self, first: int) -> bool:
        """True if the step of a stage checks its gradients. With max_norm or skip_nonfinite a step begins by a check of its own, and
        refuses Inf and NaN."""
        optimizer = self._optimizers[first]
        return isinstance(optimizer, StageOptimizer) and not optimizer._measures

    def _step(self, first: int) -> None:
        optimizer, checks = self._optimizers[first], self._step_checks(first)
        self._store.begin(self._units[first], self._steps + 1)
        optimizer.step()
        with self._lock:
            if checks and self._check:
                self._finite[first] = not optimizer.verdict.nonfinite
            if checks or self._async:
                self._stepped.append(first)
                return
        self._store.end(self._units[first], True)

    # Options and states.

    def refusal(self, name: str, data: bytes) -> str | None:
        """The reason why set_options(data) or load_state_dict(data), or the next step, would fail; None: there is none."""
        try:
            value = pickle.loads(data)
        except Exception as error:
            return f"{name}: a process of the pipeline cannot unpickle the values: {type(error).__name__}: {error}"
        for first, optimizer in self._optimizers.items():
            if optimizer is None:
                continue
            trained = [parameter for parameter in self._owned[first] if parameter.requires_grad]
            trial = Trial(self._make, optimizer, trained, self._check and self._async)
            reason = trial.of_options(value) if name == "set_options" else trial.of_state(value.pop(first))
            if reason:
                return f"{name}: the optimizer of the stage of unit {first} {reason}"
        return None

    def set_options(self, data: bytes) -> None:
        """Sets options of all groups of all optimizers."""
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups if optimizer else ():
                group.update(pickle.loads(data))

    def state_dicts(self) -> bytes:
        """The states of the optimizers, by the first unit of their stage."""
        return pickle.dumps({first: optimizer.state_dict() for first, optimizer in self._optimizers.items() if optimizer})

    def load_state_dict(self, data: bytes) -> None:
        """Loads the states of this device's stages."""
        for first, state in pickle.loads(data).items():
            if self._optimizers.get(first):
                self._optimizers[first].load_state_dict(state)
