"""States on a tier: state dicts and distributed checkpoints, in both directions, and where their values lie."""

import concurrent.futures
import copy
import io
import os

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from tier_runs import same, same_states, tier, train
from tier_worker import parameters
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import spillway
from spillway import torch as own


@pytest.mark.parametrize(
    "plain",
    [lambda params: own.AdamW(params, lr=1e-2, master="f32"), lambda params: torch.optim.AdamW(params, lr=1e-2)],
    ids=["spillway", "torch"],
)
def test_state_dicts_load_both_ways(tier, plain):
    ours, theirs = parameters(), parameters()
    mine, other = own.AdamW(ours, lr=1e-2, tier=tier), plain(theirs)
    train(mine, ours, range(3))
    file = io.BytesIO()
    torch.save({"model": [param.detach() for param in ours], "optimizer": mine.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for param, value in zip(theirs, saved["model"]):
        param.data.copy_(value)
    other.load_state_dict(saved["optimizer"])
    train(other, theirs, [3])
    assert float(other.state[theirs[0]]["step"]) == 4
    if isinstance(other, own.AdamW):
        train(mine, ours, [3])
        assert same(ours, theirs)
    with torch.no_grad():
        for one, two in zip(ours, theirs):
            one.copy_(two)
    mine.load_state_dict(other.state_dict())
    train(mine, ours, [4])
    train(other, theirs, [4])
    for one, two in zip(ours, theirs):
        torch.testing.assert_close(
            one, two, rtol=1e-5 if one.dtype is torch.float32 else 2e-2, atol=1e-6 if one.dtype is torch.float32 else 2e-2
        )
    assert float(mine.state[ours[0]]["step"]) == 5


def test_distributed_checkpoints(tier, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(200, 150), torch.nn.Linear(150, 3))
    optimizer = own.AdamW(model.parameters(), lr=1e-2, tier=tier)
    train(optimizer, list(model.parameters()), range(3))
    state = get_optimizer_state_dict(model, optimizer)
    checkpoint.save(state, checkpoint_id=tmp_path / "saved")
    twin = copy.deepcopy(model)
    plain = own.AdamW(twin.parameters(), lr=1e-2)
    loaded = get_optimizer_state_dict(twin, plain)
    checkpoint.load(loaded, checkpoint_id=tmp_path / "saved")
    set_optimizer_state_dict(twin, plain, loaded)
    for one, params in ((optimizer, model.parameters()), (plain, twin.parameters())):
        train(one, list(params), range(3, 5))
    assert same(model.parameters(), twin.parameters())
    set_optimizer_state_dict(model, optimizer, loaded)


def test_flattened_checkpoints_load_into_both_kinds(tier):
    """torch takes those names of a flattened state dict that it finds in `optimizer.state`."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model = torch.nn.Sequential(torch.nn.Linear(200, 150), torch.nn.Linear(150, 3).bfloat16())
    model[0].bias.requires_grad_(False)
    twin = copy.deepcopy(model)
    pair = [(model, own.AdamW(model.parameters(), lr=1e-2, tier=tier)), (twin, own.AdamW(twin.parameters(), lr=1e-2, master="f32"))]
    steps = iter(range(100))
    for there, back in (pair, pair[::-1], [pair[0]] * 2):
        train_both(pair, [next(steps)])
        saved = copy.deepcopy(get_optimizer_state_dict(*there, options=flat))
        weights = copy.deepcopy(there[0].state_dict())
        train_both(pair, [next(steps)])
        for one, optimizer in pair:
            one.load_state_dict(weights)
            set_optimizer_state_dict(one, optimizer, saved, options=flat)
        train_both(pair, [next(steps)])
        assert same(model.parameters(), twin.parameters())
        same_states(*(optimizer.state_dict()["state"] for _, optimizer in pair))


def train_both(pair, steps):
    for model, optimizer in pair:
        train(optimizer, [param for param in model.parameters() if param.requires_grad], steps)


def test_a_state_dict_keeps_its_values(tier):
    params = parameters()
    optimizer = own.AdamW(params, lr=1e-2, tier=tier)
    train(optimizer, params, range(2))
    first = optimizer.state_dict()["state"]
    before = copy.deepcopy(first)
    train(optimizer, params, range(2, 4))
    same_states(first, before)
    assert list(optimizer.state[params[0]].keys()) == ["step"], "moments are on the tier only"
    with pytest.raises(KeyError, match="exp_avg: this state is on the tier; optimizer.state_dict\\(\\) reads it"):
        optimizer.state[params[0]]["exp_avg"]
    optimizer.close()
    same_states(first, before)


def test_a_state_dict_after_a_change_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tier").mkdir()
    params = parameters()
    optimizer = own.AdamW(params, tier="tier")
    monkeypatch.chdir("/")
    train(optimizer, params, [0])
    optimizer.commit()
    assert optimizer.state_dict()["state"][2]["exp_avg"].any()
    optimizer.close()
    assert own.AdamW(parameters(), tier=tmp_path / "tier").resumed_step == 1


def mapped(value, directory):
    """True if the value is the map of a file in the directory that has no name."""
    with open("/proc/self/maps", encoding="utf-8") as lines:
        spans = [(line.split("-")[0], line.split("-")[1].split()[0], line) for line in lines if "(deleted)" in line]
    return any(int(start, 16) <= value.data_ptr() < int(end, 16) and str(directory) in line for start, end, line in spans)


def test_large_values_of_a_state_dict_are_in_the_directory_that_was_passed(tier, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "apart").mkdir()
    params = parameters()
    optimizer = own.AdamW(params, lr=1e-2, tier=tier._replace(state_dicts="apart"))
    monkeypatch.chdir("/")
    state = optimizer.state_dict()["state"]
    assert mapped(state[2]["exp_avg"], tmp_path / "apart") and not mapped(state[2]["exp_avg"], tier.paths[0])
    with pytest.raises(spillway.InvalidArgumentError, match="TierOptions: state_dicts is 'nowhere'; pass a directory, or None"):
        own.AdamW(parameters(), tier=tier._replace(job="other", state_dicts="nowhere"))


def test_large_values_of_a_state_dict_are_maps_of_files_without_a_name(tier, monkeypatch):
    params = parameters()
    optimizer = own.AdamW(params, lr=1e-2, tier=tier)
    train(optimizer, params, [0])
    state, first = optimizer.state_dict()["state"], tier.paths[0]
    assert mapped(state[2]["exp_avg"], first) and mapped(state[2]["master_param"], first) and not mapped(state[0]["exp_avg"], first)
    assert not [name for name in os.listdir(tier.paths[0]) if name.startswith("tmp")]

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="cannot make a file of 120004 bytes for a state dict: .*pass state_dicts to TierOptions"):
        optimizer.state_dict()
    train(optimizer, params, [1])


def test_a_state_dict_beside_steps_of_another_thread_sees_one_step(tier):
    ours, theirs = parameters(), parameters()
    mine, other = own.AdamW(ours, lr=1e-2, tier=tier), own.AdamW(theirs, lr=1e-2, master="f32")
    expected = []
    for step in range(40):
        train(other, theirs, [step])
        expected.append(copy.deepcopy(other.state_dict()["state"]))
    # The first step makes the states, so that no dict is seen before it.
    train(mine, ours, [0])
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        end = pool.submit(train, mine, ours, range(1, 40))
        seen = []
        while not end.done():
            seen.append(mine.state_dict()["state"])
            mine.commit()
        end.result()
    assert len({float(state[0]["step"]) for state in seen}) > 2
    for state in seen:
        same_states(state, expected[int(state[0]["step"]) - 1])
