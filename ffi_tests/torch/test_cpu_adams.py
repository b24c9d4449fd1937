"""spillway.torch's classes where trainers that stream weights have a CPU Adam: RoundPipe, KTransformers and torchtune.

These trainers do not run here: RoundPipe 0.1.1 does not import without a GPU, kt-kernel 0.7.2 needs torch 2.9.1 alone, and torchtune 0.6.1
does not import beside torchao 0.18. Each test does with parameters and optimizer what that trainer does. MegaTrain calls DeepSpeedCPUAdam:
test_train.py of DeepSpeed's tests."""

import functools
import threading

import pytest
import torch

import spillway
from spillway.torch import AdamW

BATCHES = torch.randn(6, 8, 16, generator=torch.Generator().manual_seed(1))


def layers(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)).to(dtype)


def close(one, other, **tolerance):
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)


def roundpipe(make):
    """RoundPipe's step(): a thread copies the gradients to float32 parameters of its own, whose buffers it keeps, steps them there, and
    copies the weights back."""
    model = layers(torch.bfloat16)
    masters = [torch.nn.Parameter(param.to(torch.float32, copy=True)) for param in model.parameters()]
    optimizer, buffers = make(masters, lr=1e-2), [torch.empty_like(master) for master in masters]

    def step():
        for param, master, buffer in zip(model.parameters(), masters, buffers):
            master.grad = buffer
            master.grad.copy_(param.grad)
        torch.nn.utils.clip_grad_norm_(masters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        for param, master in zip(model.parameters(), masters):
            param.data.copy_(master)

    for batch in BATCHES:
        model(batch.bfloat16()).square().mean().backward()
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        model.zero_grad()
    return model


def ktransformers(make):
    """KTransformers' experts: the gradients of bfloat16 parameters are buffers that its kernels write, the same objects in every step."""
    model = layers(torch.bfloat16)
    optimizer = make(model.parameters(), lr=1e-2)
    views = [torch.empty_like(param) for param in model.parameters()]
    for batch in BATCHES:
        loss = model(batch.bfloat16()).square().mean()
        for param, view, grad in zip(model.parameters(), views, torch.autograd.grad(loss, [*model.parameters()])):
            view.copy_(grad)
            param.grad = view
        optimizer.step()
        assert all(param.grad is view for param, view in zip(model.parameters(), views)), "a gradient was replaced"
        for param in model.parameters():
            param.grad = None
    return model


def torchtune(make):
    """torchtune's optimizer_in_bwd: an optimizer per parameter steps in the hook of its gradient. A checkpoint has their state dicts by the
    names of the parameters, and a scheduler of the first one sets the learning rate of all."""
    model = layers()

    def made():
        return {name: make([param], lr=1e-2) for name, param in model.named_parameters()}

    optimizers = made()

    def step(param, name):
        optimizers[name].step()
        optimizers[name].zero_grad()

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(functools.partial(step, name=name))
    for number, batch in enumerate(BATCHES):
        model(batch).square().mean().backward()
        assert all(param.grad is None for param in model.parameters())
        for optimizer in optimizers.values():
            optimizer.param_groups[0]["lr"] *= 0.9
        if number == 2:
            saved, optimizers = {name: optimizer.state_dict() for name, optimizer in optimizers.items()}, made()
            for name, state in saved.items():
                optimizers[name].load_state_dict(state)
    return model


@pytest.mark.parametrize(
    "trainer, make, tolerance",
    [
        (roundpipe, AdamW, {"rtol": 1e-2, "atol": 1e-3}),
        (ktransformers, AdamW, {"rtol": 2e-2, "atol": 2e-2}),
        (ktransformers, functools.partial(AdamW, master="f32"), {"rtol": 2e-2, "atol": 2e-2}),
        (torchtune, AdamW, {"rtol": 1e-4, "atol": 1e-5}),
        (torchtune, functools.partial(spillway.torch.offload, overlap=True), {"rtol": 1e-4, "atol": 1e-5}),
    ],
    ids=["roundpipe", "ktransformers", "ktransformers master", "torchtune", "torchtune offload"],
)
def test_a_trainer_with_a_cpu_adam_trains_as_with_torchs(trainer, make, tolerance):
    before = spillway.stats().adam_elements
    ours = trainer(make)
    assert spillway.stats().adam_elements - before == len(BATCHES) * sum(param.numel() for param in ours.parameters())
    close(ours, trainer(torch.optim.AdamW), **tolerance)


def test_bfloat16_parameters_may_have_a_float32_master_inside_of_the_optimizer():
    """KTransformers' parameters have 16 bits, in which small steps are lost. With a master they are not."""
    param = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = AdamW([param], lr=1e-4, weight_decay=0.0, master="f32")
    for _ in range(100):
        param.grad = torch.ones_like(param)
        optimizer.step()
    torch.testing.assert_close(param, torch.full_like(param, 1 - 100e-4))
