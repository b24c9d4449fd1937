"""What is made in torch.inference_mode and lives on: states, masters, step counts and memory of copies are ordinary tensors, so that later
steps have the bits of a run outside of that mode."""

import io

import pytest
import torch
from dcp_worker import new_model, tiered, train
from tier_runs import same, same_states

from spillway import torch as own
from spillway.errors import InvalidArgumentError, UnsupportedError

BF16 = torch.bfloat16
MAKERS = {
    "memory": lambda model, _: own.AdamW(model.parameters(), lr=1e-2, master="f32", undo=True),
    "moments": lambda model, _: own.AdamW(model.parameters(), lr=1e-2, moment_dtype=BF16, master="f32"),
    "split": lambda model, _: own.AdamW(model.parameters(), lr=1e-2, master="split"),
    "offload": lambda model, _: own.offload(model, lr=1e-2, max_norm=1.0),
    "tail": lambda model, _: own.offload(model, lr=1e-2, tail=1, bucket_bytes=1),
    "forward": lambda model, _: own.offload(model, lr=1e-2, verdict="forward"),
    "tier": tiered,
}


def from_file(optimizer):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file)


DOES = {
    "loads its own state dict": lambda model, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "loads a file": lambda model, optimizer: optimizer.load_state_dict(from_file(optimizer)),
    # Gradients are made outside of the mode: torch counts no writes to those of the mode.
    "steps": lambda model, optimizer: optimizer.step(),
    "asks for masters": lambda model, optimizer: [optimizer.master(param) for param in model.parameters()],
    "settles": lambda model, optimizer: optimizer.settle(),
    "evaluates": lambda model, optimizer: [layer(torch.ones(layer.in_features, dtype=layer.weight.dtype)) for layer in model],
    "commits": lambda model, optimizer: optimizer.commit(),
    "rolls back": lambda model, optimizer: optimizer.rollback(),
}
LACKING = {
    "asks for masters": ("offload", "tail", "forward"),
    "settles": ("memory", "moments", "split", "tier"),
    "commits": set(MAKERS) - {"tier"},
    "rolls back": set(MAKERS) - {"memory", "tier"},
}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("what", DOES)
@pytest.mark.parametrize("new", [False, True], ids=["stepped", "new"])
def test_what_happens_in_inference_mode_changes_no_bit_of_the_run(kind, what, new, tmp_path):
    if kind in LACKING.get(what, ()) or (new and what == "rolls back"):
        pytest.skip("there is no such call")
    results = []
    for mode in (False, True):
        model = new_model(BF16)
        optimizer = MAKERS[kind](model, tmp_path / f"tier-{mode}")
        if not new:
            train(model, optimizer, range(2))
            if what == "rolls back" and kind == "tier":
                optimizer.commit()
        gradients(model, 7)
        with torch.inference_mode(mode):
            DOES[what](model, optimizer)
        train(model, optimizer, range(2, 4))
        states = optimizer.state_dict()["state"]
        assert not any(value.is_inference() for state in states.values() for value in state.values())
        results.append(([param.detach().clone() for param in model.parameters()], states))
        if kind == "tier":
            optimizer.commit()
            optimizer.close()
    assert same(results[0][0], results[1][0])
    same_states(results[0][1], results[1][1])


def gradients(model, step):
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.1 * step)


@pytest.mark.parametrize("kind", MAKERS)
def test_an_optimizer_that_is_made_in_inference_mode_trains(kind, tmp_path):
    results = []
    for mode in (False, True):
        model = new_model(BF16)
        with torch.inference_mode(mode):
            optimizer = MAKERS[kind](model, tmp_path / f"tier-{mode}")
        train(model, optimizer, range(3))
        results.append((list(model.parameters()), optimizer.state_dict()["state"]))
    assert same(results[0][0], results[1][0])
    same_states(results[0][1], results[1][1])


@pytest.mark.parametrize("kind", ["offload", "tier"])
@pytest.mark.parametrize("name", ["step", "exp_avg"])
def test_a_state_that_was_made_in_inference_mode_is_refused_before_anything_is_stepped(kind, name, tmp_path):
    if (kind, name) == ("tier", "exp_avg"):
        pytest.skip("the moments are on the tier")
    model = new_model(BF16)
    optimizer = MAKERS[kind](model, tmp_path / "tier")
    train(model, optimizer, range(2))
    before = [param.detach().clone() for param in model.parameters()]
    with torch.inference_mode():
        state = optimizer.state[next(iter(model.parameters()))]
        state[name] = state[name].clone()
    with pytest.raises(InvalidArgumentError, match="inference_mode"):
        train(model, optimizer, [2])
    assert same(model.parameters(), before)


def test_parameters_of_inference_mode_are_refused(tmp_path):
    with torch.inference_mode():
        model = new_model()
    with pytest.raises(UnsupportedError, match="was made in torch.inference_mode"):
        tiered(model, tmp_path / "tier")
