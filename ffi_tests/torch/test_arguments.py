"""Keywords beyond torch with values of a wrong type or range, and state dicts with wrong step counts: both are refused before anything
changes."""

import copy

import pytest
import torch

import spillway
from spillway import torch as own

NAN = float("nan")


@pytest.mark.parametrize(
    "keyword, values",
    [
        ("rounding_seed", (1.5, -1, 2**64, "1", True)),
        ("undo", ("yes", 1, None)),
        ("skip_nonfinite", ("no", 0)),
        ("process_group", (5, "gloo")),
        ("max_norm", (-1, 0, NAN, "1", True)),
        ("memory_budget", ("x", 1.5, -1, True)),
        ("tier", (5, "", [], True, [5], b"x", ...)),
        ("moment_rounding", (1, [])),
        ("master", (True, ["f32"])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_keyword_with_a_wrong_value_is_named(keyword, values):
    for value in values:
        further = {"tier": [None]} if keyword == "memory_budget" else {}
        with pytest.raises(spillway.InvalidArgumentError, match=f"{keyword} is "):
            own.AdamW([torch.nn.Parameter(torch.zeros(10))], **{keyword: value}, **further)


@pytest.mark.parametrize(
    "field, value",
    [
        ("rank", "a"),
        ("rank", -1),
        ("world", 0),
        ("part_elements", True),
        ("ratio", "x"),
        ("turns", "x"),
        ("turns", True),
        ("pin_memory", "no"),
        ("io_timeout", "x"),
        ("io_timeout", NAN),
    ],
)
def test_a_field_of_tier_options_with_a_wrong_value_is_named(field, value):
    with pytest.raises(spillway.InvalidArgumentError, match=f"TierOptions: {field} is "):
        own.AdamW([torch.nn.Parameter(torch.zeros(10))], tier=own.TierOptions([None], **{field: value}))


def test_numbers_of_numpy_are_numbers():
    numpy = pytest.importorskip("numpy")
    own.AdamW([torch.nn.Parameter(torch.zeros(10))], max_norm=numpy.float32(1), rounding_seed=numpy.int64(3))


@pytest.mark.parametrize("beyond", [{}, {"master": "f32"}, {"tier": own.TierOptions([None], pin_memory=False)}], ids=str)
@pytest.mark.parametrize("step", [NAN, float("inf"), 1.5, -1, 1e30, None, "3", torch.zeros(2), "no step"], ids=str)
def test_a_wrong_step_count_is_named_and_nothing_is_loaded(beyond, step):
    params = [torch.nn.Parameter(torch.ones(50)) for _ in range(2)]
    optimizer = own.AdamW(params, lr=0.5, **beyond)
    for param in params:
        param.grad = torch.ones(50)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    loaded = copy.deepcopy(before)
    loaded["param_groups"][0]["lr"] = 9.0
    loaded["state"][0]["exp_avg"].fill_(7.0)
    if step == "no step":
        del loaded["state"][1]["step"]
    else:
        loaded["state"][1]["step"] = step if isinstance(step, (torch.Tensor, str, type(None))) else torch.tensor(step)
    with pytest.raises(spillway.InvalidArgumentError, match=r"state\[1\]\['step'\] is .*nothing was loaded"):
        optimizer.load_state_dict(loaded)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, state in before["state"].items():
        assert all(torch.equal(after["state"][number][key], value) for key, value in state.items())
    loaded["state"][1]["step"] = 3
    optimizer.load_state_dict(loaded)
    assert float(optimizer.state[params[1]]["step"]) == 3


@pytest.mark.parametrize("step", [torch.tensor(NAN), None, 3, torch.tensor([1.0, 2.0])], ids=str)
@pytest.mark.parametrize("beyond", [{}, {"tier": own.TierOptions([None], pin_memory=False)}], ids=["memory", "tier"])
def test_a_step_count_that_was_set_to_no_count_is_named_and_nothing_is_stepped(step, beyond):
    params = [torch.nn.Parameter(torch.ones(50)) for _ in range(2)]
    optimizer = own.AdamW([("first", params[0]), ("second", params[1])], lr=0.5, **beyond)
    for param in params:
        param.grad = torch.ones(50)
    optimizer.step()
    before = [param.detach().clone() for param in params]
    optimizer.state[params[1]]["step"] = step
    with pytest.raises(spillway.InvalidArgumentError, match=r"\(second\): its state 'step' is "):
        optimizer.step()
    assert all(map(torch.equal, params, before))


def test_lion_has_no_step_counts():
    optimizer = own.Lion([torch.nn.Parameter(torch.ones(5))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(5)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
