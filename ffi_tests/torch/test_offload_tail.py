"""The tail of spillway.torch.offload: buckets whose states stay on the device of their parameters. On the CPU it has the bits of a step
without a tail."""

import math

import pytest
import torch
from offload_runs import BUCKETS, NARROW, Later, backward, dtype_of, equal, offload, offloaded, run, same, training, values

import spillway
from spillway.torch._offload import tail as tail_module


@pytest.mark.sampled(cases=10)
@pytest.mark.parametrize("seed", range(200, 240))
def test_a_training_with_a_tail_has_the_bits_of_one_without(seed, monkeypatch):
    bucket, verdict = BUCKETS[seed % 3], ("step", "forward")[seed % 2]
    waits = training(seed, offloaded(bucket_bytes=bucket, overlap=False))
    if seed % 4 > 1:
        link = Later()
        monkeypatch.setattr("spillway.torch._offload.slot.link_to", lambda param: link)
    same(training(seed, offloaded(verdict, bucket_bytes=bucket, tail=1 + seed % 5)), waits)


@pytest.mark.parametrize("seed", [seed for seed in range(1000, 1032) if dtype_of(seed) is not torch.float16])
def test_a_training_with_a_tail_of_narrow_states_has_the_bits_of_one_without(seed, monkeypatch):
    kind = [*NARROW.values()][seed % len(NARROW)]
    waits = training(seed, offloaded(bucket_bytes=BUCKETS[seed % 3], overlap=False, **kind))
    if seed % 4 > 1:
        link = Later()
        monkeypatch.setattr("spillway.torch._offload.slot.link_to", lambda param: link)
    kind = kind | {"tail": 1 + seed % 5 if seed % 7 else "auto"} | ({} if seed % 3 else {"overlap": True})
    same(training(seed, offloaded(("step", "forward")[seed % 2], bucket_bytes=BUCKETS[seed % 3], **kind)), waits)


def steps(params, optimizer, count=3):
    for _ in range(count):
        optimizer.zero_grad()
        backward(params)
        optimizer.step()


def test_the_tail_is_what_backward_completes_last_and_is_not_copied(monkeypatch):
    copied = []

    class Counted(Later):
        def out(self, host, tensor):
            copied.append(tensor.numel())
            super().out(host, tensor)

    link = Counted()
    monkeypatch.setattr("spillway.torch._offload.slot.link_to", lambda param: link)
    layers = [torch.nn.Linear(size, size + 1, bias=False) for size in (3, 4, 5, 6)]
    # The groups are in another order than the layers.
    groups = [{"params": [layer.weight for layer in layers[2:]]}, {"params": [layer.weight for layer in layers[:2]]}]
    optimizer = offload(groups, lr=0.1, bucket_bytes=1, tail=2)
    for step in range(3):
        copied.clear()
        x = torch.ones(2, 3)
        for layer in layers:
            x = layer(x)
        x.sum().backward()
        submitted = 0 if optimizer._plan is None else sum(bucket.submitted for bucket in optimizer._plan.buckets)
        optimizer.step()
        optimizer.zero_grad()
        assert submitted == (2 if step else 0) and {layers[2].weight.numel(), layers[3].weight.numel()} == set(copied)


@pytest.mark.parametrize("tail", [1, 2, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_operations_step_a_tail_to_the_same_values(dtype, tail, monkeypatch):
    monkeypatch.setitem(tail_module._kernels, torch.device("cpu"), tail_module.TorchKernels())
    for options in ({}, {"max_norm": 0.05}, {"kind": torch.optim.Adam, "weight_decay": 0.1}, {"maximize": True}):
        (one, _, norms), (other, _, others) = (
            run(lambda model, kept=kept, options=options: offload(model, lr=1e-3, bucket_bytes=1, tail=kept, **options), dtype)
            for kept in (tail, 0)
        )
        # A float32 result that differs by a rounding may be another number of 16 bits.
        close = {"rtol": 1e-5, "atol": 1e-7} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-4}
        torch.testing.assert_close([*one.parameters()], [*other.parameters()], **close)
        assert norms == pytest.approx(others) if "max_norm" in options else norms == others


@pytest.mark.parametrize("tail", [1, 2])
def test_a_tail_has_the_bits_of_the_host_for_all_options(tail):
    for options in ({"kind": torch.optim.Adam, "weight_decay": 0.1}, {"maximize": True, "max_norm": 0.1}):
        (one, _, norms), (other, _, others) = (
            run(lambda model, kept=kept, options=options: offload(model, lr=1e-2, bucket_bytes=1, tail=kept, **options), torch.bfloat16)
            for kept in (tail, 0)
        )
        assert equal(one, other) and norms == others


def test_parameters_and_gradients_that_are_not_contiguous_are_stepped():
    results = []
    for tail in (0, 4):
        params = [
            torch.nn.Parameter(torch.ones(4, 3).t()),
            torch.nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)),
        ]
        optimizer = offload(params, lr=0.1, tail=tail, bucket_bytes=1)
        for _ in range(3):
            backward(params)
            params[0].grad = torch.arange(12.0).view(4, 3).t()
            optimizer.step()
            optimizer.zero_grad()
        results.append(values(params))
    assert all(map(torch.equal, *results)) and not params[0].is_contiguous()


def test_a_step_of_the_tail_is_a_write_for_torch():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = offload(model, tail=4)
    losses = [model(torch.randn(2, 4)).sum() for _ in range(2)]
    losses[0].backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[1].backward()


def test_a_tail_alone_refuses_what_the_engine_refuses():
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = offload(params, lr=0.1, tail=2, max_norm=1.0)
    steps(params, optimizer)
    before = values(params)
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(spillway.InvalidArgumentError, match="lr"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    params[1].grad[0] = math.nan
    with pytest.raises(spillway.InvalidArgumentError, match="parameter 1 has Inf or NaN; nothing was stepped"):
        optimizer.step()
    assert all(map(torch.equal, params, before)) and {int(state["step"]) for state in optimizer.state.values()} == {3}
    steps(params, optimizer)
    assert not any(map(torch.equal, params, before))


def test_a_gradient_may_be_overwritten_before_the_verdict():
    results = []
    for tail in (0, 2):
        params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        model = torch.nn.ParameterList(params)
        optimizer = offload(model, lr=0.1, tail=tail, verdict="forward", max_norm=0.1)
        for _ in range(3):
            backward(params)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            optimizer.settle()
        results.append((values(params), optimizer.grad_norm))
    assert all(map(torch.equal, results[0][0], results[1][0])) and results[0][1] == results[1][1] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dicts_go_between_optimizers_with_and_without_a_tail(dtype):
    def make(tail):
        params = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(4)]
        return params, offload(params, lr=0.01, bucket_bytes=1, tail=tail)

    whole, optimizer = make(0)
    steps(whole, optimizer, 6)
    for first, second in ((0, 2), (2, 0), (1, 3)):
        (one, saved), (other, loaded) = make(first), make(second)
        steps(one, saved)
        with torch.no_grad():
            for to, param in zip(other, one):
                to.copy_(param)
        loaded.load_state_dict(saved.state_dict())
        steps(other, loaded)
        assert all(map(torch.equal, other, whole))
