"""Benchmarks a step of Megatron's HybridDeviceOptimizer with Spillway against the same with torch's AdamW, as Megatron calls it (fused).

All parameters are offloaded, in bfloat16 with float32 masters. Both run in this process in alternation; their first steps are compared.
If the memory holds one contender but not both, each turn makes its contender anew, warms up, and frees it.
"optimizers alone" is a step without the transfers of gradients and parameters. Without a GPU, the transfers are copies in host memory: then
a ratio of whole steps has the conversions of torch's copies in it, which a GPU would do, and not the time on the link. A ratio is
the other's time divided by Spillway's: above 1, Spillway is faster."""

import collections
import gc
import time
import warnings
from typing import Any

from . import _machine, _progress, _report

NAME = "python megatron"
COLUMNS = [
    ("work", "work", 17, None),
    ("part", "part", 16, None),
    ("tensors", "tensors", 7, None),
    ("elements", "elements", 8, None),
    ("contender", "contender", 11, None),
    ("ms", "ms", 9, 3),
    ("ns/param", "ns_per_parameter", 8, 3),
    ("time ratio", "time_ratio", 10, 2),
    ("q1..q3", "quartiles", 12, 2),
]
_BETAS = (0.9, 0.95)
_CONTENDERS = ("spillway", "torch fused")
# Bytes of a contender per parameter: 12 of master and states, 4 of the gradient in float32, 4 of parameters and gradients "on the GPU",
# and 2 of a copy in 16 bits.
_BYTES = 22
# Measured steps of a contender that is made for one turn.
_STEPS = 4
# Elements of each parameter that are compared.
_SAMPLE = 4096


def prepare(options):
    """The settings of the report, and Megatron's class."""
    _progress.stage("loading torch and Megatron")
    import torch

    warnings.filterwarnings("ignore", "Transformer Engine and Apex")
    gpu: Any = None
    if not torch.cuda.is_available():
        from . import _gpu_on_cpu

        gpu = _gpu_on_cpu
        gpu.install()
    try:
        from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
        from megatron.core.package_info import __version__
    except ImportError as error:
        raise SystemExit(f"bench megatron needs megatron-core: pip install --no-deps megatron-core ({error})") from None
    settings = {
        **_machine.settings(torch, options),
        "megatron_core": __version__,
        "gpu": "none; copies in host memory" if gpu else torch.cuda.get_device_name(),
    }
    return settings, (torch, gpu, HybridDeviceOptimizer)


def rows(options, found):
    """The rows of each case, as soon as they are measured."""
    torch, gpu, hybrid = found
    total = options.tensors * options.elements
    _machine.require_memory(total, _BYTES)
    both = _machine.has_memory(total, 2 * _BYTES)
    for work, overlap in (("overlapped", True), ("not overlapped", False)):
        yield from _measure(torch, gpu, hybrid, work, overlap, both, options)


def _measure(torch, gpu, hybrid, work, overlap, both, options):
    total = options.tensors * options.elements
    parts = ("whole step", "optimizers alone")
    turns = 1 if both else _STEPS
    _progress.stage(f"{work}, {_report.text(total)} parameters: {options.rounds} rounds" + ("" if both else f" of {turns} steps"))
    times: dict[tuple[str, str], list[float]] = {(part, name): [] for part in parts for name in _CONTENDERS}
    first: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    for _ in range(options.rounds + both):
        for name in _CONTENDERS:
            if name not in kept:
                kept[name] = _optimizer(torch, gpu, hybrid, overlap, options, name == "spillway")
                kept[name][1].step()
                first.setdefault(name, _sample(torch, kept[name][0]))
                _agree(torch, first)
            optimizer = kept[name][1]
            for _ in range(turns):
                times["whole step", name].append(_timed(torch, optimizer.step))
                times["optimizers alone", name].append(_timed(torch, lambda: _alone(optimizer)))
            if not both:
                del optimizer
                kept.clear()
                gc.collect()
    for (part, name), taken in times.items():
        # With both contenders in memory, the first round warms up.
        taken, ours = taken[both:], times[part, "spillway"][both:]
        case = {"work": work, "part": part, "tensors": options.tensors, "elements": options.elements, "contender": name}
        figures = {
            "ms": [seconds * 1e3 for seconds in taken],
            "ns_per_parameter": [seconds / total * 1e9 for seconds in taken],
            "time_ratio": _report.ratios(taken, ours),
        }
        yield _report.row(case, figures, "time_ratio", "higher")


def _optimizer(torch, gpu, hybrid, overlap, options, served):
    """Parameters with gradients, and an optimizer of both groups, with weight decay and without it."""
    import spillway.megatron

    (spillway.megatron.install if served else spillway.megatron.uninstall)()
    params = []
    for at in range(options.tensors):
        values = torch.randn(options.elements, generator=torch.Generator().manual_seed(at)).bfloat16()
        params.append(gpu.parameter(values) if gpu else torch.nn.Parameter(values.cuda()))
        params[-1].grad = torch.full_like(params[-1].detach(), 1e-3)
    split = max(1, options.tensors * 7 // 8)
    groups = [{"params": part, "weight_decay": decay} for part, decay in ((params[:split], 0.1), (params[split:], 0.0)) if part]
    optimizer = hybrid(
        groups,
        offload_fraction=1.0,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=overlap,
        lr=1e-4,
        betas=_BETAS,
        eps=1e-8,
        bias_correction=True,
        fused=True,
    )
    spillway.megatron.uninstall()
    return params, optimizer


def _timed(torch, work):
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _alone(optimizer):
    """The steps of the CPU optimizers, without their copies back."""
    for inner in optimizer.cpu_optimizers:
        hooks, inner._optimizer_step_post_hooks = inner._optimizer_step_post_hooks, collections.OrderedDict()
        try:
            inner.step()
        finally:
            inner._optimizer_step_post_hooks = hooks


def _sample(torch, params):
    """Elements of each parameter."""
    return torch.stack([param.detach()[:_SAMPLE].float().cpu() for param in params])


def _agree(torch, samples):
    """Checks that the first step of both gives the same parameters."""
    if not all(torch.allclose(samples["spillway"], other, rtol=1e-2, atol=1e-6) for other in samples.values()):
        raise SystemExit("bench megatron: torch computes other parameters than Spillway, so their times cannot be compared")
