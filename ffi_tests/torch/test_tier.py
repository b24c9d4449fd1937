"""States on a tier: the bits of states in memory; commits, resumes, kills, rollbacks; state dicts; what is refused, and what is freed."""

import copy
import gc
import io
import os
import pathlib
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import spillway
from spillway import torch as own
from tier_worker import options, parameters, random_grads

WORKER = pathlib.Path(__file__).with_name("tier_worker.py")


def train(optimizer, params, steps):
    for step in steps:
        random_grads(params, step)
        optimizer.step()


def same(ones, others):
    return all(one.dtype is other.dtype and torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def same_states(one, other):
    assert one.keys() == other.keys()
    for number, state in other.items():
        assert state.keys() == one[number].keys() and all(torch.equal(one[number][key], value) for key, value in state.items()), number


@pytest.fixture
def tier(tmp_path):
    """Options of a tier on two paths."""
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        path.mkdir()
    return options(paths)


@pytest.mark.parametrize("name, arguments", [
    ("AdamW", {}), ("Adam", {"weight_decay": 0.1}), ("AdamW", {"max_norm": 1.0}), ("AdamW", {"skip_nonfinite": True}),
    ("AdamW", {"maximize": True, "betas": (0.8, 0.9)})], ids=str)
def test_a_run_has_the_bits_of_one_in_memory(tier, name, arguments):
    ours, theirs = parameters(), parameters()
    pair = []
    for params, beyond in ((ours, {"tier": tier}), (theirs, {"master": "f32"})):
        groups = [{"params": params[:3], "lr": 3e-3}, {"params": params[3:], "weight_decay": 0.2}]
        pair.append(getattr(own, name)(groups, lr=1e-2, **arguments, **beyond))
    for step in range(8):
        for params, optimizer in zip((ours, theirs), pair):
            random_grads(params, step)
            if step == 3:
                params[2].grad = None
            if step == 5 and arguments.get("skip_nonfinite"):
                params[6].grad[8] = float("inf")
            optimizer.step()
        assert same(ours, theirs) and pair[0].grad_norm == pair[1].grad_norm and pair[0].skipped == pair[1].skipped
    same_states(pair[0].state_dict()["state"], pair[1].state_dict()["state"])


def test_a_scaler_hooks_closures_and_schedulers(tier):
    ours, theirs = parameters(), parameters()
    pair = own.AdamW(ours, lr=1e-2, tier=tier), own.AdamW(theirs, lr=1e-2, master="f32")
    calls = []
    for params, optimizer in zip((ours, theirs), pair):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        handle = optimizer.register_step_post_hook(lambda *_: calls.append("step"))
        for step in range(4):
            scaler.scale(sum(param.float().square().sum() for param in params)).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()
        handle.remove()
        versions = [param._version for param in params]
        random_grads(params, 9)
        assert optimizer.step(lambda: 17) == 17
        assert all(param._version > version for param, version in zip(params, versions))
    assert calls == ["step"] * 8 and same(ours, theirs)


def test_the_program_may_write_to_parameters(tier):
    ours, theirs = parameters(), parameters()
    pair = own.AdamW(ours, lr=1e-2, tier=tier), own.AdamW(theirs, lr=1e-2, master="f32")
    for step in range(5):
        for params, optimizer in zip((ours, theirs), pair):
            random_grads(params, step)
            if step == 3:
                with torch.no_grad():
                    params[2][1000:9000].fill_(0.25)
                    params[6].mul_(0.5)
            optimizer.step()
    assert same(ours, theirs)


def test_a_committed_step_is_resumed(tier):
    whole = parameters()
    uninterrupted = own.AdamW(whole, lr=1e-2, master="f32")
    params = parameters()
    optimizer = own.AdamW(params, lr=1e-2, tier=tier)
    assert optimizer.resumed_step is None and optimizer.payload == b""
    train(optimizer, params, range(4))
    optimizer.commit(payload=b"epoch 1")
    train(optimizer, params, range(4, 6))
    optimizer.close()
    optimizer.close()

    resumed = parameters(seed=5)
    again = own.AdamW(resumed, lr=1e-2, tier=tier._replace(resume="resume"))
    assert again.resumed_step == 4 and again.payload == b"epoch 1"
    train(uninterrupted, whole, range(4))
    assert same(resumed, whole), "the parameters take the values of their masters"
    train(again, resumed, range(4, 8))
    train(uninterrupted, whole, range(4, 8))
    assert same(resumed, whole)
    again.commit(step=100)
    again.close()
    assert own.AdamW(resumed, tier=tier).resumed_step == 100


def test_a_rollback_returns_to_the_last_commit(tier):
    params = parameters()
    optimizer = own.AdamW(params, lr=1e-2, tier=tier)
    with pytest.raises(spillway.InvalidArgumentError, match="nothing was committed to the tier"):
        optimizer.rollback()
    train(optimizer, params, range(2))
    optimizer.commit()
    before, states = [param.detach().clone() for param in params], copy.deepcopy(optimizer.state_dict()["state"])
    train(optimizer, params, range(2, 5))
    after = [param.detach().clone() for param in params]
    optimizer.rollback()
    assert same(params, before)
    same_states(optimizer.state_dict()["state"], states)
    train(optimizer, params, range(2, 5))
    assert same(params, after)


@pytest.mark.parametrize("lines, interval", [(1, 1), (4, 1), (7, 3), (13, 5)])
def test_a_killed_run_goes_on_at_its_last_commit(tmp_path, lines, interval):
    """kill -9 after some output, which lies before, in or after a commit of the next steps."""
    with subprocess.Popen([sys.executable, WORKER, tmp_path, str(interval)], stdout=subprocess.PIPE, text=True) as process:
        for _ in range(lines):
            assert process.stdout.readline().strip()
        process.kill()
    params, whole = parameters(seed=3), parameters()
    optimizer, uninterrupted = own.AdamW(params, lr=1e-2, tier=options(tmp_path)), own.AdamW(whole, lr=1e-2, master="f32")
    step = optimizer.resumed_step
    assert step >= (lines - 1) // interval * interval + 1 and step % interval == 1 % interval and optimizer.payload == str(step).encode()
    train(uninterrupted, whole, range(step))
    assert same(params, whole)
    train(optimizer, params, range(step, step + 3))
    train(uninterrupted, whole, range(step, step + 3))
    assert same(params, whole)


@pytest.mark.parametrize("plain", [lambda params: own.AdamW(params, lr=1e-2, master="f32"), lambda params: torch.optim.AdamW(params, lr=1e-2)],
                         ids=["spillway", "torch"])
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
        torch.testing.assert_close(one, two, rtol=1e-5 if one.dtype is torch.float32 else 2e-2, atol=1e-6 if one.dtype is torch.float32 else 2e-2)
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


def test_a_state_dict_keeps_its_values(tier):
    params = parameters()
    optimizer = own.AdamW(params, lr=1e-2, tier=tier)
    train(optimizer, params, range(2))
    first = optimizer.state_dict()["state"]
    before = copy.deepcopy(first)
    train(optimizer, params, range(2, 4))
    same_states(first, before)
    assert sorted(optimizer.state[params[0]]) == ["step"], "moments are on the tier only"
    optimizer.close()
    same_states(first, before)


def test_the_memory_budget_holds(tmp_path):
    params = [torch.nn.Parameter(torch.randn(300_000)) for _ in range(3)]
    optimizer = own.AdamW(params, tier=own.TierOptions(tmp_path, pin_memory=False), memory_budget=4 << 20)
    budget = optimizer._tier.swap.budget
    assert budget.host_bytes <= 4 << 20 < budget.state_bytes and budget.cached < len(optimizer._tier.layout.elements)
    train(optimizer, params, range(2))
    assert optimizer._tier.swap.stats().fetched > 0
    optimizer.commit()
    optimizer.close()
    with pytest.raises(spillway.InvalidArgumentError, match="memory_budget|bytes"):
        own.AdamW(params, tier=tmp_path, memory_budget=1000)
    assert own.AdamW(params, tier=own.TierOptions(tmp_path, pin_memory=False), memory_budget=8 << 20).resumed_step == 2


def test_another_model_is_refused_and_the_tier_keeps_its_commit(tier):
    params = parameters()
    optimizer = own.AdamW(params, lr=1e-2, tier=tier)
    train(optimizer, params, range(2))
    optimizer.commit()
    states = copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.close()
    name = r"param_groups\[0\]\['params'\]\[2\] \(third\)"
    names = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh"]

    def changed(number, param):
        made = parameters()
        made[number] = param
        return list(zip(names, made))
    cases = [(changed(2, torch.nn.Parameter(torch.zeros(30_002, dtype=torch.bfloat16))), name + r" is torch.bfloat16 of shape \(30002,\); .*\(30001,\)"),
             (changed(2, torch.nn.Parameter(torch.zeros(30_001))), name + " is torch.float32 of shape .* committed with torch.bfloat16"),
             (changed(2, torch.nn.Parameter(torch.zeros(1, 30_001, dtype=torch.bfloat16))), name + ".* pass the model of the run that committed"),
             (list(zip(names, parameters()))[:6], "has 6 parameters, and the tier was committed with 7: parameter number 6"),
             ([*zip(names, parameters()), ("eighth", torch.nn.Parameter(torch.zeros(3)))], r"\(eighth\) is the first without a counterpart")]
    for given, words in cases:
        with pytest.raises(spillway.InvalidArgumentError, match=words):
            own.AdamW(given, lr=1e-2, tier=tier)
    again = own.Adam(parameters(), lr=1e-2, tier=tier)
    assert again.resumed_step == 2
    same_states(again.state_dict()["state"], states)


def test_a_tier_of_another_program_is_refused(tmp_path):
    with spillway.Tier([tmp_path], job="optimizer", durability="process") as tier:
        tier.commit(step=3, payload=b"mine")
    with pytest.raises(spillway.InvalidArgumentError, match="no optimizer of spillway.torch has committed; pass other paths or another job"):
        own.AdamW(parameters(), tier=options(tmp_path))
    with spillway.Tier([tmp_path], job="optimizer") as tier:
        assert tier.opened.payload == b"mine"


@pytest.mark.parametrize("make, words", [
    (lambda p, tier: own.AdamW(p, tier=tier, undo=True), "AdamW: undo cannot be combined with tier"),
    (lambda p, tier: own.AdamW(p, tier=tier, moment_dtype=torch.bfloat16), "moment_dtype cannot be combined with tier"),
    (lambda p, tier: own.AdamW(p, tier=tier, master="split"), 'master="split" cannot be combined with tier'),
    (lambda p, tier: own.AdamW(p, tier=tier, amsgrad=True), "amsgrad cannot be combined with tier"),
    (lambda p, tier: own.Adam([{"params": p, "amsgrad": True}], tier=tier), "amsgrad cannot be combined with tier"),
    (lambda p, tier: own.Adagrad(p, tier=tier), "Adagrad: states on a tier are for Adam and AdamW"),
    (lambda p, tier: own.Lion(p, tier=tier), "Lion: states on a tier are for Adam and AdamW"),
    (lambda p, tier: own.AdamW(p, memory_budget=1 << 30), "memory_budget is the memory for states on a tier; pass tier"),
    (lambda p, tier: own.AdamW(p, tier=tier._replace(part_elements=0)), "part_elements is 0"),
    (lambda p, tier: own.AdamW(p, tier=tier._replace(resume="yes")), "resume"),
    (lambda p, tier: own.AdamW(p, tier=tier._replace(resume="resume")), "committed|state"),
    (lambda p, tier: own.AdamW(p, tier="/nonexistent/nvme"), "/nonexistent/nvme"),
    (lambda p, tier: own.AdamW([*p, torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))], tier=tier),
     r"\['params'\]\[7\] is torch.float64 on cpu .* contiguous CPU parameters"),
    (lambda p, tier: own.AdamW([torch.nn.Parameter(torch.zeros(3, device="meta"))], tier=tier), r"\['params'\]\[0\] is torch.float32 on meta"),
    (lambda p, tier: own.AdamW([torch.nn.Parameter(torch.zeros(3, 4).t())], tier=tier), r"\['params'\]\[0\] .* strides \(1, 4\)"),
], ids=range(15))
def test_what_cannot_be_combined_is_refused_at_construction(tier, make, words):
    with pytest.raises((spillway.SpillwayError, ValueError), match=words):
        make(parameters(), tier)
    own.AdamW(parameters(), tier=tier).close()


def refused(optimizer, params, error, words):
    before = [param.detach().clone() for param in params]
    with pytest.raises(error, match=words):
        optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(params, before, strict=True))


def test_bad_input_names_the_parameter_and_steps_nothing(tier):
    names = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh"]
    params = parameters()
    optimizer = own.AdamW(list(zip(names, params)), lr=1e-2, tier=tier)
    train(optimizer, params, range(2))
    states = copy.deepcopy(optimizer.state_dict()["state"])
    invalid, unsupported, name = spillway.InvalidArgumentError, spillway.UnsupportedError, r"param_groups\[0\]\['params'\]\[6\] \(seventh\)"
    old = params[6].data
    params[6].grad = None
    params[6].data = old[:10].clone()
    params[6].grad = torch.zeros(10)
    refused(optimizer, params, invalid, name + r" has shape \(10,\), and its states on the tier have \(9000,\); construct")
    params[6].grad, params[6].data = None, old
    params[6].grad = torch.zeros(9000).to_sparse()
    refused(optimizer, params, unsupported, name + " or its gradient is none that Spillway steps")
    params[6].grad = torch.zeros(9000)
    optimizer.param_groups[0]["amsgrad"] = True
    refused(optimizer, params, unsupported, "without amsgrad")
    optimizer.param_groups[0]["amsgrad"] = False
    optimizer.param_groups[0]["params"][6] = torch.nn.Parameter(torch.zeros(9000))
    optimizer.param_groups[0]["params"][6].grad = torch.zeros(9000)
    refused(optimizer, params, invalid, name + " is not one of the parameters that the optimizer was constructed with")
    optimizer.param_groups[0]["params"][6] = params[6]
    params[0].grad = params[6].data[:320].view(40, 8)
    refused(optimizer, params, invalid, r"overlaps|first")
    with pytest.raises(unsupported, match="add_param_group: the layout of states on a tier is fixed"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    saved = copy.deepcopy(optimizer.state_dict())
    same_states(saved["state"], states)
    saved["state"][6]["exp_avg"] = torch.zeros(8999)
    with pytest.raises(invalid, match=name + r" has shape \(9000,\), its saved state 'exp_avg' \(8999,\); .* nothing was loaded"):
        optimizer.load_state_dict(saved)
    del saved["state"][6]["exp_avg"]
    with pytest.raises(invalid, match=name + ": its saved state lacks 'exp_avg'"):
        optimizer.load_state_dict(saved)
    same_states(optimizer.state_dict()["state"], states)
    train(optimizer, params, [2])


def test_locks_copies_and_closed_optimizers(tier):
    params = parameters()
    optimizer = own.AdamW(params, lr=1e-2, tier=tier)
    with pytest.raises(spillway.errors.TierLockedError):
        own.AdamW(parameters(), tier=tier)
    for way in (copy.deepcopy, copy.copy):
        with pytest.raises(TypeError, match="with states on a tier cannot be copied or pickled"):
            way(optimizer)
    train(optimizer, params, [0])
    with pytest.raises(spillway.InvalidArgumentError, match="payload is of type str; pass bytes"):
        optimizer.commit(payload="text")
    optimizer.commit()
    optimizer.close()
    random_grads(params, 1)
    refused(optimizer, params, spillway.InvalidArgumentError, "this Swap is closed")
    plain = own.AdamW(params)
    plain.close()
    with pytest.raises(spillway.InvalidArgumentError, match="AdamW.commit: the states are in host memory; construct the optimizer with tier"):
        plain.commit()


def test_garbage_collection_frees_the_lock_and_the_memory(tier):
    for _ in range(3):
        params = parameters()
        optimizer = own.AdamW(params, lr=1e-2, tier=tier)
        train(optimizer, params, [0])
        handles = weakref.ref(optimizer._tier._handles.swap)
        del optimizer
        gc.collect()
        assert handles() is None
    own.AdamW(parameters(), tier=tier).close()


def test_a_forked_child_is_refused_and_leaves_the_parents_tier(tier):
    params = parameters()
    optimizer = own.AdamW(params, lr=1e-2, tier=tier)
    train(optimizer, params, [0])
    random_grads(params, 1)
    child = os.fork()
    if child == 0:
        try:
            optimizer.step()
        except spillway.UnsupportedError as error:
            optimizer.close()
            os._exit(0 if "forked child" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    train(optimizer, params, [1])
    optimizer.commit()
    assert optimizer._tier.tier.verify() > 0


def test_a_tier_in_memory_and_a_disk_without_room(tmp_path):
    params = [torch.nn.Parameter(torch.zeros(100_000))]
    optimizer = own.AdamW(params, tier=own.TierOptions([None], part_elements=9000, pin_memory=False))
    train(optimizer, params, range(2))
    assert torch.equal(optimizer.state_dict()["state"][0]["step"], torch.tensor(2.0))
    optimizer.close()
    full = own.TierOptions([spillway.TierPath(tmp_path, limit_bytes=1 << 20)], part_elements=9000, pin_memory=False)
    with pytest.raises(spillway.SpillwayError, match="the states of the optimizer need 1.2 MB .*no room"):
        own.AdamW(params, tier=full, memory_budget=1 << 20)


def test_large_values_of_a_state_dict_are_maps_of_files_without_a_name(tier, monkeypatch):
    params = parameters()
    optimizer = own.AdamW(params, lr=1e-2, tier=tier)
    train(optimizer, params, [0])

    def mapped(value):
        with open("/proc/self/maps", encoding="utf-8") as lines:
            spans = [(line.split("-")[0], line.split("-")[1].split()[0], line) for line in lines if "(deleted)" in line]
        return any(int(start, 16) <= value.data_ptr() < int(end, 16) and str(tier.paths[0]) in line for start, end, line in spans)
    state = optimizer.state_dict()["state"]
    assert mapped(state[2]["exp_avg"]) and mapped(state[2]["master_param"]) and not mapped(state[0]["exp_avg"])
    assert not [name for name in os.listdir(tier.paths[0]) if name.startswith("tmp")]

    def full(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="no room for 120004 bytes of a state dict, which is kept in files below the tier's first directory"):
        optimizer.state_dict()
    train(optimizer, params, [1])


def test_a_step_whose_states_cannot_be_read_names_the_file(tmp_path):
    params = [torch.nn.Parameter(torch.randn(60_000)) for _ in range(4)]
    optimizer = own.AdamW(params, lr=1e-2, tier=own.TierOptions(tmp_path, part_elements=20_000, pin_memory=False))
    assert optimizer._tier.swap.budget.cached < 12
    train(optimizer, params, range(2))
    optimizer.commit()
    data = next(path for path in tmp_path.rglob("data") if path.is_file())
    os.truncate(data, 4096)
    random_grads(params, 2)
    with pytest.raises(spillway.IoError, match=str(data)):
        optimizer.step()
    with pytest.raises(spillway.BusyError, match="the last step failed; roll back first"):
        optimizer.step()
    with pytest.raises(spillway.IoError, match=str(data)):
        optimizer.rollback()
    optimizer.close()


def test_ctrl_c_that_arrives_while_the_library_commits(tier, monkeypatch):
    """Python raises the KeyboardInterrupt once the call has returned; the library has committed then."""
    params = parameters()
    optimizer = own.AdamW(params, lr=1e-2, tier=tier)
    train(optimizer, params, range(1))
    optimizer.commit()
    train(optimizer, params, range(1, 3))
    committed, states = [param.detach().clone() for param in params], copy.deepcopy(optimizer.state_dict()["state"])
    monkeypatch.setattr(spillway._native, "check", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.commit(payload=b"two more")
    monkeypatch.undo()
    train(optimizer, params, range(3, 4))
    optimizer.rollback()
    assert same(params, committed)
    same_states(optimizer.state_dict()["state"], states)
    optimizer.commit()
    optimizer.close()
    assert own.AdamW(parameters(seed=5), tier=tier).resumed_step == 3


def interrupted(status):
    """In place of the check of a status: a signal handler that raises after the call."""
    assert status == 0
    raise KeyboardInterrupt
