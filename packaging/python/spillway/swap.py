"""Adam over optimizer state that is stored on a tier and updated through a few buffers of host memory.

    with spillway.Tier(["/mnt/nvme", "/mnt/pfs"], job="run7") as tier:
        with spillway.Swap(tier, elements=[n0, n1, n2], host_bytes=4 << 30) as swap:
            swap.fill([(master0, None, None), (master1, None, None), (master2, None, None)])
            for step in range(1, steps + 1):
                swap.step(spillway.Adam(lr=1e-3), [(grad0, weight0), (grad1, weight1), (grad2, weight2)])
                swap.commit(step)

A gradient is read in place, in its own dtype. A weight is a 16-bit copy that the step writes, or None.

With split_master=True the tier and memory store param without its upper halves, which the bf16 weights imply: 10 bytes
per parameter instead of 12. Every step, and read() of param, then needs the bf16 weights that belong to the state:

- after a step: the weights that this step wrote;
- after a rollback: the weights of the last commit;
- at first: param rounded to bf16.

commit() does not store these weights. The caller must keep them across a close and a new open."""

import ctypes
from typing import NamedTuple

from . import _abi, _arrays, _native
from ._held import Held
from .errors import InternalError, InvalidArgument
from .optim import Adam, StepStats

STATES = ("param", "exp_avg", "exp_avg_sq")
_NO_HUGE_PAGES, _NO_LOCK, _NO_TURNS, _SPLIT_MASTER = 1, 2, 4, 8


class Budget(NamedTuple):
    """Memory and traffic of a swapped update, in bytes except for the counts.

    | field | meaning |
    |---|---|
    | host_bytes | host memory of all buffers and masters |
    | buffer_bytes | one buffer: the state of the largest subgroup as stored |
    | buffers | number of buffers |
    | cached | number of buffers that keep their subgroup between steps |
    | state_bytes | all state |
    | step_bytes | bytes that a step reads from the tier; it writes as many |
    | master_bytes | one master: with split masters, the param of the largest subgroup |
    | masters | number of complete masters in memory at a time; 0 if every buffer has its own |
    | working_bytes | host memory with which every path reads and writes at once, without caching |"""

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
    """Counts since open.

    | field | meaning |
    |---|---|
    | rounds | updates begun, including the first fill |
    | hits | subgroups that an update found in memory |
    | fetched | subgroups read from the tier |
    | flushed | subgroups written to the tier |
    | moved | pieces of subgroups that changed their path |
    | exposed_seconds | seconds in which no subgroup could be updated because its data had not arrived |"""

    rounds: int
    hits: int
    fetched: int
    flushed: int
    moved: int
    exposed_seconds: float


def plan(elements, *, host_bytes, paths, split_master=False):
    """Computes the Budget for subgroups with these numbers of elements over `paths` paths; allocates nothing."""
    budget = _abi.sized(_abi.SwapBudget)
    options = _options(elements, host_bytes, split_master)
    _native.check(_native.library().spw_swap_plan(ctypes.byref(options), paths, ctypes.byref(budget)))
    return _record(Budget, budget)


class Swap(Held):
    """An open swapped update. On a tier resumed with the same subgroups the state is there; otherwise call fill() or
    write().

    - `host_bytes` limits the host memory for state; None takes the least that keeps every path busy.
    - `ratio` is the share of each path in the state; None: in proportion to the measured speeds.
    - `speeds` are the initial estimates of the paths' bandwidth in bytes per second.
    - turns=False uses the paths without waiting for the turns of other processes.
    - `patience_seconds` is the timeout of the wait for a turn; 0 is 30 seconds.

    close() discards what was not committed; the tier stays open."""

    what, closer = "update", "spw_swap_close"

    def __init__(self, tier, elements, *, host_bytes=None, ratio=None, speeds=None, huge_pages=True, lock=True, turns=True,
                 split_master=False, patience_seconds=0.0):
        paths = len(tier.paths())
        self.elements, self.split_master = tuple(elements), split_master
        least = working_bytes(elements, paths, split_master=split_master) if host_bytes is None else host_bytes
        options = _options(self.elements, least, split_master)
        options.ratio, options.speeds = _numbers(ratio, paths, "ratio"), _numbers(speeds, paths, "speeds")
        options.flags |= _NO_HUGE_PAGES * (not huge_pages) + _NO_LOCK * (not lock) + _NO_TURNS * (not turns)
        options.patience_seconds = patience_seconds
        self.tier = tier
        tier._through(lambda handle: self._hold("spw_swap_open", handle, ctypes.byref(options)))

    def __len__(self):
        return len(self.elements)

    @property
    def budget(self):
        """The Budget chosen at open."""
        budget = _abi.sized(_abi.SwapBudget)
        self._call("spw_swap_budget_of", ctypes.byref(budget))
        return _record(Budget, budget)

    @property
    def stats(self):
        """The SwapStats since open."""
        stats = _abi.sized(_abi.SwapStats)
        self._call("spw_swap_get_stats", ctypes.byref(stats))
        return _record(SwapStats, stats)

    def fill(self, states):
        """Sets param, exp_avg and exp_avg_sq of every subgroup from float32 arrays; None sets zeros."""
        if len(states) != len(self):
            raise InvalidArgument(f"states has {len(states)} entries for {len(self)} subgroups")
        addresses = (ctypes.c_void_p * (3 * len(self)))()
        for subgroup, parts in enumerate(states):
            addresses[3 * subgroup:3 * subgroup + 3] = self._floats(subgroup, parts, False)
        self._call("spw_swap_fill", addresses)

    def step(self, optimizer, tensors, *, grad_scale=1.0, stats=False, uint16_as=None):
        """Runs one step of a spillway.Adam over all subgroups; `tensors` has one row per subgroup, see table(). With
        stats=True returns StepStats."""
        if not isinstance(optimizer, Adam):
            raise InvalidArgument(f"optimizer is a {type(optimizer).__name__}; a spillway.Adam is needed")
        table = self.table(tensors, uint16_as)
        options = optimizer.options_of_next_step(grad_scale)
        out = _abi.sized(_abi.StepStats) if stats else None
        self._call("spw_swap_adam_step", ctypes.byref(options), ctypes.addressof(table), len(table),
                   ctypes.byref(out) if stats else None)
        optimizer.step_count += 1
        return StepStats(bool(out.nonfinite), out.sum_squares) if stats else None

    def ds_step(self, optimizer_id, calls, table, stepped=None):
        """Runs one step with DeepSpeed's arithmetic; `calls` has an _abi.DsAdamCall for each row of table(). Calls
        `stepped(subgroup, address)` after each subgroup's update, with the address of its master weights. An exception
        of `stepped` aborts the step."""
        raised, shown = [], []

        def forward(_user, subgroup, address):
            try:
                stepped(subgroup, address)
                shown.append(subgroup)
            except BaseException as error:
                raised.append(error)
                return 1
            return 0

        callback = _abi.STEPPED_FN(forward) if stepped else _abi.STEPPED_FN()
        rows = (_abi.DsAdamCall * len(calls))(*calls)

        def step(handle):
            status = _native.library().spw_swap_ds_adam_step(handle, optimizer_id, rows, ctypes.addressof(table), len(table),
                                                             callback, None)
            if raised:
                raise raised[0]
            _native.check(status)

        self._through(step)
        if stepped and len(shown) != len(self):
            # An exception of a signal handler outside the try block is reported by ctypes, and the C code continues.
            missing = sorted(set(range(len(self))) - set(shown))
            raise InternalError(f"a signal handler raised while subgroups {missing} were shown to the caller; roll back")

    def table(self, tensors, uint16_as=None):
        """The C table of (grad, weight) for each subgroup; it keeps their memory alive. With a split master `weight`
        holds the bf16 weights that belong to the state. If a third entry holds them instead, `weight` is only
        written."""
        if len(tensors) != len(self):
            raise InvalidArgument(f"tensors has {len(tensors)} entries for {len(self)} subgroups")
        table = (_abi.Tensor * len(tensors))()
        for subgroup, (row, (grad, weight, *belonging)) in enumerate(zip(table, tensors)):
            row.struct_size, row.n = ctypes.sizeof(_abi.Tensor), self.elements[subgroup]
            row.param_dtype = row.state_dtype = _abi.DTYPE_F32
            row.grad, count, row.grad_dtype = _arrays.span(grad, f"tensors[{subgroup}].grad", False, uint16_as)
            self._same(subgroup, count, "grad")
            if weight is not None:
                row.param_copy, count, row.copy_dtype = _arrays.span(weight, f"tensors[{subgroup}].weight", True, uint16_as)
                self._same(subgroup, count, "weight")
            if belonging and belonging[0] is not None:
                row.param, count, row.param_dtype = _arrays.span(belonging[0], f"tensors[{subgroup}][2]", False, uint16_as)
                self._same(subgroup, count, "third entry")
        table.held = [_arrays.held(array) for row in tensors for array in row if array is not None]
        return table

    def read(self, subgroup, param=None, exp_avg=None, exp_avg_sq=None, *, weights=None, uint16_as=None):
        """Copies parts of a subgroup's state into float32 arrays. With a split master, param also needs its bf16
        `weights`."""
        parts = self._floats(subgroup, (param, exp_avg, exp_avg_sq), True)
        if weights is None:
            self._call("spw_swap_read", subgroup, *parts)
            return
        address, count, code = _arrays.span(weights, "weights", False, uint16_as)
        self._same(subgroup, count, "weights")
        if code != _abi.DTYPE_BF16:
            raise InvalidArgument("weights are not bfloat16")
        self._call("spw_swap_read_split", subgroup, address, *parts)

    def write(self, subgroup, param=None, exp_avg=None, exp_avg_sq=None):
        """Sets parts of a subgroup's state from float32 arrays; None keeps a part."""
        self._call("spw_swap_write", subgroup, *self._floats(subgroup, (param, exp_avg, exp_avg_sq), False))

    def commit(self, step, payload=b""):
        """Makes all state durable as `step`. `payload`, up to 1 MiB, is returned by the next open."""
        self.tier.committing(lambda: self._call("spw_swap_commit", step, payload, len(payload)))

    def roll_back(self):
        """Restores the state of the last commit; also valid after a failed step."""
        self._call("spw_swap_roll_back")

    def _floats(self, subgroup, parts, write):
        if not 0 <= subgroup < len(self):
            raise InvalidArgument(f"subgroup is {subgroup} of {len(self)}")
        addresses = []
        for name, array in zip(STATES, parts):
            address, count, code = (None, None, None) if array is None else _arrays.span(array, name, write)
            if array is not None:
                self._same(subgroup, count, name)
                if code != _abi.DTYPE_F32:
                    raise InvalidArgument(f"{name} is not float32")
            addresses.append(address)
        return addresses

    def _same(self, subgroup, count, name):
        if count != self.elements[subgroup]:
            raise InvalidArgument(f"{name} has {count} elements, subgroup {subgroup} has {self.elements[subgroup]}")


def working_bytes(elements, paths, *, split_master=False):
    """The least host memory, in bytes, with which every path can read and write at once."""
    return plan(elements, host_bytes=(1 << 64) - 1, paths=paths, split_master=split_master).working_bytes


def _options(elements, host_bytes, split_master):
    options = _abi.sized(_abi.SwapOptions)
    options.flags = _SPLIT_MASTER * bool(split_master)
    options.elements, options.subgroups = (ctypes.c_uint64 * len(elements))(*elements), len(elements)
    options.host_bytes = host_bytes
    return options


def _numbers(given, count, name):
    if given is None:
        return None
    if len(given) != count:
        raise InvalidArgument(f"{name} has {len(given)} numbers for {count} paths")
    return (ctypes.c_double * count)(*given)


def _record(kind, structure):
    return kind(*(getattr(structure, name) for name in kind._fields))
