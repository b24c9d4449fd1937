"""A step over states on a tier: the C table of its pieces, and the step that runs beside backward, `overlap=True`.

Beside backward, as _early/ has it: the library fetches the subgroups of the next step from the end of a step on. A hook sees each gradient
that backward completes. The weights of a subgroup go to memory of the optimizer. step() checks and measures as it does without overlap, and
submits the rest. The parameters receive the weights as they become final, and the library continues writing to the tier.

A contiguous gradient in host memory is read where it is. Any other one is copied to host memory, from a device on a stream of its own.

Invariant: `_busy` is True while the notes may differ from what the library was told. Who finds it True takes all back."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from .. import _abi, _tensor_rows
from .._early.arrivals import Arrivals
from .._early.tier_step import TierStep
from .._groups import Rule, but_factor, is_torchs
from .._written import version
from ..errors import SpillwayError, UnsupportedError, is_own
from ._copies import Taken, is_copied
from ._table import check_adam
from ._tensors import CODES, averages_later, check_memory, is_served, local, name_of
from ._tier_states import Piece, TierStates

#: Number of a group, and the steps that were done.
_Key = tuple[int, int]


class TierTable:
    """The parameters of one step, with the interface of `Table`. It is made for each step: the tier's transfers take far longer.

    Args:
        on_tier: The states.
        groups, states: The optimizer's.
        keeps: The gradients may be in use after the step, if it is refused.

    Raises:
        InvalidArgumentError, UnsupportedError: A parameter or its gradient does not fit; nothing was stepped."""

    #: No parameter is left to torch, all have masters, and gradients are where torch has them.
    rest: tuple[tuple[int, int], ...] = ()
    has_masters = True
    grad_name = "grad"

    def __init__(self, on_tier: TierStates, groups: list[dict[str, Any]], states: Any, keeps: bool):
        self._on_tier, self._groups, self._keeps = on_tier, groups, keeps
        # The copies with which those of now are compared.
        on_tier.gradients.wait()
        #: A process group, and for each gradient of the step whether it counts in the group's norm.
        self.counts: tuple[Any, list[bool] | None] = (None, None)
        self.places: list[tuple[int, int]] = []
        #: The step was submitted beside backward.
        self.was_beside = False
        #: The gradients that were taken, and where the library reads them.
        self.taken: list[Taken] = []
        #: The number of each parameter of the step.
        self.numbers: list[int] = []
        for number, group in enumerate(groups):
            for place, param in enumerate(group["params"]):
                if param.grad is not None:
                    self._add(number, place, group, param)
        on_tier.gradients.wait()
        self.grads = [taken.memory for taken in self.taken]
        read, written = enumerate(self.grads), enumerate(self.params())
        check_memory([*((grad, at, False) for at, grad in read), *((param, at, True) for at, param in written)], self.name)
        #: A row for each gradient, for its norm.
        self.entries = (_abi.Tensor * len(self.grads))()
        for entry, grad in zip(self.entries, self.grads):
            _tensor_rows.put(
                _tensor_rows.begin(entry, grad.numel()), "grad", (grad.data_ptr(), grad.numel(), CODES[grad.dtype]), "gradient"
            )
        self._rows = self._make_rows(states)

    def _add(self, number: int, place: int, group: dict[str, Any], param: torch.Tensor) -> None:
        name = name_of(group, number, place)
        parameter = self._on_tier.check(param, name)
        if is_torchs(group) or not is_served(param, param.grad, name, True):
            raise UnsupportedError(
                f"{name}: states on a tier need dense tensors of 16 or 32 bits that have no negative bit, as parameter and as gradient, "
                "without amsgrad, capturable or differentiable"
            )
        self.places.append((number, place))
        self.numbers.append(parameter)
        self.taken.append(self._on_tier.gradients.take(parameter, False))

    def _make_rows(self, states: Any) -> Any:
        """The rows, sorted by subgroup. Those of one group and step count share options, unless they round at random."""
        pieces = sorted(
            (piece.subgroup, piece.first, at, piece)
            for at, number in enumerate(self.numbers)
            for piece in self._on_tier.layout.of_parameter[number]
        )
        self._of_row = [at for _, _, at, _ in pieces]
        self._subgroups = array("Q", [subgroup for subgroup, *_ in pieces])
        self._firsts = array("Q", [first for _, first, *_ in pieces])
        self._counts = [self._on_tier.step_count(states, number) for number in self.numbers]
        steps = [int(count) for count in self._counts]
        #: The C options structs by group, step count and, for rows with options of their own, the row.
        self.options = dict[tuple[int, int, int], Any]()
        rows = (_abi.Tensor * len(pieces))()
        for number, (row, (_, _, at, piece)) in enumerate(zip(rows, pieces)):
            key = (self.places[at][0], steps[at], number if self._on_tier.precision.stochastic else -1)
            if key not in self.options:
                self.options[key] = self._on_tier.rounded(_abi.sized(_abi.AdamOptions), piece)
            weights, moment_code = self._weights(self.numbers[at]), self._on_tier.tiered.swap.moment_code
            _put_piece(row, piece, self.grads[at], weights, self.options[key], moment_code)
            self._on_tier.complete(row, piece)
        if not pieces and steps:
            # A process may hold no element of the parameters. The call has options all the same.
            self.options[self.places[0][0], steps[0], -1] = _abi.sized(_abi.AdamOptions)
        return rows

    def _weights(self, number: int) -> torch.Tensor:
        own = local(self._on_tier.params[number])
        return self._on_tier.weights.of(number) if is_copied(own) else own

    def run(self, options: Any, status: list[int]) -> None:
        """Steps all rows; appends the status of the call. Then `weights` has those of parameters that the library cannot write to."""
        params = self._on_tier.params
        copied = [number for number in self.numbers if is_copied(params[number])]
        self._on_tier.weights.expect(copied, self._on_tier.layout.of_subgroup)
        if self._on_tier.low_bits:
            self._on_tier.weights.bring(copied)
        self._on_tier.begin_step()
        self._on_tier.tiered.changes()
        self._on_tier.tiered.swap._recorded(
            status,
            "spw_swap_adam_step_parts",
            ctypes.byref(options),
            ctypes.addressof(self._rows),
            self._subgroups.buffer_info()[0],
            self._firsts.buffer_info()[0],
            len(self._rows),
        )

    def check(self, options: Any) -> None:
        """Raises the error of options out of range; changes nothing. The tensors of a row are the tier's."""
        for (group, _, _), own in self.options.items():
            # Only a step of the tier numbers the elements of a part.
            checked = type(own).from_buffer_copy(own)
            checked.rounding_first = 0
            check_adam(checked, group)

    def counted(self, by: int) -> tuple[list[float], int]:
        """Step counts of the parameters and of the optimizer after `by` more steps, for `set_counts`."""
        return [float(count) + by for count in self._counts], self._on_tier.count + by

    def set_counts(self, counts: tuple[list[float], int]) -> None:
        """Sets the step counts."""
        steps, self._on_tier.count = counts
        for count, step in zip(self._counts, steps):
            count.fill_(step)

    def params(self) -> list[torch.Tensor]:
        """The parameters that are stepped."""
        return [local(self._on_tier.params[number]) for number in self.numbers]

    def watched(self) -> list[torch.Tensor]:
        """The parameters whose versions show if the program has written to them."""
        return self.params()

    def note(self, versions: list[int], late: bool) -> None:
        """Remembers that the masters of `watched` have their values after a step, unless the program may have written since: they have
        other versions, or the call is late."""
        if self.was_beside:
            self._on_tier.stepped_apart(self.numbers)
        self._on_tier.forget(self.numbers)
        if not late:
            now = map(version, self.params())
            self._on_tier.note(number for number, own, after in zip(self.numbers, now, versions) if own == after)

    def release_grads(self) -> None:
        """Drops the references to the gradients, unless a step that started during backward has them."""
        self.grads, self.taken = [], []
        if not self._keeps:
            self._on_tier.gradients.forget()

    def name(self, number: int) -> str:
        """The name of a parameter in messages, by its place in `grads`."""
        group, place = self.places[number]
        return name_of(self._groups[group], group, place)

    def row_name(self, row: int) -> str:
        """The name of the parameter of a row."""
        return self.name(self._of_row[row])


def _put_piece(row: Any, piece: Piece, grad: torch.Tensor, weights: torch.Tensor, options: Any, moment_code: int) -> None:
    """Writes a piece of a parameter into a row of C: its gradient, where its weights go, the struct of its options, and the code of the
    moments' dtype."""
    _tensor_rows.begin(row, piece.count)
    row.state_dtype = moment_code
    for field, tensor in (("grad", grad), ("param_copy", weights)):
        start = tensor.data_ptr() + piece.start * tensor.element_size()
        _tensor_rows.put(row, field, (start, piece.count, CODES[tensor.dtype]), field)
    row.options = ctypes.addressof(options)


class Beside(TierStep):
    """The steps of one optimizer.

    Args:
        on_tier: Its states.
        rule: Its rule.

    Attributes:
        scale: Factor of the gradients that the next step is expected to have before it clips."""

    def __init__(self, on_tier: TierStates, rule: Rule):
        self._on_tier, self._rule = on_tier, rule
        self.scale = 1.0
        self._groups: list[dict[str, Any]] = []
        self._states: Any = {}
        #: Backwards that reach each parameter between two steps, by the last step in which one did.
        self._expected = [int(stated and param.requires_grad) for stated, param in zip(on_tier.stated, on_tier.params)]
        #: Whether one ever did.
        self._used = [False] * len(self._expected)
        #: The parameters whose gradients the next step is expected to have.
        self._needed: list[int] = []
        super().__init__(lambda: on_tier.tiered, Arrivals({}))
        self.next()

    def use(self, groups: list[dict[str, Any]], states: Any) -> None:
        """Takes the optimizer's groups and states, in which a hook looks for options and step counts."""
        self._groups, self._states = groups, states
        known = self._on_tier.numbers
        #: The number of each parameter's group.
        self._group_of = {known.get(id(param), -1): number for number, group in enumerate(groups) for param in group["params"]}

    def next(self) -> None:
        """The next step begins: nothing has arrived."""
        super().next()
        #: Backwards that have reached each parameter since then.
        self._reached = [0] * len(self._expected)
        self._busy = False
        needed = [*filter(self._is_expected, range(len(self._expected)))]
        if needed != self._needed:
            pieces = enumerate(self._on_tier.layout.of_subgroup)
            self.arrivals = Arrivals({at: filter(self._is_expected, (piece.parameter for piece in own)) for at, own in pieces})
            self._needed = needed

    def begin(self) -> None:
        """Nothing is noted of gradients."""
        super().begin()
        self._seen: dict[int, Taken] = {}
        self._on_tier.gradients.forget()
        self._on_tier.take_back()
        #: The parameters of each subgroup whose gradients are there.
        self._ready: dict[int, list[int]] = {}
        self._options: dict[_Key, Any] = {}

    def _is_expected(self, number: int) -> bool:
        return self._expected[number] > 0 and self._on_tier.params[number].requires_grad

    # During backward.

    def arrived(self, number: int) -> None:
        """Called when backward has completed a parameter's gradient."""
        if self._busy:
            self.waits = True
        self._busy = True
        try:
            self._reached[number] += 1
            if number in self._seen:
                # Another backward, while the gradient of the last one is in use.
                self.waits = True
            if self.waits:
                self.abandon()
            else:
                self._advance(number)
        except SpillwayError as error:
            # Backward continues; step() raises the error if it is still there. It would not raise that of a signal handler.
            if not is_own(error):
                raise
            self.waits = True
        self._busy = False

    def _advance(self, number: int) -> None:
        if averages_later(self._on_tier.params[number]):
            return
        self.fetch()
        if self._reached[number] == self._expected[number]:
            for subgroup in self.arrivals.note([number]):
                self._start(subgroup)

    def _start(self, subgroup: int) -> None:
        """All expected gradients of a subgroup are there."""
        if not self._ready and self._on_tier.looks_written():
            # The masters have to take the values first, which step() sees.
            self.waits = True
            return self.abandon()
        numbers = self._present(subgroup)
        for number in numbers:
            self._see(number)
        self._ready[subgroup] = numbers
        if self.steps_early:
            self._on_tier.lend(numbers)
            self._send(subgroup, numbers, self._on_tier.gradients.fences(numbers))

    def _present(self, subgroup: int) -> list[int]:
        """The parameters of a subgroup that have a gradient."""
        params = self._on_tier.params
        pieces = self._on_tier.layout.of_subgroup[subgroup]
        numbers = [piece.parameter for piece in pieces if piece.parameter in self._group_of]
        return [number for number in numbers if params[number].grad is not None]

    def _see(self, number: int) -> None:
        if number in self._seen:
            return
        param, name = self._on_tier.params[number], self._on_tier.names[number]
        group, key = self._group_of[number], self._key(number)
        if not is_served(param, param.grad, name, True):
            raise SpillwayError(f"{name} has a gradient that is not served")
        self._seen[number] = self._on_tier.gradients.take(number, True)
        if key not in self._options:
            options = _abi.sized(self._rule.options_type)
            self._rule.put_options(options, self._groups[group], *key, self.scale)
            self._options[key] = options

    def _key(self, number: int) -> _Key:
        return self._group_of[number], int(self._on_tier.step_count(self._states, number))

    def _send(self, subgroup: int, numbers: list[int], events: Sequence[Any] = ()) -> None:
        """Submits a subgroup with the gradients of these parameters, after these events."""
        update, swap = self.fetch(), self._on_tier.tiered.swap
        pieces = {piece.parameter: piece for piece in self._on_tier.layout.of_subgroup[subgroup]}
        rows, firsts, held = (_abi.Tensor * len(numbers))(), array("Q"), list[Any]()
        for row, number in zip(rows, numbers):
            grad, weights = self._seen[number].memory, self._on_tier.weights.of(number)
            options = self._on_tier.rounded(self._options[self._key(number)], pieces[number])
            _put_piece(row, pieces[number], grad, weights, options, swap.moment_code)
            firsts.append(pieces[number].first)
            held += [grad, weights, options, *self._on_tier.complete_apart(row, pieces[number])]
        held += [rows, firsts]
        table = ctypes.addressof(rows), firsts.buffer_info()[0]
        self.submit(subgroup, events, update.submit_table, subgroup, *table, len(numbers), held)

    # The step.

    def prepare(self, rows: TierTable) -> None:
        """Submits what is left of a step. Afterwards nothing keeps it from being done but its verdict."""
        # A forked child is refused before torch copies anything: its threads would be waited for.
        self._on_tier.tiered.swap.handle
        self._on_tier.tiered.changes()
        if self._busy:
            self.waits = True
        self._busy = True
        options = {key[:2]: own for key, own in rows.options.items()}
        factors = {own.grad_scale for own in options.values()}
        written = self._on_tier.written()
        stands = not self.waits and not written and self._stands(options) and self._on_tier.stands()
        repeats = stands and any(own.grad_scale != options[key].grad_scale for key, own in self._options.items())
        if self._ready and stands:
            self.judge(repeats)
        if self.waits or (self.submitted and (not stands or (repeats and len(factors) > 1))):
            self.abandon()
        if not self.submitted:
            self.begin()
        if written:
            self.abandon()
            self._on_tier.take_written(written)
        #: The factor of a repetition.
        self._factor = factors.pop() if repeats and self.submitted else None
        for key, own in options.items():
            self._options.setdefault(key, own)
        for number, taken in zip(rows.numbers, rows.taken):
            self._seen.setdefault(number, taken)
        self._on_tier.lend(rows.numbers, wait=True)
        for subgroup in range(len(self._on_tier.layout.of_subgroup)):
            if subgroup not in self.submitted:
                self._send(subgroup, self._present(subgroup))
        self.wait()
        self._busy = False

    def _stands(self, options: dict[_Key, Any]) -> bool:
        """True if what was noted of gradients and options is what the step has, except for the factor of the gradients."""
        # The table of the step has taken the gradients that have changed.
        taken = self._on_tier.gradients.taken
        return (
            all(numbers == self._present(subgroup) for subgroup, numbers in self._ready.items())
            and all(key in options and but_factor(own) == but_factor(options[key]) for key, own in self._options.items())
            and all(self._key(number) in self._options and seen is taken.get(number) for number, seen in self._seen.items())
        )

    def decide(self, rows: TierTable, status: list[int]) -> None:
        """Makes a prepared step final, and waits for its end. Appends its status to `status`."""
        self._on_tier.weights.expect(rows.numbers, self._on_tier.layout.of_subgroup)
        rows.was_beside = True
        self.conclude(self._factor, self._on_tier.weights, status)

    def stepped(self) -> None:
        """A step has ended: begins the next one."""
        for number, reached in enumerate(self._reached):
            self._used[number] = self._used[number] or reached > 0
            if reached or not self._used[number]:
                self._expected[number] = reached
        self.next()
        self.fetch()

    def resume(self) -> None:
        """The states were used: fetches continue if no gradient was submitted before."""
        if not self.waits:
            self.fetch()

    def reset(self) -> None:
        """Forgets all notes after a rollback, which has ended the update."""
        self._decided = None
        self.next()
