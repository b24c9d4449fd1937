"""CUDA driver calls of a framework, made to the fake driver of ffi_tests/fakecuda: its device memory is host memory."""

import contextlib
import ctypes

import numpy as np

from spillway import DeviceArray, Event, Stream


class FakeDriver:
    """The fake driver's GPU `ordinal`, with its context current on this thread."""

    def __init__(self, path, ordinal):
        self._library, self.ordinal = ctypes.CDLL(path), ordinal
        self._context = ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), ordinal)
        self("cuCtxPushCurrent_v2", self._context)

    def __call__(self, function, *arguments):
        assert getattr(self._library, function)(*arguments) == 0, function

    @contextlib.contextmanager
    def current(self):
        """A block with the GPU's context, on any thread and beside other GPUs."""
        self("cuCtxPushCurrent_v2", self._context)
        try:
            yield self._library
        finally:
            self("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def stream(self):
        made = ctypes.c_void_p()
        self("cuStreamCreateWithPriority", ctypes.byref(made), 1, 0)
        return Stream(made.value)

    def synchronize(self, stream):
        self("cuStreamSynchronize", ctypes.c_void_p(stream.cuda_stream))

    def record(self, stream):
        made = ctypes.c_void_p()
        self("cuEventCreate", ctypes.byref(made), 2)
        self("cuEventRecord", made, ctypes.c_void_p(stream.cuda_stream))
        return Event(made.value)

    def device(self, array, dtype=None):
        """Device memory that holds an array."""
        address = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(1, array.nbytes)))
        ctypes.memmove(address.value, array.ctypes.data, array.nbytes)
        return DeviceArray(address.value, array.size, dtype or {np.uint16: "bfloat16"}.get(array.dtype.type, array.dtype.name))

    def upload(self, array, device, stream):
        """Copies an array to the device on a stream, from page-locked memory."""
        self(
            "cuMemcpyHtoDAsync_v2",
            ctypes.c_uint64(device.address),
            ctypes.c_void_p(array.ctypes.data),
            ctypes.c_size_t(array.nbytes),
            ctypes.c_void_p(stream.cuda_stream),
        )

    def seen(self, device, like):
        """The contents of device memory, after the work on it has finished."""
        text = ctypes.string_at(device.address, like.nbytes)
        return np.frombuffer(text, like.dtype)

    def free(self, *devices):
        for device in devices:
            self("cuMemFree_v2", ctypes.c_uint64(device.address))

    def faults(self):
        """The accesses that no event orders, and the copies through memory that is not page-locked."""
        counts = []
        for name in ("fakecuda_races", "fakecuda_pageable_copies"):
            function = getattr(self._library, name)
            function.restype, function.argtypes = ctypes.c_uint64, [ctypes.c_uint32]
            counts.append(function(self.ordinal))
        return counts
