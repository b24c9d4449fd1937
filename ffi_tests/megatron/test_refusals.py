"""What Spillway leaves to Megatron's own code, with the reason, and bad input."""

import logging
import types

import hybrid
import pytest
import torch
from hybrid import build, parameters, plain, same, train

import spillway
from spillway.bench import _gpu_on_cpu as gpu


def only_megatron(installed, reason, make):
    """Trains what `make` builds; Spillway steps nothing of it, and names the reason."""
    before = spillway.stats()
    params = parameters()
    optimizer = make(params)
    trained = train(optimizer, params, range(2))
    assert type(optimizer) is hybrid.optimizer_class() and not same(trained, plain(parameters()))
    assert spillway.stats() == before and reason in installed.active()["left_to_megatron"]["a HybridDeviceOptimizer"]


class Own(torch.optim.AdamW):
    """A class of a user, whose step may do other things."""


def test_other_classes(installed):
    only_megatron(
        installed,
        "its CPU optimizer is SGD",
        lambda params: hybrid.optimizer_class()(
            hybrid.groups(params),
            offload_fraction=1.0,
            cpu_optimizer_cls=torch.optim.SGD,
            gpu_optimizer_cls=torch.optim.SGD,
            param_update_in_fp32=True,
            lr=1e-2,
            momentum=0.9,
        ),
    )
    only_megatron(installed, "its CPU optimizer is Own", lambda params: build(params, cpu_class=Own))


@pytest.mark.parametrize("flag", ["amsgrad", "capturable", "differentiable"])
def test_groups_that_only_torch_steps(installed, flag):
    if flag == "amsgrad":
        only_megatron(installed, "a group has amsgrad", lambda params: build(params, amsgrad=True, fused=False))
    else:
        build(parameters(), fused=False, **{flag: True})
        assert f"a group has {flag}" in installed.active()["left_to_megatron"]["a HybridDeviceOptimizer"]


def test_parameters_that_the_kernels_do_not_know(installed):
    for values in (torch.ones(4, dtype=torch.float64), torch.ones(4, 6).t()):
        param = gpu.parameter(values) if values.is_contiguous() else values.as_subclass(gpu.OnGpu).requires_grad_()
        optimizer = hybrid.optimizer_class()([param], offload_fraction=1.0, cpu_optimizer_cls=torch.optim.AdamW, lr=1e-2)
        assert type(optimizer) is hybrid.optimizer_class()
        assert "is not contiguous, or is not of float32" in installed.active()["left_to_megatron"]["a HybridDeviceOptimizer"]


def test_parameters_in_host_memory_fail_as_in_megatron(installed):
    errors = []
    for install in (True, False):
        (installed.install if install else installed.uninstall)()
        param = torch.nn.Parameter(torch.ones(4))
        param.grad = torch.ones(4)
        with pytest.raises(KeyError) as caught:
            hybrid.optimizer_class()([param], cpu_optimizer_cls=torch.optim.AdamW, lr=1e-2, overlap_cpu_optimizer_d2h_h2d=False).step()
        errors.append(type(caught.value))
    assert "in host memory" in installed.active()["left_to_megatron"]["a HybridDeviceOptimizer"] and errors == [KeyError] * 2


def test_a_reason_is_logged_once(installed, caplog):
    with caplog.at_level(logging.INFO, "spillway.megatron"):
        for _ in range(3):
            build(parameters(), cpu_class=Own)
    assert [record.getMessage() for record in caplog.records] == [
        "left to Megatron: a HybridDeviceOptimizer: its CPU optimizer is Own, and Spillway has Adam and AdamW"
    ]


def test_a_gradient_of_another_shape_is_refused_before_any_step(installed):
    params = parameters()
    optimizer = build(params)
    train(optimizer, params, range(2))
    before = plain(params)
    params[1].decoupled_grad = torch.ones(3, 3).as_subclass(gpu.OnGpu)
    with pytest.raises(RuntimeError, match="must match the size|expand"):
        optimizer.step()
    assert same(plain(params), before)
    del params[1].decoupled_grad
    train(optimizer, params, [2])
    assert not same(plain(params), before)


def test_states_that_do_not_fit_are_named(installed):
    params = parameters()
    optimizer = build(params)
    train(optimizer, params, range(2))
    before = plain(params)
    inner = optimizer.cpu_optimizers[0]
    inner.state[inner.params()[0]]["exp_avg"] = torch.zeros(5)
    with pytest.raises(spillway.InvalidArgumentError, match=r"param_groups\[0\]\['params'\]\[0\].*exp_avg"):
        train(optimizer, params, [2])
    assert same(plain(params), before)


def test_a_flag_that_comes_later_is_refused(installed):
    params = parameters()
    optimizer = build(params)
    train(optimizer, params, [0])
    before = plain(params)
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(spillway.UnsupportedError, match="amsgrad"):
        train(optimizer, params, [1])
    assert same(plain(params), before)


def fake(methods=None, version="0.16.1"):
    """A copy of Megatron's class in a module of its own, with other methods."""
    original = hybrid.optimizer_class()
    module = types.ModuleType("megatron.core.optimizer.cpu_offloading.hybrid_optimizer")
    kept = {name: value for name, value in vars(original).items() if name not in ("__dict__", "__weakref__", "_spillway")}
    module.HybridDeviceOptimizer = type("HybridDeviceOptimizer", original.__bases__, {**kept, **(methods or {})})
    return module


@pytest.mark.parametrize(
    "methods, reason",
    [
        ({"_set_sub_optimizer_grads": lambda self, stream: None}, "_set_sub_optimizer_grads of this megatron-core takes (stream)"),
        ({"build_cpu_optimizer_list": staticmethod(lambda groups: [])}, "build_cpu_optimizer_list of this megatron-core takes (groups)"),
        ({"_sync_hdo_state_to_sub_optimizers": None}, "has no _sync_hdo_state_to_sub_optimizers"),
        ({"_init_sub_optimizers": lambda self: None}, "_init_sub_optimizers of this megatron-core does not set"),
    ],
)
def test_other_methods_are_not_patched(installed, methods, reason):
    from spillway.megatron import _hook

    installed.uninstall()
    module = fake(methods)
    before = dict(vars(module.HybridDeviceOptimizer))
    _hook._patch(module)
    assert dict(vars(module.HybridDeviceOptimizer)) == before
    assert reason in installed.active()["left_to_megatron"]["HybridDeviceOptimizer"]


@pytest.mark.parametrize(
    "version, fits",
    [("0.11.0", False), ("0.12.0", True), ("0.16.9", True), ("0.19.9", True), ("0.20.0rc1", False), ("1.0", False), ("unknown", False)],
)
def test_versions(installed, monkeypatch, version, fits):
    import megatron.core.package_info

    from spillway.megatron import _hook

    installed.uninstall()
    module = fake()
    monkeypatch.setattr(megatron.core.package_info, "__version__", version)
    _hook._patch(module)
    assert ("_spillway" in vars(module.HybridDeviceOptimizer)) is fits
    left = installed.active().get("left_to_megatron", {})
    reason = f"Spillway is tested with megatron-core 0.12 to 0.19.x, and this is {version}"
    assert left == ({} if fits else {"HybridDeviceOptimizer": reason})
    installed.uninstall()
    assert "_spillway" not in vars(module.HybridDeviceOptimizer)
