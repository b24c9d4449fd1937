"""The interleaved update: some subgroups are stepped by the CPU, some by the GPU, at the same time, with the bits of steps on
the CPU alone (Deep Optimizer States).

    update = spillway.Interleave([Subgroup(param, exp_avg, exp_avg_sq, grad, param_copy), ...], gpu=gpu)
    update.set_plan(spillway.plan(rates, sizes).sites)
    for batch in batches:
        for subgroup in as_gradients_come:
            update.gradient(subgroup, stream)
        update.begin(adam, stream=stream)
        for subgroup in as_forward_needs_them:
            update.publish(subgroup, stream)

With a GPU the update has seven streams of its own: set CUDA_DEVICE_MAX_CONNECTIONS=32 before CUDA starts, or they share
hardware queues and wait for each other. A stream that is not given is torch's current one. publish() blocks until the CPU is done
with the subgroup, or the GPU's work for it is enqueued, a few subgroups ahead.

Without a GPU threads take its part in host memory, and there are no streams: for tests, and to try a plan."""

import ctypes
from typing import Any, NamedTuple

from . import _abi, _arrays, _native
from ._held import Held
from .errors import InvalidArgument
from .gpu import WIRES, device_span, options_of, stream_number

SITES = ("cpu", "gpu", "resident")
PLANS = {"model": 0, "eq1": 1, "paper": 2, "stride": 3, "count": 4}
_HOST, _CUDA = 0, 1


class Subgroup(NamedTuple):
    """The arrays of a subgroup. param, exp_avg and exp_avg_sq are float32 in host memory, page-locked with a GPU (pinned());
    grad and the 16-bit param_copy are where the model has them: in device memory with a GPU. host_grad is for wire
    "delivered" with a GPU: where the caller brings the gradient to; with fetch_gradients grad may then be None."""

    param: Any
    exp_avg: Any
    exp_avg_sq: Any
    grad: Any
    param_copy: Any = None
    host_grad: Any = None


class Rates(NamedTuple):
    """Parameters per second of the CPU step and the GPU step, of copies to and from the device in float32 words, of the
    widening on the GPU (0: no time), of a rounding pass on the CPU (0: none); bytes per second of host memory (0: never
    binds)."""

    cpu: float
    gpu: float
    h2d: float
    d2h: float
    cast: float = 0.0
    downscale: float = 0.0
    dram: float = 0.0
    half_duplex: bool = False


class Plan(NamedTuple):
    """Who updates each subgroup, and what the model expects of that: seconds until all parameters are new beside those of
    the serial update, and bytes of GPU memory."""

    sites: tuple
    exposed_seconds: float
    serial_seconds: float
    gpu_bytes: int


def plan(rates, sizes, *, mode="model", parameter=0, residents=0, backward=0.0, wire="native", fetch_gradients=False,
         slots=0, chunk=0):
    """A plan for subgroups of these sizes, in the order in which their gradients arrive."""
    shape = _abi.sized(_abi.PlanShape)
    table = (ctypes.c_uint64 * len(sizes))(*sizes)
    shape.count, shape.sizes = len(sizes), table
    shape.wire, shape.fetch_gradients, shape.slots, shape.chunk = _wire(wire), int(fetch_gradients), slots, chunk
    options = _abi.sized(_abi.PlanOptions)
    options.mode, options.parameter = _choice(PLANS, mode, "mode"), parameter
    options.residents, options.backward = residents, backward
    sites, found = (ctypes.c_uint32 * len(sizes))(), _abi.sized(_abi.PlanResult)
    _native.check(_native.library().spw_plan_interleave(
        ctypes.byref(_rates(rates)), ctypes.byref(shape), ctypes.byref(options), sites, ctypes.byref(found)))
    return Plan(tuple(SITES[site] for site in sites), found.exposed_seconds, found.serial_seconds, found.gpu_bytes)


class Interleave(Held):
    """An interleaved update of subgroups, numbered in the order in which their gradients arrive. All are on the CPU until
    set_plan. The arrays stay where they are until close(), which comes after all that still moves is moved."""

    what, closer = "update", "spw_interleave_close"

    def __init__(self, subgroups, *, gpu=None, wire="native", fetch_gradients=False, slots=0, chunk=0, uint16_as=None):
        self._subgroups = [Subgroup(*subgroup) for subgroup in subgroups]
        options = _abi.sized(_abi.InterleaveOptions)
        options.backend = _HOST if gpu is None else _CUDA
        options.wire, options.fetch_gradients = _wire(wire), int(fetch_gradients)
        options.slots, options.chunk = slots, chunk
        table = (_abi.InterleaveSubgroup * len(self._subgroups))()
        for index, (slot, subgroup) in enumerate(zip(table, self._subgroups)):
            _fill(slot, subgroup, options, f"subgroups[{index}].", gpu, uint16_as)
        self._gpu = gpu

        def hold(handle):
            options.gpu = handle
            self._hold("spw_interleave_open", ctypes.byref(options), table, len(table))

        hold(None) if gpu is None else gpu._through(hold)

    def __len__(self):
        return len(self._subgroups)

    def set_plan(self, sites):
        """Who updates each subgroup from the next step on: "cpu", "gpu", or "resident", whose states move to the GPU."""
        table = (ctypes.c_uint32 * len(sites))(*(_choice(dict(zip(SITES, range(3))), site, "sites") for site in sites))
        self._call("spw_interleave_set_plan", table, len(sites))

    def get_plan(self):
        """The plan of the next step, or of the one under way."""
        table = (ctypes.c_uint32 * len(self))()
        self._call("spw_interleave_get_plan", table)
        return [SITES[site] for site in table]

    def gradient(self, subgroup, stream=None):
        """The gradient of a subgroup is made by what `stream` was given so far; its way to where it is needed begins."""
        self._call("spw_interleave_gradient", subgroup, self._number(stream))

    def params_free(self, subgroup, stream=None):
        """Nothing beyond what `stream` was given so far reads a subgroup's 16-bit parameters before they are published."""
        self._call("spw_interleave_params_free", subgroup, self._number(stream))

    def begin(self, adam, *, grad_scale=1.0, stream=None):
        """Starts the step of all subgroups by a spillway.Adam, or by a list of one for each, and returns."""
        each = list(adam) if isinstance(adam, (list, tuple)) else [adam]
        table = (_abi.AdamOptions * len(each))(*(options_of(one, grad_scale) for one in each))
        self._call("spw_interleave_begin", table, len(table), self._number(stream))
        for one in {id(one): one for one in each}.values():
            one.step_count += 1

    def begin_ds(self, optimizer_id, calls, stream=None):
        """begin() with the arithmetic of DeepSpeed's op for that id: a _abi.DsAdamCall for each subgroup."""
        table = (_abi.DsAdamCall * len(calls))(*calls)
        self._call("spw_interleave_begin_ds_adam", optimizer_id, table, len(table), self._number(stream))

    def publish(self, subgroup, stream=None):
        """Makes `stream` wait for a subgroup's new 16-bit parameters; without a GPU the call returns when they are there."""
        self._call("spw_interleave_publish", subgroup, self._number(stream))

    def _number(self, stream):
        return 0 if stream is None and self._gpu is None else stream_number(stream, self._gpu and self._gpu.ordinal)

    def ready(self, subgroup):
        """Whether a subgroup's 16-bit parameters are those of the last step begun."""
        ready = ctypes.c_uint32()
        self._call("spw_interleave_is_ready", subgroup, ctypes.byref(ready))
        return bool(ready.value)

    def finish(self):
        """Returns when all 16-bit parameters are new; states may still be on their way to the host."""
        self._call("spw_interleave_finish")

    def drain(self):
        """Returns when the states of all subgroups but residents are in host memory: before a checkpoint."""
        self._call("spw_interleave_drain")

    def away(self):
        """Subgroups whose states in host memory are not those of the last step; after a failure, those that are lost."""
        found, count = (ctypes.c_uint64 * len(self))(), ctypes.c_uint64()
        self._call("spw_interleave_away", found, len(self), ctypes.byref(count))
        return list(found[:count.value])

    def calibrate(self, rates):
        """Gives the Rates that replan begins with."""
        self._call("spw_interleave_calibrate", ctypes.byref(_rates(rates)))

    def replan(self, backward=0.0):
        """Takes a better plan for the next step, if what ran so far shows one; True if it did."""
        changed = ctypes.c_uint32()
        self._call("spw_interleave_replan", backward, ctypes.byref(changed))
        return bool(changed.value)

    def trace(self):
        """What ran since the last begin(), as JSON for ui.perfetto.dev."""
        needed = ctypes.c_uint64()
        self._call("spw_interleave_trace", None, 0, ctypes.byref(needed))
        while True:
            room = needed.value
            text = ctypes.create_string_buffer(room)
            self._call("spw_interleave_trace", text, room, ctypes.byref(needed))
            if needed.value <= room:
                return text.value.decode()


def _fill(slot, subgroup, options, prefix, gpu, uint16_as):
    slot.struct_size = ctypes.sizeof(_abi.InterleaveSubgroup)
    for name, array in subgroup._asdict().items():
        argument = prefix + name
        if array is None:
            continue
        if gpu is not None and name in ("grad", "param_copy"):
            address, elements, code = device_span(array, argument, gpu.ordinal)
        else:
            address, elements, code = _arrays.span(array, argument, name != "grad", uint16_as)
        setattr(slot, name, address)
        if name == "param":
            slot.n = elements
        elif elements != slot.n:
            raise InvalidArgument(f"{argument} has {elements} elements, param has {slot.n}")
        kind = {"grad": "grad_dtype", "host_grad": "grad_dtype", "param_copy": "copy_dtype"}.get(name)
        wanted = getattr(options, kind) if kind else _abi.DTYPE_F32
        if wanted not in (_abi.DTYPE_NONE, code):
            raise InvalidArgument(f"{argument} has another dtype than its kind in the other subgroups, or than float32")
        if kind:
            setattr(options, kind, code)


def _rates(rates):
    found = _abi.sized(_abi.PlanRates)
    for name, value in Rates(*rates)._asdict().items():
        setattr(found, name, int(value) if name == "half_duplex" else value)
    return found


def _wire(wire):
    return _choice(WIRES, wire, "wire")


def _choice(known, name, argument):
    if name not in known:
        raise InvalidArgument(f"{argument}: {name!r}; one of {', '.join(known)} expected")
    return known[name]
