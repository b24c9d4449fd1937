"""What a step over states on a tier costs beside backward, against the blocking form.

    python ffi_tests/bench/tier_overlap.py [--rounds N] [--mi MI_PARAMETERS] [--speculative | --torch | --commits] DIRECTORY...

Forward and backward are sleeps, which take no processor time. Together they last 0.25, 0.5, 1 and 2 times a blocking step;
backward takes two thirds. Gradients arrive at equal distances in backward, the last subgroup first. The exposed time is that
of an iteration without its sleeps. No write can begin before the first gradient is there, so the model of bytes expects a blocking
step minus backward. Both forms alternate over the same states. Limit the speed of the directories from outside.

--torch measures spillway.torch.AdamW with `tier`, with and without `overlap`. The sleeps of its backward are in an autograd function.
Each form has states of its own.

--commits commits after each step beside backward. The blocking form waits for the commit, the other one does not."""

import argparse
import itertools
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


def torch_forms(directories, elements, budget):
    """The forms of torch's entry, and what closes them."""
    import torch

    from spillway import torch as own

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(context, x, _, grad, seconds):
            context.grad, context.seconds = grad, seconds
            return x.clone()

        @staticmethod
        def backward(context, grad):
            time.sleep(context.seconds)
            return grad, context.grad, None, None

    grads = [torch.full((n,), 0.5) for n in elements]

    def form(overlap):
        params = [torch.nn.Parameter(torch.ones(n)) for n in elements]
        options = own.TierOptions(directories, job=f"torch-{overlap}", resume="create", part_elements=elements[0])
        optimizer = own.AdamW(params, lr=1e-3, tier=options, host_memory=budget, overlap=overlap)

        def step(compute):
            time.sleep(compute / 3)
            x = torch.zeros(1, requires_grad=True)
            for param, grad in zip(params, grads):
                x = Late.apply(x, param, grad, compute * 2 / 3 / len(params))
            x.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return optimizer, step

    (one, blocking), (other, beside) = form(False), form(True)
    return {"blocking": blocking, "beside": beside}, lambda: (one.close(), other.close())


def committing(swap, step):
    """The forms of an iteration that commits."""
    numbers, commits = itertools.count(1), []

    def form(wait):
        def iteration(compute):
            step(compute)
            # The last one has ended: a commit waits for the one before.
            commits[:] = [swap.commit(next(numbers), wait=wait)]

        return iteration

    return {"blocking": form(True), "beside": form(False)}


def exposed(step, compute):
    begun = time.perf_counter()
    step(compute)
    return time.perf_counter() - begun - compute


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mi", type=int, default=24)
    parser.add_argument("--speculative", action="store_true")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--commits", action="store_true")
    parser.add_argument("directories", nargs="+")
    given = parser.parse_args()
    elements = [1 << 20] * given.mi
    budget = plan_budget(elements, host_memory=1 << 40, paths=len(given.directories)).buffer_bytes * (given.mi // 2)
    if given.torch:
        forms, close = torch_forms(given.directories, elements, budget)
        measure(forms, given, f"{given.mi // 2} buffers for {given.mi} subgroups")
        return close()
    grads = [np.full(n, 0.5, np.float16) for n in elements]
    adam = spillway.Adam(lr=1e-3)
    with spillway.Tier(given.directories, job="tier-overlap", mode="create") as tier:
        with spillway.Swap(tier, elements, host_memory=budget) as swap:
            swap.fill([(np.full(n, 1.0, np.float32), None, None) for n in elements])
            swap.commit(0)
            forms = {
                "blocking": lambda compute: blocking(swap, adam, grads, compute),
                "beside": lambda compute: beside(swap, adam, grads, compute, given.speculative),
            }
            if given.commits:
                forms = committing(swap, forms["beside"])
            measure(forms, given, f"{swap.budget.cached} of {given.mi} subgroups cached")
        tier.destroy()


def measure(forms, given, memory):
    for _ in range(3):
        exposed(forms["blocking"], 0)
    whole = statistics.median(exposed(forms["blocking"], 0) for _ in range(given.rounds))
    print(f"blocking step {whole:.3f} s, {memory}")
    for factor in (0.25, 0.5, 1, 2):
        seconds = {"blocking": [], "beside": []}
        for kind in ("blocking", "beside") * 2:
            # The first iterations of a form end what the other one began.
            found = [exposed(forms[kind], factor * whole) for _ in range(given.rounds + 2)]
            seconds[kind] += found[2:]
        waits, hides = (statistics.median(seconds[kind]) for kind in ("blocking", "beside"))
        model = max(0.0, waits - factor * whole * 2 / 3)
        print(
            f"compute {factor} of the step: exposed {hides:.3f} s (slowest {max(seconds['beside']):.3f}), "
            f"blocking {waits:.3f} s, ratio {hides / waits:.2f}; the model expects {model:.3f} s"
        )


if __name__ == "__main__":
    main()
