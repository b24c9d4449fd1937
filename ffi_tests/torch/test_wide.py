"""wide_state_dict: an optimizer with narrow states saves what torch's class and the default states load, with the values that it has."""

import pytest
import torch
from test_narrow_rollback import KINDS, gradients, params

from spillway import torch as own

CLASSES = {
    "AdamW": lambda params, **kind: own.AdamW(params, lr=1e-2, **kind),
    "offload": lambda params, **kind: own.offload(params, lr=1e-2, **kind),
}
WIDE = {"f32": {"master": "f32"}, "bf16": {"master": "f32", "moment_dtype": "bf16"}}


def trained(make, steps=3, **kind):
    ours = params()
    optimizer = make(ours, **kind)
    train(optimizer, ours, range(steps))
    return ours, optimizer


def train(optimizer, ours, steps):
    for step in steps:
        gradients(ours, step)
        optimizer.step()


@pytest.mark.parametrize("make", CLASSES.values(), ids=CLASSES)
@pytest.mark.parametrize("kind", [*KINDS.values(), *WIDE.values()], ids=[*KINDS, *WIDE])
def test_torch_and_default_states_go_on_from_it(make, kind):
    ours, optimizer = trained(make, **kind)
    saved = own.wide_state_dict(optimizer)
    for number, param in enumerate(ours):
        state = saved["state"][number]
        assert sorted(state) == ["exp_avg", "exp_avg_sq", "master_param", "step"]
        assert all(value.dtype is torch.float32 and value.shape in (param.shape, ()) for value in state.values())
        # The master rounds to the parameter. At a tie that is either neighbour.
        apart = state["master_param"].view(torch.int32) - (param.detach().view(torch.int16).to(torch.int32) << 16)
        assert int(apart.abs().max()) <= 0x8000 and bool(apart.any())
    theirs = [torch.nn.Parameter(param.detach().clone()) for param in ours]
    torchs = torch.optim.AdamW(theirs, lr=1e-2)
    torchs.load_state_dict(saved)
    train(torchs, theirs, [3])
    assert all(torch.equal(torchs.state[param]["step"], torch.tensor(4.0)) for param in theirs)
    for other in CLASSES.values():
        copies = [torch.nn.Parameter(param.detach().clone()) for param in ours]
        wide = other(copies, master="f32")
        wide.load_state_dict(saved)
        assert all(torch.equal(saved["state"][n]["exp_avg"], wide.state_dict()["state"][n]["exp_avg"]) for n in range(len(ours)))
        train(wide, copies, [3])


@pytest.mark.parametrize("make", CLASSES.values(), ids=CLASSES)
def test_a_split_master_goes_on_with_the_bits_of_a_whole_one(make):
    whole, reference = trained(make, master="f32")
    ours, optimizer = trained(make, master="split")
    other = make(ours, master="f32")
    other.load_state_dict(own.wide_state_dict(optimizer))
    train(other, ours, range(3, 6))
    train(reference, whole, range(3, 6))
    assert all(torch.equal(*pair) for pair in zip(ours, whole, strict=True))


def test_groups_and_parameters_without_a_state_stay_as_they_are():
    ours = params()
    optimizer = own.AdamW(
        [{"params": ours[:2], "lr": 1e-3}, {"params": ours[2:], "weight_decay": 0.5}], moment_dtype="int8", master="split"
    )
    gradients(ours, 0)
    ours[1].grad = None
    optimizer.step()
    saved = own.wide_state_dict(optimizer)
    assert saved["param_groups"] == optimizer.state_dict()["param_groups"] and sorted(saved["state"]) == [0, 2, 3]
    other = own.AdamW([{"params": ours[:2]}, {"params": ours[2:]}], master="f32")
    other.load_state_dict(saved)
    assert [group["lr"] for group in other.param_groups] == [1e-3, 1e-3] and [group["weight_decay"] for group in other.param_groups] == [
        1e-2,
        0.5,
    ]
