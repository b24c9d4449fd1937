"""What a step of spillway.torch.offload costs beside backward, with and without overlap, on the CPU.

    python ffi_tests/bench/offload_overlap.py [ROUNDS]

A training alternates between the two, step by step, over the same model: layers of 2048 x 2048, batches for which backward
takes about as long as the optimizer's step. The exposed time is that of `step()`. Nothing is clipped in one part,
everything in the other."""

import statistics
import sys
import time

import torch

from spillway.torch import offload

LAYERS, WIDTH, BATCH = 6, 2048, 48


def measure(max_norm, rounds):
    """Median seconds of backward and of step(), with and without overlap."""
    sides = {}
    for overlap in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        sides[overlap] = model, offload(model, lr=1e-4, max_norm=max_norm, overlap=overlap, bucket_bytes=16 << 20), [], []
    x = torch.randn(BATCH, WIDTH)
    for number in range(rounds + 3):
        for overlap in (True, False) if number % 2 else (False, True):
            model, optimizer, backwards, steps = sides[overlap]
            loss = model(x).square().mean()
            begun = time.perf_counter()
            loss.backward()
            between = time.perf_counter()
            optimizer.step()
            ended = time.perf_counter()
            optimizer.zero_grad()
            if number >= 3:
                backwards.append(between - begun)
                steps.append(ended - between)
    return {overlap: tuple(map(statistics.median, side[2:])) for overlap, side in sides.items()}


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    for name, max_norm in (("nothing clipped", 1e6), ("all clipped", 1e-9)):
        found = measure(max_norm, rounds)
        (backward, step), (waiting_backward, waiting_step) = found[True], found[False]
        whole = (backward + step) / (waiting_backward + waiting_step)
        print(
            f"{name}: backward {waiting_backward:.3f} s, step {waiting_step:.3f} s; with overlap {backward:.3f} s and {step:.3f} s: "
            f"step {step / waiting_step:.2f}, both together {whole:.2f} of waiting"
        )


if __name__ == "__main__":
    main()
