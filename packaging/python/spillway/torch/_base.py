"""The step that all classes share: its order, what a refused step leaves, and what is saved of an optimizer. _building.py has the table of
the parameters, _clipping.py the norm of the gradients, _torch_step.py the parameters that torch steps.

Order of a step: the closure, then everything that can be refused (other shapes, options out of range, shared memory, gradients with Inf or
NaN), then torch's step of the parameters that Spillway does not serve, then one call of the library. A refused step changes no parameter,
no state, no count and no gradient."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, cast

import torch

from .. import _log, _native
from ..errors import InvalidArgumentError, SpillwayError, UnsupportedError
from . import _split
from ._arguments import check_keywords, check_steps
from ._building import Building
from ._clipping import Clipping, Measured
from ._notes import heir_of, of_itself
from ._on_tier import OnTier
from ._pending import Pending
from ._precision import Precision, master_of
from ._rows import check_has_memory, local
from ._table import Table, named
from ._tier_table import TierTable
from ._undo import LastStep, RecordedStep

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
}
_KEPT = ("max_norm", "skip_nonfinite", "undo", "_precision")


def take_beyond(options: dict[str, Any]) -> dict[str, Any]:
    """Removes the keywords beyond torch from `options`, and returns all of them."""
    return {name: options.pop(name, default) for name, default in _BEYOND.items()}


class SpillwayOptimizer(Building, Clipping, OnTier):
    """Base of the optimizers of this package; not for direct use.

    Attributes:
        grad_norm: Global norm of the gradients at the last step, before clipping; None without `max_norm`.
        skipped: True if the last step changed nothing because a gradient had Inf or NaN."""

    skipped: bool

    def _keep(
        self,
        max_norm: float | None,
        process_group: Any,
        skip_nonfinite: bool,
        undo: bool,
        tier: Any,
        memory_budget: int | None,
        **precision: Any,
    ) -> None:
        check_keywords(type(self).__name__, max_norm, process_group, {"skip_nonfinite": skip_nonfinite, "undo": undo}, memory_budget)
        self.max_norm, self.process_group, self.skip_nonfinite, self.undo = max_norm, process_group, skip_nonfinite, undo
        self._precision = Precision.of(type(self).__name__, self.c_name == "adam", **precision)
        if undo and self._precision.master == "split":
            raise UnsupportedError(f'{type(self).__name__}: a step of split masters cannot be rolled back; pass undo=False or master="f32"')
        for param, state in self.state.items():
            self._precision.cast(param, state, state, list(self._keys))
        if tier is not None:
            self._open_tier(tier, memory_budget)
        elif memory_budget is not None:
            raise InvalidArgumentError(
                f"{type(self).__name__}: memory_budget is the memory for states on a tier; pass tier, or leave it out"
            )

    def __getstate__(self) -> dict[str, Any]:
        if self._tier is not None:
            raise TypeError(f"an {type(self).__name__} with states on a tier cannot be copied or pickled; save its state_dict()")
        self._settle()
        self._forget_low_bits()
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _KEPT}, "process_group": _Group(self.process_group)}

    def __copy__(self) -> Any:
        if self._precision.master == "split":
            raise TypeError(
                f'an {type(self).__name__} with master="split" has no shallow copy, which would share its parameters and states, while '
                "neither optimizer knew of the other's steps; use copy.deepcopy, or the optimizer itself"
            )
        make, arguments, state, *_ = cast(Any, self.__reduce_ex__(4))
        made = make(*arguments)
        made.__setstate__(state)
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(state.get("process_group"), _Group):
            state = {**state, "process_group": state["process_group"].group}
        super().__setstate__(state)
        self._table, self._last = None, None
        # torch's load_state_dict calls this too, without these attributes; loaded low bits belong to weights that may be loaded later.
        if "_precision" in state:
            self._note_versions()

    @of_itself
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class or of torch's, as torch does; states keep the dtypes of this optimizer."""
        tier = self._tier
        if tier is not None:
            return self._alone(tier, lambda: self._load_to_tier(state_dict, tier))
        self._settle()
        seen: list[dict[str, Any]] = []

        def see(_: Any, loaded: dict[str, Any]) -> None:
            check_steps(loaded, self._counted)
            seen.append(dict(loaded))

        with self._before_loading(see):
            super().load_state_dict(state_dict)
        self._precision.load(self, seen[0], list(self._keys))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters that have a gradient.

        Args:
            closure: Computes the loss again, before the step.

        Returns:
            The closure's result; None without a closure.

        Raises:
            InvalidArgumentError: Parameter, gradient and state do not fit each other; nothing was stepped.
            UnsupportedError: The combination of dtypes is not supported; nothing was stepped."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            own = self._itself()
            if own is None:
                own = heir_of(self)
            if own._tier is None:
                own._step_all()
            else:
                own._alone(own._tier, own._step_all)
        return loss

    @of_itself
    def rollback(self) -> None:
        """Restores the parameters and states of the time before the last step, bit for bit; needs `undo=True`. With `tier`, those of the
        last commit, also after a step that failed.

        Raises:
            InvalidArgumentError: There is no step to roll back, or its gradients, parameters or states were written to since."""
        tier = self._tier
        if tier is not None:
            return self._alone(tier, lambda: tier.rollback(self))
        self._settle()
        last = self._last
        if last is None:
            raise InvalidArgumentError(
                f"{type(self).__name__}.rollback: no step is recorded; construct the optimizer with undo=True, and "
                "call rollback() at most once after a step"
            )
        self._pending = pending = Pending(last.table, -1)
        try:
            last.rollback(pending.status)
        except SpillwayError:
            self._last = None
            raise
        finally:
            self._settle()
        last.close()

    @of_itself
    def master(self, param: torch.Tensor) -> torch.Tensor:
        """The float32 master of a parameter, of which the next step computes; for a DTensor, of the part that this process holds. Before
        the first step, and where the program has written to the parameter since, it has the values of the parameter.

        Returns:
            The state of `master="f32"`; a new tensor for a split master, for a master on a tier, and before the first step. The parameter
            itself if it has no master.

        Raises:
            InvalidArgumentError: The tensor is not a parameter of this optimizer."""
        if not any(param is own for group in self.param_groups for own in group["params"]):
            raise InvalidArgumentError(
                f"{type(self).__name__}.master: the tensor is not a parameter of this optimizer; pass one of its param_groups"
            )
        check_has_memory(local(param), f"{type(self).__name__}.master: the parameter")
        tier = self._tier
        if tier is not None:
            return self._alone(tier, lambda: tier.master(param))
        self._settle()
        if not self._precision.has_master(param):
            return param.detach()
        state, own = self.state.get(param), local(param).detach()
        if not state:
            return own.to(torch.float32)
        with torch.no_grad():
            self._forget_low_bits()
            kept = master_of(self._precision, param, state)
        return _split.join(own, kept) if self._precision.master == "split" else kept

    def _step_all(self) -> None:
        self._settle()
        self._last, self._pending, self.skipped = None, None, False
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found is not None and float(found):
            self._tell(found_inf=True)
            self.skipped = True
            return
        table: Any = None
        try:
            with self._telling():
                table = TierTable(self, self._tier) if self._tier is not None else self._current()
                factor = 1.0 if scale is None else 1.0 / float(scale)
                measured = self._measured(table, factor) if self._measures else None
                # The library checks its own tensors before it writes to one of them. Others must not be written to before it has.
                if self._rest or (measured is not None and self.process_group is not None):
                    self._check_all(table, factor)
            self._step_table(table, factor, measured)
        finally:
            if table is not None:
                table.release_grads()

    def _step_table(self, table: Table, factor: float, measured: Measured | None) -> None:
        if measured is not None:
            clip = self._clip(measured)
            if clip is None:
                self.skipped = True
                return
            factor *= clip
        if self._rest:
            self._step_rest(factor)
        if table.places:
            self._run(table, factor)

    def _check_all(self, table: Any, factor: float) -> None:
        """Raises the error of a step that the library or torch would refuse; changes nothing."""
        if self._rest:
            self._check_rest()
        if table.places:
            group, options = self._set_all_options(table, factor)
            try:
                table.check(self.c_name, options)
            except SpillwayError as error:
                raise named(error, table.row_name, group) from None

    def _set_all_options(self, table: Any, factor: float) -> tuple[int, Any]:
        """Writes the options of all rows. Returns those of one of them, for the call, and the number of its group."""
        written: dict[tuple[int, int], Any] = {}
        for (number, step, _), options in table.options.items():
            if (number, step) in written:
                # Rows with options of their own differ in the fields of rounding, which are the last ones.
                ctypes.memmove(ctypes.byref(options), ctypes.byref(written[number, step]), self._options_type.rounding.offset)
                continue
            written[number, step] = options
            group = self.param_groups[number]
            try:
                self._set_options(options, group, step + 1)
            except KeyError as error:
                raise InvalidArgumentError(f"param_groups[{number}] has no option {error}; set it; nothing was stepped") from None
            except (TypeError, ValueError, OverflowError, RuntimeError) as error:
                raise InvalidArgumentError(
                    f"param_groups[{number}]: an option is no number: {type(error).__name__}: {error}; set a number; nothing was stepped"
                ) from None
            options.grad_scale = -factor if group.get("maximize") else factor
        return number, options

    def _run(self, table: Table, factor: float) -> None:
        group, options = self._set_all_options(table, factor)
        last = self._recorded(table) if self.undo else None
        # Held before the call: a signal handler may raise after the library has stepped.
        self._pending = pending = Pending(table, 1, last)
        try:
            if last is not None:
                last.run(pending.status)
            else:
                table.run(self.c_name, options, pending.status)
            _native.check(pending.status[0])
            if not self._said:
                self._said = True
                _log.first_served(*self._log_name())
        except SpillwayError as error:
            raise named(error, table.row_name, group) from None
        finally:
            self._settle()

    def _log_name(self) -> tuple[str, str]:
        """The framework and the name in the log's line about the first step."""
        return "torch", type(self).__name__

    def _recorded(self, table: Table) -> RecordedStep:
        """The next step of a table, to be run, with a record for a rollback."""
        return LastStep(self, table, self.c_name)

    def _set_options(self, options: Any, group: dict[str, Any], step: int) -> None:
        """Writes the hyper-parameters of a group into the C options."""
        raise NotImplementedError


class _Group:
    """The process group of an optimizer that is copied: the copy has the same one."""

    def __init__(self, group: Any):
        self.group = group

    def __deepcopy__(self, _: Any) -> _Group:
        return self

    def __reduce__(self) -> Any:
        if self.group is not None:
            raise TypeError(
                "an optimizer with process_group cannot be pickled, because a process group belongs to its process; save the optimizer's "
                "state_dict(), or set optimizer.process_group = None first"
            )
        return _Group, (None,)
