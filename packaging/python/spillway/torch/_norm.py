"""The norm of all gradients of a step, which clips them, or has the step skipped.

With a process group, the processes sum their norms. Every process takes part in every reduction, also one that refuses its step before it.
All that a process can refuse by itself comes before the reduction.

Which part of a parameter counts where: along a dimension of a mesh, the processes hold different parts of a DTensor unless its placement
there is Replicate. A plain tensor beside DTensors is replicated over the processes of their meshes. A mesh does not say what processes
outside of it hold, so the group has none of them. Without DTensors, every process has plain tensors of its own."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .. import _abi, _native
from ..errors import InvalidArgumentError, SpillwayError
from ._table import named
from ._tensors import DTensor, check_has_memory, has_dtensors, has_memory, is_partial, local, name_of

_Groups = list[dict[str, Any]]


class Measured(NamedTuple):
    """What this process has measured: the sum of the squares of the gradients that count here, and whether one has Inf or NaN."""

    total: float
    nonfinite: bool
    #: Name of the first parameter with such a gradient.
    culprit: str


def measured(rows: Any, groups: _Groups, process_group: Any, factor: float, kind: str) -> Measured:
    """Measures the gradients of this process, times `factor`.

    Args:
        rows: The table of the step.
        groups: The groups of the optimizer.
        process_group: The processes that sum their norms; None: this one.
        factor: Factor of the gradients.
        kind: Name of the optimizer, for messages."""
    total, nonfinite, culprit = 0.0, False, ""
    counts, number_of_rows = _counts(rows, groups, process_group, kind), len(rows.grads)
    for counted, run in _runs([True] * number_of_rows if counts is None else counts[:number_of_rows]):
        stats = _stats(rows, run, factor)
        if counted:
            total += stats.sum_squares
        if stats.nonfinite and not nonfinite:
            nonfinite, culprit = True, next(rows.name(at) for at in run if _stats(rows, range(at, at + 1), factor).nonfinite)
    for at, (number, index) in enumerate(rows.rest, number_of_rows):
        group = groups[number]
        grad = local(group["params"][index].grad)
        if not has_memory(grad):
            check_has_memory(grad, f"{name_of(group, number, index)}: its gradient")
        square = _square(grad) * factor**2
        if counts is None or counts[at]:
            total += square
        if square - square != 0 and not nonfinite:
            nonfinite, culprit = True, name_of(group, number, index)
    return Measured(total, nonfinite, culprit)


def _counts(rows: Any, groups: _Groups, process_group: Any, kind: str) -> list[bool] | None:
    """For each gradient, those of the rows first, whether it counts in this process; None: all do."""
    if process_group is not None and rows.counts[0] is process_group:
        return rows.counts[1]
    everything = [param for own in groups for param in own["params"]]
    if process_group is not None:
        parts = CountedParts(everything, process_group)
        places = [(groups[number], number, index) for number, index in [*rows.places, *rows.rest]]
        rows.counts = (
            process_group,
            [parts.count(getattr(own["params"][index], rows.grad_name), name_of(own, number, index)) for own, number, index in places],
        )
        return rows.counts[1]
    if has_dtensors(everything):
        raise InvalidArgumentError(
            f"{kind}: parameters are DTensors, so max_norm and skip_nonfinite need process_group, the group over which the parts are summed"
        )
    return None


def reduced(here: Measured, process_group: Any, kind: str) -> tuple[float, bool, bool]:
    """Square of the norm, whether a gradient has Inf or NaN, and whether a GradScaler has found one: in any process of the group."""
    return reducing(here, process_group, kind)()


def reducing(here: Measured, process_group: Any, kind: str) -> Callable[[], tuple[float, bool, bool]]:
    """Starts the reduction. The function that is returned waits for it, and returns what `reduced` does."""
    if process_group is None:
        return lambda: (here.total, here.nonfinite, False)
    summed = _summing([here.total, float(here.nonfinite), 0.0, 0.0], process_group)

    def result() -> tuple[float, bool, bool]:
        total, bad, found, refused = summed()
        if refused:
            raise SpillwayError(
                f"{kind}: another process of process_group refused this step, and its error says why; nothing was stepped here"
            )
        return total, bool(bad), bool(found)

    return result


class Verdict(NamedTuple):
    """What the norm says of a step.

    Attributes:
        skips: The step changes nothing, because a gradient has Inf or NaN.
        total: The sum of the squares of all gradients, Inf if a GradScaler has found Inf or NaN; None: no norm was asked for."""

    skips: bool
    total: float | None


def verdict(reduced: tuple[float, bool, bool], skip_nonfinite: bool, culprit: Callable[[], str], prefix: str = "") -> Verdict:
    """The verdict that follows from the result of `reduced`. What a GradScaler has found skips the step; Inf or NaN without that skips it
    or has it refused. `culprit` returns the name of a parameter with such a gradient, empty if another process has it.

    Raises:
        InvalidArgumentError: The step is refused; nothing was stepped."""
    total, nonfinite, found_inf = reduced
    if nonfinite and not (skip_nonfinite or found_inf):
        raise InvalidArgumentError(
            f"{prefix}the gradient of {culprit() or 'a parameter of another process'} has Inf or NaN; nothing was stepped. Pass "
            "skip_nonfinite=True to skip such steps"
        )
    return Verdict(nonfinite or found_inf, math.inf if found_inf else total)


def clip_factor(norm: float, max_norm: float) -> float:
    """The factor that clips gradients of this norm."""
    return min(1.0, max_norm / (norm + 1e-6))


def tell_found_inf(process_group: Any) -> None:
    """Tells the other processes, which wait in the reduction of their gradients, that a GradScaler has found Inf or NaN here."""
    if process_group is not None:
        _summing([0.0, 0.0, 1.0, 0.0], process_group)()


def tell_refusal(process_group: Any) -> None:
    """Tells the other processes that this one refuses its step, so that they do not wait for it."""
    if process_group is not None:
        with suppress(Exception):
            _summing([0.0, 0.0, 0.0, 1.0], process_group)()


def _summing(values: list[float], process_group: Any) -> Callable[[], list[float]]:
    # A group of NCCL alone does not sum host memory.
    devices = process_group._device_types
    sums = torch.tensor(values, dtype=torch.float64, device="cpu" if torch.device("cpu") in devices else devices[0])
    work = torch.distributed.all_reduce(sums, group=process_group, async_op=True)

    def summed() -> list[float]:
        work.wait()
        return sums.tolist()

    return summed


def _runs(values: Sequence[bool]) -> Iterator[tuple[bool, range]]:
    """The ranges of equal values."""
    first = 0
    for at in range(1, len(values) + 1):
        if at == len(values) or values[at] != values[first]:
            yield values[first], range(first, at)
            first = at


def _stats(table: Any, rows: range, factor: float) -> Any:
    """Sum of the squares and finiteness of the scaled gradients of some consecutive rows; one call of the library."""
    out = _abi.sized(_abi.StepStats)
    start = ctypes.addressof(table.entries) + rows.start * ctypes.sizeof(_abi.Tensor)
    try:
        _native.call("spw_grad_stats", start, len(rows), factor, ctypes.byref(out))
    except SpillwayError as error:
        raise named(error, lambda row: table.name(rows.start + row)) from None
    return out


def _square(grad: torch.Tensor) -> float:
    """Square of the norm of a gradient that torch steps."""
    if isinstance(grad, FakeTensor):
        # It has no values; torch.nn.utils.clip_grad_norm_ under FakeTensorMode does not ask for them either.
        return 0.0
    grad = grad.to_dense() if grad.is_sparse else grad
    return float(torch.linalg.vector_norm(grad, dtype=torch.complex128 if grad.is_complex() else torch.float64)) ** 2


def part_of(tensor: torch.Tensor) -> int:
    """The number of the part that this process holds; processes with the same part have the same number."""
    if not isinstance(tensor, DTensor):
        return 0
    mesh, number = tensor.device_mesh, 0
    for size, at, split in zip(mesh.shape, mesh.get_coordinate() or (), _split(tensor.placements)):
        if split:
            number = number * size + at
    return number


def group_of(params: Iterable[torch.Tensor], kind: str) -> Any:
    """The group of all processes, if the parameters are parts on meshes that have all of them; None if they are whole.

    Raises:
        InvalidArgumentError: A mesh has some of the processes only: the program knows over which the norm is."""
    meshes = [param.device_mesh for param in params if isinstance(param, DTensor)]
    if not meshes:
        return None
    if any(mesh.size() != torch.distributed.get_world_size() for mesh in meshes):
        raise InvalidArgumentError(
            f"{kind}: parameters are DTensors on a part of the processes, so max_norm and skip_nonfinite need process_group, the group "
            "over which the parts are summed"
        )
    return torch.distributed.group.WORLD


class CountedParts:
    """The parts of an optimizer's tensors in the processes of a group. Each part counts in one process, the first of those that hold it.

    Args:
        params: All parameters of the optimizer, in this process.
        group: The process group.

    Raises:
        InvalidArgumentError: The meshes of the parameters are over different processes, or the group has others than these."""

    def __init__(self, params: Iterable[torch.Tensor], group: Any):
        meshes = {id(param.device_mesh): param.device_mesh for param in params if isinstance(param, DTensor)}
        everyone = [set(mesh.mesh.flatten().tolist()) for mesh in meshes.values()]
        if any(ranks != everyone[0] for ranks in everyone):
            raise InvalidArgumentError(
                f"parameters are on meshes of different processes, {sorted(map(sorted, everyone))}, so their gradients have no "
                "common norm; place all parameters on meshes of the same processes, or leave out max_norm and skip_nonfinite"
            )
        self._rank, self._within = torch.distributed.get_rank(), torch.distributed.get_process_group_ranks(group)
        if everyone and not everyone[0].issuperset(self._within):
            raise InvalidArgumentError(
                f"process_group has the processes {_few(self._within)}, and the parameters are on a mesh of {_few(sorted(everyone[0]))}: "
                "the other processes may hold replicas, which would count twice, or further parts; pass the group of the mesh, such as "
                "mesh.get_group(), whose processes have one norm"
            )
        self._distributed = bool(meshes)
        self._known: dict[Any, bool] = {}

    def count(self, tensor: torch.Tensor, name: str) -> bool:
        """True if the part of a tensor that this process holds counts here.

        Raises:
            InvalidArgumentError: The processes hold terms of a sum, or the group lacks some of the parts."""
        if not isinstance(tensor, DTensor):
            return not self._distributed or self._within[:1] == [self._rank]
        if is_partial(tensor):
            raise InvalidArgumentError(
                f"the gradient of {name} is placed as {tensor.placements}: its processes hold terms of a sum, which have no "
                "norm; redistribute the gradient"
            )
        mesh, split = tensor.device_mesh, _split(tensor.placements)
        if (id(mesh), split) not in self._known:
            holders = self._holders(mesh.mesh, split)
            lacking = [part for part in product(*(range(size) for size, apart in zip(mesh.shape, split) if apart)) if part not in holders]
            if lacking:
                raise InvalidArgumentError(
                    f"{name} is placed as {tensor.placements} on {mesh}, and process_group has {len(holders)} of the "
                    f"{len(holders) + len(lacking)} parts; pass a group with all processes of the mesh"
                )
            self._known[id(mesh), split] = self._rank in holders.values()
        return self._known[id(mesh), split]

    def _holders(self, ranks: torch.Tensor, split: tuple[bool, ...]) -> dict[tuple[int, ...], int]:
        """The first process of the group that holds a part, by the part's place on the mesh."""
        holders: dict[tuple[int, ...], int] = {}
        places = dict(zip(ranks.flatten().tolist(), product(*map(range, ranks.shape))))
        for rank in self._within:
            if rank in places:
                holders.setdefault(tuple(at for at, apart in zip(places[rank], split) if apart), rank)
        return holders


def _few(ranks: list[int]) -> str:
    return str(ranks) if len(ranks) <= 16 else f"{str(ranks[:16])[:-1]}, ...] ({len(ranks)} processes)"


def _split(placements: Iterable[Any]) -> tuple[bool, ...]:
    """For each dimension of a mesh whether its processes hold different parts."""
    return tuple(not placement.is_replicate() for placement in placements)
