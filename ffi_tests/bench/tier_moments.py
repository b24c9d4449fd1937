"""What narrow states save in a step over states on a tier.

    python ffi_tests/bench/tier_moments.py [--of swap|torch|zero3] [--rounds N] [--mi MI_PARAMETERS] DIRECTORY...

`swap` steps a spillway.Swap, `torch` a spillway.torch.AdamW with a tier, `zero3` an engine of DeepSpeed with ZeRO-3 and no computation to
speak of. Each form has states of its own on the same directories, and as little host memory as keeps the paths busy. The forms step in
turn, in another order each time: a device whose speed is limited moves more after a pause. The program prints a JSON object: for each form
the bytes of states per parameter, the median seconds of a step, and how many steps it does in the time of one with float32 states. Limit
the speed of the directories from outside."""

import argparse
import json
import os
import pathlib
import random
import shutil
import statistics
import sys
import time

import torch

import spillway
import spillway.deepspeed
from spillway.torch import AdamW, TierOptions

BF16 = torch.bfloat16
FORMS = {
    "float32": {},
    "bfloat16 moments": {"moment_dtype": "bf16"},
    "8-bit moments": {"moment_dtype": "int8"},
    "split masters": {"split_master": True},
    "bfloat16 moments, split masters": {"moment_dtype": "bf16", "split_master": True},
    "8-bit moments, split masters": {"moment_dtype": "int8", "split_master": True},
}


class SwapForm:
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


class TorchForm:
    """An optimizer of torch's kind with states of its own."""

    def __init__(self, directories, name, options, sizes, grads):
        split = {"master": "split"} if options.get("split_master") else {}
        moments = {"moment_dtype": options["moment_dtype"], "moment_rounding": "stochastic"} if "moment_dtype" in options else {}
        self._job, self._directories = name.replace(", ", "-").replace(" ", "-"), directories
        place = TierOptions(directories, job=self._job, durability="process", part_elements=max(sizes), pin_memory=False)
        params = [torch.nn.Parameter(torch.full((size,), 0.02, dtype=BF16)) for size in sizes]
        for param, grad in zip(params, grads):
            param.grad = grad
        self._optimizer = AdamW(params, lr=1e-4, tier=place, **split, **moments)
        self.bytes = self._optimizer._home.tiered.swap.budget.state_bytes / sum(sizes)

    def step(self):
        """Seconds of a step and its writes."""
        begun = time.perf_counter()
        self._optimizer.step()
        return time.perf_counter() - begun

    def close(self):
        """Closes the optimizer and removes its tier."""
        self._optimizer.close()
        for directory in self._directories:
            shutil.rmtree(f"{directory}/{self._job}")


class ZeroForm:
    """An engine of DeepSpeed with states of its own."""

    def __init__(self, directories, name, options, sizes, grads):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        spillway.deepspeed.install()
        sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "deepspeed"))
        import train

        if not torch.distributed.is_initialized():
            train.become_single_rank()
        import deepspeed

        self._job, self._directories = name.replace(", ", "-").replace(" ", "-"), directories
        block = {"paths": directories, "job": self._job, "part_elements": max(sizes), **options}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": max(sizes),
                "offload_optimizer": {"device": "nvme", "nvme_path": directories[0], "pipeline_read": True, "pipeline_write": True},
            },
            "spillway": block,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "steps_per_print": 1 << 30,
        }
        model = Products(sizes)
        self._engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self.bytes = self._engine.optimizer.optimizer_swapper.tiered.swap.budget.state_bytes / sum(sizes)

    def step(self):
        """Seconds of a backward and a step with its writes."""
        loss = self._engine()
        begun = time.perf_counter()
        self._engine.backward(loss)
        self._engine.step()
        return time.perf_counter() - begun

    def close(self):
        """Closes the engine and removes its tier."""
        self._engine.destroy()
        for directory in self._directories:
            shutil.rmtree(f"{directory}/{self._job}", ignore_errors=True)


class Products(torch.nn.Module):
    """Parameters, each in a module of its own, whose loss is nearly free."""

    def __init__(self, sizes):
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Linear(size >> 10, 1 << 10, bias=False) for size in sizes)

    def forward(self):
        row = torch.ones(1, 1 << 10, dtype=BF16)
        return sum(part(row).float().sum() for part in self.parts) * 1e-3


KINDS = {"swap": SwapForm, "torch": TorchForm, "zero3": ZeroForm}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directories", nargs="+")
    parser.add_argument("--of", choices=KINDS, default="swap")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mi", type=int, default=8)
    args = parser.parse_args()
    sizes = [1 << 20] * args.mi
    torch.manual_seed(0)
    grads = [torch.randn(size).mul_(1e-3).to(BF16) for size in sizes]
    forms = {name: KINDS[args.of](args.directories, name, options, sizes, grads) for name, options in FORMS.items()}
    times = {name: [] for name in forms}
    for number in range(args.rounds + 1):
        for name in random.sample([*forms], len(forms)):
            seconds = forms[name].step()
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
