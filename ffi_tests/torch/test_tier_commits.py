"""States on a tier: commits, resumes, rollbacks, kills, forks and interrupts."""

import copy
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import time

import pytest
import torch
from tier_runs import same, same_states, tier, train
from tier_worker import KINDS, backward, options, parameters, random_grads

import spillway
from spillway import torch as own
from spillway._snapshot import Snapshot
from spillway.tiered import Tiered

#: One of two processes of a run: rank 1 cannot commit its second step.
APART = """
import os, sys
sys.path[:0] = {paths!r}
import spillway, torch
from spillway import torch as own
from tier_worker import options, parameters, random_grads
rank = int(sys.argv[1])
torch.distributed.init_process_group("gloo", init_method="file://" + {rendezvous!r}, rank=rank, world_size=2)
params = parameters()
optimizer = own.AdamW(params, lr=1e-2, max_norm=1.0, tier=options({directory!r}))
print("resumed", optimizer.resumed_step)
for step in range(optimizer.resumed_step or 0, 2):
    random_grads(params, step)
    optimizer.step()
    if rank == {failing} and step:
        def fail(*_):
            raise spillway.IoError("the disk is full")
        optimizer._home.tiered.swap._commit = fail
    try:
        optimizer.commit()
    except (spillway.IoError, spillway.TierError) as error:
        print(type(error).__name__)
        calls = {{
            "commit": optimizer.commit,
            "rollback": optimizer.rollback,
            "step": optimizer.step,
            "state_dict": optimizer.state_dict,
            "load_state_dict": lambda: optimizer.load_state_dict({{}}),
            "master": lambda: optimizer.master(params[2]),
        }}
        for name, call in calls.items():
            try:
                call()
            except spillway.TierError as refusal:
                assert "AdamW: a step was committed by some processes, and others could not commit it" in str(refusal), refusal
            else:
                raise AssertionError(name)
optimizer.close()
# Threads of torch's Gloo that lost their peer can abort a process that ends in the usual way.
sys.stdout.flush()
os._exit(0)
"""
#: One of two processes that restore a snapshot and commit a step number again, in which rank 1 is killed. With "again", they begin anew.
RETURNED = """
import os, signal, sys
sys.path[:0] = {paths!r}
import torch
from spillway import torch as own
from tier_worker import options, parameters, random_grads
rank, again = int(sys.argv[1]), sys.argv[2] == "again"
torch.distributed.init_process_group("gloo", init_method="file://" + {rendezvous!r}, rank=rank, world_size=2)
params = parameters()
optimizer = own.AdamW(params, lr=1e-2, tier=options({directory!r}))

def train(begin, end):
    for step in range(begin, end):
        random_grads(params, step)
        optimizer.step()

if not again:
    train(0, 2)
    optimizer.commit()
    optimizer.snapshot({directory!r} + "/snapshot").wait()
    torch.distributed.barrier()
    train(2, 4)
    optimizer.commit(wait={wait})
    assert optimizer.restore({directory!r} + "/snapshot") == 2
    train(2, 4)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        optimizer.commit()
    except Exception:
        os._exit(3)
else:
    print("resumed", optimizer.resumed_step, float(sum(param.double().sum() for param in params)))
    optimizer.close()
sys.stdout.flush()
os._exit(0)
"""
#: One of two processes that commit other states at the step number of the last commit, in which rank 1 is killed. With "again", they
#: begin anew.
TWICE = """
import os, signal, sys
sys.path[:0] = {paths!r}
import torch
from spillway import torch as own
from tier_worker import options, parameters, random_grads
rank, again = int(sys.argv[1]), sys.argv[2] == "again"
torch.distributed.init_process_group("gloo", init_method="file://" + {rendezvous!r}, rank=rank, world_size=2)
params = parameters()
optimizer = own.AdamW(params, lr=1e-2, tier=options({directory!r}))
if again:
    print("resumed", optimizer.resumed_step, float(sum(param.double().sum() for param in params)))
    optimizer.close()
    sys.stdout.flush()
    os._exit(0)
for part in range(2):
    for step in range(2 * part, 2 * part + 2):
        random_grads(params, step)
        optimizer.step()
    if (part, rank, {wait}) == (1, {killed}, True):
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        optimizer.commit(step=7, wait={wait})
        if (part, rank) == (1, {killed}):
            os.kill(os.getpid(), signal.SIGKILL)
        if part == 1:
            optimizer.rollback()
    except Exception:
        os._exit(3)
    torch.distributed.barrier()
optimizer.close()
os._exit(0)
"""
WORKER = pathlib.Path(__file__).with_name("tier_worker.py")


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


def test_a_snapshot_continues_on_another_tier_with_the_bits_of_its_run(tier, tmp_path):
    params = parameters()
    optimizer = own.AdamW(params, lr=1e-2, tier=tier)
    with pytest.raises(spillway.NoStateError):
        optimizer.snapshot(tmp_path / "early")
    train(optimizer, params, range(3))
    optimizer.commit(payload=b"epoch 1")
    with optimizer.snapshot(tmp_path / "snapshot", bytes_per_second=2_000_000) as snapshot:
        train(optimizer, params, range(3, 5))
        optimizer.commit()
        train(optimizer, params, range(5, 6))
        assert snapshot.wait() == 3
    optimizer.close()

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    place = options([elsewhere])
    with spillway.Tier(place.paths, job=place.job) as copied:
        assert copied.import_from(tmp_path / "snapshot") == 3
    resumed = parameters(seed=5)
    again = own.AdamW(resumed, lr=1e-2, tier=place._replace(resume="resume"))
    assert again.resumed_step == 3 and again.payload == b"epoch 1"
    train(again, resumed, range(3, 6))
    assert same(resumed, params)
    in_memory = own.AdamW(parameters())
    with pytest.raises(spillway.InvalidArgumentError, match="construct the optimizer with tier"):
        in_memory.snapshot(tmp_path / "memory")


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


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_go_on_beside_a_commit(tier, overlap):
    params, whole = parameters(), parameters()
    optimizer, uninterrupted = own.AdamW(params, lr=1e-2, tier=tier, overlap=overlap), own.AdamW(whole, lr=1e-2, master="f32")
    commits = []
    for step in range(8):
        for run, tensors in ((optimizer, params), (uninterrupted, whole)):
            train(run, tensors, [step])
        commits.append(optimizer.commit(payload=b"%d" % step, wait=False))
    assert same(params, whole)
    train(optimizer, params, [8])
    optimizer.rollback()
    assert same(params, whole) and all(commit.succeeded for commit in commits)
    same_states(optimizer.state_dict()["state"], uninterrupted.state_dict()["state"])
    # The close waits for the last commit.
    optimizer.commit(wait=False)
    train(optimizer, params, [9])
    optimizer.close()
    again = own.AdamW(params, lr=1e-2, tier=tier)
    assert again.resumed_step == 8 and same(params, whole)


def test_a_commit_beside_steps_that_fails_leaves_its_states_uncommitted(tier, tmp_path, caplog):
    params = parameters()
    optimizer = own.AdamW(params, lr=1e-2, tier=tier)
    train(optimizer, params, range(2))
    optimizer.commit()
    train(optimizer, params, range(2, 4))
    next((tmp_path / "one").rglob("data")).rename(tmp_path / "moved")
    optimizer.commit(wait=False)
    train(optimizer, params, range(4, 5))
    after = [param.detach().clone() for param in params]
    # This one moves what the path without names has.
    optimizer.commit()
    assert "a commit with wait=False failed" in caplog.text and same(params, after)
    optimizer.close()
    again = own.AdamW(params, lr=1e-2, tier=tier._replace(paths=tier.paths[1:]))
    assert again.resumed_step == 5 and same(params, after)


@pytest.mark.sampled(cases=2)
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


def finished(optimizer, params, directory, states):
    """Checks the finished snapshots of a run against `states`, parameters by step; returns their number."""
    snapshots = [place for place in directory.glob("step-*") if place.suffix != ".partial"]
    for place in snapshots:
        step = optimizer.restore(place)
        assert place.name == f"step-{step}" and same(params, states[step])
        shutil.rmtree(place)
    return len(snapshots)


@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("kind", ["f32", "split"])
def test_kills_among_commits_and_snapshots_beside_steps(kind, tmp_path):
    """KILLS sets another number of kills."""
    complete = last = 0
    (made, more), chance = KINDS[kind], random.Random(7)
    whole = made()
    uninterrupted = own.AdamW(whole, lr=1e-2, max_norm=50.0, **{"master": "f32", **more})
    states = {0: [param.detach().clone() for param in whole]}

    def train_to(step):
        for number in range(max(states), step):
            uninterrupted.zero_grad()
            backward(whole, number)
            uninterrupted.step()
            states[number + 1] = [param.detach().clone() for param in whole]

    for _ in range(int(os.environ.get("KILLS", 2))):
        with subprocess.Popen(
            [sys.executable, WORKER, tmp_path, str(chance.choice((1, 2))), f"{kind} beside"], stdout=subprocess.PIPE
        ) as process:
            for _ in range(chance.randrange(1, 12)):
                assert process.stdout.readline().strip()
            time.sleep(chance.random() * 0.02)
            process.kill()
        params = made()
        for param in params:
            param.data.zero_()
        optimizer = own.AdamW(params, lr=1e-2, max_norm=50.0, tier=options(tmp_path), **more)
        step = optimizer.resumed_step or 0
        assert step >= last and (not step or optimizer.payload == str(step).encode())
        train_to(step)
        assert not step or same(params, states[step])
        last = step
        complete += finished(optimizer, params, tmp_path, states)
        if optimizer.resumed_step is not None:
            # A restore has committed an older step.
            last = 0
        optimizer.close()
    print(complete, "snapshots")


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
    assert optimizer._home.tiered.tier.verify() > 0


def test_ctrl_c_that_arrives_while_the_library_commits(tier, monkeypatch):
    """Python raises the KeyboardInterrupt once the call has returned; the library has committed then."""
    params = parameters()
    optimizer = own.AdamW(params, lr=1e-2, tier=tier)
    train(optimizer, params, range(1))
    optimizer.commit()
    train(optimizer, params, range(1, 3))
    committed, states = [param.detach().clone() for param in params], copy.deepcopy(optimizer.state_dict()["state"])
    monkeypatch.setattr(spillway.Swap, "_recorded", interrupted_after("spw_swap_commit", spillway.Swap._recorded))
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


def two_processes(code, folder, name, *arguments, statuses=(0, 0), **values):
    """The lines that the two processes of a program print."""
    here = pathlib.Path(__file__).parent
    code = code.format(paths=[str(here), *sys.path], rendezvous=str(folder / name), directory=str(folder / "states"), **values)
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(rank), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert tuple(process.returncode for process in processes) == statuses, outputs
    return [output.splitlines() for output, _ in outputs]


@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("wait", [True, False])
def test_processes_killed_in_a_second_commit_of_a_step_number_resume_at_the_commit_of_both(tmp_path, wait):
    (tmp_path / "states").mkdir()
    two_processes(RETURNED, tmp_path, "first", "anew", statuses=(3, -9), wait=wait)
    first, second = two_processes(RETURNED, tmp_path, "second", "again", wait=wait)
    whole = parameters()
    optimizer = own.AdamW(whole, lr=1e-2, master="f32")
    train(optimizer, whole, range(2))
    assert first == second == [f"resumed 2 {float(sum(param.double().sum() for param in whole))}"]


@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("wait", [True, False])
def test_processes_with_two_commits_of_one_step_number_resume_at_the_commit_of_both(tmp_path, wait):
    (tmp_path / "states").mkdir()
    two_processes(TWICE, tmp_path, "whole", "anew", wait=wait, killed=None)
    whole, either = parameters(), []
    optimizer = own.AdamW(whole, lr=1e-2, master="f32")
    for part in range(2):
        train(optimizer, whole, range(2 * part, 2 * part + 2))
        either.append([f"resumed 7 {float(sum(param.detach().double().sum() for param in whole))}"])
    assert two_processes(TWICE, tmp_path, "second", "again", wait=wait, killed=None) == [either[1]] * 2
    shutil.rmtree(tmp_path / "states")
    (tmp_path / "states").mkdir()
    two_processes(TWICE, tmp_path, "first", "anew", statuses=(3, -9), wait=wait, killed=1)
    found = two_processes(TWICE, tmp_path, "third", "again", wait=wait, killed=1)
    # Rank 0 has both commits. Rank 1 has the first one alone, or was killed after it had the second beside steps.
    assert found in ([either[0]] * 2, [either[1]] * 2) and (found[0] == either[0] or not wait), found


def test_processes_of_which_one_could_not_commit_go_no_further_and_resume_at_the_step_of_both(tmp_path):
    def run(name, failing):
        return two_processes(APART, tmp_path, name, failing=failing)

    (tmp_path / "states").mkdir()
    assert run("first", 1) == [["resumed None", "TierError"], ["resumed None", "IoError"]]
    assert run("second", None) == [["resumed 1"], ["resumed 1"]]
    assert run("third", None) == [["resumed 2"], ["resumed 2"]]


def interrupted_after(function, recorded):
    """In place of `recorded`: a signal handler that raises after a call of this function."""

    def run(handle, outcome, called, *arguments):
        recorded(handle, outcome, called, *arguments)
        if called == function:
            raise KeyboardInterrupt

    return run


def trained(place, steps, seed=0):
    params = parameters(seed=seed)
    optimizer = own.AdamW(params, lr=1e-2, tier=place)
    train(optimizer, params, steps)
    return params, optimizer


def test_a_snapshot_of_another_number_of_processes_is_named(tier, tmp_path):
    params, optimizer = trained(tier, range(1))
    optimizer.commit()
    optimizer.snapshot(tmp_path / "snapshot").wait()
    for rank in range(2):
        shutil.copytree(tmp_path / "snapshot", tmp_path / "other" / f"rank-{rank}")
    with pytest.raises(spillway.InvalidArgumentError, match="a snapshot of 2 processes, and this run has 1"):
        optimizer.restore(tmp_path / "other")


def test_a_restored_snapshot_goes_on_with_the_bits_of_its_run(tier, tmp_path):
    params, optimizer = trained(tier, range(3))
    optimizer.commit(payload=b"epoch 1")
    with optimizer.snapshot(tmp_path / "snapshot") as snapshot:
        train(optimizer, params, range(3, 6))
        assert snapshot.wait() == 3
    after = [param.detach().clone() for param in params]
    assert optimizer.restore(tmp_path / "snapshot") == 3 and optimizer.payload == b"epoch 1"
    train(optimizer, params, range(3, 6))
    assert same(params, after)
    # It was committed too.
    optimizer.rollback()
    train(optimizer, params, range(3, 6))
    assert same(params, after)
    optimizer.close()
    for steps in (0, 2):
        # A new tier without a commit.
        elsewhere = tmp_path / f"elsewhere-{steps}"
        elsewhere.mkdir()
        others, other = trained(options([elsewhere]), range(steps), seed=7)
        assert other.restore(tmp_path / "snapshot") == 3
        train(other, others, range(3, 6))
        assert same(others, after)
        other.close()


def test_snapshots_that_are_not_finished_or_of_other_states_are_refused_and_damaged_ones_lose_no_step(tier, tmp_path):
    params, optimizer = trained(tier, range(2))
    optimizer.commit()
    with optimizer.snapshot(tmp_path / "snapshot") as snapshot:
        snapshot.wait()
    train(optimizer, params, range(2, 4))
    before = [param.detach().clone() for param in params]

    def refused(error, words, directory):
        with pytest.raises(error, match=words):
            optimizer.restore(directory)

    refused(spillway.NoStateError, "no finished snapshot", tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    refused(spillway.NoStateError, "no finished snapshot", tmp_path / "empty")
    manifest = json.loads((tmp_path / "snapshot" / "manifest.json").read_text())
    for number, (change, error, words) in enumerate(
        (
            ({"rank": 1, "world": 2}, spillway.InvalidArgumentError, "rank 1 of 2"),
            ({"payload": ""}, spillway.InvalidArgumentError, "another program"),
            ({"format": "?"}, spillway.CorruptError, "no manifest of a snapshot"),
            ({"extents": 7}, spillway.CorruptError, "no manifest of a snapshot"),
            ({"extents": manifest["extents"][:-1]}, spillway.CorruptError, "subgroups, or not those of its commit"),
        )
    ):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "manifest.json").write_text(json.dumps({**manifest, **change}))
        refused(error, words, tmp_path / str(number))
    assert same(params, before)
    place = options([tmp_path / "other"])
    (tmp_path / "other").mkdir()
    alone = own.AdamW([torch.nn.Parameter(torch.zeros(5))], tier=place)
    with pytest.raises(spillway.InvalidArgumentError, match="was committed with"):
        alone.restore(tmp_path / "snapshot")
    alone.close()
    file = next((tmp_path / "snapshot").glob("*.bin"))
    content = bytearray(file.read_bytes())
    commits = optimizer._home.tiered.commits
    file.write_bytes(content[:-1])
    refused(spillway.CorruptError, "bytes, and the manifest", tmp_path / "snapshot")
    file.unlink()
    refused(spillway.CorruptError, "is missing", tmp_path / "snapshot")
    assert optimizer._home.tiered.commits == commits and same(params, before)
    content[100] ^= 1
    file.write_bytes(content)
    refused(spillway.CorruptError, "checksum", tmp_path / "snapshot")
    assert same(params, before)
    optimizer.rollback()
    assert same(params, before)
    # Nothing was committed to this tier.
    (tmp_path / "new").mkdir()
    params, optimizer = trained(options([tmp_path / "new"]), range(2))
    before = [param.detach().clone() for param in params]
    refused(spillway.CorruptError, "checksum", tmp_path / "snapshot")
    train(optimizer, params, range(2, 4))
    optimizer.rollback()
    assert same(params, before)
    optimizer.close()
    (tmp_path / "full").mkdir()
    params, optimizer = trained(options([tmp_path / "full"]), range(2))

    def full(*_):
        raise spillway.IoError("the disk is full")

    optimizer._home.tiered.swap._commit = full
    refused(spillway.CorruptError, "checksum.*the states of before are lost", tmp_path / "snapshot")
    with pytest.raises(spillway.OutOfOrderError):
        train(optimizer, params, range(2, 3))
    optimizer.close()


def test_a_wait_for_an_older_snapshot_keeps_the_newer_one(tier, tmp_path):
    params, optimizer = trained(tier, range(1))
    optimizer.commit()
    with optimizer.snapshot(tmp_path / "older", keep=1) as older:
        while not older.progress().ended:
            time.sleep(0.01)
        train(optimizer, params, range(1, 2))
        optimizer.commit()
        with optimizer.snapshot(tmp_path / "newer", keep=1) as newer:
            while not newer.progress().ended:
                time.sleep(0.01)
            assert older.wait() == 1 and (tmp_path / "newer").exists()
            assert newer.wait() == 2
    assert not (tmp_path / "older").exists() and optimizer.restore(tmp_path / "newer") == 2


def test_snapshots_are_removed_by_count_and_nothing_else_is(tier, tmp_path):
    params, optimizer = trained(tier, range(1))
    parent = tmp_path / "snapshots"
    parent.mkdir()
    (parent / "notes.txt").write_text("mine")
    (parent / "step-0.123.partial").mkdir()
    (parent / "directory").mkdir()
    for step in range(1, 7):
        optimizer.commit(step)
        with optimizer.snapshot(parent / f"step-{step}", keep=2 if step > 2 else None) as snapshot:
            snapshot.wait()
            snapshot.wait()
        if step == 1:
            # A snapshot with a file of somebody else, a copy of another job, a link, and a half.
            shutil.copytree(parent / "step-1", parent / "with-file")
            (parent / "with-file" / "notes.txt").write_text("mine")
            shutil.copytree(parent / "step-1", parent / "other-job")
            manifest = parent / "other-job" / "manifest.json"
            manifest.write_text(manifest.read_text().replace(f'"job": "{tier.job}"', '"job": "another"'))
            shutil.copytree(parent / "step-1", parent / "half")
            next((parent / "half").glob("*.bin")).unlink()
            (parent / "link").symlink_to("step-1")
            left = {"notes.txt", "step-0.123.partial", "directory", "with-file", "other-job", "half", "link"}
    assert {found.name for found in parent.iterdir()} == left | {"step-5", "step-6"}
    with pytest.raises(spillway.InvalidArgumentError, match="keep is 0"):
        optimizer.snapshot(parent / "never", keep=0)
    optimizer.close()


def test_the_parts_of_several_processes_are_removed_together_once_all_are_finished(tmp_path):
    tiers = []
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        tiers.append(spillway.Tier([tmp_path / str(rank)], job="run", rank=rank, world=2))
    parent = tmp_path / "snapshots"
    for step in range(1, 5):
        (parent / f"step-{step}").mkdir(parents=True)
        for rank, each in enumerate(tiers):
            each.wait(each.put(each.define("weights", [5000]), [bytearray([step]) * 5000]))
            each.commit(step)
            with Snapshot(each, parent / f"step-{step}", 0, 1, f"rank-{rank}") as snapshot:
                snapshot.wait()
            if step > 1:
                # The one before stays until both are finished.
                assert {found.name for found in parent.iterdir()} == {f"step-{step}"} | ({f"step-{step - 1}"} if rank == 0 else set())
    for each in tiers:
        each.close()


def test_moments_of_another_dtype_are_refused(tmp_path):
    optimizers = []
    for moments in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(moments)
        folder.mkdir()
        params = [torch.nn.Parameter(torch.ones(100))]
        optimizers.append(own.AdamW(params, tier=options([folder]), moment_dtype=moments))
        optimizers[-1].commit(0)
    one, other = optimizers
    one.snapshot(tmp_path / "snapshot").wait()
    with pytest.raises(spillway.InvalidArgumentError, match="moments of f32, and this optimizer has bf16"):
        other.restore(tmp_path / "snapshot")
    for optimizer in optimizers:
        optimizer.close()


@pytest.mark.parametrize("call", ["rollback", "restore", "load"])
def test_what_an_interrupt_leaves_of_two_steps_is_never_committed(tmp_path, monkeypatch, call):
    (tmp_path / "tier").mkdir()
    params = [torch.nn.Parameter(torch.ones(30_000))]
    optimizer = own.AdamW(params, lr=0.1, tier=options([tmp_path / "tier"]))

    def step():
        params[0].grad = torch.ones(30_000)
        optimizer.step()

    step()
    optimizer.commit()
    optimizer.snapshot(tmp_path / "snapshot").wait()
    saved = copy.deepcopy(optimizer.state_dict())
    step()
    optimizer.commit()
    two = params[0].detach().clone()
    step()
    calls, plain = [], {name: getattr(Tiered, name) for name in ("read", "write")}

    def interrupted(name):
        def run(*arguments, **keywords):
            calls.append(name)
            if len(calls) == 3:
                raise KeyboardInterrupt
            plain[name](*arguments, **keywords)

        return run

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Tiered, "write" if call == "load" else "read", interrupted("write" if call == "load" else "read"))
        {
            "rollback": optimizer.rollback,
            "restore": lambda: optimizer.restore(tmp_path / "snapshot"),
            "load": lambda: optimizer.load_state_dict(saved),
        }[call]()
    for use in (step, optimizer.commit, optimizer.state_dict, lambda: optimizer.snapshot(tmp_path / "other")):
        with pytest.raises(spillway.OutOfOrderError, match="was interrupted.* call rollback"):
            use()
    if call == "restore":
        assert optimizer.restore(tmp_path / "snapshot") == 1
        step()
    elif call == "load":
        optimizer.load_state_dict(saved)
        optimizer.rollback()
    else:
        optimizer.rollback()
    assert torch.equal(params[0], two)
    step()
    optimizer.commit()
    optimizer.close()


def test_a_parameter_that_changed_its_dtype_is_not_committed(tmp_path):
    param = torch.nn.Parameter(torch.ones(100))
    optimizer = own.AdamW([param], tier=options([tmp_path]))
    optimizer.commit(0)
    param.data = param.data.double()
    with pytest.raises(spillway.InvalidArgumentError, match="is torch.float64, and was torch.float32"):
        optimizer.commit()
    param.data = param.data.float()
    optimizer.commit()
    optimizer.close()
