"""Benchmarks a step of Megatron's HybridDeviceOptimizer with Spillway against the same with torch's AdamW, as Megatron calls it (fused).

All parameters are offloaded, in bfloat16 with float32 masters. Both run in this process in alternation; their first steps are compared.
"optimizers alone" is a step without the transfers of gradients and parameters. Without a GPU, the transfers are copies in host memory: then
a ratio of whole steps has the conversions of torch's copies in it, which a GPU would do, and not the time on the link. A ratio is
the other's time divided by Spillway's: above 1, Spillway is faster."""

import collections
import time
import warnings

import spillway

from . import _machine, _progress, _report

NAME = "python megatron"
COLUMNS = [("work", "work", 17, None), ("part", "part", 16, None), ("tensors", "tensors", 7, None), ("elements", "elements", 8, None),
           ("contender", "contender", 11, None), ("ms", "ms", 9, 3), ("ns/param", "ns_per_parameter", 8, 3),
           ("time ratio", "time_ratio", 10, 2), ("q1..q3", "quartiles", 12, 2)]
_BETAS = (0.9, 0.95)


def prepare(options):
    """The settings of the report, and Megatron's class."""
    _progress.stage("loading torch and Megatron")
    import torch
    warnings.filterwarnings("ignore", "Transformer Engine and Apex")
    gpu = None
    if not torch.cuda.is_available():
        from . import _gpu_on_cpu as gpu
        gpu.install()
    try:
        from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
        from megatron.core.package_info import __version__
    except ImportError as error:
        raise SystemExit(f"bench megatron needs megatron-core: pip install --no-deps megatron-core ({error})") from None
    settings = {"kernel": spillway.kernel_name(), "rounds": options.rounds, "torch": torch.__version__, "megatron_core": __version__,
                "torch_threads": torch.get_num_threads(), "gpu": "none; copies in host memory" if gpu else torch.cuda.get_device_name()}
    return settings, (torch, gpu, HybridDeviceOptimizer)


def rows(options, found):
    """The rows of each case, as soon as they are measured."""
    # For each contender master and states, the gradient in float32 or 16 bits, and for both the parameters and gradients "on the GPU".
    _machine.require_memory(options.tensors * options.elements, 2 * (12 + 4 + 4) + 4)
    for work, overlap in (("overlapped", True), ("not overlapped", False)):
        yield from _measure(*found, work, overlap, options)


def _measure(torch, gpu, hybrid, work, overlap, options):
    total = options.tensors * options.elements
    _progress.stage(f"{work}, {_report.text(total)} parameters: {options.rounds} rounds")
    contenders = {name: _optimizer(torch, gpu, hybrid, overlap, options, name == "spillway") for name in ("spillway", "torch fused")}
    _agree(torch, contenders)
    times = {(part, name): [] for part in ("whole step", "optimizers alone") for name in contenders}
    for _ in range(options.rounds + 1):
        for name, (_, optimizer) in contenders.items():
            times["whole step", name].append(_timed(torch, optimizer.step))
            times["optimizers alone", name].append(_timed(torch, lambda: _alone(optimizer)))
    for (part, name), taken in times.items():
        # The first round warms up.
        case = {"work": work, "part": part, "tensors": options.tensors, "elements": options.elements, "contender": name}
        figures = {"ms": [seconds * 1e3 for seconds in taken[1:]], "ns_per_parameter": [seconds / total * 1e9 for seconds in taken[1:]],
                   "time_ratio": _report.ratios(taken[1:], times[part, "spillway"][1:])}
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
    optimizer = hybrid(groups, offload_fraction=1.0, cpu_optimizer_cls=torch.optim.AdamW, gpu_optimizer_cls=torch.optim.AdamW,
                       param_update_in_fp32=True, overlap_cpu_optimizer_d2h_h2d=overlap, lr=1e-4, betas=_BETAS, eps=1e-8,
                       bias_correction=True, fused=True)
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


def _agree(torch, contenders):
    """Checks that the first step of both gives the same parameters."""
    (ours, first), (theirs, second) = contenders.values()
    first.step()
    second.step()
    if not all(torch.allclose(one.float(), other.float(), rtol=1e-2, atol=1e-6) for one, other in zip(ours, theirs, strict=True)):
        raise SystemExit("bench megatron: torch computes other parameters than Spillway, so their times cannot be compared")
