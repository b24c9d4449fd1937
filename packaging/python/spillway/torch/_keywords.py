"""What an optimizer is given: keywords beyond torch and their checks, options of a tier, and step counts that are loaded."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch

from ..errors import InvalidArgumentError
from ..tier import TierPath
from ..tiered import Place

#: The keywords beyond torch, with their defaults.
_BEYOND: dict[str, Any] = {
    "max_norm": None,
    "process_group": None,
    "skip_nonfinite": False,
    "undo": False,
    "moment_dtype": None,
    "moment_rounding": "nearest",
    "rounding_seed": 0,
    "master": None,
    "tier": None,
    "memory_budget": None,
    "overlap": False,
}


def take_beyond(options: dict[str, Any]) -> dict[str, Any]:
    """Removes the keywords beyond torch from `options`, and returns all of them."""
    return {name: options.pop(name, default) for name, default in _BEYOND.items()}


def check_keywords(name: str, max_norm: Any, process_group: Any, flags: dict[str, Any], memory_budget: Any) -> None:
    """Checks keywords of the optimizer class `name`. Raises InvalidArgumentError, whose message names the keyword."""
    if max_norm is not None and (isinstance(max_norm, bool) or not isinstance(max_norm, Real) or not max_norm > 0):  # type: ignore[operator]
        raise InvalidArgumentError(f"{name}: max_norm is {max_norm!r}; pass a number above 0, or None")
    for keyword, value in flags.items():
        if not isinstance(value, bool):
            raise InvalidArgumentError(f"{name}: {keyword} is {value!r}; pass True or False")
    if process_group is not None and not (torch.distributed.is_available() and isinstance(process_group, torch.distributed.ProcessGroup)):
        raise InvalidArgumentError(
            f"{name}: process_group is {process_group!r}; pass a group of torch.distributed with this process, or None"
        )
    if memory_budget is not None and (isinstance(memory_budget, bool) or not isinstance(memory_budget, Integral) or memory_budget < 0):
        raise InvalidArgumentError(f"{name}: memory_budget is {memory_budget!r}; pass a whole number of bytes, or None")


class TierOptions(NamedTuple):
    """Where and how an optimizer keeps its states on a tier.

    Attributes:
        paths: A directory, or a list of directories, "s3://BUCKET/PREFIX", spillway.tier.TierPath, or None for memory.
        job: Name of the run, and of a directory on each path.
        host: Name of this machine, and of a directory below that; None: the host name.
        rank, world: Number of this process and of all processes; None: those of torch.distributed, else 0 and 1.
        resume: "auto" resumes a committed state and otherwise begins a new one; "create" refuses a committed state; "resume" requires one.
        durability: What a commit survives: "data" a power failure; "process" only the end of the process; "full" like "data", and also
            syncs directories.
        part_elements: Number of elements of a subgroup of a new tier; None: 4 Mi, or less to fit the memory budget.
        ratio, speeds: As for spillway.Swap.
        turns: Number of processes that use a device at a time, as for spillway.Tier; 0: any number.
        pin_memory: Lock the buffers' pages in memory.
        io_timeout: Seconds without progress after which a path counts as failed; 0: 60 seconds."""

    paths: Any
    job: str = "optimizer"
    host: str | None = None
    rank: int | None = None
    world: int | None = None
    resume: str = "auto"
    durability: str = "data"
    part_elements: int | None = None
    ratio: Sequence[float] | None = None
    speeds: Sequence[float] | None = None
    turns: int = 1
    pin_memory: bool = True
    io_timeout: float = 0.0

    @staticmethod
    def of(given: Any) -> TierOptions:
        """The options of a `tier` argument."""
        options = given if isinstance(given, TierOptions) else TierOptions(given)
        single = isinstance(options.paths, (str, os.PathLike, TierPath)) or options.paths is None
        paths = [options.paths] if single else list(options.paths) if isinstance(options.paths, Iterable) else []
        if not paths or not all(path is None or (isinstance(path, (str, os.PathLike, TierPath)) and path != "") for path in paths):
            raise InvalidArgumentError(f"tier is {given!r}; pass a directory, a list of directories, or a TierOptions of these")
        _check_tier(options)
        return options._replace(paths=[path if isinstance(path, TierPath) else TierPath(path) for path in paths])

    def place(self) -> Place:
        """Where the tier of this process is."""
        ready = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank = self.rank if self.rank is not None else torch.distributed.get_rank() if ready else 0
        world = self.world if self.world is not None else torch.distributed.get_world_size() if ready else 1
        further = {"mode": self.resume, "durability": self.durability, "io_timeout": self.io_timeout, "turns": self.turns}
        return Place(self.paths, self.job, self.host, rank, world, options=further)


def _check_tier(options: Any) -> None:
    """Checks the fields of a TierOptions that the library does not check. Raises InvalidArgumentError, whose message names the field."""

    def whole(value: Any, least: int) -> bool:
        return value is None or (isinstance(value, Integral) and not isinstance(value, bool) and value >= least)  # type: ignore[operator]

    def real(value: Any) -> bool:
        return isinstance(value, Real) and not isinstance(value, bool)

    def reals(value: Any) -> bool:
        return value is None or (isinstance(value, Sequence) and all(map(real, value)))

    fits = {
        "rank": (whole(options.rank, 0), "a whole number from 0 on, or None"),
        "world": (whole(options.world, 1), "a whole number from 1 on, or None"),
        "part_elements": (whole(options.part_elements, 1), "a number of elements from 1 on, or None"),
        "ratio": (reals(options.ratio), "a list of numbers, or None"),
        "speeds": (reals(options.speeds), "a list of numbers, or None"),
        "turns": (whole(options.turns, 0), "a number of processes, or 0 for no turns"),
        "pin_memory": (isinstance(options.pin_memory, bool), "True or False"),
        "io_timeout": (real(options.io_timeout) and 0 <= options.io_timeout < 2**31, "seconds, a number from 0 on"),
    }
    for field, (good, wanted) in fits.items():
        if not good:
            raise InvalidArgumentError(f"TierOptions: {field} is {getattr(options, field)!r}; pass {wanted}")


def is_count(step: Any) -> bool:
    """True for a step count: a number, or a tensor with one number."""
    try:
        count = -1.0 if isinstance(step, (str, bytes)) else float(step)
    except (TypeError, ValueError, RuntimeError):
        return False
    return 0 <= count < 2**63 and count % 1 == 0


def check_steps(loaded: dict[str, Any], counted: bool) -> None:
    """Checks the step counts of a state dict before it is loaded. `counted`: states of the optimizer have one."""
    for number, state in loaded.get("state", {}).items():
        if not counted or not isinstance(state, dict) or not state:
            continue
        step = state.get("step")
        if not (isinstance(step, torch.Tensor) and step.is_meta) and not is_count(step):
            raise InvalidArgumentError(
                f"load_state_dict: state[{number!r}]['step'] is {step!r}; pass the number of steps that the state has had, "
                "a whole number from 0 on; nothing was loaded"
            )
