"""The checks of torch's own optimizer suite on spillway.torch's classes: what a step does. torch_suite.py says which checks these are."""

import copy
import functools
import math

import pytest
import torch
from torch.nn import Parameter
from torch_suite import BY_NAME, F32, INFOS, cases, closure_of, every_class, every_input, first_and_last_loss, model_and_step

from spillway import torch as own


@pytest.mark.sampled(values=1)
@pytest.mark.parametrize("with_schedulers", [False, True])
@pytest.mark.parametrize("contiguous", [False, True])
@every_input
def test_steps_go_in_the_right_direction(info, kwargs, contiguous, with_schedulers):
    if info.optim_cls is own.Adagrad and kwargs.get("fused") and not contiguous:
        pytest.skip("torch's fused Adagrad, which steps parameters with strides, mistakes the strides of its state")
    schedulers = info.scheduler_inputs if with_schedulers else ([],)
    for makers in schedulers:
        torch.manual_seed(3)
        if contiguous:
            weight, bias = Parameter(torch.randn(10, 5)), Parameter(torch.randn(10))
        else:
            weight, bias = Parameter(torch.randn(10, 5, 2)[..., 0]), Parameter(torch.randn(10, 2)[..., 0])
        data = torch.randn(5)
        optimizer = info.optim_cls([weight, bias], **copy.deepcopy(kwargs))
        try:
            schedules = [make(optimizer) for make in makers]
        except (KeyError, ValueError) as error:
            assert info.optim_cls is not own.Adam, error
            continue
        first, last = first_and_last_loss(optimizer, closure_of(optimizer, weight, bias, data), schedules)
        assert last > first if kwargs.get("maximize") else last < first


@pytest.mark.parametrize("dimensions", [0, 1])
@every_input
def test_a_tensor_as_lr_equals_a_number(info, kwargs, dimensions):
    lr = float(kwargs.get("lr", 1e-3))
    results = []
    if kwargs.get("foreach"):
        pytest.skip("torch refuses tensors as lr with foreach")
    for given in (lr, torch.full([1] * dimensions, lr)):
        if kwargs.get("foreach") is None and dimensions and not info.supported_impls:
            given = torch.as_tensor(given).reshape(())
        params, optimizer, closure = model_and_step(info, {**copy.deepcopy(kwargs), "lr": given})
        for _ in range(10):
            optimizer.step(closure)
            if torch.is_tensor(given):
                assert torch.is_tensor(optimizer.param_groups[0]["lr"]) and float(given) == torch.tensor(lr)
        results.append(params)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@every_class
def test_flags_of_the_implementation_change_no_parameter_that_spillway_steps(info, dtype):
    """torch's tests of foreach and fused against the plain loop. The bits are equal, since Spillway's step is the same."""
    for given in info.optim_inputs_func(device="cpu"):
        results = []
        for flag in (None, *(impl for impl in info.supported_impls if impl != "differentiable")):
            kwargs = {**copy.deepcopy(given.kwargs), **({flag: True} if flag else {"foreach": False} if info.supported_impls else {})}
            if kwargs.get("capturable") or (flag == "foreach" and torch.is_tensor(kwargs.get("lr"))):
                continue
            params, optimizer, closure = model_and_step(info, kwargs, dtype)
            for _ in range(7):
                optimizer.step(closure)
            results.append(params)
        for other in results[1:]:
            torch.testing.assert_close(
                results[0],
                other,
                rtol=0 if dtype is F32 and not given.kwargs.get("amsgrad") else 1e-5,
                atol=0 if dtype is F32 and not given.kwargs.get("amsgrad") else 1e-6,
            )


@every_input
def test_parameters_of_mixed_dtypes(info, kwargs):
    """f32, bf16, f16 and float64 parameters in one group, each as if it were alone."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float32]
    torch.manual_seed(0)
    mixed = [Parameter(torch.randn(9, 4, dtype=torch.float64).to(dtype)) for dtype in dtypes]
    alone = copy.deepcopy(mixed)
    optimizers = [info.optim_cls(mixed, **copy.deepcopy(kwargs))] + [info.optim_cls([param], **copy.deepcopy(kwargs)) for param in alone]
    for step in range(4):
        torch.manual_seed(step)
        for one, other in zip(mixed, alone):
            one.grad = torch.randn(9, 4, dtype=torch.float64).to(one.dtype)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(mixed, alone):
        torch.testing.assert_close(one, other, rtol=0 if one.dtype is not torch.float64 else 1e-7, atol=0)


@pytest.mark.parametrize("shape", [(1,), (5, 3)], ids=str)
@pytest.mark.parametrize("info, kwargs", list(cases(infos=[info for info in INFOS if info.supports_complex])))
def test_complex_parameters_equal_pairs_of_real_ones(info, kwargs, shape):
    if kwargs.get("fused"):
        pytest.skip("torch's fused step does not support complex parameters")
    torch.manual_seed(5)
    whole = Parameter(torch.randn(*shape, dtype=torch.complex64))
    real = Parameter(torch.view_as_real(whole.detach()).clone())
    optimizers = [info.optim_cls([param], **copy.deepcopy(kwargs)) for param in (whole, real)]
    for _ in range(5):
        whole.grad = torch.randn(*shape, dtype=torch.complex64)
        real.grad = torch.view_as_real(whole.grad).clone()
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(torch.view_as_real(whole.detach()), real.detach(), rtol=2e-5, atol=2e-6)
        for key, value in optimizers[0].state[whole].items():
            other = optimizers[1].state[real][key]
            torch.testing.assert_close(torch.view_as_real(value) if torch.is_complex(value) else value, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("with_schedulers", [False, True])
def test_rosenbrock_with_sparse_gradients(with_schedulers):
    info = BY_NAME["Adagrad"]
    kwargs, makers = info.metadata_for_sparse
    start = torch.tensor([1.5, 1.5])
    params = [Parameter(start.clone()), Parameter(start.clone())]
    optimizers = [own.Adagrad([params[0]], **kwargs), torch.optim.Adagrad([params[1]], **kwargs)]
    schedules = [[make(optimizer) for make in makers] if with_schedulers else [] for optimizer in optimizers]
    solution = torch.tensor([1.0, 1.0])

    def gradient(param, first_half):
        x, y = param.detach()
        grad = torch.stack([-400 * x * (y - x**2) - 2 * (1 - x), 200 * (y - x**2)])
        index = torch.tensor([[0 if first_half else 1]])
        return torch.sparse_coo_tensor(index, grad[index[0]], (2,), check_invariants=True)

    first = (params[0].detach() - solution).norm()
    for number in range(1800):
        for param, optimizer, schedule in zip(params, optimizers, schedules):
            x, y = param.detach().tolist()
            value = 100 * (y - x**2) ** 2 + (1 - x) ** 2
            param.grad = gradient(param, number % 2 == 0)
            optimizer.step()
            for one in schedule:
                one.step(value) if isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau) else one.step()
    assert (params[0].detach() - solution).norm() <= first
    assert torch.equal(*params), "sparse gradients go to torch's step"


@pytest.mark.parametrize("name", ["AdamW", "Adam", "Lion", "Signum"])
def test_sparse_gradients_that_torch_refuses_are_refused(name):
    params = [Parameter(torch.ones(4)), Parameter(torch.ones(4))]
    optimizer = getattr(own, name)(params)
    params[0].grad = torch.ones(4).to_sparse()
    params[1].grad = torch.ones(4)
    with pytest.raises(RuntimeError, match=rf"\['params'\]\[0\]: {name} does not support sparse gradients, .*; pass dense gradients"):
        optimizer.step()
    assert all(torch.equal(param, torch.ones(4)) for param in params)


@every_input
def test_a_step_without_gradients_changes_nothing(info, kwargs):
    params = [Parameter(torch.randn(2, 3)) for _ in range(2)]
    before = [param.detach().clone() for param in params]
    optimizer = info.optim_cls(params, **kwargs)
    optimizer.step()
    assert all(map(torch.equal, params, before))
    assert not [state for state in optimizer.state.values() if "exp_avg" in state]


@every_input
def test_zero_gradients_change_nothing_without_weight_decay(info, kwargs):
    param = Parameter(torch.randn(2, 3))
    before = param.detach().clone()
    optimizer = info.optim_cls([param], **{**kwargs, "weight_decay": 0})
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert torch.equal(param, before)
    assert len(optimizer.state[param]) > 0, "torch's test_non_empty_state"


@every_input
def test_gradients_are_never_written_to(info, kwargs):
    params = [Parameter(torch.randn(2, 3)), Parameter(torch.randn(3, 2).t()), Parameter(torch.randn(3, dtype=torch.float64))]
    optimizer = info.optim_cls(params, **kwargs)
    for param in params:
        param.grad = torch.rand_like(param)
    before = [(param.grad, param.grad.clone(), param.grad._version) for param in params]
    optimizer.step()
    for param, (grad, values, version) in zip(params, before):
        assert param.grad is grad and torch.equal(grad, values) and grad._version == version


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_a_differentiable_step_has_gradients(name, amsgrad):
    """torch's TestDifferentiableOptimizer, by torch's own step."""

    def run(param):
        grad = torch.full((3,), 0.7, dtype=torch.float64, requires_grad=True)
        param = param.clone()
        optimizer = getattr(own, name)([param], lr=0.9, differentiable=True, amsgrad=amsgrad)
        param.grad = grad
        optimizer.step()
        return param

    start = torch.rand(3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match="can't optimize a non-leaf"):
        getattr(own, name)([start.clone()])
    assert torch.autograd.gradcheck(functools.partial(run), (start,))


@every_class
def test_infinite_gradients_reach_the_parameters_as_in_torch(info):
    """Without skip_nonfinite a step is done, as torch's."""
    param = Parameter(torch.ones(3))
    optimizer = info.optim_cls([param])
    param.grad = torch.tensor([1.0, math.nan, 1.0])
    optimizer.step()
    assert torch.equal(param.isnan(), torch.tensor([False, True, False]))
