"""A process of test_tier.py that trains with its states on a tier until it is killed.

Arguments: TIER, the number of steps between commits, and "bf16" or "int8" for narrow moments that are rounded at random, "split" for
split masters. The kinds that end with "beside" step during backward, with commits and snapshots in the background."""

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


def backward(params, step):
    """Gradients as of random_grads, by a backward that calls the hooks of the parameters."""
    # Every other step is clipped at a norm of 50.
    scale = 1.0 if step % 2 else 0.1
    wanted = [scale * torch.randn(param.shape, generator=torch.Generator().manual_seed(1000 * step + n)) for n, param in enumerate(params)]
    sum((param * grad.to(param.dtype)).sum().float() for param, grad in zip(params, wanted)).backward()


def options(directory):
    return own.TierOptions(directory, part_elements=7000, pin_memory=False, durability="process")


def wide_parameters():
    """Parameters that moments of 16 bits are for."""
    return [param for param in parameters() if param.dtype is not torch.float16]


#: Keywords of moments of 16 bits that are rounded at random.
BF16_MOMENTS = {"moment_dtype": torch.bfloat16, "moment_rounding": "stochastic", "rounding_seed": 5}
#: Those of 8-bit moments.
CODED_MOMENTS = {"moment_dtype": "int8", "rounding_seed": 5}
#: Parameters and keywords by the kind of states.
KINDS = {"f32": (parameters, {}), "bf16": (wide_parameters, BF16_MOMENTS), "int8": (parameters, CODED_MOMENTS)}
KINDS |= {"split": (wide_parameters, {"master": "split"})}


def beside(directory, interval, made, more):
    """Each commit is waited for before the next. Every third one is followed by a snapshot, whose end may come at any time."""
    params, snapshot = made(), None
    optimizer = own.AdamW(params, lr=1e-2, max_norm=50.0, tier=options(directory), overlap=True, **more)
    for step in range(optimizer.resumed_step or 0, 10_000):
        optimizer.zero_grad()
        backward(params, step)
        optimizer.step()
        if step % interval == 0:
            commit = optimizer.commit(payload=str(step + 1).encode(), wait=False)
            if step // interval % 3 == 0:
                commit.wait()
                if snapshot is not None:
                    snapshot.close()
                snapshot = optimizer.snapshot(f"{directory}/step-{step + 1}", bytes_per_second=20_000_000)
        print(step + 1, flush=True)


def main(directory, interval, moments="f32"):
    kind, _, way = moments.partition(" ")
    made, more = KINDS[kind]
    if way == "beside":
        return beside(directory, int(interval), made, more)
    params = made()
    optimizer = own.AdamW(params, lr=1e-2, tier=options(directory), **more)
    for step in range(optimizer.resumed_step or 0, 10_000):
        random_grads(params, step)
        optimizer.step()
        if step % int(interval) == 0:
            optimizer.commit(payload=str(step + 1).encode())
        print(step + 1, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
