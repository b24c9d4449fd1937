"""Parameters of offload() that are stepped together. Each question about them is one comparison of lists, and each copy one call for all
of a portion.

Invariants:
- `_seen` is set once the copies of `take` have begun: it tells the gradients and weights that are copied.
- A copy of weights is that of a parameter while facts and sum of the parameter, and the number of uses of its slot, are those in `_copied`
  and `_weight_sums`. `_copied` is None while copies are written."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import chain, repeat
from operator import attrgetter
from types import NoneType
from typing import Any, NamedTuple

import torch

from ... import _abi
from ..._early.gpu_events import After
from ..._written import Comparison, Facts, Sums, compared, differing, facts, facts_of, sums, with_memory, with_versions
from ...errors import OwnSuppressed
from ...optim import tensor_table
from .._copies import Alike, HostLink, Pieces, Placed, wait
from .._states import MASTER, with_values
from .._table import narrow_table
from .._tensors import DTensor, local, locals_of
from .counts import Counts
from .portions import Portion, Tree, divide, leaves, sum_of
from .prepared import Checked
from .second import Second
from .slot import Slot, plain

#: Elements of a master in host memory that are compared at once. Their temporary copies take 64 KiB each: of larger ones malloc kept up to
#: 30 MiB.
_AT_ONCE = 1 << 14
_data_ptr = torch.Tensor.data_ptr
_uses, _link, _version, _grad = attrgetter("uses"), attrgetter("link"), attrgetter("_version"), attrgetter("grad")
#: Of the facts of tensors those of their memory.
_MEMORY = slice(2, None)


class _Rows:
    """The arrays of the rows of a portion.

    Attributes:
        movable: Those of states, whose memory the program may exchange. Copies of gradients and weights stay where they are."""

    def __init__(self, arrays: list[tuple[torch.Tensor, ...]]):
        self.arrays = arrays
        # Of a parameter with a master, it is stepped in place of the copy of the weights.
        self.movable = [array for row in arrays for array in (*row[2:4], *(row[:1] if len(row) == 5 else ()))]

    @cached_property
    def grads(self) -> Pieces:
        """The copies of the gradients."""
        return Pieces(row[1] for row in self.arrays)

    @cached_property
    def weights(self) -> Pieces:
        """The copies of the weights."""
        return Pieces(row[0] if len(row) == 4 else row[4] for row in self.arrays)


class _Memory(NamedTuple):
    """The memory of a bucket while the uses of its slots are these.

    Attributes:
        rows: Of each portion of whole parameters on the host.
        states: The tensors of all states.
        steps: The step count of each parameter."""

    uses: list[int]
    rows: dict[Portion, _Rows]
    states: list[torch.Tensor]
    steps: list[torch.Tensor]


class _Table(NamedTuple):
    """The C table of a portion.

    Attributes:
        rows: Its arrays.
        addresses: Of those that may move.
        table: The table.
        held: What keeps its memory.
        checked: What held when the addresses were compared; None: that was not known."""

    rows: _Rows
    addresses: list[int]
    table: Any
    held: list[Any]
    checked: Checked | None


class Bucket:
    """Parameters that are stepped together; `place` is its place in the lane. Tensors of more than `most` bytes are divided.

    Attributes:
        number: Its place among all buckets of its plan.
        portions: What the engine steps in one call each.
        stays: The bucket is in the tail.
        speculation: The engine of a bucket that is not.
        has_log: Memory has room for its log, so the engine steps it before the verdict."""

    def __init__(self, lane: Any, place: int, slots: list[Slot], most: int):
        self.lane, self.place, self.slots, self.submitted, self.stays, self.number = lane, place, slots, False, False, place
        self.speculation: Any = None
        self.has_log = False
        self._params = [slot.param for slot in slots]
        self._is_plain = not any(isinstance(param, DTensor) for param in self._params)
        self._is_coded = any(slot.precision.coded for slot in slots)
        self._is_split = any(slot.precision.master == "split" for slot in slots)
        # Elements of a piece would have the random bits of the tensor's first ones.
        self._is_random = any(slot.precision.stochastic for slot in slots)
        self._tree: Tree = divide(slots, most) if not self._is_random else Portion(range(len(slots)))
        #: The C options of each parameter, whose random bits are its own.
        self._options = [_abi.AdamOptions() for _ in slots] if self._is_random else []
        self.portions = [*leaves(self._tree)]
        #: The facts of gradients and parameters when the gradients were copied; None for gradients whose change nobody asks for.
        self._seen: tuple[Facts | None, Facts] | None = None
        #: The gradients then: their memory cannot become that of others before the step. Their sums; None: nobody asks.
        self._held: list[Any] = []
        self._grad_sums: list[Any] | None = None
        #: What the copies of each portion are awaited by.
        self._fences: dict[Portion, list[Any]] = {}
        #: Facts and uses of the parameters when their weights were copied, and the sums of the parameters then.
        self._copied: Facts | None = None
        #: The facts of the parameters at their last publication.
        self._published: Facts = ()
        self._weight_sums: list[Any] = [None] * len(slots)
        #: What takes the sums of parameters in host memory, and writes to them without a version, while their memory is this.
        self._in_memory: tuple[Facts, Sums, Sequence[torch.Tensor]] | None = None
        #: The versions of the states when the gradients were copied; None: nobody asks whether the program has written to a state.
        self._versions: list[int] | None = None
        #: Masters that have taken weights which the program has written, for a step that has not happened, and their values before.
        self._masters: list[tuple[torch.Tensor, torch.Tensor]] = []
        #: What was last checked one by one, and the gradients if it was found to hold since the last step.
        self._checked: Checked | None = None
        self._found: Alike | None = None
        #: The last change of any slot then, the uses of the parameters, and their links.
        self._known: tuple[int, tuple[list[int], list[HostLink]]] = -1, ([], [])
        self._memory: _Memory | None = None
        #: A number of steps for each parameter.
        self._counts = Counts(len(slots))
        #: The weights of a step that has no verdict, on their device.
        self.second = Second(slots, len(self.portions))
        self._tables: dict[Portion, _Table] = {}

    # During backward.

    @property
    def is_taken(self) -> bool:
        """True if the gradients were copied since the last step."""
        return self._seen is not None

    def is_as_stepped(self, states: Any) -> bool:
        """True if all gradients can be copied, and the parameters have the states and the memory that are stepped."""
        return (
            self._checked is not None
            and self._checked.has(states)
            and self.holds()
            or all(not slot.refusal() and slot.holds(states.get(slot.param)) for slot in self.slots)
        )

    def remember(self, states: Any) -> bool:
        """Notes that all gradients and states were just checked one by one. False if each step must check them again."""
        self._found = None
        self._checked = Checked(self._params, states, self._uses())
        return self._checked.is_simple

    def holds(self) -> bool:
        """True if a check of each gradient and state would find what it found before, given the same states."""
        self._found = None if self._checked is None else self._checked.gradients(self._uses())
        return self._found is not None

    def completed(self) -> int:
        """A number that rises with the moment at which backward completed the bucket."""
        return max(slot.arrived for slot in self.slots)

    # The copies.

    def take(self, marked: bool) -> None:
        """Copies the gradients, and weights that the program has changed. `marked`: `is_current` can tell later whether a gradient has
        changed since."""
        self.restore()
        owns = self._owns()
        checked = None if self._found is None else self._checked
        now = facts_of(owns) if checked is None else with_memory(checked.facts, owns)
        held = self._found or [*map(_grad, self._params)]
        grads = locals_of(held)
        with torch.no_grad():
            if self.stays:
                for slot, own, grad in zip(self.slots, owns, grads):
                    slot.grad, slot.then = plain(grad.detach(), slot.param.dtype), facts(own)
                self._follow_written(owns, now)
            else:
                self._copy_weights(owns, now, compared_later=marked)
                for portion in self.portions:
                    by_link = self._by_link(portion.places)
                    for link, places in by_link:
                        link.out_all(*self._pairs(portion, places, "grad", grads))
                    self._fences[portion] = [link.fence() for link, _ in by_link]
            self._grad_sums = self._sums_of(grads) if marked else None
        self._held = held
        self._versions = self._state_versions() if marked else None
        self._seen = facts_of(grads) if marked else None, now

    def _sums_of(self, grads: Sequence[torch.Tensor]) -> list[Any]:
        """The sums of gradients that were copied."""
        if self.stays or len(self.portions) > 1 or self.portions[0].is_piece or any(link.is_apart for link in self.links()):
            return sums(grads)
        return self._memory_of_slots().rows[self.portions[0]].grads.sums_of(grads)

    def _copy_weights(self, owns: list[torch.Tensor], now: Facts, compared_later: bool) -> None:
        """Copies the weights that are not on the host. `compared_later`: step() compares the sums of all parameters, so that backward does
        not wait for a device."""
        known = (*now, self._uses())
        others = set(range(len(owns)) if self._copied is None else differing(known, self._copied))
        asked: Sequence[int] = range(len(owns))
        if others or (compared_later and any(link.is_apart for link in self.links())):
            asked = [place for place in asked if place not in others and not (compared_later and self.slots[place].link.is_apart)]
        if asked:
            found = self._memory_of(owns, now)[0].take()
            others |= {asked[place] for place in Comparison(_at(asked, found), _at(asked, self._weight_sums)).places()}
        if not others:
            return
        self._copied, places = None, sorted(others)
        totals = sums([owns[place] for place in places])
        for link, own in self._by_link(places):
            link.out_all([self.slots[place].weights for place in own], [owns[place].detach() for place in own])
            if followers := [self.slots[place] for place in own if MASTER in self.slots[place].parts]:
                wait(link.fence())
                for slot in followers:
                    self._follow(slot, slot.weights)
        for place, total in zip(places, totals):
            self._weight_sums[place] = total
        self._copied = known

    def _follow_written(self, owns: Sequence[torch.Tensor], now: Facts) -> None:
        """Gives the masters of a tail the weights to which the program has written since the last step. Other masters keep what the program
        has written to them."""
        masters = [place for place, slot in enumerate(self.slots) if MASTER in slot.parts]
        others = {*masters} if self._copied is None else {*differing((*now, self._uses()), self._copied)}
        if asked := [place for place in masters if place not in others]:
            found = Comparison(sums(_at(asked, owns)), _at(asked, self._weight_sums))
            others |= {asked[place] for place in found.places()}
        for place in sorted(others.intersection(masters)):
            self._follow(self.slots[place], owns[place].detach())

    def _follow(self, slot: Slot, weights: torch.Tensor) -> None:
        """Gives the master the weights that it does not round to, until `restore`."""
        if (master := slot.parts.get(MASTER)) is None:
            return
        saved, size = False, _AT_ONCE if master.is_cpu else max(1, master.numel())
        for part, values in zip(master.view(-1).split(size), weights.reshape(-1).split(size)):
            followed = with_values(part, values)
            if followed is part:
                continue
            # A new master has no values yet.
            if not saved and not bool(part.isnan().all()):
                self._masters.append((master, master.clone()))
                saved = True
            part.copy_(followed)

    def restore(self) -> None:
        """Gives masters their values of before `take`: the step has not happened, and the program may put back its weights."""
        while self._masters:
            master, before = self._masters[-1]
            # The copy of the weights is not that of the parameter then.
            self._copied = None
            master.copy_(before)
            del self._masters[-1]

    def is_current(self) -> bool:
        """True if the copies are those of the present gradients and weights."""
        return self.may_be_current() and not compared(self.compared_sums())

    def may_be_current(self) -> bool:
        """False if a gradient or a parameter was replaced, or written to in a way that torch has seen."""
        if self.stays or self._seen is None or self._seen[0] is None or NoneType in map(type, map(_grad, self._params)):
            return False
        return self._seen == (facts_of(self._grads()), facts_of(self._owns()))

    def compared_sums(self) -> Iterable[tuple[list[Any], list[Any]]]:
        """The sums of gradients and parameters, and those when they were copied."""
        if self._grad_sums is not None:
            yield sums(self._grads()), self._grad_sums
        yield self.compared_weights()

    def compared_weights(self) -> tuple[list[Any], list[Any]]:
        """The sums of parameters, and those when their gradients were copied; of one that stays, when the step returned before its
        verdict."""
        owns = self._owns()
        now = sums(owns) if self._in_memory is None else self._memory_of(owns, facts_of(owns))[0].take()
        return now, self._weight_sums

    def edited(self) -> Slot | None:
        """A parameter to whose state the program wrote since the gradients were copied; None if there is none."""
        now = self._state_versions()
        if self._versions is None or now == self._versions:
            return None
        pairs = zip(self._versions, now, (slot for slot in self.slots for _ in slot.parts))
        return next((slot for before, after, slot in pairs if before != after), self.slots[0])

    def written(self) -> list[int]:
        """The places of parameters to which the program wrote since the gradients were copied, in a way that torch sees."""
        return [] if self._seen is None else differing(facts_of(self._owns()), self._seen[1])

    # The step.

    def begin(self) -> None:
        """Takes the options of a round from its lane."""
        for slot, own in zip(self.slots, self._options):
            ctypes.memmove(ctypes.addressof(own), ctypes.addressof(self.lane.options), ctypes.sizeof(own))
            slot.put_rounding(own)

    def fences(self, portion: Portion) -> list[Any]:
        """What is awaited until the gradients of a portion are on the host."""
        return [fence for fence in self._fences[portion] if fence is not None]

    def submit(self, portion: Portion, after: After | None) -> None:
        """Has the engine step a portion, at once or after a moment."""
        table, held = self._rows(portion)
        moment = {} if after is None else after._asdict()
        self.speculation.submit_table("spw_spec_submit", portion.number, held, ctypes.addressof(table), len(table), **moment)

    def after(self, fences: Sequence[Any]) -> After | None:
        """The moment at which the copies of these fences are done, if the library can wait for it."""
        apart = [link for link in self.links() if link.is_apart]
        return apart[0].after(fences) if fences and len(apart) == 1 else None

    def _rows(self, portion: Portion) -> tuple[Any, list[Any]]:
        """The C table of a portion, and what keeps its memory."""
        # A view of a state does not follow the tensor if the program sets its `data`: pieces are taken anew.
        rows = _Rows(portion.rows(self.slots)) if portion.is_piece else self._memory_of_slots().rows[portion]
        found, now = self._tables.get(portion), None if self._found is None else self._checked
        # Scales and low bits have further memory.
        if found and found.rows is rows and now and found.checked is now and not (self._is_split or self._is_coded):
            return found.table, found.held
        split = [self.slots[place].split(portion.start) for place in portion.places] if self._is_split else []
        scales = [self.slots[place].scales(portion.start) for place in portion.places] if self._is_coded else []
        addresses = [*map(_data_ptr, chain(rows.movable, chain.from_iterable(chain(split, scales))))]
        if found is None or found.rows is not rows or found.addresses != addresses:
            if scales or split:
                table, held = narrow_table(rows.arrays, scales or repeat(()), split or repeat(()))
            else:
                table, held = tensor_table(self.lane.adam, rows.arrays)
            for row, place in zip(table, portion.places):
                row.options = ctypes.addressof(self._options[place] if self._is_random else self.lane.options)
            found = _Table(rows, addresses, table, held, now)
        self._tables[portion] = found._replace(checked=now)
        return found.table, found.held

    def squares(self, of_portions: Mapping[Portion, float]) -> float:
        """The sum of the squares of the gradients, from those of the portions."""
        return sum_of(self._tree, of_portions)

    def is_stepped(self, portion: Portion) -> bool:
        """True if a portion is stepped and has no verdict. `publish` raises the error of a step that failed."""
        with OwnSuppressed():
            return bool(self.speculation.bucket_state(portion.number) == "speculative")
        return False

    def release(self) -> None:
        """The step returns before its verdict, and the program may write to the gradients."""
        if self.stays:
            for slot in self.slots:
                slot.grad = slot.grad.clone()

    def released(self) -> None:
        """The versions of the parameters have grown, not by a write of the program."""
        if self._seen is None:
            return
        owns, before = self._owns(), self._seen[1]
        self._seen = self._seen[0], facts_of(owns)
        # The copies are those of the weights still, whatever the verdict: masters must not follow weights that nobody has written.
        if self._copied is not None and self._copied[:-1] == before:
            self._copied = (*self._seen[1], self._copied[-1])
        if self.stays:
            self._weight_sums = sums(owns)
            for slot, own in zip(self.slots, owns):
                slot.then = facts(own)

    def make_second(self) -> bool:
        """Makes memory for second copies; False if a device has too little."""
        owns = self._owns()
        return self.second.make([own.detach() for own in owns], self._by_link(range(len(owns))))

    def publish(self, stands: bool, at_once: bool, waiting: Callable[[], AbstractContextManager[None]]) -> list[int]:
        """Gives the parameters their new weights as they become final, except those to which the program has written since the verdict,
        after a signal that interrupted the step; returns the places of the others. Versions are those of before until `published`.

        Args:
            stands: The verdict has kept what was stepped before it.
            at_once: The program has not run since `holds`.
            waiting: A block that waits for weights."""
        if self.stays:
            with waiting():
                self.lane.tail.step(self.place)
        owns = self._owns()
        seen = self._seen if at_once and self._is_plain else None
        now = self._published = facts_of(owns) if seen is None else with_memory(seen[1], owns)
        written = {*(differing(now, self._seen[1]) if self._seen is not None else ())}
        places = [*_without(written, range(len(owns)))]
        if self.stays:
            for place in places:
                weights, to = self.slots[place].weights, owns[place].data
                # A parameter that is plain was stepped in place.
                if weights.data_ptr() != to.data_ptr():
                    to.copy_(weights)
            self._weight_sums = sums(owns)
            return places
        memory, to = self._memory_of(owns, now)
        if not stands:
            self.second.forget()
        is_there = self.second.fences() is not None
        # The engine completes the portions in this order.
        for portion in reversed(self.portions):
            with waiting():
                self.speculation.wait(portion.number)
            if not is_there:
                for link, own in self._by_link(_without(written, portion.places)):
                    hosts, params = self._pairs(portion, own, "weights", to)
                    link.back_all(params, hosts)
        if is_there:
            self.second.give(to, places)
        self._weight_sums = memory.take()
        return places

    def params_at(self, places: Sequence[int]) -> Sequence[torch.Tensor]:
        """The parameters at these places."""
        return _at(places, self._params)

    def published(self, places: Sequence[int]) -> None:
        """The versions of these parameters have grown by their new weights."""
        known = (*with_versions(self._published, self._owns()), self._uses())
        if len(places) < len(self.slots):
            # The copy is not that of a parameter to which the program has written.
            given = {*places}
            known = [own if place in given else None for place, own in enumerate(known[0])], *known[1:]
        self._copied = known

    def count(self, number: int, at_once: bool) -> None:
        """Sets the number of steps. `at_once`: the program has not run since `holds`."""
        checked = self._checked if at_once and self._found is not None else None
        self._counts.put(number, self._memory_of_slots().steps if checked is None else checked.steps)

    def log_bytes(self) -> float:
        """Bytes of the log of a step before the verdict."""
        return sum(slot.precision.log_bytes * slot.size for slot in self.slots)

    def forget(self) -> None:
        """The copies of the gradients are not used any more."""
        self._seen, self._held, self._found, self._masters, self._fences = None, [], None, [], {}
        self.second.forget()
        if self.stays:
            for slot in self.slots:
                slot.forget()

    # Lists.

    def _owns(self) -> list[torch.Tensor]:
        return self._params if self._is_plain else [*map(local, self._params)]

    def _grads(self) -> list[Any]:
        return [*locals_of([*map(_grad, self._params)])]

    def _pairs(
        self, portion: Portion, places: Sequence[int], kind: str, tensors: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """What a portion has of the host memory of one kind, "grad" or "weights", and of tensors at some of its places."""
        if not portion.is_piece and len(places) == len(portion.places):
            rows = self._memory_of_slots().rows[portion]
            return rows.grads if kind == "grad" else rows.weights, _at(places, tensors)
        return portion.pairs(places, [*map(attrgetter(kind), self.slots)], tensors)

    def _memory_of_slots(self) -> _Memory:
        uses = self._uses()
        if self._memory is None or self._memory.uses != uses:
            whole = [] if self.stays else [portion for portion in self.portions if not portion.is_piece]
            rows = {portion: _Rows(portion.rows(self.slots)) for portion in whole}
            states = [slot.parts for slot in self.slots]
            steps = [parts["step"] for parts in states]
            self._memory = _Memory(uses, rows, [*chain.from_iterable(parts.values() for parts in states)], steps)
        return self._memory

    def _state_versions(self) -> list[int]:
        return [*map(_version, self._memory_of_slots().states)]

    def _uses(self) -> list[int]:
        return self._present()[0]

    def _present(self) -> tuple[list[int], list[HostLink]]:
        """The uses of the parameters, and their links."""
        if self._known[0] != (latest := Slot.latest):
            self._known = latest, ([*map(_uses, self.slots)], [*dict.fromkeys(map(_link, self.slots))])
        return self._known[1]

    def _by_link(self, places: Sequence[int]) -> list[tuple[HostLink, Sequence[int]]]:
        """The links of these parameters, each with the places of its own."""
        links = self.links()
        if len(links) == 1:
            return [(links[0], places)]
        found = [(link, [place for place in places if self.slots[place].link is link]) for link in links]
        return [(link, own) for link, own in found if own]

    def links(self) -> list[HostLink]:
        """The links of the parameters."""
        return self._present()[1]

    def _memory_of(self, owns: list[torch.Tensor], now: Facts) -> tuple[Sums, Sequence[torch.Tensor]]:
        """What takes the sums of the parameters, and writes to them without a version."""
        if self._in_memory is None or self._in_memory[0] != now[_MEMORY]:
            datas, on_host = [own.data for own in owns], all(own.is_cpu for own in owns)
            found = now[_MEMORY], Sums(owns), Placed(datas) if on_host else datas
            # Not of a device, whose memory the program may free by moving the parameters.
            self._in_memory = found if on_host else None
            return found[1:]
        return self._in_memory[1:]


def _at(places: Sequence[int], values: Sequence[Any]) -> Sequence[Any]:
    """What a list has at these places, which rise: the list itself if they are all."""
    return values if len(places) == len(values) else [values[place] for place in places]


def _without(some: set[int], places: Sequence[int]) -> Sequence[int]:
    """The other places."""
    return [place for place in places if place not in some] if some else places
