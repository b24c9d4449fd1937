"""Steps numpy arrays through the installed package, and prints the path of its library, the kernel and one digest.

A kernel is wrong if the digest differs between kernels or processors."""

import hashlib

import numpy

import spillway

N = 100_003


def main():
    index = numpy.arange(N)
    param = ((index * 37 % 1009 - 504) / 512).astype(numpy.float32)
    grad = (0x3C00 + index * 7 % 512 | (index % 3 == 0).astype(numpy.int64) << 15).astype(numpy.uint16)
    copy = numpy.zeros(N, numpy.uint16)
    seen = hashlib.sha256()
    for optimizer, states in (
        (spillway.Adam(lr=1e-2, weight_decay=0.01), 2),
        (spillway.Adagrad(lr=1e-2), 1),
        (spillway.Lion(lr=1e-2, weight_decay=0.01), 1),
    ):
        arrays = (param.copy(), grad, *(numpy.zeros(N, numpy.float32) for _ in range(states)), copy)
        prepared = optimizer.prepare([arrays], uint16_dtype="bf16")
        for _ in range(3):
            stats = prepared.step(grad_scale=0.125, return_stats=True)
            seen.update(repr(stats).encode())
        for array in arrays:
            seen.update(array.tobytes())
    print(spillway.library_path(), spillway.kernel_name(), seen.hexdigest())


main()
