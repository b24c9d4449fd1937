"""The optimizer of offload() as torch's programs use it: groups, step(), state dicts, figures, close()."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..._live.publisher import Figures
from ..._progress import each
from ..._tail_search import AskedTail, is_tail
from ..._timeline import span
from ...errors import InvalidArgumentError, UnsupportedError
from .._foreign import as_torchs
from .._keywords import check_keywords
from .._loading import before_loading
from .._low_bits import Aside, zero_stale_aside
from .._states import ADAM, ADAMW, Precision
from .._tensors import lasting, without_gradients
from .memory import Memory, present
from .parameters import check_group, check_options, remove
from .plan import Plan
from .slot import Slot
from .steps import OffloadSteps

#: The keywords that can be set later.
_ASKED = ("max_norm", "process_group", "skip_nonfinite", "overlap")
_KINDS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}


class Offloaded(OffloadSteps):
    """The optimizer that offload() makes."""

    _flow: Any = None

    # torch's GradScaler then passes its factor to step(), and does not write to the gradients.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        kind: type = torch.optim.AdamW,
        *,
        overlap: bool | None,
        verdict: str,
        model: torch.nn.Module | None,
        bucket_bytes: int,
        tail: int | str,
        max_norm: float | None,
        process_group: Any,
        skip_nonfinite: bool,
        precision: Precision,
        host_memory: int | None,
        **options: Any,
    ):
        own = _KINDS.get(kind.__name__) if isinstance(kind, type) else None
        if own is None or not issubclass(kind, own):
            raise UnsupportedError(f"offload: kind is {kind!r}; pass torch.optim.AdamW or torch.optim.Adam")
        if "tier" in options:
            raise UnsupportedError(
                "offload: tier is not served here; pass it to spillway.torch.AdamW(..., tier=..., overlap=True), which serves "
                "parameters on any device, and whose step starts during backward too"
            )
        flags = {"skip_nonfinite": skip_nonfinite, **({} if overlap is None else {"overlap": overlap})}
        check_keywords("offload", max_norm, process_group, flags, None)
        if type(bucket_bytes) is not int or bucket_bytes < 1:
            raise InvalidArgumentError(f"offload: bucket_bytes is {bucket_bytes!r}; pass a number of bytes, at least 1")
        if not is_tail(tail):
            raise InvalidArgumentError(f"offload: tail is {tail!r}; pass a number of buckets, 0 for none, or 'auto'")
        if verdict not in ("step", "forward"):
            raise InvalidArgumentError(f"offload: verdict is {verdict!r}; pass 'step' or 'forward'")
        if verdict == "forward" and not isinstance(model, torch.nn.Module):
            raise InvalidArgumentError(
                f"offload: verdict is 'forward', and model is {model!r}; pass model=, whose next forward completes a step"
            )
        # torch checks the options, and knows the defaults.
        defaults = own([torch.nn.Parameter(torch.zeros(1))], **options).defaults
        self.max_norm: float | None = max_norm
        self.process_group: Any = process_group
        self.skip_nonfinite: bool = skip_nonfinite
        self.overlap: bool | None = overlap
        self._grad_norm: float | None = None
        self._skipped = False
        self._precision, self._host_memory = precision, host_memory
        self._waits_in_forward = verdict == "forward"
        # Whether steps overlap, and the bytes for their logs, of the last step.
        self._logs: tuple[bool | None, float] = overlap, 0.0
        # Low bits that were settled since the last step.
        self._aside: dict[torch.Tensor, Aside] = {}
        self._bucket_bytes, self._rule = bucket_bytes, ADAMW if own is torch.optim.AdamW else ADAM
        self._tail = AskedTail(tail)
        self._arrivals = itertools.count(1)
        self._slots: dict[torch.Tensor, Slot] = {}
        self._plan: Plan | None = None
        self._closed, self._process = False, os.getpid()
        # Hooks live as long as their parameters; they are removed with the optimizer.
        self._hooks: dict[torch.Tensor, Any] = {}
        weakref.finalize(self, remove, self._hooks)
        self._states: dict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        self._loading: dict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        # The program accumulates gradients, and the last factor of a GradScaler.
        self._accumulates, self._scale = False, 1.0
        # Waits for the verdict of a step that has returned; None: there is none.
        self._verdict_due: Callable[[], Any] | None = None
        self._settling = threading.RLock()
        self._next: Any = None
        self._figures = Figures(f"offload, {own.__name__}", self, Offloaded._told)
        self._memory_told: tuple[Any, Memory] = None, Memory({}, {})
        super().__init__(list(params.parameters()) if isinstance(params, torch.nn.Module) else params, defaults)
        self._parts()
        if verdict == "forward":
            # It imports torch's compiler, whose import takes seconds.
            from .forward import NextForward

            self._next = NextForward(model, self.settle)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ASKED:
            flags = {name: value} if name == "skip_nonfinite" or (name == "overlap" and value is not None) else {}
            given = {"max_norm": None, "process_group": None, **({name: value} if name in ("max_norm", "process_group") else {})}
            check_keywords("offload", **given, flags=flags, host_memory=None)
        super().__setattr__(name, value)

    @property
    def flow(self) -> Any:
        """The Flow of weights that flow; None: they are resident."""
        return self._flow

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, as torch does."""
        self._interrupt()
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_group(group, self._precision, bool(self.tail or self._tail.search))
            self._check_fits()
        except (UnsupportedError, InvalidArgumentError):
            self.param_groups.pop()
            raise
        self._sync_slots()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Gradients of backwards inside of it are summed up, and a step that follows does not start with them. The last backward before
        step() belongs outside."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    # As torch has it for add_param_group: a compiled function that calls it runs it as it is.
    @torch._disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters that have a gradient, and gives them their new weights.

        Args:
            closure: Computes the loss again, before the step.

        Returns:
            The closure's result; None without a closure.

        Raises:
            InvalidArgumentError: A gradient or a state does not fit its parameter, or a gradient has Inf or NaN with `max_norm`;
                nothing was stepped."""
        self._check_open()
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        begun, waited = time.perf_counter(), self.exposed_seconds()
        with span("offload.step"):
            without_gradients(self._step)
        if self._plan is not None:
            self._plan.waits = False
        self._figures.stepped(begun, self._waited_since(waited))
        return result

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgumentError("offload: the optimizer was closed, and has no states; make a new one")

    def _told(self) -> dict[str, Any]:
        """The figures that are published. The memory changes with the parameters and the tail only, and is counted once for them."""
        known, found = self._memory_told
        now = (len(self._slots), len(self._states), self.tail, None if self._plan is None else id(self._plan))
        if now != known:
            found = self.memory()
            self._memory_told = now, found
        where = "states in host memory" if not self.tail else f"states in host memory, {self.tail} buckets on the device"
        return {"where": where, "memory": found._asdict()}

    def _waited_since(self, before: float) -> float:
        """Seconds that the program has waited since exposed_seconds() was `before`. It begins anew with a new plan."""
        now = self.exposed_seconds()
        return now - before if now >= before else now

    def settle(self) -> None:
        """Completes the last step: afterwards its verdict is known, and the parameters have their new weights. With verdict="forward" call
        it before the program reads or writes parameters other than by a forward or a state dict of the model.

        Raises:
            InvalidArgumentError: A gradient has Inf or NaN with `max_norm`, or the program wrote to a parameter since step(); nothing was
                stepped."""
        # Several threads may run a forward at once.
        with self._settling:
            begun, waited, is_due = time.perf_counter(), self.exposed_seconds(), self._verdict_due is not None
            self._complete()
            if is_due:
                self._figures.completed(begun, self._waited_since(waited))

    @property
    def grad_norm(self) -> float | None:
        """Global norm of the gradients of the last step, before clipping; None without `max_norm` and `skip_nonfinite`."""
        self._complete()
        return self._grad_norm

    @property
    def skipped(self) -> bool:
        """True if the last step changed nothing because a gradient had Inf or NaN."""
        self._complete()
        return self._skipped

    @property
    def state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Step counts, moments and masters. An access between backward and step() ends the overlap of that step."""
        self._check_open()
        self._interrupt()
        return self._states

    @state.setter
    def state(self, states: Any) -> None:
        self._states = states

    # Saving and loading.

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the wrapped class. As in torch, its tensors are the optimizer's own: what the program writes to them, such as
        a checkpoint that is loaded in place, the next step uses. They change in step(), not before: this step does not overlap."""
        self._check_open()
        self._interrupt()
        if self._plan is not None:
            self._plan.waits = True
        self._settle_low_bits()
        return super().state_dict()

    @lasting
    def _settle_low_bits(self) -> None:
        """Makes low bits zero where the program has written to parameters: a state dict does not have the parameters to tell that."""
        self._put_back()
        notes = []
        for slot in self._slots.values():
            if slot.note is not None and slot.note.is_of(self._states.get(slot.param)):
                slot.note = slot.note.present()
                notes.append((slot.param, slot.note))
        self._aside = zero_stale_aside(notes)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class or of torch's. Moments get the dtype of `moment_dtype`, and masters become float32, in host
        memory. Without a master the parameter's value is the master.

        Raises:
            InvalidArgumentError: The dict does not fit; nothing was changed.
            UnsupportedError: It has an option that is not served; nothing was changed."""
        self._check_open()
        self._interrupt()

        def without_states(given: dict[str, Any], _: Any) -> dict[str, Any]:
            # torch would copy them to the device, in the dtype of the parameter.
            given = as_torchs(given)
            self._loading = self._loaded(given)
            return {**given, "state": {}}

        try:
            with before_loading(self, without_states):
                super().load_state_dict(state_dict)
        finally:
            self._loading = defaultdict(dict)

    @lasting
    def _loaded(self, given: dict[str, Any]) -> dict[torch.Tensor, dict[str, Any]]:
        """New states with the values of a state dict."""
        for group in given["param_groups"]:
            check_options(group)
            if lacking := [name for name in ("lr", "betas", "eps", "weight_decay", "maximize") if name not in group]:
                raise InvalidArgumentError(f"offload: a group of the state dict has no {lacking[0]!r}; load one of Adam or AdamW")
        saved = itertools.chain.from_iterable(group["params"] for group in given["param_groups"])
        states = [(slot, given["state"].get(number)) for number, slot in zip(saved, self._sync_slots())]
        found: dict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        for slot, state in each("loading states", [pair for pair in states if pair[1]], lambda pair: pair[0].state_bytes()):
            found[slot.param] = slot.loaded(state)
        return found

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch calls it at the end of load_state_dict. One call, so that a signal leaves groups and states of one dict.
        self.__dict__.update(param_groups=state["param_groups"], _states=self._loading)

    def __repr__(self) -> str:
        names = ("max_norm", "process_group", "skip_nonfinite", "overlap", "flow")
        try:
            head, rest = super().__repr__().split("\n", 1)
            told = {**{name: getattr(self, name) for name in names}, "tail": self.tail, "closed": self._closed}
            dtype, _, seed, master = self._precision
            told |= {"moment_dtype": dtype, "moment_rounding": self._precision.rounding, "rounding_seed": seed}
            told |= {"master": "" if master == "f32" else master, "host_memory": self._host_memory}
        except Exception:
            return f"<{type(self).__name__} not constructed>"
        lines = [f"    {name}: {value}" for name, value in told.items() if name == "max_norm" or value]
        return "\n".join([head, *lines, rest])

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an optimizer of offload() cannot be copied or pickled; save its state_dict()")

    def memory(self) -> Memory:
        """Bytes that the optimizer has in host memory and on devices now, by kind; without the log of a step that has no verdict."""
        buckets = () if self._plan is None else self._plan.buckets
        return present(self._slots.values(), (bucket.second for bucket in buckets))

    def close(self) -> None:
        """Frees the engine and the states. A step that has no verdict is rolled back, and one that has it is completed. The optimizer must
        not be used afterwards: save a state dict before."""
        self._closed = True
        try:
            # A forked child has no step of its own.
            if self._process == os.getpid():
                self._complete()
        finally:
            if self._plan is not None:
                self._plan.close()
                self._plan = None
            remove(self._hooks)
            if self._next is not None:
                self._next.remove()
            # The states, and the copies of gradients and weights.
            self._slots, self._states, self._aside = {}, defaultdict(dict), {}
