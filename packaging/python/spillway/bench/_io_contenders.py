"""The same tensors read and written by Spillway's engine and by DeepSpeed's op.

A contender has its own buffers, one per tensor; read and write start all of them and wait once."""

import ctypes

from .. import _abi
from .._native import check, library

_FOR_EVER = -1


class Engine:
    """Spillway's engine through the C ABI."""

    setting = "defaults"

    def __init__(self, places, size):
        self._places, self._size = places, size
        self._io = ctypes.c_void_p()
        check(library().spw_io_open(None, ctypes.byref(self._io)))
        self._buffers = [_pinned(size) for _ in places]
        self._requests = []
        for (path, offset), buffer in zip(places, self._buffers):
            request = _abi.sized(_abi.IoRequest)
            request.path, request.offset, request.buffer, request.bytes = path.encode(), offset, buffer, size
            self._requests.append(request)

    def read(self):
        self._all(library().spw_io_read)

    def write(self):
        self._all(library().spw_io_write)

    def compare(self):
        for (path, offset), buffer in zip(self._places, self._buffers):
            _compare(path, offset, ctypes.string_at(buffer, self._size), "spillway")

    def close(self):
        check(library().spw_io_close(self._io, _FOR_EVER))
        for buffer in self._buffers:
            check(library().spw_pinned_free(buffer))

    def _all(self, start):
        handle = ctypes.c_uint64()
        for request in self._requests:
            check(start(self._io, ctypes.byref(request), ctypes.byref(handle)))
        check(library().spw_io_wait_all(self._io, _FOR_EVER, None))

    @staticmethod
    def describe():
        """The backend, and why it is not another."""
        io, words = ctypes.c_void_p(), ctypes.create_string_buffer(512)
        check(library().spw_io_open(None, ctypes.byref(io)))
        check(library().spw_io_describe(io, words, len(words)))
        check(library().spw_io_close(io, _FOR_EVER))
        return words.value.decode()


class Op:
    """A module with DeepSpeed's aio_handle."""

    def __init__(self, module, places, size, setting):
        import torch
        self.setting = setting
        self._places = places
        self._handle = module.aio_handle(*setting)
        shape = torch.empty(0, dtype=torch.uint8)
        self._tensors = [self._handle.new_cpu_locked_tensor(size, shape) for _ in places]
        for tensor in self._tensors:
            tensor.zero_()

    def read(self):
        self._all(self._handle.async_pread)

    def write(self):
        self._all(self._handle.async_pwrite)

    def compare(self):
        for (path, offset), tensor in zip(self._places, self._tensors):
            _compare(path, offset, tensor.numpy().tobytes(), "DeepSpeed")

    def close(self):
        for tensor in self._tensors:
            self._handle.free_cpu_locked_tensor(tensor)

    def _all(self, start):
        for (path, offset), tensor in zip(self._places, self._tensors):
            if start(tensor, path, offset) != 0:
                raise SystemExit(f"{path}: not started")
        if self._handle.wait() != len(self._tensors):
            raise SystemExit("not all tensors are done")


def _pinned(size):
    start = ctypes.c_void_p()
    check(library().spw_pinned_alloc(size, ctypes.byref(start)))
    return start


def _compare(path, offset, found, name):
    with open(path, "rb") as file:
        file.seek(offset)
        if file.read(len(found)) != found:
            raise SystemExit(f"{name} has other bytes than {path} at {offset}: nothing to compare")
