"""Adam over optimizer state that is stored on a tier and updated through a few buffers of host memory.

    with spillway.Tier(["/mnt/nvme", "/mnt/pfs"], job="run7") as tier:
        with spillway.Swap(tier, elements=[n0, n1, n2], host_memory=4 << 30) as swap:
            swap.fill([(master0, None, None), (master1, None, None), (master2, None, None)])
            for step in range(1, steps + 1):
                swap.step(spillway.Adam(lr=1e-3), [(grad0, weight0), (grad1, weight1), (grad2, weight2)])
                swap.commit(step)

A gradient is read in place, in its own dtype. A weight is a 16-bit copy that the step writes, or None.

A step may run beside the caller, for example during backward: each subgroup is stepped once it is fetched and its gradient
is there. With speculative=True a verdict may take the steps back:

    with swap.begin(spillway.Adam(lr=1e-3), speculative=True) as update:
        for subgroup, grad, weight in backward():
            update.submit(subgroup, grad, weight)
        update.verdict("redo", grad_scale=clip) if norm > 1.0 else update.verdict("commit")

With moment_dtype="bf16" the tier and memory store both moments as bfloat16: 8 bytes per parameter instead of 12. With "int8"
they store codes of 8 bits with a scale for 32 elements: 6.13 bytes. A step is bit-identical to Adam with such moments in memory,
and may round at random. fill(), read() and write() take float32 arrays all the same; values are rounded to nearest. Blocks of
codes count from the subgroup's start, so each part of a subgroup begins at a multiple of 32.

With split_master=True the tier and memory store param without its upper halves, which the bf16 weights imply: 2 bytes per
parameter fewer. Every step, and read() of param, then needs the bf16 weights that belong to the state:

- after a step: the weights that this step wrote;
- after a rollback: the weights of the last commit;
- at first: param rounded to bf16.

commit() does not store these weights. The caller must keep them across a close and a new open."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, overload

from . import _abi, _arguments, _arrays, _kept, _native, _pinned, _tensor_rows
from ._arrays import Array
from ._attributes import Fixed, described
from ._commit import Commit
from ._native_handle import _NativeHandle, in_slices, record
from ._progress import Watched
from ._snapshot import Exported
from ._tier_options import number, payload_of
from .errors import InternalError, InvalidArgumentError, OutOfOrderError
from .optim import Adam, StepStats, counter
from .speculate import VERDICTS
from .tier import Tier

STATES = ("param", "exp_avg", "exp_avg_sq")
#: Why float16 weights have no bf16 moments.
UNROUNDED = "a step with bfloat16 moments takes weights and gradients of bfloat16 or float32; use one of these, or float32 moments"
_NO_HUGE_PAGES, _NO_LOCK = _abi.SWAP_FLAG_NO_HUGE_PAGES, _abi.SWAP_FLAG_NO_LOCK
_BIND_NODE, _SPLIT_MASTER, _LOW_BITS = _abi.SWAP_FLAG_BIND_NODE, _abi.SWAP_FLAG_SPLIT_MASTER, _abi.SWAP_FLAG_LOW_BITS
#: Of each moment_dtype: the flag of C, the code in a row of C, what names of extents have, bytes of both moments of a parameter.
_MOMENTS = {
    "f32": (0, _abi.DTYPE_F32, "", 8),
    "bf16": (_abi.SWAP_FLAG_BF16_MOMENTS, _abi.DTYPE_BF16, "-bf16", 4),
    "int8": (_abi.SWAP_FLAG_CODED_MOMENTS, _abi.DTYPE_CODES, "-codes", 2.125),
}
MomentDtype = Literal["f32", "bf16", "int8"]
#: The kinds of exp_avg and exp_avg_sq, for codes of 8 bits.
MOMENTS = (_abi.MOMENT_FIRST, _abi.MOMENT_SECOND)
# Statuses of spw_swap_finish after which the step is still open.
_STAYS_OPEN = (_abi.ERR_TIMEOUT, _abi.ERR_ROUND_OPEN, _abi.ERR_BUCKET_MISSING)


def extent_name(subgroup: int, *, split_master: bool = False, moment_dtype: str = "f32") -> str:
    """The name of the extent of a subgroup."""
    return f"subgroup-{subgroup:06}{_MOMENTS[moment_dtype][2]}{'-split' * split_master}"


class Budget(NamedTuple):
    """Memory and traffic of a swapped update, in bytes except for the counts.

    Attributes:
        host_bytes: Host memory of all buffers and masters.
        buffer_bytes: One buffer: the state of the largest subgroup as stored.
        buffers: Number of buffers.
        cached: Number of buffers that keep their subgroup between steps.
        state_bytes: All state.
        step_bytes: Bytes that a step reads from the tier; it writes as many.
        master_bytes: One master: with split masters, the param of the largest subgroup.
        masters: Number of complete masters in memory at a time; 0 if every buffer has its own.
        working_bytes: Host memory with which every path reads and writes at once, without caching."""

    host_bytes: int
    buffer_bytes: int
    buffers: int
    cached: int
    state_bytes: int
    step_bytes: int
    master_bytes: int
    masters: int
    working_bytes: int


class SwapStats(NamedTuple):
    """Counters of a swapped update since its open.

    Attributes:
        rounds: Updates begun, including the first fill.
        hits: Subgroups that an update found in memory.
        fetched: Subgroups read from the tier.
        flushed: Subgroups written to the tier.
        moved: Pieces of subgroups that changed their path.
        exposed_seconds: Seconds in which no subgroup could be updated because its data had not arrived."""

    rounds: int
    hits: int
    fetched: int
    flushed: int
    moved: int
    exposed_seconds: float


def plan_budget(
    elements: Sequence[int],
    *,
    host_memory: int,
    paths: int,
    split_master: bool = False,
    low_bits: bool = False,
    moment_dtype: MomentDtype = "f32",
) -> Budget:
    """Computes the Budget of a swapped update; allocates nothing.

    Args:
        elements: Number of elements of each subgroup.
        host_memory: Limit of the host memory for state, in bytes.
        paths: Number of paths of the tier.
        split_master, low_bits, moment_dtype: As for Swap.

    Raises:
        InvalidArgumentError: The limit is too small; the message names the least one.

    Example:
        spillway.swap.plan_budget([1 << 24] * 8, host_memory=1 << 30, paths=2).cached"""
    budget = _abi.sized(_abi.SwapBudget)
    options = _options(elements, host_memory, split_master, low_bits, moment_dtype)
    _native.call("spw_swap_plan_budget", ctypes.byref(options), paths, ctypes.byref(budget))
    return _record(Budget, budget)


class Swap(_NativeHandle):
    """An open swapped update of Adam's state on a tier. Not thread-safe.

    On a tier resumed with the same subgroups the state is there; otherwise call fill() or write(). Once it has
    changed states, only it commits and rolls back. close() discards what was not committed; the tier stays open, and needs a
    rollback before its own next commit or the next Swap.

    Args:
        tier: The open Tier.
        elements: Number of elements of each subgroup.
        host_memory: Limit of the host memory for state, in bytes; None: the least that keeps every path busy; "auto": half of what the
            machine, and a cgroup, have left for this rank. What exceeds the least caches states.
        ratio: Share of each path in the state, a number per path; None: in proportion to the measured bandwidths.
        speeds: First estimates of the paths' bandwidths, in bytes per second; None: in proportion to the state that the tier
            holds. Without any the division is equal at first, and the first writes measure the paths.
        huge_pages: Use 2 MiB pages for the buffers.
        pin_memory: Lock the buffers' pages in memory.
        split_master: Store param without its upper halves, see the module's description.
        low_bits: Store 16 low bits of param. The caller has the parameters: bfloat16 ones hold their master together with these bits, as
            with `param_low` of spw_tensor, and float32 ones are their own master. A step writes them. fill(), read() and write() take low
            bits as numbers from 0 to 65,535 in the place of param. Not with split_master.
        moment_dtype: How the moments are stored: "f32", "bf16" or "int8". A tier has one type of moments: fill another job to
            change it.
        node: NUMA node of the buffers; None: any.
        progress: Called with the bytes of host memory that were taken and those that will be, several times a second, by another thread;
            last by this one. None: a line on a terminal after two seconds. What it raises is raised after the memory was taken.

    Raises:
        InvalidArgumentError: The memory limit is too small, or the tier holds other subgroups, or moments of the other type.
        BusyError: The tier has a Swap, or one that was closed with uncommitted changes; roll the tier back.

    Example:
        swap = spillway.Swap(tier, elements=[param.numel()])
        swap.fill([(param, None, None)])
        swap.step(adam, [(grad, weight_bf16)])
        swap.commit(1)"""

    closer = "spw_swap_close"

    tier: Fixed[Tier] = Fixed("The Tier.")
    elements: Fixed[tuple[int, ...]] = Fixed("Number of elements of each subgroup.")
    split_master: Fixed[bool] = Fixed("The tier stores param without its upper halves.")
    low_bits: Fixed[bool] = Fixed("The tier stores low bits of param.")
    moment_dtype: Fixed[MomentDtype] = Fixed("How the tier stores the moments.")
    budget: Fixed[Budget] = Fixed("The Budget chosen at open.")

    def __init__(
        self,
        tier: Tier,
        elements: Sequence[int],
        *,
        host_memory: int | Literal["auto"] | None = None,
        ratio: Sequence[float] | None = None,
        speeds: Sequence[float] | None = None,
        huge_pages: bool = True,
        pin_memory: bool = True,
        split_master: bool = False,
        low_bits: bool = False,
        moment_dtype: MomentDtype = "f32",
        node: int | None = None,
        progress: Callable[[int, int], object] | None = None,
    ):
        paths = len(Tier._given("Swap: tier", tier).paths())
        self.elements, self.split_master, self.low_bits, self.moment_dtype = tuple(elements), split_master, low_bits, moment_dtype
        encoding: dict[str, Any] = {"split_master": split_master, "low_bits": low_bits, "moment_dtype": moment_dtype}
        limit = _limit(host_memory, lambda: working_bytes(elements, paths, **encoding))
        options = _options(self.elements, limit, **encoding)
        options.ratio, options.speeds = _numbers(ratio, paths, "ratio"), _numbers(speeds, paths, "speeds")
        options.flags |= _NO_HUGE_PAGES * (not huge_pages) + _NO_LOCK * (not pin_memory)
        if node is not None:
            options.flags, options.node = options.flags | _BIND_NODE, _arguments.unsigned("node", node, 32)
        self.tier = tier
        self._held = _kept.Submitted()
        #: The step that was begun last; a rollback ends it.
        self._update: SwapUpdate | None = None
        self.budget = plan_budget(self.elements, host_memory=limit, paths=paths, **encoding)
        with _pinned.taking(self.budget.host_bytes, progress):
            tier._through(lambda handle: self._hold("spw_swap_open", handle, ctypes.byref(options), keeps=(self._held,)))

    def __len__(self) -> int:
        """Number of subgroups."""
        return len(self.elements)

    def _facts(self) -> dict[str, Any]:
        shape = {"subgroups": len(self), "elements": sum(self.elements), "host_bytes": self.budget.host_bytes}
        shape |= {"low_bits": True} if self.low_bits else {}
        return {**shape, "split_master": self.split_master, "moment_dtype": self.moment_dtype, "tier": self.tier}

    @property
    def moment_code(self) -> int:
        """The dtype code of the moments in a row of C."""
        return _MOMENTS[self.moment_dtype][1]

    def stats(self) -> SwapStats:
        """Returns the counters since the open."""
        stats = _abi.sized(_abi.SwapStats)
        self._call("spw_swap_get_stats", ctypes.byref(stats))
        return _record(SwapStats, stats)

    def trace(self) -> str:
        """Returns the last update, and what was written since, as JSON for ui.perfetto.dev: for each buffer the fetches, steps and
        flushes of subgroups, and for each path the bytes in flight. Waits for the writes of an update."""
        return self._through(lambda handle: _native.text("spw_swap_get_trace", handle))

    def fill(self, states: Sequence[Sequence[Array | None]], *, progress: Callable[[int, int], object] | None = None) -> None:
        """Sets the state of every subgroup.

        Args:
            states: For each subgroup a tuple of param, exp_avg and exp_avg_sq, float32 arrays with the subgroup's
                number of elements; None sets zeros.
            progress: Called with the bytes of state that were written and all of them, as `progress` of Swap.

        Raises:
            InvalidArgumentError: The number of entries or an array does not fit."""
        if len(states) != len(self):
            raise InvalidArgumentError(f"Swap.fill: states has {len(states)} entries for {len(self)} subgroups; pass one for each")
        addresses = (ctypes.c_void_p * (3 * len(self)))()
        for subgroup, parts in enumerate(states):
            for place, address in enumerate(self._floats(subgroup, parts, False)):
                addresses[3 * subgroup + place] = address
        with Watched("filling the tier", lambda: self.budget.state_bytes, self._written_bytes, progress):
            self._call("spw_swap_fill", addresses)

    def _written_bytes(self) -> int:
        return sum(path.written_bytes for path in self.tier.paths())

    def step(
        self,
        optimizer: Adam | Sequence[Adam],
        tensors: Sequence[Sequence[Array | None]],
        *,
        grad_scale: float = 1.0,
        return_stats: bool = False,
        uint16_dtype: str | None = None,
    ) -> StepStats | None:
        """Runs one step over all subgroups. After a failure call rollback().

        Args:
            optimizer: The Adam whose options the step uses, or one for each subgroup.
            tensors: For each subgroup a tuple of gradient and weight; see table().
            grad_scale: Factor of the gradients.
            return_stats: Return the statistics of the scaled gradients.
            uint16_dtype: The dtype that uint16 arrays hold: "bf16" or "f16".

        Returns:
            StepStats with `return_stats`, else None.

        Raises:
            InvalidArgumentError: An argument does not fit; nothing was written.
            IoError: A path failed, and no other path could take its data."""
        adams = self._adams(optimizer)
        table = self.table(tensors, uint16_dtype)
        rows = [adam.options_of_next_step(grad_scale) for adam in adams]
        if not isinstance(optimizer, Adam):
            for row, options in zip(table, rows):
                row.options = ctypes.addressof(options)
        out: Any = _abi.sized(_abi.StepStats) if return_stats else None
        arguments = ctypes.byref(rows[0]), ctypes.addressof(table), len(table), ctypes.byref(out) if return_stats else None
        self._counted(counter(adams), "spw_swap_adam_step", *arguments)
        return StepStats(bool(out.nonfinite), out.sum_squares) if return_stats else None

    def begin(
        self, optimizer: Adam, *, grad_scale: float = 1.0, speculative: bool = False, return_stats: bool = False, restore: bool = True
    ) -> SwapUpdate:
        """Opens one step of all subgroups beside the caller, and starts to fetch. Until SwapUpdate.finish(), other calls than
        stats(), rollback() and close() raise OutOfOrderError. Afterwards they wait for the writes of the step.

        Args:
            optimizer: The Adam whose options the step uses.
            grad_scale: Factor of the gradients.
            speculative: The steps are final only after SwapUpdate.verdict(). Until then the tier keeps the versions before the step,
                which takes space for a third version of what was not committed.
            return_stats: SwapUpdate.finish() returns the statistics of the scaled gradients.
            restore: A verdict of "skip" gives weights that were written their values from before the step. False leaves any values in
                them, and reads nothing for it.

        Returns:
            The open SwapUpdate.

        Raises:
            OutOfOrderError: A step is open."""
        if not isinstance(optimizer, Adam):
            raise InvalidArgumentError(f"Swap.begin: optimizer is a {type(optimizer).__name__}; pass a spillway.Adam")
        options = optimizer.options_of_next_step(grad_scale)
        flags = _abi.SWAP_BEGIN_FLAG_SPECULATIVE * speculative + _abi.SWAP_BEGIN_FLAG_STATS * return_stats
        flags += _abi.SWAP_BEGIN_FLAG_NO_RESTORE * (not restore)
        update = SwapUpdate(self, optimizer, speculative, return_stats)
        before, self._update = self._update, update
        try:
            self._recorded(update._begun, "spw_swap_begin", ctypes.byref(options), flags)
        finally:
            if update._begun != [0]:
                self._update = before
        return update

    def ds_step(self, optimizer_id: int, calls: Sequence[Any], table: Any, stepped: Callable[[int, int], object] | None = None) -> None:
        """Runs one step with the arithmetic of DeepSpeed's optimizer `optimizer_id`.

        Args:
            optimizer_id: Id of DeepSpeed's Adam.
            calls: An _abi.DsAdamCall for each subgroup.
            table: The result of table().
            stepped: Called as stepped(subgroup, address) after each subgroup's update, with the address of its float32
                master weights. An exception of it aborts the step."""
        raised: list[BaseException] = []
        shown: list[int] = []

        def forward(_user: Any, subgroup: int, address: int) -> int:
            try:
                assert stepped is not None
                stepped(subgroup, address)
                shown.append(subgroup)
            except BaseException as error:
                raised.append(error)
                return 1
            return 0

        callback = _abi.SWAP_STEPPED_FN(forward) if stepped else _abi.SWAP_STEPPED_FN()
        rows = (_abi.DsAdamCall * len(calls))(*calls)

        def step(handle: Any) -> None:
            status: list[int] = []
            record(status, "spw_swap_ds_adam_step", handle, optimizer_id, rows, ctypes.addressof(table), len(table), callback, None)
            if raised:
                # Removed, because its traceback refers to the list.
                raise raised.pop()
            _native.check(status[0])

        self._through(step)
        if stepped and len(shown) != len(self):
            # An exception of a signal handler outside the try block is reported by ctypes, and the C code continues.
            missing = sorted(set(range(len(self))) - set(shown))
            raise InternalError(f"Swap.ds_step: a signal handler raised while the caller received subgroups {missing}; call rollback()")

    def table(self, tensors: Sequence[Sequence[Array | None]], uint16_dtype: str | None = None) -> Any:
        """Returns the C table of a step's arrays; it keeps their memory alive.

        Args:
            tensors: For each subgroup a tuple of grad, weight and optionally the bf16 weights that belong to the state.
                weight (None, float16 or bfloat16) is written. With a split master it also holds the weights that
                belong to the state, unless the third entry does.
            uint16_dtype: The dtype that uint16 arrays hold: "bf16" or "f16"."""
        if len(tensors) != len(self):
            raise InvalidArgumentError(f"Swap: tensors has {len(tensors)} entries for {len(self)} subgroups; pass one for each")
        table = (_abi.Tensor * len(tensors))()
        for subgroup, (row, arrays) in enumerate(zip(table, tensors)):
            self._put(row, subgroup, arrays, f"tensors[{subgroup}]", uint16_dtype)
        table.held = _arrays.all_held(tensors)
        return table

    def _put(self, row: Any, subgroup: int, arrays: Sequence[Array | None], name: str, uint16_dtype: str | None) -> None:
        if not 2 <= len(arrays) <= 3:
            raise InvalidArgumentError(
                f"Swap: {name} has {len(arrays)} arrays; pass grad, weight, and the weights of the state if they belong to it"
            )
        grad, weight, *belonging = arrays
        _tensor_rows.begin(row, self.elements[subgroup]).state_dtype = self.moment_code
        spans = [
            ("grad", f"{name}.grad", grad, False),
            ("param_copy", f"{name}.weight", weight, True),
            ("param", f"{name}[2]", belonging[0] if belonging else None, False),
        ]
        for field, argument, array, write in spans:
            if array is not None or field == "grad":
                _tensor_rows.put(row, field, _arrays.span(array, argument, write, uint16_dtype), argument)
        row.param_dtype = row.copy_dtype if self.low_bits else row.param_dtype or _abi.DTYPE_F32

    def read(
        self,
        subgroup: int,
        param: Array | None = None,
        exp_avg: Array | None = None,
        exp_avg_sq: Array | None = None,
        *,
        weights: Array | None = None,
        uint16_dtype: str | None = None,
    ) -> None:
        """Copies parts of a subgroup's state into arrays.

        Args:
            subgroup: Number of the subgroup.
            param, exp_avg, exp_avg_sq: Float32 arrays to write, with the subgroup's number of elements; None skips a
                part.
            weights: With a split master, the bf16 weights that belong to the state; param needs them.
            uint16_dtype: "bf16" if `weights` is a uint16 array.

        Raises:
            InvalidArgumentError: An array does not fit."""
        parts = self._floats(subgroup, (param, exp_avg, exp_avg_sq), True)
        if weights is None:
            self._call("spw_swap_read", subgroup, None, *parts)
            return
        address, count, code = _arrays.span(weights, "weights", False, uint16_dtype)
        self._same(subgroup, count, "weights")
        if code != _abi.DTYPE_BF16:
            raise InvalidArgumentError(
                f"Swap.read: the weights of subgroup {subgroup} are not bfloat16; pass the bf16 weights that belong to the state"
            )
        self._call("spw_swap_read", subgroup, address, *parts)

    def write(self, subgroup: int, param: Array | None = None, exp_avg: Array | None = None, exp_avg_sq: Array | None = None) -> None:
        """Sets parts of a subgroup's state.

        Args:
            subgroup: Number of the subgroup.
            param, exp_avg, exp_avg_sq: Float32 arrays with the subgroup's number of elements; None keeps a part."""
        self._call("spw_swap_write", subgroup, *self._floats(subgroup, (param, exp_avg, exp_avg_sq), False))

    @overload
    def commit(self, step: int, payload: bytes | bytearray | memoryview = ..., wait: Literal[True] = ...) -> None: ...

    @overload
    def commit(self, step: int, payload: bytes | bytearray | memoryview = ..., *, wait: Literal[False]) -> Commit: ...

    def commit(self, step: int, payload: bytes | bytearray | memoryview = b"", wait: bool = True) -> Commit | None:
        """Makes all state durable.

        Args:
            step: Number of the step, which the next open of the tier returns.
            payload: Data of the caller, up to 1 MiB, which the next open returns.
            wait: False: return at once. Threads of the library write the subgroups that are only in memory, and commit all states as they
                are now. The next update may begin at once; its steps wait until the subgroups are written.

        Returns:
            None, or with `wait=False` the Commit that is in flight."""
        if not wait:
            return self._begin_commit(step, payload, Commit())
        self._commit(step, payload, [])
        return None

    def _commit(self, step: int, payload: bytes | bytearray | memoryview, status: list[int]) -> None:
        """Commits, and appends the status of the call to `status`, also if a signal handler raises after the call."""
        step, stored = number(step, "step"), payload_of(payload)
        ended = self.tier._puts_end()
        self._recorded(status, "spw_swap_commit", step, stored, len(stored))
        ended()

    def _begin_commit(self, step: int, payload: bytes | bytearray | memoryview, commit: Commit) -> Commit:
        """Begins a commit that continues beside updates."""
        step, stored = number(step, "step"), payload_of(payload)
        commit._succeeded = self.tier._puts_end()
        return commit._begin(self.tier, self, "spw_swap_commit_begin", step, stored)

    def _check_exported(self, found: Exported, directory: str, facts: Any) -> None:
        """Raises CorruptError unless a snapshot has the extents of this update."""
        found.check_subgroups(directory, len(self))

    def rollback(self) -> None:
        """Restores the state of the last commit; also valid after a failed step. Abandons an open one."""
        begun = self._held.begun()
        self._call("spw_swap_rollback")
        self._update = None
        self._held.over(begun)

    def _adams(self, optimizer: Adam | Sequence[Adam]) -> list[Adam]:
        adams = [optimizer] if isinstance(optimizer, Adam) else list(optimizer) if isinstance(optimizer, (list, tuple)) else []
        if not adams or not all(isinstance(adam, Adam) for adam in adams):
            raise InvalidArgumentError(f"Swap.step: optimizer is a {type(optimizer).__name__}; pass a spillway.Adam, or a list of them")
        if not isinstance(optimizer, Adam) and len(adams) != len(self):
            raise InvalidArgumentError(f"Swap.step: optimizer has {len(adams)} entries for {len(self)} subgroups; pass one for each")
        return adams

    def _floats(self, subgroup: int, parts: Sequence[Array | None], write: bool) -> list[int | None]:
        subgroup = _arguments.between("Swap: subgroup", subgroup, 0, len(self) - 1)
        addresses: list[int | None] = []
        for name, array in zip(STATES, parts):
            address, count, code = (None, None, None) if array is None else _arrays.span(array, name, write)
            if array is not None:
                self._same(subgroup, count, name)
                if code != _abi.DTYPE_F32:
                    raise InvalidArgumentError(f"Swap: {name} of subgroup {subgroup} is not float32; pass a float32 array")
            addresses.append(address)
        return addresses

    def _same(self, subgroup: int, count: int | None, name: str) -> None:
        if count != self.elements[subgroup]:
            raise InvalidArgumentError(
                f"Swap: {name} has {count} elements, subgroup {subgroup} has {self.elements[subgroup]}; pass an "
                "array of the subgroup's size"
            )


class SwapUpdate:
    """An open step of a Swap beside the caller. Not thread-safe.

    A `with` block calls finish() at its end. After an exception in the block, a speculative step without a verdict is skipped;
    any other is abandoned by Swap.rollback().

    Attributes:
        swap: The Swap."""

    swap: Fixed[Swap] = Fixed("The Swap.")

    def __init__(self, swap: Swap, optimizer: Adam, speculative: bool, return_stats: bool):
        self.swap = swap
        self._speculative = speculative
        self._optimizer, self._return_stats = optimizer, return_stats
        # Statuses of calls: no signal handler runs between a call and its status.
        self._begun: list[int] = []
        self._finished: list[int] = []
        self._given: tuple[str, list[int]] = ("commit", [] if speculative else [0])

    def __repr__(self) -> str:
        ended = "open" if self._is_open() else "ended"
        return described("SwapUpdate", lambda: {"speculative": self._speculative, "verdict": self._verdict, "swap": self.swap}, ended)

    def submit(
        self, subgroup: int, grad: Array, weight: Array | None = None, belonging: Array | None = None, *, uint16_dtype: str | None = None
    ) -> None:
        """Passes the gradient of a subgroup to the step; returns at once. The caller must not touch the arrays until finish() or
        Swap.rollback() has returned.

        Args:
            subgroup: Number of the subgroup.
            grad: The gradient, in its own dtype.
            weight: Float16 or bfloat16 array that the step writes. After a verdict of "skip" it holds the weights before the step, or what
                it held at the submit if the subgroup was not stepped yet.
            belonging: With a split master, the bf16 weights that belong to the state; required if the step is speculative.
            uint16_dtype: The dtype that uint16 arrays hold: "bf16" or "f16".

        Raises:
            InvalidArgumentError: An array does not fit.
            OutOfOrderError: The subgroup was submitted before, or the step is not open."""
        self._check_open()
        subgroup = _arguments.between("SwapUpdate: subgroup", subgroup, 0, len(self.swap) - 1)
        row, arrays = _abi.Tensor(), (grad, weight, belonging)
        self.swap._put(row, subgroup, arrays, f"subgroup {subgroup}", uint16_dtype)
        self.submit_table(subgroup, ctypes.addressof(row), None, 1, _arrays.all_held([arrays]))

    def submit_table(self, subgroup: int, tensors: int | None, firsts: int | None, count: int, held: Any) -> None:
        """As submit(), for `count` parts of the subgroup as C takes them: the address of an array of _abi.Tensor and of one of their first
        elements. `held` is kept alive as long as the library uses the memory that they name."""
        self._check_open()
        self.swap._held.submit(held, lambda outcome: self.swap._recorded(outcome, "spw_swap_submit", subgroup, tensors, firsts, count))

    def ds_calls(self, optimizer_id: int, calls: Sequence[Any]) -> None:
        """Gives the step the arithmetic of DeepSpeed's optimizer `optimizer_id`, before the first submit.

        Args:
            optimizer_id: Id of DeepSpeed's Adam.
            calls: An _abi.DsAdamCall for each subgroup."""
        self._check_open()
        self.swap._call("spw_swap_ds_adam_calls", optimizer_id, (_abi.DsAdamCall * len(calls))(*calls), len(calls))

    def published(self, timeout: float | None = None) -> Iterator[int]:
        """Yields each subgroup once its step is final and its weight is written, before finish(). The weight may be read from then on,
        while later subgroups are stepped. Before a verdict no step is final; after "skip" there are none.

        Args:
            timeout: Longest wait for the next subgroup in seconds; None: no limit.

        Raises:
            TimedOutError: There is no further subgroup yet; call it again.
            IoError: A path failed. Call Swap.rollback()."""
        found, outcome, limit = ctypes.c_uint64(), list[int](), _arguments.seconds(timeout)

        def wait(milliseconds: int) -> int:
            outcome.clear()
            self.swap._through(lambda handle: record(outcome, "spw_swap_next_published", handle, milliseconds, ctypes.byref(found)))
            return outcome[0]

        while True:
            self._check_open()
            status = in_slices(limit, wait)
            if status == _abi.ERR_NOT_FOUND:
                return
            _native.check(status)
            yield found.value

    def verdict(self, verdict: str, grad_scale: float = 1.0) -> None:
        """Gives a speculative step its verdict; returns at once. It may come before submits.

        Args:
            verdict: "commit" makes the steps final. "skip" takes them back, and no subgroup has to be submitted. "redo" steps every
                subgroup with another factor.
            grad_scale: Gradient factor of "redo".

        Raises:
            OutOfOrderError: The step has its verdict, or is not speculative."""
        _arguments.one_of("SwapUpdate.verdict: verdict", verdict, VERDICTS)
        self._check_open()
        outcome: list[int] = []
        if self._verdict is None:
            self._given = verdict, outcome
        self.swap._recorded(outcome, "spw_swap_verdict", VERDICTS.index(verdict), grad_scale)

    def finish(self, timeout: float | None = None) -> StepStats | None:
        """Waits until all subgroups are stepped, and ends the step; its arrays belong to the caller again. The library continues writing
        to the tier. The step counts for the optimizer unless the verdict was "skip".

        Args:
            timeout: Longest wait in seconds; None: no limit.

        Returns:
            StepStats with `return_stats`, else None.

        Raises:
            TimedOutError: A subgroup is not stepped yet; the step is still open.
            OutOfOrderError: A subgroup or the verdict is missing; the step is still open.
            IoError: A path failed. Call Swap.rollback()."""
        self._check_open()
        stats, begun, finished = _abi.sized(_abi.StepStats), self.swap._held.begun(), self._finished
        count = counter([] if self._verdict == "skip" else [self._optimizer])

        def wait(milliseconds: int) -> int:
            # A signal handler between two slices may have ended the step.
            if self._ended is None:
                self.swap._through(lambda handle: record(self._finished, "spw_swap_finish", handle, milliseconds, ctypes.byref(stats)))
            return self._finished[-1]

        try:
            _native.check(in_slices(_arguments.seconds(timeout), wait))
        finally:
            # Without a function of Python, at whose begin a signal handler would run.
            if finished and finished[-1] == 0:
                count()
            if self._ended is not None:
                self.swap._held.over(begun)
        return StepStats(bool(stats.nonfinite), stats.sum_squares) if self._return_stats else None

    def __enter__(self) -> SwapUpdate:
        return self

    @property
    def _verdict(self) -> str | None:
        """The verdict; None if there is none yet."""
        return self._given[0] if self._given[1] == [0] else None

    @property
    def _ended(self) -> int | None:
        """The status with which the step has ended; None before its end."""
        return self._finished[-1] if self._finished and self._finished[-1] not in _STAYS_OPEN else None

    def _is_open(self) -> bool:
        return self._begun == [0] and self._ended is None and self.swap._update is self and bool(self.swap._cell)

    def _check_open(self) -> None:
        if not self._is_open():
            self.swap.handle
            raise OutOfOrderError("SwapUpdate: this step has ended, or was abandoned by a rollback; begin the next one")

    def __exit__(self, kind: object, *_: object) -> None:
        if not self._is_open():
            return
        if kind is not None and self._verdict is None:
            self.verdict("skip")
        if kind is None or self._verdict == "skip":
            self.finish()
        else:
            self.swap.rollback()


def state_bytes(*, split_master: bool = False, low_bits: bool = False, moment_dtype: MomentDtype = "f32") -> float:
    """Bytes of a parameter's state on the tier, without the tables of split masters. The arguments are those of Swap."""
    return 4 - 2 * (split_master or low_bits) + _MOMENTS[moment_dtype][3]


def working_bytes(
    elements: Sequence[int], paths: int, *, split_master: bool = False, low_bits: bool = False, moment_dtype: MomentDtype = "f32"
) -> int:
    """Returns the least host memory, in bytes, with which every path can read and write at once.

    Args:
        elements: Number of elements of each subgroup.
        paths: Number of paths of the tier.
        split_master, low_bits, moment_dtype: As for Swap."""
    encoding: dict[str, Any] = {"split_master": split_master, "low_bits": low_bits, "moment_dtype": moment_dtype}
    return plan_budget(elements, host_memory=(1 << 64) - 1, paths=paths, **encoding).working_bytes


def _limit(host_memory: int | Literal["auto"] | None, least: Callable[[], int]) -> int:
    limit = _pinned.limit_of("Swap", host_memory)
    if limit is None:
        return least()
    # The other half is for what the program takes later.
    return limit // 2 if isinstance(host_memory, str) else limit


def _options(elements: Sequence[int], host_memory: int, split_master: bool, low_bits: bool, moment_dtype: str) -> Any:
    if not isinstance(moment_dtype, str) or moment_dtype not in _MOMENTS:
        raise InvalidArgumentError(f'Swap: moment_dtype is {moment_dtype!r}; pass "f32", "bf16" or "int8"')
    options = _abi.sized(_abi.SwapOptions)
    options.flags = _SPLIT_MASTER * bool(split_master) + _LOW_BITS * bool(low_bits) + _MOMENTS[moment_dtype][0]
    options.elements, options.subgroups = _arguments.table("elements", elements, ctypes.c_uint64), len(elements)
    options.host_memory = host_memory
    return options


def _numbers(given: Sequence[float] | None, count: int, name: str) -> Any:
    if given is None:
        return None
    if not isinstance(given, Iterable):
        raise InvalidArgumentError(f"Swap: {name} is {given!r}; pass a list of numbers, one for each path")
    found = [_arguments.real(f"Swap: {name}", number) for number in given]
    if len(found) != count:
        raise InvalidArgumentError(f"Swap: {name} has {len(found)} numbers for {count} paths; pass one for each path")
    return (ctypes.c_double * count)(*found)


def _record(kind: Any, structure: Any) -> Any:
    return kind(*(getattr(structure, name) for name in kind._fields))
