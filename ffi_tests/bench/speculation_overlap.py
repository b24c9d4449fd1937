"""Measures the part of the optimizer step that remains after the last gradient: plain wait for
the norm, and speculation.

Backward is a wait that is slightly longer than the step of a bucket, as on a GPU whose speed the CPU matches. Prints
medians of alternating rounds; records/speculation_overlap.json holds the results."""

import argparse
import statistics
import time

import numpy as np

import spillway


def main():
    options = arguments()
    n = options.parameters // options.buckets
    layers = [
        [np.full(n, 0.1, np.float32), np.full(n, 1e-4, np.float32), np.zeros(n, np.float32), np.zeros(n, np.float32)]
        for _ in range(options.buckets)
    ]
    adam = spillway.Adam(lr=1e-4)
    # The first steps touch the memory and measure the time of a bucket's step.
    for _ in range(3):
        start = time.perf_counter()
        adam.step([tuple(layers[0])])
        pause = 1.3 * (time.perf_counter() - start)
        adam.step([tuple(layer) for layer in layers[1:]])
    norm = sum(spillway.grad_stats(layer[1]).sum_squares for layer in layers) ** 0.5
    cases = {
        "waiting for the norm": lambda s: waiting(adam, layers, pause),
        "speculation, committed": lambda s: speculating(s, adam, layers, pause, 0.0),
        "speculation, clipped by the first bucket": lambda s: speculating(s, adam, layers, pause, norm / 100),
        "speculation, clipped by the last bucket": lambda s: speculating(s, adam, layers, pause, norm * 0.999),
    }
    exposed = {name: [] for name in cases}
    with spillway.Speculation(options.buckets, publish="staged") as speculation:
        for _ in range(options.rounds):
            for name, case in cases.items():
                exposed[name].append(case(speculation))
    print(
        f"{options.parameters >> 20} Mi parameters in {options.buckets} buckets, {spillway.num_threads()} threads, "
        f"{options.rounds} rounds, {1e3 * pause:.1f} ms between gradients"
    )
    whole = statistics.median(exposed["waiting for the norm"])
    for name, seconds in exposed.items():
        middle = statistics.median(seconds)
        print(f"{name:42} {1e3 * middle:8.1f} ms after the last gradient, {middle / whole:5.2f} of waiting")


def waiting(adam, layers, pause):
    for _ in layers:
        time.sleep(pause)
    start = time.perf_counter()
    norm = sum(spillway.grad_stats(layer[1]).sum_squares for layer in layers) ** 0.5
    adam.step([tuple(layer) for layer in layers], grad_scale=min(1.0, 1e9 / norm))
    return time.perf_counter() - start


def speculating(speculation, adam, layers, pause, max_norm):
    speculation.begin(adam, max_norm=max_norm)
    for bucket, layer in enumerate(layers):
        time.sleep(pause)
        start = time.perf_counter()
        speculation.submit(bucket, [tuple(layer)])
    speculation.resolve(speculation.local_result())
    speculation.finish()
    return time.perf_counter() - start


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("parameters", 100 << 20), ("buckets", 8), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


if __name__ == "__main__":
    main()
