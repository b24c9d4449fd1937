"""The checks of torch's own optimizer suite (test/test_optim.py, on the CPU) on spillway.torch's classes.

torch ships the inputs of that suite in `torch.testing._internal.common_optimizers`, and not its test file. Each class has an OptimizerInfo
here, made from that of torch's class. Checks that test_against_torch.py makes are left out: training with every input against torch,
arguments that are refused, schedulers by class, pickles, and exchanged checkpoints."""

import copy
import functools
import io
import math

import pytest
import torch
import torch.optim.optimizer as optimizer_module
from torch.nn import Parameter
from torch.testing._internal.common_optimizers import (OptimizerInfo, OptimizerInput, _get_optim_inputs_including_global_cliquey_kwargs,
                                                       optim_db)

from spillway import torch as own

F32 = torch.float32
_FIELDS = ("optim_inputs_func", "scheduler_inputs", "supported_impls", "not_og_supported_flags", "supports_sparse", "has_capturable_arg",
           "metadata_for_sparse", "only_supports_sparse_grads", "supports_complex", "step_requires_closure", "supports_param_groups",
           "supports_multiple_devices", "optim_error_inputs_func", "supports_fused_on")


def _inputs_of_lion(device, dtype=None):
    return [OptimizerInput(params=None, kwargs=kwargs, desc=desc) for desc, kwargs in [
        ("default", {}), ("non-default lr", {"lr": 0.01}), ("Tensor lr", {"lr": torch.tensor(0.001)}),
        ("nonzero weight_decay", {"weight_decay": 0.9}), ("betas", {"betas": (0.8, 0.88)}), ("maximize", {"weight_decay": 0.9, "maximize": True})]]


def _info(torchs):
    return OptimizerInfo(getattr(own, torchs.optim_cls.__name__), **{name: getattr(torchs, name) for name in _FIELDS})


INFOS = [_info(info) for info in optim_db if info.optim_cls in (torch.optim.AdamW, torch.optim.Adam, torch.optim.Adagrad)]
INFOS.append(OptimizerInfo(own.Lion, optim_inputs_func=_inputs_of_lion, supported_impls=(), not_og_supported_flags=("maximize",),
                           supports_complex=False))
BY_NAME = {info.optim_cls.__name__: info for info in INFOS}


def inputs(info, dtype=F32, skip=("differentiable",)):
    """All inputs of torch's suite with each flag of the implementation, except capturable, which torch refuses on the CPU."""
    if not info.supported_impls:
        return info.optim_inputs_func(device="cpu")
    made = _get_optim_inputs_including_global_cliquey_kwargs("cpu", dtype, info, skip=skip)
    return [given for given in made if not given.kwargs.get("capturable")
            and not (torch.is_tensor(given.kwargs.get("lr")) and given.kwargs.get("foreach"))]


def cases(dtype=F32, skip=("differentiable",), infos=INFOS):
    for info in infos:
        for number, given in enumerate(inputs(info, dtype, skip)):
            yield pytest.param(info, copy.deepcopy(given.kwargs), id=f"{info.optim_cls.__name__}-{number}-{given.desc}")


every_class = pytest.mark.parametrize("info", INFOS, ids=lambda info: info.optim_cls.__name__)
every_input = pytest.mark.parametrize("info, kwargs", list(cases()))


def model_and_step(info, kwargs, dtype=F32):
    """A small model, an optimizer, and a closure that has gradients and returns the loss."""
    torch.manual_seed(11)
    weight, bias = (Parameter(torch.randn(shape, dtype=dtype)) for shape in ((10, 5), (10,)))
    data = torch.randn(5, dtype=dtype)
    optimizer = info.optim_cls([weight, bias], **kwargs)

    def closure():
        optimizer.zero_grad()
        loss = (weight.mv(data) + bias).pow(2).sum()
        loss.backward()
        return loss
    return [weight, bias], optimizer, closure


def equal_trees(one, other):
    """True if nested dicts and lists have the same keys, tensors and values."""
    if torch.is_tensor(one):
        return torch.is_tensor(other) and one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal_trees(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal_trees, one, other))
    return one == other


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

        def closure():
            optimizer.zero_grad()
            loss = (weight.mv(data) + bias).pow(2).sum()
            loss.backward()
            return loss
        first = float(closure())
        for _ in range(20):
            value = optimizer.step(closure)
            for schedule in schedules:
                if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
                    schedule.step(value)
                else:
                    schedule.step()
        last = float(closure())
        assert last > first if kwargs.get("maximize") else last < first


@pytest.mark.parametrize("dimensions", [0, 1])
@every_input
def test_a_tensor_as_lr_equals_a_number(info, kwargs, dimensions):
    lr = float(kwargs.get("lr", 1e-3))
    results = []
    if kwargs.get("foreach"):
        pytest.skip("torch refuses tensors as lr with foreach")
    for given in (lr, torch.full([1] * dimensions, lr)):
        if kwargs.get("foreach") is None and dimensions and info.optim_cls is own.Lion:
            given = torch.as_tensor(given).reshape(())
        params, optimizer, closure = model_and_step(info, {**copy.deepcopy(kwargs), "lr": given})
        for _ in range(10):
            optimizer.step(closure)
            if torch.is_tensor(given):
                assert torch.is_tensor(optimizer.param_groups[0]["lr"]) and float(given) == torch.tensor(lr)
        results.append(params)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@every_class
@pytest.mark.parametrize("kind", ["weight_decay", "lr"])
def test_groups_have_their_own_options(info, kind):
    for given in inputs(info):
        kwargs = copy.deepcopy(given.kwargs)
        kwargs["weight_decay"] = 0.0
        if kwargs.get("maximize"):
            continue
        weight, bias = Parameter(torch.tensor([[1.0, -2.0]])), Parameter(torch.tensor([3.0]))
        options = {"weight_decay": 0.5} if kind == "weight_decay" else {"lr": 0.0}
        optimizer = info.optim_cls([{"params": [weight]}, {"params": [bias], **options}], **{**kwargs, "lr": 0.01})
        for _ in range(10):
            for param in (weight, bias):
                param.grad = torch.zeros_like(param) if kind == "weight_decay" else torch.ones_like(param)
            optimizer.step()
        if kind == "weight_decay":
            assert torch.equal(weight, torch.tensor([[1.0, -2.0]])) and 0 < float(bias) < 3
        else:
            assert torch.equal(bias, torch.tensor([3.0])) and bool((weight < torch.tensor([[1.0, -2.0]])).all())


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
            torch.testing.assert_close(results[0], other, rtol=0 if dtype is F32 and not given.kwargs.get("amsgrad") else 1e-5,
                                       atol=0 if dtype is F32 and not given.kwargs.get("amsgrad") else 1e-6)


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


@pytest.mark.parametrize("name", ["AdamW", "Adam", "Lion"])
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


@every_input
def test_an_optimizer_is_printed(info, kwargs):
    _, optimizer, closure = model_and_step(info, kwargs)
    text = str(optimizer)
    assert text == repr(optimizer) and info.optim_cls.__name__ in text
    for name, value in optimizer.param_groups[0].items():
        assert name == "params" or f"{name}: {value}" in text
    optimizer.step(closure)
    str(optimizer)


@every_input
def test_equal_runs_have_equal_state_dicts(info, kwargs):
    """torch's test_state_dict_deterministic: after a load, two runs go on alike; parameters may be cast in between."""
    torch.manual_seed(2)
    params, optimizer, closure = model_and_step(info, copy.deepcopy(kwargs))
    for _ in range(3):
        optimizer.step(closure)
    data = torch.randn(5)
    twins = [Parameter(param.detach().clone()) for param in params]
    twin = info.optim_cls(twins, **copy.deepcopy(kwargs))
    saved = copy.deepcopy(optimizer.state_dict())
    # As in torch, the loaded tensors become the state.
    twin.load_state_dict(copy.deepcopy(saved))
    assert equal_trees(saved, optimizer.state_dict())
    assert equal_trees(twin.state_dict(), saved)
    for _ in range(3):
        for (weight, bias), one in ((params, optimizer), (twins, twin)):
            one.zero_grad()
            (weight.mv(data) + bias).pow(2).sum().backward()
            one.step()
        assert all(map(torch.equal, params, twins))
    assert equal_trees(twin.state_dict(), optimizer.state_dict())
    for group in twin.param_groups:
        assert group.keys() == optimizer.param_groups[0].keys()


@every_input
def test_state_dicts_without_newer_flags_load(info, kwargs):
    """torch's test_can_load_older_state_dict: each flag that was added later may be missing."""
    for flag in info.not_og_supported_flags:
        _, optimizer, closure = model_and_step(info, copy.deepcopy(kwargs))
        for _ in range(3):
            optimizer.step(closure)
        old = copy.deepcopy(optimizer.state_dict())
        for group in old["param_groups"]:
            group.pop(flag, None)
        optimizer.load_state_dict(old)
        optimizer.step(closure)
        if info.optim_cls is not own.Lion and flag in optimizer.defaults:
            assert flag in optimizer.param_groups[0]


@every_input
def test_a_step_count_that_is_a_number_loads(info, kwargs):
    """torch's test_load_nontensor_step: old checkpoints have numbers as step counts."""
    if info.optim_cls is own.Lion:
        pytest.skip("Lion has no step count")
    params, optimizer, closure = model_and_step(info, copy.deepcopy(kwargs))
    for _ in range(3):
        optimizer.step(closure)
    old = copy.deepcopy(optimizer.state_dict())
    for state in old["state"].values():
        state["step"] = state["step"].item()
    optimizer.load_state_dict(old)
    optimizer.step(closure)
    assert all(torch.is_tensor(state["step"]) and float(state["step"]) == 4 for state in optimizer.state.values())


@every_input
def test_torch_save_and_load_with_weights_only(info, kwargs):
    params, optimizer, closure = model_and_step(info, copy.deepcopy(kwargs))
    for _ in range(3):
        optimizer.step(closure)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert equal_trees(loaded, optimizer.state_dict())
    optimizer.load_state_dict(loaded)
    assert equal_trees(loaded, optimizer.state_dict())


@every_class
def test_named_parameters_load_from_unnamed_and_back(info):
    def optimizer_of(optim_cls, named):
        torch.manual_seed(1)
        layer = torch.nn.Linear(3, 2)
        made = optim_cls(layer.named_parameters() if named else layer.parameters(), lr=1e-2)
        layer(torch.ones(3)).sum().backward()
        made.step()
        return made
    torchs = getattr(torch.optim, info.optim_cls.__name__, torch.optim.AdamW)
    for source, target in [(True, False), (False, True), (True, True)]:
        names = []
        for optim_cls in (info.optim_cls, torchs):
            saved, made = optimizer_of(optim_cls, source).state_dict(), optimizer_of(optim_cls, target)
            made.load_state_dict(saved)
            made.step()
            names.append(made.param_groups[0].get("param_names"))
        assert names[0] == names[1]


@every_class
def test_pre_and_post_hooks_of_steps(info):
    _, optimizer, closure = model_and_step(info, {})
    calls, seen = [], []

    def pre(one, args, kwargs):
        calls.append("pre")
        seen.append((one, args))

    def changing(one, args, kwargs):
        return args, {**kwargs, "closure": kwargs["closure"]}
    handles = [optimizer.register_step_pre_hook(pre), optimizer.register_step_pre_hook(changing),
               optimizer.register_step_post_hook(lambda *_: calls.append("post"))]
    everywhere = optimizer_module.register_optimizer_step_pre_hook(lambda *_: calls.append("global pre"))
    last = optimizer_module.register_optimizer_step_post_hook(lambda *_: calls.append("global post"))
    try:
        optimizer.step(closure=closure)
    finally:
        everywhere.remove()
        last.remove()
    assert calls == ["global pre", "pre", "post", "global post"] and seen[0][0] is optimizer
    for handle in handles:
        handle.remove()
    optimizer.step(closure)
    assert len(calls) == 4


@every_class
def test_hooks_of_state_dicts(info):
    params, optimizer, closure = model_and_step(info, {})
    optimizer.step(closure)
    calls = []

    def post(one, state_dict):
        calls.append("state_dict post")
        return {**state_dict, "ran": True}

    def load_pre(one, state_dict):
        calls.append("load pre")
        state_dict = copy.copy(state_dict)
        state_dict["param_groups"] = [{**group, "lr": 0.002} for group in state_dict["param_groups"]]
        return state_dict

    def load_first(one, state_dict):
        calls.append("load first")
        state_dict = copy.copy(state_dict)
        state_dict["param_groups"] = [{**group, "lr": 0.003} for group in state_dict["param_groups"]]
        return state_dict
    optimizer.register_state_dict_pre_hook(lambda one: calls.append("state_dict pre"))
    optimizer.register_state_dict_post_hook(post)
    optimizer.register_load_state_dict_pre_hook(load_pre)
    optimizer.register_load_state_dict_pre_hook(load_first, prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda one: calls.append("load post"))
    saved = optimizer.state_dict()
    assert saved["ran"] is True
    optimizer.load_state_dict(saved)
    assert calls == ["state_dict pre", "state_dict post", "load first", "load pre", "load post"]
    assert optimizer.param_groups[0]["lr"] == 0.002
    optimizer.step(closure)


@every_class
def test_deepcopies_share_nothing(info):
    params, optimizer, closure = model_and_step(info, {})
    optimizer.step(closure)
    twin = copy.deepcopy(optimizer)
    before = copy.deepcopy(twin.state_dict())
    for _ in range(3):
        optimizer.step(closure)
    assert equal_trees(twin.state_dict(), before)
    assert not any(one is other for one, other in zip(twin.param_groups[0]["params"], params))


@every_class
def test_another_default_dtype(info):
    """torch's test_set_default_dtype_works_with_foreach."""
    before = torch.get_default_dtype()
    for dtype in (torch.float64, torch.float16):
        torch.set_default_dtype(dtype)
        try:
            param = Parameter(torch.tensor([1.0, 2.0], dtype=F32))
            optimizer = info.optim_cls([param])
            for _ in range(2):
                param.grad = torch.ones_like(param)
                optimizer.step()
        finally:
            torch.set_default_dtype(before)
        assert param.dtype is F32 and bool((param < torch.tensor([1.0, 2.0])).all())


@every_class
def test_a_parameter_that_is_given_twice(info):
    param, other = Parameter(torch.randn(5, 5)), Parameter(torch.randn(5, 5))
    with pytest.warns(UserWarning, match=".*duplicate parameters.*"):
        info.optim_cls([param, other, param])
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        info.optim_cls([{"params": [param]}, {"params": [param, other]}])


@every_class
def test_groups_that_are_added_while_training_run_with_schedulers(info):
    """torch's test_param_group_with_lrscheduler_goes_right_direction."""
    for makers in info.scheduler_inputs:
        torch.manual_seed(4)
        weight, data = Parameter(torch.randn(10, 5)), torch.randn(5)
        bias = Parameter(torch.randn(10))
        optimizer = info.optim_cls([weight], lr=0.01)
        optimizer.add_param_group({"params": [bias], "lr": 0.01})
        try:
            schedules = [make(optimizer) for make in makers]
        except (KeyError, ValueError):
            continue

        def closure():
            optimizer.zero_grad()
            loss = (weight.mv(data) + bias).pow(2).sum()
            loss.backward()
            return loss
        first = float(closure())
        for _ in range(20):
            value = optimizer.step(closure)
            for schedule in schedules:
                schedule.step(value) if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) else schedule.step()
        assert float(closure()) < first


@every_class
def test_inputs_of_any_iterable_and_refused_ones(info):
    made = info.optim_cls(iter([Parameter(torch.ones(2))]))
    assert len(made.param_groups[0]["params"]) == 1
    with pytest.raises(TypeError, match="params argument given to the optimizer should be an iterable"):
        info.optim_cls(Parameter(torch.ones(2)))
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        info.optim_cls([Parameter(torch.ones(2)) * 2])
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        info.optim_cls([])
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group|contains a parameter group"):
        one = info.optim_cls([Parameter(torch.ones(2))])
        one.load_state_dict(info.optim_cls([Parameter(torch.ones(2)), Parameter(torch.ones(2))]).state_dict())


@every_class
def test_zero_grad(info):
    params, optimizer, closure = model_and_step(info, {})
    closure()
    optimizer.zero_grad(set_to_none=False)
    assert all(torch.equal(param.grad, torch.zeros_like(param)) for param in params)
    optimizer.zero_grad()
    assert all(param.grad is None for param in params)


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
