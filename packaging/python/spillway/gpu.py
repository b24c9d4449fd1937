"""GPU transfers and Adam on the device, through the CUDA driver that the framework uses.

    gpu = spillway.Gpu(0)
    host = spillway.pinned(grad.numel(), "float32")
    copy = gpu.copy_out(grad, host, after=torch.cuda.current_stream())     # widened on the GPU
    copy.wait()

- Device memory is a contiguous torch tensor on that GPU, or a DeviceArray.
- A stream or an event is a torch object, or Stream(number) or Event(number) with its CUDA handle. None is torch's
  current stream on that GPU, if torch uses CUDA.
- Pinned memory that a GPU used is unmapped in a forked child, which must not access it.
- The driver is loaded at the first call, which raises NoDevice if there is no driver or no GPU. SPILLWAY_CUDA_LIBRARY
  names another driver library."""

import ctypes
import itertools
import sys
import time
import weakref
from typing import NamedTuple

from . import _abi, _arrays, _native
from ._held import Held, record
from .errors import InvalidArgument
from .optim import Adam, StepStats

WIRES = {"native": 0, "f32": 1, "delivered": 2}
_OUT, _IN = 0, 1
# Each new copy polls up to _MOST_LOOKS older ones for their end; a wait returns to Python every _SLICE_MS.
_MOST_LOOKS, _SLICE_MS, _TIMEOUT = 4, 500, 23
_NOTHING, _EVENT, _STREAM = 0, 1, 2
_NAMES = {_abi.DTYPE_F32: "f32", _abi.DTYPE_F16: "f16", _abi.DTYPE_BF16: "bf16"}
_TENSOR_FIELDS = (("param", "param_dtype"), ("grad", "grad_dtype"), ("exp_avg", "state_dtype"),
                  ("exp_avg_sq", "state_dtype"), ("param_copy", "copy_dtype"))


class DeviceArray(NamedTuple):
    """Device memory: its address, its number of elements, and their dtype ("float32", "float16", "bfloat16")."""

    address: int
    elements: int
    dtype: str


class Stream(NamedTuple):
    """A stream by its CUDA handle; 0 is the legacy default stream."""

    cuda_stream: int


class Event(NamedTuple):
    """An event by its CUDA handle."""

    cuda_event: int


class Info(NamedTuple):
    """Properties of a GPU. `capability` is 90 for 9.0. With 2 copy_engines copies run in both directions at once."""

    name: str
    pci: str
    capability: int
    multiprocessors: int
    copy_engines: int
    memory_bytes: int
    free_bytes: int


class Link(NamedTuple):
    """Throughput of the link and of the CPU step in parameters per second. `f32` and `native` are the format on the
    wire: float32, or the model's 16 bits. `wire` is the faster format for gradients."""

    wire: str
    out_f32: float
    out_native: float
    in_f32: float
    in_native: float
    step_f32: float
    step_native: float


def gpu_count():
    """Number of GPUs that this process sees; raises NoDevice if there is no driver or no GPU."""
    found = _abi.sized(_abi.GpuDriver)
    _native.check(_native.library().spw_gpu_probe(ctypes.byref(found)))
    return found.devices


def pinned(elements, dtype="float32"):
    """Allocates a numpy array in page-locked memory, as transfers need it; bfloat16 is stored as uint16. The memory is
    freed with the array's last view."""
    import numpy
    code = _arrays.dtype_code(dtype)
    kind = {_abi.DTYPE_F32: numpy.float32, _abi.DTYPE_F16: numpy.float16, _abi.DTYPE_BF16: numpy.uint16}[code]
    size = numpy.dtype(kind).itemsize * elements
    start = ctypes.c_void_p()
    _native.check(_native.library().spw_pinned_alloc(max(1, size), ctypes.byref(start)))
    memory = (ctypes.c_char * size).from_address(start.value)
    weakref.finalize(memory, _native.library().spw_pinned_free, start.value).atexit = False
    return numpy.frombuffer(memory, kind)


def current_stream(ordinal=None):
    """torch's current stream on a GPU; None if torch does not use CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return torch.cuda.current_stream(ordinal)


def stream_number(stream, ordinal=None):
    """The CUDA handle of a stream; None is torch's current stream, or the legacy default stream if torch does not use
    CUDA."""
    stream = current_stream(ordinal) if stream is None else stream
    return 0 if stream is None else _number(stream, "cuda_stream", "stream")


def device_span(array, argument, ordinal=None):
    """(address, elements, dtype code) of an array in the memory of GPU `ordinal`."""
    if isinstance(array, DeviceArray):
        return array.address, array.elements, _arrays.dtype_code(array.dtype)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(array, torch.Tensor):
        raise InvalidArgument(f"{argument} is a {type(array).__name__}; a torch tensor or a DeviceArray is needed")
    code = _abi.DTYPES.get(str(array.dtype).removeprefix("torch."))
    if not array.is_cuda or not array.is_contiguous() or code is None:
        raise InvalidArgument(f"{argument} is {array.dtype} on device {array.device}, strides {array.stride()}; contiguous "
                              "float32, float16 or bfloat16 on a GPU is needed")
    if ordinal is not None and array.device.index != ordinal:
        raise InvalidArgument(f"{argument} is on device {array.device}, the GPU is {ordinal}")
    return array.data_ptr(), array.numel(), code


class Gpu(Held):
    """An open GPU, used through its primary context, which torch also uses. Thread-safe: threads may use one Gpu
    concurrently. close() waits for copies in flight."""

    what, closer = "GPU", "spw_gpu_close"

    def __init__(self, ordinal=0, *, chunk_bytes=0):
        options = _abi.sized(_abi.GpuOptions)
        options.ordinal, options.chunk_bytes = ordinal, chunk_bytes
        self.ordinal, self._under_way = ordinal, {}
        self._hold("spw_gpu_open", ctypes.byref(options))

    def info(self):
        """Properties of the GPU, and the bytes of memory that are free now."""
        found = _abi.sized(_abi.GpuInfo)
        self._call("spw_gpu_info_get", ctypes.byref(found))
        return Info(found.name.decode(), found.pci.decode(), *(getattr(found, name) for name in Info._fields[2:]))

    def copy_out(self, device, host, *, after=None):
        """Starts a copy to page-locked memory, of the same dtype or widened to float32 on the GPU. The copy runs after
        the stream or event `after`; None is torch's current stream. Returns a Copy."""
        return self._copy(_OUT, device, host, after)

    def copy_in(self, host, device, *, after=None):
        """Like copy_out, to the device; float32 is rounded to nearest even on the GPU."""
        return self._copy(_IN, device, host, after)

    def copy_record(self, direction, device, host, after):
        """The C structure that describes a copy."""
        copy = _abi.sized(_abi.GpuCopy)
        copy.direction = direction
        copy.device, copy.n, copy.device_dtype = device_span(device, "device", self.ordinal)
        copy.host, elements, copy.host_dtype = _arrays.span(host, "host", direction == _OUT, _NAMES[copy.device_dtype])
        if elements != copy.n:
            raise InvalidArgument(f"host has {elements} elements, device {copy.n}")
        if hasattr(after, "cuda_stream"):
            copy.after, copy.handle = _STREAM, stream_number(after)
        elif after is not None:
            copy.after, copy.handle = _EVENT, _number(after, "cuda_event", "after")
        return copy

    def _copy(self, direction, device, host, after):
        after = current_stream(self.ordinal) if after is None else after
        row = self.copy_record(direction, device, host, after)
        for copy in list(itertools.islice(self._under_way, _MOST_LOOKS)):
            copy._look(0)
        copy = Copy(self, (_arrays.held(host), device, after))

        def begin(handle):
            # Enter the copy before the call, so that an interrupt cannot free memory that the GPU uses.
            self._under_way[copy] = None
            record(copy._begun, _native.library().spw_gpu_copy_start, handle, ctypes.byref(row), ctypes.byref(copy._ticket))
            _native.check(copy._begun[0])

        try:
            self._through(begin)
        finally:
            if not copy._ticket.value:
                self._under_way.pop(copy, None)
        return copy

    def close(self):
        """Closes the GPU after all copies have ended."""
        if self._end():
            self._under_way.clear()

    def step(self, adam, tensors, *, shadow=None, stream=None, grad_scale=1.0, stats=False):
        """Runs one step of a spillway.Adam on the device, in the order of `stream`. `tensors` has tuples of param,
        grad, exp_avg, exp_avg_sq and optionally a 16-bit copy to write. With `shadow`, tuples of param, exp_avg and
        exp_avg_sq, the new states are written there and the old ones are kept. With stats=True the call waits and
        returns StepStats."""
        options = options_of(adam, grad_scale)
        table = device_table(tensors, shadow, self.ordinal)
        out = _abi.sized(_abi.StepStats) if stats else None
        self._call("spw_gpu_adam_step", ctypes.byref(options), table, len(table),
                   stream_number(stream, self.ordinal), ctypes.byref(out) if stats else None)
        adam.step_count += 1
        return StepStats(bool(out.nonfinite), out.sum_squares) if stats else None

    def link(self, *, accumulates=False, again=False):
        """Speeds of the link, measured once per machine and saved; again=True repeats the measurement. Set
        `accumulates` if the host accumulates gradients."""
        found = _abi.sized(_abi.GpuLink)
        self._call("spw_gpu_link_get", int(accumulates), int(again), ctypes.byref(found))
        return Link(("native", "f32")[found.wire], *(getattr(found, name) for name in Link._fields[1:]))


class Copy:
    """A copy in flight. Its Gpu keeps the memory alive until the copy ends."""

    def __init__(self, gpu, held):
        self._gpu, self._held, self._begun, self._ticket = gpu, held, [], ctypes.c_uint64()

    def wait(self, timeout=None):
        """Blocks until the copy ends, at most `timeout` seconds; then raises TimedOut."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if end is None else max(0, round((end - time.monotonic()) * 1000))
            # In slices, so that Python runs signal handlers.
            patience = _SLICE_MS if left is None else min(_SLICE_MS, left)
            status = self._look(patience)
            if status != _TIMEOUT or patience == left:
                return _native.check(status)

    def done(self):
        """True if the copy has ended."""
        status = self._look(0)
        if status != _TIMEOUT:
            _native.check(status)
        return status == 0

    def _look(self, milliseconds):
        status = self._gpu._through(lambda handle: _native.library().spw_gpu_copy_wait(handle, self._ticket.value, milliseconds))
        if status == 0:
            self._gpu._under_way.pop(self, None)
            self._held = None
        return status

    def order(self, stream):
        """Makes later work on `stream` wait for this copy, on the device."""
        self._gpu._call("spw_gpu_stream_wait", self._ticket.value, stream_number(stream, self._gpu.ordinal))


def device_table(tensors, shadow=None, ordinal=None):
    """The C table of tensors in device memory."""
    entries = [tuple(entry) for entry in tensors]
    table = (_abi.Tensor * len(entries))()
    for index, (slot, entry) in enumerate(zip(table, entries)):
        slot.struct_size = ctypes.sizeof(_abi.Tensor)
        if len(entry) not in (4, 5):
            raise InvalidArgument(f"tensors[{index}] has {len(entry)} arrays; param, grad, exp_avg, exp_avg_sq and perhaps "
                                  "param_copy expected")
        for (name, dtype), array in zip(_TENSOR_FIELDS, entry):
            if array is not None:
                _set(slot, name, dtype, array, f"tensors[{index}].{name}", ordinal)
    for index, entry in enumerate(shadow or ()):
        for name, array in zip(("param", "exp_avg", "exp_avg_sq"), entry, strict=True):
            _set(table[index], f"shadow_{name}", f"{'param' if name == 'param' else 'state'}_dtype", array,
                 f"shadow[{index}].{name}", ordinal)
    return table


def options_of(adam, grad_scale):
    """The options of the next step of a spillway.Adam."""
    if not isinstance(adam, Adam):
        raise InvalidArgument(f"adam is a {type(adam).__name__}; a spillway.Adam is needed")
    return adam.options_of_next_step(grad_scale)


def _set(slot, name, dtype, array, argument, ordinal):
    address, elements, code = device_span(array, argument, ordinal)
    setattr(slot, name, address)
    if name == "param":
        slot.n = elements
    elif elements != slot.n:
        raise InvalidArgument(f"{argument} has {elements} elements, param has {slot.n}")
    if getattr(slot, dtype) not in (_abi.DTYPE_NONE, code):
        raise InvalidArgument(f"{argument} has another dtype than its kind")
    setattr(slot, dtype, code)


def _number(owner, attribute, argument):
    number = getattr(owner, attribute, None)
    if not isinstance(number, int):
        raise InvalidArgument(f"{argument} is {owner!r}; something with {attribute} is needed")
    return number
