"""What a step over states on a tier costs beside backward, against the blocking form.

    python ffi_tests/bench/tier_overlap.py [--rounds N] [--mi MI_PARAMETERS] [--speculative] DIRECTORY...

Forward and backward are sleeps, which take no processor time. Together they last 0.25, 0.5, 1 and 2 times a blocking step;
backward takes two thirds. Gradients arrive at equal distances in backward, the last subgroup first. The exposed time is that
of an iteration without its sleeps. The model of bytes expects a blocking step minus the sleeps. Both forms alternate over the
same states. Limit the speed of the directories from outside."""

import argparse
import statistics
import time

import numpy as np

import spillway
from spillway.swap import plan_budget


def blocking(swap, adam, grads, compute):
    time.sleep(compute)
    swap.step(adam, [(grad, None) for grad in grads])


def beside(swap, adam, grads, compute, speculative):
    update = swap.begin(adam, speculative=speculative)
    time.sleep(compute / 3)
    for subgroup in reversed(range(len(grads))):
        time.sleep(compute * 2 / 3 / len(grads))
        update.submit(subgroup, grads[subgroup])
    if speculative:
        update.verdict("commit")
    update.finish()


def exposed(step, compute):
    begun = time.perf_counter()
    step(compute)
    return time.perf_counter() - begun - compute


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mi", type=int, default=24)
    parser.add_argument("--speculative", action="store_true")
    parser.add_argument("directories", nargs="+")
    given = parser.parse_args()
    elements = [1 << 20] * given.mi
    budget = plan_budget(elements, memory_budget=1 << 40, paths=len(given.directories)).buffer_bytes * (given.mi // 2)
    grads = [np.full(n, 0.5, np.float16) for n in elements]
    adam = spillway.Adam(lr=1e-3)
    with spillway.Tier(given.directories, job="tier-overlap", mode="create") as tier:
        with spillway.Swap(tier, elements, memory_budget=budget) as swap:
            swap.fill([(np.full(n, 1.0, np.float32), None, None) for n in elements])
            swap.commit(0)

            def by(kind):
                return {
                    "blocking": lambda compute: blocking(swap, adam, grads, compute),
                    "beside": lambda compute: beside(swap, adam, grads, compute, given.speculative),
                }[kind]

            for _ in range(3):
                whole = exposed(by("blocking"), 0)
            whole = statistics.median(exposed(by("blocking"), 0) for _ in range(given.rounds))
            print(f"blocking step {whole:.3f} s, {swap.budget.cached} of {given.mi} subgroups cached")
            for factor in (0.25, 0.5, 1, 2):
                seconds = {"blocking": [], "beside": []}
                for kind in ("blocking", "beside") * 2:
                    # The first iterations of a form end what the other one began.
                    found = [exposed(by(kind), factor * whole) for _ in range(given.rounds + 2)]
                    seconds[kind] += found[2:]
                waits, hides = (statistics.median(seconds[kind]) for kind in ("blocking", "beside"))
                model = max(0.0, waits - factor * whole)
                print(
                    f"compute {factor} of the step: exposed {hides:.3f} s (slowest {max(seconds['beside']):.3f}), "
                    f"blocking {waits:.3f} s, ratio {hides / waits:.2f}; the model expects {model:.3f} s"
                )
        tier.destroy()


if __name__ == "__main__":
    main()
