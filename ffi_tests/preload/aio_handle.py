"""Tests DeepSpeed's own compiled async_io op: round trips through aio_handle, then a fault that the
op does not report.

    aio_handle.py DIRECTORY round|fault
"""

import os
import resource
import signal
import sys

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder

MIB = 1 << 20


def pinned(handle, data):
    buffer = handle.new_cpu_locked_tensor(data.numel(), data)
    buffer.copy_(data)
    return buffer


def round_trips(handle, directory):
    for number, size in enumerate((4096, MIB, 8 * MIB, 8 * MIB + 4096)):
        path = os.path.join(directory, f"round{number}")
        data = torch.randint(0, 256, (size,), dtype=torch.uint8)
        source, target = pinned(handle, data), pinned(handle, torch.zeros_like(data))
        assert handle.sync_pwrite(source, path, 0) == 1
        with open(path, "rb") as file:
            assert file.read() == data.numpy().tobytes(), f"{path} differs from the bytes that were written"
        assert handle.async_pread(target, path, 0) == 0
        assert handle.wait() == 1
        assert torch.equal(target, data), f"the bytes read from {path} differ from its content"
        os.unlink(path)
        handle.free_cpu_locked_tensor(source)
        handle.free_cpu_locked_tensor(target)


def fault(handle, directory):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, resource.RLIM_INFINITY))
    source = pinned(handle, torch.ones(8 * MIB, dtype=torch.uint8))
    path = os.path.join(directory, "limited")
    said = handle.sync_pwrite(source, path, 0)
    print(f"returned {said}, stored {os.path.getsize(path)} of {8 * MIB}")
    os.unlink(path)


def main():
    directory, case = sys.argv[1:]
    module = AsyncIOBuilder().load(verbose=False)
    for overlap in (False, True):
        for threads in (1, 2):
            handle = module.aio_handle(MIB, 8, False, overlap, threads)
            (round_trips if case == "round" else fault)(handle, directory)
            if case == "fault":
                break
    maps = open("/proc/self/maps").read()
    print("served by", "spillway" if "libspillway_preload" in maps else "libaio")


main()
