"""compare_training.py SPILLWAY.json DEEPSPEED.json: checks that the losses are equal and prints the
times of an iteration."""

import json
import pathlib
import sys

from machine import report

import spillway


def main():
    ours, theirs = (json.loads(pathlib.Path(path).read_text()) for path in sys.argv[1:])
    lines = [
        f"{name:<24} {run['parameters'] / 1e6:8.1f} M parameters, {len(run['losses'])} steps, "
        f"{1e3 / run['steps_per_second']:8.1f} ms a step, loss {run['losses'][0]:.4f} to {run['losses'][-1]:.4f}"
        for name, run in (("with Spillway", ours), ("DeepSpeed's own ops", theirs))
    ]
    same = ours["losses"] == theirs["losses"]
    lines.append(
        f"losses: {'equal, to the bit' if same else 'DIFFERENT'}; "
        f"final weights: {'equal' if ours['sha256'] == theirs['sha256'] else 'DIFFERENT'}"
    )
    report("train", "A small GPT under ZeRO-3 with states in host memory", spillway.Gpu(0), lines, "ffi_tests/gpu/run.sh train")
    return 0 if same else 1


sys.exit(main())
