"""torch for the programs of this folder on a machine without a GPU: tensors "on the GPU" are in the memory of the test driver of
ffi_tests/fakecuda, and streams are its streams. torch's own operations on them run at once, on the host; what Spillway queues runs on
the driver's streams.

The speed of such a run means nothing. It shows that a program runs to its end, and writes its record."""

import contextlib
import ctypes
import os
import pathlib
import sys

import torch

import spillway

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "packaging" / "python" / "tests"))
from fake_cuda import FakeDriver

_driver = FakeDriver(os.environ["SPILLWAY_CUDA_LIBRARY"], 0)


class OnDevice(torch.Tensor):
    """A tensor in the memory of the test driver."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def cpu(self):
        _synchronize()
        return self.detach().as_subclass(torch.Tensor).clone()


class _Stream:
    """A stream of the test driver, as torch's streams are."""

    def __init__(self):
        self.cuda_stream = _driver.stream().cuda_stream

    def synchronize(self):
        _driver.synchronize(spillway.Stream(self.cuda_stream))


class _Event:
    """An event of the test driver."""

    def __init__(self, **_):
        self.cuda_event = 0

    def record(self, stream):
        self.cuda_event = _driver.record(spillway.Stream(stream.cuda_stream)).cuda_event


_current = [_Stream()]


def _synchronize():
    for stream in _current:
        stream.synchronize()


@contextlib.contextmanager
def _within(stream):
    _current.append(stream)
    try:
        yield
    finally:
        _current.remove(stream)
        stream.synchronize()


class _Cuda:
    """torch.cuda, as far as the programs use it."""

    Stream, Event, stream = _Stream, _Event, staticmethod(_within)
    synchronize = staticmethod(_synchronize)
    current_stream = staticmethod(lambda *_: _current[-1])
    empty_cache = staticmethod(lambda: None)
    #: The driver's streams have no kernel that only takes time.
    _sleep = staticmethod(lambda _: None)


class Torch:
    """torch, whose factories take device="cuda"."""

    cuda = _Cuda

    def __getattr__(self, name):
        return getattr(torch, name)


def _made(name):
    def make(self, *shape, device=None, pin_memory=False, **options):
        plain = getattr(torch, name)(*shape, **options)
        if pin_memory:
            held = torch.from_numpy(spillway.pinned(plain.numel() * plain.element_size() // 4 + 1)).view(plain.dtype)[: plain.numel()]
            return held.copy_(plain.flatten()).view(plain.shape)
        if device != "cuda":
            return plain
        address, size = ctypes.c_uint64(), max(1, plain.nbytes)
        _driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        memory = (ctypes.c_char * size).from_address(address.value)
        made = torch.frombuffer(memory, dtype=plain.dtype, count=plain.numel()).view(plain.shape)
        return made.copy_(plain).as_subclass(OnDevice)

    return make


for _name in ("zeros", "ones", "empty", "full", "rand"):
    setattr(Torch, _name, _made(_name))
