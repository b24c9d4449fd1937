"""Steps tensors through ctypes, in this process and in forked children, and prints the kernel and one digest.

SPILLWAY_LIBRARY names the library. A kernel is wrong if the digest differs between kernels or processors.

A child of a process with threads starts no thread here, because qemu-user aborts in that case."""

import ctypes
import hashlib
import os
import sys

LARGE = 300_001  # more than one chunk: the thread pool takes part
SMALL = 50_001
F32, BF16 = 1, 3


class AdamOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("weight_decay_mode", ctypes.c_uint32),
        ("step", ctypes.c_uint64),
        ("lr", ctypes.c_double),
        ("beta1", ctypes.c_double),
        ("beta2", ctypes.c_double),
        ("eps", ctypes.c_double),
        ("weight_decay", ctypes.c_double),
        ("grad_scale", ctypes.c_double),
        ("no_bias_correction", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("param_dtype", ctypes.c_uint32),
        ("state_dtype", ctypes.c_uint32),
        ("grad_dtype", ctypes.c_uint32),
        ("copy_dtype", ctypes.c_uint32),
        ("take_copy", ctypes.c_uint32),
        ("n", ctypes.c_uint64),
        ("param", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("exp_avg", ctypes.c_void_p),
        ("exp_avg_sq", ctypes.c_void_p),
        ("param_copy", ctypes.c_void_p),
        ("options", ctypes.c_void_p),
    ]


class Info(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint32), ("num_threads", ctypes.c_uint32), ("kernel", ctypes.c_char_p)]
    _fields_ += [("counters", ctypes.c_uint64 * 6)]


class StepStats(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint32), ("nonfinite", ctypes.c_uint32), ("sum_squares", ctypes.c_double)]


def main():
    library = ctypes.CDLL(os.environ["SPILLWAY_LIBRARY"])
    library.spw_last_error.restype = ctypes.c_char_p
    info = Info(ctypes.sizeof(Info))
    check(library, library.spw_get_info(ctypes.byref(info)))
    first_child = forked(library, LARGE)
    large, small = digest(library, LARGE), digest(library, SMALL)
    assert first_child == large, "a forked child computed another digest than its parent"
    assert forked(library, SMALL) == small, "a forked child of a process with a thread pool computed another digest"
    print(info.kernel.decode(), large, small)


def forked(library, n):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, digest(library, n).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, "a forked child was killed by a signal or failed"
    return said


def digest(library, n):
    options = AdamOptions(struct_size=ctypes.sizeof(AdamOptions), lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8)
    options.weight_decay = 0.01
    options.grad_scale = 0.125
    param = (ctypes.c_float * n)(*((i * 37 % 1009 - 504) / 512 for i in range(n)))
    grad = (ctypes.c_uint16 * n)(*(0x3C00 + i * 7 % 512 | (i % 3 == 0) << 15 for i in range(n)))
    exp_avg, exp_avg_sq, copy = (ctypes.c_float * n)(), (ctypes.c_float * n)(), (ctypes.c_uint16 * n)()
    tensor = Tensor(
        ctypes.sizeof(Tensor),
        F32,
        F32,
        BF16,
        BF16,
        0,
        n,
        *(ctypes.addressof(span) for span in (param, grad, exp_avg, exp_avg_sq, copy)),
        None,
    )
    stats = StepStats(ctypes.sizeof(StepStats))
    seen = hashlib.sha256()
    for options.step in range(1, 4):
        check(library, library.spw_adam_step(ctypes.byref(options), ctypes.byref(tensor), ctypes.c_uint64(1), ctypes.byref(stats)))
        seen.update(stats)
    for span in (param, exp_avg, exp_avg_sq, copy):
        seen.update(span)
    return seen.hexdigest()


def check(library, status):
    if status != 0:
        sys.exit(library.spw_last_error().decode())


main()
