"""Split masters on a tier: it has their low bits. The model has the parameters, which hold the masters together with these.

A step writes the parameters, and has the bits of split masters in memory. float32 parameters are their own masters, and have low bits of
zero.

Invariants:
- A commit has the parameters of its states: they are put on the tier before it, one extent for each subgroup. A commit of the tier makes
  all extents durable together, so that a resume, `rollback()` and `restore()` find parameters and low bits of one step.
- Low bits count unless the program has written to their block of the parameter since the last step, as _low_bits.py has it. Pieces begin
  with a block of their parameter, so that their blocks are those of states in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .._written import changed, facts, sums
from ..errors import UnsupportedError
from ..tiered import Record
from ._copies import Weights
from ._layout import Piece, views
from ._low_bits import BLOCK, Note, pointer_to, zero_stale
from ._states import LOW, MASTER, join, low_of
from ._tensors import local
from ._tier_states import TierStates

#: Subgroups whose parameters are put on the tier, or read from it, at a time.
_TOGETHER = 4


class SplitStates(TierStates):
    """States on a tier, with split masters of bf16 parameters. Arguments as of the base."""

    masters = "split"
    low_bits = True

    def __init__(self, name: str, groups: list[dict[str, Any]], *further: Any):
        params = [param for group in groups for param in group["params"]]
        #: The sums of the blocks of each bf16 parameter, since the last step; 0: the low bits of the block count.
        self._sums = [torch.zeros(-(-local(param).numel() // BLOCK), dtype=torch.int64, device="cpu") for param in params]
        super().__init__(name, groups, *further)
        #: The parameters that a step beside backward reads, with their sums then, copies of them, and the sums that it stores.
        self._lent, self._lent_sums = dict[int, torch.Tensor](), dict[int, Any]()
        self._copies, self._next = Weights(self.params), dict[int, torch.Tensor]()

    @property
    def _alignment(self) -> int:
        return BLOCK

    def _check_served(self) -> None:
        super()._check_served()
        for name, param, stated in zip(self.names, self.params, self.stated):
            if stated and param.dtype is torch.float16:
                raise UnsupportedError(
                    f'{name} is {param.dtype}, and master="split" is for torch.bfloat16; pass master="f32", or cast the parameter'
                )

    def _master_key(self, param: torch.Tensor) -> str | None:
        return LOW if local(param).dtype is torch.bfloat16 else None

    def _facts(self, steps: list[float]) -> dict[str, Any]:
        return {**super()._facts(steps), "masters": self.masters}

    # Writes of the program.

    def note(self, numbers: Iterable[int]) -> None:
        """Remembers the facts of parameters. A step has stored the sums of their blocks."""
        for number in numbers:
            if self._is_split(number):
                self._agreed[number] = facts(local(self.params[number])), None

    def _note_all(self) -> None:
        for number in self._split_numbers():
            self._sums[number].copy_(self._present(number))
        self.note(self._split_numbers())

    def forget(self, numbers: Iterable[int] | None = None) -> None:
        """None: low bits have come from elsewhere, and count whatever the parameters are."""
        super().forget(numbers)
        if numbers is None:
            for sums in self._sums:
                sums.zero_()

    def looks_written(self) -> bool:
        """True if the program has written to a parameter since the last step, in a way that torch sees."""
        return any(number in self._agreed and self._has_other_facts(number) for number in self._split_numbers())

    def written(self) -> set[int]:
        """The parameters with a block that the program has written to since the last step."""
        return {number for number in self._split_numbers() if bool(self._stale(number).any())}

    def take_written(self, written: set[int] | None = None) -> None:
        """Makes low bits zero that count no more, of parameters that the program has written to."""
        written = self.written() if written is None else written
        for subgroup in sorted({piece.subgroup for number in written for piece in self.layout.of_parameter[number]}):
            numbers = torch.empty(self.layout.elements[subgroup], device="cpu")
            self.tiered.read(subgroup, numbers)
            low = low_of_numbers(numbers)
            for piece in self.layout.of_subgroup[subgroup]:
                if piece.parameter in written:
                    self._zero_stale(piece, low[piece.first : piece.first + piece.count], self._sums[piece.parameter].clone())
            self.tiered.write(subgroup, numbers_of_low(low))
        for number in written:
            self._sums[number].copy_(self._present(number))
        self.note(written)

    def begin_step(self) -> None:
        """The step itself compares the parameters with their sums."""

    def settled(self, number: int, value: torch.Tensor) -> torch.Tensor:
        """Low bits that were read, with zeros where they count no more."""
        for piece in self.layout.of_parameter[number]:
            self._zero_stale(piece, value.view(-1)[piece.start : piece.start + piece.count], self._sums[number].clone())
        return value

    def master(self, param: torch.Tensor) -> torch.Tensor:
        """The master of a parameter: the parameter itself if it is float32, or frozen."""
        own = local(param).detach()
        self.tiered.swap.handle  # raises an error if the tier is closed
        if own.dtype is not torch.bfloat16 or not self.stated[self.numbers.get(id(param), 0)]:
            return own
        number = self.check(param, "the tensor")
        return join(own.cpu().contiguous(), self.settled(number, low_of_numbers(self.read_masters(number))))

    def _is_split(self, number: int) -> bool:
        return self.stated[number] and self._master_key(self.params[number]) == LOW

    def _split_numbers(self) -> list[int]:
        return [*filter(self._is_split, range(len(self.params)))]

    def _present(self, number: int) -> torch.Tensor:
        """The sums of the blocks of a parameter as it is now."""
        sums = torch.zeros_like(self._sums[number])
        for piece in self.layout.of_parameter[number]:
            self._zero_stale(piece, torch.empty(piece.count, dtype=torch.int16, device="cpu"), sums)
        return sums

    def _stale(self, number: int) -> torch.Tensor:
        """Of each block of a parameter, whether its low bits count no more."""
        known = self._sums[number]
        return (known != 0) & (known != self._present(number))

    def _zero_stale(self, piece: Piece, low: torch.Tensor, sums: torch.Tensor) -> None:
        """Makes low bits of a piece zero that count no more by these sums of its parameter, which become those of now."""
        blocks = sums[piece.start // BLOCK : -(-(piece.start + piece.count) // BLOCK)]
        zero_stale([(self._values(piece), Note(blocks, {}, low, 0))])

    # Steps and commits.

    def complete(self, row: Any, piece: Piece) -> None:
        """A row has the parameter itself, and the sums of its blocks."""
        row.param_dtype = row.copy_dtype
        if self._is_split(piece.parameter):
            row.low_sums = pointer_to(self._sums[piece.parameter][piece.start // BLOCK :])

    def complete_apart(self, row: Any, piece: Piece) -> list[torch.Tensor]:
        """A row has a copy of the parameter, and memory for the next one and for its sums."""
        number, copy = piece.parameter, self._lent[piece.parameter]
        row.param_dtype, row.param = row.copy_dtype, copy.data_ptr() + piece.start * copy.element_size()
        if not self._is_split(number):
            return [copy]
        if number not in self._next:
            self._next[number] = torch.zeros_like(self._sums[number])
        row.low_sums = pointer_to(self._next[number][piece.start // BLOCK :])
        return [copy, self._next[number]]

    def lend(self, numbers: Iterable[int], wait: bool = False) -> None:
        """Copies parameters, which the program may write to before the step."""
        new = [number for number in numbers if number not in self._lent]
        self._lent_sums.update(zip(new, sums(local(self.params[number]).detach() for number in new)))
        self._lent.update(zip(new, self._copies.bring(new, wait)))

    def stands(self) -> bool:
        """True if the parameters are as they were when they were lent. Waits once for each device."""
        self.gradients.wait()
        return not changed((local(self.params[number]).detach(), before) for number, before in self._lent_sums.items())

    def copied_bytes(self) -> int:
        """As of the base."""
        return super().copied_bytes() + self._copies.nbytes()

    def take_back(self) -> None:
        """Nothing is lent."""
        self._lent.clear()
        self._lent_sums.clear()

    def stepped_apart(self, numbers: Iterable[int]) -> None:
        """The sums of a step that is final are those of now."""
        for number in filter(self._is_split, numbers):
            # One without elements has no sums, and was not stepped.
            if number in self._next:
                self._sums[number].copy_(self._next[number])

    def begin_commit(self) -> None:
        """Before a commit: puts the parameters on the tier that belong to the low bits."""
        self.take_written()
        tier = self.tiered.tier
        for some in self._extents():
            tier._transfer(tier.put(extent, [self._memory_of(subgroup)]) for subgroup, extent in some)

    def restore(self, states: Any, committed: Record) -> None:
        """Gives the parameters their values of the last commit, and the steps."""
        tier = self.tiered.tier
        with torch.no_grad():
            for some in self._extents():
                read = [(subgroup, extent, self._new_memory(subgroup)) for subgroup, extent in some]
                tier._transfer(tier.get(extent, [memory]) for _, extent, memory in read)
                for subgroup, _, memory in read:
                    self._give(subgroup, memory)
        self.set_steps(states, committed.facts["steps"])
        self.count = committed.facts["count"]
        self._note_all()

    def _extents(self) -> Iterator[list[tuple[int, int]]]:
        """The extents of parameters, each with the number of its subgroup, few at a time."""
        sizes = [sum(map(self._bytes_of, pieces)) for pieces in self.layout.of_subgroup]
        held = [(subgroup, size) for subgroup, size in enumerate(sizes) if size]
        for first in range(0, len(held), _TOGETHER):
            some = held[first : first + _TOGETHER]
            yield [(subgroup, self.tiered.tier.define(f"parameters-{subgroup:06}", [size])) for subgroup, size in some]

    def _bytes_of(self, piece: Piece) -> int:
        return piece.count * self.params[piece.parameter].element_size()

    def _new_memory(self, subgroup: int) -> torch.Tensor:
        """Memory for the parameters of a subgroup, one piece after another."""
        size = sum(map(self._bytes_of, self.layout.of_subgroup[subgroup]))
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def _memory_of(self, subgroup: int) -> torch.Tensor:
        """The parameters of a subgroup."""
        memory = self._new_memory(subgroup)
        for piece, part in self._parts(subgroup, memory):
            part.copy_(self._values(piece).contiguous().view(torch.uint8))
        return memory

    def _give(self, subgroup: int, memory: torch.Tensor) -> None:
        """Gives parameters the values of a subgroup."""
        for piece, part in self._parts(subgroup, memory):
            own = local(self.params[piece.parameter]).detach()
            # A copy begins at an address that fits the dtype.
            values = part.clone().view(own.dtype)
            for start, view in views(own, piece.start, piece.count):
                view.copy_(values[start - piece.start :][: view.numel()].view(view.shape))

    def _parts(self, subgroup: int, memory: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
        """The bytes of each piece in the memory of a subgroup."""
        at = 0
        for piece in self.layout.of_subgroup[subgroup]:
            size = self._bytes_of(piece)
            yield piece, memory[at : at + size]
            at += size

    # State dicts.

    def first_masters(self, subgroup: int) -> torch.Tensor:
        """Low bits of zero: each parameter is its own master."""
        return torch.zeros(self.layout.elements[subgroup], device="cpu")

    def saved_master(self, number: int, state: dict[str, Any], flat: Callable[[str], torch.Tensor]) -> torch.Tensor | None:
        """The low bits of a saved state, or of its f32 master."""
        if not self._is_split(number):
            return None
        if LOW in state and state[LOW].dtype is torch.int16:
            return numbers_of_low(flat(LOW))
        return numbers_of_low(low_of(flat(MASTER))) if MASTER in state else None


def low_of_numbers(numbers: torch.Tensor) -> torch.Tensor:
    """Low bits that the library has as numbers from 0 to 65,535."""
    return numbers.to(torch.int32).to(torch.int16)


def numbers_of_low(low: torch.Tensor) -> torch.Tensor:
    """Low bits as the library takes them."""
    return (low.to(torch.int32) & 0xFFFF).to(torch.float32)
