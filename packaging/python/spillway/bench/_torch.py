"""Benchmarks spillway.torch.AdamW against torch's AdamW, fused and foreach.

Spillway with bf16 moments is a further contender. All run in this process on the same parameters and states, in alternation; their results
are compared before the timing. Every step has new gradient tensors, as after `zero_grad()` and a backward pass. The gradients are made
outside of the measured time. A ratio is the other class's time divided by Spillway's: above 1, Spillway is faster."""

import time

from . import _machine, _progress, _report

NAME = "python torch"
COLUMNS = [
    ("work", "work", 24, None),
    ("parameters", "parameters", 10, None),
    ("tensors", "tensors", 7, None),
    ("contender", "contender", 16, None),
    ("ms", "ms", 9, 3),
    ("ns/param", "ns_per_parameter", 8, 3),
    ("time ratio", "time_ratio", 10, 2),
    ("q1..q3", "quartiles", 12, 2),
]

prepare = _machine.prepare_with_torch


def rows(options, torch):
    """The rows of each case, as soon as they are measured."""
    # Parameter, gradient, moments in both types, and a copy of the parameter.
    _machine.require_memory(options.size, 28)
    lengths = torch.randint(1, 4097, (10_000,), generator=torch.Generator().manual_seed(0)).tolist()
    for work, shapes in (
        ("1,000 tensors", [4096] * 1000),
        ("10,000 tensors", lengths),
        ("GPT-2 small", _gpt2()),
        ("one tensor", [options.size]),
    ):
        yield from _measure(torch, work, shapes, options.rounds)


def _gpt2():
    """The shapes of GPT-2 small: 148 tensors, 124 M parameters."""
    width = 768
    block = [
        width,
        width,
        width * 3 * width,
        3 * width,
        width * width,
        width,
        width,
        width,
        width * 4 * width,
        4 * width,
        4 * width * width,
        width,
    ]
    return [50257 * width, 1024 * width, *block * 12, width, width]


def _measure(torch, work, lengths, rounds):
    total = sum(lengths)
    case = {"work": work, "parameters": total, "tensors": len(lengths)}
    _progress.stage(f"{work}, {_report.text(total)} parameters: {rounds} rounds")
    params, optimizers = _optimizers(torch, lengths)
    _agree(torch, work, params, optimizers)
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    checks = []
    for round in range(rounds + 1):
        for name, optimizer in optimizers.items():
            _new_grads(torch, params)
            start = time.perf_counter()
            optimizer.step()
            times[name].append(time.perf_counter() - start)
        _new_grads(torch, params)
        ours = optimizers["spillway"]
        start = time.perf_counter()
        table = ours._home.rows(ours.param_groups, ours.state)
        checks.append(time.perf_counter() - start)
        table.release_grads()
    # The first round warms up.
    times, checks = {name: taken[1:] for name, taken in times.items()}, checks[1:]
    for name, taken in times.items():
        yield _row({**case, "contender": name}, taken, times["spillway"], total)
    yield _row({**case, "contender": "its Python check"}, checks, times["spillway"], total)


def _row(case, taken, ours, total):
    figures = {
        "ms": [seconds * 1e3 for seconds in taken],
        "ns_per_parameter": [seconds / total * 1e9 for seconds in taken],
        "time_ratio": _report.ratios(taken, ours),
    }
    return _report.row(case, figures, "time_ratio", "higher")


def _optimizers(torch, lengths):
    """The parameters, and an optimizer of each kind with the same states."""
    from spillway.torch import AdamW

    params = [torch.nn.Parameter(torch.randn(n, generator=torch.Generator().manual_seed(at))) for at, n in enumerate(lengths)]
    optimizers = {
        "spillway": AdamW(params),
        "torch fused": torch.optim.AdamW(params, fused=True),
        "torch foreach": torch.optim.AdamW(params, foreach=True),
    }
    for name, rounding in (("bf16 moments", "nearest"), ("bf16, stochastic", "stochastic")):
        optimizers[name] = AdamW(params, moment_dtype=torch.bfloat16, moment_rounding=rounding)
    for param in params:
        shared = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
        halves = {key: value.bfloat16() for key, value in shared.items()}
        for name, optimizer in optimizers.items():
            optimizer.state[param] = {"step": torch.zeros(()), **(halves if name.startswith("bf16") else shared)}
    return params, optimizers


def _new_grads(torch, params):
    for param in params:
        param.grad = None
    for param in params:
        param.grad = torch.full_like(param, 1e-3)


def _agree(torch, work, params, optimizers):
    """Checks that the first step of each gives the same parameters."""
    start, expected = [param.detach().clone() for param in params], None
    for name, optimizer in optimizers.items():
        for param, saved in zip(params, start):
            param.data.copy_(saved)
            for moment in ("exp_avg", "exp_avg_sq"):
                optimizer.state[param][moment].zero_()
        _new_grads(torch, params)
        optimizer.step()
        if expected is None:
            expected = [param.detach().clone() for param in params]
        elif not all(torch.allclose(param, wanted, rtol=1e-6, atol=1e-6) for param, wanted in zip(params, expected)):
            raise SystemExit(f"bench torch: {work}: {name} computes other parameters than Spillway, so their times cannot be compared")
