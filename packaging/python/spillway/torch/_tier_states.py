"""The parameters of an optimizer and their masters on a tier.

A commit names every parameter's shape and dtype, so that a tier of another model is refused. `_layout` says where their elements are.

Invariants:
- Parameters that require no gradient at construction have no states. A commit fixes which ones these are.
- The master of an f32 parameter equals the parameter, and that of a 16-bit parameter rounds to it, unless the program has written to the
  parameter; the next step gives the master the new values.
- State moves by subgroups, through memory of one subgroup."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

import torch

from .. import _abi, _ranks
from .._holdings import Holding, alignment_of
from .._parts import Commits
from .._progress import Progress, Told
from .._written import changed, facts, is_dense, sums
from ..errors import InvalidArgumentError, SpillwayError, UnsupportedError
from ..swap import UNROUNDED, MomentDtype, Swap, state_bytes
from ..tier import Tier, TierPath
from ..tiered import Place, Prepared, Record, Tiered
from ._copies import Gradients, Weights
from ._layout import Layout, Piece, box_of, described, holding_of, in_words, values_of, views
from ._norm import part_of
from ._states import LOW, MASTER, MOMENTS, Precision, is_count, take_values
from ._tensors import CODES, check_has_memory, holds_values, local, name_of

#: Elements of a subgroup without a memory budget: 48 MiB of state.
_USUAL, _LEAST = 4 << 20, 4 << 10
#: The author of the commits.
_BY = "torch"
#: The words that wrappers put into the names of parameters.
_WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


class TierOptions(NamedTuple):
    """Where and how an optimizer keeps its states on a tier.

    Attributes:
        paths: A directory, or a list of directories, "s3://BUCKET/PREFIX", spillway.tier.TierPath, or None for memory.
        job: Name of the run, and of a directory on each path.
        host: Name of this machine, and of a directory below that; None: the host name.
        rank, world: Number of this process and of all processes; None: those of torch.distributed, else 0 and 1.
        resume: "auto" resumes a committed state and otherwise begins a new one; "create" refuses a committed state; "resume" requires one.
        begin_from: A new state begins with the last commit of this other job, with any number of ranks, and not with the parameters. Pass
            the job's directory, as PATH/JOB, or a list of these on each path; or the directory of a snapshot. All ranks must be able to
            read all of it. The other job is unchanged. A tier with a commit of its own resumes that commit.
        durability: What a commit survives: "data" a power failure; "process" only the end of the process; "full" like "data", and also
            syncs directories.
        part_elements: Number of elements of a subgroup of a new tier; None: 4 Mi, or less to fit the memory budget.
        ratio, speeds: As for spillway.Swap.
        turns: Number of processes that use a device at a time, as for spillway.Tier; 0: any number.
        pin_memory: Lock the buffers' pages in memory.
        io_timeout: Seconds without progress after which a path counts as failed; 0: 60 seconds.
        state_dicts: The directory for the values of state dicts, with room for them; None: the directory of the first path.
        process_group: The group of torch.distributed whose processes commit together; None: the default group.
        progress: Called with the bytes of state that were moved and those that will be, after each subgroup, while a new tier is filled,
            and while states are loaded, restored or resumed. An exception ends the operation. None: a line on a terminal."""

    paths: Any
    job: str = "optimizer"
    host: str | None = None
    rank: int | None = None
    world: int | None = None
    resume: str = "auto"
    durability: str = "data"
    part_elements: int | None = None
    ratio: Sequence[float] | None = None
    speeds: Sequence[float] | None = None
    turns: int = 1
    pin_memory: bool = True
    io_timeout: float = 0.0
    state_dicts: str | os.PathLike[str] | None = None
    begin_from: Any = None
    process_group: Any = None
    progress: Told | None = None

    @staticmethod
    def of(given: Any) -> TierOptions:
        """The options of a `tier` argument."""
        options = given if isinstance(given, TierOptions) else TierOptions(given)
        single = isinstance(options.paths, (str, os.PathLike, TierPath)) or options.paths is None
        paths = [options.paths] if single else list(options.paths) if isinstance(options.paths, Iterable) else []
        if not paths or not all(path is None or (isinstance(path, (str, os.PathLike, TierPath)) and path != "") for path in paths):
            raise InvalidArgumentError(f"tier is {given!r}; pass a directory, a list of directories, or a TierOptions of these")
        _check_tier(options)
        return options._replace(paths=[path if isinstance(path, TierPath) else TierPath(path) for path in paths])

    def place(self) -> Place:
        """Where the tier of this process is."""
        rank, world = (known if given is None else given for given, known in zip((self.rank, self.world), _ranks.own(self.process_group)))
        further = {"mode": self.resume, "durability": self.durability, "io_timeout": self.io_timeout, "turns": self.turns}
        return Place(self.paths, self.job, self.host, rank, world, self.process_group, further)


def _check_tier(options: Any) -> None:
    """Checks the fields of a TierOptions that the library does not check. Raises InvalidArgumentError, whose message names the field."""

    def whole(value: Any, least: int) -> bool:
        return value is None or (isinstance(value, Integral) and not isinstance(value, bool) and value >= least)  # type: ignore[operator]

    def real(value: Any) -> bool:
        return isinstance(value, Real) and not isinstance(value, bool)

    def reals(value: Any) -> bool:
        return value is None or (isinstance(value, Sequence) and all(map(real, value)))

    fits = {
        "rank": (whole(options.rank, 0), "a whole number from 0 on, or None"),
        "world": (whole(options.world, 1), "a whole number from 1 on, or None"),
        "part_elements": (whole(options.part_elements, 1), "a number of elements from 1 on, or None"),
        "ratio": (reals(options.ratio), "a list of numbers, or None"),
        "speeds": (reals(options.speeds), "a list of numbers, or None"),
        "turns": (whole(options.turns, 0), "a number of processes, or 0 for no turns"),
        "pin_memory": (isinstance(options.pin_memory, bool), "True or False"),
        "io_timeout": (real(options.io_timeout) and 0 <= options.io_timeout < 2**31, "seconds, a number from 0 on"),
        "progress": (options.progress is None or callable(options.progress), "a function, or None"),
        "state_dicts": (options.state_dicts is None or os.path.isdir(options.state_dicts), "a directory, or None"),
    }
    for field, (good, wanted) in fits.items():
        if not good:
            raise InvalidArgumentError(f"TierOptions: {field} is {getattr(options, field)!r}; pass {wanted}")


class TierState(dict[str, Any]):
    """The entry of a parameter in `optimizer.state`: it holds the step count only. Its iterator also names the states on the tier, because
    torch.distributed.checkpoint asks it which values to take from a flattened state dict."""

    on_tier: tuple[str, ...] = MOMENTS

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*super().__iter__(), *self.on_tier]))

    def __missing__(self, key: str) -> Any:
        raise KeyError(f"{key}: this state is on the tier; optimizer.state_dict() reads it" if key in self.on_tier else key)


class MasterState(TierState):
    """The entry of a 16-bit parameter, whose master is on the tier too."""

    on_tier = (*MOMENTS, MASTER)


class LowState(TierState):
    """The entry of a parameter with a split master, whose low bits are on the tier too."""

    on_tier = (*MOMENTS, LOW)


#: The entry of a parameter by the state that has its master.
_ENTRIES: dict[str | None, type[TierState]] = {None: TierState, MASTER: MasterState, LOW: LowState}


class TierStates:
    """States on a tier, with f32 masters.

    Args:
        name: Name of the optimizer's class, for messages.
        groups: All its groups.
        precision: The dtypes of its states.
        options, host_memory: Where and how its states are.

    Attributes:
        params, names, stated: All parameters, their names in messages, and whether they have states.
        numbers: The number of each parameter, by its id.
        layout: The subgroups.
        gradients, weights: Those of a step, in memory of the library's reach.
        tiered: The open tier.
        count: Number of steps.
        precision, moment_dtype: The dtypes of the states, and that of the moments in a state dict.
        moments: How the tier stores the moments: "f32", "bf16" or "int8".

    Raises:
        InvalidArgumentError: The tier holds states of other parameters, or the budget is too small.
        UnsupportedError: A parameter cannot have its states on a tier."""

    #: The kind of masters, as `master` has it.
    masters = "f32"
    #: The tier has the low bits of the masters only.
    low_bits = False

    def __init__(
        self, name: str, groups: list[dict[str, Any]], precision: Precision, options: TierOptions, host_memory: int | Literal["auto"] | None
    ):
        self.precision, self.moments = precision, _moments_of(precision)
        self.moment_dtype = torch.bfloat16 if self.moments == "bf16" else torch.float32
        #: Bytes of a parameter's state: the master and the moments.
        self._state_bytes = state_bytes(moment_dtype=self.moments, low_bits=self.low_bits)
        self.params = [param for group in groups for param in group["params"]]
        self.names = [name_of(group, number, place) for number, group in enumerate(groups) for place in range(len(group["params"]))]
        #: The names that the program has given; None for a parameter without one.
        self._given = [given for group in groups for given in (group.get("param_names") or [None] * len(group["params"]))]
        self.stated = [param.requires_grad for param in self.params]
        place = options.place()
        place.together(self._check_served)
        self.numbers = {id(param): number for number, param in enumerate(self.params)}
        self.gradients, self.weights = Gradients(self.params), Weights(self.params)
        # Absolute: a later change of the working directory changes nothing.
        self._state_dicts = None if options.state_dicts is None else os.path.abspath(options.state_dicts)
        #: Facts and sums of parameters, by their numbers, when their masters had their values.
        self._agreed: dict[int, tuple[Any, Any]] = {}
        self._shapes, self._dtypes, self.count = [param.shape for param in self.params], [param.dtype for param in self.params], 0
        self._options = options
        #: The commit of another run that a new tier begins with.
        self._begun_from: Commits | None = None
        self.tiered = Tiered(
            name,
            _BY,
            place,
            "pass another job to TierOptions, and load a checkpoint",
            "the tier holds states that no optimizer of spillway.torch has committed; pass other paths or another job",
            lambda tier, committed: self._update(tier, committed, options, host_memory),
            self._limit,
            found=self._find,
        )

    def _find(self, committed: Record | None) -> None:
        """Before the update of a new tier is opened: finds the commit that the tier begins with."""
        if committed is None and self._options.begin_from is not None:
            self._begun_from = Commits(self._options.begin_from, self._options.place(), _BY, self._holding_of)

    def _holding_of(self, record: Record) -> Holding:
        """What a process of the other run held."""
        if self.low_bits or masters_of(record.facts) != self.masters:
            raise UnsupportedError(
                f"begin_from: the other job has {masters_of(record.facts)!r} masters, and this optimizer {self.masters!r}; begin_from "
                "takes over 'f32' masters only, so load a state dict"
            )
        return holding_of(record.facts, self.names)

    def begin(self, states: Any) -> None:
        """Takes what was committed to the parameters, or begins with the values of the parameters, in all processes. `states` receives the
        step counts."""
        committed = self.tiered.committed
        try:
            if committed is None and self._begun_from is not None:
                self._take_over(states, self._begun_from)
            else:
                self.tiered.place.together(lambda: self._fill(states) if committed is None else self.restore(states, committed))
        except BaseException:
            self.tiered.close()
            raise

    def _fill(self, states: Any) -> None:
        self.set_steps(states, [0.0] * len(self.params))
        for subgroup, elements in self.each_subgroup("filling the tier"):
            zeros = torch.zeros(elements, device="cpu")
            self.tiered.write(subgroup, self.first_masters(subgroup), zeros, zeros)
        self._note_all()

    def _take_over(self, states: Any, others: Commits) -> None:
        """Begins with the elements of another run's commit, and commits them at its step. A kill before that leaves a tier without a
        commit, which begins anew."""
        found = others.give(self.tiered, holding_of(self._facts([0.0] * len(self.params)), self.names))
        steps = [found.get(number, 0.0) for number in range(len(self.params))]
        self.set_steps(states, steps)
        record = others.records[others.own]
        self.count = record.facts["count"]
        self.tiered.commit(lambda: Prepared(others.step, self.count, self._facts(steps), record.payload))
        self.tiered.resumed_step = others.step
        assert self.tiered.committed is not None
        self.restore(states, self.tiered.committed)

    def _update(self, tier: Tier, committed: Record | None, options: TierOptions, host_memory: int | Literal["auto"] | None) -> Swap:
        if committed is not None:
            facts = committed.facts
            check_parameters(facts, self.params, self.names)
            check_order(facts, self._given, self.names, "the tier")
            self._check_masters(facts, f"the tier of the job {options.job!r}")
            if facts["moments"] != self.moments:
                raise InvalidArgumentError(
                    f"the tier of the job {options.job!r} holds moments of {facts['moments']}, and this optimizer has {self.moments}; pass "
                    f'moment_dtype="{facts["moments"]}", or another job'
                )
            self.stated = [number not in facts["stateless"] for number in range(len(self.params))]
            self._check_served()
        elif self._begun_from is not None:
            facts = self._begun_from.records[0].facts
            _check_whole(facts, self.params, self.names, self._begun_from.where)
            check_order(facts, self._given, self.names, self._begun_from.where)
            self.stated = [number not in facts["stateless"] for number in range(len(self.params))]
            self._check_served()
        counts = self._counts()
        most = _part_elements(options, host_memory, sum(counts), self._state_bytes) if committed is None else committed.facts["most"]
        self.layout = Layout(counts, most, self._alignment)
        return Swap(
            tier,
            self.layout.elements,
            host_memory=host_memory,
            ratio=options.ratio,
            speeds=options.speeds,
            huge_pages=options.pin_memory,
            pin_memory=options.pin_memory,
            moment_dtype=self.moments,
            low_bits=self.low_bits,
        )

    @property
    def _alignment(self) -> int:
        """Elements of a parameter and of a subgroup that are not divided."""
        return alignment_of(self.moments)

    def _check_masters(self, facts: dict[str, Any], where: str) -> None:
        """Raises InvalidArgumentError if the facts are those of masters of the other kind."""
        stored = masters_of(facts)
        if stored != self.masters:
            raise InvalidArgumentError(
                f"{where} holds {stored!r} masters, and this optimizer has {self.masters!r}; pass master={stored!r}, or another job and a "
                "state dict"
            )

    def copied_bytes(self) -> int:
        """Bytes of the copies of gradients and weights that the library cannot use where they are."""
        return self.gradients.nbytes() + self.weights.nbytes()

    @property
    def state_dicts(self) -> str | None:
        """The directory of the values of state dicts; None: they are in memory, because all paths are object stores or memory."""
        return self._state_dicts or self.tiered.directory

    def rounded(self, options: Any, piece: Piece) -> Any:
        """The C options struct of a piece. Where it rounds at random, it is a copy with the bits of the elements in the parameter."""
        if not self.precision.stochastic:
            return options
        own = type(options).from_buffer_copy(options)
        own.rounding = _abi.ROUNDINGS["stochastic"]
        own.rounding_seed = self.precision.seed_of(piece.parameter, part_of(self.params[piece.parameter]))
        own.rounding_first = piece.start
        return own

    def _limit(self, error: SpillwayError) -> Exception:
        return InvalidArgumentError(
            f"the states of the optimizer need {self._state_bytes * sum(self._counts()) / 1e6:.1f} MB on the tier: {error}"
        )

    def _counts(self) -> list[int]:
        return [local(param).numel() if stated else 0 for param, stated in zip(self.params, self.stated)]

    def _check_served(self) -> None:
        for name, param, stated in zip(self.names, self.params, self.stated):
            if stated:
                _check_served(name, param)
                if self.moments == "bf16" and param.dtype is torch.float16:
                    raise UnsupportedError(f"{name} is float16: {UNROUNDED}")

    def check(self, param: torch.Tensor, name: str) -> int:
        """The number of a parameter; raises InvalidArgumentError if it is not one of the construction, was resized, or has no states."""
        number = self.numbers.get(id(param))
        if number is None:
            raise InvalidArgumentError(
                f"{name} is not one of the parameters that the optimizer was constructed with, so the tier has no states "
                "for it; construct the optimizer again"
            )
        if param.shape != self._shapes[number]:
            raise InvalidArgumentError(
                f"{name} has shape {tuple(param.shape)}, and its states on the tier have {tuple(self._shapes[number])}; "
                "construct the optimizer again, on another job"
            )
        if not self.stated[number]:
            raise InvalidArgumentError(
                f"{name} has a gradient and no states on the tier, because it did not require a gradient when the optimizer "
                "was constructed; construct the optimizer again, on another job, or set its gradient to None"
            )
        return number

    def check_record(self, record: Record) -> None:
        """Raises InvalidArgumentError if the record is one of other parameters, or of other subgroups."""
        check_parameters(record.facts, self.params, self.names)
        check_order(record.facts, self._given, self.names, "the snapshot")
        self._check_masters(record.facts, "the snapshot")
        stored = record.facts["moments"]
        if stored != self.moments:
            raise InvalidArgumentError(
                f"the snapshot has moments of {stored}, and this optimizer has {self.moments}; construct it with "
                f'moment_dtype="{stored}", on another job'
            )
        stateless = [number for number, stated in enumerate(self.stated) if not stated]
        most, without = record.facts["most"], record.facts["stateless"]
        if (most, without) != (self.layout.most, stateless):
            raise InvalidArgumentError(
                f"the snapshot has subgroups of {most} elements, and no states of the parameters {without}; this optimizer has "
                f"{self.layout.most} and {stateless}. Pass the same part_elements and frozen parameters, or import the snapshot into a new "
                "tier"
            )

    def set_steps(self, states: Any, steps: list[float]) -> None:
        """Sets the step count of every parameter with states."""
        for param, step, stated in zip(self.params, steps, self.stated):
            if stated:
                count = torch.tensor(step, dtype=torch.float32, device="cpu")
                states[param] = _ENTRIES[self._master_key(param)](step=count)

    def _master_key(self, param: torch.Tensor) -> str | None:
        """The name of the state that has a parameter's master; None without one."""
        return None if local(param).dtype is torch.float32 else MASTER

    def master_state(self, number: int) -> tuple[str, torch.dtype] | None:
        """Name and dtype of the state that has the master of a parameter, in a state dict; None without one."""
        key = self._master_key(self.params[number])
        return None if key is None else (key, torch.int16 if key == LOW else torch.float32)

    def step_count(self, states: Any, number: int) -> torch.Tensor:
        """The step count of the parameter with this number; raises InvalidArgumentError if the program has removed it."""
        state = states.get(self.params[number])
        if not isinstance(state, dict) or "step" not in state:
            raise InvalidArgumentError(
                f"{self.names[number]}: optimizer.state has no step count for it, as after optimizer.state.clear(), and its "
                "other states are on the tier; call rollback() to return to the last commit, or load_state_dict()"
            )
        step = state["step"]
        if not isinstance(step, torch.Tensor) or not is_count(step) or step.is_inference():
            made = ", made in torch.inference_mode" if isinstance(step, torch.Tensor) and step.is_inference() else ""
            raise InvalidArgumentError(
                f"{self.names[number]}: its state 'step' is {step!r}{made}; set a tensor with the number of steps, or call rollback()"
            )
        return step

    def note(self, numbers: Iterable[int]) -> None:
        """Remembers that the masters of these parameters agree with them now."""
        noted = [number for number in numbers if self.stated[number]]
        owners = [local(self.params[number]) for number in noted]
        for number, own, found in zip(noted, owners, sums(owners)):
            self._agreed[number] = facts(own), found

    def _note_all(self) -> None:
        self.note(range(len(self.params)))

    def forget(self, numbers: Iterable[int] | None = None) -> None:
        """Has the next step compare the masters of these parameters, or of all, with them."""
        if numbers is None:
            self._agreed.clear()
        else:
            for number in numbers:
                self._agreed.pop(number, None)

    def looks_written(self) -> bool:
        """True if the program has written to a parameter since its master had its value, in a way that torch sees."""
        return any(self._has_other_facts(number) for number, stated in enumerate(self.stated) if stated)

    def _has_other_facts(self, number: int) -> bool:
        found = self._agreed.get(number)
        return found is None or found[0] != facts(local(self.params[number]))

    def written(self) -> set[int]:
        """The parameters that the program has written to since their masters had their values."""
        found = {number for number, stated in enumerate(self.stated) if stated and self._has_other_facts(number)}
        left = [number for number, stated in enumerate(self.stated) if stated and number not in found]
        differ = changed((local(self.params[number]), self._agreed[number][1]) for number in left)
        return found | {left[place] for place in differ.places()}

    def take_written(self, written: set[int] | None = None) -> None:
        """Gives masters the values of parameters that the program has written to; None: those of `written()`."""
        written = self.written() if written is None else written
        for subgroup in sorted({piece.subgroup for number in written for piece in self.layout.of_parameter[number]}):
            master, differs = torch.empty(self.layout.elements[subgroup], device="cpu"), False
            self.tiered.read(subgroup, master)
            for piece in self.layout.of_subgroup[subgroup]:
                if piece.parameter in written:
                    differs |= take_values(master[piece.first : piece.first + piece.count], self._values(piece).cpu())
            if differs:
                self.tiered.write(subgroup, master)
        self.note(written)

    def begin_step(self) -> None:
        """Before a step: masters take what the program has written."""
        self.take_written()

    def begin_commit(self) -> None:
        """Before a commit, which makes the parameters of now durable."""
        self.take_written()

    def master(self, param: torch.Tensor) -> torch.Tensor:
        """The master of a parameter: the parameter itself if it is float32, or frozen."""
        own = local(param).detach()
        self.tiered.swap.handle  # raises an error if the tier is closed
        if own.dtype is torch.float32 or not self.stated[self.numbers.get(id(param), 0)]:
            return own
        number = self.check(param, "the tensor")
        return self.settled(number, self.read_masters(number))

    # What the tier has of masters, as float32 numbers.

    def read_masters(self, number: int) -> torch.Tensor:
        """That of a parameter, in its shape."""
        found = torch.empty(local(self.params[number]).shape, dtype=torch.float32, device="cpu")
        for piece in self.layout.of_parameter[number]:
            whole = torch.empty(self.layout.elements[piece.subgroup], device="cpu")
            self.tiered.read(piece.subgroup, whole)
            found.view(-1)[piece.start : piece.start + piece.count] = whole[piece.first : piece.first + piece.count]
        return found

    def first_masters(self, subgroup: int) -> torch.Tensor:
        """The masters of a subgroup that begins with the values of the parameters."""
        return self.values(subgroup)

    def saved_master(self, number: int, state: dict[str, Any], flat: Callable[[str], torch.Tensor]) -> torch.Tensor | None:
        """The master of a saved state, flat; None: it has none. `flat`: returns a value of the state."""
        return flat(MASTER) if MASTER in state and self.master_state(number) is not None else None

    def settled(self, number: int, value: torch.Tensor) -> torch.Tensor:
        """A master that was read, with what the program has written to the parameter. The tier keeps its own: the program may restore the
        parameter before the next step."""
        take_values(value, local(self.params[number]).detach().cpu())
        return value

    def complete(self, row: Any, piece: Piece) -> None:
        """Writes into a row of C what else a step of the piece needs."""
        row.param_dtype = _abi.DTYPE_F32

    # A step that runs during backward, and may be rolled back.

    def complete_apart(self, row: Any, piece: Piece) -> list[torch.Tensor]:
        """As complete(), for such a step. Returns what the row names."""
        self.complete(row, piece)
        return []

    def lend(self, numbers: Iterable[int], wait: bool = False) -> None:
        """Starts to copy what such a step reads of these parameters. `wait`: ends it."""

    def stands(self) -> bool:
        """True if what was lent is what the parameters are now."""
        return True

    def take_back(self) -> None:
        """Nothing is lent."""

    def stepped_apart(self, numbers: Iterable[int]) -> None:
        """Such a step of these parameters is final."""

    def facts(self, states: Any) -> dict[str, Any]:
        """The facts that a commit stores beside the present states. Raises as check_parameters(), because no optimizer could resume."""
        self.check_parameters()
        return self._facts([float(self.step_count(states, number)) if stated else 0.0 for number, stated in enumerate(self.stated)])

    def _facts(self, steps: list[float]) -> dict[str, Any]:
        return {
            "most": self.layout.most,
            "moments": self.moments,
            "parameters": [*map(described, self.params)],
            "names": self._given,
            "boxes": [*map(box_of, self.params)],
            "steps": steps,
            "count": self.count,
            "stateless": [number for number, stated in enumerate(self.stated) if not stated],
        }

    def check_parameters(self) -> None:
        """Before a use of all parameters: raises InvalidArgumentError if one has another dtype or shape than at the construction, or memory
        that cannot be read and written."""
        for name, param, dtype, shape, stated in zip(self.names, self.params, self._dtypes, self._shapes, self.stated):
            if param.dtype is not dtype:
                raise InvalidArgumentError(f"{name} is {param.dtype}, and was {dtype} when the optimizer was constructed; cast it back")
            if param.shape != shape:
                raise InvalidArgumentError(
                    f"{name} has shape {tuple(param.shape)}, and had {tuple(shape)} when the optimizer was constructed; give it that shape"
                )
            if stated:
                check_has_memory(local(param), name)
                _check_served(name, param)

    def restore(self, states: Any, committed: Record) -> None:
        """Gives the parameters the values of their masters, and the steps those of the last commit."""
        with torch.no_grad():
            for subgroup, elements in self.each_subgroup("reading the masters"):
                master = torch.empty(elements, device="cpu")
                self.tiered.read(subgroup, master)
                for piece in self.layout.of_subgroup[subgroup]:
                    for start, view in views(local(self.params[piece.parameter]).detach(), piece.start, piece.count):
                        first = piece.first + start - piece.start
                        view.copy_(master[first : first + view.numel()].view(view.shape))
        self.set_steps(states, committed.facts["steps"])
        self.count = committed.facts["count"]
        self._note_all()

    def each_subgroup(self, what: str) -> Iterator[tuple[int, int]]:
        """The number and the elements of each subgroup, of which the caller moves the state. Tells the progress of `what`."""
        with Progress(what, int(sum(self.layout.elements) * self._state_bytes), self._options.progress) as progress:
            for subgroup, elements in enumerate(self.layout.elements):
                yield subgroup, elements
                progress.moved(int(elements * self._state_bytes))

    def values(self, subgroup: int) -> torch.Tensor:
        """The values of the parameters in a subgroup."""
        values = torch.zeros(self.layout.elements[subgroup], device="cpu")
        for piece in self.layout.of_subgroup[subgroup]:
            values[piece.first : piece.first + piece.count] = self._values(piece)
        return values

    def _values(self, piece: Piece) -> torch.Tensor:
        return values_of(local(self.params[piece.parameter]).detach(), piece.start, piece.count)


def masters_of(facts: dict[str, Any]) -> str:
    """The kind of masters of a commit with these facts."""
    found: str = facts.get("masters", "f32")
    return found


def check_parameters(committed: dict[str, Any], params: list[torch.Tensor], names: list[str]) -> None:
    """Raises InvalidArgumentError if the facts of a commit are those of other parameters; the message names the first one that differs."""
    cure = "pass the model of the run that committed, or other paths or another job for this one"
    _check_each(committed, [*map(described, params)], committed["parameters"], params, names, ("the tier", cure))


def _check_whole(committed: dict[str, Any], params: list[torch.Tensor], names: list[str], where: str) -> None:
    """As check_parameters(), of whole parameters, whatever part of them a process has."""
    own, stored = ([in_words(dtype, shape) for dtype, shape, _, _ in boxes] for boxes in (map(box_of, params), committed["boxes"]))
    _check_each(committed, own, stored, params, names, (where, "pass the model of the run that committed"))


def _check_each(
    committed: dict[str, Any], own: list[str], everything: list[str], params: list[torch.Tensor], names: list[str], words: tuple[str, str]
) -> None:
    what, cure = words
    for name, given, stored in zip(names, own, everything):
        if given != stored:
            raise InvalidArgumentError(f"{name} is {given}; {what} was committed with {stored} there; {cure}")
    if len(params) != len(everything):
        first = names[len(everything)] if len(params) > len(everything) else f"parameter number {len(params)}"
        raise InvalidArgumentError(
            f"the optimizer has {len(params)} parameters, and {what} was committed with {len(everything)}: {first} "
            f"is the first without a counterpart; {cure}"
        )
    for number in committed["stateless"]:
        if params[number].requires_grad:
            raise InvalidArgumentError(
                f"{names[number]} requires a gradient, and {what} was committed without states for it, because it required "
                "none then; freeze it before the optimizer is constructed, or pass another job and load a state dict"
            )


def check_order(committed: dict[str, Any], given: list[str | None], names: list[str], where: str) -> None:
    """Raises InvalidArgumentError if the parameters have the names of those of a commit in another order. Other names say nothing: wrappers
    change them."""
    own, stored = ([_WRAPPERS.sub("", name or "") for name in those] for those in (given, committed.get("names", [])))
    if own == stored or "" in own or sorted(own) != sorted(stored):
        return
    at = next(place for place, (one, other) in enumerate(zip(own, stored)) if one != other)
    raise InvalidArgumentError(
        f"{names[at]} stands where {where} has {stored[at]!r}; pass the parameters in the order of the run that committed, or load a state "
        "dict of it"
    )


def _moments_of(precision: Precision) -> MomentDtype:
    if precision.coded:
        return "int8"
    return "bf16" if precision.moment_dtype is torch.bfloat16 else "f32"


def _part_elements(options: TierOptions, host_memory: int | Literal["auto"] | None, total: int, state_bytes: float) -> int:
    if options.part_elements is not None:
        return options.part_elements
    usual = (
        _USUAL if host_memory is None or isinstance(host_memory, str) else min(_USUAL, int(host_memory / (6 * state_bytes)) // 1024 * 1024)
    )
    return max(_LEAST, min(usual, max(total, 1)))


def _check_served(name: str, param: torch.Tensor) -> None:
    own = local(param)
    if not (not own.is_meta and own.layout is torch.strided and is_dense(own) and own.dtype in CODES and holds_values(own)):
        raise UnsupportedError(
            f"{name} is {own.dtype} on {own.device} with strides {own.stride() if own.layout is torch.strided else None}; states "
            "on a tier need parameters of 16 or 32 bits whose elements fill their memory; leave out tier for this parameter's "
            "optimizer, or make the parameter of a contiguous copy before the optimizer is constructed"
        )
    if own.is_inference():
        raise UnsupportedError(f"{name} was made in torch.inference_mode, where torch counts no writes; make the model outside of it")
