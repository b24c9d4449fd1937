"""What offload() steps together, and where: parameters, their memory on the host, buckets, and lanes.

A lane has the parameters of one group that are at one step number: its buckets have one set of options. The norm adds the squares of each
lane in the order of its buckets, and then the lanes in their order.

A Speculation has one thread, and steps the buckets of all lanes whose gradients have one factor: groups that maximize have the negative
factor. Buckets that step before the verdict, and those that wait for it because there is no memory for their log, have one each. All get
the same total of squares, hence the same verdict."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from itertools import chain
from operator import add, attrgetter, sub
from typing import Any

from ... import _abi
from ..._early.arrivals import Arrivals
from ..._early.memory_step import MemoryStep
from ..._timeline import span
from ..._written import compared
from ...errors import OwnSuppressed, TimedOutError
from ...optim import Adam
from ...speculate import Speculation
from .._norm import Verdict
from .._table import check_adam
from .._tensors import local
from .bucket import Bucket
from .portions import Portion
from .slot import Slot, grow_versions
from .tail import Tail, tail_of

#: The smallest bucket has this part of the bytes of the others.
_SMALL = 16
#: Seconds after which a step that waits for the norm looks which portions are stepped.
_LOOK = 0.001
_stays, _size = attrgetter("stays"), attrgetter("size")


def _cut(slots: Sequence[Slot], bucket_bytes: int) -> list[tuple[list[Slot], int]]:
    """Buckets of these parameters, in their order, and the bytes that each should have. The first ones are small: each of them has twice
    the bytes of the one before."""
    size, limit = 0, max(1, bucket_bytes // _SMALL)
    found: list[tuple[list[Slot], int]] = [([], limit)]
    for slot in slots:
        if size >= limit and found[-1][0]:
            size, limit = 0, min(2 * limit, bucket_bytes)
            found.append(([], limit))
        found[-1][0].append(slot)
        size += local(slot.param).nbytes
    return found


class Lane:
    """The buckets that share options and a step number.

    Attributes:
        maximizes: The group maximizes: the factor of its gradients is negative.
        tail: The buckets that stay on the device.
        options: The C options of the open round, which stay where they are.
        number: The number of the step of the open round.
        counts: True if their gradients count in the norm of this process, and not in that of another one that holds them too."""

    def __init__(self, group: int, counts: bool, slots: Sequence[Slot], bucket_bytes: int):
        self.group, self.counts, self.maximizes = group, counts, slots[0].maximizes
        self.buckets: list[Bucket] = []
        # Backward completes the first parameters last, and nothing hides the step of its last bucket.
        for place, (members, most) in enumerate(reversed(_cut(slots, bucket_bytes))):
            self.buckets.append(Bucket(self, place, members[::-1], most))
        self.tail = Tail({})
        self.options, self.number = _abi.AdamOptions(), 0
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
        for own in (self.options, self.adam._options):
            ctypes.memmove(ctypes.byref(own), ctypes.byref(options), ctypes.sizeof(options))
        self.number = options.step
        self.adam.step_count = options.step - 1
        for bucket in self.buckets:
            bucket.begin()
        self.tail.begin(self.adam, max_norm, options.grad_scale)


class Engine:
    """A Speculation of buckets of some lanes.

    Attributes:
        lanes: The lanes.
        buckets: Buckets of theirs on the host.
        portions: The portions of these, in the order of their numbers.
        has_log: Memory has room for the logs of the buckets, which step before the verdict."""

    def __init__(self, lanes: Sequence[Lane], buckets: Sequence[Bucket], has_log: bool):
        self.lanes, self.buckets, self.has_log = lanes, buckets, has_log
        self.portions = [portion for bucket in buckets for portion in bucket.portions]
        # A step may write the weights of a slot at once, which parameters get once they are final: a commit then has nothing to do.
        # Without buckets it has an empty one, so that a round has a begin and an end.
        self.speculation = Speculation(max(len(self.portions), 1), publish="staged", undo="delta" if has_log else "none")
        # Messages name what the program has made.
        self.speculation._user = "optimizer of offload()"
        for bucket in buckets:
            bucket.speculation, bucket.has_log = self.speculation, has_log
        for number, portion in enumerate(self.portions):
            portion.number = number

    def begin(self, max_norm: float) -> None:
        """Opens a round. Each bucket has the options of its lane."""
        first = self.lanes[0]
        self.speculation.begin(first.adam, max_norm=max_norm, grad_scale=first.options.grad_scale)
        if not self.buckets:
            self.speculation.submit(0, [])

    def is_measured(self, within: float) -> bool:
        """True if all gradients are measured. Waits for that, and no longer than `within` seconds."""
        with OwnSuppressed(TimedOutError):
            self.speculation.local_result(within)
            return True
        return False

    def measured(self) -> tuple[bool, dict[Bucket, float]]:
        """Whether a gradient has Inf or NaN, and the sum of the squares of each bucket."""
        result = self.speculation.local_result()
        of_portions = dict(zip(self.portions, self.speculation.bucket_squares()))
        return result.nonfinite, {bucket: bucket.squares(of_portions) for bucket in self.buckets}


def _with_logs(buckets: Iterable[Bucket], log_bytes: float) -> set[Bucket]:
    """The buckets for whose logs there is memory: those that backward completes first gain most by an early step."""
    found: set[Bucket] = set()
    for bucket in sorted(buckets, key=attrgetter("place")):
        log_bytes -= bucket.log_bytes()
        if log_bytes < 0:
            break
        found.add(bucket)
    return found


class Plan(MemoryStep[Bucket]):
    """The lanes of all parameters of a step, and the step. Buckets on the host are submitted.

    Attributes:
        others: The processes whose gradients are one norm with those of this one; None: there are none.
        tail: The number of buckets that were asked to stay on the device.
        first: The place of a parameter of each lane.
        log_bytes: Bytes for the logs of steps before the verdict.
        limit: The norm above which the round clips; 0: there is none.
        prepared: What the plan was made for; None: nothing of it is known to hold."""

    verdict: Verdict | None

    def __init__(
        self,
        slots: Sequence[Slot],
        numbers: Sequence[int],
        counts: Callable[[Slot], bool],
        others: Any,
        bucket_bytes: int,
        tail: int,
        log_bytes: float,
    ):
        self.tail, self.log_bytes = tail, log_bytes
        self.slots, self.others, self.limit = list(slots), others, 0.0
        self.prepared: Any = None
        members: dict[tuple[int, bool, int], list[Slot]] = {}
        for slot, number in zip(self.slots, numbers):
            members.setdefault((slot.group, counts(slot), number), []).append(slot)
        self.lanes = [Lane(group, counted, those, bucket_bytes) for (group, counted, _), those in members.items()]
        self.first = [self.slots.index(those[0]) for those in members.values()]
        hosts = {lane: lane.open(kept) for lane, kept in zip(self.lanes, tail_of(self.lanes, tail))}
        self.engines: list[Engine] = []
        early = _with_logs([bucket for own in hosts.values() for bucket in own], log_bytes)
        for sign in dict.fromkeys(lane.maximizes for lane in self.lanes):
            own = [lane for lane in self.lanes if lane.maximizes is sign]
            buckets = [bucket for lane in own for bucket in hosts[lane]]
            for has_log in dict.fromkeys([bucket in early for bucket in buckets]) or [False]:
                self.engines.append(Engine(own, [bucket for bucket in buckets if (bucket in early) is has_log], has_log))
        self._layout = self._layout_of(self.slots, numbers)
        self.buckets = [bucket for lane in self.lanes for bucket in lane.buckets]
        for number, bucket in enumerate(self.buckets):
            bucket.number = number
        self._of = {slot: bucket for bucket in self.buckets for slot in bucket.slots}
        self._numbers: Sequence[int] = numbers
        self._options: list[bytes] = []
        self.speculations = [engine.speculation for engine in self.engines]
        # Portions whose weights go to second copies once they are stepped. None: whether there is room for these is not known.
        self._stepping: list[tuple[Bucket, Portion]] = []
        self._has_room: bool | None = None
        # The copies of the last step's weights to the devices.
        self._publishing: list[Any] = []
        self._exposed = 0.0
        # The places whose parameters have their new weights, of each bucket.
        self._places: dict[Bucket, list[int]] = {}
        # The verdict has kept what was stepped before it.
        self._stands = False
        super().__init__(Arrivals({bucket: bucket.slots for bucket in self.buckets}))

    def bucket_of(self, slot: Slot) -> Bucket | None:
        """The bucket of a parameter; None if it has none."""
        return self._of.get(slot)

    def is_of(self, slots: Sequence[Slot], numbers: Sequence[int], others: Any, tail: int, log_bytes: float) -> bool:
        """True if the plan is that of these parameters at their step numbers, of these processes, this tail, and this memory for logs."""
        if others is not self.others or (tail, log_bytes) != (self.tail, self.log_bytes):
            return False
        # The plan's own list comes from a caller who knows that sizes and groups are the same.
        return self.keeps_lanes(numbers) if slots is self.slots else self._layout == self._layout_of(slots, numbers)

    def keeps_lanes(self, numbers: Sequence[int]) -> bool:
        """True if the plan's parameters of one lane are at one step number still: a program may have set counts."""
        # Numbers that grow alike are the usual case.
        return len({*map(sub, numbers, self._numbers)}) == 1 or self._layout == self._layout_of(self.slots, numbers)

    def open(self, numbers: Sequence[int], options: list[Any], max_norm: float) -> None:
        """Opens a round of the parameters' steps with these numbers, with the C options of each lane.

        Raises:
            InvalidArgumentError: An option is out of range."""
        for lane, given in zip(self.lanes, options):
            check_adam(given, lane.group)
        self._options, self.limit, self.is_open = [*map(bytes, options)], max_norm, True
        self._numbers = numbers
        for lane, given in zip(self.lanes, options):
            lane.begin(given, max_norm)
        for engine in self.engines:
            engine.begin(max_norm)

    def stands(self, numbers: Sequence[int], options: list[Any], limit: float) -> bool:
        """True if what was stepped is what a step of the same parameters would do now."""
        submitted = [bucket for bucket in self.buckets if bucket.submitted]
        if self.edited() or numbers != self._numbers:
            return False
        same = [*map(bytes, options)] == self._options and limit == self.limit
        if not same or not all(bucket.may_be_current() for bucket in submitted):
            return False
        return not compared(chain.from_iterable(bucket.compared_sums() for bucket in submitted))

    def edited(self) -> Slot | None:
        """A submitted parameter to whose state the program wrote; None if there is none."""
        found = (bucket.edited() for bucket in self.buckets if bucket.submitted)
        return next((slot for slot in found if slot is not None), None)

    def start(self, bucket: Bucket, early: bool = False) -> None:
        """Has a bucket stepped once its gradients are on the host, unless it was submitted. `early`: backward hides the return of its
        weights."""
        if bucket.submitted:
            return
        bucket.submitted = True
        if bucket.stays:
            return
        with span("offload.submit", bucket.number):
            self._send(bucket)
        if early and bucket.has_log and self._makes_second(bucket):
            self._stepping += ((bucket, portion) for portion in bucket.portions)
            self._bring()

    def _send(self, bucket: Bucket) -> None:
        for portion in bucket.portions:
            # A step writes the memory from which the last weights are copied. The program does not wait for these copies. Only the first
            # bucket names them: a gradient is computed after its device has the weights, and its copy follows.
            fences = [*(fence for fence in self._publishing if fence is not None), *bucket.fences(portion)]
            after = bucket.after(fences)
            self.submit(bucket, fences if after is None else (), bucket.submit, portion, after)
            self._publishing.clear()

    def _makes_second(self, bucket: Bucket) -> bool:
        """Makes memory for the second copies of a bucket's weights; False if a device has too little."""
        if self._has_room is None:
            sizes: dict[Any, int] = {}
            for slot in (slot for other in self.buckets if not other.stays for slot in other.slots):
                sizes[slot.link] = sizes.get(slot.link, 0) + local(slot.param).nbytes
            self._has_room = all(link.has_room(size) for link, size in sizes.items())
        self._has_room = self._has_room and bucket.make_second()
        return self._has_room

    def _bring(self) -> None:
        """Starts the return of the weights of portions that are stepped, and have no verdict. Waits for none."""
        while self._stepping:
            bucket, portion = self._stepping[0]
            if not bucket.is_stepped(portion):
                return
            del self._stepping[0]
            bucket.second.bring(portion)

    def measured(self, tail: bool) -> tuple[bool, float]:
        """Whether a gradient has Inf or NaN, and the sum of the squares that count here, added in the order of the lanes. `tail`: the
        gradients of the tail are measured too."""
        nonfinite, total = False, 0.0
        squares: dict[Bucket, float] = {}
        with self._waiting():
            while self._stepping and not self._is_measured():
                self._bring()
            self.wait()
            for engine in self.engines:
                found, of_buckets = engine.measured()
                nonfinite |= found
                squares.update(of_buckets)
        self._bring()
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

    def _is_measured(self) -> bool:
        """True if all gradients are measured. Waits for a moment."""
        if not self.is_over(_LOOK):
            return False
        self.wait()
        return all(engine.is_measured(_LOOK) for engine in self.engines)

    def release(self) -> None:
        """The step returns before its verdict."""
        for link in self._links():
            link.release()
        for bucket in self.buckets:
            bucket.release()
        # A backward of an earlier forward is an error, as after a write to the parameters.
        grow_versions([slot.param for slot in self.slots])
        for bucket in self.buckets:
            bucket.released()

    def written(self) -> Slot | None:
        """A parameter to which the program wrote since its gradient was copied; None if there is none."""
        for bucket in self.buckets:
            if written := bucket.written():
                return bucket.slots[written[0]]
        slots = [slot for bucket in self.buckets for slot in bucket.slots]
        places = compared(bucket.compared_weights() for bucket in self.buckets).places()
        return min((slots[place] for place in places), key=self.slots.index, default=None)

    def complete(self, at_once: bool) -> None:
        """Does what the verdict says: gives the parameters their weights, bucket by bucket as they become final, unless it skips the step,
        and counts the step. May be repeated after an exception. `at_once`: the program has not run since step() began."""
        assert self.verdict is not None
        self._places = {}
        try:
            self.carry_out(partial(self._give, at_once))
        except BaseException:
            # A second copy may have failed, and would fail again. The weights then come from the host.
            for bucket in self.buckets:
                bucket.second.forget()
            raise
        if self.verdict.skips:
            for bucket in self.buckets:
                bucket.restore()
            return
        for lane in self.lanes:
            for bucket in lane.buckets:
                bucket.count(lane.number, at_once)

    def resolve(self) -> None:
        """As of the base."""
        assert self.verdict is not None
        for lane in self.lanes:
            lane.tail.resolve(self.verdict.skips, self.verdict.total)
        super().resolve()
        self._stands = not any(speculation.rolled_back_buckets() for speculation in self.speculations)

    def _give_verdict(self, speculation: Speculation, status: list[int]) -> None:
        assert self.verdict is not None
        if self.verdict.total is None:
            speculation._resolve_as(status, "commit", 1.0)
        else:
            speculation._resolve(status, (self.verdict.skips, self.verdict.total))

    def final(self) -> Iterable[Bucket]:
        """Those of the tail first: a device steps them while the host waits for the others."""
        assert self.verdict is not None
        return () if self.verdict.skips else (*filter(_stays, self.buckets), *super().final())

    def _give(self, at_once: bool, bucket: Bucket) -> None:
        """Gives parameters the weights of a bucket, for which it waits."""
        with span("offload.publish", bucket.number):
            self._places[bucket] = bucket.publish(self._stands, at_once, self._waiting)
        if not bucket.stays:
            self._publishing += bucket.second.fences() or [link.fence() for link in bucket.links()]

    def finish(self) -> None:
        """As of the base. Shows autograd the weights that the parameters have before."""
        # Parameters that are views of one tensor share a version: it grows when all of them have their weights.
        grow_versions([*chain.from_iterable(bucket.params_at(own) for bucket, own in self._places.items())])
        for bucket, own in self._places.items():
            bucket.published(own)
        with self._waiting():
            super().finish()

    @property
    def is_used(self) -> bool:
        """True if gradients have arrived or were copied since the last step."""
        return super().is_used or any(bucket.is_taken for bucket in self.buckets)

    def take_back(self) -> None:
        """As of the base, with the masters."""
        super().take_back()
        for bucket in self.buckets:
            bucket.restore()

    def begin(self) -> None:
        """Nothing is submitted, and no gradient has arrived."""
        super().begin()
        self._stepping.clear()
        self.arrivals.clear()
        for bucket in self.buckets:
            bucket.submitted = False
            bucket.forget()
            if self._has_room is False:
                bucket.second.free()

    def exposed_seconds(self) -> float:
        """Seconds that callers have waited for buckets."""
        return self._exposed

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """The caller waits for buckets."""
        begun = time.perf_counter()
        try:
            with span("offload.wait"):
                yield
        finally:
            self._exposed += time.perf_counter() - begun

    def close(self) -> None:
        """As of the base."""
        super().close()
        self.begin()

    def _links(self) -> set[Any]:
        return {link for bucket in self.buckets for link in bucket.links()}

    @staticmethod
    def _layout_of(slots: Sequence[Slot], numbers: Sequence[int]) -> tuple[list[Any], ...]:
        """The slots, their sizes and groups, whether these maximize, and for each slot a number of its lane: lanes advance together."""
        groups, signs = [slot.group for slot in slots], [slot.maximizes for slot in slots]
        lanes: dict[tuple[int, int], int] = {}
        places = [lanes.setdefault(key, len(lanes)) for key in zip(groups, numbers)]
        return [*map(id, slots)], [*map(_size, slots)], groups, signs, places
