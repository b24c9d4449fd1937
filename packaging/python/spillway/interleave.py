"""Interleaved updates: the CPU and the GPU step different subgroups at the same time (Deep Optimizer States). The
results are bit-identical to steps on the CPU alone.

    update = spillway.Interleave([Subgroup(param, exp_avg, exp_avg_sq, grad, param_copy), ...], gpu=gpu)
    update.set_plan(spillway.plan(rates, sizes).sites)
    for batch in batches:
        for subgroup in as_gradients_come:
            update.gradient(subgroup, stream)
        update.begin(adam, stream=stream)
        for subgroup in as_forward_needs_them:
            update.publish(subgroup, stream)

With a GPU the update uses seven CUDA streams. Set CUDA_DEVICE_MAX_CONNECTIONS=32 before CUDA starts; otherwise the
streams share hardware queues and wait for each other. A stream that is None is torch's current one.

publish() blocks until the CPU has updated the subgroup, or until the GPU's work for it is enqueued, a few subgroups
ahead.

Without a GPU, threads take its place in host memory and streams are ignored: for tests, and to try a plan."""

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
    """The arrays of a subgroup.

    - param, exp_avg, exp_avg_sq: float32 in host memory; page-locked with a GPU, see pinned().
    - grad and the 16-bit param_copy: the model's arrays; in device memory with a GPU.
    - host_grad: for wire "delivered" with a GPU, the host array that the caller fills with the gradient. With
      fetch_gradients grad may then be None."""

    param: Any
    exp_avg: Any
    exp_avg_sq: Any
    grad: Any
    param_copy: Any = None
    host_grad: Any = None


class Rates(NamedTuple):
    """Measured rates of a machine, in parameters per second except for `dram`.

    | field | meaning |
    |---|---|
    | cpu, gpu | optimizer step on the CPU, on the GPU |
    | h2d, d2h | copies to and from the device, in float32 |
    | cast | widening gradients on the GPU; 0: takes no time |
    | downscale | rounding to 16 bits as a separate pass on the CPU; 0: no such pass |
    | dram | bytes per second of host memory; 0: no limit |
    | half_duplex | the link carries one direction at a time |"""

    cpu: float
    gpu: float
    h2d: float
    d2h: float
    cast: float = 0.0
    downscale: float = 0.0
    dram: float = 0.0
    half_duplex: bool = False


class Plan(NamedTuple):
    """The processor that updates each subgroup ("cpu", "gpu" or "resident"), and the model's prediction: seconds from
    the end of backward until all parameters are new, the same for the serial update on the CPU, and bytes of GPU
    memory."""

    sites: tuple
    exposed_seconds: float
    serial_seconds: float
    gpu_bytes: int


def plan(rates, sizes, *, mode="model", parameter=0, residents=0, backward=0.0, wire="native", fetch_gradients=False,
         slots=0, chunk=0):
    """Computes a Plan for subgroups with these numbers of parameters, in the order in which their gradients arrive."""
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
    """An interleaved update of subgroups, numbered in the order in which their gradients arrive. The CPU updates all of
    them until set_plan(). Do not move the arrays before close(), which waits for transfers in flight."""

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
        """Sets the processor of each subgroup from the next step on: "cpu", "gpu", or "resident" (states move to the
        GPU)."""
        table = (ctypes.c_uint32 * len(sites))(*(_choice(dict(zip(SITES, range(3))), site, "sites") for site in sites))
        self._call("spw_interleave_set_plan", table, len(sites))

    def get_plan(self):
        """The plan of the next step, or of the step in flight."""
        table = (ctypes.c_uint32 * len(self))()
        self._call("spw_interleave_get_plan", table)
        return [SITES[site] for site in table]

    def gradient(self, subgroup, stream=None):
        """Declares that work already queued on `stream` produces this subgroup's gradient. Its transfer may start."""
        self._call("spw_interleave_gradient", subgroup, self._number(stream))

    def params_free(self, subgroup, stream=None):
        """Declares that only work already queued on `stream` reads a subgroup's 16-bit parameters until they are
        published."""
        self._call("spw_interleave_params_free", subgroup, self._number(stream))

    def begin(self, adam, *, grad_scale=1.0, stream=None):
        """Starts the step of all subgroups, by one spillway.Adam or a list with one per subgroup, and returns."""
        each = list(adam) if isinstance(adam, (list, tuple)) else [adam]
        table = (_abi.AdamOptions * len(each))(*(options_of(one, grad_scale) for one in each))
        self._call("spw_interleave_begin", table, len(table), self._number(stream))
        for one in {id(one): one for one in each}.values():
            one.step_count += 1

    def begin_ds(self, optimizer_id, calls, stream=None):
        """Like begin(), with the arithmetic of DeepSpeed's optimizer `optimizer_id`; `calls` has an _abi.DsAdamCall per
        subgroup."""
        table = (_abi.DsAdamCall * len(calls))(*calls)
        self._call("spw_interleave_begin_ds_adam", optimizer_id, table, len(table), self._number(stream))

    def publish(self, subgroup, stream=None):
        """Makes `stream` wait for a subgroup's new 16-bit parameters. Without a GPU the call blocks until they are
        written."""
        self._call("spw_interleave_publish", subgroup, self._number(stream))

    def _number(self, stream):
        return 0 if stream is None and self._gpu is None else stream_number(stream, self._gpu and self._gpu.ordinal)

    def ready(self, subgroup):
        """True if a subgroup's 16-bit parameters are those of the last step begun."""
        ready = ctypes.c_uint32()
        self._call("spw_interleave_is_ready", subgroup, ctypes.byref(ready))
        return bool(ready.value)

    def finish(self):
        """Waits until all 16-bit parameters are new; states may still be in transfer to the host."""
        self._call("spw_interleave_finish")

    def drain(self):
        """Waits until the states of all subgroups except residents are in host memory; call it before a checkpoint."""
        self._call("spw_interleave_drain")

    def away(self):
        """Numbers of the subgroups whose states in host memory are older than the last step; after a failure these
        states are lost."""
        found, count = (ctypes.c_uint64 * len(self))(), ctypes.c_uint64()
        self._call("spw_interleave_away", found, len(self), ctypes.byref(count))
        return list(found[:count.value])

    def calibrate(self, rates):
        """Sets the Rates from which replan() starts."""
        self._call("spw_interleave_calibrate", ctypes.byref(_rates(rates)))

    def replan(self, backward=0.0):
        """Adopts a better plan for the next step if the measured times show one; True if the plan changed. `backward`
        is the duration in seconds of the backward pass that the update overlaps."""
        changed = ctypes.c_uint32()
        self._call("spw_interleave_replan", backward, ctypes.byref(changed))
        return bool(changed.value)

    def trace(self):
        """Spans of the work since the last begin(), as JSON for ui.perfetto.dev."""
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
