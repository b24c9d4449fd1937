"""The checks of torch's own optimizer suite on spillway.torch's classes: parameters, groups, hooks and printing."""

import copy

import pytest
import torch
import torch.optim.optimizer as optimizer_module
from torch.nn import Parameter
from torch_suite import F32, closure_of, every_class, every_input, first_and_last_loss, inputs, model_and_step


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
        first, last = first_and_last_loss(optimizer, closure_of(optimizer, weight, bias, data), schedules)
        assert last < first


@every_class
def test_a_parameter_that_is_given_twice(info):
    param, other = Parameter(torch.randn(5, 5)), Parameter(torch.randn(5, 5))
    with pytest.warns(UserWarning, match=".*duplicate parameters.*"):
        info.optim_cls([param, other, param])
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        info.optim_cls([{"params": [param]}, {"params": [param, other]}])


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


@every_input
def test_an_optimizer_is_printed(info, kwargs):
    _, optimizer, closure = model_and_step(info, kwargs)
    text = str(optimizer)
    assert text == repr(optimizer) and info.optim_cls.__name__ in text
    for name, value in optimizer.param_groups[0].items():
        assert name == "params" or f"{name}: {value}" in text
    optimizer.step(closure)
    str(optimizer)


@every_class
def test_pre_and_post_hooks_of_steps(info):
    _, optimizer, closure = model_and_step(info, {})
    calls, seen = [], []

    def pre(one, args, kwargs):
        calls.append("pre")
        seen.append((one, args))

    def changing(one, args, kwargs):
        return args, {**kwargs, "closure": kwargs["closure"]}

    handles = [
        optimizer.register_step_pre_hook(pre),
        optimizer.register_step_pre_hook(changing),
        optimizer.register_step_post_hook(lambda *_: calls.append("post")),
    ]
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
def test_zero_grad(info):
    params, optimizer, closure = model_and_step(info, {})
    closure()
    optimizer.zero_grad(set_to_none=False)
    assert all(torch.equal(param.grad, torch.zeros_like(param)) for param in params)
    optimizer.zero_grad()
    assert all(param.grad is None for param in params)
