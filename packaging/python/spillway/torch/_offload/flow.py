"""Weights whose home is host memory, and that are on the device only while a part of the model uses them (weight-flow: SuperOffload 4.2).

A unit is a part of the model, such as a layer. The parameters of the program, those of `model.parameters()`, are in host memory. While a
forward of a unit or of a part of it runs, the parameters on the device take their place. What it saves of them for backward is fetched
again when backward reads it. A gradient leaves the device as soon as backward has completed it, and becomes the gradient of the parameter
in host memory.

Invariants:
- At most `slots` flowing units are on the device, besides those that the program uses at one time.
- Tensors of the device keep their storage object, which is emptied and filled again. No operation reads an empty one: a unit is filled
  before its forward, and a saved tensor is filled when it is unpacked.
- Memory is emptied and allocated on the stream that computes, so nothing overwrites it before its last reader has ended. A copy begins
  after what that stream had to do when the memory was allocated, and a unit runs after its copy.
- A forward that is in no other one sees what the program has written since the last one, also in ways that torch does not see: slots are
  empty then, and weights that stay are compared by their sums. Weights that were stepped since are copied anyway, so that training takes
  no sums.
- A graph sees one value of a weight: if the parameter in host memory has changed since, the version of the tensor on the device grows,
  and a backward of an earlier forward is an error.
- When backward returns, every gradient is in host memory, and no flowing unit is on the device."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from ..._attributes import Fixed, described
from ..._progress import each
from ..._written import Comparison, facts, sums
from ...errors import InvalidArgumentError, UnsupportedError
from .._copies import new_link
from .._tensors import DTensor, lasting, local, unused_bytes, without_gradients
from .forward import Hook, Method

#: Share of the memory that the first backward left unused, which weights that stay may take.
_USE = 0.9
_ALL = 1 << 62
#: All objects. A step of an optimizer tells them which parameters may have changed: fused steps change no version.
_flows: weakref.WeakSet[Flow] = weakref.WeakSet()
_autograd: Any = torch._C._autograd
_registered: list[Any] = []


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
        UnsupportedError: A parameter that requires a gradient is a DTensor or of another class, or has no memory yet."""

    device: Fixed[torch.device] = Fixed("Where the model computes.")

    def __init__(
        self,
        model: torch.nn.Module,
        device: Any = None,
        *,
        units: Iterable[torch.nn.Module] | None = None,
        slots: int = 2,
        keep_bytes: int | None = 0,
    ):
        self.device = _device_of(device)
        _check(model, slots, keep_bytes, self.device)
        self.fetched_bytes: int = 0
        self.peak_bytes: int = 0
        self.late: int = 0
        self._slots, self._keep_bytes = slots, keep_bytes
        self._up, self._down = new_link(self.device), new_link(self.device)
        # What followed each pair of uses; the last two used; the units on the device, the one used last at the end.
        self._after: dict[tuple[Any, Any], Unit] = {}
        self._used: tuple[Any, Any] = (None, None)
        self._here: dict[Unit, None] = {}
        self._leaving: list[tuple[Any, Weight, torch.Tensor]] = []
        # The backwards whose end is awaited, and the forwards that run.
        self._backwards: set[int] = set()
        self.running: set[Entry] = set()
        self._hooks: list[Any] = []
        self._forwards: list[Forward] = []
        self._install(model, _units_of(model) if units is None else list(units))
        if not _registered:
            _registered.extend(register(_stepped) for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook))
        _flows.add(self)

    def _install(self, model: torch.nn.Module, modules: list[torch.nn.Module]) -> None:
        places, owners = _places(model, self.device), _owners(modules)
        moving = each("moving weights to host memory", [*places.items()], lambda place: local(place[0]).nbytes)
        weights = [Weight(self, param, where) for param, where in moving]
        of: dict[int, list[Weight]] = {number: [] for number in range(-1, len(modules))}
        for weight in weights:
            found = {owners.get(module, -1) for module, _ in weight.places}
            of[found.pop() if len(found) == 1 else -1].append(weight)
        self._rest, *units = [Unit(own) for own in of.values()]
        self.units: list[Unit] = units
        #: The weights by their parameters.
        self.weights: dict[torch.Tensor, Weight] = {weight.on_host: weight for weight in weights}
        self._of = {weight.on_device.untyped_storage()._cdata: weight for weight in weights}
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self.device)
        self._rest.kept = True
        self._keep(self._keep_bytes or 0)
        for saves in (model.register_state_dict_pre_hook, model.register_load_state_dict_pre_hook):
            self._hooks.append(saves(Hook(lambda *_: self._reset())))
        reads: dict[torch.nn.Module, dict[Weight, None]] = {}
        for weight in weights:
            for module, _ in weight.places:
                reads.setdefault(module, {})[weight] = None
        # A part of a unit may read weights of the parts in it.
        below = {module: {weight: None for part in module.modules() for weight in reads.get(part, ())} for module in owners}
        scopes = {model: dict.fromkeys(self._rest.weights)}
        for module, own in (*below.items(), *reads.items()):
            if own:
                scopes.setdefault(module, {}).update(own)
        self._forwards += [Forward(self, module, [*own], module is model) for module, own in scopes.items()]

    def _keep(self, available: int) -> None:
        for unit in self.units:
            unit.kept = unit.bytes <= available
            if not unit.kept:
                break
            available -= unit.bytes

    def remove(self) -> None:
        """Gives the model its own forwards again. It is in host memory, and its buffers are on the device."""
        while self._hooks:
            self._hooks.pop().remove()
        while self._forwards:
            self._forwards.pop().remove()
        self._reset()
        for unit in [*self._here]:
            self._free(unit)

    def __repr__(self) -> str:
        def facts() -> dict[str, Any]:
            sizes = [unit.bytes for unit in self.units]
            return {"device": str(self.device), "units": len(sizes), "unit_bytes": sum(sizes), "kept_bytes": self._rest.bytes}

        return described("Flow", facts)

    def __reduce_ex__(self, _: Any) -> Any:
        raise TypeError("a Flow cannot be copied or pickled; a copy of its model is a plain model")

    # Forward.

    def enter(self, entry: Entry) -> None:
        """Has the weights of a forward on the device."""
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None or torch.jit.is_tracing():
            raise UnsupportedError("flow: weights that flow cannot be traced; trace or export a copy of the model")
        # Before the look at the others: of two threads that enter at once, one at least sees the other.
        self.running.add(entry)
        if torch._C._current_graph_task_id() == -1:
            if {other.thread for other in self.running.copy()} & {own.ident for own in threading.enumerate()} - {entry.thread}:
                raise InvalidArgumentError("flow: another thread runs a forward of this model; run one after the other")
            if _calls(self) == 1:
                _check_not_averaged()
                if entry.forward.is_root:
                    self._begin(entry)
                self._look((self._rest, *self.units) if entry.forward.is_root else entry.forward.units)
        for unit in entry.forward.units:
            unit.users.add(entry)
            self._use(unit)

    def _begin(self, entry: Entry | None = None) -> None:
        """Before a forward of the model: forgets what an exception has left of one, or of a backward."""
        self._put_back(entry)
        self._used = (None, None)
        self._backwards.clear()
        self._leaving.clear()
        for weight in self._of.values():
            weight.on_device.grad = None

    def _look(self, units: Iterable[Unit]) -> None:
        """Before a forward that is in no other: has the weights copied again that the program may have written to since the last one."""
        asked: list[Weight] = []
        for unit in units:
            if unit in self._here and not unit.kept and not unit.users and len(self.units) > self._slots:
                # A forward of all units frees it before its use.
                self._free(unit)
            if unit.fence is not None:
                self._up.wait(unit.fence)
                unit.fence = None
            asked += (weight for weight in unit.weights if weight.is_current())
        now = sums(weight.on_host for weight in asked)
        differ = Comparison(now, [weight.sum_here() for weight in asked]).places()
        for place, (weight, own) in enumerate(zip(asked, now)):
            weight.compared(None if place in differ else own)

    def _reset(self) -> None:
        """Unless a forward runs, as `_put_back`."""
        if not _calls(self):
            self._put_back()

    def _put_back(self, entry: Entry | None = None) -> None:
        """Puts the parameters in their places if an exception in the end of a forward has left others there. `entry`: the forward that
        begins."""
        Saving.leave_all(self)
        for unit in (self._rest, *self.units):
            unit.users.clear()
            for weight in unit.weights:
                weight.hide(weight.shown_by)
        self.running.intersection_update({entry})

    # Backward.

    def weight_of(self, tensor: torch.Tensor) -> Weight | None:
        """The weight of whose memory a tensor on the device is; None: of no weight's."""
        try:
            return self._of.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            # A tensor without a storage, such as a sparse one.
            return None

    def unpacked(self, weight: Weight, tensor: torch.Tensor, version: int) -> torch.Tensor:
        """A tensor that a forward has saved, filled again, for a kernel that reads it next."""
        self._expect()
        self._use(weight.unit)
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a parameter of shape "
                f"{tuple(weight.on_host.shape)}, whose weights flow, was written to since its forward"
            )
        # A graph of this backward keeps what it saves beyond it.
        return tensor.clone() if torch.is_grad_enabled() else tensor

    def arrived(self, weight: Weight) -> None:
        """Backward has completed a gradient."""
        grad, weight.on_device.grad = weight.on_device.grad, None
        if grad is None or not weight.on_host.requires_grad:
            return
        self._expect()
        if grad.layout is not torch.strided:
            self._leaving.append((None, weight, grad.cpu()))
        else:
            target = self._down.memory_like(grad)
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
        """Has `_finish` called at the end of this backward, which may be one inside of another."""
        number = torch._C._current_graph_task_id()
        if number != -1 and number not in self._backwards:
            if _frames("_engine_run_backward") == 1:
                # None of those before is around this one: they have raised.
                self._backwards.clear()
                self._leaving.clear()
            self._backwards.add(number)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._finish, number))

    def _finish(self, number: int) -> None:
        """After a backward."""
        self._backwards.discard(number)
        self._deliver(wait=True)
        if self._keep_bytes is None:
            # On the CPU all weights are there anyway.
            self._keep_bytes = _ALL if self.device.type == "cpu" else int(_USE * unused_bytes(self.device))
            self._keep(self._keep_bytes)
        if not self._backwards:
            for unit in [*self._here]:
                if not unit.kept and not unit.users:
                    self._free(unit)

    # Slots.

    def _use(self, unit: Unit) -> None:
        """Has the weights of a unit on the device for the work that the program gives it next, and fetches those that it used after it."""
        if unit is self._rest:
            self._fetch(unit)
            return
        before, last = self._used
        if unit is last and unit.fence is None and unit.is_current():
            return
        if unit is not last:
            if len(self._after) >= 8 * len(self.units):
                # A program whose order changes all the time.
                self._after.clear()
            self._after[self._used] = unit
            before, last = self._used = last, unit
        if self._fetch(unit):
            self.late += 1
        at, wanted = (before, last), {unit}
        for _ in range(self._slots - 1):
            following = self._after.get(at)
            if following is None or following.users or not self._make_room(wanted | {following}, following):
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
        idle = (other for other in flowing if not other.users and other not in wanted)
        for _ in range(len(flowing) - self._slots + 1):
            victim = next(idle, None)
            if victim is None:
                return False
            self._free(victim)
        return True

    def _fill(self, unit: Unit) -> None:
        for weight in unit.weights:
            if not weight.is_current():
                weight.fill(self._up)
                self.fetched_bytes += weight.bytes

    def _start(self, unit: Unit) -> None:
        """Starts the copy of a unit's weights, unless they are on the device."""
        if unit.is_current():
            return
        without_gradients(lambda: self._fill(unit))
        unit.fence = self._up.fence()
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
        self.weights: list[Weight] = weights
        self.bytes: int = sum(weight.bytes for weight in weights)
        self.kept: bool = False
        #: The forwards that use them.
        self.users: set[Entry] = set()
        #: Event at the end of the copy to the device; None: nothing is to be waited for.
        self.fence: Any = None
        for weight in weights:
            weight.unit = self

    def is_current(self) -> bool:
        """True if the weights on the device are those in host memory, or are on their way."""
        return all(weight.is_current() for weight in self.weights)


class Weight:
    """A parameter in host memory, and its tensor on the device."""

    unit: Unit

    def __init__(self, flow: Flow, param: torch.Tensor, places: list[tuple[torch.nn.Module, str]]):
        own = param.detach()
        self._flow = weakref.ref(flow)
        self.on_host: torch.Tensor = param
        self.places: list[tuple[torch.nn.Module, str]] = places
        self.on_device: torch.nn.Parameter = self._placed(own, flow)
        self.bytes: int = self.on_device.untyped_storage().nbytes()
        # What is on the device: nothing, or what the parameter was when its copy was started; what it was at the last copy; and the
        # version of the tensor on the device after it.
        self._filled: tuple[Any, ...] | None = None
        self._seen: tuple[Any, ...] | None = None
        self._version = 0
        #: The sum of the values on the device; None: it was not taken.
        self._sum: Any = None
        #: Steps of optimizers that have the parameter.
        self.steps = 0
        #: The forward for which the tensor on the device is in the model.
        self.shown_by: Entry | None = None
        self.empty()

    @lasting
    def _placed(self, own: torch.Tensor, flow: Flow) -> torch.nn.Parameter:
        """Takes the parameter to pinned host memory; returns the tensor on the device."""
        if flow.device.type != "cpu":
            memory = flow._up.memory(own.shape, own.dtype).copy_(own) if own.is_contiguous() else own.cpu().pin_memory()
            self.on_host.data = memory
        return torch.nn.Parameter(torch.empty_like(own, device=flow.device), requires_grad=self.on_host.requires_grad)

    def _now(self) -> tuple[Any, ...]:
        return *facts(self.on_host), self.steps

    def is_current(self) -> bool:
        """True if the tensor on the device has the values of the parameter, or will have them."""
        return self._filled == self._now()

    def sum_here(self) -> Any:
        """The sum of the values on the device."""
        return sums([self.on_device.cpu()])[0] if self._sum is None else self._sum

    def compared(self, found: Any) -> None:
        """Remembers the sum of both tensors; None: they have other values than each other, and the parameter is copied again."""
        self._sum = found
        if found is None:
            self._filled = self._seen = None

    def fill(self, link: Any) -> None:
        """Starts the copy to the device."""
        if self.on_host.dtype is not self.on_device.dtype or self.on_host.shape != self.on_device.shape:
            raise InvalidArgumentError(
                f"flow: a parameter was {self.on_device.dtype} of shape {tuple(self.on_device.shape)}, and is {self.on_host.dtype} of "
                f"shape {tuple(self.on_host.shape)}; convert a model before its weights flow"
            )
        now, storage = self._now(), self.on_device.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.bytes)
        self._filled = None
        self._sum = None
        with ExitStack() as same:
            if now == self._seen:
                same.enter_context(_unsafe_preserve_version_counter(self.on_device))
            link.bring(self.on_device.detach(), self.on_host.detach())
        self._filled, self._seen, self._version = now, now, self.on_device._version

    def empty(self) -> None:
        """Gives the memory on the device back."""
        self._filled = None
        self.on_device.untyped_storage().resize_(0)

    def show(self, entry: Entry) -> None:
        """The tensor on the device takes the place of the parameter in the model, where the program has not put another one."""
        if self.shown_by is not None:
            return
        self.shown_by, host, device = entry, self.on_host, self.on_device
        if device.requires_grad is not host.requires_grad:
            device.requires_grad_(host.requires_grad)
        if host.requires_grad and not device._post_accumulate_grad_hooks:
            device.register_post_accumulate_grad_hook(partial(_arrived, self._flow, weakref.ref(self)))
        if host.__dict__:
            device.__dict__.update(host.__dict__)
        self._place(host, device)

    def hide(self, entry: Entry | None) -> None:
        """The parameter takes its place again, after the forward that has shown it. It gets what the forward has written."""
        if entry is None or self.shown_by is not entry:
            return
        self._place(self.on_device, self.on_host)
        if self._filled is not None and self.on_device._version != self._version:
            without_gradients(lambda: self.on_host.copy_(self.on_device))
            self._filled = self._seen = self._now()
            self._version = self.on_device._version
            self._sum = None
        self.shown_by = None

    def _place(self, old: torch.Tensor, new: Any) -> None:
        for module, name in self.places:
            if module._parameters.get(name) is old:
                module._parameters[name] = new
                if isinstance(module, torch.nn.RNNBase):
                    # Its forward has a list of its own.
                    module._flat_weights = [getattr(module, own, None) for own in module._flat_weights_names]

    def add(self, grad: torch.Tensor) -> None:
        """Accumulates a gradient that is in host memory, and calls the parameter's hooks."""
        for hook in [*(self.on_host._backward_hooks or {}).values()]:
            changed = hook(grad)
            grad = grad if changed is None else changed
        if self.on_host.grad is None:
            self.on_host.grad = grad
        elif grad.requires_grad:
            # A backward that makes a graph of gradients.
            self.on_host.grad = self.on_host.grad + grad
        else:
            with torch.no_grad():
                self.on_host.grad += grad
        for hook in [*(getattr(self.on_host, "_post_accumulate_grad_hooks", None) or {}).values()]:
            hook(self.on_host)


class Forward(Method):
    """The forward of a module, with its weights on the device. A copy of the module has a plain one.

    Args:
        flow: The weights that flow.
        module: The module, whose forward this object becomes.
        weights: The weights that it needs.
        is_root: It is the model."""

    def __init__(self, flow: Flow, module: torch.nn.Module, weights: list[Weight], is_root: bool):
        if any(isinstance(own, Forward) for own in Method.chain(module, "forward")):
            raise InvalidArgumentError("flow: the weights of this model flow already; remove() the other Flow")
        super().__init__(module, "forward")
        self.flow: Flow | None = flow
        self.weights: list[Weight] = weights
        self.is_root: bool = is_root
        self.units: list[Unit] = [*dict.fromkeys(weight.unit for weight in weights)]
        self.put()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flow = self.flow
        if flow is None or _is_inside(self, flow):
            return self.plain(*args, **kwargs)
        entry = Entry(self, flow)
        try:
            entry.enter()
            return entry.checked(self.plain(*args, **kwargs))
        finally:
            try:
                entry.leave()
            finally:
                # A signal handler may have ended it.
                entry.leave()

    def remove(self) -> None:
        """Gives the module its own forward."""
        self.flow = None
        super().remove()


_CODE = Forward.__call__.__code__
# What it calls may be compiled.
Forward.__call__ = torch.compiler.disable(Forward.__call__, recursive=False)  # type: ignore[method-assign]


class Entry:
    """One call of a forward, which shows weights."""

    def __init__(self, forward: Forward, flow: Flow):
        self.forward: Forward = forward
        self.flow: Flow = flow
        self.thread: int = threading.get_ident()
        self._saving: Saving | None = None
        self._has_left = False

    @torch.compiler.disable
    def enter(self) -> None:
        """Has the weights on the device, and in the model."""
        self.flow.enter(self)
        for weight in self.forward.weights:
            weight.show(self)
        self._saving = Saving(self.flow)
        self._saving.enter()

    @torch.compiler.disable
    def checked(self, output: Any) -> Any:
        """The output of the forward, which must not be a parameter that is not on the device afterwards."""
        own = {id(weight.on_device) for weight in self.forward.weights if weight.shown_by is self}
        for value in tree_leaves(output):
            if isinstance(value, torch.Tensor) and (id(value) in own or id(value._base) in own):
                raise InvalidArgumentError(
                    f"flow: {type(self.forward.module).__name__} returns its parameter, which is not on the device afterwards. Make "
                    "spillway.torch.Flow(model, device, units=[...]) without it, and the optimizer without weights="
                )
        return output

    @torch.compiler.disable
    def leave(self) -> None:
        """Undoes `enter`, also if an exception has ended it. A second call does what an interrupted one has left."""
        if self._has_left:
            return
        if self._saving is not None:
            self._saving.leave()
        for weight in self.forward.weights:
            weight.hide(self)
        for unit in self.forward.units:
            unit.users.discard(self)
        self.flow.running.discard(self)
        self._has_left = True


@torch.compiler.disable
def _is_inside(forward: Forward, flow: Flow) -> bool:
    """True if a call around this one has done everything."""
    return all(weight.shown_by is not None for weight in forward.weights) and Saving.top_is_of(flow) and not forward.is_root


def _calls(flow: Flow) -> int:
    """The forwards of a model that this thread runs now."""
    frame, found = sys._getframe(), 0
    while frame is not None:
        found += frame.f_code is _CODE and frame.f_locals["self"].flow is flow
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _frames(name: str) -> int:
    """The calls of a function of this name that this thread runs now."""
    frame, found = sys._getframe(), 0
    while frame is not None:
        found += frame.f_code.co_name == name
        frame = frame.f_back  # type: ignore[assignment]
    return found


class Saving:
    """Hooks of torch for the tensors that a forward saves: those of weights are filled again when they are read. All others go to the hooks
    around these, such as those of gradient checkpointing."""

    def __init__(self, flow: Flow):
        self._flow = flow
        outer: tuple[Any, Any] = _autograd._top_saved_tensors_default_hooks(True) or (None, None)
        self._outer_pack, self._outer_unpack = outer

    def enter(self) -> None:
        """Puts the hooks before all others, until `leave`."""
        _autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)

    def leave(self) -> None:
        """Removes the hooks, if they are there."""
        if _top() is self:
            _autograd._pop_saved_tensors_default_hooks()

    @staticmethod
    def top_is_of(flow: Flow) -> bool:
        """True if hooks of a Flow are before all others."""
        top = _top()
        return isinstance(top, Saving) and top._flow is flow

    @staticmethod
    def leave_all(flow: Flow) -> None:
        """Removes hooks that an exception has left."""
        while Saving.top_is_of(flow):
            _autograd._pop_saved_tensors_default_hooks()

    def pack(self, tensor: torch.Tensor) -> Any:
        """What the graph keeps of a tensor."""
        weight = self._flow.weight_of(tensor)
        if weight is not None:
            return weight, tensor.detach(), tensor._version
        return None, tensor if self._outer_pack is None else self._outer_pack(tensor), 0

    def unpack(self, kept: tuple[Weight | None, Any, int]) -> torch.Tensor:
        """The tensor again."""
        weight, tensor, version = kept
        if weight is not None:
            return self._flow.unpacked(weight, tensor, version)
        return tensor if self._outer_unpack is None else self._outer_unpack(tensor)


def _top() -> Any:
    """The object whose method is the first hook for saved tensors."""
    top = _autograd._top_saved_tensors_default_hooks(True)
    return None if top is None else getattr(top[0], "__self__", None)


def _stepped(optimizer: Any, *_: Any) -> None:
    """Around a step of any optimizer, which may have changed the parameters that have a gradient before it or after it."""
    for flow in [*_flows]:
        params = (param for group in optimizer.param_groups for param in group["params"] if param.grad is not None)
        for weight in filter(None, map(flow.weights.get, params)):
            weight.steps += 1


def _arrived(flow: weakref.ref[Flow], weight: weakref.ref[Weight], _: torch.Tensor) -> None:
    owner, of = flow(), weight()
    if owner is not None and of is not None:
        owner.arrived(of)


def _check(model: Any, slots: Any, keep_bytes: Any, device: torch.device) -> None:
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(f"flow: model is a {type(model).__name__}; pass a torch.nn.Module")
    for name, value, least in (("slots", slots, 1), ("keep_bytes", keep_bytes, 0)):
        if (value is not None or name == "slots") and (type(value) is not int or value < least):
            raise InvalidArgumentError(f"flow: {name} is {value!r}; pass an integer, at least {least}")
    for name, param in model.named_parameters():
        if (reason := _refusal(param)) and not _stays(param, device):
            kind = InvalidArgumentError if not param.requires_grad else UnsupportedError
            where = "" if param.requires_grad else f"; it is frozen: move it to {device} before"
            raise kind(f"flow: {name} {reason}{where}")


def _refusal(param: torch.Tensor) -> str:
    """Why a parameter cannot flow; empty if it can."""
    if isinstance(param, DTensor):
        return "is a DTensor; FSDP2's CPUOffloadPolicy serves models of several processes"
    if isinstance(param, torch.nn.parameter.UninitializedTensorMixin):
        return "has no shape yet; run a forward before the weights flow"
    if type(param) not in (torch.nn.Parameter, torch.nn.Buffer) or type(param.data) is not torch.Tensor:
        return f"is a {type(param).__name__}; plain parameters are served"
    if param.is_inference():
        return "was made in inference mode; make the model outside of it"
    return "has no memory yet; call flow after model.to_empty()" if param.is_meta else ""


def _check_not_averaged() -> None:
    """Raises an error in a forward whose gradients DistributedDataParallel would average: it gets none of weights that flow."""
    found = torch.distributed.is_available() and torch.nn.parallel.DistributedDataParallel._active_ddp_module
    if found and torch.is_grad_enabled() and found.require_backward_grad_sync and found.process_group.size() > 1:
        raise UnsupportedError(
            "flow: DistributedDataParallel averages no gradients of weights that flow; use FSDP2 with its CPUOffloadPolicy, or weights "
            "that stay on the device"
        )


def _stays(param: torch.Tensor, device: torch.device) -> bool:
    """True if a parameter, which cannot flow, can be left where it is: a frozen one that is quantised, and is on the device already."""
    return not param.requires_grad and (param.is_meta or param.device.type == device.type) and bool(_refusal(param))


def _device_of(device: Any) -> torch.device:
    if device is not None:
        return torch.device(device)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else found


def _places(model: torch.nn.Module, device: torch.device) -> dict[torch.Tensor, list[tuple[torch.nn.Module, str]]]:
    """Each parameter of a model that flows, with the modules and names that have it."""
    found: dict[torch.Tensor, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and not _stays(param, device):
                found.setdefault(param, []).append((module, name))
    return found


def _owners(units: list[Any]) -> dict[torch.nn.Module, int]:
    """The number of the unit that has a module; -1: several have it."""
    found: dict[torch.nn.Module, int] = {}
    for number, unit in enumerate(units):
        if not isinstance(unit, torch.nn.Module) or isinstance(unit, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            raise InvalidArgumentError(f"flow: units[{number}] is a {type(unit).__name__}, which has no forward; pass parts of the model")
        for module in unit.modules():
            if module in units and module is not unit:
                raise InvalidArgumentError(f"flow: units[{number}] has another unit inside; pass units that are beside each other")
            found[module] = number if module not in found else -1
    if len(set(units)) < len(units):
        raise InvalidArgumentError("flow: units has a part twice; pass each once")
    return found


def _units_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    for kind in (torch.nn.ModuleList, torch.nn.Sequential):
        found = dict.fromkeys(part for outer in _outermost(model, kind) for child in outer.children() for part in _with_forward(child))
        if found := {part: None for part in found if any(True for _ in part.parameters())}:
            return [*found]
    raise InvalidArgumentError(
        f"flow: {type(model).__name__} has no ModuleList and no Sequential with parameters. Name the parts that flow: "
        "spillway.torch.Flow(model, device, units=[...]), and make the optimizer without weights="
    )


def _with_forward(module: torch.nn.Module) -> list[torch.nn.Module]:
    """A module, or the parts of a list, which itself is not called."""
    if isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        return [part for child in module.children() for part in _with_forward(child)]
    return [module]


def _outermost(module: torch.nn.Module, kind: type[torch.nn.Module]) -> list[torch.nn.Module]:
    if isinstance(module, kind):
        return [module]
    return [found for child in module.children() for found in _outermost(child, kind)]
