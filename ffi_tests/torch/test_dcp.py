"""Checkpoints of torch.distributed.checkpoint whose values move one by one between a tier and the files: their bits, in other numbers of
processes and with torch's own functions, and what is in memory meanwhile."""

import os
import pathlib
import weakref

import dcp_worker
import processes
import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from dcp_worker import load, new_model, state_of, tiered, train
from tier_runs import same, same_states
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import spillway
from spillway import torch as own
from spillway.errors import UnsupportedError
from spillway.torch import dcp
from spillway.torch._dcp_codes import conversions
from spillway.torch._tier import Reading

WORKER = pathlib.Path(dcp_worker.__file__)
BF16 = torch.bfloat16


def in_memory(model):
    return own.AdamW(model.parameters(), lr=1e-2, master="f32")


def by_torch(model, optimizer, directory):
    """Loads a checkpoint by torch's functions."""
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    checkpoint.load(state, checkpoint_id=directory)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])


def saved_by_torch(model, optimizer, directory):
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    checkpoint.save(state, checkpoint_id=directory)


def test_one_two_and_one_processes_have_the_bits_of_one_run(tmp_path):
    whole, model = new_model(BF16), new_model(BF16)
    uninterrupted, optimizer = in_memory(whole), tiered(model, tmp_path / "tier")
    train(whole, uninterrupted, range(6))
    train(model, optimizer, range(2))
    dcp.save(state_of(model, optimizer), tmp_path / "first")
    optimizer.close()
    done = processes.run(WORKER, 2, tmp_path, "2", "4")
    assert done.stdout.count("saved\n") == 2 and done.returncode == 0, done
    assert len(list((tmp_path / "second").glob("*.distcp"))) == 2
    for number, (made, loads) in enumerate(((lambda model: tiered(model, tmp_path / "last"), load), (in_memory, by_torch))):
        model = new_model(BF16)
        optimizer = made(model)
        loads(model, optimizer, tmp_path / "second")
        train(model, optimizer, range(4, 6))
        assert same(model.parameters(), whole.parameters()), number
        same_states(optimizer.state_dict()["state"], uninterrupted.state_dict()["state"])
        optimizer.close()


def test_torchs_optimizer_and_a_tier_load_what_the_other_has_saved(tmp_path):
    model, twin = new_model(), new_model()
    optimizer, plain = tiered(model, tmp_path / "tier"), torch.optim.AdamW(twin.parameters(), lr=1e-2)
    train(model, optimizer, range(3))
    dcp.save(state_of(model, optimizer), tmp_path / "ours")
    by_torch(twin, plain, tmp_path / "ours")
    assert same(twin.parameters(), model.parameters())
    same_states(plain.state_dict()["state"], optimizer.state_dict()["state"])
    train(twin, plain, range(3, 5))
    saved_by_torch(twin, plain, tmp_path / "theirs")
    load(model, optimizer, tmp_path / "theirs")
    assert same(twin.parameters(), model.parameters())
    same_states(optimizer.state_dict()["state"], plain.state_dict()["state"])
    assert optimizer._home.tiered.committed_step == 3, "the number of the optimizer's own steps"
    optimizer.close()


def test_masters_that_a_checkpoint_lacks_have_the_values_of_the_parameters(tmp_path):
    """torch's AdamW has moments of 16 bits and no masters for parameters of 16 bits."""
    model, twin = new_model(BF16), new_model(BF16)
    optimizer, plain = tiered(model, tmp_path / "tier"), torch.optim.AdamW(twin.parameters(), lr=1e-2)
    train(twin, plain, range(2))
    saved_by_torch(twin, plain, tmp_path / "theirs")
    train(model, optimizer, range(1))
    load(model, optimizer, tmp_path / "theirs")
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(optimizer.master(param), other.float())
        state = optimizer.state_dict()["state"]
    for number, state in plain.state_dict()["state"].items():
        mine = optimizer.state_dict()["state"][number]
        assert all(torch.equal(mine[key], state[key].float()) for key in ("exp_avg", "exp_avg_sq", "step"))
    optimizer.close()


def test_flattened_state_dicts_and_frozen_parameters(tmp_path):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, twin = new_model(BF16), new_model(BF16)
    model[0].bias.requires_grad_(False)
    twin[0].bias.requires_grad_(False)
    optimizer, other = tiered(model, tmp_path / "one"), tiered(twin, tmp_path / "two")
    params = [param for param in model.parameters() if param.requires_grad]
    for step in range(2):
        for number, param in enumerate(params):
            param.grad = torch.full_like(param, 1.0 + number + step)
        optimizer.step()
    dcp.save({"model": get_model_state_dict(model), **dcp.states(model, optimizer, options)}, tmp_path / "saved")
    state = {"model": get_model_state_dict(twin), **dcp.states(twin, other, options)}
    dcp.load(state, tmp_path / "saved")
    set_model_state_dict(twin, state.pop("model"))
    set_optimizer_state_dict(twin, other, state, options=options)
    same_states(other.state_dict()["state"], optimizer.state_dict()["state"])
    for each in (optimizer, other):
        each.close()


def test_values_are_in_memory_for_one_parameter(tmp_path, monkeypatch):
    model = new_model(BF16)
    optimizer, alive, numbers = tiered(model, tmp_path / "tier"), [], set()
    train(model, optimizer, range(2))
    plain = Reading.value

    def noted(self, number, key):
        value = plain(self, number, key)
        alive.append((number, weakref.ref(value)))
        numbers.add(number)
        assert {other for other, tensor in alive if tensor() is not None} == {number}
        return value

    monkeypatch.setattr(Reading, "value", noted)
    done = []
    dcp.save(state_of(model, optimizer), tmp_path / "saved", progress=lambda *bytes: done.append(bytes))
    assert numbers == set(range(5)) and done == sorted(done) and done[-1][0] == done[-1][1]
    written = sum(param.numel() * (8 if param.dtype is torch.float32 else 12) + param.nbytes + 4 for param in model.parameters())
    assert done[-1][1] == written
    # So they are when they are loaded.
    loaded, plain_fill = [], dcp._fill

    def filled(reader, items, told, into):
        loaded.append(weakref.ref(into))
        assert sum(tensor() is not None for tensor in loaded) <= 3
        plain_fill(reader, items, told, into)

    monkeypatch.setattr(dcp, "_fill", filled)
    load(model, optimizer, tmp_path / "saved")
    assert len(loaded) == 12
    optimizer.close()


def test_a_step_after_the_state_dict_was_made_is_no_part_of_it(tmp_path):
    model = new_model()
    optimizer = tiered(model, tmp_path / "tier")
    train(model, optimizer, [0])
    state = state_of(model, optimizer)
    train(model, optimizer, [1])
    with pytest.raises(checkpoint.CheckpointException) as raised:
        dcp.save(state, tmp_path / "saved")
    assert "the states on the tier have changed since the state dict was made" in str(raised.value)
    with pytest.raises(checkpoint.CheckpointException):
        checkpoint.load(state, checkpoint_id=tmp_path / "saved")
    dcp.save(state_of(model, optimizer), tmp_path / "saved")
    optimizer.close()


def test_torchs_functions_do_not_take_placeholders_for_values(tmp_path):
    model, twin = new_model(BF16), new_model(BF16)
    optimizer, other = tiered(model, tmp_path / "one"), tiered(twin, tmp_path / "two")
    train(model, optimizer, range(2))
    with pytest.raises(checkpoint.CheckpointException, match="meta"):
        checkpoint.save(state_of(model, optimizer), checkpoint_id=tmp_path / "refused")
    state = dcp.states(model, optimizer)
    with pytest.raises(spillway.InvalidArgumentError, match=r"is a placeholder without a value; call spillway.torch.dcp.load"):
        set_optimizer_state_dict(model, optimizer, state)
    # In a process group, torch's load makes tensors of them.
    dcp.save(state_of(model, optimizer), tmp_path / "saved")
    with pytest.raises(checkpoint.CheckpointException, match="process group"):
        checkpoint.load(state_of(model, optimizer), checkpoint_id=tmp_path / "saved")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        state = state_of(twin, other)
        checkpoint.load(state, checkpoint_id=tmp_path / "saved")
        set_model_state_dict(twin, state["model"])
        set_optimizer_state_dict(twin, other, state["optim"])
    finally:
        torch.distributed.destroy_process_group()
    assert same(twin.parameters(), model.parameters())
    same_states(other.state_dict()["state"], optimizer.state_dict()["state"])
    for each in (optimizer, other):
        each.close()


def test_what_cannot_be_streamed_is_refused(tmp_path):
    model = new_model()
    optimizer = tiered(model, tmp_path / "tier")
    for options in (StateDictOptions(full_state_dict=True), StateDictOptions(cpu_offload=True)):
        with pytest.raises(spillway.UnsupportedError, match="full_state_dict or cpu_offload"):
            dcp.states(model, optimizer, options)
    train(model, optimizer, [0])
    dcp.save(state_of(model, optimizer), tmp_path / "saved")
    larger = torch.nn.Sequential(torch.nn.Linear(50, 31), torch.nn.Linear(31, 7), torch.nn.Linear(7, 3, bias=False))
    other = tiered(larger, tmp_path / "other")
    before = other.state_dict()["state"]
    with pytest.raises(checkpoint.CheckpointException):
        load(larger, other, tmp_path / "saved")
    same_states(other.state_dict()["state"], before)
    for each in (optimizer, other):
        each.close()


@pytest.mark.parametrize("harm", [lambda file: file.unlink(), lambda file: os.truncate(file, 100)], ids=["removed", "truncated"])
def test_files_that_are_changed_too_early_leave_the_last_commit(tmp_path, harm):
    model = new_model()
    optimizer = tiered(model, tmp_path / "tier")
    train(model, optimizer, range(2))
    optimizer.commit()
    before = [param.detach().clone() for param in model.parameters()]
    dcp.save(state_of(model, optimizer), tmp_path / "saved")
    state = dcp.states(model, optimizer)
    dcp.load({"optim": state}, tmp_path / "saved")
    harm(next((tmp_path / "saved").glob("*.distcp")))
    with pytest.raises(spillway.InvalidArgumentError, match="state.*cannot be read from .*saved.*keep the files until"):
        set_optimizer_state_dict(model, optimizer, state)
    with pytest.raises(spillway.OutOfOrderError, match="rollback"):
        optimizer.step()
    optimizer.rollback()
    assert same(model.parameters(), before)
    optimizer.close()


def test_another_load_mends_one_that_was_interrupted(tmp_path):
    model = new_model()
    optimizer = tiered(model, tmp_path / "tier")
    train(model, optimizer, range(2))
    dcp.save(state_of(model, optimizer), tmp_path / "saved")
    saved = optimizer.state_dict()["state"]
    train(model, optimizer, range(2))

    def interrupted(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    state = dcp.states(model, optimizer)
    dcp.load({"optim": state}, tmp_path / "saved", progress=interrupted)
    with pytest.raises(KeyboardInterrupt):
        set_optimizer_state_dict(model, optimizer, state)
    unread = dcp.states(model, optimizer)
    with pytest.raises(checkpoint.CheckpointException, match="interrupted"):
        dcp.save({"optim": unread}, tmp_path / "other")
    load(model, optimizer, tmp_path / "saved")
    same_states(optimizer.state_dict()["state"], saved)
    optimizer.close()


def test_optimizers_without_a_tier_have_their_states(tmp_path):
    for make in (in_memory, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)):
        model, twin = new_model(), new_model()
        optimizer, other = make(model), make(twin)
        train(model, optimizer, range(2))
        dcp.save(state_of(model, optimizer), tmp_path / "saved")
        state = state_of(twin, other)
        dcp.load(state, tmp_path / "saved")
        set_model_state_dict(twin, state["model"])
        set_optimizer_state_dict(twin, other, state["optim"])
        assert same(twin.parameters(), model.parameters())
        same_states(other.state_dict()["state"], optimizer.state_dict()["state"])


def narrow_in_memory(model):
    return own.AdamW(model.parameters(), lr=1e-2, master="f32", moment_dtype="int8")


def tiers(tmp_path):
    names = iter(range(100))
    return {
        "memory": in_memory,
        "memory, 8 bits": narrow_in_memory,
        "tier": lambda model: tiered(model, tmp_path / f"tier{next(names)}"),
        "tier, 8 bits": lambda model: tiered(model, tmp_path / f"tier{next(names)}", moment_dtype="int8"),
    }


@pytest.mark.parametrize("options", [{}, {"master": "split", "moment_dtype": "int8"}], ids=["default", "narrow"])
@pytest.mark.parametrize("make", [own.AdamW, own.Adam, own.Adagrad, own.Lion, own.Signum, own.offload])
def test_states_that_are_read_before_the_first_step_change_no_run(make, options):
    if options and make in (own.Adagrad, own.Lion, own.Signum):
        options = {"master": "f32"}
    ends = []
    for reads in (False, True):
        model = new_model(BF16)
        optimizer = make(model.parameters(), lr=1e-2, **options)
        if reads:
            assert all(not state.get("step", 0) for state in dcp.states(model, optimizer)["state"].values())
        train(model, optimizer, range(3))
        ends.append((model, optimizer))
    (model, optimizer), (other, read) = ends
    assert same(model.parameters(), other.parameters())
    same_states(optimizer.state_dict()["state"], read.state_dict()["state"])


@pytest.mark.parametrize("before", ["memory", "memory, 8 bits", "tier", "tier, 8 bits"])
def test_moments_are_converted_between_8_bits_and_floats(tmp_path, before):
    """Each way of having states loads what each other way has saved: the values are those of torch's state dicts of both."""
    made = tiers(tmp_path)
    source = new_model(BF16)
    optimizer = made[before](source)
    train(source, optimizer, range(3))
    dcp.save(state_of(source, optimizer), tmp_path / "saved")
    saved = optimizer.state_dict()
    for name, make in made.items():
        by_files, by_dict = new_model(BF16), new_model(BF16)
        one, other = make(by_files), make(by_dict)
        if name.startswith("tier"):
            load(by_files, one, tmp_path / "saved")
        else:
            state = state_of(by_files, one)
            dcp.load(state, tmp_path / "saved")
            set_model_state_dict(by_files, state["model"])
            set_optimizer_state_dict(by_files, one, state["optim"])
        by_dict.load_state_dict(source.state_dict())
        other.load_state_dict(saved)
        same_states(one.state_dict()["state"], other.state_dict()["state"])
        assert same(by_files.parameters(), source.parameters())
        one.close()
        other.close()


def test_8_bit_moments_of_a_checkpoint_are_refused_for_parts_of_dtensors():
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        placed = torch.distributed.tensor.distribute_tensor(torch.zeros(64), init_device_mesh("cpu", (1,)))
        with pytest.raises(UnsupportedError, match="optim.weight.exp_avg is a DTensor"):
            conversions({"optim.weight.exp_avg": placed}, ["optim.weight.exp_avg_codes", "optim.weight.exp_avg_scales"])
        assert conversions({"optim.weight.exp_avg": placed}, ["optim.weight.exp_avg"]) == []
    finally:
        torch.distributed.destroy_process_group()
