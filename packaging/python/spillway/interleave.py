"""Interleaved updates: the CPU and the GPU step different subgroups at the same time (Deep Optimizer States). The
results are bit-identical to steps on the CPU alone.

    update = spillway.Interleave([Subgroup(param, exp_avg, exp_avg_sq, grad, param_copy), ...], gpu=gpu)
    update.calibrate(rates)
    for batch in batches:
        for subgroup in as_gradients_come:
            update.grad_ready(subgroup, stream)
        update.begin(adam, stream=stream)
        for subgroup in as_forward_needs_them:
            update.stream_wait_params(subgroup, stream)
        update.replan()

After two steps replan() makes subgroups resident in the device memory that is free, and later fetches others if that is
faster. set_plan() gives the placements, and so the number of residents, instead.

With a GPU the update uses seven CUDA streams. Set CUDA_DEVICE_MAX_CONNECTIONS=32 before CUDA starts; otherwise the
streams share hardware queues and wait for each other. A stream that is None is torch's current one.

stream_wait_params() blocks until the CPU has updated the subgroup, or until the GPU's work for it is enqueued, a few subgroups
ahead.

Without a GPU, threads take its place in host memory and streams are ignored: for tests, and to try a plan."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from . import _abi, _arguments, _arrays, _native, _tensor_rows
from ._native_handle import _NativeHandle
from .gpu import TRANSFER_DTYPES, CudaStream, Gpu, device_span, options_of, stream_number
from .optim import Adam, counter

PLACEMENTS = ("cpu", "gpu", "resident")
PLANS = {"model": _abi.PLAN_MODE_MODEL, "eq1": _abi.PLAN_MODE_EQ1, "stride": _abi.PLAN_MODE_STRIDE, "count": _abi.PLAN_MODE_COUNT}
_HOST, _CUDA = _abi.INTERLEAVE_BACKEND_HOST, _abi.INTERLEAVE_BACKEND_CUDA


class Subgroup(NamedTuple):
    """The arrays of a subgroup, all with the same number of elements.

    Attributes:
        param, exp_avg, exp_avg_sq: float32 in host memory; page-locked with a GPU, see pinned().
        grad: The model's gradient; in device memory with a GPU.
        param_copy: The model's 16-bit parameters, which the update writes; in device memory with a GPU.
        host_grad: For transfer_dtype "delivered" with a GPU, the host array that the caller fills with the gradient.
            With fetch_gradients grad may then be None."""

    param: Any
    exp_avg: Any
    exp_avg_sq: Any
    grad: Any
    param_copy: Any = None
    host_grad: Any = None


class Rates(NamedTuple):
    """Measured rates of a machine, in parameters per second except for `dram`.

    Attributes:
        cpu: Optimizer step on the CPU: alone if `dram` is given, else beside copies.
        gpu: Optimizer step on the GPU.
        h2d: Copies to the device, in float32.
        d2h: Copies from the device, in float32.
        cast: Widening gradients on the GPU; 0: takes no time.
        downscale: Rounding to 16 bits as a separate pass on the CPU; 0: no such pass.
        dram: Bytes per second of host memory; 0: no limit.
        half_duplex: The link carries one direction at a time."""

    cpu: float
    gpu: float
    h2d: float
    d2h: float
    cast: float = 0.0
    downscale: float = 0.0
    dram: float = 0.0
    half_duplex: bool = False


class Plan(NamedTuple):
    """A placement of subgroups, and the model's prediction for it.

    Attributes:
        placements: For each subgroup the processor that updates it: "cpu", "gpu" or "resident".
        exposed_seconds: Seconds from the end of backward until all parameters are new.
        serial_seconds: The same for the serial update on the CPU.
        gpu_bytes: Bytes of GPU memory that the update uses."""

    placements: tuple[str, ...]
    exposed_seconds: float
    serial_seconds: float
    gpu_bytes: int


def plan(
    rates: Rates | Sequence[Any],
    sizes: Sequence[int],
    *,
    mode: str = "model",
    argument: int = 0,
    residents: int = 0,
    backward: float = 0.0,
    transfer_dtype: str = "native",
    fetch_gradients: bool = False,
    slots: int = 0,
    chunk: int = 0,
) -> Plan:
    """Computes a Plan of an interleaved update.

    Args:
        rates: The measured Rates.
        sizes: Number of parameters of each subgroup, in the order in which their gradients arrive.
        mode: "model" takes the best placement of a simulation, "eq1" the stride of Deep Optimizer
            States Eq. 1, "stride" gives the GPU every `argument`-th subgroup, "count" gives it `argument` subgroups.
        argument: The number that modes "stride" and "count" need.
        residents: Number of subgroups whose states stay in GPU memory.
        backward: Seconds of the backward pass that the update overlaps.
        transfer_dtype: As for Interleave.
        fetch_gradients: As for Interleave.
        slots: As for Interleave.
        chunk: As for Interleave.

    Raises:
        InvalidArgumentError: A value is out of its range.

    Example:
        spillway.plan(spillway.Rates(cpu=2e9, gpu=2e10, h2d=5e9, d2h=5e9), [1 << 24] * 8).placements"""
    shape = _abi.sized(_abi.PlanShape)
    table = _arguments.table("sizes", sizes, ctypes.c_uint64)
    shape.count, shape.sizes = len(sizes), table
    shape.transfer_dtype, shape.fetch_gradients = _transfer_dtype(transfer_dtype), int(bool(fetch_gradients))
    shape.slots, shape.chunk = _arguments.unsigned("slots", slots, 32), _arguments.unsigned("chunk", chunk)
    options = _abi.sized(_abi.PlanOptions)
    options.mode, options.parameter = _choice(PLANS, mode, "plan: mode"), _arguments.unsigned("argument", argument)
    options.residents, options.backward = _arguments.unsigned("residents", residents), _arguments.real("backward", backward)
    placements, found = (ctypes.c_uint32 * len(sizes))(), _abi.sized(_abi.PlanResult)
    _native.call(
        "spw_plan_interleave", ctypes.byref(_rates(rates)), ctypes.byref(shape), ctypes.byref(options), placements, ctypes.byref(found)
    )
    return Plan(tuple(PLACEMENTS[placement] for placement in placements), found.exposed_seconds, found.serial_seconds, found.gpu_bytes)


class Interleave(_NativeHandle):
    """An interleaved update of subgroups, numbered in the order in which their gradients arrive. Thread-safe.

    The CPU updates all subgroups until set_plan(). Do not move the arrays before close(), which waits for transfers in
    flight.

    Args:
        subgroups: The Subgroups, all of one gradient dtype and one copy dtype.
        gpu: The Gpu; None: threads in its place.
        transfer_dtype: How gradients reach the host: "native" in the model's 16 bits, "f32" widened on the GPU,
            "delivered" by the caller, into host_grad.
        fetch_gradients: The GPU reads the gradients of its subgroups from host memory.
        slots: Number of state buffers on the GPU; 0: 3. Each takes 12 bytes per parameter of the largest subgroup, and the bytes of a
            fetched gradient.
        chunk: Parameters per copy; 0: 16 Mi.
        uint16_dtype: The dtype that uint16 arrays hold: "bf16" or "f16".

    Raises:
        InvalidArgumentError: An array does not fit.
        GpuError: The driver failed.

    Example:
        update = spillway.Interleave([Subgroup(param, exp_avg, exp_avg_sq, grad, param_copy)], gpu=gpu)
        update.set_plan(["gpu"])
        update.grad_ready(0, stream)
        update.begin(adam, stream=stream)
        update.stream_wait_params(0, stream)"""

    closer = "spw_interleave_close"

    def __init__(
        self,
        subgroups: Iterable[Sequence[Any]],
        *,
        gpu: Gpu | None = None,
        transfer_dtype: str = "native",
        fetch_gradients: bool = False,
        slots: int = 0,
        chunk: int = 0,
        uint16_dtype: str | None = None,
    ):
        self._subgroups = [Subgroup(*subgroup) for subgroup in subgroups]
        options = _abi.sized(_abi.InterleaveOptions)
        options.backend = _HOST if gpu is None else _CUDA
        options.transfer_dtype, options.fetch_gradients = _transfer_dtype(transfer_dtype), int(fetch_gradients)
        options.slots, options.chunk = _arguments.unsigned("slots", slots, 32), _arguments.unsigned("chunk", chunk)
        table = (_abi.InterleaveSubgroup * len(self._subgroups))()
        # One dtype each for the gradients and the copies of all subgroups, and float32 states.
        dtypes = _abi.Tensor(param_dtype=_abi.DTYPE_F32, state_dtype=_abi.DTYPE_F32)
        for index, (slot, subgroup) in enumerate(zip(table, self._subgroups)):
            _fill(slot, subgroup, dtypes, f"subgroups[{index}].", gpu, uint16_dtype)
        options.grad_dtype, options.copy_dtype = dtypes.grad_dtype, dtypes.copy_dtype
        self._gpu, self._transfer_dtype = gpu, transfer_dtype
        held = _arrays.all_held(self._subgroups)

        def hold(handle: Any) -> None:
            options.gpu = handle
            self._hold("spw_interleave_open", ctypes.byref(options), table, len(table), keeps=(held,))

        hold(None) if gpu is None else Gpu._given("Interleave: gpu", gpu)._through(hold)

    def __len__(self) -> int:
        """Number of subgroups."""
        return len(self._subgroups)

    def _facts(self) -> dict[str, Any]:
        return {"subgroups": len(self), "gpu": self._gpu, "transfer_dtype": self._transfer_dtype}

    def set_plan(self, placements: Sequence[str]) -> None:
        """Sets the processor of each subgroup from the next step on. A subgroup for which the GPU has no memory is on the CPU
        instead, see get_plan().

        Args:
            placements: For each subgroup "cpu", "gpu", or "resident" (states move to the GPU)."""
        numbers = {name: number for number, name in enumerate(PLACEMENTS)}
        table = (ctypes.c_uint32 * len(placements))(*(_choice(numbers, placement, "placements") for placement in placements))
        self._call("spw_interleave_set_plan", table, len(placements))

    def get_plan(self) -> list[str]:
        """Returns the placements of the next step, or of the step in flight."""
        table = (ctypes.c_uint32 * len(self))()
        self._call("spw_interleave_get_plan", table)
        return [PLACEMENTS[placement] for placement in table]

    def grad_ready(self, subgroup: int, stream: CudaStream | None = None) -> None:
        """Declares that work already queued on `stream` produces this subgroup's gradient. Its transfer may start."""
        self._call("spw_interleave_grad_ready", self._at(subgroup), self._number(stream))

    def release_params(self, subgroup: int, stream: CudaStream | None = None) -> None:
        """Declares that only work already queued on `stream` reads a subgroup's 16-bit parameters before
        stream_wait_params()."""
        self._call("spw_interleave_release_params", self._at(subgroup), self._number(stream))

    def begin(self, adam: Adam | Sequence[Adam], *, grad_scale: float = 1.0, stream: CudaStream | None = None) -> None:
        """Starts the step of all subgroups and returns.

        Args:
            adam: The Adam whose options the step uses, or a list with one per subgroup.
            grad_scale: Factor of the gradients.
            stream: Stream whose queued work the step follows.

        Raises:
            InvalidArgumentError: No gradient was declared by grad_ready() for a subgroup."""
        each: list[Adam] = [adam] if isinstance(adam, Adam) else list(adam)
        table = (_abi.AdamOptions * len(each))(*(options_of(one, grad_scale) for one in each))
        self._counted(counter(each), "spw_interleave_begin", table, len(table), self._number(stream))

    def begin_ds(self, optimizer_id: int, calls: Sequence[Any], stream: CudaStream | None = None) -> None:
        """Like begin(), with the arithmetic of DeepSpeed's optimizer `optimizer_id`; `calls` has an _abi.DsAdamCall per
        subgroup."""
        table = (_abi.DsAdamCall * len(calls))(*calls)
        self._call("spw_interleave_begin_ds_adam", optimizer_id, table, len(table), self._number(stream))

    def stream_wait_params(self, subgroup: int, stream: CudaStream | None = None) -> None:
        """Makes `stream` wait for a subgroup's new 16-bit parameters. Without a GPU the call blocks until they are
        written."""
        self._call("spw_interleave_stream_wait_params", self._at(subgroup), self._number(stream))

    @staticmethod
    def _at(subgroup: Any) -> int:
        return _arguments.unsigned("subgroup", subgroup)

    def _number(self, stream: CudaStream | None) -> int:
        if stream is None and self._gpu is None:
            return 0
        return stream_number(stream, None if self._gpu is None else self._gpu.ordinal)

    def ready(self, subgroup: int) -> bool:
        """Returns True if a subgroup's 16-bit parameters are those of the last step begun."""
        ready = ctypes.c_uint32()
        self._call("spw_interleave_get_ready", self._at(subgroup), ctypes.byref(ready))
        return bool(ready.value)

    def finish(self) -> None:
        """Waits until all 16-bit parameters are new; states may still be in transfer to the host."""
        self._call("spw_interleave_finish")

    def drain(self) -> None:
        """Waits until the states of all subgroups except residents are in host memory; call it before a checkpoint."""
        self._call("spw_interleave_drain")

    def in_flight(self) -> list[int]:
        """Returns the numbers of the subgroups whose states in host memory are older than the last step; after a failure these
        states are lost."""
        found, count = (ctypes.c_uint64 * len(self))(), ctypes.c_uint64()
        self._call("spw_interleave_get_in_flight", found, len(self), ctypes.byref(count))
        return list(found[: count.value])

    def calibrate(self, rates: Rates | Sequence[Any]) -> None:
        """Sets the Rates from which replan() starts."""
        self._call("spw_interleave_calibrate", ctypes.byref(_rates(rates)))

    def replan(self, backward: float = 0.0) -> bool:
        """Adopts a better plan for the next step if the measured times show one, and gives up one that is slower than steps
        without it.

        If set_plan() was not called, the number of residents is chosen after two steps: as many of the last subgroups
        as fit in the device memory that is free then, 12 bytes per parameter. A tenth of the memory stays free.

        Args:
            backward: Seconds of the backward pass that the update overlaps.

        Returns:
            True if the plan changed."""
        changed = ctypes.c_uint32()
        self._call("spw_interleave_replan", _arguments.real("backward", backward), ctypes.byref(changed))
        return bool(changed.value)

    def trace(self) -> str:
        """Returns the spans of the work since the last begin(), as JSON for ui.perfetto.dev."""
        return self._through(lambda handle: _native.text("spw_interleave_get_trace", handle))


def _fill(slot: Any, subgroup: Subgroup, dtypes: Any, prefix: str, gpu: Gpu | None, uint16_dtype: str | None) -> None:
    for name, array in subgroup._asdict().items():
        argument = prefix + name
        if array is None:
            continue
        if gpu is not None and name in ("grad", "param_copy"):
            span = device_span(array, argument, gpu.ordinal)
        else:
            span = _arrays.span(array, argument, name != "grad", uint16_dtype)
        if name == "param":
            _tensor_rows.begin(slot, span[1])
        _tensor_rows.put(slot, name, span, argument, dtypes)


def _rates(rates: Any) -> Any:
    found = _abi.sized(_abi.InterleaveRates)
    for name, value in Rates(*rates)._asdict().items():
        setattr(found, name, int(bool(value)) if name == "half_duplex" else _arguments.real(f"rates: {name}", value))
    return found


def _transfer_dtype(name: str) -> int:
    return _choice(TRANSFER_DTYPES, name, "transfer_dtype")


def _choice(known: Mapping[str, int], name: str, argument: str) -> int:
    return known[_arguments.one_of(argument, name, known)]
