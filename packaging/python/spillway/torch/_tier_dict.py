"""State dicts of states on a tier, read and written subgroup by subgroup.

The values of a state dict are ordinary tensors, which torch.save and torch.distributed.checkpoint take. Those of large parameters are
maps of files without a name beside the tier's first directory: the system may write their pages out, so that a state dict needs host memory
for one subgroup and the small parameters only."""

from __future__ import annotations

import os
import tempfile
from itertools import chain
from typing import Any

import torch

from ..errors import InvalidArgumentError
from ._precision import MASTER
from ._rows import DTensor, local
from ._tier_states import MOMENTS, TierStates

#: Elements from which a value is a map of a file.
_MAPPED = 16 << 10


def whole_state(optimizer: torch.optim.Optimizer, states: TierStates) -> dict[torch.Tensor, dict[str, Any]]:
    """The state of every parameter, with the values on the tier."""
    states.take_written()
    whole: dict[torch.Tensor, dict[str, Any]] = {}
    numbers = [number for number, stated in enumerate(states.stated) if stated]
    params = [states.params[number] for number in numbers]
    for number, param in zip(numbers, params):
        own = local(param)
        made = {"step": states.step_count(optimizer, number).clone()}
        made.update({key: _empty(own, states.directory) for key in MOMENTS})
        if own.dtype is not torch.float32:
            made[MASTER] = _empty(own, states.directory)
        whole[param] = made
    for subgroup, elements in enumerate(states.layout.elements):
        parts = {key: torch.empty(elements) for key in (MASTER, *MOMENTS)}
        states.swap.read(subgroup, *parts.values())
        for piece in states.layout.of_subgroup[subgroup]:
            for key, to in whole[states.params[piece.parameter]].items():
                if key != "step":
                    to.view(-1)[piece.start : piece.start + piece.count] = parts[key][piece.first : piece.first + piece.count]
    for param in params:
        if isinstance(param, DTensor):
            whole[param].update({key: _distributed(param, value) for key, value in whole[param].items() if key != "step"})
    return whole


def _empty(own: torch.Tensor, directory: Any) -> torch.Tensor:
    if own.numel() < _MAPPED or directory is None:
        return torch.empty(own.shape, dtype=torch.float32)
    size = 4 * own.numel()
    with tempfile.TemporaryFile(dir=directory) as file:
        try:
            # Without this, a full disk would end the process at the write to a page.
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise OSError(
                error.errno,
                f"no room for {size} bytes of a state dict, which is kept in files below the tier's first directory: "
                f"{os.strerror(error.errno or 0)}",
                os.fspath(directory),
            ) from None
        return torch.from_file(f"/proc/self/fd/{file.fileno()}", shared=True, size=own.numel(), dtype=torch.float32).view(own.shape)


def _distributed(param: Any, value: torch.Tensor) -> Any:
    return DTensor.from_local(value, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride())


def check_loaded(optimizer: torch.optim.Optimizer, states: TierStates, loaded: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The saved states by the number of their parameter. Raises InvalidArgumentError if one does not fit; nothing was written then."""
    groups = loaded["param_groups"]
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in optimizer.param_groups]:
        # torch's own error follows.
        return {}
    ids = chain.from_iterable(group["params"] for group in groups)
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    found = {}
    for saved, param in zip(ids, params):
        number = states.numbers[id(param)]
        state = loaded["state"].get(saved)
        if not state or (not states.stated[number] and float(state.get("step", 0)) == 0):
            continue
        if not states.stated[number]:
            raise InvalidArgumentError(
                f"load_state_dict: {states.names[number]} has no states on the tier, because it did not require a gradient "
                "when the optimizer was constructed, and its saved state has been stepped; construct the optimizer while the "
                "parameter requires a gradient; nothing was loaded"
            )
        for key in MOMENTS:
            if key not in state:
                raise InvalidArgumentError(
                    f"load_state_dict: {states.names[number]}: its saved state lacks {key!r}; load the state of an Adam or AdamW"
                )
        for key in (*MOMENTS, MASTER):
            if key in state and local(state[key]).shape != local(param).shape:
                raise InvalidArgumentError(
                    f"load_state_dict: {states.names[number]} has shape {tuple(local(param).shape)}, its saved state {key!r} "
                    f"{tuple(local(state[key]).shape)}; load the state of this model; nothing was loaded"
                )
        found[number] = state
    return found


def write_through(optimizer: torch.optim.Optimizer, states: TierStates, found: dict[int, dict[str, Any]]) -> None:
    """Writes saved states to the tier. A parameter without one gets moments of zero; without a saved master, its value is the master."""
    for subgroup, elements in enumerate(states.layout.elements):
        parts = {MASTER: states._values(subgroup), **{key: torch.zeros(elements) for key in MOMENTS}}
        for piece in states.layout.of_subgroup[subgroup]:
            state = found.get(piece.parameter, {})
            for key, to in parts.items():
                if key in state and (key != MASTER or states.params[piece.parameter].dtype is not torch.float32):
                    to[piece.first : piece.first + piece.count] = local(state[key]).reshape(-1)[piece.start : piece.start + piece.count]
        states.swap.write(subgroup, *parts.values())
    states.set_steps(optimizer, [float(found.get(number, {}).get("step", 0)) for number in range(len(states.params))])
    # A master that does not round to its parameter is replaced at the next step, as without a tier.
    states.forget_versions()
