"""States on a tier: commits, resumes, rollbacks, kills, forks and interrupts."""

import copy
import os
import pathlib
import subprocess
import sys

import pytest
from tier_runs import same, same_states, tier, train
from tier_worker import options, parameters, random_grads

import spillway
from spillway import torch as own

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


def test_processes_of_which_one_could_not_commit_go_no_further_and_resume_at_the_step_of_both(tmp_path):
    here = pathlib.Path(__file__).parent

    def run(name, failing):
        code = APART.format(
            paths=[str(here), *sys.path], rendezvous=str(tmp_path / name), directory=str(tmp_path / "states"), failing=failing
        )
        processes = [
            subprocess.Popen([sys.executable, "-c", code, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        outputs = [process.communicate(timeout=300) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], outputs
        return [output.splitlines() for output, _ in outputs]

    (tmp_path / "states").mkdir()
    assert run("first", 1) == [["resumed None", "TierError"], ["resumed None", "IoError"]]
    assert run("second", None) == [["resumed 1"], ["resumed 1"]]
    assert run("third", None) == [["resumed 2"], ["resumed 2"]]


def interrupted(status):
    """In place of the check of a status: a signal handler that raises after the call."""
    assert status == 0
    raise KeyboardInterrupt
