"""The loss of a training by the width of the states: a small GPT on the letters of this repository's pages, in float32 on the CPU.

    python ffi_tests/bench/narrow_losses.py [--steps N] [--seeds N]

A seed gives the first weights and the batches, which are the same for all optimizers. The program prints the rows of the record
narrow_losses.json. `loss` has the mean of the last fifty steps for each seed, `curve` the mean over the seeds of each hundred steps, and
`lowest` and `highest` the same of the seeds that are lowest and highest there."""

import argparse
import json
import pathlib
import statistics

import torch
from torch.nn import functional

from spillway.torch import AdamW

KINDS = {
    "float32": {},
    "bfloat16, nearest": {"moment_dtype": "bf16"},
    "bfloat16, random": {"moment_dtype": "bf16", "moment_rounding": "stochastic"},
    "8 bits, random": {"moment_dtype": "int8"},
    "8 bits, nearest": {"moment_dtype": "int8", "moment_rounding": "nearest"},
}
LENGTH, BATCH, WIDTH, HEADS, LAYERS, LAST, POINT = 64, 16, 96, 4, 3, 50, 100


class Layer(torch.nn.Module):
    """Attention to what is before, and a perceptron."""

    def __init__(self):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.into, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.wide = torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        batch, length, _ = x.shape
        parts = self.into(self.norms[0](x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2)
        x = x + self.out(seen.reshape(x.shape))
        return x + self.wide(self.norms[1](x))


class Model(torch.nn.Module):
    """A GPT of letters."""

    def __init__(self, letters):
        super().__init__()
        self.letters, self.places = torch.nn.Embedding(letters, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)
        self.layers = torch.nn.Sequential(*(Layer() for _ in range(LAYERS)), torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, letters))

    def forward(self, ids):
        return self.layers(self.letters(ids) + self.places.weight[: ids.shape[1]])


def losses_of(text, letters, seed, steps, options):
    """The losses of a training."""
    torch.manual_seed(seed)
    model, batches = Model(letters), torch.Generator().manual_seed(seed)
    optimizer, losses = AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, max_norm=1.0, **options), []
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=batches)
        ids = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
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
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    pages = sorted((pathlib.Path(__file__).parents[2] / "docs").glob("*.md"))
    written = "".join(page.read_text() for page in pages)
    letters = {letter: number for number, letter in enumerate(sorted(set(written)))}
    text = torch.tensor([letters[letter] for letter in written])
    for name, kind in KINDS.items():
        trainings = [losses_of(text, len(letters), seed, args.steps, kind) for seed in range(args.seeds)]
        row = {"case": {"states": name}, "figures": figures(trainings), "headline": "loss", "better": "lower"}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
