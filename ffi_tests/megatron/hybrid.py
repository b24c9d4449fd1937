"""HybridDeviceOptimizers over small models on the GPU of spillway.bench._gpu_on_cpu."""

import warnings

import torch

from spillway.bench import _gpu_on_cpu as gpu

SIZES = (4096, (100, 10), 20_000, 33, 1, (7, 3, 5))
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def optimizer_class():
    """Megatron's class."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Transformer Engine and Apex")
        # Its CPUAdam is part of what is tested.
        import megatron.core.optimizer  # noqa: F401
        from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    return HybridDeviceOptimizer


def parameters(dtype=BF16):
    """The parameters of a model, always with the same values."""
    generator = torch.Generator().manual_seed(7)
    return [gpu.parameter(torch.randn(size, generator=generator).to(dtype)) for size in SIZES]


def groups(params):
    """Two groups with the keys that Megatron gives them, of which the second has no weight decay."""
    keys = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    return [
        {"params": params[::2], "weight_decay": 0.1, "wd_mult": 1.0, **keys},
        {"params": params[1::2], "weight_decay": 0.0, "wd_mult": 0.0, **keys},
    ]


def build(params, fraction=1.0, overlap=True, in_fp32=True, cpu_class=torch.optim.AdamW, **options):
    """A HybridDeviceOptimizer, as Megatron builds it."""
    return optimizer_class()(
        groups(params),
        offload_fraction=fraction,
        cpu_optimizer_cls=cpu_class,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=in_fp32,
        overlap_cpu_optimizer_d2h_h2d=overlap,
        **{"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "fused": True, **options},
    )


def grads(params, step, dtype=None):
    """Gradients of a step, always the same."""
    generator = torch.Generator().manual_seed(100 + step)
    return [(torch.randn(param.shape, generator=generator) * 0.1).to(dtype or param.dtype).as_subclass(gpu.OnGpu) for param in params]


def step(optimizer, params, number, without=(), dtype=None):
    """One step with another learning rate, in groups that are replaced, as Megatron's scheduler may do."""
    for at, (param, grad) in enumerate(zip(params, grads(params, number, dtype), strict=True)):
        if dtype in (None, param.dtype):
            param.grad = None if at in without else grad
        else:
            param.decoupled_grad = None if at in without else grad
    optimizer.param_groups = [{**group, "lr": 1e-2 / (1 + number)} for group in optimizer.param_groups]
    optimizer.step()
    optimizer.zero_grad()


def train(optimizer, params, steps, **options):
    """Several steps; returns the parameters as plain tensors."""
    for number in steps:
        step(optimizer, params, number, **options)
    return plain(params)


def plain(params):
    """Copies of the parameters."""
    return [param.detach().as_subclass(torch.Tensor).clone() for param in params]


def same(one, other):
    """True if all tensors have the same bits."""
    return all(
        torch.equal(a.view(torch.uint8) if a.dim() else a, b.view(torch.uint8) if b.dim() else b) for a, b in zip(one, other, strict=True)
    )
