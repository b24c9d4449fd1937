"""offload() follows a program that changes its groups, its gradients' sign, or its weights between the calls of a step."""

import sys

import pytest
import torch
from interrupts import Interrupt
from offload_runs import backward

import spillway.torch
from spillway.torch._offload.prepared import _AT_ONCE

BF16 = torch.bfloat16
WAYS = {
    "waits": {"overlap": False},
    "overlaps": {"overlap": True},
    "one bucket each": {"overlap": True, "bucket_bytes": 1},
    "tail": {"overlap": True, "bucket_bytes": 1, "tail": 2},
}


def to_new_group(optimizer, params):
    optimizer.param_groups[1]["params"] = []
    optimizer.add_param_group({"params": [params[2]], "lr": 1e-4})


def empty_group_in_front(optimizer, params):
    optimizer.param_groups.insert(0, {**optimizer.param_groups[0], "params": [], "lr": 0.5})


def delete_the_first(optimizer, params):
    optimizer.param_groups[1]["params"] = [*optimizer.param_groups[0]["params"], *optimizer.param_groups[1]["params"]]
    del optimizer.param_groups[0]


def exchange(optimizer, params):
    first, second = optimizer.param_groups
    first["params"], second["params"] = second["params"], first["params"]


def maximize_one(optimizer, params):
    optimizer.param_groups[1]["maximize"] = True


CHANGES = [to_new_group, empty_group_in_front, delete_the_first, exchange, maximize_one]


@pytest.mark.parametrize("when", ["before backward", "after backward"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_changed_groups_train_as_torchs_class(way, change, when):
    def trained(make):
        params = [torch.nn.Parameter(torch.linspace(-1, 1, count)) for count in (5, 7, 9)]
        optimizer = make([{"params": params[:2], "lr": 1e-1}, {"params": params[2:], "lr": 1e-2}])
        for step in range(6):
            optimizer.zero_grad()
            if step == 3 and when == "before backward":
                change(optimizer, params)
            backward(params)
            if step == 3 and when == "after backward":
                change(optimizer, params)
            optimizer.step()
        return params

    seen = trained(lambda groups: spillway.torch.offload(groups, torch.optim.AdamW, max_norm=None, **WAYS[way]))
    wanted = trained(torch.optim.AdamW)
    for one, other in zip(seen, wanted):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("write", ["copy", "data", "assign"])
@pytest.mark.parametrize("way", WAYS)
def test_weights_that_are_perturbed_for_backward_alone_lose_no_master(way, write):
    """Sharpness-aware minimization: the gradient is that of perturbed weights, and the step begins at the others."""

    def put(param, values):
        with torch.no_grad():
            if write == "copy":
                param.copy_(values)
            elif write == "data":
                param.data.copy_(values)
            else:
                param.data = values.clone()

    def trained(options):
        generator = torch.Generator().manual_seed(1)
        params = [torch.nn.Parameter(torch.randn(48, generator=generator).to(BF16)) for _ in range(3)]
        optimizer = spillway.torch.offload(params, torch.optim.AdamW, lr=1e-4, **options)
        for _ in range(8):
            optimizer.zero_grad()
            before = [param.detach().clone() for param in params]
            for param in params:
                put(param, param.detach() * 1.5)
            backward(params)
            for param, values in zip(params, before):
                put(param, values)
            optimizer.step()
        return [state[name] for state in optimizer.state_dict()["state"].values() for name in ("master_param", "exp_avg", "exp_avg_sq")]

    assert all(map(torch.equal, trained(WAYS[way]), trained(WAYS["waits"])))


def interrupted_at_line(work, at):
    """Runs work(), and raises Interrupt before line number `at` of the optimizer that it reaches. True if it was raised."""
    left = at

    def trace(frame, event, _):
        nonlocal left
        if not frame.f_code.co_filename.endswith(("_offload/optimizer.py", "_offload/steps.py", "_offload/parameters.py")):
            return None
        if event == "line":
            left -= 1
            if left == -1:
                raise Interrupt
        return trace

    sys.settrace(trace)
    try:
        work()
    except Interrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_an_interrupted_load_leaves_nothing_to_the_next_one():
    param = torch.nn.Parameter(torch.ones(6, dtype=BF16))
    optimizer = spillway.torch.offload([param], torch.optim.AdamW, lr=1e-2)
    param.grad = torch.ones_like(param)
    optimizer.step()
    saved = optimizer.state_dict()
    saved = {**saved, "state": {key: {name: value.clone() for name, value in one.items()} for key, one in saved["state"].items()}}
    for at in range(500):
        if not interrupted_at_line(lambda: optimizer.load_state_dict(saved), at):
            break
        optimizer.load_state_dict(saved)
        [state] = optimizer.state_dict()["state"].values()
        assert all(torch.equal(state[name], value) for name, value in saved["state"][0].items())
    assert 20 < at < 499


def test_a_step_without_gradients_says_nothing_of_weights_that_were_written_before_it():
    model = torch.nn.Linear(3, 3)
    optimizer = spillway.torch.offload(model, torch.optim.AdamW, lr=1e-2, verdict="forward", overlap=True)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    optimizer.settle()
    optimizer.zero_grad()
    with torch.no_grad():
        model.weight.fill_(2.0)
    optimizer.step()
    assert torch.equal(model(torch.zeros(1, 3)), model.bias.detach()[None])
    assert bool((model.weight == 2).all())


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_that_becomes_its_own_transpose_is_seen(way):
    """Neither address nor version nor sum of a square parameter changes."""

    def trained(make):
        param = torch.nn.Parameter(torch.arange(9.0).view(3, 3) / 9)
        optimizer = make([param])
        for step in range(4):
            optimizer.zero_grad()
            if step == 2:
                param.data = param.data.t()
            (param * torch.arange(9.0).view(3, 3)).sum().backward()
            optimizer.step()
        return param.detach()

    seen = trained(lambda params: spillway.torch.offload(params, torch.optim.AdamW, lr=1e-2, weight_decay=0.0, **WAYS[way]))
    wanted = trained(lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0))
    torch.testing.assert_close(seen, wanted, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["step", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("way", WAYS)
def test_a_state_that_gets_other_memory_is_stepped_there(way, name):
    """Neither object nor version of the tensor changes. It is one of the last block of parameters that are checked at once."""

    def trained(make):
        params = [torch.nn.Parameter(torch.linspace(-1, 1, 3)) for _ in range(_AT_ONCE + 5)]
        optimizer = make(params)
        for _ in range(4):
            optimizer.zero_grad()
            backward(params)
            state = optimizer.state.get(params[-1], {})
            for tensor in (state[key] for key in state if key == name):
                tensor.data = tensor.data + 1
            optimizer.step()
        return params, [int(optimizer.state[param]["step"]) for param in params]

    seen, counts = trained(lambda params: spillway.torch.offload(params, torch.optim.AdamW, lr=1e-2, **WAYS[way]))
    wanted, same = trained(lambda params: torch.optim.AdamW(params, lr=1e-2))
    assert counts == same
    for one, other in zip(seen, wanted):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_of_another_kind_is_seen_among_many(way):
    """The step before has found all gradients to be of one kind."""

    def trained(make):
        params = [torch.nn.Parameter(torch.linspace(-1, 1, 4).view(2, 2)) for _ in range(_AT_ONCE + 5)]
        optimizer = make(params)
        for step in range(4):
            optimizer.zero_grad()
            backward(params)
            if step == 2:
                params[-1].grad = torch.arange(4.0).view(2, 2).t()
            optimizer.step()
        return params

    seen = trained(lambda params: spillway.torch.offload(params, torch.optim.AdamW, lr=1e-2, **WAYS[way]))
    wanted = trained(lambda params: torch.optim.AdamW(params, lr=1e-2))
    for one, other in zip(seen, wanted):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-6)
