"""spillway.torch.Staged on a tier: bits, commits, kills, rollbacks, snapshots, state dicts and what is refused."""

import copy
import json
import os
import pathlib
import random
import subprocess
import sys
import time

import pytest
import torch
from interrupts import interrupted
from staged_runs import Soap, gradients, options, parameters, same
from torch import optim

import spillway
from spillway import InvalidArgumentError, OutOfOrderError, UnsupportedError
from spillway.torch import Staged

WORKER = pathlib.Path(__file__).with_name("staged_worker.py")
#: One of two processes of a run. Rank 1 refuses the fifth step, then cannot write in it, and is killed in the second part after its commit.
RANKS = """
import os, signal, sys
sys.path[:0] = {paths!r}
import spillway, torch
from staged_runs import gradients, options, parameters, same
from spillway.torch import Staged
rank, again = int(sys.argv[1]), sys.argv[2] == "again"
torch.distributed.init_process_group("gloo", init_method="file://" + {directory!r} + "/meet" + sys.argv[2], rank=rank, world_size=2)
params, twins = parameters(rank), parameters(rank)
optimizer, theirs = Staged(torch.optim.NAdam, params, chunk_bytes=9000, tier=options({directory!r})), torch.optim.NAdam(twins)

def train(steps):
    for step in steps:
        gradients(params, step)
        optimizer.step()

for step in range(5 if again else 4):
    gradients(twins, step)
    theirs.step()
if not again:
    train(range(4))
    optimizer.commit()
    saved = optimizer.state_dict()
    if rank == 1:
        saved["state"][0]["exp_avg"].zero_()
    try:
        train([4])
    except (spillway.InvalidArgumentError, spillway.TierError) as error:
        print(rank, "refused", type(error).__name__, flush=True)
    optimizer.rollback()
    assert same(params, twins)
    put = optimizer._home.tiered.tier.put
    if rank == 1:
        def fail(*_):
            raise spillway.IoError("the disk is full")
        optimizer._home.tiered.tier.put = fail
    try:
        train([4])
    except (spillway.IoError, spillway.TierError) as error:
        print(rank, type(error).__name__, flush=True)
    optimizer._home.tiered.tier.put = put
    optimizer.rollback()
    assert same(params, twins)
    with optimizer.snapshot({directory!r} + "/snapshot") as begun:
        begun.wait()
    torch.distributed.barrier()
    train([4, 5])
    optimizer.commit()
    assert optimizer.restore({directory!r} + "/snapshot") == 4 and same(params, twins)
    train([4])
    optimizer.commit()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
else:
    assert same(params, twins) and same(optimizer.state_dict(), theirs.state_dict())
    print(rank, "resumed", optimizer.resumed_step)
    optimizer.close()
sys.stdout.flush()
os._exit(0)
"""
CLASSES = {
    "sgd": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "plain sgd": (optim.SGD, {"lr": 0.1}),
    "nadam": (optim.NAdam, {}),
    "adagrad": (optim.Adagrad, {}),
    "soap": (Soap, {}),
}


def train(optimizer, params, steps):
    for step in steps:
        gradients(params, step, {1} if step < 5 else {3} if step % 3 == 0 else ())
        optimizer.step()


def on(directory, name, params, bound=9000, **more):
    kind, given = CLASSES[name]
    return Staged(kind, params, chunk_bytes=bound, tier=options(directory), **{**given, **more})


@pytest.mark.sampled(cases=8)
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("bound", [1, 9000, 1 << 20])
def test_states_on_a_tier_have_the_bits_of_the_class_and_resume(name, bound, tmp_path):
    ones, others = parameters(), parameters()
    theirs, ours = CLASSES[name][0](ones, **CLASSES[name][1]), on(tmp_path, name, others, bound)
    assert ours.resumed_step is None and ours.payload == b""
    steps = 200 if bound == 9000 else 12
    train(theirs, ones, range(steps))
    train(ours, others, range(steps))
    assert same(ones, others) and same(theirs.state_dict(), ours.state_dict())
    assert ours.memory().host <= 4 * ours.memory().largest
    ours.commit(payload=b"position")
    saved = ours.state_dict()
    train(ours, others, range(steps, steps + 3))
    ours.close()
    again = parameters(seed=9)
    resumed = on(tmp_path, name, again, bound)
    assert resumed.resumed_step == steps and resumed.payload == b"position"
    assert same(again, ones) and same(resumed.state_dict(), saved)
    train(theirs, ones, range(steps, steps + 6))
    train(resumed, again, range(steps, steps + 6))
    assert same(again, ones) and same(theirs.state_dict(), resumed.state_dict())
    resumed.close()


@pytest.mark.sampled(cases=2)
@pytest.mark.parametrize("way, seed", [("waits", 1), ("waits", 2), ("beside", 3), ("beside", 4)])
def test_a_killed_run_begins_at_its_last_commit(way, seed, tmp_path):
    chance = random.Random(seed)
    interval, lines = chance.randint(1, 3), chance.randint(4, 12)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    last = 0
    for _ in range(2):
        with subprocess.Popen([sys.executable, WORKER, tmp_path, str(interval), way], stdout=subprocess.PIPE, env=environment) as process:
            for _ in range(lines):
                seen = int(process.stdout.readline())
            time.sleep(chance.random() * 0.02)
            process.kill()
        params, whole = parameters(seed=3), parameters()
        optimizer, uninterrupted = on(tmp_path, "soap", params), Soap(whole)
        step = optimizer.resumed_step
        # A commit beside steps has ended before the next one begins.
        least = (seen - 1) // interval * interval + 1 - (interval if way == "beside" else 0)
        assert step >= max(least, last) and step % interval == 1 % interval and optimizer.payload == str(step).encode()
        train(uninterrupted, whole, range(step))
        assert same(params, whole) and same(optimizer.state_dict(), uninterrupted.state_dict())
        train(uninterrupted, whole, range(step, step + 5))
        train(optimizer, params, range(step, step + 5))
        assert same(params, whole) and same(optimizer.state_dict(), uninterrupted.state_dict())
        optimizer.close()
        last = step


@pytest.mark.parametrize("name", CLASSES)
def test_a_rollback_returns_to_the_commit(name, tmp_path):
    params, twins = parameters(), parameters()
    optimizer, theirs = on(tmp_path, name, params), CLASSES[name][0](twins, **CLASSES[name][1])
    with pytest.raises(InvalidArgumentError, match="nothing was committed to the tier"):
        optimizer.rollback()
    # Commits before the states have their last form, and after it.
    for begin, steps in ((0, 1), (1, 2), (3, 4)):
        train(optimizer, params, range(begin, begin + steps))
        train(theirs, twins, range(begin, begin + steps))
        optimizer.commit()
        saved = optimizer.state_dict()
        for _ in range(2):
            train(optimizer, params, range(begin + steps, begin + steps + 3))
            optimizer.rollback()
            assert same(params, twins) and same(optimizer.state_dict(), saved) and same(theirs.state_dict(), saved)
        optimizer.commit()
        # No extents are left that nobody needs.
        extents = optimizer._home.tiered.tier.extents()
        chunks = sum(name.startswith("chunk") for _, name, *_ in extents)
        assert chunks == sum(chunk.size > 0 for chunk in optimizer._flow.chunks) and len(extents) - chunks == 1
    optimizer.close()


def snapshot(optimizer, directory):
    with optimizer.snapshot(directory) as begun:
        return begun.wait()


@pytest.mark.parametrize("name", CLASSES)
def test_a_restored_snapshot_goes_on_with_the_bits_of_its_run(name, tmp_path):
    params, twins = parameters(), parameters()
    optimizer, theirs = on(tmp_path, name, params), CLASSES[name][0](twins, **CLASSES[name][1])
    train(optimizer, params, range(3))
    train(theirs, twins, range(3))
    optimizer.commit(payload=b"epoch 1")
    assert snapshot(optimizer, tmp_path / "snapshot") == 3
    saved = optimizer.state_dict()
    # The steps between change the form of the states, and one of them is committed.
    train(optimizer, params, range(3, 7))
    optimizer.commit()
    train(optimizer, params, range(7, 8))
    assert optimizer.restore(tmp_path / "snapshot") == 3 and optimizer.payload == b"epoch 1"
    assert same(params, twins) and same(optimizer.state_dict(), saved)
    train(optimizer, params, range(3, 5))
    # It was committed too.
    optimizer.rollback()
    assert same(params, twins)
    optimizer.close()
    resumed = on(tmp_path, name, parameters(seed=9))
    assert resumed.resumed_step == 3 and resumed.payload == b"epoch 1"
    resumed.close()
    train(theirs, twins, range(3, 6))
    # Tiers without a commit, with other states or chunks of other sizes under the same numbers.
    for steps, bound in ((0, 9000), (2, 9000), (4, 1), (4, 1 << 20)):
        elsewhere = tmp_path / f"elsewhere-{steps}-{bound}"
        elsewhere.mkdir()
        others = parameters(seed=7)
        other = on(elsewhere, name, others, bound)
        train(other, others, range(steps))
        assert other.restore(tmp_path / "snapshot") == 3
        train(other, others, range(3, 6))
        assert same(others, twins) and same(other.state_dict(), theirs.state_dict())
        other.close()


def test_a_snapshot_that_does_not_fit_is_refused_and_a_damaged_one_loses_no_step(tmp_path):
    params = parameters()
    optimizer = on(tmp_path, "nadam", params)
    with pytest.raises(InvalidArgumentError, match="Staged.restore: the states are in host memory"):
        Staged(optim.NAdam, parameters()).restore(tmp_path)
    train(optimizer, params, range(2))
    optimizer.commit()
    snapshot(optimizer, tmp_path / "snapshot")
    train(optimizer, params, range(2, 4))
    before, saved = copy.deepcopy(params), optimizer.state_dict()

    def refused(error, words, directory):
        with pytest.raises(error, match=words):
            optimizer.restore(directory)

    refused(spillway.NoStateError, "no finished snapshot", tmp_path / "nothing")
    manifest = json.loads((tmp_path / "snapshot" / "manifest.json").read_text())
    for number, (change, error, words) in enumerate(
        (
            ({"rank": 1, "world": 2}, InvalidArgumentError, "rank 1 of 2"),
            ({"payload": ""}, InvalidArgumentError, "another program"),
            ({"extents": manifest["extents"][:-1]}, spillway.CorruptError, "lacks .*, which its commit had"),
        )
    ):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "manifest.json").write_text(json.dumps({**manifest, **change}))
        refused(error, words, tmp_path / str(number))
    (tmp_path / "other").mkdir()
    for name, given, words in (
        ("soap", parameters(), "the snapshot was committed with states of .*NAdam, and the class is .*Soap"),
        ("nadam", parameters()[:-1], "was committed with"),
    ):
        other = on(tmp_path / "other", name, given)
        with pytest.raises(InvalidArgumentError, match=words):
            other.restore(tmp_path / "snapshot")
        other.close()
    assert same(params, before) and same(optimizer.state_dict(), saved)
    file = next((tmp_path / "snapshot").glob("*.bin"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    refused(spillway.CorruptError, "checksum", tmp_path / "snapshot")
    # The steps before were committed, and training goes on.
    assert same(params, before) and same(optimizer.state_dict(), saved)
    train(optimizer, params, range(4, 5))
    optimizer.close()
    # Nothing is left of a tier without a commit, of which the call could not commit the steps.
    (tmp_path / "full").mkdir()
    others = parameters()
    full = on(tmp_path / "full", "nadam", others)
    train(full, others, range(2))
    held = full.state_dict()
    full._home.tiered.swap._commit = _refuse
    with pytest.raises(spillway.CorruptError, match="checksum.*the states of before are lost"):
        full.restore(tmp_path / "snapshot")
    with pytest.raises(OutOfOrderError):
        train(full, others, range(2, 3))
    full.load_state_dict(held)
    train(full, others, range(2, 3))
    full.close()


def _refuse(*_):
    raise spillway.IoError("the disk is full")


def test_a_state_dict_moves_between_a_tier_and_the_class(tmp_path):
    for name in CLASSES:
        directory = tmp_path / name
        directory.mkdir()
        params, twins = parameters(shapes=[(200, 100), (30,)]), parameters(shapes=[(200, 100), (30,)])
        optimizer, theirs = on(directory, name, params), CLASSES[name][0](twins, **CLASSES[name][1])
        for step in range(3):
            gradients(twins, step)
            theirs.step()
        with torch.no_grad():
            for param, twin in zip(params, twins, strict=True):
                param.copy_(twin)
        gradients(params, 50)
        optimizer.step()
        optimizer.commit()
        with torch.no_grad():
            for param, twin in zip(params, twins, strict=True):
                param.copy_(twin)
        optimizer.load_state_dict(theirs.state_dict())
        assert same(optimizer.state_dict(), theirs.state_dict())
        for step in range(3, 6):
            for some, own in ((params, optimizer), (twins, theirs)):
                gradients(some, step)
                own.step()
        assert same(params, twins) and same(optimizer.state_dict(), theirs.state_dict())
        optimizer.commit()
        optimizer.close()
        again = parameters(seed=4, shapes=[(200, 100), (30,)])
        resumed = on(directory, name, again)
        assert same(again, twins) and same(resumed.state_dict(), theirs.state_dict())
        resumed.close()


def test_processes_commit_together(tmp_path):
    program = RANKS.format(paths=[path for path in sys.path if path], directory=str(tmp_path))
    told = []
    for part in ("begin", "again"):
        ranks = [
            subprocess.Popen([sys.executable, "-c", program, str(rank), part], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        ends = [rank.communicate(timeout=300) for rank in ranks]
        assert [rank.returncode for rank in ranks] == ([0, -9] if part == "begin" else [0, 0]), ends
        told.append(sorted(line for out, _ in ends for line in out.splitlines()))
    assert told == [["0 TierError", "0 refused TierError", "1 IoError", "1 refused InvalidArgumentError"], ["0 resumed 5", "1 resumed 5"]]


def test_groups_that_are_added_are_in_the_commit(tmp_path):
    params = parameters()
    optimizer = on(tmp_path, "nadam", params[:3])
    for step in range(3):
        gradients(params[:3], step)
        optimizer.step()
    optimizer.commit()
    optimizer.add_param_group({"params": params[3:], "lr": 0.5})
    for step in range(3, 5):
        gradients(params, step)
        optimizer.step()
    optimizer.commit()
    saved = optimizer.state_dict()
    optimizer.close()
    with pytest.raises(InvalidArgumentError, match="3 parameters, and the tier was committed with 6"):
        on(tmp_path, "nadam", parameters()[:3])
    again = parameters(seed=8)
    resumed = on(tmp_path, "nadam", [{"params": again[:3]}, {"params": again[3:], "lr": 0.5}])
    assert same(again, params) and same(resumed.state_dict(), saved)
    resumed.close()


def test_many_parameters_are_in_a_commit(tmp_path):
    shapes = [(1 + number % 5,) for number in range(300)]
    params, twins, again = parameters(0, shapes), parameters(0, shapes), parameters(1, shapes)
    optimizer, theirs = on(tmp_path, "nadam", params, 1 << 20), optim.NAdam(twins)
    train(optimizer, params, range(2))
    train(theirs, twins, range(2))
    optimizer.commit()
    optimizer.close()
    resumed = on(tmp_path, "nadam", again, 1 << 20)
    assert same(again, twins) and same(resumed.state_dict(), theirs.state_dict())
    resumed.close()


def test_frozen_parameters_are_in_a_commit_if_they_were_stepped(tmp_path):
    params, again = parameters(), parameters(seed=5)
    for some in (params, again):
        some[0].requires_grad_(False)
    optimizer = on(tmp_path, "nadam", params)
    gradients(params, 0, {0})
    optimizer.step()
    params[1].requires_grad_(False)
    optimizer.commit()
    optimizer.close()
    resumed = on(tmp_path, "nadam", again)
    assert same(params[1:], again[1:]) and same(again[0], parameters(seed=5)[0].requires_grad_(False))
    resumed.close()


def test_a_parameter_that_left_the_groups_is_refused_by_a_commit(tmp_path):
    params = parameters()
    optimizer = on(tmp_path, "nadam", params)
    train(optimizer, params, [0])
    del optimizer.param_groups[0]["params"][2]
    train(optimizer, params, [1])
    with pytest.raises(InvalidArgumentError, match=r"\['params'\]\[2\] has a state and is in no group; add it to one, or delete"):
        optimizer.commit()
    del optimizer.state[params[2]]
    optimizer.commit()
    optimizer.close()


def test_a_failed_transfer_refuses_steps_until_a_rollback(tmp_path, monkeypatch):
    params, twins = parameters(), parameters()
    optimizer, theirs = on(tmp_path, "nadam", params, 1), optim.NAdam(twins)
    train(optimizer, params, range(6))
    train(theirs, twins, range(6))
    optimizer.commit()
    tier = optimizer._home.tiered.tier
    for call, at in (("put", 2), ("get", 3), ("wait", 4)):
        real, left = getattr(tier, call), [at]

        def fails(*arguments, real=real, left=left):
            left[0] -= 1
            if left[0] == 0:
                raise spillway.IoError("the disk is gone")
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(tier, call, fails)
            with pytest.raises(spillway.IoError, match="the disk is gone"):
                train(optimizer, params, [6, 7])
        for refused in (optimizer.step, optimizer.commit, optimizer.state_dict):
            with pytest.raises(OutOfOrderError, match=r"a transfer of the tier failed.*call rollback\(\)"):
                refused()
        optimizer.rollback()
        assert same(params, twins) and same(optimizer.state_dict(), theirs.state_dict())
        train(optimizer, params, [6])
        optimizer.rollback()
    train(optimizer, params, [6])
    train(theirs, twins, [6])
    assert same(params, twins)
    optimizer.close()


@pytest.mark.sampled(cases=3)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("call", ["step", "load_state_dict", "commit", "rollback", "state_dict"])
def test_a_rollback_mends_what_an_interrupt_has_left(call, tmp_path):
    """A signal handler raises at the begin of functions of the package, one after another."""
    params, twins = parameters(), parameters()
    optimizer, theirs = on(tmp_path, "soap", params, 5000), Soap(twins)
    train(optimizer, params, range(4))
    train(theirs, twins, range(4))
    optimizer.commit()
    saved, weights, at, seen = optimizer.state_dict(), [param.detach().clone() for param in params], 0, 0
    work = {
        "step": optimizer.step,
        "load_state_dict": lambda: optimizer.load_state_dict(saved),
        "commit": lambda: optimizer.commit(step=4),
        "rollback": optimizer.rollback,
        "state_dict": optimizer.state_dict,
    }[call]
    while True:
        gradients(params, 4)
        try:
            if not interrupted(work, at, below=True):
                break
            seen += 1
        except AssertionError as lost:
            # Python drops an exception in the finalizer of a generator.
            assert "was lost" in str(lost)
        at += 1 + at // 20
        try:
            train(optimizer, params, [5])
        except OutOfOrderError:
            pass
        optimizer.rollback()
        assert same([param.detach() for param in params], weights), at
        assert same(optimizer.state_dict(), saved), at
    assert seen > 20
    optimizer.rollback()
    for some, own in ((params, optimizer), (twins, theirs)):
        gradients(some, 4)
        own.step()
    assert same(params, twins)
    optimizer.close()


def test_tensors_of_other_classes_resume(tmp_path):
    torchao = pytest.importorskip("torchao.optim")
    ones, others = (parameters(shapes=[(64, 128), (32,), (128, 64)]) for _ in range(2))
    theirs = torchao.AdamW8bit(ones, lr=1e-2)
    for step in range(6):
        gradients(ones, step)
        gradients(others, step)
        theirs.step()
        ours = Staged(torchao.AdamW8bit, others, chunk_bytes=20_000, tier=options(tmp_path), lr=1e-2)
        ours.step()
        ours.commit()
        assert same(ones, others) and same(theirs.state_dict(), ours.state_dict())
        ours.close()
    module = sys.modules.pop("torchao.optim.subclass_8bit")
    try:
        with pytest.raises(InvalidArgumentError, match="OptimState8bit, which is not loaded; import torchao.optim.subclass_8bit before"):
            Staged(torchao.AdamW8bit, others, chunk_bytes=20_000, tier=options(tmp_path), lr=1e-2)
    finally:
        sys.modules["torchao.optim.subclass_8bit"] = module


class Keeps(optim.Optimizer):
    def __init__(self, params, keep):
        super().__init__(params, {"lr": 0.1})
        self.keep = keep

    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            self.state[param] = {"kept": self.keep}


def test_a_value_that_no_commit_stores_is_refused_at_the_commit(tmp_path):
    params = parameters()
    optimizer = Staged(Keeps, params, tier=options(tmp_path), keep=object())
    gradients(params, 0)
    optimizer.step()
    with pytest.raises(UnsupportedError, match=r"the state of param_groups\[0\]\['params'\]\[0\] has a value that a commit cannot store"):
        optimizer.commit()
    optimizer.step()
    optimizer.close()


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"name": "sgd"}, InvalidArgumentError, "states of torch.optim.nadam.NAdam, and the class is torch.optim.sgd.SGD"),
        ({"params": parameters()[:2]}, InvalidArgumentError, "the optimizer has 2 parameters, and the tier was committed with 6"),
        ({"params": parameters()[::-1]}, InvalidArgumentError, r"\[0\] is torch.float32 of shape \(12, 12\); the tier was committed"),
    ],
)
def test_another_optimizer_is_refused_by_the_tier(arguments, error, message, tmp_path):
    params = parameters()
    optimizer = on(tmp_path, "nadam", params)
    gradients(params, 0)
    optimizer.step()
    optimizer.commit()
    optimizer.close()
    with pytest.raises(error, match=message):
        on(tmp_path, **{"name": "nadam", "params": parameters(), **arguments})
    resumed = on(tmp_path, "nadam", parameters(seed=2))
    assert resumed.resumed_step == 1
    resumed.close()


def test_options_that_have_no_use_and_other_tiers_are_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="part_elements of TierOptions"):
        Staged(optim.NAdam, parameters(), tier=options(tmp_path)._replace(part_elements=4096))
    params = parameters()
    adam = spillway.torch.AdamW(params, tier=options(tmp_path))
    gradients(params, 0)
    adam.step()
    adam.commit()
    adam.close()
    with pytest.raises(InvalidArgumentError, match="states that no Staged has committed"):
        on(tmp_path, "nadam", parameters())


def test_a_constructor_that_fails_closes_its_tier(tmp_path):
    class Sparse(optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})
            self.state[self.param_groups[0]["params"][0]] = {"sum": torch.zeros(3).to_sparse()}

    with pytest.raises(UnsupportedError, match="no plain memory") as refused:
        Staged(Sparse, parameters(), tier=options(tmp_path))
    # The error refers to the optimizer, whose tier another one may open.
    on(tmp_path, "nadam", parameters()).close()
    del refused


def test_a_closed_tier_refuses_calls(tmp_path):
    params = parameters()
    optimizer = on(tmp_path, "nadam", params)
    train(optimizer, params, [0])
    assert f"    tier: ['{tmp_path}']" in repr(optimizer)
    optimizer.close()
    optimizer.close()
    assert "    closed: True" in repr(optimizer)
    for call in (optimizer.step, optimizer.commit, optimizer.state_dict):
        with pytest.raises(InvalidArgumentError, match="this Staged is closed"):
            call()
