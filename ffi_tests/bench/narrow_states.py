"""The time of a step by the width of the states: bfloat16 parameters with bfloat16 gradients, in host memory.

    python ffi_tests/bench/narrow_states.py [--elements N] [--rounds N]

All optimizers are in one process, and step in alternation. The program prints a JSON object: for each optimizer the median milliseconds of
a step, and the ratio of the time of float32 states to it. `offload` copies gradients and weights too, here from host memory to host
memory."""

import argparse
import json
import statistics
import time

import torch

from spillway import torch as own

BF16 = torch.bfloat16
NARROW = {"moment_dtype": BF16}
SPLIT = {**NARROW, "master": "split"}
CODES = {"moment_dtype": "int8", "moment_rounding": "nearest", "master": "split"}
RANDOM = {"moment_rounding": "stochastic"}


def kinds(params):
    """The optimizers, by name. The first of each pair of words is the base of the ratio."""

    def adamw(**given):
        return own.AdamW(params(), lr=1e-4, **given)

    def offload(**given):
        return own.offload(params(), torch.optim.AdamW, lr=1e-4, max_norm=1e9, overlap=False, **given)

    return {
        "AdamW, float32": adamw(master="f32"),
        "AdamW, bfloat16 moments": adamw(master="f32", **NARROW),
        "AdamW, bfloat16 moments, split": adamw(**SPLIT),
        "AdamW, random moments, split": adamw(**SPLIT, **RANDOM),
        "AdamW, 8-bit moments, split": adamw(**CODES),
        "AdamW, random 8-bit moments, split": adamw(**CODES | RANDOM),
        "offload, float32": offload(),
        "offload, bfloat16 moments": offload(**NARROW),
        "offload, bfloat16 moments, split": offload(**SPLIT),
        "offload, 8-bit moments, split": offload(**CODES),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=100 << 20)
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    each = 4 << 20
    sizes = [min(each, args.elements - at) for at in range(0, args.elements, each)]

    def params():
        made = [torch.nn.Parameter(torch.full((size,), 0.02, dtype=BF16)) for size in sizes]
        for param, grad in zip(made, grads):
            param.grad = grad
        return made

    torch.manual_seed(0)
    # All share the gradients, which no step changes.
    grads = [torch.randn(size).mul_(1e-3).to(BF16) for size in sizes]
    optimizers = kinds(params)
    times = {name: [] for name in optimizers}
    for number in range(args.rounds + 2):
        for name, optimizer in optimizers.items():
            begun = time.perf_counter()
            optimizer.step()
            if number >= 2:
                times[name].append(1000 * (time.perf_counter() - begun))
    found = {name: statistics.median(own) for name, own in times.items()}
    base = {name: found[f"{name.split(',')[0]}, float32"] for name in found}
    print(json.dumps({name: {"ms": round(ms, 1), "ratio": round(base[name] / ms, 2)} for name, ms in found.items()}, indent=2))


if __name__ == "__main__":
    main()
