"""What each part of a tiered step is worth (MLP-Offload section 4.6): two processes step states of their own on the same directories.

    python ffi_tests/bench/tier_ablation.py [--rounds N] [--mi MI_PARAMETERS] FAST SLOW

The parts are switched on one after the other. An iteration is a sleep for forward and backward, as long as a step of the last row,
and a step. Limit the speed of the directories from outside.

| row | what it switches on |
|---|---|
| base | one directory; no subgroup stays in memory; gradients are written and read in float32, as a step that waits for all of them does |
| cache | half of the subgroups have memory: those that a step used last are the first ones of the next |
| gradients | they stay in 16 bits in memory, and are converted by the step |
| turns | one process at a time uses a directory |
| paths | the second directory |
| beside | subgroups are stepped while backward runs |"""

import argparse
import concurrent.futures
import multiprocessing
import os
import statistics
import time

import numpy as np

import spillway
from spillway.swap import plan_budget

barrier = None
ROWS = ("base", "cache", "gradients", "turns", "paths", "beside")


def iteration(tier, swap, adam, grads, compute, on):
    """One forward, backward and step."""
    update = swap.begin(adam) if "beside" in on else None
    time.sleep(compute / 3)
    for subgroup in reversed(range(len(grads))):
        time.sleep(compute * 2 / 3 / len(grads))
        if update is not None:
            update.submit(subgroup, grads[subgroup])
        if "gradients" not in on:
            tier.wait(tier.put(tier.define(f"gradient {subgroup}", [grads[subgroup].size * 4]), [grads[subgroup].astype(np.float32)]))
    if update is not None:
        return update.finish()
    own = grads
    if "gradients" not in on:
        own = [np.empty(len(grad), np.float32) for grad in grads]
        for subgroup, grad in enumerate(own):
            tier.wait(tier.get(tier.define(f"gradient {subgroup}", [grad.nbytes]), [grad]))
    swap.step(adam, [(grad, None) for grad in own])


def work(row, given):
    """A process of a row: the seconds of its iterations, and hits of a step."""
    on = set(ROWS[1 : ROWS.index(row) + 1])
    elements = [1 << 20] * given.mi
    paths = given.directories if "paths" in on else given.directories[:1]
    each = plan_budget(elements, host_memory=1 << 40, paths=len(paths)).buffer_bytes
    budget = each * (given.mi // 2) if "cache" in on else None
    grads, adam = [np.full(n, 0.5, np.float16) for n in elements], spillway.Adam(lr=1e-3)
    with spillway.Tier(paths, job=f"ablation-{os.getpid()}", mode="create", turns=int("turns" in on)) as tier:
        with spillway.Swap(tier, elements, host_memory=budget) as swap:
            swap.fill([(np.full(n, 1.0, np.float32), None, None) for n in elements])
            seconds = []
            for _ in range(given.rounds + 2):
                barrier.wait(120)
                begun = time.perf_counter()
                iteration(tier, swap, adam, grads, given.compute, on)
                # An update beside backward still writes: the barrier is after its forward, which comes next.
                barrier.wait(120)
                seconds.append(time.perf_counter() - begun)
            hits = swap.stats().hits / swap.stats().rounds
        tier.destroy()
    return seconds[2:], hits


def share(with_barrier):
    """Gives a process the barrier."""
    global barrier
    barrier = with_barrier


def measured(row, given):
    """Median seconds of an iteration of both processes, and hits of a step."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, context, share, (context.Barrier(2),)) as pool:
        found = [future.result() for future in [pool.submit(work, row, given) for _ in range(2)]]
    return statistics.median(max(pair) for pair in zip(*(seconds for seconds, _ in found))), found[0][1]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mi", type=int, default=12)
    parser.add_argument("--compute", type=float, help="seconds of forward and backward; default: a step of the row before the last")
    parser.add_argument("directories", nargs=2)
    given = parser.parse_args()
    if given.compute is None:
        given.compute = 0.0
        given.compute, _ = measured(ROWS[-2], given)
    print(f"2 processes of {given.mi} Mi parameters, {given.compute:.3f} s of forward and backward")
    first = before = None
    for row in ROWS:
        seconds, hits = measured(row, given)
        first, before = first or seconds, before or seconds
        print(
            f"{row:10} {seconds:.3f} s, {before / seconds:.2f} of the row before, {first / seconds:.2f} of base, {hits:.1f} hits",
            flush=True,
        )
        before = seconds


if __name__ == "__main__":
    main()
