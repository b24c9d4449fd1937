"""The C table of all parameters of an optimizer, which is verified and patched before each step.

Frameworks replace gradients at every step, and sometimes parameters, states and groups. A table is therefore never used unchecked:
`Table.refresh` compares every pointer and property that the kernels rely on with the tensors of now. New gradients of the same shape are
patched in; after any other difference the caller builds a new table.

The comparisons are passes over whole lists without Python code per tensor, slice by slice. A slice is small enough that the objects of its
tensors stay in a processor's cache over all passes: with 10,000 parameters half of the time would be the loading of these objects from
memory. The processor therefore loads the objects of a slice together, before the first pass.

The step counts of all rows lie in one piece of memory, and each `state["step"]` is one element of it. Counting a step is one addition."""

from __future__ import annotations

import ctypes
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, compress, starmap
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch

from .. import _abi, _native, _tensor_rows
from .._groups import Rule, is_torchs
from ..errors import InvalidArgumentError, SpillwayError, is_own
from ._low_bits import Note, pointer_to
from ._states import LOW, is_count, kind_of
from ._tensors import CODES, DTensor, Row, local, name_of, properties_of

#: Most parameters of a slice.
LENGTH = 256
#: Rows of a table whose objects the caches do not keep from one step to the next.
_MANY = 512
#: How many bytes of each object a comparison reads: of a dict or a tensor, of torch's tensor behind that, and of its storage.
_OBJECT, _TENSOR, _STORAGE = 48, 192, 32
_WORDS = ctypes.sizeof(_abi.Tensor) // 8
_GRAD = _abi.Tensor.grad.offset // 8
#: How the library names a row, an option of a row, and an option of the call; names of options that differ from torch's.
_PLACES = re.compile(r"tensors\[(\d+)\](?:\.options\.(\w+))?|^options\.(\w+)")
_OPTION_NAMES = {"beta1": "betas[0]", "beta2": "betas[1]", "grad_scale": "grad_scale (of the scaler and of max_norm)"}
#: The fields of scales, and the codes of dtypes, with that of 8-bit moments.
_SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
_DTYPES = {**CODES, torch.uint8: _abi.DTYPE_CODES}
#: Dtypes in which step counts are kept as they were found.
_COUNTS = (torch.float32, torch.float64, torch.int32, torch.int64)
#: What is raised if a state was removed, or if a tensor has no address any more.
_ABSENT = (KeyError, RuntimeError, AttributeError, TypeError)
_data_ptr = torch.Tensor.data_ptr
_step = itemgetter("step")
_version = attrgetter("_version")


class Table:
    """Rows of an optimizer.

    Args:
        groups, states: The optimizer's `param_groups` and `state`, which has every state of the rule for each row.
        rows: The parameters that Spillway steps, in the order of the groups.
        rest: The places of those that torch steps.
        rule: The optimizer's rule.
        seeds: For each row the seed of its rounding at random; None: to the nearest. Rows with a seed have options of their own; else the
            rows of one group and step count share them.
        master: Name of the state that holds masters.
        grad_name: Attribute of a parameter that holds its gradient."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        states: Any,
        rows: list[Row],
        rest: list[tuple[int, int]],
        rule: Rule,
        seeds: list[int] | None = None,
        master: str = "",
        grad_name: str = "grad",
    ):
        self._groups, self._rule, self._master = groups, rule, master
        self.grad_name: str = grad_name
        #: A process group, and for each gradient of the step whether it counts in the group's norm.
        self.counts: tuple[Any, list[bool] | None] = (None, None)
        # The rows themselves hold gradients and states, which must not live longer than their owners keep them.
        self.places: list[tuple[int, int]] = [(row.group, row.place) for row in rows]
        self.rest: list[tuple[int, int]] = rest
        self._copies = [row.copy for row in rows if row.copy is not None]
        self._lists, self._flags = [list(group["params"]) for group in groups], list(map(is_torchs, groups))
        self._all, self._states = states, list(states.values())
        self._slices = self._cut(states, rows)
        self._owners = None if any(part.distributed for part in self._slices) else [*chain(*(part.owners for part in self._slices))]
        self.has_masters: bool = any(part.has_masters for part in self._slices)
        self.entries: Any = (_abi.Tensor * len(rows))()
        words = torch.frombuffer(self.entries, dtype=torch.int64).view(-1, _WORDS) if rows else torch.empty(0, _WORDS, device="cpu")
        self._grads = words[:, _GRAD]
        self._fill(rows, list(rule.keys.values()))
        self._gather_steps()
        self._make_options(seeds)
        self._load: Any = None
        self._refreshed = 0
        self._call = getattr(_native.library(), f"spw_{rule.c_name}_step")

    def state_bytes(self) -> dict[str, int]:
        """Bytes of the states, by kind."""
        found = {"moments": 0, "masters": 0}
        for state in self._states:
            for name, value in state.items():
                if name != "step" and isinstance(value, torch.Tensor):
                    found[kind_of(name)] += value.nbytes
        return found

    def _cut(self, states: Any, rows: list[Row]) -> list[Slice]:
        params = [param for params in self._lists for param in params]
        places = [(number, place) for number, params in enumerate(self._lists) for place in range(len(params))]
        chosen = {place: row.master is not None for place, row in zip(self.places, rows)}
        slices, first, at = [], 0, 0
        while at < len(params):
            # Rows with and without a master have other states: none of the other kind is in the slice.
            kinds = [chosen.get(place) for place in places[at : at + LENGTH]]
            kind = next((kind for kind in kinds if kind is not None), False)
            length = next((number for number, other in enumerate(kinds) if other is (not kind)), len(kinds))
            mask = [other is not None for other in kinds[:length]]
            end = first + sum(mask)
            own = self._master if kind else ""
            slices.append(Slice(states, params[at : at + length], mask, rows[first:end], self._rule.keys, own, first, self.grad_name))
            first, at = end, at + length
        return slices

    def _fill(self, rows: list[Row], fields: list[str]) -> None:
        for at, (entry, row) in enumerate(zip(self.entries, rows)):
            try:
                self._fill_row(_tensor_rows.begin(entry, row.param.numel()), row, fields)
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"{self.name(at)}: its {error}; nothing was stepped") from None

    @staticmethod
    def _fill_row(entry: Any, row: Row, fields: list[str]) -> None:
        param, copy = row.param, row.copy
        if row.master is not None and row.master.dtype is torch.float32:
            param, copy, entry.take_copy = row.master, row.param, 1
        elif row.master is not None:
            entry.param_low = row.master.data_ptr()
            entry.low_sums = pointer_to(row.low_sums)
        _tensor_rows.put(entry, "param", _span(param), "parameter or master")
        _tensor_rows.put(entry, "grad", _span(row.grad), "gradient")
        if copy is not None:
            _tensor_rows.put(entry, "param_copy", _span(copy), "copy")
        for field, state in zip(fields, row.states):
            if field in _SCALES:
                setattr(entry, field, state.data_ptr())
            else:
                _tensor_rows.put(entry, field, _span(state), f"state of the C field {field}")

    def _gather_steps(self) -> None:
        """Moves the step counts into one piece of memory, where counting a step is one addition. Each has a storage of its own there: a
        count that is pickled takes no other one along."""
        inner = [state for part in self._slices for state in part.inner]
        #: Step counts that other processes see too: by the number of the row. They stay where they are.
        self._shared: dict[int, torch.Tensor] = {}
        self._counting = bool(inner) and all("step" in state for state in inner)
        if not self._counting:
            self.steps: torch.Tensor = torch.zeros(len(inner), device="cpu")
            return
        found = [state["step"] for state in inner]
        for number, step in enumerate(found):
            if not isinstance(step, torch.Tensor) or not is_count(step):
                raise InvalidArgumentError(
                    f"{self.name(number)}: its state 'step' is {step!r}; set a tensor with the number of steps, or load the state again"
                )
        dtype = found[0].dtype if found[0].dtype in _COUNTS else torch.float32
        memory = bytearray(len(found) * dtype.itemsize)
        self.steps = torch.frombuffer(memory, dtype=dtype)
        self.steps.copy_(torch.tensor([float(step) for step in found], dtype=torch.float64, device="cpu"))
        for number, (state, step) in enumerate(zip(inner, found)):
            if step.is_cpu and step.is_shared() and not step.is_inference():
                self._shared[number] = step
            else:
                state["step"] = torch.frombuffer(memory, dtype=dtype, count=1, offset=number * dtype.itemsize).view(())
        for part in self._slices:
            part.note_steps()

    def _make_options(self, seeds: list[int] | None) -> None:
        """The C options structs by group, step count and, for rows with options of their own, the place in the group."""
        self._known = self.steps.clone()
        keys = [(number, int(step), -1 if seeds is None else place) for (number, place), step in zip(self.places, self.steps.tolist())]
        self.options: dict[tuple[int, int, int], Any] = {key: _abi.sized(self._rule.options_type) for key in dict.fromkeys(keys)}
        for row, (entry, key) in enumerate(zip(self.entries, keys)):
            options = self.options[key]
            if seeds is not None:
                options.rounding, options.rounding_seed = _abi.ROUNDINGS["stochastic"], seeds[row]
            entry.options = ctypes.addressof(options)

    def refresh(self, groups: list[dict[str, Any]], states: Any) -> bool:
        """Patches new gradients in; False if the table no longer describes the optimizer's tensors."""
        self._groups = groups
        try:
            if len(groups) != len(self._lists) or len(states) != len(self._states):
                return False
            for group, known, flag in zip(groups, self._lists, self._flags):
                params = group["params"]
                if len(params) != len(known) or not all(map(is_, params, known)) or is_torchs(group) is not flag:
                    return False
            if not all(map(is_, states.values(), self._states)) or (self._counting and not torch.equal(self.steps, self._known)):
                return False
            if self._shared and any(float(step) != float(self.steps[number]) for number, step in self._shared.items()):
                return False
            for part in self._slices:
                if self._load is not None:
                    self._load(*part.lines)
                if not part.refresh(self._grads, self.entries):
                    return False
            if self._load is None and len(self.places) >= _MANY:
                self._note_lines()
            return True
        except _ABSENT:
            # Building the table again names the reason.
            return False

    def _note_lines(self) -> None:
        """Prepares the loading of many objects, in the second step: a table that serves one step does not need it."""
        self._refreshed += 1
        if self._refreshed == 2:
            for part in self._slices:
                part.note_lines()
            self._load = _native.short("spw_topo_prefetch")

    @property
    def grads(self) -> list[torch.Tensor]:
        """The gradients of the rows, between `refresh` and `release_grads`."""
        return [grad for part in self._slices for grad in part.grads]

    def has_memory(self) -> bool:
        """True if parameters and states lie where they did in the last step, with their dtypes and shapes."""
        try:
            return all(part.has_memory(part.local(part.owners)) and part.has_states(self._all) for part in self._slices)
        except _ABSENT:
            return False

    def fits(self, grads: Sequence[torch.Tensor]) -> bool:
        """True if gradients of all rows have the dtypes and shapes of those of the last step."""
        return all(part.grads_same(*grads[part.rows.start : part.rows.stop]) for part in self._slices)

    def release_grads(self) -> None:
        """Drops the references to the gradients, so that `zero_grad` frees their memory."""
        for part in self._slices:
            part.grads = []

    def run(self, options: Any, status: list[int]) -> None:
        """Steps all rows; appends the status of the call, and no signal handler runs between the call and that."""
        status.extend(starmap(self._call, ((ctypes.byref(options), ctypes.addressof(self.entries), len(self.places), None),)))

    def check(self, options: Any) -> None:
        """Raises the error with which `run` would refuse; changes nothing."""
        _native.call(f"spw_{self._rule.c_name}_check", ctypes.byref(options), ctypes.addressof(self.entries), len(self.places))

    def counted(self, by: int) -> tuple[torch.Tensor, dict[tuple[int, int, int], Any]]:
        """Step counts and options after `by` more steps, for `set_counts`."""
        options = {}
        for (group, step, place), own in self.options.items():
            options[group, step + by, place] = own
        return self.steps + by if self._counting else self.steps.clone(), options

    def set_counts(self, counts: tuple[torch.Tensor, dict[tuple[int, int, int], Any]]) -> None:
        """Sets the step counts."""
        steps, self.options = counts
        self.steps.copy_(steps)
        self._known = steps
        for number, step in self._shared.items():
            step.fill_(float(steps[number]))

    def params(self) -> list[torch.Tensor]:
        """The parameters of the rows."""
        return [param for part in self._slices for param in part.local(part.owners)] if self._owners is None else self._owners

    def watched(self) -> list[torch.Tensor]:
        """The parameters whose versions show if the program has written to them: those with float32 masters."""
        return [param for part in self._slices if part.has_masters for param in part.local(part.owners)]

    def written(self) -> list[torch.Tensor]:
        """The tensors that a step writes, except for the step counts."""
        states = (state.items() for part in self._slices for state in part.inner)
        tensors = [value for items in states for name, value in items if name != "step" and isinstance(value, torch.Tensor)]
        return [*self.params(), *map(local, tensors)]

    def note(self, versions: list[int], late: bool) -> None:
        """Remembers versions of `watched` after a step. `late`: the program may have written since."""
        for part in self._slices:
            if part.has_masters:
                count = len(part.owners)
                part.note(versions[:count], late)
                versions = versions[count:]

    def noted(self) -> Iterator[tuple[torch.Tensor, Note]]:
        """Each parameter with low bits, and its note."""
        for part in self._slices:
            yield from zip(part.owners, part.notes)

    def name(self, number: int) -> str:
        """The name of a row in messages."""
        group, place = self.places[number]
        return name_of(self._groups[group], group, place)

    row_name = name


class Slice:
    """Some consecutive parameters of a table, which are compared with their tensors of the step before. `rows` are stepped by Spillway.

    Args:
        states: The optimizer's `state`.
        params: All parameters of the slice.
        mask: For each of them whether it has a row.
        rows: The rows, in the order of the parameters.
        names: Names of the states of each row, without the master.
        master: The name of the rows' masters; empty: they have none.
        first: Number of the first row in the table.
        grad_name: Attribute of a parameter that holds its gradient."""

    def __init__(
        self,
        states: Any,
        params: list[torch.Tensor],
        mask: list[bool],
        rows: list[Row],
        names: Iterable[str],
        master: str,
        first: int,
        grad_name: str,
    ):
        self._params, self._mask = params, None if all(mask) else mask
        self._grad = attrgetter(grad_name)
        self.rows = range(first, first + len(rows))
        self._types = list(map(type, map(self._grad, params)))
        self.owners = list(compress(params, mask))
        #: The rows whose parameters are DTensors.
        self.distributed = [at for at, owner in enumerate(self.owners) if isinstance(owner, DTensor)]
        self.inner = [states[owner] for owner in self.owners]
        self._params_same = properties_of([row.param for row in rows])
        #: Compares gradients of all rows with the present ones, see properties_of().
        self.grads_same = properties_of([row.grad for row in rows])
        # Comparing lists takes two thirds of the time of making arrays.
        self._addresses = [row.param.data_ptr() for row in rows]
        #: The addresses of gradients in the C table; None while they are written.
        self._grad_addresses: list[int] | None = [row.grad.data_ptr() for row in rows]
        self.grads: list[torch.Tensor] = []
        self._step_addresses: list[int] = []
        self.has_masters = bool(master) and master != LOW
        #: Versions of parameters with f32 masters after the last step.
        self.versions: list[int] = list(map(_version, self.local(self.owners))) if self.has_masters else []
        #: Of each row with low bits.
        self.notes: list[Note] = [Note.of(state, row.low_sums) for state, row in zip(self.inner, rows) if row.low_sums is not None]
        self._master_of = itemgetter(master) if master else None
        #: The versions of masters or low bits at the last step, which does not change them, and at the last refresh; whether a row takes no
        #: values of its parameter.
        self._master_versions = self._versions_of_masters()
        self._masters_now, self._ignores = self._master_versions, False
        states_of = [row.states if row.master is None else (*row.states, row.master) for row in rows]
        of_rows = list(chain.from_iterable(zip(*states_of)))
        # An address alone does not tell a state from another one that lies there now.
        self._states_same, self._state_addresses = properties_of(of_rows), list(map(_data_ptr, of_rows))
        # One getter for each name: one that gets all of them makes tuples, and takes twice as long.
        self._getters = list(map(itemgetter, [*names, *([master] if master else [])]))
        #: Address and number of the addresses of cache lines, see note_lines().
        self.lines = (0, 0)

    def note(self, versions: list[int], late: bool) -> None:
        """Remembers these versions of the parameters."""
        self.versions = versions
        if not late:
            self._master_versions = self._masters_now

    def note_steps(self) -> None:
        """Remembers where the step counts lie."""
        self._step_addresses = list(map(_data_ptr, map(_step, self.inner)))

    def note_lines(self) -> None:
        """Remembers the cache lines that `refresh` reads. What lies there later does not matter: loading a line reads no memory."""
        getters = [*self._getters, *([_step] if self._step_addresses else [])]
        tensors = [*self.owners, *self.grads, *chain.from_iterable(map(get, self.inner) for get in getters)]
        try:
            behind = [(tensor._cdata, tensor.untyped_storage()._cdata) for tensor in map(local, tensors)]
        except AttributeError:  # another version of torch
            behind = []
        objects = [*map(id, self.inner), *map(id, tensors)]
        spans = ((objects, _OBJECT), ([one for one, _ in behind], _TENSOR), ([other for _, other in behind], _STORAGE))
        lines = [
            torch.tensor(starts, dtype=torch.int64, device="cpu").add(offset)
            for starts, length in spans
            for offset in [*range(0, length - 1, 64), length - 1]
        ]
        self._lines = torch.cat(lines).bitwise_and_(-64).unique()
        self.lines = self._lines.data_ptr(), self._lines.numel()

    def refresh(self, words: torch.Tensor, entries: Any) -> bool:
        """Compares parameters and states with those of the last step, takes the present gradients, and writes their addresses to `words`,
        one for each of the table's `entries`. False if something does not fit the rows."""
        params = self.owners if not self.distributed else self.local(self.owners)
        if not self.has_memory(params):
            return False
        self._masters_now = self._versions_of_masters()
        if self._ignores or self._masters_now != self._master_versions:
            if self.notes:
                self.notes, self._master_versions = [note.present() for note in self.notes], self._masters_now
            else:
                self._choose_masters(params, entries)
        if self._step_addresses and list(map(_data_ptr, map(_step, self.inner))) != self._step_addresses:
            return False
        grads = list(map(self._grad, self._params))
        if self._mask is not None:
            # A gradient that came or went; without a mask, the comparison of properties finds it.
            if list(map(type, grads)) != self._types:
                return False
            grads = list(compress(grads, self._mask))
        if self.distributed:
            if any(grads[at].placements != self.owners[at].placements for at in self.distributed):
                return False
            grads = self.local(grads)
        if not self.grads_same(*grads):
            return False
        self.grads, addresses = grads, list(map(_data_ptr, grads))
        if addresses != self._grad_addresses:
            # A signal handler may raise between two of these lines: the next step then writes all addresses again.
            self._grad_addresses = None
            if addresses:
                words[self.rows.start : self.rows.stop].copy_(torch.frombuffer(array("Q", addresses), dtype=torch.int64))
            self._grad_addresses = addresses
        return True

    def _versions_of_masters(self) -> list[int]:
        """The versions of the masters or low bits."""
        return [] if self._master_of is None else list(map(_version, self.local(map(self._master_of, self.inner))))

    def _choose_masters(self, params: Sequence[torch.Tensor], entries: Any) -> None:
        """Lets an f32 master that the program has written to count, if the program has not written to its parameter too."""
        written = [
            now != before and version == known
            for now, before, version, known in zip(self._masters_now, self._master_versions, map(_version, params), self.versions)
        ]
        for row, is_written in zip(self.rows, written):
            entries[row].take_copy = not is_written
        self._ignores = any(written)

    def has_memory(self, params: Sequence[torch.Tensor]) -> bool:
        """True if these parameters and the present states lie where those of the rows did, with their dtypes and shapes."""
        if not self._params_same(*params) or list(map(_data_ptr, params)) != self._addresses:
            return False
        states: list[Any] = []
        for get in self._getters:
            states += map(get, self.inner)
        states = states if not self.distributed else self.local(states)
        return self._states_same(*states) and list(map(_data_ptr, states)) == self._state_addresses

    def has_states(self, states: Any) -> bool:
        """True if `states` has the dictionaries of the rows."""
        return all(map(is_, map(states.get, self.owners), self.inner))

    def local(self, tensors: Iterable[Any]) -> Any:
        """The local parts of DTensors."""
        return list(map(local, tensors)) if self.distributed else tensors


def narrow_table(
    rows: Sequence[tuple[torch.Tensor, ...]], scales: Iterable[tuple[torch.Tensor, ...]], split: Iterable[tuple[torch.Tensor, ...]]
) -> tuple[Any, list[Row]]:
    """The C table of parameters with 8-bit moments or split masters, and what keeps its memory.

    Args:
        rows: Of each parameter the parameter, the gradient, both moments or their codes, and the copy, if there is one.
        scales: Of each one the scales of both moments; empty: its moments are floats.
        split: Of each one the low bits and the sums of their blocks; empty: its master is not split."""
    table, held = (_abi.Tensor * len(rows))(), list[Row]()
    for entry, (param, grad, first, second, *copy), of_codes, low in zip(table, rows, scales, split):
        master, sums = low or (None, None)
        row = Row(0, 0, param, grad, (first, second, *of_codes), master, copy[0] if copy else None, sums)
        Table._fill_row(_tensor_rows.begin(entry, param.numel()), row, ["exp_avg", "exp_avg_sq", *_SCALES])
        held.append(row)
    return table, held


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    return tensor.data_ptr(), tensor.numel(), _DTYPES[tensor.dtype]


def check_adam(options: Any, group: int) -> None:
    """Raises the error of a group's options of Adam that are out of range. It names the option and the group."""
    try:
        _native.call("spw_adam_check", ctypes.byref(options), None, 0)
    except SpillwayError as error:
        raise named(error, str, group) from None


def named(error: SpillwayError, name: Callable[[int], str], group: int | None = None) -> SpillwayError:
    """An error of the library with names of parameters and groups, or that of a signal handler. `group`: the group whose options the call
    itself had."""
    if not is_own(error):
        return error

    def place(match: re.Match[str]) -> str:
        row, of_row, of_call = match.groups()
        option = _OPTION_NAMES.get(of_row or of_call, of_row or of_call)
        where = f"param_groups[{group}]" if row is None else name(int(row))
        return where if option is None else f"{where}, option {option}"

    return type(error)(_PLACES.sub(place, str(error)), error.status)
