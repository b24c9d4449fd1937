"""A process of test_tier.py that trains with its states on a tier until it is killed: TIER, and the number of steps between commits."""

import pathlib
import sys

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[2] / "packaging" / "python")]

import torch

from spillway import torch as own


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    kinds = [
        ((40, 8), torch.float32),
        ((7,), torch.float32),
        ((30_001,), torch.bfloat16),
        ((0,), torch.float32),
        ((), torch.float32),
        ((90, 100), torch.float16),
        ((9000,), torch.float32),
    ]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(kind)) for shape, kind in kinds]


def random_grads(params, step):
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def options(directory):
    return own.TierOptions(directory, part_elements=7000, pin_memory=False, durability="process")


def main(directory, interval):
    params = parameters()
    optimizer = own.AdamW(params, lr=1e-2, tier=options(directory))
    for step in range(optimizer.resumed_step or 0, 10_000):
        random_grads(params, step)
        optimizer.step()
        if step % int(interval) == 0:
            optimizer.commit(payload=str(step + 1).encode())
        print(step + 1, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
