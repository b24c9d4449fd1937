"""The loss of a training by the width of the states: a GPT on the letters of this repository's pages, with float32 parameters on the CPU.

    python ffi_tests/bench/narrow_losses.py [--model small|25m] [--steps N] [--seeds N]

"small" has 0.4 M parameters and computes in float32. "25m" has 25 M, and computes in bfloat16 by torch's autocast.

A seed gives the first weights and the batches, which are the same for all optimizers. The program prints the rows of the record
narrow_losses.json, or of narrow_losses_25m.json. `loss` has the mean of the last fifty steps for each seed, `curve` the mean over the
seeds of each hundred steps, and `lowest` and `highest` the same of the seeds that are lowest and highest there."""

import argparse
import json
import pathlib
import statistics
from typing import NamedTuple

import torch
from torch.nn import functional

from spillway.torch import AdamW

LAST, POINT = 50, 100
#: The kinds of states that are trained with each model.
BOTH = ("float32", "bfloat16, random", "8 bits, random")

KINDS = {
    "float32": {},
    "bfloat16, nearest": {"moment_dtype": "bf16"},
    "bfloat16, random": {"moment_dtype": "bf16", "moment_rounding": "stochastic"},
    "8 bits, random": {"moment_dtype": "int8"},
    "8 bits, nearest": {"moment_dtype": "int8", "moment_rounding": "nearest"},
}


class Size(NamedTuple):
    """A model and its training.

    Attributes:
        batch: Texts of a step, of `length` letters each.
        mixed: Forward and backward compute in bfloat16."""

    width: int
    heads: int
    layers: int
    batch: int
    rate: float
    mixed: bool
    kinds: tuple[str, ...]
    length: int = 64


SIZES = {
    "small": Size(width=96, heads=4, layers=3, batch=16, rate=1e-3, mixed=False, kinds=tuple(KINDS)),
    "25m": Size(width=512, heads=8, layers=8, batch=2, rate=3e-4, mixed=True, kinds=BOTH),
}


class Layer(torch.nn.Module):
    """Attention to what is before, and a perceptron."""

    def __init__(self, size):
        super().__init__()
        width, self.heads = size.width, size.heads
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.into, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.wide = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.into(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2)
        x = x + self.out(seen.reshape(x.shape))
        return x + self.wide(self.norms[1](x))


class Model(torch.nn.Module):
    """A GPT of letters."""

    def __init__(self, letters, size):
        super().__init__()
        width, layers = size.width, [Layer(size) for _ in range(size.layers)]
        self.letters, self.places = torch.nn.Embedding(letters, width), torch.nn.Embedding(size.length, width)
        self.layers = torch.nn.Sequential(*layers, torch.nn.LayerNorm(width), torch.nn.Linear(width, letters))

    def forward(self, ids):
        return self.layers(self.letters(ids) + self.places.weight[: ids.shape[1]])


def losses_of(text, letters, size, seed, steps, options):
    """The losses of a training."""
    torch.manual_seed(seed)
    model, batches = Model(letters, size), torch.Generator().manual_seed(seed)
    optimizer, losses = AdamW(model.parameters(), lr=size.rate, weight_decay=0.1, max_norm=1.0, **options), []
    for _ in range(steps):
        starts = torch.randint(len(text) - size.length, (size.batch,), generator=batches)
        ids = torch.stack([text[start : start + size.length + 1] for start in starts])
        with torch.autocast("cpu", torch.bfloat16, enabled=size.mixed):
            found = model(ids[:, :-1])
        loss = functional.cross_entropy(found.float().flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def figures(trainings):
    """The figures of trainings, one for each seed."""
    points = [[statistics.mean(losses[at : at + POINT]) for losses in trainings] for at in range(0, len(trainings[0]), POINT)]
    curves = {"curve": statistics.mean, "lowest": min, "highest": max}
    found = {"loss": [statistics.mean(losses[-LAST:]) for losses in trainings], **{name: map(of, points) for name, of in curves.items()}}
    return {name: {"runs": [round(value, 4) for value in values]} for name, values in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    pages = sorted((pathlib.Path(__file__).parents[2] / "docs").glob("*.md"))
    written = "".join(page.read_text() for page in pages)
    letters = {letter: number for number, letter in enumerate(sorted(set(written)))}
    text = torch.tensor([letters[letter] for letter in written])
    size = SIZES[args.model]
    for name in size.kinds:
        trainings = [losses_of(text, len(letters), size, seed, args.steps, KINDS[name]) for seed in range(args.seeds)]
        row = {"case": {"states": name}, "figures": figures(trainings), "headline": "loss", "better": "lower"}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
