"""GPU transfers and Adam on the device, through the CUDA driver that the framework uses.

    gpu = spillway.Gpu(0)
    host = spillway.pinned(grad.numel(), "float32")
    copy = gpu.copy_out(grad, host, after=torch.cuda.current_stream())     # widened on the GPU
    copy.wait()

- Device memory is a contiguous torch tensor on that GPU, or a DeviceArray.
- A stream or an event is a torch object, or Stream(number) or Event(number) with its CUDA handle. None is torch's
  current stream on that GPU, if torch uses CUDA.
- Pinned memory that a GPU used is unmapped in a forked child, which must not access it.
- The driver is loaded at the first call, which raises NoDeviceError if there is no driver or no GPU. SPILLWAY_CUDA_LIBRARY
  names another driver library."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from . import _abi, _arguments, _arrays, _kept, _native, _pinned, _tensor_rows
from ._arrays import Array
from ._attributes import Fixed, described
from ._native_handle import TIMEOUT, _NativeHandle, in_slices, record
from .errors import InvalidArgumentError
from .optim import Adam, StepStats, counter

TRANSFER_DTYPES = {"native": 0, "f32": 1, "delivered": 2}
_D2H, _H2D = 0, 1
# Each new copy polls up to this number of older ones for their end.
_MOST_POLLS = 4
_NOTHING, _EVENT, _STREAM = _abi.GPU_AFTER_NOTHING, _abi.GPU_AFTER_EVENT, _abi.GPU_AFTER_STREAM
_NAMES = {_abi.DTYPE_F32: "f32", _abi.DTYPE_F16: "f16", _abi.DTYPE_BF16: "bf16"}
_SPANS = ("param", "grad", "exp_avg", "exp_avg_sq", "param_copy")


class CudaStream(Protocol):
    """A stream of torch, or a Stream."""

    @property
    def cuda_stream(self) -> int:
        """The CUDA handle."""


class CudaEvent(Protocol):
    """An event of torch, or an Event."""

    @property
    def cuda_event(self) -> int:
        """The CUDA handle."""


class DeviceArray(NamedTuple):
    """Device memory that is no torch tensor.

    Attributes:
        address: Device address.
        elements: Number of elements.
        dtype: "float32", "float16" or "bfloat16"."""

    address: int
    elements: int
    dtype: str


class Stream(NamedTuple):
    """A stream by its CUDA handle; 0 is the legacy default stream. Example: Stream(torch_stream.cuda_stream)."""

    cuda_stream: int


class Event(NamedTuple):
    """An event by its CUDA handle."""

    cuda_event: int


class Info(NamedTuple):
    """Properties of a GPU.

    Attributes:
        name: Name of the device.
        pci: PCI address.
        capability: Compute capability; 90 for 9.0.
        multiprocessors: Number of multiprocessors.
        copy_engines: With 2, copies run in both directions at once.
        memory_bytes: Size of the memory.
        free_bytes: Bytes that are free now."""

    name: str
    pci: str
    capability: int
    multiprocessors: int
    copy_engines: int
    memory_bytes: int
    free_bytes: int


class Link(NamedTuple):
    """Throughput of the link and of the CPU step, in parameters per second.

    `f32` and `native` are the dtype on the link: float32, or the model's 16 bits.

    Attributes:
        transfer_dtype: The faster dtype for gradients: "f32" or "native".
        out_f32, out_native: Copies from the device.
        in_f32, in_native: Copies to the device.
        step_f32, step_native: Steps on the CPU with such gradients."""

    transfer_dtype: str
    out_f32: float
    out_native: float
    in_f32: float
    in_native: float
    step_f32: float
    step_native: float


def gpu_count() -> int:
    """Returns the number of GPUs that this process sees.

    Raises:
        NoDeviceError: There is no driver or no GPU."""
    found = _abi.sized(_abi.GpuDriver)
    _native.call("spw_gpu_probe", ctypes.byref(found))
    return found.devices


def pinned(elements: int, dtype: str = "float32", *, progress: Callable[[int, int], object] | None = None) -> Any:
    """Allocates a numpy array in page-locked memory, as transfers need it.

    Args:
        elements: Number of elements.
        dtype: "float32", "float16", or "bfloat16", which is stored as uint16.
        progress: Called with the bytes that were taken and those that will be, several times a second, by another thread; last by this one.
            None: a line on a terminal after two seconds. What it raises is raised after the memory was taken.

    Returns:
        A 1-D numpy array with undefined content. Its memory is freed with its last view.

    Raises:
        InvalidArgumentError: `dtype` is unknown.

    Example:
        host = spillway.pinned(grad.numel(), "bfloat16")"""
    import numpy

    code, elements = _arrays.dtype_code(dtype), _arguments.unsigned("pinned: elements", elements, 48)
    kind = {_abi.DTYPE_F32: numpy.float32, _abi.DTYPE_F16: numpy.float16, _abi.DTYPE_BF16: numpy.uint16}[code]
    size = numpy.dtype(kind).itemsize * elements
    with _pinned.taking(size, progress):
        memory = _pinned.allocate(size)
    return numpy.frombuffer(memory, kind)


def current_stream(ordinal: int | None = None) -> Any:
    """Returns torch's current stream on a GPU; None if torch does not use CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return torch.cuda.current_stream(ordinal)


def stream_number(stream: CudaStream | None, ordinal: int | None = None) -> int:
    """Returns the CUDA handle of a stream; None is torch's current stream, or the legacy default stream if torch does not use
    CUDA."""
    stream = current_stream(ordinal) if stream is None else stream
    return 0 if stream is None else _number(stream, "cuda_stream", "stream")


def device_span(array: Any, argument: str, ordinal: int | None = None) -> tuple[int, int, int]:
    """Returns (address, elements, dtype code) of an array in the memory of GPU `ordinal`."""
    if isinstance(array, DeviceArray):
        address, elements = (
            _arguments.unsigned(f"{argument}.address", array.address),
            _arguments.unsigned(f"{argument}.elements", array.elements),
        )
        return address, elements, _arrays.dtype_code(array.dtype)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(array, torch.Tensor):
        raise InvalidArgumentError(f"{argument} is a {type(array).__name__}; pass a torch tensor on a GPU or a DeviceArray")
    code = _abi.DTYPES.get(str(array.dtype).removeprefix("torch."))
    if not array.is_cuda or not array.is_contiguous() or code is None:
        raise InvalidArgumentError(
            f"{argument} is {array.dtype} on device {array.device}, strides {array.stride()}; pass a contiguous "
            "tensor of float32, float16 or bfloat16 on a GPU"
        )
    if ordinal is not None and array.device.index != ordinal:
        raise InvalidArgumentError(f"{argument} is on device {array.device}, and this Gpu is number {ordinal}; pass a tensor on that GPU")
    return array.data_ptr(), array.numel(), code


class Gpu(_NativeHandle):
    """An open GPU, used through its primary context, which torch also uses. Thread-safe.

    close() waits for copies in flight.

    Args:
        ordinal: Number of the GPU among those that the process sees.
        chunk_bytes: Largest part of a copy, in bytes; 0: the default.

    Raises:
        NoDeviceError: There is no driver or no GPU.
        GpuError: The driver failed.

    Example:
        gpu = spillway.Gpu(0)
        gpu.copy_out(grad, host).wait()"""

    closer = "spw_gpu_close"

    ordinal: Fixed[int] = Fixed("Number of the GPU.")

    def __init__(self, ordinal: int = 0, *, chunk_bytes: int = 0):
        options = _abi.sized(_abi.GpuOptions)
        self.ordinal = options.ordinal = _arguments.unsigned("Gpu: ordinal", ordinal, 31)
        options.chunk_bytes = _arguments.unsigned("Gpu: chunk_bytes", chunk_bytes)
        #: The memory of copies by their tickets. The copies themselves refer to this object.
        self._held = _kept.Submitted()
        self._hold("spw_gpu_open", ctypes.byref(options), keeps=(self._held,))

    def _facts(self) -> dict[str, Any]:
        return {"ordinal": self.ordinal}

    def info(self) -> Info:
        """Returns the properties of the GPU, and the bytes of memory that are free now."""
        found = _abi.sized(_abi.GpuInfo)
        self._call("spw_gpu_get_info", ctypes.byref(found))
        return Info(found.name.decode(), found.pci.decode(), *(getattr(found, name) for name in Info._fields[2:]))

    def copy_out(self, device: Any, host: Array, *, after: CudaStream | CudaEvent | None = None) -> Copy:
        """Starts a copy from the device to page-locked memory.

        Args:
            device: Array in the memory of this GPU; float32, float16 or bfloat16.
            host: Page-locked array with as many elements, of the same dtype or float32, see pinned(). The GPU widens.
            after: Stream or event after whose present position the copy runs; None: torch's current stream.

        Returns:
            The Copy in flight.

        Raises:
            InvalidArgumentError: An array does not fit.
            GpuError: The driver failed."""
        return self._copy(_D2H, device, host, after)

    def copy_in(self, host: Array, device: Any, *, after: CudaStream | CudaEvent | None = None) -> Copy:
        """Starts a copy from page-locked memory to the device; the GPU rounds float32 to nearest even.

        Args:
            host: Page-locked array, of the dtype of `device` or float32.
            device: Array in the memory of this GPU with as many elements.
            after: Stream or event after whose present position the copy runs; None: torch's current stream.

        Returns:
            The Copy in flight.

        Raises:
            InvalidArgumentError: An array does not fit.
            GpuError: The driver failed."""
        return self._copy(_H2D, device, host, after)

    def copy_record(self, direction: int, device: Any, host: Any, after: Any) -> Any:
        """Returns the C structure that describes a copy."""
        copy = _abi.sized(_abi.GpuCopy)
        copy.direction = direction
        copy.device, copy.n, copy.device_dtype = device_span(device, "device", self.ordinal)
        copy.host, elements, copy.host_dtype = _arrays.span(host, "host", direction == _D2H, _NAMES[copy.device_dtype])
        if elements != copy.n:
            raise InvalidArgumentError(f"Gpu copy: host has {elements} elements, device {copy.n}; pass arrays of one size")
        if hasattr(after, "cuda_stream"):
            copy.after, copy.handle = _STREAM, stream_number(after)
        elif after is not None:
            copy.after, copy.handle = _EVENT, _number(after, "cuda_event", "after")
        return copy

    def _copy(self, direction: int, device: Any, host: Any, after: Any) -> Copy:
        after = current_stream(self.ordinal) if after is None else after
        row = self.copy_record(direction, device, host, after)
        for earlier in self._held.begun()[:_MOST_POLLS]:
            self._poll(earlier, 0)
        ticket = _Ticket()
        self._held.submit(
            (*_arrays.all_held([(host, device)]), after),
            lambda outcome: self._recorded(outcome, "spw_gpu_copy_start", ctypes.byref(row), ctypes.byref(ticket.number)),
            ticket,
        )
        return Copy(self, ticket)

    def _poll(self, ticket: _Ticket, milliseconds: int) -> int:
        """The status of a copy after a wait; frees its memory if it has ended."""
        outcome: list[int] = []
        self._through(lambda handle: record(outcome, "spw_gpu_copy_wait", handle, ticket.number.value, milliseconds))
        if outcome[0] == 0:
            self._held.over([ticket])
        return outcome[0]

    def close(self) -> None:
        """Closes the GPU after all copies have ended."""
        if self._end():
            self._held.clear()

    def step(
        self,
        adam: Adam,
        tensors: Iterable[Sequence[Any]],
        *,
        shadow: Iterable[Sequence[Any]] | None = None,
        stream: CudaStream | None = None,
        grad_scale: float = 1.0,
        return_stats: bool = False,
    ) -> StepStats | None:
        """Runs one step on the device. The result is bit-identical to a step on the CPU.

        Args:
            adam: The Adam whose options the step uses.
            tensors: Tuples of param, grad, exp_avg, exp_avg_sq and optionally a 16-bit copy to write, all in the memory
                of this GPU.
            shadow: Tuples of param, exp_avg and exp_avg_sq, to which the new states are written; the old ones are kept.
            stream: Stream in whose order the step runs; None: torch's current stream.
            grad_scale: Factor of the gradients.
            return_stats: Wait, and return the statistics of the scaled gradients.

        Returns:
            StepStats with `return_stats`, else None.

        Raises:
            InvalidArgumentError: An array does not fit.
            GpuError: The driver failed."""
        return self._step_table(adam, device_table(tensors, shadow, self.ordinal), stream, grad_scale, return_stats)

    def _step_table(
        self, adam: Adam, table: Any, stream: CudaStream | None = None, grad_scale: float = 1.0, return_stats: bool = False
    ) -> StepStats | None:
        """As step(), for the rows of a C table."""
        options = options_of(adam, grad_scale)
        out: Any = _abi.sized(_abi.StepStats) if return_stats else None
        arguments = (
            ctypes.byref(options),
            table,
            len(table),
            stream_number(stream, self.ordinal),
            ctypes.byref(out) if return_stats else None,
        )
        self._counted(counter([adam]), "spw_gpu_adam_step", *arguments)
        return StepStats(bool(out.nonfinite), out.sum_squares) if return_stats else None

    def ds_step(
        self, optimizer_id: int, call: Any, tensor: Sequence[Any], *, stream: CudaStream | None = None, outcome: list[int] | None = None
    ) -> None:
        """Like step() of one tensor, with the arithmetic of DeepSpeed's optimizer `optimizer_id`; `call` is an _abi.DsAdamCall. The status
        of the call is appended to `outcome`, also if a signal handler raises after it."""
        table, number = device_table([tensor], None, self.ordinal), stream_number(stream, self.ordinal)
        self._recorded([] if outcome is None else outcome, "spw_gpu_ds_adam_update", optimizer_id, ctypes.byref(call), table, number)

    def measure_link(self, *, accumulates: bool = False, remeasure: bool = False) -> Link:
        """Returns the throughput of the link, measured once per machine and saved.

        Args:
            accumulates: The host accumulates gradients.
            remeasure: Measure again instead of reading the saved result."""
        found = _abi.sized(_abi.GpuLink)
        self._call("spw_gpu_measure_link", int(accumulates), int(remeasure), ctypes.byref(found))
        return Link(
            ("native", "f32")[found.transfer_dtype],
            found.d2h_f32,
            found.d2h_native,
            found.h2d_f32,
            found.h2d_native,
            found.step_f32,
            found.step_native,
        )


class _Ticket:
    """The library's number of a copy, known once the copy has begun."""

    def __init__(self) -> None:
        self.number: ctypes.c_uint64 = ctypes.c_uint64()


class Copy:
    """A copy in flight, made by Gpu.copy_out() and copy_in(). Its Gpu keeps the memory alive until the copy ends.

    Example:
        copy = gpu.copy_out(grad, host)
        copy.wait(timeout=10)"""

    def __init__(self, gpu: Gpu, ticket: _Ticket):
        self._gpu, self._ticket = gpu, ticket

    def __repr__(self) -> str:
        return described("Copy", lambda: {"number": self._ticket.number.value, "gpu": self._gpu})

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until the copy ends.

        Args:
            timeout: Longest wait in seconds; None: no limit.

        Raises:
            TimedOutError: The copy is still in flight.
            GpuError: The copy failed."""
        _native.check(in_slices(_arguments.seconds(timeout), lambda milliseconds: self._gpu._poll(self._ticket, milliseconds)))

    def done(self) -> bool:
        """Returns True if the copy has ended; raises GpuError if it failed."""
        status = self._gpu._poll(self._ticket, 0)
        if status != TIMEOUT:
            _native.check(status)
        return status == 0

    def stream_wait(self, stream: CudaStream | None) -> None:
        """Makes later work on `stream` wait for this copy, on the device."""
        self._gpu._call("spw_gpu_copy_stream_wait", self._ticket.number.value, stream_number(stream, self._gpu.ordinal))


def device_table(tensors: Iterable[Sequence[Any]], shadow: Iterable[Sequence[Any]] | None = None, ordinal: int | None = None) -> Any:
    """Returns the C table of tensors in device memory."""
    entries = [tuple(entry) for entry in tensors]
    table = (_abi.Tensor * len(entries))()
    for index, (slot, entry) in enumerate(zip(table, entries)):
        if len(entry) not in (4, 5):
            raise InvalidArgumentError(
                f"tensors[{index}] has {len(entry)} arrays; pass param, grad, exp_avg, exp_avg_sq and optionally param_copy"
            )
        for name, array in zip(_SPANS, entry):
            if array is not None:
                span = device_span(array, f"tensors[{index}].{name}", ordinal)
                if name == "param":
                    _tensor_rows.begin(slot, span[1])
                _tensor_rows.put(slot, name, span, f"tensors[{index}].{name}")
    shadows = [] if shadow is None else [tuple(values) for values in shadow]
    if shadow is not None and len(shadows) != len(entries):
        raise InvalidArgumentError(f"shadow has {len(shadows)} entries for {len(entries)} tensors; pass one for each tensor")
    for index, values in enumerate(shadows):
        if len(values) != 3:
            raise InvalidArgumentError(f"shadow[{index}] has {len(values)} arrays; pass param, exp_avg and exp_avg_sq")
        for name, array in zip(("param", "exp_avg", "exp_avg_sq"), values):
            argument = f"shadow[{index}].{name}"
            _tensor_rows.put(table[index], f"shadow_{name}", device_span(array, argument, ordinal), argument)
    return table


def options_of(adam: Any, grad_scale: float) -> Any:
    """Returns the C options of the next step of a spillway.Adam."""
    if not isinstance(adam, Adam):
        raise InvalidArgumentError(f"adam is a {type(adam).__name__}; pass a spillway.Adam")
    return adam.options_of_next_step(grad_scale)


def _number(owner: Any, attribute: str, argument: str) -> int:
    return _arguments.unsigned(f"{argument}.{attribute}", getattr(owner, attribute, None))
