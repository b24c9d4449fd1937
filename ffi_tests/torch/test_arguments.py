"""The arguments of the optimizer classes: tools see them, those that can be set later have an effect, and the repr tells them. Keywords
beyond torch with values of a wrong type or range, and state dicts with wrong step counts, are refused before anything changes."""

import copy
import functools
import inspect
import pickle
import re

import pytest
import torch

import spillway
from spillway import pipeline
from spillway import torch as own
from spillway.torch import _keywords

NAN = float("nan")


@pytest.mark.parametrize(
    "keyword, values",
    [
        ("rounding_seed", (1.5, -1, 2**64, "1", True)),
        ("undo", ("yes", 1, None)),
        ("skip_nonfinite", ("no", 0)),
        ("process_group", (5, "gloo")),
        ("max_norm", (-1, 0, NAN, "1", True)),
        ("host_memory", ("x", 1.5, -1, True)),
        ("tier", (5, "", [], True, [5], b"x", ...)),
        ("moment_rounding", (1, [])),
        ("master", (True, ["f32"])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_keyword_with_a_wrong_value_is_named(keyword, values):
    for value in values:
        further = {"tier": [None]} if keyword == "host_memory" else {}
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
        ("progress", 7),
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


@pytest.mark.parametrize("kind", [own.Lion, own.Signum])
def test_optimizers_by_signs_have_no_step_counts(kind):
    optimizer = kind([torch.nn.Parameter(torch.ones(5))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(5)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())


CLASSES = [
    (own.Adam, torch.optim.Adam),
    (own.AdamW, torch.optim.AdamW),
    (own.Adagrad, torch.optim.Adagrad),
    (own.Lion, None),
    (own.Signum, None),
]


@pytest.mark.parametrize("kind, theirs", CLASSES, ids=lambda kind: getattr(kind, "__name__", ""))
def test_a_signature_has_the_arguments_of_torch_and_then_the_keywords_beyond_it(kind, theirs):
    shape = lambda signature: [(name, param.kind, param.default) for name, param in signature.parameters.items()]
    found = shape(inspect.signature(kind))
    beyond = [(name, inspect.Parameter.KEYWORD_ONLY, default) for name, default in _keywords.DEFAULTS.items()]
    assert found[-len(beyond) :] == beyond
    if theirs is not None:
        assert found[: -len(beyond)] == shape(inspect.signature(theirs))
    assert [*_keywords.Beyond.__annotations__] == [*_keywords.DEFAULTS]


@pytest.mark.parametrize("kind", [kind for kind, _ in CLASSES] + [own.offload, own.TierOptions], ids=lambda kind: kind.__name__)
def test_the_description_of_a_class_names_every_argument(kind):
    section = re.split(r"\n\n    (?:Returns|Raises|Example)", re.split("Args:|Attributes:", kind.__doc__)[1])[0]
    named = {name.strip() for names in re.findall(r"^\s+([\w, ]+):", section, re.M) for name in names.split(",")}
    assert named >= set(inspect.signature(kind).parameters) and kind.__doc__.strip()


def test_subclasses_of_programs_have_the_signature_of_their_own_constructor():
    class Mine(own.AdamW):
        def __init__(self, params, name):
            super().__init__(params, lr=0.5)

    class Like(own.AdamW):
        pass

    assert [*inspect.signature(Mine).parameters] == ["params", "name"]
    assert inspect.signature(Like) == inspect.signature(own.AdamW) == inspect.signature(pipeline.StageAdamW)
    assert Mine([parameter()], "x").param_groups[0]["lr"] == 0.5
    assert functools.partial(Like, lr=0.25)([parameter()]).defaults["lr"] == 0.25


@pytest.mark.parametrize("kind", [kind for kind, _ in CLASSES], ids=lambda kind: kind.__name__)
def test_an_unknown_keyword_is_refused_in_the_words_of_torch(kind):
    with pytest.raises(TypeError, match=rf"{kind.__name__}.__init__\(\) got an unexpected keyword argument 'max_nrom'"):
        kind([parameter()], max_nrom=1.0)


def parameter(length=10):
    param = torch.nn.Parameter(torch.ones(length))
    param.grad = torch.ones(length)
    return param


def test_a_keyword_that_is_set_later_has_the_effect_of_the_constructor():
    later, given = [own.AdamW([parameter()], lr=0.5, **beyond) for beyond in ({}, {"max_norm": 0.25, "undo": True})]
    later.max_norm, later.undo = 0.25, True
    for optimizer in (later, given):
        optimizer.step()
    assert later.grad_norm == given.grad_norm is not None
    assert torch.equal(later.param_groups[0]["params"][0], given.param_groups[0]["params"][0])
    later.rollback()
    assert torch.equal(later.param_groups[0]["params"][0].detach(), torch.ones(10))


@pytest.mark.parametrize(
    "name, value", [("max_norm", -1.0), ("max_norm", "1"), ("undo", 1), ("skip_nonfinite", None), ("process_group", 5)]
)
def test_a_wrong_value_that_is_set_later_is_named_and_changes_nothing(name, value):
    optimizer = own.AdamW([parameter()])
    before = getattr(optimizer, name)
    with pytest.raises(spillway.InvalidArgumentError, match=f"{name} is "):
        setattr(optimizer, name, value)
    assert getattr(optimizer, name) == before


@pytest.mark.parametrize("name", sorted(_keywords.DEFAULTS.keys() - {"max_norm", "undo", "skip_nonfinite", "process_group"}))
def test_a_keyword_that_is_fixed_at_construction_cannot_be_set(name):
    optimizer = own.AdamW([parameter()])
    with pytest.raises(AttributeError, match=f"AdamW.{name} is fixed at construction"):
        setattr(optimizer, name, _keywords.DEFAULTS[name])


@pytest.mark.parametrize("name", ["grad_norm", "skipped", "resumed_step", "payload"])
def test_what_an_optimizer_tells_of_itself_cannot_be_set(name):
    for optimizer in (own.AdamW([parameter()]), own.offload([parameter()]), own.Staged(torch.optim.SGD, [parameter()], lr=0.1)):
        if hasattr(optimizer, name):
            with pytest.raises(AttributeError):
                setattr(optimizer, name, 3)


def test_undo_is_set_where_steps_can_be_rolled_back_only():
    on_tier = own.AdamW([parameter()], tier=own.TierOptions([None], pin_memory=False))
    with pytest.raises(spillway.UnsupportedError):
        on_tier.undo = True
    assert on_tier.undo is False
    on_tier.undo = False
    for keywords in ({"master": "split"}, {"moment_dtype": "int8"}):
        param = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        narrow = own.AdamW([param], lr=0.1, **keywords)
        narrow.undo = True
        param.grad = torch.ones_like(param)
        narrow.step()
        assert (param < 1).all()
        narrow.rollback()
        assert (param == 1).all()
    on_tier.close()


def test_the_repr_tells_the_keywords_beyond_torch():
    plain = repr(own.AdamW([parameter()]))
    assert plain.startswith("AdamW (\n    max_norm: None\n    master: None\n    tier: None\nParameter Group 0\n    amsgrad: False\n")
    rich = own.AdamW([parameter()], max_norm=2.0, moment_dtype=torch.bfloat16, moment_rounding="stochastic", rounding_seed=3)
    for line in ("max_norm: 2.0", "moment_dtype: torch.bfloat16", "moment_rounding: stochastic", "rounding_seed: 3"):
        assert f"\n    {line}\n" in repr(rich)
    assert repr(copy.deepcopy(rich)) == repr(pickle.loads(pickle.dumps(rich))) == repr(rich)
    assert repr(own.AdamW.__new__(own.AdamW)) == "<AdamW not constructed>"


def test_the_repr_of_states_on_a_tier_tells_where_and_whether_it_is_closed(tmp_path):
    optimizer = own.AdamW([parameter()], tier=own.TierOptions([tmp_path], pin_memory=False), overlap=True)
    assert f"tier: [{str(tmp_path)!r}]" in repr(optimizer) and "overlap: True" in repr(optimizer) and "closed" not in repr(optimizer)
    optimizer.close()
    assert "closed: True" in repr(optimizer)


def test_the_repr_of_offload_tells_its_keywords():
    optimizer = own.offload(torch.nn.Linear(2, 2), max_norm=2.0, verdict="step", tail=1)
    assert repr(optimizer).startswith("Offloaded (\n    max_norm: 2.0\n    tail: 1\nParameter Group 0\n")
    optimizer.close()
    assert "closed: True" in repr(optimizer)
    flow = own.Flow(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), "cpu")
    assert repr(flow).startswith("<Flow device='cpu', units=2, unit_bytes=")
    flow.remove()
