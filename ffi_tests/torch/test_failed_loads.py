"""A load, a step or a commit that fails changes nothing: every bit of parameters, states, step counts and options stays, and the run
continues with the bits of one in which nothing failed."""

import copy
import errno
import itertools

import pytest
import torch
from dcp_worker import new_model, tiered, train
from tier_runs import same, same_states

import spillway
from spillway import torch as own
from spillway.torch._states import Precision

BF16 = torch.bfloat16
MAKERS = {
    "memory": lambda model, _: own.AdamW(model.parameters(), lr=1e-2, master="f32", undo=True),
    "split": lambda model, _: own.AdamW(model.parameters(), lr=1e-2, master="split"),
    "offload": lambda model, _: own.offload(model, lr=1e-2),
    "tail": lambda model, _: own.offload(model, lr=1e-2, tail=1, bucket_bytes=1),
    "tier": tiered,
    "beside": lambda model, folder: tiered(model, folder, overlap=True),
}


def facts(model, optimizer):
    found = copy.deepcopy(optimizer.state_dict())
    return [param.detach().clone() for param in model.parameters()], found["state"], found["param_groups"]


def unchanged(before, after):
    assert same(before[0], after[0]) and before[2] == after[2]
    same_states(before[1], after[1])


def last(saved):
    """The last entry of a state dict: all before it fit."""
    return saved["state"][max(saved["state"])]


def without(name):
    return lambda saved: last(saved).pop(name)


def given(name, value):
    return lambda saved: last(saved).update({name: value})


#: What is wrong with a state dict.
WRONG = {
    "another shape": given("exp_avg_sq", torch.zeros(2)),
    "no tensor": given("exp_avg", "text"),
    "complex": lambda saved: last(saved).update(exp_avg_sq=last(saved)["exp_avg_sq"].to(torch.complex64)),
    "sparse": lambda saved: last(saved).update(exp_avg=last(saved)["exp_avg"].to_sparse()),
    "without memory": lambda saved: last(saved).update(exp_avg_sq=last(saved)["exp_avg_sq"].to("meta")),
    "no moment": without("exp_avg_sq"),
    "no step": without("step"),
    "half a step": given("step", torch.tensor(1.5)),
    "one parameter less": lambda saved: saved["param_groups"][0]["params"].pop(),
    "one group more": lambda saved: saved["param_groups"].append({**saved["param_groups"][0], "params": []}),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_state_dict_that_does_not_fit_changes_nothing(kind, wrong, tmp_path):
    if wrong == "complex" and kind in ("memory", "split"):
        pytest.skip("torch drops the imaginary part, with a warning")
    model, twin = new_model(BF16), new_model(BF16)
    optimizer, other = MAKERS[kind](model, tmp_path / "one"), MAKERS[kind](twin, tmp_path / "two")
    for each in ((model, optimizer), (twin, other)):
        train(*each, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    WRONG[wrong](saved)
    before = facts(model, optimizer)
    try:
        optimizer.load_state_dict(saved)
    except Exception:
        unchanged(before, facts(model, optimizer))
    else:
        # As torch's class, the one in memory finds out in step().
        assert kind in ("memory", "split")
        weights = [param.detach().clone() for param in model.parameters()]
        with pytest.raises((spillway.SpillwayError, ValueError, RuntimeError, KeyError)):
            train(model, optimizer, [2])
        assert same(weights, model.parameters())
        optimizer.load_state_dict({**copy.deepcopy(other.state_dict())})
    for each in ((model, optimizer), (twin, other)):
        train(*each, range(2, 4))
    unchanged(facts(model, optimizer), facts(twin, other))


@pytest.mark.parametrize("kind", ["memory", "split"])
def test_a_conversion_that_fails_after_torchs_load_changes_nothing(kind, tmp_path, monkeypatch):
    model = new_model(BF16)
    optimizer = MAKERS[kind](model, tmp_path)
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    before, weights = facts(model, optimizer), [param.detach().clone() for param in model.parameters()]
    calls, cast = itertools.count(), Precision.cast

    def fails(*arguments):
        if next(calls) == 3:
            raise MemoryError("no memory")
        cast(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Precision, "cast", fails)
        with pytest.raises(MemoryError):
            optimizer.load_state_dict(saved)
    unchanged(before, facts(model, optimizer))
    if kind == "memory":
        train(model, optimizer, [2])
        optimizer.rollback()
        assert same(model.parameters(), weights)


@pytest.mark.parametrize("kind", ["tier", "beside"])
@pytest.mark.parametrize("number", range(4))
def test_a_load_whose_writes_fail_leaves_the_last_commit(kind, number, tmp_path, monkeypatch):
    """Disk full at any write: options are those of before, every use of the states is an error, and rollback() returns to the commit."""
    model = new_model(BF16)
    optimizer = MAKERS[kind](model, tmp_path / "tier")
    train(model, optimizer, range(2))
    optimizer.commit()
    before, saved = facts(model, optimizer), copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    for state in saved["state"].values():
        state["exp_avg"].fill_(3)
    calls, write = itertools.count(), optimizer._home.tiered.write

    def fails(*arguments):
        if next(calls) == number:
            raise spillway.IoError(f"disk full: {errno.ENOSPC}", 0)
        write(*arguments)

    subgroups = len(optimizer._home.on_tier.layout.elements)
    with monkeypatch.context() as patched:
        patched.setattr(optimizer._home.tiered, "write", fails)
        if number >= subgroups:
            pytest.skip("there are fewer subgroups")
        with pytest.raises(spillway.IoError):
            optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    for use in (optimizer.commit, lambda: train(model, optimizer, [2]), optimizer.state_dict):
        with pytest.raises(spillway.SpillwayError):
            use()
    optimizer.rollback()
    unchanged(before, facts(model, optimizer))
    optimizer.close()


def test_a_closed_tier_refuses_everything_and_changes_no_weight(tmp_path):
    model = new_model(BF16)
    optimizer = tiered(model, tmp_path / "tier")
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    optimizer.close()
    weights = [param.detach().clone() for param in model.parameters()]
    counts = [float(state["step"]) for state in optimizer.state.values()]
    for use in (lambda: train(model, optimizer, [2]), lambda: optimizer.load_state_dict(saved), optimizer.commit, optimizer.rollback):
        with pytest.raises(spillway.SpillwayError):
            use()
    assert same(model.parameters(), weights) and counts == [float(state["step"]) for state in optimizer.state.values()]
    assert optimizer.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("kind", ["tier", "beside"])
def test_a_value_that_was_written_to_in_a_state_dict_is_an_error_until_it_is_loaded(kind, tmp_path):
    model = new_model(BF16)
    optimizer = MAKERS[kind](model, tmp_path / "tier")
    train(model, optimizer, range(2))
    optimizer.commit()
    before = facts(model, optimizer)
    for mend in ("load", "rollback"):
        saved = optimizer.state_dict()
        last(saved)["exp_avg"].view(-1)[0] = 3
        for use in (optimizer.commit, lambda: train(model, optimizer, [2]), lambda: optimizer.master(next(model.parameters()))):
            with pytest.raises(spillway.InvalidArgumentError, match="'exp_avg' was written to in a state dict"):
                use()
        unchanged(before, facts(model, optimizer))
        if mend == "load":
            optimizer.load_state_dict(saved)
            assert last(optimizer.state_dict())["exp_avg"].view(-1)[0] == 3
        else:
            # Also of values that the program has dropped.
            del saved
        optimizer.rollback()
        unchanged(before, facts(model, optimizer))
    train(model, optimizer, [2])
    optimizer.close()


@pytest.mark.parametrize("kind", ["tier", "beside"])
@pytest.mark.parametrize("change", ["shape", "dtype", "strides"])
def test_a_parameter_that_cannot_take_its_weights_is_refused_before_another_one_does(kind, change, tmp_path):
    model = new_model(BF16)
    optimizer = MAKERS[kind](model, tmp_path / "tier")
    train(model, optimizer, range(2))
    optimizer.commit()
    optimizer.snapshot(tmp_path / "snapshot").wait()
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, [2])
    before, param = facts(model, optimizer), model[2].weight
    own_data = param.data
    param.data = {"shape": torch.zeros(7), "dtype": own_data.double(), "strides": torch.zeros(3, 14)[:, ::2]}[change]
    weights = [other.detach().clone() for other in model.parameters()]
    for use in (
        optimizer.rollback,
        lambda: optimizer.restore(tmp_path / "snapshot"),
        lambda: optimizer.load_state_dict(saved),
        optimizer.commit,
    ):
        with pytest.raises((spillway.InvalidArgumentError, spillway.UnsupportedError), match="params'\\]\\[4\\]"):
            use()
        assert same(weights, model.parameters())
    param.data = own_data
    unchanged(before, facts(model, optimizer))
    optimizer.rollback()
    same_states(optimizer.state_dict()["state"], saved["state"])
