"""Weights whose home is host memory, and that are on the device only while a part of the model uses them (weight-flow: SuperOffload 4.2).

A unit is a part of the model, such as a layer. The parameters of the program, those of `model.parameters()`, are in host memory. While a
unit runs, its parameters on the device take their place in the unit; before its backward their memory is filled again. A gradient leaves
the device as soon as backward has completed it, and becomes the gradient of the parameter in host memory.

Invariants:
- At most `slots` flowing units are on the device, besides those that the program uses at one time.
- Tensors of the device keep their storage object, which is emptied and filled again: views that autograd has saved see the weights.
- Memory is emptied and allocated on the stream that computes, so nothing overwrites it before its last reader has ended. A copy begins
  after what that stream had to do when the memory was allocated, and a unit runs after its copy.
- A graph sees one value of a weight: if the parameter in host memory has changed since, the version of the tensor on the device grows,
  and torch refuses the backward of an earlier forward.
- When backward returns, every gradient is in host memory, and no flowing unit is on the device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import InvalidArgumentError, UnsupportedError
from ._forward import Hook
from ._offload_plan import new_link
from ._tensors import DTensor, unused_bytes

#: Share of the memory that the first backward left unused, which weights that stay may take.
_USE = 0.9
_ALL = 1 << 62


class Flow:
    """The weights of a model that flow to a device.

    Args:
        model: The model. Its parameters go to host memory, page-locked for a device, and its buffers to the device.
        device: Where it computes; None: the accelerator, or the CPU if there is none.
        units: The parts that flow; None: the layers in the outermost ModuleLists of the model, or else in its outermost Sequentials.
            Parameters of no unit, or of several, stay on the device.
        slots: Most flowing units on the device: one that is used, and those that are fetched before they are.
        keep_bytes: Bytes of units that stay on the device, from the first one on; None: what the device has free after the first backward.

    Attributes:
        fetched_bytes: Bytes that were copied to the device.
        peak_bytes: The most bytes that flowing units had on the device.
        late: Number of uses that had to wait for a copy which no earlier use had begun.

    Raises:
        InvalidArgumentError: An argument has a wrong value.
        UnsupportedError: A parameter is a DTensor, or has no memory yet."""

    def __init__(
        self,
        model: torch.nn.Module,
        device: Any = None,
        *,
        units: Iterable[torch.nn.Module] | None = None,
        slots: int = 2,
        keep_bytes: int | None = 0,
    ):
        _check(model, slots, keep_bytes)
        self.device = _device_of(device)
        self.fetched_bytes = self.peak_bytes = self.late = 0
        self._slots, self._keep_bytes = slots, keep_bytes
        self._up, self._down = new_link(self.device), new_link(self.device)
        # What followed each pair of uses; the last two used; the units on the device, the one used last at the end.
        self._after: dict[tuple[Any, Any], Unit] = {}
        self._used: tuple[Any, Any] = (None, None)
        self._here: dict[Unit, None] = {}
        self._leaving: list[tuple[Any, Weight, torch.Tensor]] = []
        self._in_backward = False
        self._hooks: list[Any] = []
        self._install(model, _units_of(model) if units is None else list(units))

    def _install(self, model: torch.nn.Module, modules: list[torch.nn.Module]) -> None:
        places = _places(model)
        owners: dict[torch.Tensor, set[int]] = {param: set() for param in places}
        for number, module in enumerate(modules):
            if not isinstance(module, torch.nn.Module):
                raise InvalidArgumentError(f"flow: units[{number}] is a {type(module).__name__}; pass modules of the model")
            inside = set(module.modules())
            for param, where in places.items():
                if any(owner in inside for owner, _ in where):
                    owners[param].add(number if all(owner in inside for owner, _ in where) else -1)
        if any(len(numbers - {-1}) > 1 for numbers in owners.values()):
            raise InvalidArgumentError("flow: a unit is inside of another one; pass units that have no parameters in common")
        chosen = [next(iter(numbers)) if len(numbers) == 1 else -1 for numbers in owners.values()]
        weights = [Weight(param, where, self.device) for param, where in places.items()]
        self._rest = Unit([weight for weight, number in zip(weights, chosen) if number == -1])
        self.units = [Unit([weight for weight, own in zip(weights, chosen) if own == number]) for number in range(len(modules))]
        for weight in weights:
            # It lives as long as the tensor on the device, which must not keep this object alive.
            weight.on_device.register_post_accumulate_grad_hook(partial(_arrived, weakref.ref(self), weakref.ref(weight)))
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self.device)
        self._rest.kept = True
        self._keep(self._keep_bytes or 0)
        self._hook(model, self._begin, self._end)
        for unit, module in zip(self.units, modules):
            self._hook(module, partial(self._before_forward, unit), partial(self._after_forward, unit))

    def _hook(self, module: torch.nn.Module, before: Callable[..., Any], behind: Callable[..., Any]) -> None:
        self._hooks += [
            module.register_forward_pre_hook(Hook(before), prepend=True, with_kwargs=True),
            module.register_forward_hook(Hook(behind), always_call=True),
        ]

    def _keep(self, available: int) -> None:
        for unit in self.units:
            unit.kept = unit.bytes <= available
            if not unit.kept:
                break
            available -= unit.bytes

    def remove(self) -> None:
        """Removes all hooks. The model is in host memory, and its buffers are on the device."""
        while self._hooks:
            self._hooks.pop().remove()
        for unit in [*self._here]:
            self._free(unit)

    # Forward.

    def _begin(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Before a forward of the model."""
        if self._in_backward and torch._C._current_graph_task_id() == -1:
            # A backward has raised.
            self._finish()
        if not self._in_backward:
            self._used = (None, None)
        self._fetch(self._rest)
        self._rest.enter()

    def _end(self, *_: Any) -> None:
        self._rest.leave()

    def _before_forward(self, unit: Unit, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Before a forward of a unit: its weights are fetched; the end of its backward is where the gradients of its inputs are known."""
        self._use(unit)
        unit.enter()
        if not torch.is_grad_enabled():
            return None
        flat, tree = tree_flatten((args, kwargs))
        differentiable = [isinstance(value, torch.Tensor) and value.requires_grad for value in flat]
        if not any(differentiable):
            return None
        through = iter(
            _AtInputGradients.apply(partial(self._backward_ends, unit), *(value for value, own in zip(flat, differentiable) if own))
        )
        return tree_unflatten([next(through) if own else value for value, own in zip(flat, differentiable)], tree)

    def _after_forward(self, unit: Unit, module: torch.nn.Module, args: Any, output: Any) -> None:
        """After a forward of a unit, also one that has raised."""
        unit.leave()
        if torch.is_grad_enabled():
            for value in tree_flatten(output)[0]:
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    value.register_hook(partial(self._backward_begins, unit))

    # Backward.

    def _backward_begins(self, unit: Unit, _: torch.Tensor) -> None:
        """The gradient of an output of a unit is known: its backward begins."""
        self._expect()
        unit.in_backward = True
        self._use(unit)

    def _backward_ends(self, unit: Unit) -> None:
        """The gradients of the inputs of a unit are known: its backward is over."""
        unit.in_backward = False

    def _arrived(self, weight: Weight) -> None:
        """Backward has completed a gradient."""
        self._expect()
        grad, weight.on_device.grad = weight.on_device.grad, None
        if grad.layout is not torch.strided:
            self._leaving.append((None, weight, grad.cpu()))
        else:
            target = torch.empty_like(grad, device="cpu", pin_memory=self._down.pinned)
            self._down.out(target, grad)
            self._leaving.append((self._down.fence(), weight, target))
        self._deliver(wait=False)

    def _deliver(self, wait: bool) -> None:
        """Gives the parameters the gradients that have arrived in host memory, in the order in which they left, and calls their hooks."""
        while self._leaving:
            fence, weight, grad = self._leaving[0]
            if fence is not None and not wait and not fence.query():
                return
            if fence is not None:
                fence.synchronize()
            del self._leaving[0]
            weight.add(grad)

    def _expect(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        """After a backward."""
        self._in_backward = False
        self._deliver(wait=True)
        if self._keep_bytes is None:
            # On the CPU all weights are there anyway.
            self._keep_bytes = _ALL if self.device.type == "cpu" else int(_USE * unused_bytes(self.device))
            self._keep(self._keep_bytes)
        for unit in self.units:
            unit.in_backward = False
        for unit in [*self._here]:
            if not unit.kept:
                self._free(unit)

    # Slots.

    def _use(self, unit: Unit) -> None:
        """Has the weights of a unit on the device for the work that the program gives it next, and fetches those that it used after it."""
        before, last = self._used
        if unit is not last:
            self._after[self._used] = unit
            before, last = self._used = last, unit
        if self._fetch(unit):
            self.late += 1
        at, wanted = (before, last), {unit}
        for _ in range(self._slots - 1):
            following = self._after.get(at)
            if following is None or following.in_use or not self._make_room(wanted | {following}, following):
                return
            wanted.add(following)
            self._start(following)
            at = (at[1], following)

    def _fetch(self, unit: Unit) -> bool:
        """True if the copy had to be started now."""
        started = False
        if not unit.is_current():
            self._make_room({unit}, unit)
            self._start(unit)
            started = True
        if unit.fence is not None:
            self._up.wait(unit.fence)
            unit.fence = None
        self._here.pop(unit, None)
        self._here[unit] = None
        return started

    def _make_room(self, wanted: set[Unit], unit: Unit) -> bool:
        """True if there is a free slot for a unit, or it needs none; units that are not used are freed, the one used longest ago first."""
        if unit.kept or unit in self._here:
            return True
        flowing = [other for other in self._here if not other.kept]
        idle = (other for other in flowing if not other.in_use and other not in wanted)
        for _ in range(len(flowing) - self._slots + 1):
            victim = next(idle, None)
            if victim is None:
                return False
            self._free(victim)
        return True

    def _start(self, unit: Unit) -> None:
        """Starts the copy of a unit's weights, unless they are on the device."""
        if unit.is_current():
            return
        with torch.no_grad():
            for weight in unit.weights:
                weight.fill(self._up)
        unit.fence = self._up.fence()
        self.fetched_bytes += unit.bytes
        self._here.setdefault(unit)
        self.peak_bytes = max(self.peak_bytes, sum(other.bytes for other in self._here if not other.kept))

    def _free(self, unit: Unit) -> None:
        if unit.fence is not None:
            self._up.wait(unit.fence)
            unit.fence = None
        self._here.pop(unit, None)
        for weight in unit.weights:
            weight.empty()


class Unit:
    """Parameters that are on the device together."""

    def __init__(self, weights: list[Weight]):
        self.weights, self.bytes = weights, sum(weight.bytes for weight in weights)
        self.kept = self.in_backward = False
        self.depth = 0
        #: Event at the end of the copy to the device; None: nothing is to be waited for.
        self.fence: Any = None

    @property
    def in_use(self) -> bool:
        """The program runs its forward or backward."""
        return self.in_backward or self.depth > 0

    def is_current(self) -> bool:
        """True if the weights on the device are those in host memory, or are on their way."""
        return all(weight.is_current() for weight in self.weights)

    def enter(self) -> None:
        """The tensors on the device take the place of the parameters, until as many calls of `leave`."""
        self.depth += 1
        for weight in self.weights:
            weight.place(weight.on_device)

    def leave(self) -> None:
        """Undoes `enter`; does nothing without one."""
        self.depth = max(0, self.depth - 1)
        if not self.depth:
            for weight in self.weights:
                weight.place(weight.on_host)


class Weight:
    """A parameter in host memory, and its tensor on the device."""

    def __init__(self, param: torch.Tensor, places: list[tuple[torch.nn.Module, str]], device: torch.device):
        own = param.detach()
        self.on_host, self.places = param, places
        if device.type != "cpu":
            param.data = own.cpu().pin_memory()
        self.on_device = torch.nn.Parameter(torch.empty_like(own, device=device), requires_grad=param.requires_grad)
        self.bytes = self.on_device.untyped_storage().nbytes()
        # What is on the device: nothing, or what the parameter was when its copy was started; and what it was at the last copy.
        self._filled: tuple[int, int] | None = None
        self._seen: tuple[int, int] | None = None
        self.empty()

    def _now(self) -> tuple[int, int]:
        return self.on_host._version, self.on_host.data_ptr()

    def is_current(self) -> bool:
        return self._filled == self._now()

    def fill(self, link: Any) -> None:
        """Starts the copy to the device."""
        now, storage = self._now(), self.on_device.untyped_storage()
        if self._filled is None:
            storage.resize_(self.bytes)
        self._filled = None
        with ExitStack() as same:
            if now == self._seen:
                same.enter_context(_unsafe_preserve_version_counter(self.on_device))
            link.bring(self.on_device.detach(), self.on_host.detach())
        self._filled = self._seen = now

    def empty(self) -> None:
        """Gives the memory on the device back."""
        self._filled = None
        self.on_device.untyped_storage().resize_(0)

    def place(self, param: Any) -> None:
        """Puts one of the two into the model."""
        if self.on_device.requires_grad is not self.on_host.requires_grad:
            self.on_device.requires_grad_(self.on_host.requires_grad)
        for module, name in self.places:
            module._parameters[name] = param

    def add(self, grad: torch.Tensor) -> None:
        """Accumulates a gradient that is in host memory, and calls the parameter's hooks."""
        with torch.no_grad():
            if self.on_host.grad is None:
                self.on_host.grad = grad
            else:
                self.on_host.grad += grad
        for hook in [*(getattr(self.on_host, "_post_accumulate_grad_hooks", None) or {}).values()]:
            hook(self.on_host)


class _AtInputGradients(torch.autograd.Function):
    """Passes tensors on; its backward calls a function once their gradients are known."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: torch.Tensor) -> Any:
        ctx.call = call
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.call()
        return (None, *grads)


def _arrived(flow: weakref.ref[Flow], weight: weakref.ref[Weight], _: torch.Tensor) -> None:
    owner, of = flow(), weight()
    if owner is not None and of is not None:
        owner._arrived(of)


def _check(model: Any, slots: Any, keep_bytes: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(f"flow: model is a {type(model).__name__}; pass a torch.nn.Module")
    for name, value, least in (("slots", slots, 1), ("keep_bytes", keep_bytes, 0)):
        if (value is not None or name == "slots") and (type(value) is not int or value < least):
            raise InvalidArgumentError(f"flow: {name} is {value!r}; pass an integer, at least {least}")
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise UnsupportedError(f"flow: {name} is a DTensor; FSDP2's CPUOffloadPolicy serves models of several processes")
        if param.is_meta:
            raise UnsupportedError(f"flow: {name} has no memory yet; call flow after model.to_empty()")


def _device_of(device: Any) -> torch.device:
    if device is not None:
        return torch.device(device)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else found


def _places(model: torch.nn.Module) -> dict[torch.Tensor, list[tuple[torch.nn.Module, str]]]:
    """Each parameter of a model, with the modules and names that have it."""
    found: dict[torch.Tensor, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                found.setdefault(param, []).append((module, name))
    return found


def _units_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    for kind in (torch.nn.ModuleList, torch.nn.Sequential):
        if found := [child for outer in _outermost(model, kind) for child in outer.children() if any(True for _ in child.parameters())]:
            return found
    raise InvalidArgumentError(f"flow: {type(model).__name__} has no ModuleList and no Sequential with parameters; pass units=")


def _outermost(module: torch.nn.Module, kind: type[torch.nn.Module]) -> list[torch.nn.Module]:
    if isinstance(module, kind):
        return [module]
    return [found for child in module.children() for found in _outermost(child, kind)]
