"""An optimizer whose masters and states are in host memory, for parameters on any device. Its steps start during backward.

Order of a step, with overlap:

1. Hooks copy the gradients of a bucket to the host as backward completes its last one. The bucket is stepped at once, speculatively.
2. step() checks that nothing has changed since: options, gradients, weights. Otherwise it rolls back what was stepped, and steps all now.
3. The norm of all gradients is known when the last bucket is measured. It confirms the steps, or rolls them back and repeats them clipped.
4. Each bucket's new weights return to the parameters as it becomes final.

A step without overlap is the same step, whose buckets start in step(). Both have the same bits.

With verdict="forward", step() ends after 2, and the next forward of the model begins with 3 and 4. The norm is measured by the pass that
steps a bucket, so that the verdict is known as soon as there are weights to begin a forward with: no forward is a guess.

The buckets of a tail are not copied to the host: they are measured in step(), and stepped on their device with 4.

Of a DTensor, each process steps its part. The norm is that of all processes, which _norm.py sums up and in which a part counts once."""

from __future__ import annotations

import difflib
import inspect
import itertools
import math
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch

from ... import _abi, _pinned
from ..._early.arrivals import tell
from ..._early.decision import Decision
from ..._groups import TORCHS
from ..._live.publisher import Figures
from ..._progress import each
from ..._tail_search import AskedTail, is_tail
from ..._timeline import span
from ...errors import InvalidArgumentError, OutOfOrderError, SpillwayError, UnsupportedError, is_own
from ...swap import UNROUNDED
from .. import _norm
from .._foreign import as_torchs
from .._keywords import check_keywords
from .._loading import before_loading
from .._low_bits import Aside, put_back, zero_stale_aside
from .._optimizer import scaler_of
from .._states import ADAM, ADAMW, Precision
from .._tensors import DTensor, averages_later, is_partial, is_trained, lasting, local, without_gradients
from .counts import next_steps
from .memory import Memory, check_fits, needed, present
from .plan import Plan
from .prepared import Prepared
from .slot import FLOATS, Slot
from .tail import apart_in_bits, room, serves_narrow

_KINDS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
#: Bytes of layers that stay on the device, by what is said of the weights.
_KEPT_BYTES = {"flow": 0, "auto": None}


def offload(
    params: torch.nn.Module | Iterable[Any],
    kind: type = torch.optim.AdamW,
    *,
    weights: str = "resident",
    device: Any = None,
    overlap: bool | None = None,
    verdict: str = "step",
    model: torch.nn.Module | None = None,
    bucket_bytes: int = 64 << 20,
    tail: int | str = 0,
    max_norm: float | None = None,
    process_group: Any = None,
    skip_nonfinite: bool = False,
    moment_dtype: torch.dtype | str | None = None,
    moment_rounding: str | None = None,
    rounding_seed: int = 0,
    master: str = "f32",
    host_memory: int | Literal["auto"] | None = None,
    **options: Any,
) -> Offloaded:
    """Makes an optimizer whose master weights and moments are in host memory.

    Args:
        params: A model, or its parameters or groups of parameters as torch takes them, on any device, in float32, bfloat16 or float16;
            DTensors included, as those of FSDP2.
        kind: torch.optim.AdamW or torch.optim.Adam, or the class of that name in spillway.torch.
        weights: "resident": parameters stay where they are. "flow": their home is host memory, and a layer's weights are on `device` only
            while it is used, as Flow has it. "auto": as many layers stay on the device as fit beside the first backward.
        device: Where a model with "flow" or "auto" computes; None: the accelerator, or the CPU if there is none.
        overlap: Start the step during backward; None: if a parameter is not in host memory, because a backward on the CPU
            and a step would share the processors. Each parameter then has one backward per step, or accumulates inside of
            `accumulating()`; a further backward is correct too, but its step does not overlap.
        verdict: "step": step() waits for the norm and for the new weights. "forward": the next forward of the model, or of a part of
            it, does; until then the parameters have their old values. `settle()` waits at once, for what else reads parameters.
        model: The model of `verdict="forward"` and of weights that flow, unless `params` is it.
        bucket_bytes: Bytes of gradients that are stepped together.
        tail: Number of buckets whose masters and states stay on the device of their parameters, which steps them: those that backward
            completes last. "auto": a number that the exposed seconds of the first steps correct; see `tail` of the optimizer.
        max_norm: Gradients are clipped to this global norm, exactly; `grad_norm` is the norm before.
        process_group: The processes whose gradients are one norm; None: all processes for DTensors, else this process alone.
        skip_nonfinite: A step with Inf or NaN in a gradient is skipped; `skipped` is then True.
        moment_dtype: "bf16" or torch.bfloat16: moments take 2 bytes per element each instead of 4. "int8": 1.06 bytes.
        moment_rounding: "nearest", or "stochastic": up or down at random; None: at random for "int8". Narrow moments then do not stall
            where an update is below half a unit of their last place.
        rounding_seed: Seed of these random bits, which depend on it, the parameter's number, the step and the element only.
        master: "f32": a 16-bit parameter has a float32 master in its state. "split": the master of a bfloat16 parameter is the
            parameter and 16 low bits, so that the master takes 2 bytes in place of 4. Gradients are copied and measured during backward.
            With it, and with "int8", a step starts before its verdict only with `overlap=True`, or with a `host_memory` that has room:
            its log has the size of master and moments.
        host_memory: Limit of what the optimizer takes in host memory, in bytes. "auto": what the system, and a cgroup, have left now for
            each rank of the machine. More parameters are an error before anything is allocated. What they leave is for the logs of steps
            before the verdict, with at most 13 bytes per parameter; buckets without room for a log step after the verdict. None: no limit.
        options: The arguments of `kind`, such as lr.

    Returns:
        A torch.optim.Optimizer. Its state_dict is that of `kind`, with moments of `moment_dtype`, by default float32. A 16-bit parameter
        has a float32 "master_param", or its low bits "master_low".

    Raises:
        InvalidArgumentError: An argument has a wrong value.
        UnsupportedError: The optimizer or an option is not served.

    Example:
        optimizer = spillway.torch.offload(model, torch.optim.AdamW, lr=1e-4, max_norm=1.0)
        model(batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()"""
    if isinstance(params, torch.optim.Optimizer):
        raise InvalidArgumentError(
            "offload: params is an optimizer; pass the model or its parameters, and the class: "
            f"offload(model, {type(params).__name__}, lr=...)"
        )
    _check_keywords(options)
    model = params if model is None and isinstance(params, torch.nn.Module) else model
    if weights not in ("resident", *_KEPT_BYTES):
        raise InvalidArgumentError(f"offload: weights is {weights!r}; pass 'resident', 'flow' or 'auto'")
    if weights == "resident" and device is not None:
        raise InvalidArgumentError("offload: device is for weights='flow' and 'auto'; move the model, or pass weights")
    beyond = {"max_norm": max_norm, "process_group": process_group, "skip_nonfinite": skip_nonfinite}
    own: dict[str, Any] = {"overlap": overlap, "verdict": verdict, "model": model, "bucket_bytes": bucket_bytes, "tail": tail}
    own["precision"] = Precision.of("offload", True, moment_dtype, moment_rounding, rounding_seed, master)
    own["host_memory"] = _pinned.limit_of("offload", host_memory)
    if weights == "resident":
        return Offloaded(params, kind, **own, **beyond, **options)
    if model is None:
        raise InvalidArgumentError(f"offload: weights is {weights!r}, and there is no model; pass model=")
    # It imports torch's compiler, whose import takes seconds.
    from .flow import Flow

    flow = Flow(model, device, keep_bytes=_KEPT_BYTES[weights])
    if overlap is None:
        # The parameters are in host memory, and backward is on the device.
        own["overlap"] = flow.device.type != "cpu"
    try:
        made = Offloaded(params, kind, **own, **beyond, **options)
    except BaseException:
        flow.remove()
        raise
    made.flow = flow
    return made


def _check_keywords(options: Iterable[str]) -> None:
    """Raises TypeError if a keyword is neither one of offload() nor one of torch's Adam."""
    of_torch = [*inspect.signature(torch.optim.AdamW.__init__).parameters][2:] + [*inspect.signature(torch.optim.Adam.__init__).parameters]
    for name in options:
        if name in of_torch or name == "tier":
            continue
        known = [*inspect.signature(offload).parameters, *of_torch]
        close = ["max_norm"] if "clip" in name or "grad_norm" in name else difflib.get_close_matches(name, known, 1)
        raise TypeError(f"offload() got an unexpected keyword argument {name!r}{'; did you mean ' + repr(close[0]) + '?' if close else ''}")


class Offloaded(torch.optim.Optimizer):
    """The optimizer that offload() makes.

    Attributes:
        flow: The Flow of weights that flow; None: they are resident."""

    flow: Any = None

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
        self._closed = False
        # Hooks live as long as their parameters; they are removed with the optimizer.
        self._hooks: dict[torch.Tensor, Any] = {}
        weakref.finalize(self, _remove, self._hooks)
        self._states: dict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        self._loading: dict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        self._decision = Decision()
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
            weakref.finalize(self, self._next.remove)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, as torch does."""
        self._interrupt()
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_group(group, self._precision, bool(self.tail or self._tail.search))
            self._check_fits()
        except (UnsupportedError, InvalidArgumentError):
            self.param_groups.pop()
            raise
        self._sync_slots()

    def _check_fits(self) -> None:
        if self._host_memory is not None:
            check_fits(self._trained(), self._precision, self._host_memory)

    def _trained(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"] if is_trained(param)]

    def _sync_slots(self) -> list[Slot]:
        """Makes slots and hooks for new parameters, and drops those of others. Returns the slots in the order of the groups."""
        found: list[Slot] = []
        for number, group in enumerate(self.param_groups):
            _check_group(group, self._precision, bool(self.tail or self._tail.search))
            for param in group["params"]:
                slot = self._slots.get(param)
                if slot is None:
                    slot = self._slots[param] = Slot(param, len(self._slots), self._precision)
                if param.requires_grad and param not in self._hooks:
                    self._hooks[param] = tell(param, self._arrived)
                slot.group, slot.number, slot.maximizes = number, len(found), bool(group.get("maximize"))
                found.append(slot)
        if len(found) != len(self._slots):
            for param in self._slots.keys() - {slot.param for slot in found}:
                del self._slots[param]
                _remove({param: self._hooks.pop(param, None)})
        return found

    # During backward.

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Gradients of backwards inside of it are summed up, and a step that follows does not start with them. The last backward before
        step() belongs outside."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    def _arrived(self, param: torch.Tensor) -> None:
        """Called when backward has completed a parameter's gradient."""
        slot, plan = self._slots[param], self._plan
        slot.arrived = next(self._arrivals)
        self._check_forward(slot)
        # The first step has no plan yet: it makes states for the parameters that have gradients. That of another tail is made by step().
        if plan is None or plan.tail != self.tail or self._accumulates or self._decision.waits:
            return
        if not self._overlaps(slot) or averages_later(slot.param):
            return
        try:
            self._start(slot, plan)
        except BaseException as error:
            self._interrupt()
            # Backward continues after an error of the package, which step() raises if it is still there. It would not raise that of a
            # signal handler.
            if not is_own(error):
                raise

    def _check_forward(self, slot: Slot) -> None:
        """Raises an error if the forward of this backward did not have the weights of the last step. To give them to it now is too late."""
        if self._verdict_due is not None:
            why = "no forward or other use of the model has completed the last step"
            cure = "Call it before code that runs no forward of a module, such as a traced or exported model or a captured graph"
        elif self._plan is not None and self._plan.verdict is not None:
            why, cure = "an exception has interrupted the last step after its verdict", "Call it after the exception"
        else:
            return
        raise OutOfOrderError(
            f"offload: {slot.name} gets a gradient of a forward with old weights: {why}. {cure}: optimizer.settle(). Then repeat forward "
            "and backward"
        )

    def _start(self, slot: Slot, plan: Plan) -> None:
        bucket = plan.bucket_of(slot)
        if bucket is not None and bucket.stays:
            return
        # Not if this is another backward, while the first one's gradients are in use.
        if bucket is None or bucket.is_taken or slot in plan.arrivals:
            return self._interrupt()
        is_complete = bool(plan.arrivals.note([slot]))
        # A backward may compute the gradients of one bucket on several streams.
        slot.link.follow()
        if not is_complete:
            return
        if not bucket.is_as_stepped(self._states):
            return self._interrupt()
        with span("offload.take", bucket.number):
            bucket.take(marked=True)
        if self._decision.steps_early:
            if not plan.is_open:
                # The lanes are those of the groups of the last step.
                if plan.prepared is None or not plan.prepared.has_groups(self.param_groups):
                    return self._interrupt()
                numbers = self._numbers(plan.slots)
                if not plan.keeps_lanes(numbers):
                    return self._interrupt()
                plan.begin(numbers, self._all_options(plan, numbers, self._scale), self._limit)
            plan.submit(bucket, early=True)

    def _interrupt(self) -> None:
        """Rolls back what was stepped since the last step; the next step does not overlap."""
        self._complete()
        if self._plan is not None and self._plan.is_used():
            self._plan.abort()
            self._decision.waits = True

    # The step.

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
        if self._closed:
            raise InvalidArgumentError("offload: the optimizer was closed; make a new one")
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        begun, waited = time.perf_counter(), self.exposed_seconds()
        with span("offload.step"):
            without_gradients(self._step)
        self._decision.waits = False
        self._figures.stepped(begun, self._waited_since(waited))
        return result

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

    def _step(self) -> None:
        # The processes that wait for this one's norm.
        others = self._others()
        try:
            try:
                self._complete()
                self._tail.start(self._begun)
                scale, found_inf = scaler_of(self)
                if not found_inf:
                    self._submit(scale, others)
                # Whom no other process waits for can measure later.
                here = None if found_inf or (self._next is not None and others is None) else self._measure()
            except Exception:
                _norm.tell_refusal(others)
                raise
            if found_inf:
                _norm.tell_found_inf(others)
                self._interrupt()
                self._skipped, self._grad_norm = True, math.inf
                return
            reduced = None if here is None else _norm.reducing(here, others, "offload")
            if self._next is not None:
                self._await(self._next, reduced)
            else:
                self._decide(reduced)
                self._complete()
        except BaseException:
            # With its verdict the step happens, because a forward may follow; without one it does not.
            if self._verdict_due is None:
                self._interrupt()
            raise

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

    def _await(self, following: Any, reduced: Any) -> None:
        """Leaves the rest of the step to the next forward."""
        if self._plan is not None and self._plan.is_open:
            self._plan.release()
        following.expect()
        self._tail.pause()
        self._verdict_due = partial(self._decide, reduced)

    def _submit(self, scale: float, others: Any) -> None:
        """Has all buckets stepped."""
        if self._aside:
            self._put_back()
        plan = self._plan
        prepared = plan.prepared if plan is not None else None
        is_prepared = prepared is not None and prepared.holds(self.param_groups, self._states)
        live = plan.slots if plan is not None and is_prepared else self._live()
        if not live:
            return self._interrupt()
        if plan is not None and plan.is_open:
            if self._decision.waits or scale != self._scale or not self._stands(plan, live, others):
                changed = plan.edited()
                plan.abort()
                if changed is not None:
                    raise InvalidArgumentError(
                        f"offload: the moments of {changed.name} were written between backward and step(), through tensors that were "
                        "fetched before, and may hold a step that was rolled back; load a state dict, and read optimizer.state after "
                        "backward"
                    )
        if not is_prepared:
            self._check_fits()
            self._use_states(live)
        numbers = prepared.numbers() if prepared is not None and is_prepared else self._numbers(live)
        if not is_prepared or self._logs[0] is not self.overlap:
            self._logs = self.overlap, self._log_bytes(live)
        log_bytes = self._logs[1]
        if plan is None or not plan.is_of(live, numbers, others, self.tail, log_bytes):
            parts, before = self._parts(), plan

            def counts(slot: Slot) -> bool:
                return parts is None or parts.count(slot.param, slot.name)

            plan = self._plan = Plan(live, numbers, counts, others, self._bucket_bytes, self.tail, log_bytes)
            if before is not None:
                before.close()
            # The states of the tail go to its device.
            self._use_states(live)
            is_prepared = False
        if not is_prepared:
            plan.prepared = Prepared(self.param_groups, live, self._states)
        for bucket in plan.buckets:
            # Those of a submitted bucket were compared by `stands`.
            if not bucket.submitted and not bucket.is_current():
                with span("offload.take", bucket.number):
                    bucket.take(marked=False)
        if not plan.is_open:
            plan.begin(numbers, self._all_options(plan, numbers, scale), self._limit)
        self._scale = scale
        for bucket in plan.buckets:
            plan.submit(bucket)

    def _live(self) -> list[Slot]:
        """The parameters that have gradients, which fit them.

        Raises:
            InvalidArgumentError, UnsupportedError: One does not; nothing was stepped."""
        live = [slot for slot in self._sync_slots() if slot.param.grad is not None]
        if live and self._tail.search is not None and (device := apart_in_bits(slot.param for slot in live)) is not None:
            self._interrupt()
            raise UnsupportedError(
                f"offload: tail is 'auto' with several processes and parameters on {device}, which torch steps: replicas could differ by "
                "roundings; pass the same number of buckets in all processes"
            )
        for slot in live:
            if reason := slot.refusal():
                self._interrupt()
                raise InvalidArgumentError(f"offload: {slot.name} has a gradient that {reason}; nothing was stepped")
        return live

    def _measure(self) -> _norm.Measured:
        """Waits until the gradients of all buckets are measured."""
        if self._plan is None or not self._plan.is_open:
            return _norm.Measured(0.0, False, "")
        nonfinite, total = self._plan.measured(self._measures)
        return _norm.Measured(total, nonfinite, "")

    def _stands(self, plan: Plan, live: list[Slot], others: Any) -> bool:
        """True if what was stepped is what a step would do now."""
        if not all(slot.holds(self._states.get(slot.param)) for slot in live):
            return False
        numbers = self._numbers(live)
        # The options of a lane are those of the group that it was made for.
        if not plan.is_of(live, numbers, others, self.tail, self._log_bytes(live)):
            return False
        return plan.stands(numbers, self._all_options(plan, numbers, self._scale), self._limit)

    def _decide(self, reduced: Callable[[], tuple[float, bool, bool]] | None) -> None:
        """The verdict that follows from the norm."""
        plan = self._plan if self._plan is not None and self._plan.is_open else None
        if reduced is None:
            reduced = _norm.reducing(self._measure(), None, "offload")
        verdict = _norm.Verdict(False, None)
        if self._measures:
            slots = plan.slots if plan is not None else []
            verdict = _norm.verdict(reduced(), self.skip_nonfinite, partial(_culprit, slots), "offload: ")
        if plan is not None:
            plan.verdict = verdict
        else:
            self._report(verdict)

    def _overlaps(self, slot: Slot) -> bool:
        """True if a step may start when backward completes this parameter."""
        return local(slot.param).device.type != "cpu" if self.overlap is None else self.overlap

    def _log_bytes(self, live: Sequence[Slot]) -> float:
        """Bytes for the logs of steps before the verdict. A step that waits for it in `step()` needs none. The log of states that are
        chosen for their few bytes is as large as they are: it needs `overlap=True`, or a limit that says what there is."""
        if not (self._waits_in_forward or any(map(self._overlaps, live))):
            return 0.0
        if self._host_memory is None:
            return 0.0 if self._precision.keeps_values and self.overlap is not True else math.inf
        return max(0.0, self._host_memory - sum(needed(self._trained(), self._precision).values()))

    @property
    def _measures(self) -> bool:
        return self.max_norm is not None or self.skip_nonfinite

    @property
    def _limit(self) -> float:
        """The norm above which gradients are clipped; 0: there is none."""
        return 0.0 if self.max_norm is None or math.isinf(self.max_norm) else self.max_norm

    def _others(self) -> Any:
        """The processes whose gradients are one norm with those of this one; None: there are none."""
        if not self._measures:
            return None
        if self.process_group is not None:
            return self.process_group
        # Not those of the slots: a program may have replaced parameters by DTensors since the last step, as accelerate does.
        params = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        return _norm.group_of((param for param in params if isinstance(param, DTensor) and is_trained(param)), "offload")

    def _parts(self) -> _norm.CountedParts | None:
        """Which parts count in this process; None: all do."""
        others = self._others()
        return None if others is None else _norm.CountedParts(filter(is_trained, self._slots), others)

    def _complete(self) -> None:
        """Finishes a step whose verdict is known, also one that a signal interrupted, or that the next forward waits for."""
        if self._verdict_due is not None:
            self._tail.resume()
            self._hear(self._verdict_due)
        plan = self._plan
        if plan is None or plan.verdict is None:
            return self._ended(None)
        try:
            self._carry_out(plan, plan.verdict)
        except SpillwayError:
            # A bucket has failed after the verdict, and others have stepped. Raised once, so that a state dict can be loaded.
            self._ended(plan)
            raise
        # A step that waits for the norm is judged too: it tells whether the next one would stand.
        clipped = bool(self.max_norm and (self._grad_norm or 0.0) > self.max_norm)
        self._decision.judge(in_vain=clipped)
        self._tail.stop(not (self._skipped or clipped), len(plan.buckets), partial(room, plan))
        self._ended(plan)

    def _ended(self, plan: Plan | None) -> None:
        """A step is over, or there is none. Until the end of this call the next forward comes here again if a signal interrupts it."""
        self._verdict_due = None
        if plan is not None:
            plan.end()
        if self._next is not None:
            self._next.completed()

    def _carry_out(self, plan: Plan, verdict: _norm.Verdict) -> None:
        """Gives the parameters the weights of a step, unless it is skipped, and counts it."""
        plan.resolve(verdict)
        self._report(verdict)
        if not verdict.skips:
            without_gradients(plan.publish)
        plan.finish()
        if verdict.skips:
            without_gradients(plan.skip)
        else:
            plan.count()

    def _begun(self) -> tuple[bool, float | None]:
        """Whether a step began during backward, all of it but the tail, and when. The devices have done what they had to do."""
        for device in {local(param).device for param in filter(is_trained, self._slots)}:
            if device.type != "cpu":
                torch.accelerator.current_stream(device).synchronize()
        if (plan := self._plan) is None:
            return False, None
        return plan.tail == self.tail and all(bucket.submitted or bucket.stays for bucket in plan.buckets), plan.round.started

    def _hear(self, verdict: Callable[[], Any]) -> None:
        """Waits for the verdict of a step that has returned."""
        plan = self._plan
        try:
            # A signal may have come between this and the end.
            if plan is None or plan.verdict is None:
                if plan is not None and plan.is_open and (written := plan.written()) is not None:
                    raise InvalidArgumentError(
                        f"offload: {written.name} was written to after step(), which the next forward was to complete; nothing was "
                        "stepped. Call optimizer.settle() before the program writes to parameters"
                    )
                verdict()
        except (SpillwayError, RuntimeError):
            # The step is given up. Other exceptions are those of signal handlers: the verdict is still due.
            self._verdict_due = None
            self._interrupt()
            self._decision.waits = False
            raise

    def _report(self, verdict: _norm.Verdict) -> None:
        self._skipped = verdict.skips
        self._grad_norm = None if verdict.total is None else math.sqrt(verdict.total)

    @property
    def tail(self) -> int:
        """The number of buckets that stay on the device at the next step. With `tail="auto"` it changes during the first steps that
        overlap, until no other number is better."""
        return self._tail.buckets

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
        self._interrupt()
        return self._states

    @state.setter
    def state(self, states: Any) -> None:
        self._states = states

    # Plans.

    def _numbers(self, slots: Sequence[Slot]) -> list[int]:
        """Number of the next step of each parameter."""
        states = [self._states.get(slot.param) for slot in slots]
        if all(states):
            return next_steps([state["step"] for state in states if state])
        return [int(state["step"]) + 1 if state else 1 for state in states]

    @lasting
    def _use_states(self, live: list[Slot]) -> None:
        """Checks the states of these parameters, then makes those that are missing."""
        lacking = [slot for slot in live if not self._states.get(slot.param)]
        for slot in each("taking host memory", [slot for slot in live if self._states.get(slot.param)], Slot.copies_bytes):
            slot.use(self._states[slot.param])
        for slot in each("making states in host memory", lacking, lambda slot: slot.copies_bytes() + slot.state_bytes()):
            self._states[slot.param] = state = {"step": torch.zeros((), dtype=torch.float32), **slot.new_state()}
            slot.use(state)

    def _all_options(self, plan: Plan, numbers: Sequence[int], scale: float) -> list[Any]:
        """The C options of each lane, for steps of the plan's parameters with these numbers."""
        found, number_of = [], dict(zip(plan.slots, numbers))
        for lane in plan.lanes:
            options = _abi.sized(self._rule.options_type)
            self._rule.put_options(options, self.param_groups[lane.group], lane.group, number_of[lane.buckets[0].slots[0]] - 1, scale)
            found.append(options)
        return found

    # Saving and loading.

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the wrapped class. As in torch, its tensors are the optimizer's own: what the program writes to them, such as
        a checkpoint that is loaded in place, the next step uses. They change in step(), not before: this step does not overlap."""
        self._interrupt()
        self._decision.waits = True
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

    def _put_back(self) -> None:
        aside, self._aside = self._aside, {}
        put_back(aside, self._states)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class or of torch's. Moments get the dtype of `moment_dtype`, and masters become float32, in host
        memory. Without a master the parameter's value is the master.

        Raises:
            InvalidArgumentError: The dict does not fit; nothing was changed.
            UnsupportedError: It has an option that is not served; nothing was changed."""
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
            _check_options(group)
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

    def exposed_seconds(self) -> float:
        """Seconds that steps have waited for buckets, since the set of parameters that have gradients last changed."""
        return 0.0 if self._plan is None else self._plan.exposed_seconds()

    def close(self) -> None:
        """Frees the engine. A step that has no verdict is rolled back, and one that has it is completed. The optimizer must not be used
        afterwards."""
        self._closed = True
        try:
            self._complete()
        finally:
            if self._plan is not None:
                self._plan.close()
                self._plan = None
            _remove(self._hooks)
            if self._next is not None:
                self._next.remove()


def _culprit(slots: Sequence[Slot]) -> str:
    """The name of the first parameter whose gradient has Inf or NaN; empty if it is one of another process."""
    return next((slot.name for slot in slots if not bool(torch.isfinite(slot.grad).all())), "")


def _check_group(group: dict[str, Any], precision: Precision, has_tail: bool) -> None:
    _check_options(group)
    if len({*map(id, group["params"])}) != len(group["params"]):
        raise UnsupportedError("offload: a group has a parameter twice, which torch would step twice; pass each parameter once")
    for param in filter(is_trained, group["params"]):
        if param.dtype not in FLOATS:
            raise UnsupportedError(f"offload: a parameter is of dtype {param.dtype}; float32, bfloat16 and float16 are served")
        if param.dtype is torch.float16 and precision.moment_dtype is torch.bfloat16:
            raise UnsupportedError(f"offload: a parameter is float16: {UNROUNDED}")
        if precision.coded and isinstance(param, DTensor):
            raise UnsupportedError(
                "offload: a parameter is a DTensor, whose parts may begin within a block of codes; pass moment_dtype='bf16'"
            )
        if param.dtype is torch.float16 and precision.master == "split":
            raise UnsupportedError("offload: a parameter is float16, and master='split' is for bfloat16; pass master='f32'")
        if param.is_meta:
            raise UnsupportedError("offload: a parameter has no memory yet; make the optimizer after model.to_empty(), which replaces it")
        if has_tail and not precision.is_plain and not serves_narrow(device := local(param).device):
            raise UnsupportedError(
                f"offload: torch steps the tail of {device}, and serves neither 8-bit moments nor split masters nor rounding at "
                "random; pass tail=0"
            )
        if is_partial(param):
            raise UnsupportedError(f"offload: a parameter is placed as {param.placements}, as terms of a sum; redistribute it")


def _check_options(group: dict[str, Any]) -> None:
    for name in TORCHS:
        if group.get(name):
            raise UnsupportedError(f"offload: {name} is not served; set it to False")


def _remove(hooks: dict[torch.Tensor, Any]) -> None:
    for hook in hooks.values():
        if hook is not None:
            hook.remove()
    hooks.clear()
