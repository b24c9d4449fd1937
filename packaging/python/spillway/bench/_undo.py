"""Benchmarks what a step costs that can be rolled back, and the rollback itself, against the plain step.

All run in this process, on the same arrays, in alternation. A ratio is the time of the work divided by that of the plain step
of the same round."""

import time
from collections.abc import Callable

import spillway

from . import _machine, _progress, _report

NAME = "python undo"
COLUMNS = [
    ("parameters", "parameters", 10, None),
    ("work", "work", 8, None),
    ("ns/param", "ns_per_parameter", 8, 3),
    ("time ratio", "time_ratio", 10, 2),
    ("q1..q3", "quartiles", 12, 2),
    ("log B/param", "log_bytes_per_parameter", 11, 3),
]

prepare = _machine.prepare_with_torch


def rows(options, torch):
    """The rows, once all are measured."""
    n = options.size
    # Two sets of param and states, a gradient, and a log of at most 13 bytes.
    _machine.require_memory(n, 41)
    made = torch.Generator().manual_seed(0)
    param, grad = torch.randn(n, generator=made), torch.empty(n)
    tensors = [(param, grad, torch.zeros(n), torch.zeros(n))]
    shadow = [(param.clone(), torch.zeros(n), torch.zeros(n))]
    adam = spillway.Adam(1e-3, (0.9, 0.999), 1e-8, 0.01)
    plain = adam.prepare(tensors)
    logged, shadowed = plain.record(), adam.prepare(tensors, shadow=shadow).record("shadow")
    works: dict[str, Callable[[], object]] = {
        "plain": plain.step,
        "recorded": logged.step,
        "rollback": logged.rollback,
        "redo": lambda: logged.redo(grad_scale=0.5),
        "shadow": shadowed.step,
    }
    _progress.stage(f"{_report.text(n)} parameters: {options.rounds} rounds")
    times: dict[str, list[float]] = {name: [] for name in works}
    log: list[float] = []
    for _ in range(options.rounds + 1):
        # Gradients as in training, around a scale of each element.
        torch.randn(n, generator=made, out=grad)
        # The first step after new gradients also writes those back from the caches.
        plain.step()
        for name, work in works.items():
            if name == "redo":
                logged.step()
            start = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - start)
            if name == "recorded":
                log.append(logged.log_bytes / n)
        shadowed.rollback()
    for name, taken in times.items():
        # The first round warms up.
        taken, ours = taken[1:], times["plain"][1:]
        figures = {"ns_per_parameter": [seconds / n * 1e9 for seconds in taken], "time_ratio": _report.ratios(taken, ours)}
        if name == "recorded":
            figures["log_bytes_per_parameter"] = log[1:]
        yield _report.row({"parameters": n, "work": name}, figures, "time_ratio", "lower")
