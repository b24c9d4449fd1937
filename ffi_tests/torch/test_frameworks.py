"""Programs that take an optimizer class: transformers' Trainer, torchao's CPUOffloadOptimizer, and ColossalAI's kernel loader."""

import contextlib
import math
import pathlib
import re
import sys
import types

import pytest
import torch
from cpu_streams import StreamOfTheCpu
from trainer_runs import losses, trained

import spillway
from spillway.torch import AdamW


def trained_with(optimizer_class, folder, resume=False):
    def keywords(_):
        return {"optimizer_cls_and_kwargs": (optimizer_class, {"lr": 1e-3})}

    return trained(keywords, folder, resume=folder / "checkpoint-5" if resume else None)


def test_the_trainer_trains_as_with_torchs_class_and_resumes_with_the_same_bits(tmp_path):
    theirs = trained_with(torch.optim.AdamW, tmp_path / "torch")
    before = spillway.stats().adam_elements
    ours = trained_with(AdamW, tmp_path / "spillway")
    steps = 10 * sum(param.numel() for param in ours.model.parameters())
    assert spillway.stats().adam_elements - before == steps, "Spillway steps every parameter"
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-3) and losses(ours)[-1] < losses(ours)[0]
    resumed = trained_with(AdamW, tmp_path / "spillway", resume=True)
    for one, other in zip(resumed.model.parameters(), ours.model.parameters(), strict=True):
        assert torch.equal(one, other)
    from_torch = trained_with(AdamW, tmp_path / "torch", resume=True)
    for one, other in zip(from_torch.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.fixture
def torchao_on_the_cpu(monkeypatch):
    """torchao's class with the CPU in the place of the GPU."""
    module = pytest.importorskip("torchao.optim.cpu_offload")
    monkeypatch.setattr(module, "get_available_devices", lambda: ["cpu", "cuda"])
    monkeypatch.setattr(torch.cuda, "Stream", StreamOfTheCpu)
    monkeypatch.setattr(torch.cuda, "current_stream", StreamOfTheCpu)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, pin_memory=False, **options: empty_like(*args, **options))
    return module.CPUOffloadOptimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchaos_offload_steps_with_the_class(torchao_on_the_cpu, dtype):
    models = []
    for optimizer_class in (AdamW, torch.optim.AdamW):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.GELU(), torch.nn.Linear(96, 96)).to(dtype)
        optimizer = torchao_on_the_cpu(model.parameters(), optimizer_class, lr=1e-2)
        before = spillway.stats().adam_elements
        for step in range(6):
            if step == 3:
                saved, optimizer = optimizer.state_dict(), torchao_on_the_cpu(model.parameters(), optimizer_class, lr=1e-2)
                optimizer.load_state_dict(saved)
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(8, 96, generator=generator).to(dtype)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        stepped = spillway.stats().adam_elements - before
        assert stepped == (6 * sum(param.numel() for param in model.parameters()) if optimizer_class is AdamW else 0)
        models.append(model)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def documented_extension(monkeypatch):
    """The class that the program of docs/frameworks.md registers with ColossalAI's loader."""
    text = (pathlib.Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
    [program] = [found for found in re.findall(r"^```python[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL) if "CPUAdamLoader" in found]
    registered = []
    loader = types.ModuleType("colossalai.kernel.kernel_loader")
    loader.CPUAdamLoader = types.SimpleNamespace(register_extension=registered.append)
    for name in ("colossalai", "colossalai.kernel"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, loader.__name__, loader)
    exec(program, {})
    [extension] = registered
    return extension


@pytest.mark.parametrize("adamw", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("loss_scale", [-1.0, 128.0])
@pytest.mark.parametrize(
    "dtypes, tolerance",
    [((torch.float32, torch.float32), 1e-5), ((torch.float32, torch.float16), 1e-3), ((torch.float16, torch.float16), 1e-3)],
    ids=str,
)
def test_colossalais_kernel(monkeypatch, adamw, weight_decay, bias_correction, loss_scale, dtypes, tolerance):
    """The extension of docs/frameworks.md against the formula that ColossalAI compares its kernels with, on float32 copies; loaded as its
    KernelLoader does. ColossalAI does not install beside this version of torch, so that its loader is a stand-in."""
    if dtypes[0] is torch.float16 and not bias_correction:
        tolerance = 5e-3  # the first second moments have few bits in float16, and the steps are three times as long
    lr, beta1, beta2, eps = 1e-3, 0.9, 0.999, 1e-8
    extension = documented_extension(monkeypatch)()
    assert extension.is_available() and extension.priority > 1
    extension.assert_compatible()
    kernel = extension.load().CPUAdamOptimizer(lr, beta1, beta2, eps, weight_decay, adamw)
    generator = torch.Generator().manual_seed(0)
    p32, g32 = torch.rand(64, generator=generator), torch.rand(64, generator=generator)
    p, g = p32.to(dtypes[0]), (g32 * max(loss_scale, 1.0)).to(dtypes[1])
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    m32, v32 = torch.zeros(64), torch.zeros(64)
    for step in range(1, 4):
        grad = g32 if adamw else g32 + weight_decay * p32
        if adamw:
            p32 *= 1 - lr * weight_decay
        m32 = beta1 * m32 + (1 - beta1) * grad
        v32 = beta2 * v32 + (1 - beta2) * grad * grad
        corrections = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
        p32 -= lr / corrections[0] * m32 / (v32.sqrt() / math.sqrt(corrections[1]) + eps)
        kernel.step(step, lr, beta1, beta2, eps, weight_decay, bias_correction, p.view(-1), g.view(-1), m.view(-1), v.view(-1), loss_scale)
        torch.testing.assert_close(p.float(), p32, rtol=tolerance, atol=tolerance)
