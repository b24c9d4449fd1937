"""The work of a device in torch: fetches, passes and offloads of modules. _optimizers.py has the optimizer steps.

Invariants:
- A unit's random numbers depend on seed, step, micro-batch and unit only. Recomputation draws those of the forward pass.
- A unit changes neither its input nor its buffers. Recomputation would otherwise see other values: this is an error.
- Gradients of a parameter are added in the order of the micro-batches, by torch's own accumulation."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import InvalidArgumentError, UnsupportedError
from ._optimizers import Optimizers
from ._plan import Plan
from ._store import Store


def seed_of(seed: int, step: int, micro_batch: int, unit: int) -> int:
    """Returns the seed of torch's generator before a unit computes a micro-batch. A serial run that sets it draws the
    same random numbers.

    Args:
        seed: The seed of the Pipeline.
        step: Number of the step, from 0.
        micro_batch: The micro-batch.
        unit: The unit."""
    value = seed
    for part in (step, micro_batch, unit):
        value = (value * 6_364_136_223_846_793_005 + part + 1) % 2**63
    return value


def without_parameters(units: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Copies of the modules with parameters that have shapes only."""
    copies = []
    for unit in units:
        memo = {
            id(parameter): torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad) for parameter in unit.parameters()
        }
        copies.append(copy.deepcopy(unit, memo))
    return copies


class Maker:
    """Makes the backend of a device; can be pickled. The modules travel in one piece of bytes, without torch's sharing of
    tensors between processes."""

    def __init__(
        self,
        units: Sequence[torch.nn.Module],
        loss: Callable[..., Any],
        optimizer: Callable[..., Any],
        store: Store,
        seed: int,
        threads: int,
        check_finite: bool,
    ):
        self.store, self.seed, self.threads, self.check_finite = store, seed, threads, check_finite
        try:
            self.modules = pickle.dumps((without_parameters(units), loss, optimizer))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InvalidArgumentError(
                f"Pipeline: units, loss and optimizer must be picklable, for the processes of the devices: {error}; "
                "pass functions and classes of a module, functools.partial in place of a lambda"
            ) from error

    def __call__(self, device: int) -> TorchBackend:
        torch.set_num_threads(self.threads)
        return TorchBackend(device, self)


class TorchBackend:
    """Runs the passes of one device; see the module."""

    def __init__(self, device: int, maker: Maker):
        self._units, self._loss, self._make_optimizer = pickle.loads(maker.modules)
        self._device, self._store, self._seed, self._check = device, maker.store, maker.seed, maker.check_finite
        self._step = -1

    def plan(self, plan: Plan) -> None:
        """Prepares the modules and optimizers of the device."""
        self._plan, self._last = plan, plan.stages * plan.split
        self._modules: dict[tuple[int, int], list[torch.nn.Module]] = {}
        self.optimizers = Optimizers(plan, self._device, self._store, self._make_optimizer, self._check)
        for operation in plan.operations:
            if operation.device != self._device:
                continue
            key = (operation.first_unit, operation.units)
            if operation.kind == "fetch" and key not in self._modules:
                self._modules[key] = [_empty(copy.deepcopy(self._units[unit])) for unit in range(key[0], sum(key))]

    def begin(self, step: int, steps: int, data: bytes) -> None:
        """Begins step number `step`, after `steps` steps that were kept, with the inputs and targets that this device
        needs."""
        self._step, self._steps = step, steps
        self._inputs, self._targets = pickle.loads(data)
        self._losses: dict[int, float] = {}
        self.optimizers.begin(steps)

    def finish(self) -> tuple[dict[int, float], bool]:
        """Ends a step. Returns the losses by micro-batch, on the device that computes them, and the verdict."""
        self._inputs = self._targets = {}
        return self._losses, self.optimizers.finish()

    def input(self, micro_batch: int) -> torch.Tensor:
        return self._inputs[micro_batch]

    @staticmethod
    def size(value: Any) -> int | None:
        """Bytes of a value; None for a gradient that does not exist, although the plan reserves it."""
        if value is None:
            return None
        if isinstance(value, torch.Tensor):
            return value.numel() * value.element_size()
        return sum(one.numel() * one.element_size() for one in value)

    @staticmethod
    def gradient_size(gradients: list[tuple[bool, torch.Tensor | None]]) -> int | None:
        """Bytes of the gradients. None while a trained parameter has none, because no micro-batch has used it yet: the plan
        reserves them all."""
        found = [gradient for trained, gradient in gradients if trained]
        return None if any(one is None for one in found) else sum(one.nbytes for one in found if one is not None)

    @staticmethod
    def activation_size(_: Any) -> None:
        """Activations are inside torch's graph. Only the profile of the sample measures them."""

    @staticmethod
    def encode(value: torch.Tensor | None) -> tuple[Any, Any]:
        if value is None:
            return None, b""
        flat = value.contiguous().view(-1).view(torch.uint8) if value.numel() else torch.empty(0, dtype=torch.uint8)
        return (str(value.dtype).removeprefix("torch."), tuple(value.shape), _strides(value)), memoryview(flat.numpy())

    @staticmethod
    def decode(meta: Any, data: bytes) -> torch.Tensor | None:
        """The tensor with the strides that it had: kernels, and with them the last bits, depend on strides."""
        if meta is None:
            return None
        dtype, shape, strides = getattr(torch, meta[0]), meta[1], meta[2]
        value = torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
        if strides is None:
            return value
        # A stride of 0 repeats one element.
        first = value[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]
        copied = torch.empty_strided(first.shape, strides, dtype=dtype)
        return copied.copy_(first).expand(shape)

    # Parameters.

    def fetch(self, first: int, units: int) -> list[torch.Tensor]:
        """Copies parameters from the arena into the device's modules."""
        copies = []
        for unit, module in zip(range(first, first + units), self._modules[first, units]):
            for copied, parameter in zip(self._store.copy(unit, self._steps), module.parameters()):
                parameter.data = copied
                copies.append(copied)
        return copies

    def release(self, first: int, units: int) -> None:
        """Frees the device's copy of parameters."""
        for module in self._modules[first, units]:
            for parameter in module.parameters():
                parameter.data = torch.empty(0, dtype=parameter.dtype)

    # Passes.

    def _chain(self, first: int, units: int, micro_batch: int, value: torch.Tensor) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """The output of some units, or the loss behind the last one; and the input of each."""
        inputs = {}
        for unit, module in zip(range(first, first + units), self._modules[first, units]):
            inputs[unit] = value
            torch.manual_seed(seed_of(self._seed, self._step, micro_batch, unit))
            value = _checked(unit, module, value)
        if first + units == self._last and torch.is_grad_enabled():
            value = self._loss(value, self._targets[micro_batch])
            self._losses[micro_batch] = value.item()
            value = value / self._plan.micro_batches
        return value, inputs

    def _with_graph(self, first: int, units: int, micro_batch: int, value: torch.Tensor) -> tuple[Any, ...]:
        """The input, the output with its graph, and a list for the gradient of the input."""
        leaf, found = value.detach().requires_grad_(first > 0 and value.is_floating_point()), list[torch.Tensor]()
        if leaf.requires_grad:
            # The gradient with the strides of a serial run. leaf.grad would have those of the leaf.
            leaf.register_hook(found.append)
        with torch.enable_grad():
            return leaf, self._chain(first, units, micro_batch, leaf)[0], found

    def forward(self, first: int, units: int, micro_batch: int, value: torch.Tensor, _: Any) -> tuple[Any, ...]:
        if not self._plan.recompute:
            activations = self._with_graph(first, units, micro_batch, value)
            return activations[1].detach(), {}, activations
        with torch.no_grad():
            output, inputs = self._chain(first, units, micro_batch, value)
        return output, inputs, None

    def recompute(self, first: int, units: int, micro_batch: int, value: torch.Tensor, _: Any) -> Any:
        return self._with_graph(first, units, micro_batch, value)

    def backward(
        self, first: int, units: int, micro_batch: int, activations: Any, gradient: torch.Tensor | None, _before: Any, _held: Any
    ) -> tuple[Any, ...]:
        """Returns the gradient of the input, and the gradients of the parameters. The gradient of the input is None if the
        loss does not depend on it: the units before get no gradient then, as in a serial run."""
        leaf, output, found = activations
        if gradient is None and first + units < self._last:
            return None, self._grads(first, units)
        if output.requires_grad:
            output.backward(gradient)
        elif first > 0:
            raise UnsupportedError(
                f"unit {first} has an output that does not depend on its input or parameters; merge it into another unit"
            )
        if first > 0 and not leaf.is_floating_point():
            raise UnsupportedError(f"unit {first} has an input of {leaf.dtype}, which has no gradient; merge it into the unit before")
        return found[0] if found else None, self._grads(first, units)

    def _grads(self, first: int, units: int) -> list[tuple[bool, torch.Tensor | None]]:
        """For each parameter whether it is trained, and its gradient."""
        return [(parameter.requires_grad, parameter.grad) for module in self._modules[first, units] for parameter in module.parameters()]

    # Gradients and optimizers.

    def offload(self, first: int, units: int, gradients: list[tuple[bool, torch.Tensor | None]]) -> None:
        """Moves gradients to the parameters in host memory, and validates them."""
        for module in self._modules[first, units]:
            for parameter in module.parameters():
                parameter.grad = None
        self.optimizers.give(first, [gradient for _, gradient in gradients])

    def optimize(self, first: int, units: int) -> None:
        self.optimizers.optimize(first)

    def verdict(self) -> bool:
        return self.optimizers.verdict()

    def validated(self, verdict: bool) -> None:
        self.optimizers.validated(verdict)


def _strides(value: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor; None if it is contiguous, or if its elements overlap in another way than repetition."""
    if value.is_contiguous() or not value.numel():
        return None
    reach = 0
    for stride, length in sorted((stride, length) for stride, length in zip(value.stride(), value.shape) if length > 1 and stride):
        if stride <= reach:
            return None
        reach += stride * (length - 1)
    return tuple(value.stride())


def changes_buffer(unit: int, name: str) -> UnsupportedError:
    """The error of a unit that recomputation would change twice."""
    return UnsupportedError(
        f"unit {unit} changes its buffer {name} in its forward pass, and recomputation would change it again; use eval() "
        "for this module, or one without running statistics"
    )


def _empty(module: torch.nn.Module) -> torch.nn.Module:
    """The module with parameters of no elements in place of those of shapes only."""
    made: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                fresh = torch.nn.Parameter(torch.empty(0, dtype=parameter.dtype), parameter.requires_grad)
                part._parameters[name] = made.setdefault(id(parameter), fresh)
    return module


def _checked(unit: int, module: torch.nn.Module, value: torch.Tensor) -> torch.Tensor:
    """Calls a module, and refuses what recomputation could not repeat."""
    versions = [(name, buffer, buffer._version) for name, buffer in module.named_buffers()]
    version = value._version
    output = module(value)
    if not isinstance(output, torch.Tensor):
        raise UnsupportedError(f"unit {unit} returned a {type(output).__name__}; the output of a unit must be one tensor")
    for name, buffer, before in versions:
        if buffer._version != before:
            raise changes_buffer(unit, name)
    if value._version != version:
        raise UnsupportedError(f"unit {unit} changes its input in place, which is a checkpoint; use inplace=False, or merge units")
    return output
