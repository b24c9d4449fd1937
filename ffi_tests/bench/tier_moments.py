"""What narrow states save in a step over states on a tier.

    python ffi_tests/bench/tier_moments.py [--rounds N] [--mi MI_PARAMETERS] DIRECTORY...

Each form has states of its own on the same directories, and as little host memory as keeps the paths busy. The forms step in turn. The
program prints a JSON object: for each form the bytes of states per parameter, the median seconds of a step, and how many steps it does
in the time of one with float32 states. Limit the speed of the directories from outside."""

import argparse
import json
import statistics
import time

import torch

import spillway

BF16 = torch.bfloat16
FORMS = {
    "float32": {},
    "bfloat16 moments": {"moment_dtype": "bf16"},
    "8-bit moments": {"moment_dtype": "int8"},
    "split masters": {"split_master": True},
    "bfloat16 moments, split masters": {"moment_dtype": "bf16", "split_master": True},
    "8-bit moments, split masters": {"moment_dtype": "int8", "split_master": True},
}


class Form:
    """An update with states of its own."""

    def __init__(self, directories, name, options, sizes, grads):
        self._tier = spillway.Tier(directories, job=name.replace(", ", "-").replace(" ", "-"), durability="process")
        self._swap = spillway.Swap(self._tier, sizes, pin_memory=False, **options)
        self._adam = spillway.Adam(lr=1e-4, rounding="stochastic" if "moment_dtype" in options else "nearest")
        self._tensors = [(grad, torch.full((size,), 0.02, dtype=BF16)) for grad, size in zip(grads, sizes)]
        self._swap.fill([(weight.float(), None, None) for _, weight in self._tensors])
        self.bytes = self._swap.budget.state_bytes / sum(sizes)

    def step(self):
        """Seconds of a step and its writes."""
        begun = time.perf_counter()
        self._swap.step(self._adam, self._tensors)
        return time.perf_counter() - begun

    def close(self):
        """Closes the update and its tier."""
        self._swap.close()
        self._tier.destroy()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directories", nargs="+")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mi", type=int, default=8)
    args = parser.parse_args()
    sizes = [1 << 20] * args.mi
    torch.manual_seed(0)
    grads = [torch.randn(size).mul_(1e-3).to(BF16) for size in sizes]
    forms = {name: Form(args.directories, name, options, sizes, grads) for name, options in FORMS.items()}
    times = {name: [] for name in forms}
    for number in range(args.rounds + 1):
        for name, form in forms.items():
            seconds = form.step()
            if number:
                times[name].append(seconds)
    found = {name: statistics.median(own) for name, own in times.items()}
    rows = {
        name: {"bytes": round(form.bytes, 3), "seconds": round(found[name], 3), "steps": round(found["float32"] / found[name], 2)}
        for name, form in forms.items()
    }
    print(json.dumps(rows, indent=2))
    for form in forms.values():
        form.close()


if __name__ == "__main__":
    main()
