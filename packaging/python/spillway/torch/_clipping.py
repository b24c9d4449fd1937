"""The norm of all gradients, and what follows from it: the factor that clips them, or that the step is skipped.

With a process group, the processes sum their norms; _parts.py has the rule which parts count where. Every process takes part in every
reduction, also one that refuses its step before it. All that a process can refuse by itself comes before the reduction."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .. import _abi, _native
from ..errors import InvalidArgumentError, SpillwayError
from ._parts import Parts
from ._rows import DTensor, check_has_memory, has_memory, local, name_of
from ._table import Table, named
from ._torch_step import TorchStep

_ALONE = nullcontext()


class Measured(NamedTuple):
    """What this process has measured: the sum of the squares of the gradients that count here, and whether one has Inf or NaN."""

    total: float
    nonfinite: bool
    #: Name of the first parameter with such a gradient.
    culprit: str


class Clipping(TorchStep):
    """Base of the optimizers of this package; not for direct use.

    Attributes:
        grad_norm: Global norm of the gradients at the last step, before clipping; None without `max_norm`."""

    max_norm: float | None
    process_group: Any
    skip_nonfinite: bool
    grad_norm: float | None

    @property
    def _measures(self) -> bool:
        """True if a step measures the gradients."""
        return self.max_norm is not None or self.skip_nonfinite

    def _measured(self, table: Table, factor: float) -> Measured:
        """Measures the gradients of this process."""
        total, nonfinite, culprit = 0.0, False, ""
        counts, number_of_rows = self._counts(table), len(table.grads)
        for counted, rows in _runs([True] * number_of_rows if counts is None else counts[:number_of_rows]):
            stats = _stats(table, rows, factor)
            if counted:
                total += stats.sum_squares
            if stats.nonfinite and not nonfinite:
                nonfinite, culprit = True, next(table.name(at) for at in rows if _stats(table, range(at, at + 1), factor).nonfinite)
        for at, (number, index) in enumerate(self._rest, number_of_rows):
            group = self.param_groups[number]
            grad = local(group["params"][index].grad)
            if not has_memory(grad):
                check_has_memory(grad, f"{name_of(group, number, index)}: its gradient")
            square = _square(grad) * factor**2
            if counts is None or counts[at]:
                total += square
            if square - square != 0 and not nonfinite:
                nonfinite, culprit = True, name_of(group, number, index)
        return Measured(total, nonfinite, culprit)

    def _counts(self, table: Table) -> list[bool] | None:
        """For each gradient, those of `table` first, whether it counts in this process; None: all do."""
        group = self.process_group
        if group is not None and table.counts[0] is group:
            return table.counts[1]
        everything = [param for own in self.param_groups for param in own["params"]]
        if group is not None:
            parts = Parts(everything, group)
            places = [(self.param_groups[number], number, index) for number, index in [*table.places, *self._rest]]
            table.counts = (
                group,
                [parts.count(getattr(own["params"][index], self._grad_name), name_of(own, number, index)) for own, number, index in places],
            )
            return table.counts[1]
        if any(isinstance(param, DTensor) for param in everything):
            raise InvalidArgumentError(
                f"{type(self).__name__}: parameters are DTensors, so max_norm and skip_nonfinite need process_group, the "
                "group over which the parts are summed"
            )
        return None

    def _clip(self, measured: Measured) -> float | None:
        """The factor that clips the gradients to `max_norm`; None to skip the step."""
        total, nonfinite, found_inf = self._reduced(measured)
        self.grad_norm = total**0.5
        if found_inf:
            self.grad_norm = float("inf")
            return None
        if nonfinite and self.skip_nonfinite:
            return None
        if nonfinite:
            raise InvalidArgumentError(
                f"the gradient of {measured.culprit or 'a parameter of another process'} has Inf or NaN; nothing was "
                "stepped. Pass skip_nonfinite=True to skip such steps"
            )
        return min(1.0, self.max_norm / (self.grad_norm + 1e-6)) if self.max_norm is not None else 1.0

    def _telling(self) -> AbstractContextManager[None]:
        """Tells the other processes of an error in the block, so that they do not wait for this one."""
        return _ALONE if self.process_group is None else self._telling_others()

    @contextmanager
    def _telling_others(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            with suppress(Exception):
                self._tell(refused=True)
            raise

    def _tell(self, found_inf: bool = False, refused: bool = False) -> None:
        """Tells the other processes, which wait in the reduction of their gradients, that this one does not step."""
        if self.process_group is not None and self._measures:
            self._summed([0.0, 0.0, float(found_inf), float(refused)])

    def _summed(self, values: list[float]) -> list[float]:
        sums = torch.tensor(values, dtype=torch.float64)
        torch.distributed.all_reduce(sums, group=self.process_group)
        return sums.tolist()

    def _reduced(self, measured: Measured) -> tuple[float, bool, bool]:
        """Square of the norm, whether a gradient has Inf or NaN, and whether a GradScaler has found one: in any process of the group."""
        if self.process_group is None:
            return measured.total, measured.nonfinite, False
        total, bad, found, refused = self._summed([measured.total, float(measured.nonfinite), 0.0, 0.0])
        if refused:
            raise SpillwayError(
                f"{type(self).__name__}: another process of process_group refused this step, and its error says why; nothing was "
                "stepped here"
            )
        return total, bool(bad), bool(found)


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
        _native.call("spw_grad_stats_all", start, len(rows), factor, ctypes.byref(out))
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
