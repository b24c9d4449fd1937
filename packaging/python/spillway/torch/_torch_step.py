"""torch's own step of the parameters that Spillway does not serve: those of a group that only torch can step, and those that are no row of
the C table (see _rows.py).

torch checks a parameter when its turn comes, after it has stepped others. `_check_rest` finds such refusals before the first write. It
makes torch's step twice of stand-ins: of tensors without memory (device "meta") that have the dtypes, shapes and options of the real ones,
and of copies of single elements on the real device, which run the same kernels. What only whole tensors show is checked by name: memory
that was freed, memory that several elements share, and inference tensors."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import InvalidArgumentError, UnsupportedError
from ._notes import Notes
from ._rows import PLAIN, DTensor, check_complete, check_has_memory, is_served, local, name_of


class TorchStep(Notes):
    """Base of the optimizers of this package; not for direct use."""

    #: torch's class, whose step serves the other parameters.
    _torch_class: type[torch.optim.Optimizer]
    # Set by each class: the states with their fields in the C struct.
    _keys: dict[str, str]
    #: States have a step count.
    _counted = True
    #: Sparse gradients are left to torch's step.
    _sparse = False
    #: Attribute of a parameter that holds its gradient.
    _grad_name = "grad"
    #: Places of these parameters: number of the group, index in the group.
    _rest: list[tuple[int, int]]
    #: The facts of which torch's step was tried.
    _tried: list[Any]
    param_groups: list[dict[str, Any]]

    def _check_rest(self) -> None:
        """Raises the error of torch's step, if it would refuse one of these parameters; its message names the parameter."""
        groups = [self.param_groups[number] for number, _ in self._rest]
        params = [group["params"][index] for group, (_, index) in zip(groups, self._rest)]
        facts = [
            *map(_options, groups),
            *(_facts([param, param.grad, *self.state.get(param, {}).values()]) for param in params),
            *(_count(self.state.get(param, {})) for param in params),
        ]
        if facts == self._tried:
            return
        elements = []
        for (number, index), group, param in zip(self._rest, groups, params):
            name = name_of(group, number, index)
            check_layout(param.grad, name, type(self).__name__, self._sparse)
            if self.state.get(param):
                check_complete(self.state[param], [*self._state_names(), *(["max_exp_avg_sq"] if group.get("amsgrad") else [])], name)
            self._check_tensors(param, name)
            known = all(type(tensor) in PLAIN or isinstance(tensor, DTensor) for tensor in (param, param.grad))
            # Sparse tensors have no arithmetic without memory.
            if known and local(param.grad).layout is torch.strided:
                self._try(group, param, name)
                elements.append((group, param, name))
        self._try_elements(elements)
        self._tried = facts

    def _state_names(self) -> list[str]:
        """The names of the states of a parameter."""
        return [*(["step"] if self._counted else []), *self._keys]

    def _check_tensors(self, param: torch.Tensor, name: str) -> None:
        """Raises an error for tensors that torch's step cannot read or write."""
        states = {f"its state {key!r}": state for key, state in self.state.get(param, {}).items() if isinstance(state, torch.Tensor)}
        for what, tensor in {"the parameter": param, **states}.items():
            own = local(tensor)
            if own.is_inference() and not torch.is_inference_mode_enabled():
                raise InvalidArgumentError(
                    f"{name}: {what} is an inference tensor, which torch cannot write to outside of torch.inference_mode; "
                    "clone it; nothing was stepped"
                )
            if own.layout is torch.strided and torch._debug_has_internal_overlap(own) == 1:
                raise InvalidArgumentError(
                    f"{name}: elements of {what} share memory, as after expand(), so that torch cannot write to it; clone it; "
                    "nothing was stepped"
                )
            if what != "its state 'step'" and own.device != param.device:
                raise InvalidArgumentError(f"{name} is on {param.device}, {what} on {own.device}; move the state; nothing was stepped")
        for what, tensor in {"the parameter": param, "its gradient": param.grad, **states}.items():
            check_has_memory(local(tensor), f"{name}: {what}")
        count = _count(self.state.get(param, {}))
        if count is False:
            raise InvalidArgumentError(
                f"{name}: its state 'step' is no number of steps; load the state of this parameter; nothing was stepped"
            )

    def _try_elements(self, parts: list[tuple[dict[str, Any], torch.Tensor, str]]) -> None:
        """torch's step of copies of single elements: of all parameters at once, as torch does it, and of each alone for the name."""

        def run(some: list[tuple[dict[str, Any], torch.Tensor, str]]) -> None:
            groups: dict[int, dict[str, Any]] = {}
            states: Any = defaultdict(dict)
            for group, param, _ in some:
                stand_in = _element(param)
                stand_in.grad = _element(param.grad)
                groups.setdefault(id(group), {**group, "params": []})["params"].append(stand_in)
                states[stand_in] = {
                    key: value.clone() if key == "step" and isinstance(value, torch.Tensor) else _element(value)
                    for key, value in self.state.get(param, {}).items()
                }
            self._with(list(groups.values()), states)._torch_step()

        try:
            run(parts)
        except Exception as together:
            for part in parts:
                try:
                    run([part])
                except Exception as error:
                    raise _renamed(error, f"{part[2]} is stepped by torch, which refuses: {error}; nothing was stepped") from error
            names = ", ".join(name for _, _, name in parts)
            raise _renamed(together, f"{names} are stepped by torch, which refuses: {together}; nothing was stepped") from together

    def _try(self, group: dict[str, Any], param: torch.Tensor, name: str) -> None:
        """torch's step of a tensor without memory in the place of the parameter."""
        # It needs no gradient: a differentiable step refuses to write to a leaf that does.
        stand_in = _without_memory(param)
        stand_in.grad = _without_memory(param.grad)
        state = {
            key: value.clone() if key == "step" and isinstance(value, torch.Tensor) else _without_memory(value)
            for key, value in self.state.get(param, {}).items()
        }
        # The implementation and the devices of `capturable` are questions of the real device.
        own = {**group, "params": [stand_in], "foreach": False, "fused": False}
        if own.get("capturable") and param.device.type != "cpu":
            own["capturable"] = False
        try:
            self._with([own], defaultdict(dict, {stand_in: state}))._torch_step()
        except Exception as error:
            raise _renamed(error, f"{name} is stepped by torch, which refuses: {error}; nothing was stepped") from error

    def _step_rest(self, factor: float) -> None:
        """torch's step of the parameters that Spillway does not serve."""
        groups = [
            {**group, "params": [group["params"][index] for at, index in self._rest if at == number]}
            for number, group in enumerate(self.param_groups)
        ]
        groups = [group for group in groups if group["params"]]
        if factor != 1.0:
            # Parameters may have one gradient in common, also as two tensors of the same memory. It is scaled once.
            scaled: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
            for param in (param for group in groups for param in group["params"]):
                grad, key = param.grad, _memory(param.grad)
                if key not in scaled:
                    scaled[key] = grad, _scaled(grad, factor)
                first, now = scaled[key]
                if now is not first:
                    param.grad = now
        self._with(groups, self.state)._torch_step()

    def _with(self, groups: list[dict[str, Any]], states: Any) -> TorchStep:
        """This optimizer with other groups, and without the attributes of a GradScaler."""
        other = type(self).__new__(type(self))
        other.__dict__.update(
            {**self.__dict__, "param_groups": groups, "state": states, "_itself": other._itself, "_attributes": other._attributes}
        )
        for name in ("grad_scale", "found_inf"):
            other.__dict__.pop(name, None)
        return other

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


def check_layout(grad: torch.Tensor, name: str, kind: str, sparse: bool) -> None:
    """Raises an error for gradients that torch's class refuses too, so that it names the parameter."""
    if not sparse and local(grad).layout is not torch.strided:
        raise UnsupportedError(
            f"{name}: {kind} does not support sparse gradients, and this one is {local(grad).layout}; pass dense gradients, or "
            "leave the parameter to torch.optim.SparseAdam"
        )


def _options(group: dict[str, Any]) -> list[Any]:
    """What torch's step may refuse of the options of a group."""

    def kind(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [kind(inner) for inner in value]
        return value if value is None or isinstance(value, (bool, str)) else type(value)

    return [(name, kind(value)) for name, value in group.items() if name not in ("params", "param_names")]


def _facts(values: Iterable[Any]) -> list[Any]:
    """What torch's step may refuse of tensors."""
    return [
        (
            type(value),
            value.dtype,
            value.device,
            value.layout,
            value.shape,
            value.is_inference(),
            value.stride() if value.layout is torch.strided else None,
        )
        if isinstance(value, torch.Tensor)
        else type(value)
        for value in values
    ]


def _memory(grad: torch.Tensor) -> Any:
    """What two gradients with the same elements have in common."""
    own = local(grad)
    if own.layout is not torch.strided or not own.numel() or own._is_zerotensor():
        return id(grad)
    return own.device, own.data_ptr(), own.shape, own.stride(), own.dtype


def _scaled(grad: torch.Tensor, factor: float) -> torch.Tensor:
    """The gradient times the factor: itself, or a new tensor if torch cannot write to it."""
    own = local(grad)
    # A zero tensor has no memory to write to, and stays zero.
    if own._is_zerotensor():
        return grad
    shared = own.layout is torch.strided and torch._debug_has_internal_overlap(own) == 1
    if shared or (own.is_inference() and not torch.is_inference_mode_enabled()):
        return grad * factor
    return grad.mul_(factor)


def _count(state: dict[str, Any]) -> Any:
    """Whether the step count of a parameter is one: a real number that is not negative. None without a count on the CPU."""
    count = state.get("step")
    if isinstance(count, torch.Tensor):
        if count.device.type != "cpu" or count.numel() != 1:
            return None
        if count.is_complex():
            return False
        count = count.item()
    return None if count is None else isinstance(count, (int, float)) and 0 <= count < float("inf")


def _element(value: Any) -> Any:
    """A copy of the first element of a tensor, of shape (1,); an empty tensor if there is none. Anything else itself."""
    if not isinstance(value, torch.Tensor):
        return value
    value = local(value).detach()
    if not value.numel():
        return torch.empty(0, dtype=value.dtype, device=value.device)
    return value[(0,) * value.dim()].reshape(1).clone()


def _without_memory(value: Any) -> Any:
    """A tensor with dtype, shape and layout of another one, on the device "meta"; anything else itself."""
    if not isinstance(value, torch.Tensor):
        return value
    value = local(value).detach()
    return value.to("meta") if value.layout is not torch.strided else torch.empty(value.shape, dtype=value.dtype, device="meta")


def _renamed(error: Exception, message: str) -> Exception:
    """An error of the same class with another message; the error itself if its class does not take one."""
    with contextlib.suppress(Exception):
        other = type(error)(message)
        if str(other) == message:
            return other
    return error
