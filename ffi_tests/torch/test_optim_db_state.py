"""The checks of torch's own optimizer suite on spillway.torch's classes: state dicts, files and copies."""

import copy
import io

import pytest
import torch
from torch.nn import Parameter
from torch_suite import equal_trees, every_class, every_input, model_and_step


@every_input
def test_equal_runs_have_equal_state_dicts(info, kwargs):
    """torch's test_state_dict_deterministic: two runs that continue from one state dict have equal states; parameters may be cast in
    between."""
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
        if info.supported_impls and flag in optimizer.defaults:
            assert flag in optimizer.param_groups[0]


@every_input
def test_a_step_count_that_is_a_number_loads(info, kwargs):
    """torch's test_load_nontensor_step: old checkpoints have numbers as step counts."""
    if not info.supported_impls:
        pytest.skip("no step count")
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
