"""The step that all classes share: which parameters Spillway steps, in which order, and what a refused step leaves.

Order of a step: the closure, then everything that can be refused (other shapes, shared memory, gradients with Inf or NaN), then torch's
step of the parameters that Spillway does not serve, then one call of the library. A refused step changes no parameter."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import torch

from .. import _abi, _native
from ..errors import InvalidArgumentError, SpillwayError, UnsupportedError
from . import _split
from ._arguments import check_keywords, check_steps
from ._on_tier import OnTier
from ._pending import Pending
from ._precision import LOW, Precision, master_of
from ._rows import CODES, DTensor, Row, check_memory, check_state, is_served, lay_out, local, name_of
from ._table import Table
from ._tier_table import TierTable
from ._undo import LastStep, RecordedStep

#: The keywords beyond torch, with their defaults.
_BEYOND: dict[str, Any] = {"max_norm": None, "process_group": None, "skip_nonfinite": False, "undo": False, "moment_dtype": None,
                           "moment_rounding": "nearest", "rounding_seed": 0, "master": None, "tier": None, "memory_budget": None}
_KEPT = ("max_norm", "process_group", "skip_nonfinite", "undo", "_precision")


def take_beyond(options: dict[str, Any]) -> dict[str, Any]:
    """Removes the keywords beyond torch from `options`, and returns all of them."""
    return {name: options.pop(name, default) for name, default in _BEYOND.items()}


class SpillwayOptimizer(OnTier):
    """Base of the optimizers of this package; not for direct use.

    Attributes:
        grad_norm: Global norm of the gradients at the last step, before clipping; None without `max_norm`.
        skipped: True if the last step changed nothing because a gradient had Inf or NaN."""

    # Set by each class: the name in the C ABI, its options struct, and the states with their fields in the C struct.
    c_name: str
    _options_type: Any
    _keys: dict[str, str]
    #: States have a step count.
    _counted = True
    #: Sparse gradients are left to torch's step.
    _sparse = False
    #: torch's class, whose step serves the other parameters.
    _torch_class: type[torch.optim.Optimizer]
    #: Attribute of a parameter that holds its gradient.
    _grad_name = "grad"
    #: Why this optimizer cannot leave a parameter to torch's step, and what to do.
    _rest_words = ("is stepped by torch, which cannot roll a step back and keeps no moments or masters of other dtypes; leave out undo, "
                   "moment_dtype and master, or pass contiguous CPU parameters and gradients of 16 or 32 bits")

    max_norm: float | None = None
    process_group: Any = None
    skip_nonfinite = False
    grad_norm: float | None = None
    skipped = False
    _step_supports_amp_scaling = True
    _rest: list[tuple[int, int]] = []
    _flags: list[bool] = []
    param_groups: list[dict[str, Any]]

    def _keep(self, max_norm: float | None, process_group: Any, skip_nonfinite: bool, undo: bool, tier: Any, memory_budget: int | None,
              **precision: Any) -> None:
        check_keywords(type(self).__name__, max_norm, process_group, {"skip_nonfinite": skip_nonfinite, "undo": undo}, memory_budget)
        self.max_norm, self.process_group, self.skip_nonfinite, self.undo = max_norm, process_group, skip_nonfinite, undo
        self._precision = Precision.of(type(self).__name__, self.c_name == "adam", **precision)
        if undo and self._precision.master == "split":
            raise UnsupportedError(f"{type(self).__name__}: a step of split masters cannot be rolled back; pass undo=False or master=\"f32\"")
        for param, state in self.state.items():
            self._precision.cast(param, state, state, list(self._keys))
        if tier is not None:
            self._open_tier(tier, memory_budget)
        elif memory_budget is not None:
            raise InvalidArgumentError(f"{type(self).__name__}: memory_budget is the memory for states on a tier; pass tier, or leave it out")
        # torch's __init__ sets this for fused=True only; Spillway always applies the scale of a GradScaler itself.
        self._step_supports_amp_scaling = True

    def __getstate__(self) -> dict[str, Any]:
        if self._tier is not None:
            raise TypeError(f"an {type(self).__name__} with states on a tier cannot be copied or pickled; save its state_dict()")
        self._settle()
        self._forget_low_bits()
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _KEPT}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._table, self._last = None, None
        # torch's load_state_dict calls this too, without these attributes; loaded low bits belong to weights that may be loaded later.
        if "_precision" in state:
            self._note_versions()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class or of torch's, as torch does; states keep the dtypes of this optimizer."""
        self._settle()
        if self._tier is not None:
            self._load_to_tier(state_dict, self._tier)
            return
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
            self._step_all()
        return loss

    def rollback(self) -> None:
        """Restores the parameters and states of the time before the last step, bit for bit; needs `undo=True`. With `tier`, those of the last
        commit, also after a step that failed.

        Raises:
            InvalidArgumentError: There is no step to roll back, or its gradients, parameters or states were written to since."""
        self._settle()
        if self._tier is not None:
            self._tier.rollback(self)
            return
        last = self._last
        if last is None:
            raise InvalidArgumentError(f"{type(self).__name__}.rollback: no step is recorded; construct the optimizer with undo=True, and "
                                       "call rollback() at most once after a step")
        self._pending = pending = last.pending_rollback()
        try:
            last.rollback(pending.status)
        except SpillwayError:
            self._last = None
            raise
        finally:
            self._settle()
        last.close()

    def master(self, param: torch.Tensor) -> torch.Tensor:
        """The float32 master of a parameter, of which the next step computes; for a DTensor, of the part that this process holds. Before the
        first step, and where the program has written to the parameter since, it has the values of the parameter.

        Returns:
            The state of `master="f32"`; a new tensor for a split master, for a master on a tier, and before the first step. The parameter
            itself if it has no master.

        Raises:
            InvalidArgumentError: The tensor is not a parameter of this optimizer."""
        if not any(param is own for group in self.param_groups for own in group["params"]):
            raise InvalidArgumentError(f"{type(self).__name__}.master: the tensor is not a parameter of this optimizer; pass one of its param_groups")
        self._settle()
        if self._tier is not None:
            return self._tier.master(param)
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
        try:
            table: Any = TierTable(self, self._tier) if self._tier is not None else self._current()
        except Exception:
            self._tell(refused=True)
            raise
        try:
            self._step_table(table, 1.0 if scale is None else 1.0 / float(scale))
        finally:
            table.release_grads()

    @property
    def _measures(self) -> bool:
        """True if a step measures the gradients."""
        return self.max_norm is not None or self.skip_nonfinite

    def _step_table(self, table: Table, factor: float) -> None:
        if self._measures:
            clip = self._clip(table, factor)
            if clip is None:
                self.skipped = True
                return
            factor *= clip
        if self._rest:
            self._step_rest(factor)
        if table.places:
            self._run(table, factor)

    def _current(self) -> Table:
        """The table of the present tensors."""
        table = self._table
        flags = [_is_torchs(group) for group in self.param_groups]
        # Another default device must not apply to the table.
        with torch._C.DisableTorchFunction():
            if table is None or flags != self._flags or not table.refresh() or self._rest_changed():
                self._forget_low_bits()
                table = self._table = None
                table = self._build()
                if not table.refresh():
                    raise SpillwayError(f"{type(self).__name__}: parameters, gradients or states change while a step reads them")
                # In this order: a signal handler may raise in between.
                self._flags = flags
                self._table = table
        return table

    def _build(self) -> Table:
        rows, rest = [], []
        for number, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                grad = getattr(param, self._grad_name, None)
                if grad is None:
                    continue
                name = name_of(group, number, index)
                self._check_layout(grad, name)
                if _is_torchs(group) or not is_served(param, grad, name):
                    # States lie in the order of the parameters, as torch creates them.
                    self.state[param]
                    rest.append((number, index))
                else:
                    rows.append(self._row(number, index, name))
        if rest and (self.undo or self._precision.beyond_torch):
            number, index = rest[0]
            raise UnsupportedError(f"{name_of(self.param_groups[number], number, index)} {self._rest_words}")
        check_memory(rows, self.param_groups)
        self._rest = rest
        return Table(self, rows, self._keys, self._new_options, own_options=self._precision.stochastic,
                     master=self._precision.master_state[0], grad_name=self._grad_name)

    def _check_layout(self, grad: torch.Tensor, name: str) -> None:
        """Raises an error for gradients that torch's class refuses too, so that it names the parameter."""
        if not self._sparse and local(grad).layout is not torch.strided:
            raise UnsupportedError(f"{name}: {type(self).__name__} does not support sparse gradients, and this one is {local(grad).layout}; pass "
                                   "dense gradients, or leave the parameter to torch.optim.SparseAdam")

    def _row(self, number: int, index: int, name: str) -> Row:
        group = self.param_groups[number]
        param = group["params"][index]
        states, master = self._states_of(group, param, name), None
        if self._precision.has_master(param):
            key, dtype = self._precision.master_state
            if key == LOW and param.dtype is not torch.bfloat16:
                raise UnsupportedError(f"{name} is {param.dtype}, and master=\"split\" is for torch.bfloat16; pass master=\"f32\", or cast the "
                                       "parameter")
            lay_out(param, self.state[param], [key])
            master = master_of(self._precision, param, self.state[param])
            check_state(local(param), master, key, name, (dtype,))
        return Row(number, index, local(param), local(getattr(param, self._grad_name)), states, master, self._copy_of(param))

    def _copy_of(self, param: torch.Tensor) -> torch.Tensor | None:
        """The 16-bit tensor to which a step of a float32 parameter also writes."""
        return None

    def _new_options(self, place: tuple[int, int]) -> Any:
        options = _abi.sized(self._options_type)
        if self._precision.stochastic:
            number, index = place
            before = sum(len(group["params"]) for group in self.param_groups[:number])
            param = self.param_groups[number]["params"][index]
            # Parts of one parameter in several processes must not get the same random bits.
            rank = torch.distributed.get_rank() if isinstance(param, DTensor) else 0
            options.rounding = _abi.ROUNDINGS["stochastic"]
            options.rounding_seed = (self._precision.seed + (rank << 32) + before + index) % 2**64
        return options

    def _states_of(self, group: dict[str, Any], param: torch.Tensor, name: str) -> tuple[torch.Tensor, ...]:
        state = self.state[param]
        if not state:
            # Made apart: a signal handler that raises leaves all states or none.
            new: dict[str, Any] = {}
            self._new_state(group, param, new)
            state.update(new)
        lay_out(param, state, list(self._keys))
        try:
            states = tuple(local(state[key]) for key in self._keys)
        except KeyError as error:
            raise InvalidArgumentError(f"{name}: its state lacks {error}; load the state of this optimizer, or delete "
                                       "optimizer.state[parameter]") from None
        precision = self._precision
        dtypes = (precision.of_moments(param),) if precision.beyond_torch else (torch.float32, param.dtype)
        for key, tensor in zip(self._keys, states):
            check_state(local(param), tensor, key, name, dtypes)
        return states

    def _zeros(self, param: torch.Tensor) -> torch.Tensor:
        """A moment at the start."""
        return torch.zeros_like(param, dtype=self._precision.of_moments(param), memory_format=torch.preserve_format)

    def _rest_changed(self) -> bool:
        """True if a parameter that torch stepped can be stepped by Spillway now."""
        for number, index in self._rest:
            group = self.param_groups[number]
            param = group["params"][index]
            if not _is_torchs(group) and is_served(param, param.grad, name_of(group, number, index)):
                return True
        return False

    def _run(self, table: Table, factor: float) -> None:
        written: dict[tuple[int, int], Any] = {}
        for (number, step, _), options in table.options.items():
            if (number, step) in written:
                # Rows with options of their own differ in the fields of rounding, which are the last ones.
                ctypes.memmove(ctypes.byref(options), ctypes.byref(written[number, step]), self._options_type.rounding.offset)
                continue
            written[number, step] = options
            self._set_options(options, self.param_groups[number], step + 1)
            options.grad_scale = -factor if self.param_groups[number].get("maximize") else factor
        last = self._recorded(table) if self.undo else None
        # Held before the call: a signal handler may raise after the library has stepped.
        self._pending = pending = Pending(table, 1, last)
        try:
            if last is not None:
                last.run(pending.status)
            else:
                table.run(self.c_name, options, pending.status)
            _native.check(pending.status[0])
        except SpillwayError as error:
            raise _named(error, table) from None
        finally:
            self._settle()

    def _recorded(self, table: Table) -> RecordedStep:
        """The next step of a table, to be run, with a record for a rollback."""
        return LastStep(self, table)

    def _clip(self, table: Table, factor: float) -> float | None:
        """The factor that clips the gradients to `max_norm`; None to skip the step."""
        total, nonfinite, culprit = 0.0, False, ""
        out, function = _abi.sized(_abi.StepStats), _native.library().spw_grad_stats
        for at, (grad, entry) in enumerate(zip(table.grads, table.entries)):
            _native.check(function(entry.grad, CODES[grad.dtype], entry.n, factor, ctypes.byref(out)))
            total += out.sum_squares
            if out.nonfinite and not nonfinite:
                nonfinite, culprit = True, table.name(at)
        for number, index in self._rest:
            group = self.param_groups[number]
            grad = local(group["params"][index].grad)
            square = float(torch.linalg.vector_norm(grad.to_dense() if grad.is_sparse else grad, dtype=torch.float64)) ** 2 * factor ** 2
            total += square
            if square - square != 0 and not nonfinite:
                nonfinite, culprit = True, name_of(group, number, index)
        total, nonfinite, found_inf = self._reduced(total, nonfinite)
        self.grad_norm = total ** 0.5
        if found_inf:
            self.grad_norm = float("inf")
            return None
        if nonfinite and self.skip_nonfinite:
            return None
        if nonfinite:
            raise InvalidArgumentError(f"the gradient of {culprit or 'a parameter of another process'} has Inf or NaN; nothing was stepped. "
                                       "Pass skip_nonfinite=True to skip such steps")
        return min(1.0, self.max_norm / (self.grad_norm + 1e-6)) if self.max_norm is not None else 1.0

    def _tell(self, found_inf: bool = False, refused: bool = False) -> None:
        """Tells the other processes, which wait in the reduction of their gradients, that this one does not step."""
        if self.process_group is not None and self._measures:
            self._summed([0.0, 0.0, float(found_inf), float(refused)])

    def _summed(self, values: list[float]) -> list[float]:
        sums = torch.tensor(values, dtype=torch.float64)
        torch.distributed.all_reduce(sums, group=self.process_group)
        return sums.tolist()

    def _reduced(self, total: float, nonfinite: bool) -> tuple[float, bool, bool]:
        """Square of the norm, whether a gradient has Inf or NaN, and whether a GradScaler has found one: in any process of the group."""
        if self.process_group is None:
            if any(isinstance(param, DTensor) for group in self.param_groups for param in group["params"]):
                raise InvalidArgumentError(f"{type(self).__name__}: parameters are DTensors, so max_norm and skip_nonfinite need "
                                           "process_group, the group over which the parts are summed")
            return total, nonfinite, False
        total, bad, found, refused = self._summed([total, float(nonfinite), 0.0, 0.0])
        if refused:
            raise SpillwayError(f"{type(self).__name__}: another process of process_group refused this step, and its error says why; nothing was "
                                "stepped here")
        return total, bool(bad), bool(found)

    def _step_rest(self, factor: float) -> None:
        """torch's step of the parameters that Spillway does not serve."""
        groups = [{**group, "params": [group["params"][index] for at, index in self._rest if at == number]}
                  for number, group in enumerate(self.param_groups)]
        groups = [group for group in groups if group["params"]]
        if factor != 1.0:
            for group in groups:
                for param in group["params"]:
                    # A zero tensor has no memory to write to, and stays zero.
                    if not param.grad._is_zerotensor():
                        param.grad.mul_(factor)
        hidden: dict[str, Any] = {name: self.__dict__.pop(name) for name in ("grad_scale", "found_inf") if name in self.__dict__}
        whole, self.param_groups = self.param_groups, groups
        try:
            self._torch_step()
        finally:
            self.param_groups = whole
            self.__dict__.update(**hidden)

    def _torch_step(self) -> None:
        step = self._torch_class.step
        # The hooks of this optimizer have run already.
        step = step.__wrapped__ if getattr(step, "hooked", False) else step
        step(self)

    def _new_state(self, group: dict[str, Any], param: torch.Tensor, state: dict[str, Any]) -> None:
        """Creates the states of a parameter, as torch's class does."""
        raise NotImplementedError

    def _set_options(self, options: Any, group: dict[str, Any], step: int) -> None:
        """Writes the hyper-parameters of a group into the C options."""
        raise NotImplementedError


def _is_torchs(group: dict[str, Any]) -> bool:
    """True if only torch has what a group asks for."""
    return bool(group.get("amsgrad") or group.get("capturable") or group.get("differentiable"))


def _named(error: SpillwayError, table: Table) -> SpillwayError:
    """The error with names of parameters for the numbers of rows."""
    message = re.sub(r"tensors\[(\d+)\]", lambda match: table.row_name(int(match[1])), str(error))
    return type(error)(message, error.status)
