"""The weight window: units of parameters, whose home is host memory or a tier, are on the device only while they are used
(weight-flow: SuperOffload section 4.2). Units are fetched before their use, in the order of an earlier iteration.

    window = spillway.window.Window(layers, slots=2, gpu=gpu)       # layers: page-locked arrays
    window.begin()
    for number in range(len(layers)):
        address = window.use(number, stream)
        launch_forward(number, address, stream)
        window.release(number, stream)
    for number in range(len(layers)):
        window.changed(number)
        layers[number] -= update(number)

Experimental: may change with any release. Models of torch need no window of their own: `spillway.torch.offload` has
weights="flow"."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any, NamedTuple

from . import _abi, _arguments, _arrays
from ._integers import between
from ._native_handle import _NativeHandle
from .gpu import CudaStream, Gpu, stream_number
from .tier import Tier


class Stored(NamedTuple):
    """A unit whose home is a tier.

    Attributes:
        extent: Number of the extent, from Tier.define(). Once the extent is removed, a use fails.
        stream: Index of the unit's stream in the extent.
        bytes: Length of the stream."""

    extent: int
    stream: int
    bytes: int


class WindowStats(NamedTuple):
    """Counters of a window.

    Attributes:
        device_bytes: Bytes of device memory that the window has.
        peak_bytes: Most bytes of units in slots at one time.
        fetched_bytes: Bytes that were copied to the device.
        fetches: Copies of units to the device.
        uses: Uses that found a slot, those whose copy failed among them.
        late: Uses that had to wait for a copy which no earlier call had begun."""

    device_bytes: int
    peak_bytes: int
    fetched_bytes: int
    fetches: int
    uses: int
    late: int


class Window(_NativeHandle):
    """Device memory for a few units, which are used one after the other. Thread-safe.

    Args:
        units: For each unit its array in host memory, page-locked with a GPU (see pinned()), or a Stored.
        slots: Number of slots, each as large as the largest unit that is not kept; 0: 2.
        gpu: The Gpu; None: host memory takes the place of the device, and streams are ignored.
        tier: The Tier of units that are Stored.
        keep: Numbers of units that stay on the device, beside the slots.

    Raises:
        InvalidArgumentError: A unit does not fit.
        GpuError: The device has not enough memory.

    Example:
        window = spillway.window.Window([weights], slots=1)
        address = window.use(0)
        window.release(0)"""

    closer = "spw_window_close"

    def __init__(self, units: Iterable[Any], *, slots: int = 0, gpu: Gpu | None = None, tier: Tier | None = None, keep: Iterable[int] = ()):
        units = list(units)
        kept = {between("Window: keep", number, 0, len(units) - 1) for number in keep}
        table = (_abi.WindowUnit * len(units))()
        for number, (row, unit) in enumerate(zip(table, units)):
            row.struct_size, row.keep = ctypes.sizeof(row), int(number in kept)
            if isinstance(unit, Stored):
                row.home = _abi.WINDOW_HOME_TIER
                for name, bits in (("extent", 32), ("stream", 32), ("bytes", 64)):
                    setattr(row, name, _arguments.unsigned(f"Window: units[{number}].{name}", getattr(unit, name), bits))
            else:
                row.host, row.bytes = _arrays.memory(unit, f"Window: units[{number}]", False)
        options = _abi.sized(_abi.WindowOptions)
        options.slots = _arguments.unsigned("Window: slots", slots, 32)
        self._gpu = gpu
        self._shape = {"units": len(units), "bytes": sum(row.bytes for row in table), "slots": options.slots or 2, "kept": len(kept)}
        held = _arrays.all_held([[unit for unit in units if not isinstance(unit, Stored)]])

        def with_gpu(handle: Any) -> None:
            options.gpu = handle
            with_tier(None) if tier is None else Tier._given("Window: tier", tier)._through(with_tier)

        def with_tier(handle: Any) -> None:
            options.tier = handle
            self._hold("spw_window_open", ctypes.byref(options), table, len(table), keeps=(held,))

        with_gpu(None) if gpu is None else Gpu._given("Window: gpu", gpu)._through(with_gpu)

    def _facts(self) -> dict[str, Any]:
        return {**self._shape, "gpu": self._gpu}

    def begin(self) -> None:
        """Begins an iteration: its order of uses is recorded, and the one recorded before says what is fetched ahead."""
        self._call("spw_window_begin")

    def use(self, unit: int, stream: CudaStream | None = None, *, timeout: float | None = None) -> int:
        """Has a unit on the device for later work on a stream, and returns its address, which is valid until release(). A call that
        raises, also by a signal handler, leaves no use.

        Args:
            unit: Number of the unit.
            stream: Stream of the work; None: torch's current stream.
            timeout: Longest wait for a read of a tier, in seconds; None: until its end.

        Raises:
            TimedOutError: The read continues; use the unit again.
            BusyError: All slots have uses that are not released, or the unit has changed and is still used.
            SpillwayError: The copy of this unit has failed. A later use tries again."""
        address, number, outcome = ctypes.c_uint64(), self._stream(stream), list[int]()
        try:
            self._wait_by(timeout, "spw_window_use", unit, number, after=(ctypes.byref(address),), outcome=outcome)
            return address.value
        except BaseException:
            if outcome == [0]:
                self._call("spw_window_release", unit, number)
            raise

    def release(self, unit: int, stream: CudaStream | None = None) -> None:
        """Ends a use: only work already queued on the stream reads the unit. If a signal handler raises, the use has ended."""
        number, outcome = self._stream(stream), list[int]()
        try:
            self._recorded(outcome, "spw_window_release", unit, number)
        except BaseException:
            if not outcome:
                self._call("spw_window_release", unit, number)
            raise

    def changed(self, unit: int) -> None:
        """Before the array or the extent of a unit is written: waits until no copy reads it. The next use fetches it again."""
        self._call("spw_window_changed", unit)

    def stats(self) -> WindowStats:
        """Returns the counters."""
        found = _abi.sized(_abi.WindowStats)
        self._call("spw_window_get_stats", ctypes.byref(found))
        return WindowStats(*(getattr(found, name) for name in WindowStats._fields))

    def _stream(self, stream: CudaStream | None) -> int:
        return 0 if self._gpu is None else stream_number(stream, self._gpu.ordinal)
