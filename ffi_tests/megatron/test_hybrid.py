"""Megatron's HybridDeviceOptimizer with Spillway: the weights of Megatron with torch's AdamW, and which bytes go where."""

import copy
import pickle

import hybrid
import pytest
import torch
from hybrid import BF16, F16, F32, build, parameters, plain, same, train

import spillway
import spillway.torch
from spillway import _log
from spillway.bench import _gpu_on_cpu as gpu

TOLERANCE = {F32: {"rtol": 1e-5, "atol": 1e-6}, BF16: {"rtol": 1e-2, "atol": 1e-4}, F16: {"rtol": 2e-3, "atol": 1e-4}}


def with_torch(module, steps, **options):
    """The weights of Megatron's own code with torch's AdamW."""
    training = {name: options.pop(name) for name in ("without", "dtype") if name in options}
    module.uninstall()
    params = parameters(options.pop("params_dtype", BF16))
    trained = train(build(params, **options), params, steps, **training)
    module.install()
    return trained


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "not_overlapped"])
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.0])
def test_the_weights_of_torchs_adamw(installed, dtype, overlap, fraction):
    before = spillway.stats().adam_elements
    params = parameters(dtype)
    optimizer = build(params, fraction, overlap)
    trained = train(optimizer, params, range(6))
    offloaded = sum(param.numel() for inner in optimizer.cpu_optimizers for param in inner.params())
    total = sum(param.numel() for param in params)
    assert offloaded == {1.0: total, 0.0: 0}.get(fraction, offloaded) and (fraction != 0.5 or total / 2 <= offloaded < total)
    assert spillway.stats().adam_elements - before == 6 * offloaded, "Spillway steps the CPU's share, torch the GPU's"
    for one, other in zip(trained, with_torch(installed, range(6), fraction=fraction, overlap=overlap, params_dtype=dtype), strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE[dtype])
    assert not same(trained, plain(parameters(dtype)))


def test_the_first_step_in_a_process_logs_a_line(installed, monkeypatch):
    lines = []
    monkeypatch.setattr(_log, "_said", set())
    spillway.set_log(lambda level, message: lines.append(message), "info")
    try:
        for _ in range(2):
            params = parameters(BF16)
            train(build(params, 1.0), params, range(3))
    finally:
        spillway.set_log(None)
    assert [line for line in lines if " served by " in line] == [
        f"megatron: HybridDeviceOptimizer served by libspillway {spillway.library_version()}, kernel {spillway.kernel_name()}"
    ]


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_16_bit_parameters_without_masters(installed, dtype):
    params = parameters(dtype)
    trained = train(build(params, in_fp32=False), params, range(4))
    theirs = with_torch(installed, range(4), in_fp32=False, params_dtype=dtype)
    for one, other in zip(trained, theirs, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=4e-2, atol=4e-2)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_bits_are_those_of_spillways_adamw_over_the_masters(installed, monkeypatch, dtype):
    """The arithmetic is that of a step in memory with the same gradients, whatever the buckets, the overlap and the share."""
    from spillway.megatron import _hybrid

    masters = [torch.nn.Parameter(param.float()) for param in plain(parameters(dtype))]
    alone = spillway.torch.AdamW(hybrid.groups(masters), lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for number in range(5):
        for master, grad in zip(masters, hybrid.grads(parameters(dtype), number), strict=True):
            master.grad = grad.as_subclass(torch.Tensor).float()
        for group in alone.param_groups:
            group["lr"] = 1e-2 / (1 + number)
        alone.step()
    wanted = [master.detach().to(dtype) for master in masters]
    for overlap, size in [(True, 64 << 20), (True, 1000), (True, 1), (False, 1)]:
        monkeypatch.setattr(_hybrid, "BUCKET_BYTES", size)
        params = parameters(dtype)
        optimizer = build(params, overlap=overlap)
        assert same(train(optimizer, params, range(5)), wanted), (overlap, size)
        kept = [optimizer.state[param]["master_param"] for param in params]
        assert same(kept, [master.detach() for master in masters]), "the float32 masters are where Megatron's checkpoints find them"


def test_buckets_have_about_64_mib_of_float32(installed, monkeypatch):
    from spillway.megatron import _hybrid

    assert _hybrid.BUCKET_BYTES == 64 << 20
    params = parameters()
    assert len(build(params).cpu_optimizers) == 1 and len(build(params, overlap=False).cpu_optimizers) == 1
    monkeypatch.setattr(_hybrid, "BUCKET_BYTES", 4 * 4000)
    optimizer = build(params)
    assert [[list(param.shape) for param in inner.params()] for inner in optimizer.cpu_optimizers] == [
        [[4096]],
        [[20_000]],
        [[1], [100, 10], [33], [7, 3, 5]],
    ]
    assert [[group["weight_decay"] for group in inner.param_groups] for inner in optimizer.cpu_optimizers] == [[0.1], [0.1], [0.1, 0.0]]
    installed.uninstall()
    assert len(build(params).cpu_optimizers) == 6, "Megatron makes one optimizer for each parameter"


@pytest.mark.parametrize(
    "dtype, given, sent",
    [
        (BF16, None, BF16),
        (F16, None, F16),
        (BF16, F32, F32),
        (BF16, BF16, BF16),
        (F32, None, F32),
        (F32, BF16, BF16),
        (BF16, torch.float64, F32),
    ],
    ids=str,
)
def test_gradients_keep_their_dtype_on_the_way_and_parameters_come_back_in_theirs(installed, dtype, given, sent):
    params = parameters(dtype)
    optimizer = build(params)
    train(optimizer, params, range(2), dtype=given)
    inner = [param for cpu in optimizer.cpu_optimizers for param in cpu.params()]
    assert {param.dtype for param in inner} == {F32} and {param.decoupled_grad.dtype for param in inner} == {sent}
    assert {copy.dtype for cpu in optimizer.cpu_optimizers for copy in cpu.copies.values()} == ({dtype} - {F32})
    total = sum(param.numel() for param in params)
    found = installed.active()
    assert (found["grad_bytes"], found["param_bytes"]) == (2 * total * sent.itemsize, 2 * total * dtype.itemsize)
    for at, param in enumerate(params):
        assert torch.equal(plain([param])[0], optimizer.state[param]["master_param"].detach().to(dtype)), at


def test_a_gradient_may_change_its_dtype(installed):
    params = parameters(BF16)
    optimizer = build(params)
    train(optimizer, params, [0])
    first = plain(params)
    train(optimizer, params, [1], dtype=F32)
    for param in params:
        del param.decoupled_grad
    train(optimizer, params, [2])
    assert not same(first, plain(params)) and all(int(optimizer.state[param]["step"]) == 3 for param in params)


def test_parameters_without_gradients_keep_their_bits(installed):
    """megatron-core steps such a parameter with its gradient of the step before."""
    params, wanted = parameters(), [torch.nn.Parameter(param.float()) for param in plain(parameters())]
    optimizer = build(params)
    alone = spillway.torch.AdamW(hybrid.groups(wanted), lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for number in range(4):
        without = [(), (0, 3), (5,), range(6)][number]
        before = plain(params)
        hybrid.step(optimizer, params, number, without=without)
        for at, (param, grad) in enumerate(zip(wanted, hybrid.grads(params, number), strict=True)):
            param.grad = None if at in without else grad.as_subclass(torch.Tensor).float()
            assert at not in without or same(plain([params[at]]), [before[at]])
        for group in alone.param_groups:
            group["lr"] = 1e-2 / (1 + number)
        alone.step()
    assert same(plain(params), [param.detach().to(BF16) for param in wanted])
    assert [int(optimizer.state[param]["step"]) for param in params] == [2, 3, 3, 2, 3, 2]


def test_each_bucket_waits_for_its_gradients_and_the_current_stream_for_its_parameters(installed, monkeypatch):
    from spillway.megatron import _hybrid

    monkeypatch.setattr(_hybrid, "BUCKET_BYTES", 4 * 4000)
    params = parameters()
    optimizer = build(params)
    begin, current = _hybrid.AdamW._put_options, torch.cuda.current_stream()
    monkeypatch.setattr(_hybrid.AdamW, "_put_options", lambda *args: (gpu.asked.append(("stepped",)), begin(*args))[1])
    gpu.asked.clear()
    hybrid.step(optimizer, params, 0)
    out, back = optimizer._d2h_stream, optimizer._h2d_stream
    bucket = [("synchronize", out), ("stepped",), ("wait_stream", back, current), ("record", back), ("wait", current, back)]
    assert gpu.asked == [("wait_stream", out, current), ("record", out), ("record", out), ("record", out), *bucket * 3]


def test_new_model_weights_become_the_masters(installed):
    """After a load of model weights, Megatron calls update_fp32_param_by_new_param."""
    params, others = parameters(), parameters()
    optimizer = build(params)
    train(optimizer, params, range(2))
    with torch.no_grad():
        for param, other in zip(params, others, strict=True):
            param.copy_(other * 2)
    optimizer.update_fp32_param_by_new_param()
    hybrid.step(optimizer, params, 2, without=range(6))
    assert same(plain(params), [(other * 2).as_subclass(torch.Tensor).detach() for other in others])


def test_closures_run_and_hooks_of_the_optimizer_too(installed):
    params, seen = parameters(), []
    optimizer = build(params)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    for param, grad in zip(params, hybrid.grads(params, 0), strict=True):
        param.grad = grad
    optimizer.step(lambda: seen.append("closure"))
    assert seen == ["before", "closure", "after"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))], ids=["deepcopy", "pickle"])
def test_a_cpu_optimizer_is_copied_as_torchs(installed, copied):
    params = parameters()
    optimizer = build(params)
    train(optimizer, params, range(2))
    inner = optimizer.cpu_optimizers[0]
    other = copied(inner)
    assert type(other) is type(inner) and isinstance(other, torch.optim.AdamW)
    for one, two in zip(inner.params(), other.params(), strict=True):
        two.decoupled_grad = one.decoupled_grad = torch.ones_like(one)
    inner.step()
    other.step()
    assert same([param.detach() for param in inner.params()], [param.detach() for param in other.params()])


def test_a_copy_of_the_optimizer_is_of_megatrons_class(installed):
    """Megatron's class keeps only groups and states in a copy, which cannot step. It is the same with Spillway."""
    params = parameters()
    optimizer = build(params)
    train(optimizer, params, range(2))
    other = copy.deepcopy(optimizer)
    assert type(other) is hybrid.optimizer_class() and isinstance(optimizer, hybrid.optimizer_class())
    assert len(other.state) == len(params) and not hasattr(other, "cpu_optimizers")


def test_the_class_that_slime_sets_is_served_too(installed):
    import megatron.core.optimizer

    hybrid.optimizer_class()
    assert megatron.core.optimizer.CPUAdam is spillway.torch.AdamW
    results = []
    for given in (torch.optim.AdamW, spillway.torch.AdamW):
        params = parameters()
        optimizer = build(params, cpu_class=given)
        results.append(train(optimizer, params, range(3)))
        assert optimizer.defaults["cpu_optimizer_cls"] is optimizer.cpu_optimizer_cls is torch.optim.AdamW
    assert same(*results) and installed.active()["optimizers"] == 2
    installed.uninstall()
    assert megatron.core.optimizer.CPUAdam is torch.optim.AdamW


def test_uninstall_leaves_a_class_that_another_program_set(installed, monkeypatch):
    import megatron.core.optimizer

    monkeypatch.setattr(megatron.core.optimizer, "CPUAdam", torch.optim.Adam)
    installed.uninstall()
    assert megatron.core.optimizer.CPUAdam is torch.optim.Adam
    monkeypatch.undo()
    # Not by monkeypatch, which would restore Spillway's class at the end.
    megatron.core.optimizer.CPUAdam = torch.optim.AdamW


def test_adam_with_weight_decay_in_the_gradient(installed):
    results = []
    for on in (True, False):
        (installed.install if on else installed.uninstall)()
        params = parameters(F32)
        results.append(train(build(params, cpu_class=torch.optim.Adam), params, range(3)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE[F32])


def test_optimizers_keep_their_code_when_the_hook_comes_or_goes(installed):
    params = parameters()
    ours = build(params)
    installed.uninstall()
    others = parameters()
    theirs = build(others)
    installed.install()
    before = spillway.stats().adam_elements
    train(theirs, others, range(2))
    assert spillway.stats().adam_elements == before
    installed.uninstall()
    train(ours, params, range(2))
    total = sum(param.numel() for param in params)
    assert spillway.stats().adam_elements == before + 2 * total
    ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    train(ours, params, range(2, 4))
    assert spillway.stats().adam_elements == before + 4 * total


def test_active_reports_counts_and_what_the_gpu_steps(installed):
    assert installed.active() == {}
    params = parameters()
    train(build(params, fraction=0.5), params, range(3))
    found = installed.active()
    assert (found["optimizers"], found["steps"], found["kernel"]) == (1, 3, spillway.kernel_name()) and found["elements"] > 0
    assert found["left_to_megatron"] == {"parameters that stay on the GPU": "they are stepped by AdamW there"}
