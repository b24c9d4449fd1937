"""Adam over optimizer state that lives on a tier and is stepped through few buffers of host memory.

    with spillway.Tier(["/mnt/nvme", "/mnt/pfs"], job="run7") as tier:
        with spillway.Swap(tier, elements=[n0, n1, n2], host_bytes=4 << 30) as swap:
            swap.fill([(master0, None, None), (master1, None, None), (master2, None, None)])
            for step in range(1, steps + 1):
                swap.step(spillway.Adam(lr=1e-3), [(grad0, weight0), (grad1, weight1), (grad2, weight2)])
                swap.commit(step)

A gradient is read where it is, in its own dtype; a weight is a 16-bit copy that the step writes, or None.

With split_master=True tier and memory keep param without its upper halves, which follow from the bf16 weights: 10 bytes a
parameter instead of 12. Every step, and read() of param, then needs the weights that belong to the state: those of the step
before, of the commit after a rollback, at first param rounded. After an end and a new open they are needed too; commit() does not keep them."""

import ctypes
from typing import NamedTuple

from . import _abi, _arrays, _native
from ._held import Held
from .errors import InternalError, InvalidArgument
from .optim import Adam, StepStats

STATES = ("param", "exp_avg", "exp_avg_sq")
_NO_HUGE_PAGES, _NO_LOCK, _NO_TURNS, _SPLIT_MASTER = 1, 2, 4, 8


class Budget(NamedTuple):
    """Memory and bytes of a tiered update: what is taken, one buffer, how many there are and how many keep their subgroup from
    step to step; bytes of all state, and those that a step reads, and as many that it writes; with split masters one of
    them, and how many are whole at a time; what keeps every path busy, with nothing kept."""

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
    """Counts since open: updates, subgroups found in memory, read, and written, pieces that changed their path, and
    seconds in which nothing could be stepped for want of data."""

    rounds: int
    hits: int
    fetched: int
    flushed: int
    moved: int
    exposed_seconds: float


def plan(elements, *, host_bytes, paths, split_master=False):
    """The Budget of subgroups of so many elements over that many paths; takes nothing."""
    budget = _abi.sized(_abi.SwapBudget)
    options = _options(elements, host_bytes, split_master)
    _native.check(_native.library().spw_swap_plan(ctypes.byref(options), paths, ctypes.byref(budget)))
    return _record(Budget, budget)


class Swap(Held):
    """An open update. A tier that was resumed with these subgroups has their state; else fill() or write() gives it.

    `host_bytes` is the most memory for state; None takes as little as keeps every path busy. `ratio` is the share of each
    path, `speeds` their bytes per second to begin with. Without `turns` the paths are used although other
    processes do. After close() what was not committed is lost; the tier stays open."""

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
        """What was taken at open."""
        budget = _abi.sized(_abi.SwapBudget)
        self._call("spw_swap_budget_of", ctypes.byref(budget))
        return _record(Budget, budget)

    @property
    def stats(self):
        """Counts since open."""
        stats = _abi.sized(_abi.SwapStats)
        self._call("spw_swap_get_stats", ctypes.byref(stats))
        return _record(SwapStats, stats)

    def fill(self, states):
        """Gives every subgroup its param, exp_avg and exp_avg_sq, float32 each; None is all zeros."""
        if len(states) != len(self):
            raise InvalidArgument(f"states has {len(states)} entries for {len(self)} subgroups")
        addresses = (ctypes.c_void_p * (3 * len(self)))()
        for subgroup, parts in enumerate(states):
            addresses[3 * subgroup:3 * subgroup + 3] = self._floats(subgroup, parts, False)
        self._call("spw_swap_fill", addresses)

    def step(self, optimizer, tensors, *, grad_scale=1.0, stats=False, uint16_as=None):
        """One step of a spillway.Adam over all subgroups, each a row as table() says; with stats=True returns StepStats."""
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
        """One step with DeepSpeed's arithmetic: an _abi.DsAdamCall for each row of table(). `stepped(subgroup, address)` is
        called once a subgroup is stepped, with the address of its master weights; what it raises ends the step."""
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
            # ctypes reports what a signal handler raises before or after the try block, and goes on.
            missing = sorted(set(range(len(self))) - set(shown))
            raise InternalError(f"a signal handler raised while subgroups {missing} were shown to the caller; roll back")

    def table(self, tensors, uint16_as=None):
        """The C table of (grad, weight) for each subgroup. It holds their memory. With a split master `weight` holds the
        bf16 weights that belong to the state, or they are a third entry and `weight` holds anything."""
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
        """Copies parts of a subgroup's state into float32 arrays; with a split master param is made of its bf16 `weights`."""
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
        """Gives a subgroup other values from float32 arrays; None leaves a part as it is."""
        self._call("spw_swap_write", subgroup, *self._floats(subgroup, (param, exp_avg, exp_avg_sq), False))

    def commit(self, step, payload=b""):
        """Makes all state durable as `step`, with up to 1 MiB that the next open finds."""
        self.tier.committing(lambda: self._call("spw_swap_commit", step, payload, len(payload)))

    def roll_back(self):
        """Goes back to the last commit, also after a step that failed."""
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
    """The least memory with which every path can read and write at once."""
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
