"""Benchmarks Spillway's Adam against installed implementations: DeepSpeed's compiled op, torch fused AdamW, torch
foreach.

All run in this process, on the same arrays, in alternation; their results are compared before the timing. A ratio is
the other implementation's time divided by Spillway's: above 1, Spillway is faster. The row `memory limit` has the time of
plain reads and writes of as many bytes: its ratio is the part of the memory's bandwidth that Spillway's step reaches."""

import itertools
import time

import spillway

from . import _machine, _progress, _report

_LR, _BETAS, _EPS, _DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
_SCALE = 0.125
# Reads and writes of the four arrays, of which a step moves 28 bytes per parameter and `_limit` 36.
_LIMIT, _OF_LIMIT = "memory limit", 28 / 36
# Numbers of DeepSpeed's optimizers.
_ids = itertools.count(1)

NAME = "python adam"
COLUMNS = [
    ("work", "work", 12, None),
    ("parameters", "parameters", 10, None),
    ("tensors", "tensors", 7, None),
    ("contender", "contender", 48, None),
    ("ms", "ms", 9, 3),
    ("ns/param", "ns_per_parameter", 8, 3),
    ("time ratio", "time_ratio", 10, 2),
    ("q1..q3", "quartiles", 12, 2),
]


def prepare(options):
    """The settings of the report, and the implementations."""
    _progress.stage("loading torch and DeepSpeed's op, which may compile it")
    import torch

    native, reason = _machine.deepspeed_op("CPUAdamBuilder")
    return {"deepspeed": reason, **_machine.settings(torch, options)}, (torch, native)


def rows(options, tools):
    """The rows of each case, as soon as they are measured."""
    # The fused work has arrays of 20 bytes per parameter, and a float32 copy of the gradient for DeepSpeed.
    _machine.require_memory(max(options.sizes), 24)
    torch, native = tools
    for n in options.sizes:
        yield from _plain(torch, native, n, options.rounds)
    yield from _fused(torch, native, max(options.sizes), options.rounds)
    yield from _many(torch, native, options.tensors, options.rounds)


def _plain(torch, native, n, rounds):
    """One float32 tensor: 28 bytes of traffic per parameter."""
    arrays = [_random(torch, n, seed) for seed in range(2)] + [torch.zeros(n), torch.zeros(n)]
    contenders = {"spillway": _prepared([tuple(arrays)]).step}
    if native:
        contenders["deepspeed"] = _native_steps(native, [arrays])
    for name, choice in (("torch fused", {"fused": True}), ("torch foreach", {"foreach": True})):
        contenders[name] = _torch_adamw(torch, [arrays], choice)
    _agree(torch, contenders, [arrays[0]], _reset([arrays]))
    contenders[_LIMIT] = _limit(*arrays)
    return _measure({"work": "plain f32", "parameters": n, "tensors": 1}, contenders, rounds)


def _limit(param, grad, exp_avg, exp_avg_sq):
    """Sums of the arrays, on the threads and with the instruction set of a step. The factor keeps their values."""

    def run():
        for dst, src in ((param, exp_avg_sq), (exp_avg, grad), (grad, param)):
            spillway.accumulate_(dst, src, scale=1e-30)

    return run


def _fused(torch, native, n, rounds):
    """Unscaling of a bfloat16 gradient, its norm and finiteness, the step, and the bfloat16 parameter: in one pass, or
    in the separate operations of DeepSpeed's ZeRO optimizer."""
    param, grad = _random(torch, n, 0), _random(torch, n, 1).bfloat16()
    exp_avg, exp_avg_sq = torch.zeros(n), torch.zeros(n)
    copy, grad32 = torch.zeros(n, dtype=torch.bfloat16), torch.zeros(n)
    prepared = _prepared([(param, grad, exp_avg, exp_avg_sq, copy)])
    contenders = {"spillway": lambda: prepared.step(grad_scale=_SCALE, return_stats=True)}
    entry = [param, grad32, exp_avg, exp_avg_sq]

    def separately(norm_dtype):
        step = _native_steps(native, [entry]) if native else _torch_adamw(torch, [entry], {"fused": True})

        def run():
            if not torch.isfinite(torch.stack(torch.aminmax(grad))).all():
                raise SystemExit("bench adam: a gradient is not finite")
            grad.to(norm_dtype).norm(2).item()
            grad32.copy_(grad)
            grad32.mul_(_SCALE)
            step()
            copy.copy_(param)

        return run

    name = "deepspeed" if native else "torch fused"
    contenders[f"{name} op and torch operations"] = separately(torch.float64)
    contenders[f"{name} op and torch operations, norm in float32"] = separately(torch.float32)
    _agree(torch, contenders, [param, copy], _reset([entry]))
    return _measure({"work": "fused bf16", "parameters": n, "tensors": 1}, contenders, rounds)


def _many(torch, native, count, rounds):
    """Many tensors of 1 to 4096 elements: one call of Spillway, one call per tensor of DeepSpeed's op."""
    lengths = torch.randint(1, 4097, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    entries = [[_random(torch, n, seed), _random(torch, n, seed + 1), torch.zeros(n), torch.zeros(n)] for seed, n in enumerate(lengths)]
    contenders = {"spillway": _prepared([tuple(entry) for entry in entries]).step}
    if native:
        contenders["deepspeed, a call each"] = _native_steps(native, entries)
    contenders["torch fused"] = _torch_adamw(torch, entries, {"fused": True})
    contenders["torch foreach"] = _torch_adamw(torch, entries, {"foreach": True})
    _agree(torch, contenders, [entry[0] for entry in entries], _reset(entries))
    return _measure({"work": "many tensors", "parameters": sum(lengths), "tensors": count}, contenders, rounds)


def _prepared(entries):
    return spillway.Adam(_LR, _BETAS, _EPS, _DECAY).prepare(entries)


def _native_steps(native, entries):
    """Calls DeepSpeed's op like its optimizer: once per tensor, with the same step number."""
    optimizer_id = next(_ids)
    native.create_adam(optimizer_id, _LR, *_BETAS, _EPS, _DECAY, True, False)
    state = {"step": 0}

    def run():
        state["step"] += 1
        for entry in entries:
            native.adam_update(optimizer_id, state["step"], _LR, *_BETAS, _EPS, _DECAY, True, *entry)

    return run


def _torch_adamw(torch, entries, choice):
    """torch's AdamW, whose states are the arrays of the other implementations."""
    parameters = []
    for param, grad, _, _ in entries:
        parameter = torch.nn.Parameter(param)
        parameter.grad = grad
        parameters.append(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_DECAY, **choice)
    for parameter, (_, _, exp_avg, exp_avg_sq) in zip(parameters, entries):
        optimizer.state[parameter] = {"step": torch.zeros(()), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return optimizer.step


def _reset(entries):
    """A function that restores the state before the first step."""
    params = [entry[0].clone() for entry in entries]

    def reset():
        for (param, _, exp_avg, exp_avg_sq), saved in zip(entries, params):
            param.copy_(saved)
            exp_avg.zero_()
            exp_avg_sq.zero_()

    return reset


def _agree(torch, contenders, outputs, reset):
    """Checks that the first step of every implementation gives the same parameters."""
    expected = None
    for name, run in contenders.items():
        reset()
        run()
        if expected is None:
            expected = [output.clone() for output in outputs]
            continue
        for found, wanted in zip(outputs, expected):
            tolerance = 1e-6 if found.dtype == torch.float32 else 1e-2
            if not torch.allclose(found, wanted, rtol=tolerance, atol=tolerance):
                raise SystemExit(f"bench adam: {name} computes other parameters than Spillway, so their times cannot be compared")


def _measure(case, contenders, rounds):
    """The rows of all implementations, in alternation."""
    n = case["parameters"]
    _progress.stage(f"{case['work']}, {_report.text(n)} parameters: {rounds} rounds")
    repeats = {name: _repeats(run) for name, run in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                run()
            times[name].append((time.perf_counter() - start) / repeats[name] * (_OF_LIMIT if name == _LIMIT else 1))
    for name, taken in times.items():
        figures = {
            "ms": [seconds * 1e3 for seconds in taken],
            "ns_per_parameter": [seconds / n * 1e9 for seconds in taken],
            "time_ratio": _report.ratios(taken, times["spillway"]),
        }
        yield _report.row({**case, "contender": name}, figures, "time_ratio", "higher")


def _repeats(run):
    """Number of calls per round that exceeds the clock's resolution, 50 ms at least; also warms up."""
    run()
    start = time.perf_counter()
    run()
    return max(1, int(0.05 / (time.perf_counter() - start)))


def _random(torch, n, seed):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))
