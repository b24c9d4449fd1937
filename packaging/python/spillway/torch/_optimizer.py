"""The optimizer that all classes share: the order of a step, what a refused step leaves, and what is saved of an optimizer. Its states have
a home: host memory or a tier.

Order of a step: the closure, then everything that can be refused (other shapes, options out of range, shared memory, gradients with Inf or
NaN), then torch's step of the parameters that Spillway does not serve, then one call of the library. A refused step changes no parameter,
no state, no count and no gradient."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import weakref
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast, overload

import torch
from torch.optim.optimizer import ParamsT

from .. import _log
from .._commit import Commit
from .._groups import Rule
from .._snapshot import Snapshot
from ..errors import InvalidArgumentError, SpillwayError
from . import _norm
from ._home import Home, Memory
from ._keywords import DEFAULTS, Beyond, ConstructorSignature, check_keywords, take_beyond
from ._loading import before_loading
from ._offload.memory import Memory as MemoryBytes
from ._states import Precision, check_masters
from ._table import named
from ._tensors import check_has_memory, lasting, local, without_gradients
from ._tier import TierHome
from ._torch_step import Trial, step_rest

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Self = TypeVar("_Self", bound="SpillwayOptimizer")
#: What a copy of an optimizer has too, beside its states and its home.
_KEPT = ("max_norm", "skip_nonfinite", "undo")
#: The keywords beyond torch that a repr shows even if they have their defaults.
_ALWAYS_TOLD = ("max_norm", "master", "tier")
#: What a step or the tier tells of itself.
_TOLD = frozenset(("grad_norm", "skipped", "resumed_step", "payload"))
#: Arguments that older versions of torch lack, with their defaults. They are passed only if they are set.
_NEWER = {"decoupled_weight_decay": False, "fused": None}


def of_itself(method: _Method) -> _Method:
    """A method that runs on the optimizer itself if a wrapper calls it with the wrapper in its place. `lasting` holds within it."""

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        own = self._itself()
        return lasting(method)(heir_of(self) if own is None else own, *arguments, **options)

    return cast(_Method, call)


def heir_of(other: Any) -> Any:
    """An object with the attributes of an optimizer that was deleted: it takes the place of the optimizer if the attributes are the same
    dict. A copy of that dict does not have what the optimizer noted after the copy was made."""
    if id(other.__dict__) != other._attributes:
        raise InvalidArgumentError(
            f"{type(other).__name__}: this object has a copy of the attributes of an optimizer that was deleted; keep the "
            "optimizer as long as the object is used"
        )
    other._itself = weakref.ref(other)
    return other


def scaler_of(optimizer: Any) -> tuple[float, bool]:
    """Factor of the gradients that a GradScaler has set, and whether it found Inf or NaN."""
    scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    return 1.0 if scale is None else 1.0 / float(scale), found is not None and bool(found)


class SpillwayOptimizer(torch.optim.Optimizer):
    """Base of the optimizers of this package; not for direct use.

    Attributes:
        grad_norm: Global norm of the gradients at the last step, before clipping; None without `max_norm`.
        skipped: True if the last step changed nothing because a gradient had Inf or NaN.
        resumed_step: With `tier`, the number of the commit that the optimizer has resumed; None if it began anew.
        payload: With `tier`, the bytes that were given to this commit."""

    max_norm: float | None
    process_group: Any
    skip_nonfinite: bool
    #: A step is recorded, so that it can be rolled back.
    undo: bool
    grad_norm: float | None
    skipped: bool
    resumed_step: int | None
    payload: bytes
    state: Any
    param_groups: list[dict[str, Any]]

    #: What each class brings to a step.
    _rule: Rule
    #: torch's class, whose step serves the other parameters.
    _torch_class: type[torch.optim.Optimizer]
    #: The keywords beyond torch that can be set later.
    _settable: tuple[str, ...] = ("max_norm", "process_group", "skip_nonfinite", "undo")
    #: The home of states that are not on a tier.
    _memory: type[Memory] = Memory
    #: The home of this optimizer's states.
    _home: Home
    #: The log has a line about the first step of this class.
    _said: bool
    #: This optimizer, for calls through a wrapper.
    _itself: Callable[[], Any]
    #: The identity of this optimizer's `__dict__`.
    _attributes: int

    #: Tools that ask for the arguments of the class would find those of `__new__`.
    __signature__: Any = ConstructorSignature()

    def __new__(cls: type[_Self], *_: Any, **__: Any) -> _Self:
        # Wrappers inherit from the class of the optimizer that they wrap, and look in it for the attributes that they lack. An attribute of
        # the class would be found before that of the wrapped optimizer.
        made = super().__new__(cls)
        made.__dict__.update(
            {
                "undo": False,
                "max_norm": None,
                "process_group": None,
                "skip_nonfinite": False,
                "grad_norm": None,
                "skipped": False,
                "resumed_step": None,
                "payload": b"",
                "_home": cls._memory(cls.__name__, cls._rule, Precision()),
                "_trial": Trial(),
                "_itself": weakref.ref(made),
                "_attributes": id(made.__dict__),
                "_said": False,
            }
        )
        return made

    def _begin(self, params: ParamsT, beyond: Beyond, **arguments: Any) -> None:
        """Constructs the optimizer with torch's arguments. Keywords that neither Spillway nor this version of torch has are among `beyond`,
        and torch refuses them."""
        further: dict[str, Any] = {**beyond}
        own = take_beyond(further)
        given = {name: value for name, value in arguments.items() if name not in _NEWER or value is not _NEWER[name]}
        self._torch_class.__init__(self, params, **given, **further)
        self._keep(**own)

    @lasting
    def _keep(
        self,
        max_norm: float | None,
        process_group: Any,
        skip_nonfinite: bool,
        undo: bool,
        tier: Any,
        host_memory: int | Literal["auto"] | None,
        overlap: bool,
        **precision: Any,
    ) -> None:
        """Takes the keywords beyond torch."""
        name, rule = type(self).__name__, self._rule
        flags = {"skip_nonfinite": skip_nonfinite, "undo": undo, "overlap": overlap}
        check_keywords(name, max_norm, process_group, flags, host_memory)
        self.__dict__.update(max_norm=max_norm, process_group=process_group, skip_nonfinite=skip_nonfinite, undo=undo)
        dtypes = Precision.of(name, rule.c_name == "adam", **precision)
        for param, state in self.state.items():
            dtypes.cast(param, state, state, list(dtypes.rule_of(rule).keys))
        if tier is not None:
            groups, states = self.param_groups, self.state
            self._home = TierHome(name, rule, dtypes, undo, groups, states, tier, host_memory, overlap)
            self._tell(resumed_step=self._home.resumed_step, payload=self._home.payload)
        elif host_memory is not None:
            raise InvalidArgumentError(
                f"{name}: host_memory is a limit for states on a tier, and of spillway.torch.offload; pass tier, or leave it out"
            )
        elif overlap:
            raise InvalidArgumentError(
                f"{name}: overlap starts a step over states on a tier during backward; pass tier, or use spillway.torch.offload, "
                "which does it for states in host memory"
            )
        else:
            self._home = self._memory(name, rule, dtypes)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in DEFAULTS:
            self._set_keyword(name, value)
        elif name in _TOLD:
            raise AttributeError(f"{type(self).__name__}.{name} is what the optimizer tells of itself, and setting it would have no effect")
        else:
            super().__setattr__(name, value)

    def _set_keyword(self, name: str, value: Any) -> None:
        """Sets a keyword beyond torch for the next steps, of the optimizer itself if a wrapper gets the value."""
        kind, own = type(self).__name__, self._itself()
        if name not in self._settable:
            raise AttributeError(f"{kind}.{name} is fixed at construction; pass {name} to a new {kind}")
        flags = {name: value} if isinstance(DEFAULTS[name], bool) else {}
        check_keywords(kind, **{"max_norm": None, "process_group": None, **({} if flags else {name: value})}, flags=flags, host_memory=None)
        if name == "undo" and value:
            self._home.check_undo()
        for one in (self,) if own is None else (self, own):
            one.__dict__[name] = value

    def _tell(self, **facts: Any) -> None:
        """Sets what the program reads, and cannot set."""
        self.__dict__.update(facts)

    def __repr__(self) -> str:
        try:
            own, (head, rest) = self._itself() or self, super().__repr__().split("\n", 1)
            precision = own._home.precision
            told = {name: getattr(own, name) for name in ("max_norm", "process_group", "skip_nonfinite", "undo")}
            told |= {"moment_dtype": precision.moment_dtype, "moment_rounding": precision.rounding}
            told |= {"rounding_seed": precision.seed, "master": precision.master, "tier": None, **own._home.facts()}
        except Exception:
            # Half constructed, or the wrapper of an optimizer that was deleted.
            return f"<{type(self).__name__} not constructed>"
        lines = [f"    {name}: {value}" for name, value in told.items() if name in _ALWAYS_TOLD or value != DEFAULTS.get(name)]
        return "\n".join([head, *lines, rest])

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
        own = self._itself()
        if own is None:
            own = heir_of(self)
        without_gradients(lambda: own._home.alone(lambda: own._home.together(own._step_once)))
        return loss

    def _step_once(self) -> None:
        home, groups, rows = self._home, self.param_groups, None
        self._tell(skipped=False)
        measures = self._measures
        # The processes that wait for this one's norm.
        others = self.process_group if measures else None
        home.begin(groups, self.undo)
        try:
            try:
                factor, found_inf = scaler_of(self)
                if found_inf:
                    _norm.tell_found_inf(others)
                    self._tell(skipped=True)
                    home.skipped()
                    return
                home.scale = factor
                rows = home.rows(groups, self.state)
                measured = _norm.measured(rows, groups, self.process_group, factor, type(self).__name__) if measures else None
                # The library checks its own tensors before it writes to one of them. Others must not be written to before it has.
                if rows.rest or others is not None:
                    self._check(rows, factor)
            except Exception:
                _norm.tell_refusal(others)
                raise
            clip = 1.0 if measured is None else self._clip(measured)
            if clip is None:
                self._tell(skipped=True)
                home.skipped()
                return
            factor *= clip
            if rows.rest:
                step_rest(rows.rest, groups, self.state, factor, self._step_as_torch)
            if rows.places:
                group, options = self._put_options(rows, factor)
                try:
                    home.step(rows, options)
                except SpillwayError as error:
                    raise named(error, rows.row_name, group) from None
            else:
                home.passed()
        finally:
            if rows is not None:
                rows.release_grads()
        if rows.places and not self._said:
            self._said = True
            _log.first_served(*self._log_name())

    def _check(self, rows: Any, factor: float) -> None:
        """Raises the error of a step that the library or torch would refuse; changes nothing."""
        if rows.rest:
            self._trial.check(rows.rest, self.param_groups, self.state, self._rule, type(self).__name__, self._step_as_torch)
        if rows.places:
            group, options = self._put_options(rows, factor)
            try:
                rows.check(options)
            except SpillwayError as error:
                raise named(error, rows.row_name, group) from None

    def _clip(self, measured: _norm.Measured) -> float | None:
        """The factor that clips the gradients to `max_norm`; None to skip the step."""
        reduced = _norm.reduced(measured, self.process_group, type(self).__name__)
        self._tell(grad_norm=math.sqrt(reduced[0]))
        skips, total = _norm.verdict(reduced, self.skip_nonfinite, lambda: measured.culprit)
        if skips:
            # Inf, if a GradScaler has found it.
            self._tell(grad_norm=math.sqrt(cast(float, total)))
            return None
        return _norm.clip_factor(cast(float, self.grad_norm), self.max_norm) if self.max_norm is not None else 1.0

    def _put_options(self, rows: Any, factor: float) -> tuple[int, Any]:
        """Writes the options of all rows. Returns those of one of them, for the call, and the number of its group."""
        rule, written = self._rule, dict[tuple[int, int], Any]()
        for (number, step, _), options in rows.options.items():
            if (number, step) in written:
                # Rows with options of their own differ in the fields of rounding, which are the last ones.
                ctypes.memmove(ctypes.byref(options), ctypes.byref(written[number, step]), rule.options_type.rounding.offset)
                continue
            written[number, step] = options
            rule.put_options(options, self.param_groups[number], number, step, factor)
        return number, options

    def _log_name(self) -> tuple[str, str]:
        """The framework and the name in the log's line about the first step."""
        return "torch", type(self).__name__

    @property
    def _measures(self) -> bool:
        """True if a step measures the gradients."""
        return self.max_norm is not None or self.skip_nonfinite

    def _step_as_torch(self, groups: list[dict[str, Any]], states: Any) -> None:
        """torch's step of this optimizer with other groups and states, without the attributes of a GradScaler."""
        other = type(self).__new__(type(self))
        other.__dict__.update(
            {**self.__dict__, "param_groups": groups, "state": states, "_itself": other._itself, "_attributes": other._attributes}
        )
        for name in ("grad_scale", "found_inf"):
            other.__dict__.pop(name, None)
        other._torch_step()

    def _torch_step(self) -> None:
        step = self._torch_class.step
        # The hooks of this optimizer have run already.
        step = step.__wrapped__ if getattr(step, "hooked", False) else step
        step(self)

    @of_itself
    def rollback(self) -> None:
        """Restores the parameters and states of the time before the last step, bit for bit; needs `undo=True`. With `tier`, those of the
        last commit, also after a step that failed; parameters without states on the tier keep their values. Every process of a run calls
        it.

        Raises:
            InvalidArgumentError: There is no step to roll back, or its gradients, parameters or states were written to since."""
        home = self._home
        home.alone(lambda: home.rollback(self.state))

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
        check_masters(self.state.get(param) or {}, f"the parameter of {type(self).__name__}.master")
        home = self._home
        return home.alone(lambda: home.master(param, self.state))

    @of_itself
    def memory(self) -> MemoryBytes:
        """Bytes of the states in host memory and on devices now, by kind. With `tier`: those of the buffers through which states move, and
        of copies of gradients and weights."""
        return self._home.memory(self.state)

    @overload
    def commit(self, step: int | None = ..., payload: bytes = ..., wait: Literal[True] = ...) -> None: ...

    @overload
    def commit(self, step: int | None = ..., payload: bytes = ..., *, wait: Literal[False]) -> Commit: ...

    @of_itself
    def commit(self, step: int | None = None, payload: bytes = b"", wait: bool = True) -> Commit | None:
        """Makes the states on the tier durable. An optimizer that is constructed on the same tier later begins with them.

        Args:
            step: Number of the commit; None: the number of steps that were done.
            payload: Bytes that `payload` of the resumed optimizer has, up to about 1 MB.
            wait: False: return at once. Threads of the library commit the states as they are now, beside the next steps. The next commit,
                rollback, snapshot, restore or close waits for the end, and the next commit or close tells of an error that wait() has not
                raised. Every process of a run calls it.

        Returns:
            None, or with `wait=False` the Commit that is in flight.

        Raises:
            InvalidArgumentError: The optimizer has no tier. Or the processes have different steps, or pass different arguments; nothing was
                committed.
            IoError: A path failed; the last commit is intact.
            TierError: Another process failed. If the step was committed in some processes only, every further call raises this error in all
                of them: construct the optimizers again."""
        home = self._home
        return home.alone(lambda: home.commit(self.state, step, payload, wait))

    @of_itself
    def snapshot(self, directory: str | os.PathLike[str], *, bytes_per_second: int = 0, keep: int | None = None) -> Snapshot:
        """Starts to write the last commit of the tier to a new directory, and returns at once. Steps and commits continue meanwhile.

        restore() returns to it. `spillway.Tier.import_from` reads the directory into another tier, on which an optimizer then begins with
        these states.

        Args:
            directory: The directory; in a run of several processes each one writes `rank-N` in it.
            bytes_per_second: Limit of the speed of this process; 0: no limit.
            keep: The snapshot's wait() removes all but this number of finished snapshots of this optimizer beside it, those written last;
                None: none.

        Returns:
            A snapshot; its wait() returns when the directory is complete.

        Raises:
            InvalidArgumentError: The optimizer has no tier.
            NoStateError: Nothing was committed.
            IoError: The directory exists."""
        home = self._home
        return home.alone(lambda: home.snapshot(directory, bytes_per_second, keep))

    @of_itself
    def restore(self, directory: str | os.PathLike[str]) -> int:
        """Returns to the states of a finished snapshot, and commits them. The parameters take the values of their masters, and `payload`
        is that of the snapshot. Every process of a run calls it. Steps since the last commit are committed first, with an empty payload.

        Args:
            directory: As it was given to snapshot().

        Returns:
            The step of the snapshot.

        Raises:
            NoStateError: The snapshot is not finished; nothing was changed.
            InvalidArgumentError: It is one of other parameters; nothing was changed.
            CorruptError: A file is missing or truncated; nothing was changed. Or its content is damaged; states and parameters are those of
                the last commit."""
        home = self._home
        step = home.alone(lambda: home.restore(self.state, directory))
        self._tell(payload=home.payload)
        return step

    @of_itself
    def close(self) -> None:
        """Closes the tier, whose lock and memory are then free; states since the last commit are lost. Does nothing without a tier."""
        self._home.close()

    @of_itself
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, as torch does; with `tier`, all groups must be passed at construction."""
        self._home.check_new_group()
        super().add_param_group(param_group)

    @of_itself
    def state_dict(self) -> dict[str, Any]:
        """torch's state dict. With `tier`, all states are read, subgroup by subgroup, between two steps of other threads; see docs/torch.md
        for the memory."""
        whole = super().state_dict

        def save() -> dict[str, Any]:
            own, self.state = self.state, self._home.saved(self.state)
            try:
                return whole()
            finally:
                self.state = own

        return self._home.alone(save)

    @of_itself
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class or of torch's, as torch does; states keep the dtypes of this optimizer. After an error its
        groups and states are unchanged, except after a failed write to a tier: then call rollback()."""
        load = super().load_state_dict

        def by_torch(see: Callable[..., Any], keep: bool) -> tuple[list[dict[str, Any]], Any]:
            own = self.state
            try:
                with before_loading(self, see):
                    load(state_dict)
            finally:
                if keep:
                    self.state = own
            return self.param_groups, self.state

        before = self.param_groups, self.state
        try:
            self._home.alone(lambda: self._home.load(by_torch))
        except BaseException:
            # torch has made new groups and states.
            self.param_groups, self.state = before
            raise

    def __getstate__(self) -> dict[str, Any]:
        fresh = self._home.alone(lambda: self._home.fresh(self.state))
        kept = {name: getattr(self, name) for name in _KEPT}
        return {**super().__getstate__(), **kept, "_home": fresh, "process_group": _Group(self.process_group)}

    def __copy__(self) -> Any:
        if self._home.precision.master == "split":
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
        self._home.forget()
        # torch's load_state_dict calls this too, without a home; loaded low bits belong to weights that may be loaded later.
        if "_home" in state:
            self._home.note_versions(self.state)


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
