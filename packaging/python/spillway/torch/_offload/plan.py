"""What offload() steps together, and where: parameters, their memory on the host, buckets, and lanes.

A lane has the parameters of one group that are at one step number: its buckets have one set of options. The norm adds the squares of each
lane in the order of its buckets, and then the lanes in their order.

A Speculation has one thread, and steps the buckets of all lanes whose gradients have one factor. There are two at most: groups that
maximize have the negative factor. All get the same total of squares, hence the same verdict."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import torch

from ..._after_events import AfterEvents
from ..._written import Comparison, facts, sums
from ...errors import InvalidArgumentError, OutOfOrderError, OwnSuppressed
from ...optim import Adam, tensor_table
from ...speculate import Speculation
from .._copies import link_to, wait
from .._states import MASTER, check_not_split, is_count
from .._table import check_adam
from .._tensors import apart, holds_values, is_partial, like, local
from .tail import Tail, tail_of

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: The smallest bucket has this part of the bytes of the others.
_SMALL = 16


def plain(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose memory has the values of another one in this dtype, in order: that tensor itself if its memory has them."""
    own = tensor.to(dtype)
    return own if own.is_contiguous() and holds_values(own) else torch.empty(own.shape, dtype=dtype, device=own.device).copy_(own)


def _grow_versions(slots: Iterable[Slot]) -> None:
    """Shows autograd new values of parameters, and of the parts that a DTensor has here."""
    params = [slot.param for slot in slots]
    torch.autograd.graph.increment_version([*params, *map(local, params)])


class Slot:
    """A parameter and its memory on the host: gradient and weights in the dtype of the parameter, moments and master in float32. Of a
    DTensor it is the part that this process holds; its state has DTensors that are placed alike.

    Attributes:
        group, maximizes: The number of its group, and whether that group maximizes.
        stays: The parameter is in the tail: its state is on its device, and its gradient and weights are not copied.
        arrived: A number that rises with the moment at which backward completed the gradient."""

    def __init__(self, param: torch.Tensor, number: int):
        self.param, self.group, self.maximizes, self.link = param, 0, False, link_to(param)
        self.name, self.stays, self.arrived = f"parameter {number}", False, -number
        self.grad = self.weights = torch.empty(0)
        # The facts of gradient and parameter when the gradient was copied, and the sum of that gradient; facts and sum of the parameter
        # when its weights were copied last.
        self.seen: tuple[Any, ...] | None = None
        self._grad_sum: Any = None
        self._weights_of: tuple[Any, ...] | None = None
        self._weights_sum: Any = None
        self._held: Any = None
        # Shape, dtype and device for which there is memory; the tensors of the state, and their versions when the gradient was copied.
        self._kind: tuple[Any, ...] = ()
        self._state: dict[str, torch.Tensor] = {}
        self._parts: dict[str, torch.Tensor] = {}
        self._versions: list[int] = []

    def new_state(self) -> dict[str, torch.Tensor]:
        """Moments of a parameter that was never stepped, and the master of a 16-bit parameter."""
        return {name: self._floats(math.nan if name == MASTER else 0.0) for name in self._names()}

    def use(self, state: dict[str, Any]) -> None:
        """Steps this state from now on; the weights are those of the parameter.

        Raises:
            InvalidArgumentError: A tensor of the state does not fit."""
        if self._kind != self._present():
            self.link, self._weights_of = link_to(self.param), None
            if self.stays:
                self.forget()
            else:
                self.grad, self.weights = self._empty(self.param.dtype), self._empty(self.param.dtype)
            # Last: after a signal handler that raises, the next step does all of it again.
            self._kind = self._present()
        if MASTER not in self._names():
            state.pop(MASTER, None)
        elif MASTER not in state:
            state[MASTER] = self._floats(math.nan)
        for name in (*self._names(), "step"):
            self._check(name, state.get(name))
        for name in self._names():
            if local(state[name]).device != self._home:
                state[name] = like(self.param, self._uninitialised().copy_(local(state[name])))
        if not self.holds(state):
            self._weights_of = None
            self._parts = {name: local(tensor) for name, tensor in state.items()}
            # Last, for the same reason.
            self._state = dict(state)

    def holds(self, state: dict[str, Any] | None) -> bool:
        """True if the tensors of a state are those that are stepped, and the parameter is what it was."""
        if state is None or self._kind != self._present():
            return False
        return len(state) == len(self._state) and all(state.get(name) is tensor for name, tensor in self._state.items())

    def loaded(self, given: dict[str, Any]) -> dict[str, Any]:
        """A new state with the values of an entry of a state dict.

        Raises:
            InvalidArgumentError: A value does not fit."""
        state = self.new_state()
        if isinstance(given, dict):
            check_not_split(given, self.name)
        try:
            if not is_count(given["step"]):
                raise ValueError(f"its step is {given['step']!r}; a number of steps is a whole number from 0 on")
            state["step"] = torch.tensor(float(given["step"]), dtype=torch.float32)
            for name in self._names():
                if name != MASTER or name in given:
                    value = given[name]
                    if not value.is_floating_point():
                        raise ValueError(f"{name} is {value.dtype}, and no tensor of floating point numbers")
                    if value.shape != self.param.shape:
                        raise ValueError(f"{name} has shape {tuple(value.shape)}, and the parameter {tuple(self.param.shape)}")
                    if apart(self.param, value):
                        raise ValueError(f"{name} is not placed as the parameter is; load a state dict of this mesh, or by torch's DCP")
                    local(state[name]).copy_(local(value))
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise InvalidArgumentError(f"offload: the state of {self.name} does not fit: {reason}; nothing was loaded") from None
        return state

    def state_bytes(self) -> int:
        """Bytes of the moments and the master."""
        return 4 * len(self._names()) * local(self.param).numel()

    def count(self, number: int) -> None:
        """Sets the number of steps."""
        self._state["step"].fill_(number)

    def _names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq") if self.param.dtype is torch.float32 else ("exp_avg", "exp_avg_sq", MASTER)

    @property
    def _home(self) -> torch.device:
        """Where the state is."""
        return local(self.param).device if self.stays else torch.device("cpu")

    def _present(self) -> tuple[Any, ...]:
        own = local(self.param)
        return (own.shape, own.dtype, own.device, getattr(self.param, "placements", None), self.stays)

    def _check(self, name: str, value: Any) -> None:
        if name == "step":
            fits = isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point()
            part, wanted = value, "a tensor with one floating point number"
        else:
            fits = isinstance(value, torch.Tensor) and not apart(self.param, value)
            part = local(value) if fits else value
            fits = fits and part.dtype is torch.float32 and part.is_contiguous() and part.shape == local(self.param).shape
            # That of a parameter whose tail was made longer or shorter is still where it was.
            fits = fits and part.device in (torch.device("cpu"), local(self.param).device)
            wanted = f"a contiguous float32 tensor of shape {tuple(self.param.shape)} in host memory, placed as the parameter is"
        wanted += ", made outside of torch.inference_mode"
        if not fits or part.is_inference():
            raise InvalidArgumentError(f"offload: the state {name!r} of {self.name} is no longer {wanted}; nothing was stepped")

    def take(self, marked: bool = True) -> None:
        """Copies the gradient, and the weights if the program has changed them. `marked`: `is_current` can tell later whether the gradient
        has changed since."""
        with torch.no_grad():
            weights, grad = local(self.param).detach(), local(self.param.grad).detach()
            if self.stays:
                self.grad = plain(grad, self.param.dtype)
                self._follow(weights)
            elif self._has_other_weights(marked):
                self._weights_of = None
                now = sums([weights])[0]
                self.link.out(self.weights, weights)
                if MASTER in self._parts:
                    wait(self.link.fence())
                    self._follow(self.weights)
                self._weights_of, self._weights_sum = facts(local(self.param)), now
            if not self.stays:
                self.link.out(self.grad, grad)
                self._grad_sum = sums([grad])[0] if marked else None
            # Its memory cannot become that of another gradient before the step.
            self._held = self.param.grad
        self.seen = self._now()
        self._versions = [tensor._version for tensor in self._parts.values()]

    def _has_other_weights(self, compared_later: bool) -> bool:
        """True if the copy of the weights is not that of the parameter. `compared_later`: step() compares the sums of all parameters, so
        that backward does not wait for a device."""
        own = local(self.param)
        if self._weights_of != facts(own):
            return True
        return not (compared_later and self.link.is_apart) and bool(Comparison(sums([own]), [self._weights_sum]))

    def _follow(self, weights: torch.Tensor) -> None:
        """Gives the master the weights that it does not round to: a checkpoint loads both, in any order."""
        master = self._parts.get(MASTER)
        if master is not None:
            master.copy_(torch.where(master.to(weights.dtype) == weights, master, weights.float()))

    def keep_gradient(self) -> None:
        """The step returns before its verdict, and the program may write to the gradient."""
        if self.stays:
            self.grad = self.grad.clone()

    def released(self) -> None:
        """The version of the parameter has grown, not by a write of the program."""
        if self.seen is not None:
            self.seen = (self.seen[0], facts(local(self.param)))
            if self.stays:
                self._weights_sum = sums([local(self.param)])[0]

    def is_written(self) -> bool:
        """True if the program has written to the parameter since the gradient was copied, in a way that torch sees."""
        return self.seen is not None and self.seen[1] != facts(local(self.param))

    def weights_then(self) -> tuple[torch.Tensor, Any]:
        """The parameter, and its sum when the gradient was copied; of one that stays, when the step returned before its verdict."""
        return local(self.param), self._weights_sum

    def forget(self) -> None:
        """The copy of the gradient is not used any more."""
        self.seen = self._held = None
        if self.stays:
            self.grad = self.weights = torch.empty(0)

    def publish(self) -> None:
        """Gives the parameter its new weights, unless the program has written to it since the verdict, after a signal that interrupted the
        step. Its version is that of before until `published`."""
        if self.is_written():
            return
        weights = local(self.param).data
        if not self.stays:
            self.link.back(weights, self.weights)
            self._weights_sum = sums([weights])[0]
        elif self.weights.data_ptr() != weights.data_ptr():
            # The parameter is not plain, and was not stepped in place.
            weights.copy_(self.weights)

    def published(self) -> None:
        """The version of the parameter has grown by its new weights."""
        if not self.stays:
            self._weights_of = facts(local(self.param))

    def row(self) -> tuple[Any, ...]:
        """The tensor for a round."""
        parts = self._parts
        if self.stays:
            own = local(self.param).detach()
            # A program may have written to it after a signal that interrupted the step; its values stay.
            self.weights = own.clone() if self.is_written() else plain(own, own.dtype)
        if MASTER in parts:
            return parts[MASTER], self.grad, parts["exp_avg"], parts["exp_avg_sq"], self.weights
        return self.weights, self.grad, parts["exp_avg"], parts["exp_avg_sq"]

    def is_current(self) -> bool:
        """True if the copies are those of the present gradient and weights."""
        if self._grad_sum is None or not self.may_be_current():
            return False
        now, before = zip(self.grad_then(), self.weights_then())
        return not Comparison(sums(now), before)

    def may_be_current(self) -> bool:
        """False if gradient or weights were replaced, or written to in a way that torch has seen."""
        return not self.stays and self.seen is not None and self.seen == self._now()

    def grad_then(self) -> tuple[torch.Tensor, Any]:
        """The gradient, and its sum when it was copied."""
        return local(self.param.grad), self._grad_sum

    def refusal(self) -> str:
        """Why the gradient cannot be copied; empty if it can."""
        grad = self.param.grad
        if grad is None:
            return "is missing"
        if reason := apart(self.param, grad):
            return f"does not fit it: {reason}"
        if is_partial(grad):
            return f"is placed as {grad.placements}: its processes hold terms of a sum; redistribute it"
        if local(grad).layout is not torch.strided:
            return f"is sparse ({local(grad).layout}); offload() serves dense gradients"
        return "" if grad.shape == self.param.shape else f"has shape {tuple(grad.shape)}, and the parameter {tuple(self.param.shape)}"

    def edited(self) -> bool:
        """True if the program wrote to the state since the gradient was copied."""
        return [tensor._version for tensor in self._parts.values()] != self._versions

    def _now(self) -> tuple[Any, ...]:
        grad = self.param.grad
        return (grad is not None and facts(local(grad)), facts(local(self.param)))

    def _empty(self, dtype: torch.dtype) -> torch.Tensor:
        return self.link.memory(local(self.param).shape, dtype)

    def _uninitialised(self) -> torch.Tensor:
        return torch.empty(local(self.param).shape, dtype=torch.float32, device=self._home) if self.stays else self._empty(torch.float32)

    def _floats(self, value: float) -> torch.Tensor:
        return like(self.param, self._uninitialised().fill_(value))


def _changed(rows: Iterable[tuple[torch.Tensor, Any]]) -> Comparison:
    """Compares tensors with their sums of before."""
    tensors, before = [*zip(*rows)] or [(), ()]
    return Comparison(sums(tensors), before)


class Bucket:
    """Parameters that are stepped together; `place` is its place in the lane.

    Attributes:
        number: Its number in the rounds of the lane's engine, if it is not in the tail."""

    number = 0

    def __init__(self, lane: Lane, place: int, slots: list[Slot]):
        self.lane, self.place, self.slots, self.submitted, self.stays = lane, place, slots, False, False

    def completed(self) -> int:
        """A number that rises with the moment at which backward completed the bucket."""
        return max(slot.arrived for slot in self.slots)

    def is_complete(self) -> bool:
        """True if all gradients are copied."""
        return all(slot.seen is not None for slot in self.slots)

    def wait(self) -> None:
        """Waits until the new weights are final."""
        if self.stays:
            self.lane.tail.step(self.place)
        else:
            self.lane.speculation.wait(self.number)


def _cut(slots: Sequence[Slot], bucket_bytes: int) -> list[list[Slot]]:
    """Buckets of these parameters, in their order. The first ones are small: each of them has twice the bytes of the one before."""
    found: list[list[Slot]] = [[]]
    size, limit = 0, max(1, bucket_bytes // _SMALL)
    for slot in slots:
        if size >= limit and found[-1]:
            found.append([])
            size, limit = 0, min(2 * limit, bucket_bytes)
        found[-1].append(slot)
        size += local(slot.param).nbytes
    return found


class Lane:
    """The buckets that share options and a step number.

    Attributes:
        maximizes: The group maximizes: the factor of its gradients is negative.
        speculation: The engine of the buckets, which that of other lanes may be too.
        tail: The buckets that stay on the device.
        options: The C options of the open round.
        counts: True if their gradients count in the norm of this process, and not in that of another one that holds them too."""

    def __init__(self, group: int, counts: bool, slots: Sequence[Slot], bucket_bytes: int):
        self.group, self.counts, self.maximizes = group, counts, slots[0].maximizes
        self.buckets: list[Bucket] = []
        # Backward completes the first parameters last, and nothing hides the step of its last bucket.
        for place, members in enumerate(reversed(_cut(slots, bucket_bytes))):
            self.buckets.append(Bucket(self, place, members[::-1]))
        self.speculation: Any = None
        self.tail = Tail({})
        self.options: Any = None
        self.adam = Adam()

    def open(self, tail: int) -> list[Bucket]:
        """The last `tail` buckets stay on the device. Returns the others."""
        hosts = len(self.buckets) - tail
        for bucket in self.buckets:
            bucket.stays = bucket.place >= hosts
            for slot in bucket.slots:
                slot.stays = bucket.stays
        self.tail = Tail({bucket.place: bucket.slots for bucket in self.buckets[hosts:]})
        return self.buckets[:hosts]

    def begin(self, options: Any, max_norm: float) -> None:
        """Takes the options of a round."""
        self.options = options
        ctypes.memmove(ctypes.byref(self.adam._options), ctypes.byref(options), ctypes.sizeof(options))
        self.adam.step_count = options.step - 1
        self.tail.begin(self.adam, max_norm, options.grad_scale)

    def submit(self, bucket: Bucket) -> None:
        """Has the engine step a bucket."""
        table, held = tensor_table(self.adam, [slot.row() for slot in bucket.slots])
        for row in table:
            row.options = ctypes.addressof(self.options)
        self.speculation.submit_table("spw_spec_submit", bucket.number, held, ctypes.addressof(table), len(table), None)


class Engine:
    """A Speculation of the buckets of some lanes.

    Attributes:
        lanes: The lanes.
        buckets: Their buckets on the host, in the order of their numbers."""

    def __init__(self, lanes: Sequence[Lane], buckets: Sequence[Bucket]):
        self.lanes, self.buckets = lanes, buckets
        # The weights of a slot are read once they are final, so that a step may write them at once: a commit then has nothing to do.
        # Without buckets it has an empty one, so that a round has a begin and an end.
        self.speculation = Speculation(max(len(buckets), 1), publish="staged")
        # Messages name what the program has made.
        self.speculation._user = "optimizer of offload()"
        for lane in lanes:
            lane.speculation = self.speculation
        for number, bucket in enumerate(buckets):
            bucket.number = number

    def begin(self, max_norm: float) -> None:
        """Opens a round. Each bucket has the options of its lane."""
        first = self.lanes[0]
        self.speculation.begin(first.adam, max_norm=max_norm, grad_scale=first.options.grad_scale)
        if not self.buckets:
            self.speculation.submit(0, [])

    def measured(self) -> tuple[bool, dict[Bucket, float]]:
        """Whether a gradient has Inf or NaN, and the sum of the squares of each bucket."""
        result = self.speculation.local_result()
        return result.nonfinite, dict(zip(self.buckets, self.speculation.bucket_squares()))


class Decision(NamedTuple):
    """What the norm says of a step.

    Attributes:
        skips: The step changes nothing, because a gradient has Inf or NaN.
        total: The sum of the squares of all gradients; None: no norm was asked for."""

    skips: bool
    total: float | None


class Plan:
    """The lanes of all parameters of a step, and the state of its round.

    Attributes:
        others: The processes whose gradients are one norm with those of this one; None: there are none.
        tail: The number of buckets that were asked to stay on the device.
        started: When the first bucket of the round was on the host, by time.perf_counter(); None before.
        limit: The norm above which the round clips; 0: there is none.
        decision: What the norm says; None until it is known."""

    def __init__(
        self,
        slots: Sequence[Slot],
        number: Callable[[Slot], int],
        counts: Callable[[Slot], bool],
        others: Any,
        bucket_bytes: int,
        tail: int,
    ):
        self.tail = tail
        self.started: float | None = None
        self.slots, self._number, self.others, self.limit = list(slots), number, others, 0.0
        members: dict[tuple[int, bool, int], list[Slot]] = {}
        for slot in self.slots:
            members.setdefault((slot.group, counts(slot), number(slot)), []).append(slot)
        self.lanes = [Lane(group, counted, those, bucket_bytes) for (group, counted, _), those in members.items()]
        hosts = {lane: lane.open(kept) for lane, kept in zip(self.lanes, tail_of(self.lanes, tail))}
        self.engines: list[Engine] = []
        for sign in dict.fromkeys(lane.maximizes for lane in self.lanes):
            own = [lane for lane in self.lanes if lane.maximizes is sign]
            self.engines.append(Engine(own, [bucket for lane in own for bucket in hosts[lane]]))
        self._layout = self._layout_of(self.slots, number)
        self.buckets = [bucket for lane in self.lanes for bucket in lane.buckets]
        self._of = {slot: bucket for bucket in self.buckets for slot in bucket.slots}
        self.numbers: dict[Slot, int] = {}
        self.is_open = False
        self._options: list[bytes] = []
        # Submits the buckets whose copies are under way.
        self._starting = AfterEvents("spillway-offload")
        # The copies of the last step's weights to the devices.
        self._publishing: list[Any] = []
        self.decision: Decision | None = None

    def bucket_of(self, slot: Slot) -> Bucket | None:
        """The bucket of a parameter; None if it has none."""
        return self._of.get(slot)

    def was_submitted(self, slot: Slot) -> bool:
        """True if the bucket of a parameter was submitted."""
        return self._of[slot].submitted

    def is_of(self, slots: Sequence[Slot], number: Callable[[Slot], int], others: Any, tail: int) -> bool:
        """True if the plan is that of these parameters at their step numbers, of these processes, and of this tail."""
        return others is self.others and tail == self.tail and self._layout == self._layout_of(slots, number)

    def number_of(self, lane: Lane) -> int:
        """Number of a lane's next step."""
        return self._number(lane.buckets[0].slots[0])

    def begin(self, options: list[Any], max_norm: float) -> None:
        """Opens a round with the C options of each lane.

        Raises:
            InvalidArgumentError: An option is out of range."""
        for lane, given in zip(self.lanes, options):
            check_adam(given, lane.group)
        while self._publishing:
            wait(self._publishing.pop())
        self._options, self.limit, self.is_open, self.started = [*map(bytes, options)], max_norm, True, None
        self.numbers = {slot: self._number(slot) for slot in self.slots}
        for lane, given in zip(self.lanes, options):
            lane.begin(given, max_norm)
        for engine in self.engines:
            engine.begin(max_norm)

    def stands(self, live: Sequence[Slot], options: list[Any], others: Any, limit: float, tail: int) -> bool:
        """True if what was stepped is what a step would do now."""
        submitted = [slot for bucket in self.buckets if bucket.submitted for slot in bucket.slots]
        if self.edited() or any(self._number(slot) != self.numbers[slot] for slot in self.slots):
            return False
        same = [*map(bytes, options)] == self._options and limit == self.limit and self.is_of(live, self._number, others, tail)
        if not same or not all(slot.may_be_current() for slot in submitted):
            return False
        return not _changed(then for slot in submitted for then in (slot.grad_then(), slot.weights_then()))

    def edited(self) -> Slot | None:
        """A submitted parameter to whose state the program wrote; None if there is none."""
        return next((slot for bucket in self.buckets if bucket.submitted for slot in bucket.slots if slot.edited()), None)

    def submit(self, bucket: Bucket) -> None:
        """Has a bucket stepped once its gradients are on the host, unless it was submitted."""
        if bucket.submitted:
            return
        bucket.submitted = True
        if bucket.stays:
            return
        fences = [fence for link in {slot.link for slot in bucket.slots} if (fence := link.fence()) is not None]
        self._starting.call(fences, self._send, bucket)

    def _send(self, bucket: Bucket) -> None:
        self.started = self.started or time.perf_counter()
        bucket.lane.submit(bucket)

    def measured(self, tail: bool) -> tuple[bool, float]:
        """Whether a gradient has Inf or NaN, and the sum of the squares that count here, added in the order of the lanes. `tail`: the
        gradients of the tail are measured too."""
        self._starting.wait()
        nonfinite, total = False, 0.0
        squares: dict[Bucket, float] = {}
        for engine in self.engines:
            found, of_buckets = engine.measured()
            nonfinite |= found
            squares.update(of_buckets)
        for lane in self.lanes:
            sums = [squares[bucket] for bucket in lane.buckets if not bucket.stays]
            if tail:
                results = lane.tail.results()
                nonfinite |= any(result.nonfinite for result in results)
                sums += [result.sum_squares for result in results]
            # Not by sum(), which compensates roundings: the engine does not, and the tail is added as if it were the engine's.
            if lane.counts:
                total += reduce(add, sums, 0.0)
        return nonfinite, total

    def release(self) -> None:
        """The step returns before its verdict."""
        for link in {slot.link for slot in self.slots}:
            link.release()
        for slot in self.slots:
            slot.keep_gradient()
        # A backward of an earlier forward is an error, as after a write to the parameters.
        _grow_versions(self.slots)
        for slot in self.slots:
            slot.released()

    def written(self) -> Slot | None:
        """A parameter to which the program wrote since its gradient was copied; None if there is none."""
        if (found := next((slot for slot in self.slots if slot.is_written()), None)) is not None:
            return found
        places = _changed(slot.weights_then() for slot in self.slots).places()
        return self.slots[min(places)] if places else None

    def resolve(self, decision: Decision) -> None:
        """Gives each lane the verdict, unless it has it."""
        for lane in self.lanes:
            lane.tail.resolve(decision.skips, decision.total)
        for engine in self.engines:
            with OwnSuppressed(OutOfOrderError):
                if decision.total is None:
                    engine.speculation.resolve_as("commit")
                else:
                    engine.speculation.resolve((decision.skips, decision.total))

    def publish(self) -> None:
        """Gives the parameters their weights, bucket by bucket as they become final."""
        # Those of the tail first: a device steps them while the host waits for the others.
        for bucket in sorted(self.buckets, key=lambda bucket: not bucket.stays):
            bucket.wait()
            for slot in bucket.slots:
                slot.publish()
            if not bucket.stays:
                self._publishing += [link.fence() for link in {slot.link for slot in bucket.slots}]
        # Parameters that are views of one tensor share a version: it grows when all of them have their weights.
        own = [slot for slot in self.slots if not slot.is_written()]
        _grow_versions(own)
        for slot in own:
            slot.published()

    def finish(self) -> None:
        """Waits until the memory of all buckets belongs to the caller again."""
        for engine in self.engines:
            engine.speculation.finish()

    def abort(self) -> None:
        """Rolls back an open round, and forgets the gradients."""
        try:
            if self.is_open:
                self._starting.forget()
                for engine in self.engines:
                    with OwnSuppressed(OutOfOrderError):
                        engine.speculation.abort()
        finally:
            self.end()

    def end(self) -> None:
        """The round is over."""
        self.is_open, self.decision = False, None
        for bucket in self.buckets:
            bucket.submitted = False
        for slot in self.slots:
            slot.forget()

    def is_used(self) -> bool:
        """True if gradients were copied since the last step."""
        return self.is_open or any(slot.seen is not None for slot in self.slots)

    def exposed_seconds(self) -> float:
        """Seconds that callers have waited for buckets."""
        return sum(engine.speculation.stats().exposed_seconds for engine in self.engines)

    def close(self) -> None:
        """Closes the rounds; an open one is rolled back."""
        self._starting.close()
        for engine in self.engines:
            engine.speculation.close()
        self.end()

    @staticmethod
    def _layout_of(slots: Sequence[Slot], number: Callable[[Slot], int]) -> list[tuple[int, int]]:
        lanes: dict[tuple[int, bool, int], int] = {}
        return [(id(slot), lanes.setdefault((slot.group, slot.maximizes, number(slot)), len(lanes))) for slot in slots]
