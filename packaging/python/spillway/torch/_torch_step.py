"""torch's own step of the parameters that Spillway does not serve: those of a group that only torch can step, and those that are no row of
the C table (see _tensors.py).

torch checks a parameter when its turn comes, after it has stepped others. A `Trial` finds such refusals before the first write. It
makes torch's step twice of stand-ins: of tensors without memory (device "meta") that have the dtypes, shapes and options of the real ones,
and of copies of single elements on the real device, which run the same kernels. What only whole tensors show is checked by name: memory
that was freed, memory that several elements share, and inference tensors."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .._groups import Rule
from ..errors import InvalidArgumentError
from ._tensors import PLAIN, DTensor, check_complete, check_has_memory, check_layout, local, name_of

_Groups = list[dict[str, Any]]
#: Makes the step of an optimizer as torch does, of these groups and states.
TorchStep = Callable[[_Groups, Any], None]


class Trial:
    """Tries torch's step of parameters, and remembers the facts with which it succeeded."""

    def __init__(self) -> None:
        self._facts: list[Any] = []

    def check(self, places: list[tuple[int, int]], groups: _Groups, states: Any, rule: Rule, kind: str, torch_step: TorchStep) -> None:
        """Raises the error of torch's step, if it would refuse one of these parameters; its message names the parameter.

        Args:
            places: Number of the group and index in the group, of each parameter.
            groups, states: The optimizer's.
            rule, kind: Its rule, and the name of its class.
            torch_step: Makes its step as torch does."""
        owners = [groups[number] for number, _ in places]
        params = [group["params"][index] for group, (_, index) in zip(owners, places)]
        facts = [
            *map(_options, owners),
            *(_facts_of([param, param.grad, *states.get(param, {}).values()]) for param in params),
            *(_count(states.get(param, {})) for param in params),
        ]
        if facts == self._facts:
            return
        elements = []
        for (number, index), group, param in zip(places, owners, params):
            name, state = name_of(group, number, index), states.get(param, {})
            check_layout(param.grad, name, kind, rule.sparse)
            if state:
                check_complete(state, [*rule.names, *(["max_exp_avg_sq"] if group.get("amsgrad") else [])], name)
            _check_tensors(param, state, name)
            known = all(type(tensor) in PLAIN or isinstance(tensor, DTensor) for tensor in (param, param.grad))
            # Sparse tensors have no arithmetic without memory.
            if known and local(param.grad).layout is torch.strided:
                _try_without_memory(group, param, state, name, torch_step)
                elements.append((group, param, state, name))
        _try_elements(elements, torch_step)
        self._facts = facts


def _check_tensors(param: torch.Tensor, state: dict[str, Any], name: str) -> None:
    """Raises an error for tensors that torch's step cannot read or write."""
    tensors = {f"its state {key!r}": value for key, value in state.items() if isinstance(value, torch.Tensor)}
    for what, tensor in {"the parameter": param, **tensors}.items():
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
    for what, tensor in {"the parameter": param, "its gradient": param.grad, **tensors}.items():
        check_has_memory(local(tensor), f"{name}: {what}")
    if _count(state) is False:
        raise InvalidArgumentError(f"{name}: its state 'step' is no number of steps; load the state of this parameter; nothing was stepped")


def _try_elements(parts: list[tuple[dict[str, Any], torch.Tensor, dict[str, Any], str]], torch_step: TorchStep) -> None:
    """torch's step of copies of single elements: of all parameters at once, as torch does it, and of each alone for the name."""

    def run(some: list[tuple[dict[str, Any], torch.Tensor, dict[str, Any], str]]) -> None:
        groups: dict[int, dict[str, Any]] = {}
        states: Any = defaultdict(dict)
        for group, param, state, _ in some:
            stand_in = _element(param)
            stand_in.grad = _element(param.grad)
            groups.setdefault(id(group), {**group, "params": []})["params"].append(stand_in)
            states[stand_in] = _state_of(state, _element)
        torch_step(list(groups.values()), states)

    try:
        run(parts)
    except Exception as together:
        for part in parts:
            try:
                run([part])
            except Exception as error:
                raise _renamed(error, f"{part[3]} is stepped by torch, which refuses: {error}; nothing was stepped") from error
        names = ", ".join(name for *_, name in parts)
        raise _renamed(together, f"{names} are stepped by torch, which refuses: {together}; nothing was stepped") from together


def _try_without_memory(group: dict[str, Any], param: torch.Tensor, state: dict[str, Any], name: str, torch_step: TorchStep) -> None:
    """torch's step of a tensor without memory in the place of the parameter."""
    # It needs no gradient: a differentiable step refuses to write to a leaf that does.
    stand_in = _without_memory(param)
    stand_in.grad = _without_memory(param.grad)
    # The implementation and the devices of `capturable` are questions of the real device.
    own = {**group, "params": [stand_in], "foreach": False, "fused": False}
    if own.get("capturable") and param.device.type != "cpu":
        own["capturable"] = False
    try:
        torch_step([own], defaultdict(dict, {stand_in: _state_of(state, _without_memory)}))
    except Exception as error:
        raise _renamed(error, f"{name} is stepped by torch, which refuses: {error}; nothing was stepped") from error


def _state_of(state: dict[str, Any], stand_in: Callable[[Any], Any]) -> dict[str, Any]:
    """The state of a stand-in, with a step count of its own."""
    return {key: value.clone() if key == "step" and isinstance(value, torch.Tensor) else stand_in(value) for key, value in state.items()}


def step_rest(places: list[tuple[int, int]], groups: _Groups, states: Any, factor: float, torch_step: TorchStep) -> None:
    """torch's step of the parameters at these places, with gradients that are multiplied by `factor`."""
    chosen = [{**group, "params": [group["params"][index] for at, index in places if at == number]} for number, group in enumerate(groups)]
    chosen = [group for group in chosen if group["params"]]
    if factor != 1.0:
        # Parameters may have one gradient in common, also as two tensors of the same memory. It is scaled once.
        scaled: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        for param in (param for group in chosen for param in group["params"]):
            grad, key = param.grad, _memory(param.grad)
            if key not in scaled:
                scaled[key] = grad, _scaled(grad, factor)
            first, now = scaled[key]
            if now is not first:
                param.grad = now
    torch_step(chosen, states)


def _options(group: dict[str, Any]) -> list[Any]:
    """What torch's step may refuse of the options of a group."""

    def kind(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [kind(inner) for inner in value]
        return value if value is None or isinstance(value, (bool, str)) else type(value)

    return [(name, kind(value)) for name, value in group.items() if name not in ("params", "param_names")]


def _facts_of(values: Iterable[Any]) -> list[Any]:
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
