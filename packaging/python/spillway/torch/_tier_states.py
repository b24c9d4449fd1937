"""Optimizer states on a tier: f32 masters, moments and their commits.

Invariants:
- A tier of other parameters is refused before anything is written to it.
- Parameters that require no gradient at construction have no states. A commit fixes which ones these are.
- The master of an f32 parameter equals the parameter, and that of a 16-bit parameter rounds to it, unless the program has written to the
  parameter; the next step gives the master the new values.
- State moves by subgroups, through memory of one subgroup.
- Calls of several threads run one after another, so that each sees the states between two steps."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from .. import _abi, _ranks
from .._tier_options import payload_of
from ..errors import InvalidArgumentError, SpillwayError, UnsupportedError
from ..swap import Swap
from ..tier import Tier, TierPath
from ._arguments import check_tier, is_count
from ._layout import Commit, Layout, check_parameters, described
from ._precision import MASTER, take_values
from ._rows import CODES, holds_values, local, name_of

#: Elements of a subgroup without a memory budget: 48 MiB of state.
_USUAL, _LEAST = 4 << 20, 4 << 10
_STATE_BYTES = 12
#: Status of a path that has no room.
_LIMIT_REACHED = _abi.ERR_LIMIT_REACHED
MOMENTS = ("exp_avg", "exp_avg_sq")
_version = torch.Tensor._version.__get__
_Result = TypeVar("_Result")


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
        ratio: Share of each path in the states; None: equal at first, then in proportion to the
            measured bandwidths.
        turns: Wait for the turns of other processes before using a path.
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
    turns: bool = True
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
        check_tier(options)
        ready = torch.distributed.is_available() and torch.distributed.is_initialized()
        return options._replace(
            paths=[path if isinstance(path, TierPath) else TierPath(path) for path in paths],
            rank=options.rank if options.rank is not None else torch.distributed.get_rank() if ready else 0,
            world=options.world if options.world is not None else torch.distributed.get_world_size() if ready else 1,
        )


class TierState(dict[str, Any]):
    """The entry of a parameter in `optimizer.state`: it holds the step count only. Its iterator also names the states on the tier, because
    torch.distributed.checkpoint asks it which values to take from a flattened state dict."""

    on_tier: tuple[str, ...] = MOMENTS

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*super().__iter__(), *self.on_tier]))

    def __missing__(self, key: str) -> Any:
        raise KeyError(f"{key}: this state is on the tier; optimizer.state_dict() reads it" if key in self.on_tier else key)


class MasterState(TierState):
    """The entry of a 16-bit parameter, whose master is on the tier too."""

    on_tier = (*MOMENTS, MASTER)


class _Handles:
    """The open tier and the update on it, in the order in which they close."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.tier: Tier | None = None
        self.swap: Swap | None = None

    def close(self) -> None:
        # A forked child's handles are copies that it does not own.
        if self.process != os.getpid():
            return
        try:
            if self.swap is not None:
                self.swap.close()
        finally:
            if self.tier is not None:
                self.tier.close()


class TierStates:
    """States of an optimizer on a tier.

    Args:
        optimizer: The optimizer, with all its groups and without states.
        given: The `tier` argument.
        memory_budget: Limit of the host memory for states, in bytes; None: the least that keeps every path busy.

    Raises:
        InvalidArgumentError: The tier holds states of other parameters, or the budget is too small.
        UnsupportedError: A parameter cannot have its states on a tier."""

    def __init__(self, optimizer: torch.optim.Optimizer, given: Any, memory_budget: int | None):
        options, groups = TierOptions.of(given), optimizer.param_groups
        self.params = [param for group in groups for param in group["params"]]
        self.names = [name_of(group, number, place) for number, group in enumerate(groups) for place in range(len(group["params"]))]
        self.stated = [param.requires_grad for param in self.params]
        self._check_served()
        self.numbers = {id(param): number for number, param in enumerate(self.params)}
        self._shapes = [param.shape for param in self.params]
        self.directory = next(
            (path.directory for path in options.paths if path.directory is not None and not os.fspath(path.directory).startswith("s3://")),
            None,
        )
        self._handles, self._world, self._lock = _Handles(), options.world or 1, threading.RLock()
        #: The record of a commit that has begun, and the status of the library's call once it has returned.
        self._pending: tuple[Commit, list[int]] | None = None
        weakref.finalize(optimizer, _Handles.close, self._handles)
        try:
            self._open(optimizer, options, memory_budget)
        except BaseException:
            self._handles.close()
            raise

    def _open(self, optimizer: torch.optim.Optimizer, options: TierOptions, memory_budget: int | None) -> None:
        self._handles.tier = tier = _open_tier(options)
        tier._user = type(optimizer).__name__
        self.committed = Commit.unpacked(tier.opened.payload) if tier.opened.step is not None else None
        self.resumed_step = tier.opened.step
        if self.committed is not None:
            check_parameters(self.committed, self.params, self.names)
            self.stated = [number not in self.committed.stateless for number in range(len(self.params))]
            self._check_served()
        counts = [local(param).numel() if stated else 0 for param, stated in zip(self.params, self.stated)]
        self.layout = Layout(counts, self.committed.most if self.committed else _part_elements(options, memory_budget, sum(counts)))
        try:
            self._handles.swap = Swap(
                tier,
                self.layout.elements,
                memory_budget=memory_budget,
                ratio=options.ratio,
                turns=options.turns,
                huge_pages=options.pin_memory,
                pin_memory=options.pin_memory,
            )
        except SpillwayError as error:
            if error.status != _LIMIT_REACHED:
                raise
            raise InvalidArgumentError(
                f"the states of the optimizer need {_STATE_BYTES * sum(counts) / 1e6:.1f} MB on the tier: {error}; raise the "
                "limits of the paths, or add a path"
            ) from error
        self.swap._user = tier._user
        self.count = 0
        if self.committed is not None:
            self._restore(optimizer, self.committed)
        else:
            self.set_steps(optimizer, [0.0] * len(self.params))
            for subgroup in range(len(self.layout.elements)):
                zeros = torch.zeros(self.layout.elements[subgroup])
                self.swap.write(subgroup, self._values(subgroup), zeros, zeros)
        self.note_versions()

    @property
    def swap(self) -> Swap:
        """The open update."""
        assert self._handles.swap is not None
        return self._handles.swap

    @property
    def tier(self) -> Tier:
        """The open tier."""
        assert self._handles.tier is not None
        return self._handles.tier

    def close(self) -> None:
        """Closes update and tier."""
        self._handles.close()

    def alone(self, work: Callable[[], _Result]) -> _Result:
        """Returns work(), during which no other thread uses the states. In a forked child no thread would free the lock; the handles refuse
        every call there."""
        if self._handles.process != os.getpid():
            return work()
        with self._lock:
            return work()

    def _check_served(self) -> None:
        for name, param, stated in zip(self.names, self.params, self.stated):
            if stated:
                _check_served(name, param)

    def check(self, param: torch.Tensor, name: str) -> int:
        """The number of a parameter; raises InvalidArgumentError if it is not one of the construction, was resized, or has no states."""
        number = self.numbers.get(id(param))
        if number is None:
            raise InvalidArgumentError(
                f"{name} is not one of the parameters that the optimizer was constructed with, so the tier has no states "
                "for it; construct the optimizer again"
            )
        if param.shape != self._shapes[number]:
            raise InvalidArgumentError(
                f"{name} has shape {tuple(param.shape)}, and its states on the tier have {tuple(self._shapes[number])}; "
                "construct the optimizer again, on another job"
            )
        if not self.stated[number]:
            raise InvalidArgumentError(
                f"{name} has a gradient and no states on the tier, because it did not require a gradient when the optimizer "
                "was constructed; construct the optimizer again, on another job, or set its gradient to None"
            )
        return number

    def set_steps(self, optimizer: torch.optim.Optimizer, steps: list[float]) -> None:
        """Sets the step count of every parameter with states."""
        for param, step, stated in zip(self.params, steps, self.stated):
            if stated:
                count = torch.tensor(step, dtype=torch.float32, device="cpu")
                optimizer.state[param] = (TierState if local(param).dtype is torch.float32 else MasterState)(step=count)

    def step_count(self, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
        """The step count of the parameter with this number; raises InvalidArgumentError if the program has removed it."""
        state = optimizer.state.get(self.params[number])
        if not isinstance(state, dict) or "step" not in state:
            raise InvalidArgumentError(
                f"{self.names[number]}: optimizer.state has no step count for it, as after optimizer.state.clear(), and its "
                "other states are on the tier; call rollback() to return to the last commit, or load_state_dict()"
            )
        step = state["step"]
        if not isinstance(step, torch.Tensor) or not is_count(step):
            raise InvalidArgumentError(
                f"{self.names[number]}: its state 'step' is {step!r}; set a tensor with the number of steps, or call rollback()"
            )
        return step

    def note_versions(self) -> None:
        """Remembers that masters and parameters agree now."""
        self._versions = self._now()

    def _now(self) -> list[int]:
        """The versions of the parameters with states."""
        return [_version(local(param)) if stated else -1 for param, stated in zip(self.params, self.stated)]

    def set_version(self, number: int, version: int) -> None:
        """Remembers that master and parameter agree at this version of the parameter."""
        self._versions[number] = version

    def forget_versions(self) -> None:
        """Has the next step compare every master with its parameter."""
        self._versions = [-1] * len(self.params)

    def take_written(self) -> None:
        """Gives masters the values of parameters that the program has written to."""
        written = {number for number, (now, old) in enumerate(zip(self._now(), self._versions)) if now != old}
        for subgroup in sorted({piece.subgroup for number in written for piece in self.layout.of_parameter[number]}):
            master, differs = torch.empty(self.layout.elements[subgroup]), False
            self.swap.read(subgroup, master)
            for piece in self.layout.of_subgroup[subgroup]:
                if piece.parameter in written:
                    differs |= take_values(master[piece.first : piece.first + piece.count], self._part(piece))
            if differs:
                self.swap.write(subgroup, master)
        self.note_versions()

    def master(self, param: torch.Tensor) -> torch.Tensor:
        """The master of a parameter: the parameter itself if it is float32, or frozen."""
        own = local(param).detach()
        self.swap.handle  # raises an error if the tier is closed
        if own.dtype is torch.float32 or not self.stated[self.numbers.get(id(param), 0)]:
            return own
        number = self.check(param, "the tensor")
        self.take_written()
        master = torch.empty(own.shape, dtype=torch.float32, device="cpu")
        for piece in self.layout.of_parameter[number]:
            whole = torch.empty(self.layout.elements[piece.subgroup], device="cpu")
            self.swap.read(piece.subgroup, whole)
            master.view(-1)[piece.start : piece.start + piece.count] = whole[piece.first : piece.first + piece.count]
        return master

    def commit(self, optimizer: torch.optim.Optimizer, step: int | None, payload: bytes) -> None:
        """Makes the present states durable; returns after all ranks have committed."""
        self._settle()
        self.take_written()
        steps = [float(self.step_count(optimizer, number)) if stated else 0.0 for number, stated in enumerate(self.stated)]
        record = Commit(
            self.layout.most,
            [described(local(param)) for param in self.params],
            steps,
            self.count,
            payload_of(payload),
            [number for number, stated in enumerate(self.stated) if not stated],
        )
        number, status = self.count if step is None else step, list[int]()
        # Noted before the call: a signal handler may raise after the library has committed.
        self._pending = record, status
        try:
            _ranks.together(self._world, lambda: self.swap._commit(number, record.packed(), status))
        finally:
            self._settle()

    def _settle(self) -> None:
        """Takes over the record of a commit that the library has completed."""
        if self._pending is not None:
            record, status = self._pending
            if status == [0]:
                self.committed = record
            self._pending = None

    def rollback(self, optimizer: torch.optim.Optimizer) -> None:
        """Restores the last commit."""
        self._settle()
        if self.committed is None:
            raise InvalidArgumentError(
                f"{type(optimizer).__name__}.rollback: nothing was committed to the tier; construct the optimizer again"
            )
        self.swap.rollback()
        self._restore(optimizer, self.committed)
        self.note_versions()

    def _restore(self, optimizer: torch.optim.Optimizer, committed: Commit) -> None:
        """Gives the parameters the values of their masters, and the steps those of the last commit."""
        with torch.no_grad():
            for subgroup, master in self._masters():
                for piece in self.layout.of_subgroup[subgroup]:
                    self._part(piece).copy_(master[piece.first : piece.first + piece.count])
        self.set_steps(optimizer, committed.steps)
        self.count = committed.count

    def _masters(self) -> Iterator[tuple[int, torch.Tensor]]:
        for subgroup, elements in enumerate(self.layout.elements):
            master = torch.empty(elements)
            self.swap.read(subgroup, master)
            yield subgroup, master

    def _values(self, subgroup: int) -> torch.Tensor:
        """The values of the parameters in a subgroup."""
        values = torch.empty(self.layout.elements[subgroup])
        for piece in self.layout.of_subgroup[subgroup]:
            values[piece.first : piece.first + piece.count] = self._part(piece)
        return values

    def _part(self, piece: Any) -> torch.Tensor:
        return local(self.params[piece.parameter]).detach().view(-1)[piece.start : piece.start + piece.count]


def _part_elements(options: TierOptions, memory_budget: int | None, total: int) -> int:
    if options.part_elements is not None:
        return options.part_elements
    usual = _USUAL if memory_budget is None else min(_USUAL, memory_budget // (6 * _STATE_BYTES) // 1024 * 1024)
    return max(_LEAST, min(usual, max(total, 1)))


def _check_served(name: str, param: torch.Tensor) -> None:
    own = local(param)
    if not (own.is_cpu and own.layout is torch.strided and own.is_contiguous() and own.dtype in CODES and holds_values(own)):
        raise UnsupportedError(
            f"{name} is {own.dtype} on {own.device} with strides {own.stride() if own.layout is torch.strided else None}; states "
            "on a tier need contiguous CPU parameters of 16 or 32 bits; leave out tier for this parameter's optimizer"
        )


def _open_tier(options: TierOptions) -> Tier:
    def open_at(step: int | None) -> Tier:
        return Tier(
            options.paths,
            job=options.job,
            host=options.host,
            rank=options.rank or 0,
            world=options.world or 1,
            mode=options.resume,
            durability=options.durability,
            io_timeout=options.io_timeout,
            at_step=step,
        )

    return _ranks.open_together(
        options, options.rank or 0, options.world or 1, open_at, "pass another job to TierOptions, and load a checkpoint"
    )
