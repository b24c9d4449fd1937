"""The home of states on a tier: masters, moments and their commits.

Calls of several threads run one after another, so that each sees the states between two steps.

The values of a state dict are ordinary tensors, which torch.save and torch.distributed.checkpoint take. They are read and written subgroup
by subgroup. Those of large parameters are maps of files without a name beside the tier's first directory: the system may write their pages
out, so that a state dict needs host memory for one subgroup and the small parameters only. Or the values are placeholders: tensors of the
meta device, which torch refuses to save, with an object that reads the value. `dcp` moves them one by one."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, Literal, TypeVar

import torch

from .._commit import Commit
from .._early.arrivals import tell
from .._groups import TORCHS, Rule
from .._snapshot import Snapshot
from .._tier_options import number as whole_number
from .._tier_options import payload_of
from ..errors import InvalidArgumentError, OutOfOrderError, OwnSuppressed, SpillwayError, UnsupportedError, is_own
from ..tiered import Prepared, mapped
from ._codes import check_codes, decoded
from ._foreign import as_torchs
from ._given import Given
from ._home import ByTorch, Call, Home
from ._layout import Piece
from ._offload.memory import Memory as MemoryBytes
from ._offload.memory import staging
from ._states import LOW, MASTER, MOMENTS, Precision, check_not_split, check_steps
from ._tensors import apart, has_memory, like, local
from ._tier_split import SplitStates, low_of_numbers
from ._tier_states import TierOptions, TierStates
from ._tier_step import Beside, TierTable

_Result = TypeVar("_Result")
#: Elements from which a value is a map of a file.
_MAPPED = 16 << 10
#: The attribute of a placeholder with the object that reads it.
_VALUE = "_spillway_value"


class TierHome(Home):
    """States on a tier.

    Args:
        name, rule, precision: As for Home.
        undo: The optimizer's `undo`.
        groups: All its groups.
        states: Its states, of which there are none; receives the step counts.
        given: The `tier` argument.
        host_memory: As for spillway.Swap.
        overlap: A step starts during backward.

    Raises:
        InvalidArgumentError: The tier holds states of other parameters, or the budget is too small.
        UnsupportedError: A parameter cannot have its states on a tier, or a keyword cannot be combined with it."""

    def __init__(
        self,
        name: str,
        rule: Rule,
        precision: Precision,
        undo: bool,
        groups: list[dict[str, Any]],
        states: Any,
        given: Any,
        host_memory: int | Literal["auto"] | None,
        overlap: bool,
    ):
        super().__init__(name, rule, precision)
        _check_keywords(name, rule, undo, groups)
        self._lock = threading.RLock()
        where = TierOptions.of(given)
        self._asked = {
            "tier": [path.directory and os.fspath(path.directory) for path in where.paths],
            "host_memory": host_memory,
            "overlap": overlap,
        }
        kind = SplitStates if precision.master == "split" else TierStates
        self.on_tier = kind(name, groups, precision, where, host_memory)
        self.on_tier.begin(states)
        self.tiered = self.on_tier.tiered
        self.resumed_step = self.tiered.resumed_step
        self.payload = b"" if self.tiered.committed is None else self.tiered.committed.payload
        self._beside: Beside | None = None
        self._placeholders: list[Value] | None = None
        self._given = Given()
        # Hooks live as long as their parameters; they are removed with the optimizer.
        self._hooks: list[Any] = []
        weakref.finalize(self, _remove, self._hooks)
        if overlap:
            self._beside = Beside(self.on_tier, rule)
            self._beside.use(groups, states)
            for param, stated in zip(self.on_tier.params, self.on_tier.stated):
                if stated and param.requires_grad:
                    self._hooks.append(tell(param, self.arrived))

    def facts(self) -> dict[str, Any]:
        """As of the base."""
        return {**self._asked, "closed": True} if self.tiered.closed else self._asked

    def memory(self, states: Any) -> MemoryBytes:
        """As of the base."""
        on_tier = self.on_tier
        ring = staging(on_tier.gradients.staging_bytes())
        return MemoryBytes({"buffers": on_tier.tiered.swap.budget.host_bytes, "copies": on_tier.copied_bytes(), **ring}, {})

    def check_undo(self) -> None:
        """As of the base."""
        _refuse_with_tier(self.name, "undo")

    def arrived(self, param: torch.Tensor) -> None:
        """Called when backward has completed a parameter's gradient, with `overlap`."""
        if self._beside is not None and not self.tiered.closed:
            self.alone(partial(self._beside.arrived, self.on_tier.numbers[id(param)]))

    def alone(self, work: Callable[[], _Result]) -> _Result:
        """Returns work(), during which no other thread uses the states. In a forked child no thread would free the lock; the handles refuse
        every call there."""
        if not self.tiered.is_own:
            return super().alone(work)
        with self._lock:
            return super().alone(work)

    def rows(self, groups: list[dict[str, Any]], states: Any) -> TierTable:
        """The table of the present tensors. A refusal here is told to the processes that wait for this one's norm."""
        self.tiered.check()
        self._given.check()
        if self._beside is not None:
            self._beside.use(groups, states)
        return TierTable(self.on_tier, groups, states, self._beside is not None)

    def step(self, rows: Any, options: Any) -> None:
        """Steps the rows of a table. With `overlap`, those that were not submitted during backward are."""
        beside = self._beside
        if beside is None or not self._prepared(beside, rows):
            super().step(rows, options)
        else:
            # Held before the verdict: a signal handler may raise after it.
            self._pending = call = Call(rows, 1)
            try:
                beside.decide(rows, call.status)
            finally:
                self.note_result()
        self._next()

    def together(self, work: Callable[[], None]) -> None:
        """Calls work(), a step, in all processes of the tier."""
        self.tiered.step(work, lambda: self.on_tier.count)

    def passed(self) -> None:
        """Counts a step in which this process has no gradients: others may have some."""
        self.on_tier.count += 1

    def _prepared(self, beside: Beside, rows: TierTable) -> bool:
        """False if the library refuses a row; the step of all then raises the error that names it."""
        beside.scale = self.scale
        try:
            beside.prepare(rows)
        except SpillwayError as error:
            beside.abandon()
            if not is_own(error):
                raise
            return False
        return True

    def _next(self) -> None:
        """Begins the next step. It raises its errors itself."""
        if self._beside is not None:
            with OwnSuppressed():
                self._beside.stepped()

    def skipped(self) -> None:
        """A step was skipped: what was submitted of it is taken back."""
        if self._beside is not None:
            self._beside.abandon()
            self._next()

    def note_result(self, late: bool = False) -> None:
        """Notes the result of a call, also of a step whose verdict was given before a signal handler raised."""
        try:
            if self._beside is not None:
                self._beside.complete()
        finally:
            if self._pending is not None and self._pending.status == [0]:
                self.on_tier.weights.give_all()
            super().note_result(late)

    def _rest(self, also_mixed: bool = False) -> None:
        """Before a use of the states: takes back what was submitted of the next step, which then waits for step()."""
        self.tiered.check(also_mixed)
        if self._beside is not None:
            self._beside.abandon()

    def close(self) -> None:
        """Closes the tier."""
        _remove(self._hooks)
        if self._beside is not None:
            self._beside.close()
        self.tiered.close()

    def check_new_group(self) -> None:
        """Raises an error: no group can be added."""
        raise UnsupportedError(
            f"{self.name}.add_param_group: the layout of states on a tier is fixed at construction; pass all groups to the constructor"
        )

    def fresh(self, states: Any) -> Home:
        """Raises an error: the optimizer cannot be copied."""
        raise TypeError(f"an {self.name} with states on a tier cannot be copied or pickled; save its state_dict()")

    def saved(self, states: Any) -> Any:
        """The states with all values, which are read subgroup by subgroup."""
        placeholders = self._placeholders
        # A load that mends mixed states begins with placeholders.
        self._rest(also_mixed=placeholders is not None)
        # No check for writes to earlier values: set_optimizer_state_dict() may ask for a state dict before it loads the one that it got.
        whole = _whole_states(self.on_tier, states, None if placeholders is None else self._read)
        if placeholders is not None:
            placeholders += [value for state in whole.values() for tensor in state.values() if (value := value_of(tensor)) is not None]
        names = {param: self.on_tier.names[self.on_tier.numbers[id(param)]] for param in whole}
        self._given.note((f"{names[param]}: {key!r}", tensor) for param, state in whole.items() for key, tensor in state.items())
        return whole

    @contextmanager
    def with_placeholders(self) -> Iterator[list[Value]]:
        """While this is open, state dicts have placeholders for the values on the tier. Adds their Values to the list."""
        self._placeholders = []
        try:
            yield self._placeholders
        finally:
            self._placeholders = None

    def _read(self, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        def work() -> torch.Tensor:
            self._rest()
            return read()

        return self.alone(work)

    def load(self, by_torch: ByTorch) -> None:
        """Loads a state dict to the tier, subgroup by subgroup."""
        self._rest(also_mixed=True)
        self.on_tier.check_parameters()
        found: dict[int, dict[str, Any]] = {}

        def take(loaded: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
            """Takes the states, so that torch loads the groups only."""
            loaded = as_torchs(loaded)
            for saved, state in loaded["state"].items():
                check_codes(state, f"state[{saved!r}]")
            loaded = {**loaded, "state": {saved: decoded(state) for saved, state in loaded["state"].items()}}
            check_steps(loaded, True)
            found.update(_check_loaded(self.on_tier, groups, loaded))
            return {**loaded, "state": {}}

        groups, states = by_torch(take, True)
        self.tiered.whole(lambda: _write_through(self.on_tier, states, found))
        self._given.forget()
        if self._beside is not None:
            self._beside.use(groups, states)

    def rollback(self, states: Any) -> None:
        """Restores the last commit."""
        self.tiered.finish()
        self.tiered.check(also_mixed=True)
        committed = self.tiered.committed
        if committed is None:
            raise InvalidArgumentError(f"{self.name}.rollback: nothing was committed to the tier; construct the optimizer again")
        self.on_tier.check_parameters()

        def back() -> None:
            if self._beside is not None:
                self._beside.forget()
            self.tiered.rollback()
            if self._beside is not None:
                self._beside.reset()
            self.on_tier.restore(states, committed)

        self.tiered.whole(back)
        self._given.forget()

    def master(self, param: torch.Tensor, states: Any) -> torch.Tensor:
        """The master of a parameter: the parameter itself if it is float32, or frozen."""
        self._rest()
        self._given.check()
        return self.on_tier.master(param)

    def commit(self, states: Any, step: int | None, payload: bytes, wait: bool) -> Commit | None:
        """Makes the present states durable; returns after all ranks have committed, or with a commit beside steps."""

        def prepared() -> Prepared:
            self._rest()
            self._given.check()
            self.on_tier.check_parameters()
            self.on_tier.begin_commit()
            count = self.on_tier.count
            return Prepared(whole_number(count if step is None else step, "step"), count, self.on_tier.facts(states), payload_of(payload))

        begun = self.tiered.commit(prepared, wait)
        if self._beside is not None:
            with OwnSuppressed():
                self._beside.resume()
        return begun

    def snapshot(self, directory: Any, bytes_per_second: int, keep: int | None) -> Snapshot:
        """Starts to write the last commit to a directory."""
        return self.tiered.snapshot(directory, bytes_per_second, keep)

    def restore(self, states: Any, directory: Any) -> int:
        """Returns to a snapshot."""
        self.on_tier.check_parameters()
        found = self.tiered.snapshot_of(directory, self.on_tier.check_record)
        # The payload of the last commit belongs to an older step.
        self.tiered.keep(found, self.on_tier.count, lambda: self.commit(states, None, b"", True))

        def take() -> None:
            if self._beside is not None:
                self._beside.forget()
            try:
                self.tiered.take(found)
            except BaseException:
                # After an error the states are those of the last commit.
                if self.tiered.committed is not None and not self.tiered.apart:
                    self.rollback(states)
                raise
            if self._beside is not None:
                self._beside.reset()
            self.on_tier.restore(states, found.record)

        self.tiered.whole(take)
        self._given.forget()
        self.payload = found.record.payload
        return found.step


def _remove(hooks: list[Any]) -> None:
    while hooks:
        hooks.pop().remove()


def _check_keywords(name: str, rule: Rule, undo: bool, groups: list[dict[str, Any]]) -> None:
    refused = {"undo": undo}
    for group in groups:
        refused.update({flag: True for flag in TORCHS if group.get(flag)})
    if rule.c_name != "adam":
        raise UnsupportedError(f"{name}: states on a tier are for Adam and AdamW; leave out tier")
    for keyword, given in refused.items():
        if given:
            _refuse_with_tier(name, keyword)


def _refuse_with_tier(name: str, keyword: str) -> None:
    raise UnsupportedError(f"{name}: {keyword} cannot be combined with tier; leave out one of them")


class Value:
    """The value of a placeholder.

    Args:
        read: Returns the part of the value that this process has.

    Attributes:
        absent: True if a checkpoint has no such value.
        fill: Fills a float32 tensor with the value of a checkpoint that was loaded; None: none was."""

    def __init__(self, read: Callable[[], torch.Tensor]):
        self.read, self.absent = read, False
        self.fill: Callable[[torch.Tensor], object] | None = None


def value_of(tensor: Any) -> Value | None:
    """The Value of a placeholder; None for any other object."""
    return getattr(tensor, _VALUE, None) if isinstance(tensor, torch.Tensor) else None


class Reading:
    """Reads values of the present states, one parameter after the other. Holds those of one parameter, and a subgroup.

    Args:
        on_tier: The states."""

    def __init__(self, on_tier: TierStates):
        self._on_tier, self._changes = on_tier, on_tier.tiered.changes_made
        self._subgroup, self._parts = -1, dict[str, torch.Tensor]()
        self._number, self._values = -1, dict[str, torch.Tensor]()

    def value(self, number: int, key: str) -> torch.Tensor:
        """A value of a parameter. Raises OutOfOrderError if the states have changed since this object was made."""
        if self._on_tier.tiered.changes_made != self._changes:
            raise OutOfOrderError(
                f"{self._on_tier.names[number]}: the states on the tier have changed since the state dict was made; make it again, and "
                "save it before the next step"
            )
        if number != self._number:
            self._values.clear()
            self._number = -1
            self._values = {name: torch.empty_like(shaped, device="cpu") for name, shaped in self.shaped(number)}
            self.fill(number, self._values)
            self._number = number
        return self._values[key]

    def shaped(self, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The names of a parameter's values, and tensors of their shapes and dtypes without memory."""
        own, on_tier = local(self._on_tier.params[number]), self._on_tier
        for key in MOMENTS:
            yield key, torch.empty(own.shape, dtype=on_tier.moment_dtype, device="meta")
        if (master := on_tier.master_state(number)) is not None:
            yield master[0], torch.empty(own.shape, dtype=master[1], device="meta")

    def fill(self, number: int, values: dict[str, torch.Tensor]) -> None:
        """Fills tensors with the values of a parameter."""
        layout, master = self._on_tier.layout, self._on_tier.master_state(number)
        for piece in layout.of_parameter[number]:
            if piece.subgroup != self._subgroup:
                elements = layout.elements[piece.subgroup]
                self._parts = {key: torch.empty(elements, device="cpu") for key in (MASTER, *MOMENTS)}
                self._subgroup = -1
                self._on_tier.tiered.read(piece.subgroup, *self._parts.values())
                self._subgroup = piece.subgroup
            for key, to in values.items():
                part = self._parts[key if key in MOMENTS else MASTER][piece.first : piece.first + piece.count]
                to.view(-1)[piece.start : piece.start + piece.count] = low_of_numbers(part) if key == LOW else part
        if master is not None and not self._on_tier.tiered.mixed:
            self._on_tier.settled(number, values[master[0]])


def _whole_states(
    on_tier: TierStates, states: Any, reads: Callable[[Callable[[], torch.Tensor]], torch.Tensor] | None = None
) -> dict[torch.Tensor, dict[str, Any]]:
    """The state of every parameter, with the values on the tier, or with placeholders.

    Args:
        on_tier: The states.
        states: The optimizer's, which has the step counts.
        reads: Calls the function that reads the value of a placeholder; None: the values themselves are returned."""
    reading, directory = Reading(on_tier), on_tier.state_dicts
    whole: dict[torch.Tensor, dict[str, Any]] = {}
    for number, (param, stated) in enumerate(zip(on_tier.params, on_tier.stated)):
        if not stated:
            continue
        made = dict(reading.shaped(number))
        if reads is None:
            made = {key: _empty(value, directory) for key, value in made.items()}
            reading.fill(number, made)
        made = {key: like(param, value) for key, value in made.items()}
        if reads is not None:
            for key, value in made.items():
                setattr(value, _VALUE, Value(partial(reads, partial(reading.value, number, key))))
        whole[param] = {"step": on_tier.step_count(states, number).clone(), **made}
    return whole


def _empty(shaped: torch.Tensor, directory: Any) -> torch.Tensor:
    if shaped.numel() < _MAPPED or directory is None:
        return torch.empty_like(shaped, device="cpu")
    try:
        return mapped(shaped.numel(), directory, shaped.dtype).view(shaped.shape)
    except OSError as error:
        cure = "; make room there, pass state_dicts to TierOptions, a directory with room, or use spillway.torch.dcp, which needs none"
        raise OSError(error.errno, f"{error.strerror}{cure}", error.filename) from None


def _check_loaded(on_tier: TierStates, groups: list[dict[str, Any]], loaded: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The saved states by the number of their parameter. Raises InvalidArgumentError if one does not fit; nothing was written then."""
    saved_groups = loaded["param_groups"]
    if [len(group["params"]) for group in saved_groups] != [len(group["params"]) for group in groups]:
        # torch's own error follows.
        return {}
    ids = chain.from_iterable(group["params"] for group in saved_groups)
    params = chain.from_iterable(group["params"] for group in groups)
    found = {}
    for saved, param in zip(ids, params):
        number = on_tier.numbers[id(param)]
        state = {key: value for key, value in loaded["state"].get(saved, {}).items() if not _is_absent(value)}
        if not state or (not on_tier.stated[number] and float(state.get("step", 0)) == 0):
            continue
        if not on_tier.stated[number]:
            raise InvalidArgumentError(
                f"load_state_dict: {on_tier.names[number]} has no states on the tier, because it did not require a gradient "
                "when the optimizer was constructed, and its saved state has been stepped; construct the optimizer while the "
                "parameter requires a gradient; nothing was loaded"
            )
        _check_state(on_tier, param, state, f"load_state_dict: {on_tier.names[number]}")
        found[number] = state
    return found


def _check_state(on_tier: TierStates, param: torch.Tensor, state: dict[str, Any], name: str) -> None:
    """Raises InvalidArgumentError if a saved state cannot be written to the tier."""
    if not on_tier.low_bits:
        check_not_split(state, name)
    for key in MOMENTS:
        if key not in state:
            raise InvalidArgumentError(f"{name}: its saved state lacks {key!r}; load the state of an Adam or AdamW; nothing was loaded")
    for key in (*MOMENTS, MASTER, LOW):
        if key not in state:
            continue
        saved, value = state[key], value_of(state[key])
        if value is not None and value.fill is None:
            raise InvalidArgumentError(
                f"{name}: its state {key!r} is a placeholder without a value; call spillway.torch.dcp.load() first; nothing was loaded"
            )
        if not isinstance(saved, torch.Tensor) or not (saved.is_floating_point() or key == LOW) or local(saved).layout is not torch.strided:
            what = f"{saved.dtype}, {local(saved).layout}" if isinstance(saved, torch.Tensor) else repr(saved)
            raise InvalidArgumentError(
                f"{name}: its saved state {key!r} is {what}; load a dense tensor of floating point numbers; nothing was loaded"
            )
        if local(saved).shape != local(param).shape:
            raise InvalidArgumentError(
                f"{name} has shape {tuple(local(param).shape)}, its saved state {key!r} {tuple(local(saved).shape)}; load the state of "
                "this model; nothing was loaded"
            )
        if apart(param, saved):
            raise InvalidArgumentError(
                f"{name}: its saved state {key!r} is not placed as the parameter is; load a state dict of this mesh, or by torch's DCP; "
                "nothing was loaded"
            )
        if saved.is_meta and value is None or not has_memory(local(saved)):
            raise InvalidArgumentError(f"{name}: its saved state {key!r} has no memory; load a state dict with values; nothing was loaded")


def _is_absent(tensor: Any) -> bool:
    value = value_of(tensor)
    return value is not None and value.absent


def _write_through(on_tier: TierStates, states: Any, found: dict[int, dict[str, Any]]) -> None:
    """Writes saved states to the tier. A parameter without one gets moments of zero; without a saved master, its value is the master."""
    saved = _Saved(found)
    for subgroup, elements in on_tier.each_subgroup("writing the states to the tier"):
        parts = {MASTER: on_tier.first_masters(subgroup), **{key: torch.zeros(elements, device="cpu") for key in MOMENTS}}
        for piece in on_tier.layout.of_subgroup[subgroup]:
            state, flat = found.get(piece.parameter, {}), partial(saved.flat, piece)
            for key, part in parts.items():
                to = part[piece.first : piece.first + piece.count]
                # No name holds a value while the next one is read.
                if key == MASTER:
                    _copy(to, on_tier.saved_master(piece.parameter, state, flat))
                elif key in state:
                    _copy(to, flat(key))
        on_tier.tiered.write(subgroup, *parts.values())
    on_tier.set_steps(states, [float(found.get(number, {}).get("step", 0)) for number in range(len(on_tier.params))])
    # A master that does not round to its parameter is replaced at the next step, as without a tier.
    on_tier.forget()


def _copy(to: torch.Tensor, value: torch.Tensor | None) -> None:
    if value is not None:
        to.copy_(value)


class _Saved:
    """The values of saved states. Those of placeholders are read when they are used, and one parameter's are held."""

    def __init__(self, found: dict[int, dict[str, Any]]):
        self._found, self._number, self._read = found, -1, dict[str, torch.Tensor]()

    def flat(self, piece: Piece, key: str) -> torch.Tensor:
        """The elements of a piece, of a value of its parameter."""
        return self._whole(piece.parameter, key)[piece.start : piece.start + piece.count]

    def _whole(self, number: int, key: str) -> torch.Tensor:
        tensor = self._found[number][key]
        value = value_of(tensor)
        if value is None or value.fill is None:
            return local(tensor).reshape(-1)
        if number != self._number:
            self._number, self._read = number, {}
        if key not in self._read:
            made = torch.empty(local(tensor).shape, dtype=torch.int16 if key == LOW else torch.float32, device="cpu")
            value.fill(made)
            self._read[key] = made.reshape(-1)
        return self._read[key]
