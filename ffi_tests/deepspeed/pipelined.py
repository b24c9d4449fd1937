"""Trains a small byte-level GPT on real text in a pipeline of two processes, by SysX's decoupled schedule: the forward and
backward passes of a stage run in different processes. It checks that

- the final weights are those of a serial run, to the bit;
- a killed process is reported with its device and operation, and no process and no shared memory are left.

It prints the bubble ratio that the plan predicts, and the measured one. DeepSpeed is not used."""

import argparse
import functools
import gc
import hashlib
import json
import os
import pathlib
import signal
import statistics
import sys
import threading
import time
import types

import torch
from torch import nn
from torch.nn import functional as F
from train import Batches, Block, rate

from spillway import pipeline
from spillway.torch import AdamW

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


class Embed(nn.Module):
    def __init__(self, dim, context):
        super().__init__()
        self.token, self.position = nn.Embedding(256, dim), nn.Parameter(torch.randn(context, dim) * 0.02)

    def forward(self, window):
        return self.token(window) + self.position


class Head(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256, bias=False)

    def forward(self, x):
        return self.head(self.norm(x))


def loss_of(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def main():
    options = arguments()
    torch.set_num_threads(1)
    steps = windows(options)
    serial = model(options)
    losses = train_serially(serial, steps, options)
    units = model(options)
    report = train_in_pipeline(units, steps, options)
    report["sha256"], report["serial_sha256"] = weights_hash(units), weights_hash(serial)
    print(f"  loss {report['losses'][0]:.4f} -> {report['losses'][-1]:.4f}")
    if report["sha256"] != report["serial_sha256"] or report["losses"] != losses:
        sys.exit("pipelined.py: the pipeline has other weights or losses than the serial run")
    print(f"  final weights equal, to the bit, to those of the serial run: sha256 {report['sha256']}")
    report["killed"] = killed(units, steps, options)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(report))


def model(options):
    torch.manual_seed(0)
    return [Embed(options.dim, options.context), *(Block(options.dim) for _ in range(options.layers)), Head(options.dim)]


def windows(options):
    batches = Batches(types.SimpleNamespace(context=options.context, batch=options.batch * options.micro_batches, seed=0))
    return [(window[:, :-1].clone(), window[:, 1:].clone()) for window in (batches.next() for _ in range(options.steps))]


def start(units, steps, options):
    sample = steps[0][0][: options.batch]
    return pipeline.Pipeline(
        units, loss_of, functools.partial(pipeline.StageAdamW, **OPTIONS), sample, devices=2, micro_batches=options.micro_batches, split=2
    )


def train_in_pipeline(units, steps, options):
    with start(units, steps, options) as runner:
        plan = runner.plan
        print(
            f"GPT of {sum(p.numel() for unit in units for p in unit.parameters()) / 1e6:.2f} M parameters in a pipeline: "
            f"{plan.devices} processes, {plan.micro_batches} micro-batches, {plan.stages} forward and {len(plan.units)} backward stages",
            flush=True,
        )
        reports, moments = [], []
        for step in steps:
            reports.append(runner.step(*step, timeout=300))
            moments.append(time.monotonic())
        runner.sync()
    measured = statistics.median(report.bubble_ratio for report in reports)
    print(f"  bubbles of the passes: {plan.passes_bubble_ratio:.1%} predicted from measured costs, {measured:.1%} measured")
    processors = len(os.sched_getaffinity(0))
    if processors <= plan.devices:
        print(
            f"  the prediction is for a device of its own for each process: here {plan.devices} processes and this one share "
            f"{processors} processors"
        )
    print(
        f"  checkpoints sent per step: {plan.messages['checkpoints'][0]}, activations: {plan.messages['activations'][0]}, gradients: "
        f"{plan.messages['gradients'][0]}"
    )
    return {
        "predicted_bubble_ratio": plan.passes_bubble_ratio,
        "measured_bubble_ratio": measured,
        "steps_per_second": rate(moments),
        "losses": [loss for report in reports for loss in report.losses],
    }


def train_serially(units, steps, options):
    optimizers = [AdamW(unit.parameters(), **OPTIONS) for unit in units]
    losses = []
    for inputs, targets in steps:
        for x, target in zip(inputs.chunk(options.micro_batches), targets.chunk(options.micro_batches)):
            for unit in units:
                x = unit(x)
            loss = loss_of(x, target)
            losses.append(loss.item())
            (loss / options.micro_batches).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def killed(units, steps, options):
    """Kills the process of device 1 during a step, and returns the report."""
    with start(units, steps, options) as runner:
        ids = runner.process_ids()
        runner.step(*steps[0], timeout=300)
        threading.Timer(0.05, os.kill, (ids[1], signal.SIGKILL)).start()
        try:
            while True:
                runner.step(*steps[0], timeout=300)
        except pipeline.PipelineError as error:
            text = str(error)
            print(f"  killed: {text}")
            if error.device != 1:
                sys.exit("pipelined.py: the report names another device than the killed one")
    left = [process for process in ids if os.path.exists(f"/proc/{process}")]
    gc.collect()
    # The shared memory has no name: it is freed when no process maps it.
    mapped = [line for line in pathlib.Path("/proc/self/maps").read_text().splitlines() if "memfd:spillway" in line]
    if left or mapped:
        sys.exit(f"pipelined.py: left behind: processes {left}, shared memory {mapped}")
    print("  no process and no shared memory is left")
    return text


def weights_hash(units):
    digest = hashlib.sha256()
    for unit in units:
        for parameter in unit.parameters():
            digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the report to this file")
    for name, value in (("steps", 8), ("dim", 128), ("layers", 6), ("context", 64), ("batch", 4), ("micro_batches", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    if options.layers % 2:
        parser.error("--layers must be even: a forward stage has two units")
    return options


if __name__ == "__main__":
    main()
