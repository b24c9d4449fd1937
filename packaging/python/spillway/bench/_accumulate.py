"""Benchmarks spillway.accumulate_ against torch's add_, in this process and in alternation.

torch's add_ of two float32 tensors reads both and writes one, as the sum does: it stands for the machine's limit. A ratio is the
contender's time divided by Spillway's: above 1, Spillway is faster."""

import time

import spillway

from . import _machine, _progress, _report

NAME = "python accumulate"
COLUMNS = [
    ("work", "work", 20, None),
    ("elements", "elements", 8, None),
    ("contender", "contender", 22, None),
    ("ms", "ms", 8, 3),
    ("GB/s", "gb_per_s", 7, 1),
    ("time ratio", "time_ratio", 10, 2),
    ("q1..q3", "quartiles", 12, 2),
]
_SCALE = 0.5

prepare = _machine.prepare_with_torch


def rows(options, torch):
    """The rows of each case, as soon as they are measured."""
    _machine.require_memory(options.size, 10)
    dst = torch.zeros(options.size)
    for work, src in (("f32 += f32", torch.full((options.size,), 1e-3)), ("f32 += bf16", torch.full((options.size,), 1e-3).bfloat16())):
        yield from _measure(dst, src, work, options.rounds)


def _measure(dst, src, work, rounds):
    contenders = {
        "spillway": lambda: spillway.accumulate_(dst, src, scale=_SCALE),
        "with norm and check": lambda: spillway.accumulate_(dst, src, scale=_SCALE, return_stats=True),
        "torch add_": lambda: dst.add_(src, alpha=_SCALE),
    }
    _agree(dst, src, contenders)
    _progress.stage(f"{work}, {_report.text(dst.numel())} elements: {rounds} rounds")
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round in range(rounds + 1):
        for name, add in contenders.items():
            start = time.perf_counter()
            add()
            times[name].append(time.perf_counter() - start)
    traffic = dst.numel() * (8 + src.element_size())
    for name, taken in times.items():
        # The first round warms up.
        taken, ours = taken[1:], times["spillway"][1:]
        figures = {
            "ms": [seconds * 1e3 for seconds in taken],
            "gb_per_s": [traffic / seconds / 1e9 for seconds in taken],
            "time_ratio": _report.ratios(taken, ours),
        }
        yield _report.row({"work": work, "elements": dst.numel(), "contender": name}, figures, "time_ratio", "higher")


def _agree(dst, src, contenders):
    expected = None
    for name, add in contenders.items():
        dst.fill_(1.0)
        add()
        if expected is None:
            expected = dst.clone()
        elif not dst.allclose(expected, rtol=1e-6):
            raise SystemExit(f"bench accumulate: {name} computes other sums than Spillway, so their times cannot be compared")
