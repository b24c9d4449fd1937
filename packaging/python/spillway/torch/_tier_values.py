"""The values of state dicts on a tier, in both directions.

They are ordinary tensors, which torch.save and torch.distributed.checkpoint take. They are read and written subgroup by subgroup. Those of
large parameters are maps of files without a name beside the tier's first directory: the system may write their pages out, so that a state
dict needs host memory for one subgroup and the small parameters only.

Or they are placeholders: tensors of the meta device, which torch refuses to save, with an object that reads the value. `dcp` moves them
one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch

from ..errors import InvalidArgumentError, OutOfOrderError
from ..tiered import mapped
from ._states import MASTER, MOMENTS
from ._tensors import like, local
from ._tier_states import TierStates

#: Elements from which a value is a map of a file.
_MAPPED = 16 << 10
#: The attribute of a placeholder with the object that reads it.
_VALUE = "_spillway_value"


class Value:
    """The value of a placeholder.

    Args:
        read: Returns the part of the value that this process has.

    Attributes:
        absent: True if a checkpoint has no such value.
        fill: Fills a float32 tensor with the value of a checkpoint that was loaded; None: none was."""

    def __init__(self, read: Callable[[], torch.Tensor]):
        self.read, self.absent = read, False
        self.fill: Callable[[torch.Tensor], object] | None = None


def value_of(tensor: Any) -> Value | None:
    """The Value of a placeholder; None for any other object."""
    return getattr(tensor, _VALUE, None) if isinstance(tensor, torch.Tensor) else None


class Reading:
    """Reads values of the present states, one parameter after the other. Holds those of one parameter, and a subgroup.

    Args:
        on_tier: The states."""

    def __init__(self, on_tier: TierStates):
        self._on_tier, self._changes = on_tier, on_tier.tiered.changes_made
        self._subgroup, self._parts = -1, dict[str, torch.Tensor]()
        self._number, self._values = -1, dict[str, torch.Tensor]()

    def value(self, number: int, key: str) -> torch.Tensor:
        """A value of a parameter. Raises OutOfOrderError if the states have changed since this object was made."""
        if self._on_tier.tiered.changes_made != self._changes:
            raise OutOfOrderError(
                f"{self._on_tier.names[number]}: the states on the tier have changed since the state dict was made; make it again, and "
                "save it before the next step"
            )
        if number != self._number:
            self._values.clear()
            self._number = -1
            self._values = {name: torch.empty_like(shaped, device="cpu") for name, shaped in self.shaped(number)}
            self.fill(number, self._values)
            self._number = number
        return self._values[key]

    def shaped(self, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The names of a parameter's values, and tensors of their shapes and dtypes without memory."""
        own, on_tier = local(self._on_tier.params[number]), self._on_tier
        for key in MOMENTS:
            yield key, torch.empty(own.shape, dtype=on_tier.moment_dtype, device="meta")
        if own.dtype is not torch.float32:
            yield MASTER, torch.empty(own.shape, dtype=torch.float32, device="meta")

    def fill(self, number: int, values: dict[str, torch.Tensor]) -> None:
        """Fills tensors with the values of a parameter."""
        layout = self._on_tier.layout
        for piece in layout.of_parameter[number]:
            if piece.subgroup != self._subgroup:
                elements = layout.elements[piece.subgroup]
                self._parts = {key: torch.empty(elements, device="cpu") for key in (MASTER, *MOMENTS)}
                self._subgroup = -1
                self._on_tier.tiered.read(piece.subgroup, *self._parts.values())
                self._subgroup = piece.subgroup
            for key, to in values.items():
                to.view(-1)[piece.start : piece.start + piece.count] = self._parts[key][piece.first : piece.first + piece.count]


def whole_states(
    on_tier: TierStates, states: Any, reads: Callable[[Callable[[], torch.Tensor]], torch.Tensor] | None = None
) -> dict[torch.Tensor, dict[str, Any]]:
    """The state of every parameter, with the values on the tier, or with placeholders.

    Args:
        on_tier: The states.
        states: The optimizer's, which has the step counts.
        reads: Calls the function that reads the value of a placeholder; None: the values themselves are returned."""
    if not on_tier.tiered.mixed:
        on_tier.take_written()
    reading, directory = Reading(on_tier), on_tier.tiered.directory
    whole: dict[torch.Tensor, dict[str, Any]] = {}
    for number, (param, stated) in enumerate(zip(on_tier.params, on_tier.stated)):
        if not stated:
            continue
        made = dict(reading.shaped(number))
        if reads is None:
            made = {key: _empty(value, directory) for key, value in made.items()}
            reading.fill(number, made)
        made = {key: like(param, value) for key, value in made.items()}
        if reads is not None:
            for key, value in made.items():
                setattr(value, _VALUE, Value(partial(reads, partial(reading.value, number, key))))
        whole[param] = {"step": on_tier.step_count(states, number).clone(), **made}
    return whole


def _empty(shaped: torch.Tensor, directory: Any) -> torch.Tensor:
    if shaped.numel() < _MAPPED or directory is None:
        return torch.empty_like(shaped, device="cpu")
    return mapped(shaped.numel(), directory, shaped.dtype).view(shaped.shape)


def check_loaded(on_tier: TierStates, groups: list[dict[str, Any]], loaded: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The saved states by the number of their parameter. Raises InvalidArgumentError if one does not fit; nothing was written then."""
    saved_groups = loaded["param_groups"]
    if [len(group["params"]) for group in saved_groups] != [len(group["params"]) for group in groups]:
        # torch's own error follows.
        return {}
    ids = chain.from_iterable(group["params"] for group in saved_groups)
    params = chain.from_iterable(group["params"] for group in groups)
    found = {}
    for saved, param in zip(ids, params):
        number = on_tier.numbers[id(param)]
        state = {key: value for key, value in loaded["state"].get(saved, {}).items() if not _is_absent(value)}
        if not state or (not on_tier.stated[number] and float(state.get("step", 0)) == 0):
            continue
        if not on_tier.stated[number]:
            raise InvalidArgumentError(
                f"load_state_dict: {on_tier.names[number]} has no states on the tier, because it did not require a gradient "
                "when the optimizer was constructed, and its saved state has been stepped; construct the optimizer while the "
                "parameter requires a gradient; nothing was loaded"
            )
        for key in MOMENTS:
            if key not in state:
                raise InvalidArgumentError(
                    f"load_state_dict: {on_tier.names[number]}: its saved state lacks {key!r}; load the state of an Adam or AdamW"
                )
        for key in (*MOMENTS, MASTER):
            if key in state and local(state[key]).shape != local(param).shape:
                raise InvalidArgumentError(
                    f"load_state_dict: {on_tier.names[number]} has shape {tuple(local(param).shape)}, its saved state {key!r} "
                    f"{tuple(local(state[key]).shape)}; load the state of this model; nothing was loaded"
                )
            value = value_of(state.get(key))
            if value is not None and value.fill is None:
                raise InvalidArgumentError(
                    f"load_state_dict: {on_tier.names[number]}: its state {key!r} is a placeholder without a value; call "
                    "spillway.torch.dcp.load() first; nothing was loaded"
                )
        found[number] = state
    return found


def _is_absent(tensor: Any) -> bool:
    value = value_of(tensor)
    return value is not None and value.absent


def write_through(on_tier: TierStates, states: Any, found: dict[int, dict[str, Any]]) -> None:
    """Writes saved states to the tier. A parameter without one gets moments of zero; without a saved master, its value is the master."""
    saved = _Saved(found)
    for subgroup, elements in enumerate(on_tier.layout.elements):
        parts = {MASTER: on_tier.values(subgroup), **{key: torch.zeros(elements, device="cpu") for key in MOMENTS}}
        for piece in on_tier.layout.of_subgroup[subgroup]:
            state = found.get(piece.parameter, {})
            for key, to in parts.items():
                if key in state and (key != MASTER or on_tier.params[piece.parameter].dtype is not torch.float32):
                    to[piece.first : piece.first + piece.count] = saved.flat(piece.parameter, key)[piece.start : piece.start + piece.count]
        on_tier.tiered.write(subgroup, *parts.values())
    on_tier.set_steps(states, [float(found.get(number, {}).get("step", 0)) for number in range(len(on_tier.params))])
    # A master that does not round to its parameter is replaced at the next step, as without a tier.
    on_tier.forget_versions()


class _Saved:
    """The values of saved states. Those of placeholders are read when they are used, and one parameter's are held."""

    def __init__(self, found: dict[int, dict[str, Any]]):
        self._found, self._number, self._read = found, -1, dict[str, torch.Tensor]()

    def flat(self, number: int, key: str) -> torch.Tensor:
        """A value of a parameter, flat."""
        tensor = self._found[number][key]
        value = value_of(tensor)
        if value is None or value.fill is None:
            return local(tensor).reshape(-1)
        if number != self._number:
            self._number, self._read = number, {}
        if key not in self._read:
            made = torch.empty(local(tensor).shape, dtype=torch.float32, device="cpu")
            value.fill(made)
            self._read[key] = made.reshape(-1)
        return self._read[key]
