"""The optimizer's class itself, as an object that steps the parameters of one chunk at a time.

Between chunks the object has the groups' options and the attributes of before the step, so that a count of steps counts once. What a step
has changed in them must be the same for all chunks: a class that computes something over all parameters would get another result with
fewer of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ...errors import InvalidArgumentError, UnsupportedError
from .._optimizer import SpillwayOptimizer

#: Attributes that are no settings of a class.
_OWN = ("param_groups", "state", "grad_scale", "found_inf")
#: In the place of an item that a dictionary lacks.
_ABSENT = object()
_CURE = "so it needs all parameters in one step; use the class itself"


class Inner:
    """An object of an optimizer's class.

    Args:
        kind: The class.
        params, options: Its arguments.

    Attributes:
        optimizer: The object.

    Raises:
        InvalidArgumentError: It is no optimizer's class.
        UnsupportedError: Its steps need all parameters."""

    def __init__(self, kind: Any, params: Any, options: dict[str, Any]):
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            raise InvalidArgumentError(f"Staged: cls is {kind!r}; pass a class of optimizers, such as torch.optim.Muon, and not an object")
        if issubclass(kind, torch.optim.LBFGS):
            raise UnsupportedError(f"Staged: {kind.__name__} joins all parameters to one vector, {_CURE}")
        self.optimizer = kind(params, **options)
        if isinstance(self.optimizer, SpillwayOptimizer) and self.optimizer._home.precision.stochastic:
            raise UnsupportedError(
                f"Staged: {kind.__name__} of spillway.torch rounds moments at random by the numbers of its parameters, {_CURE}, or pass "
                'moment_rounding="nearest"'
            )
        #: The attributes, and the options of each group, that steps have changed: their values before the first one that did.
        self._first: dict[str, Any] = {}
        self._first_options: dict[int, dict[str, Any]] = {}
        self._check_attributes()

    @property
    def name(self) -> str:
        """The name of the class."""
        return type(self.optimizer).__name__

    def _check_attributes(self) -> None:
        """Raises UnsupportedError if the object has its parameters in another place than its groups."""
        known = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
        for name, value in vars(self.optimizer).items():
            items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
            if name not in _OWN and any(id(item) in known for item in items):
                raise UnsupportedError(f"Staged: {self.name} keeps parameters in its attribute {name!r}, {_CURE}")
        if self.optimizer._optimizer_step_pre_hooks or self.optimizer._optimizer_step_post_hooks:
            raise UnsupportedError(
                f"Staged: {self.name} registers hooks of its own step, which Staged would not call; use the class itself"
            )

    def with_groups(self, groups: list[dict[str, Any]], states: dict[Any, Any], work: Callable[[], Any]) -> Any:
        """Returns work(), while the object has other groups and states."""
        own = self.optimizer
        before = own.param_groups, own.state
        own.param_groups, own.state = groups, defaultdict(dict, states)
        try:
            return work()
        finally:
            own.param_groups, own.state = before

    def turn(self, groups: list[dict[str, Any]], scaler: dict[str, Any]) -> Turn:
        """A step of all chunks. `scaler`: the attributes that a GradScaler has set."""
        return Turn(self, groups, scaler)

    def add(self, groups: list[dict[str, Any]], group: dict[str, Any]) -> dict[Any, Any]:
        """Adds a group to these groups, as the class does. Returns the states that it has made."""
        own = self.optimizer
        found: dict[Any, Any] = self.with_groups(groups, {}, lambda: (own.add_param_group(group), own.state)[1])
        return found

    def learn(self, groups: list[dict[str, Any]], attributes: dict[str, Any], options: dict[int, dict[str, Any]]) -> None:
        """Takes over what a step has changed in the attributes of the object and in the options of groups."""
        own = vars(self.optimizer)
        for name, value in attributes.items():
            self._first.setdefault(name, own.get(name, _ABSENT))
            own[name] = value
        for number, changed in options.items():
            first = self._first_options.setdefault(number, {})
            for key, value in changed.items():
                first.setdefault(key, groups[number].get(key, _ABSENT))
                groups[number][key] = value

    def learned(self, groups: list[dict[str, Any]]) -> dict[str, Any]:
        """The present values of what steps have changed, for relearn()."""
        own = vars(self.optimizer)
        options = {
            number: {key: groups[number][key] for key in first if key in groups[number]}
            for number, first in self._first_options.items()
            if number < len(groups)
        }
        return {"attributes": {name: own[name] for name in self._first if name in own}, "options": options}

    def relearn(self, groups: list[dict[str, Any]], learned: dict[str, Any]) -> None:
        """Returns to what steps had changed at another time."""
        _put(vars(self.optimizer), self._first)
        for number, first in self._first_options.items():
            if number < len(groups):
                _put(groups[number], first)
        self.learn(groups, learned["attributes"], learned["options"])

    def load(self, groups: list[dict[str, Any]], saved: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[Any, Any]]:
        """Groups and states after the class has loaded a state dict to these groups."""
        own = self.optimizer

        def work() -> tuple[list[dict[str, Any]], dict[Any, Any]]:
            own.load_state_dict(saved)
            return own.param_groups, own.state

        found: tuple[list[dict[str, Any]], dict[Any, Any]] = self.with_groups(groups, {}, work)
        return found

    def save(self, groups: list[dict[str, Any]], states: dict[Any, Any]) -> dict[str, Any]:
        """The class's state dict of groups and states."""
        found: dict[str, Any] = self.with_groups(groups, states, self.optimizer.state_dict)
        return found


class Turn:
    """One step of all parameters, chunk by chunk.

    Args:
        inner: The object that steps.
        groups: The groups of all parameters.
        scaler: As for Inner.turn."""

    def __init__(self, inner: Inner, groups: list[dict[str, Any]], scaler: dict[str, Any]):
        self._inner, self._groups, self._scaler = inner, groups, scaler
        self._before = _attributes(inner.optimizer)
        self._attributes: dict[str, Any] | None = None
        self._options: dict[int, dict[str, Any]] = {}
        self._compares = True
        #: The group of each parameter, and its place there.
        self._places = {param: (number, place) for number, group in enumerate(groups) for place, param in enumerate(group["params"])}
        step = type(inner.optimizer).step
        # The hooks are those of the optimizer that the program sees.
        self._step: Any = step.__wrapped__ if getattr(step, "hooked", False) else step

    def step(self, params: Iterable[torch.Tensor], states: dict[torch.Tensor, Any]) -> dict[Any, Any]:
        """Steps parameters by the class. Returns their states.

        Raises:
            UnsupportedError: The class has changed something that concerns all parameters, in another way than for the chunk before."""
        chosen = set(params)
        return self._call(self._parts(chosen), states, chosen)

    def rest(self) -> None:
        """Shows the class the groups in which no parameter was stepped, if it changes options, or if there was no step at all: it may count
        its steps there. Their parameters have no gradient, so that it steps none."""
        unseen = {number: group for number, group in enumerate(self._groups) if number not in self._options}
        if unseen and (not self._options or any(self._options.values())):
            # Without a gradient it may leave attributes as they are.
            self._compares = False
            self._call({number: _part(group, [*range(len(group["params"]))]) for number, group in unseen.items()}, {}, set())

    def _call(self, parts: dict[int, dict[str, Any]], states: dict[torch.Tensor, Any], chosen: set[torch.Tensor]) -> dict[Any, Any]:
        versions = {number: _versions(part) for number, part in parts.items()}
        own = self._inner.optimizer
        _set_attributes(own, self._before)
        vars(own).update(self._scaler)
        try:
            found = self._inner.with_groups([*parts.values()], states, lambda: (self._step(own), own.state)[1])
            after = _attributes(own)
        finally:
            for name in self._scaler:
                vars(own).pop(name, None)
            _set_attributes(own, self._before)
        self._note(after, parts, versions)
        for key in found:
            if key not in chosen and (not isinstance(key, torch.Tensor) or found[key]):
                raise UnsupportedError(f"Staged: {self._inner.name} keeps a state that belongs to no parameter of the step, {_CURE}")
        return {param: state for param, state in found.items() if param in chosen}

    def _parts(self, chosen: set[torch.Tensor]) -> dict[int, dict[str, Any]]:
        """The groups with the chosen parameters only, by their numbers, without groups that have none of them."""
        places: dict[int, list[int]] = {}
        for number, place in sorted(self._places[param] for param in chosen):
            places.setdefault(number, []).append(place)
        return {number: _part(self._groups[number], own) for number, own in places.items()}

    def _note(self, after: dict[str, Any], parts: dict[int, dict[str, Any]], versions: dict[int, list[int]]) -> None:
        name = self._inner.name
        changed = _changed(self._before, after)
        if self._attributes is None:
            self._attributes = changed
        elif self._compares and (differs := _differing(self._attributes, changed)):
            raise UnsupportedError(
                f"Staged: the step of {name} changes its attribute {differs!r} otherwise for each part of the parameters, {_CURE}"
            )
        for number, part in parts.items():
            if _versions(part) != versions[number]:
                raise UnsupportedError(f"Staged: the step of {name} writes to a tensor in the options of a group, {_CURE}")
            changed = _changed(self._groups[number], {**part, "params": self._groups[number]["params"], **_names(self._groups[number])})
            if number in self._options and (differs := _differing(self._options[number], changed)):
                raise UnsupportedError(
                    f"Staged: the step of {name} changes the option {differs!r} of a group otherwise for each part of them, {_CURE}"
                )
            self._options[number] = changed

    def end(self) -> None:
        """Takes over what the step has changed in the attributes of the object and in the groups' options."""
        self._inner.learn(self._groups, self._attributes or {}, self._options)


def _put(into: dict[str, Any], items: dict[str, Any]) -> None:
    for key, value in items.items():
        if value is _ABSENT:
            into.pop(key, None)
        else:
            into[key] = value


def _part(group: dict[str, Any], places: list[int]) -> dict[str, Any]:
    """A group with the parameters at these places."""
    lists = {key: [group[key][place] for place in places] for key in ("params", *_names(group))}
    return {**group, **lists}


def _names(group: dict[str, Any]) -> dict[str, Any]:
    return {"param_names": group["param_names"]} if group.get("param_names") else {}


def _versions(group: dict[str, Any]) -> list[int]:
    """The versions of the tensors in a group's options."""
    options = (value for key, value in group.items() if key != "params")
    tensors = [item for value in options for item in (value if isinstance(value, (list, tuple)) else (value,))]
    return [item._version for item in tensors if isinstance(item, torch.Tensor) and not item.is_inference()]


def _attributes(optimizer: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(optimizer).items() if name not in _OWN}


def _set_attributes(optimizer: Any, attributes: dict[str, Any]) -> None:
    for name in [name for name in vars(optimizer) if name not in _OWN and name not in attributes]:
        del vars(optimizer)[name]
    vars(optimizer).update(attributes)


def _changed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The items that have another value."""
    return {key: value for key, value in after.items() if key not in before or not _same(before[key], value)}


def _differing(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    """A key under which two dicts differ; None if they are the same."""
    keys: Sequence[str] = [*one, *(key for key in other if key not in one)]
    return next((key for key in keys if key not in one or key not in other or not _same(one[key], other[key])), None)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype is other.dtype and one.device == other.device and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    try:
        # NaN is the same as itself.
        return bool(one == other or (one != one and other != other))
    except Exception:
        # A comparison that the program has defined, or none.
        return False
