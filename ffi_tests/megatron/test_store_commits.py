"""Commits of OptimizerStateStore in the background: what they hold, what waits for them, and kills among those of several stores."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
from hybrid import BF16, same
from test_ranks import run
from test_store import SIZES, Model, in_memory, stored, train

import spillway
from spillway.megatron import OptimizerStateStore, _distributed

DURABILITY = {"durability": "process"}


def attach_all(models, folder, **options):
    """Stores of models, as those of a ChainedOptimizer."""
    plain = _distributed.attach
    _distributed.attach = lambda store_class, model, paths, *, job, **options: store_class(model.shards(), paths, job=job, **options)
    try:
        return OptimizerStateStore.attach_all(models, [folder], job="run", tier_options=DURABILITY, **options)
    finally:
        _distributed.attach = plain


def train_all(stores, models, steps):
    for step in steps:
        for store, model in zip(stores, models, strict=True):
            train(store, model, [step])


def wide():
    return Model(tuple(WIDE))


def close_all(stores):
    for store in stores:
        store.close()


def test_steps_go_on_beside_a_commit(tmp_path):
    model, commits = Model(), []
    with stored(model, tmp_path, bucket_bytes=1) as store:
        for step in range(8):
            train(store, model, [step])
            commits.append(store.commit(wait=False))
        committed = model.copies()
        train(store, model, [8])
        store.rollback()
        assert all(commit.succeeded for commit in commits) and store.committed_step == store.steps == 8
        assert same(model.copies(), committed) and same(committed, in_memory(range(8)))
        # The close waits for the last commit.
        store.commit(wait=False)
        train(store, model, range(8, 10))
    with stored(model, tmp_path, bucket_bytes=1) as store:
        assert store.resumed_step == 8 and same(model.copies(), committed)


def test_a_commit_that_fails_leaves_its_states_uncommitted(tmp_path, caplog):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    model = Model()
    store = stored(model, tmp_path / "one", tmp_path / "two", bucket_bytes=1)
    train(store, model, range(2))
    next((tmp_path / "one").rglob("data")).rename(tmp_path / "moved")
    failed = store.commit(wait=False)
    train(store, model, [2])
    with pytest.raises(spillway.SpillwayError):
        failed.wait()
    assert store.committed_step == 0
    # This one moves what the path without names has.
    assert store.commit(wait=False).succeeded and store.committed_step == 3
    assert "a commit with wait=False failed" in caplog.text
    after = model.copies()
    store.close()
    with stored(other := Model(), tmp_path / "two", bucket_bytes=1) as store:
        assert store.resumed_step == 3 and same(other.copies(), after)


def test_a_close_tells_of_a_commit_that_failed(tmp_path):
    model = Model()
    store = stored(model, tmp_path)
    train(store, model, [0])
    next(tmp_path.rglob("data")).rename(tmp_path / "moved")
    store.commit(wait=False)
    with pytest.raises(spillway.SpillwayError):
        store.close()


def test_what_follows_a_commit_has_its_states(tmp_path):
    """Each call comes while a commit is in flight."""
    model = Model()
    with stored(model, tmp_path) as store:
        train(store, model, range(2))
        store.commit(wait=False)
        assert store.save_to(tmp_path / "saved") == store.committed_step == 2 and store._tiered.commits == 2, "it was committed once"
        train(store, model, [2])
        store.commit(wait=False)
        with store.snapshot(tmp_path / "snapshot") as snapshot:
            assert snapshot.wait() == 3
        train(store, model, [3])
        store.commit(wait=False)
        store.publish()
        assert same(model.copies(), in_memory(range(4)))
        assert store.load_from(tmp_path / "saved") and store.steps == store.committed_step == 2
        assert same(train(store, model, [2, 3]), in_memory(range(4)))
        store.commit(wait=False)
        assert store.restore(tmp_path / "snapshot") == store.committed_step == 3
        assert same(model.copies(), in_memory(range(3)))
        train(store, model, [3])
        store.commit(wait=False)
        store.refresh()
        store.rollback()
        assert store.steps == 4 and same(model.copies(), in_memory(range(4)))
        with pytest.raises(spillway.InvalidArgumentError, match="step"):
            store.commit(-1, wait=False)
        assert same(train(store, model, [4]), in_memory(range(5)))


def test_no_store_of_a_chain_begins_a_commit_before_those_of_the_step_before_have_ended(tmp_path):
    models = [Model(), Model()]
    stores, begun = attach_all(models, tmp_path), [[], []]

    def noted(number, begin):
        def begins(step, payload, commit):
            if number == 0 or step != stores[0].steps:
                assert all(other.ended for commits in begun for other in commits)
            begun[number].append(commit)
            return begin(step, payload, commit)

        return begins

    for number, store in enumerate(stores):
        store._tiered.swap._begin_commit = noted(number, store._tiered.swap._begin_commit)
    for step in range(5):
        train_all(stores, models, [step])
        for store in stores:
            store.commit(wait=False)
    # The number of the step may be the same.
    for store in stores:
        store.commit(wait=False)
    assert [len(commits) for commits in begun] == [6, 6]
    close_all(stores)


@pytest.mark.parametrize("first", [True, False])
def test_beside_a_commit_of_a_chain_that_is_waited_for_none_is_in_flight(tmp_path, first):
    """Steps after it write where the commit before was."""
    models = [Model(), Model()]
    stores = attach_all(models, tmp_path)
    train_all(stores, models, range(2))
    commits = [store.commit(wait=wait) for store, wait in zip(stores, (first, not first), strict=True)]
    assert commits[first].ended and [store.committed_step for store in stores] == [2, 2]
    # The next round is again committed in the background.
    train_all(stores, models, [2])
    for store in stores:
        store.commit(wait=False)
    assert all(store._tiered._handles.commit.begun for store in stores)
    close_all(stores)


#: More shards than the memory of a store holds: its steps write to the tier.
WIDE = {f"d{number}": (2000, BF16) for number in range(40)}
#: Two stores of a process, of which the second has not ended its commit when the process is killed, many steps later.
BETWEEN = """
import os, signal, sys
sys.path[:0] = {paths!r}
from test_store import SIZES
from test_store_commits import WIDE, attach_all, train_all, wide
SIZES.update(WIDE)
models = [wide(), wide()]
stores = attach_all(models, {folder!r}, bucket_bytes=1)
assert [store.resumed_step for store in stores] == [None, None]
train_all(stores, models, range(2))
for store in stores:
    store.commit(wait=False)
train_all(stores, models, [2])
stores[0].commit(wait=False).wait()
train_all(stores, models, range(3, 8))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_killed_between_commits_of_two_stores_resumes_at_one_step(tmp_path, monkeypatch):
    for name, size in WIDE.items():
        monkeypatch.setitem(SIZES, name, size)
    code = BETWEEN.format(paths=[str(pathlib.Path(__file__).parent), *sys.path], folder=str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended
    models = [wide(), wide()]
    stores = attach_all(models, tmp_path, bucket_bytes=1)
    assert [store.resumed_step for store in stores] == [2, 2]
    train_all(stores, models, range(2, 4))
    assert all(same(model.copies(), in_memory(range(4), names=tuple(WIDE))) for model in models)
    close_all(stores)


KILLED = """
import sys
sys.path[:0] = {paths!r}
from test_store import Model
from test_store_commits import attach_all, train_all
models = [Model(), Model()]
stores = attach_all(models, {folder!r}, bucket_bytes=1)
for step in range(stores[0].steps, 10**9):
    train_all(stores, models, [step])
    for store in stores[:: 1 if step % 2 else -1]:
        store.commit(wait=False)
    print(step + 1, flush=True)
"""


def test_kills_among_commits_of_two_stores_leave_one_step_of_both(tmp_path):
    """KILLS sets another number of kills."""
    chance, last = random.Random(5), 0
    code = KILLED.format(paths=[str(pathlib.Path(__file__).parent), *sys.path], folder=str(tmp_path))
    for _ in range(int(os.environ.get("KILLS", 4))):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
            lines = [child.stdout.readline() for _ in range(chance.randrange(2, 12))]
            # The sleep only chooses the moment of the kill.
            time.sleep(chance.random() * 0.01)
            child.kill()
            lines += child.stdout.readlines()
        said = [int(line) for line in lines if line.endswith("\n")]
        models = [Model(), Model()]
        stores = attach_all(models, tmp_path, bucket_bytes=1)
        step = stores[0].steps
        # A commit has ended when the next one has begun.
        assert {store.steps for store in stores} == {step} and step >= max(last, said[-1] - 1), (step, lines)
        assert all(same(model.copies(), in_memory(range(step))) for model in models)
        close_all(stores)
        last = step


#: Two processes with two stores each. Rank 1 is killed before its commit of the second store.
RANKS = """
from test_store_commits import attach_all, train_all
models = [Model(), Model()]
stores = attach_all(models, folder)
print([store.resumed_step for store in stores])
train_all(stores, models, range(stores[0].steps, stores[0].steps + 2))
for store in stores:
    store.commit(wait=False)
train_all(stores, models, [stores[0].steps])
stores[0].commit(wait=False)
if rank == 1 and {kill}:
    stores[0]._tiered._handles.commit.finish()
    os.kill(os.getpid(), signal.SIGKILL)
if {kill}:
    try:
        # The next step is the first call that gets the error.
        train_all(stores, models, range(3, 4))
    except Exception as error:
        print(type(error).__name__)
    # Threads of torch's Gloo that lost their peer can abort a process that ends in the usual way.
    sys.stdout.flush()
    os._exit(0)
stores[1].commit(wait=False)
print(same(models[0].copies(), __import__("test_store").in_memory(range(stores[0].steps))))
for store in stores:
    store.close()
"""


def test_ranks_of_which_one_was_killed_between_commits_of_two_stores_resume_at_the_step_of_all(tmp_path):
    codes, outputs = run(tmp_path, RANKS.format(kill=True), "killed")
    assert codes == [0, -signal.SIGKILL] and outputs[0][0].startswith("[None, None]\n") and len(outputs[0][0].splitlines()) == 2, outputs
    codes, outputs = run(tmp_path, RANKS.format(kill=False), "resumed")
    assert codes == [0, 0] and all(output[0] == "[2, 2]\nTrue\n" for output in outputs), outputs


#: Two stores commit step 5 twice. All processes are killed between the second commits.
AGAIN = """
from test_store_commits import attach_all, train_all
models = [Model(), Model()]
stores = attach_all(models, folder)
train_all(stores, models, range(2))
for store in stores:
    store.commit(5, wait={wait})
train_all(stores, models, [2])
stores[{first}].commit(5, wait={wait})
try:
    if not {wait}:
        stores[{first}]._tiered._handles.commit.wait()
    torch.distributed.barrier()
finally:
    os.kill(os.getpid(), signal.SIGKILL)
"""
RESUMED = """
from test_store_commits import attach_all, train_all
models = [Model(), Model()]
stores = attach_all(models, folder)
first = __import__("test_store").in_memory(range(2))
print([(store.resumed_step, store.steps) for store in stores], [same(model.copies(), first) for model in models])
# Both commits of the step are there: the second one counts.
train_all(stores, models, [2])
for store in stores:
    store.commit(5)
for store in stores:
    store.close()
stores = attach_all([Model(), Model()], folder)
print([(store.resumed_step, store.steps) for store in stores])
for store in stores:
    store.close()
"""


@pytest.mark.sampled(cases=2)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("wait, first", [(True, 0), (False, 1)])
def test_stores_that_committed_a_step_again_when_all_were_killed_resume_at_one_of_the_two_commits(tmp_path, world, wait, first):
    codes, outputs = run(tmp_path, AGAIN.format(wait=wait, first=first), "killed", world)
    assert codes == world * [-signal.SIGKILL], outputs
    codes, outputs = run(tmp_path, RESUMED, "resumed", world)
    said = "[(5, 2), (5, 2)] [True, True]\n[(5, 3), (5, 3)]\n"
    assert codes == world * [0] and all(output[0] == said for output in outputs), outputs


def test_a_commit_that_is_made_again_after_a_failure_is_of_the_same_round(tmp_path, monkeypatch):
    """Otherwise a kill after it would lose the step that both stores have committed."""
    models = [Model(), Model()]
    stores = attach_all(models, tmp_path)
    train_all(stores, models, [0])
    stores[0].commit()
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(stores[1]._tiered.swap, "_commit", lambda *_: {}["no disk"])
        stores[1].commit()
    stores[1].commit()
    first, second = (store._tiered.committed.identity for store in stores)
    assert first == second
    stores[1].commit()
    assert stores[1]._tiered.committed.identity != first
    close_all(stores)
    stores = attach_all([Model(), Model()], tmp_path)
    assert [store.resumed_step for store in stores] == [1, 1] and {store._tiered.committed.identity for store in stores} == {first}
    close_all(stores)


#: Rank 1 cannot commit its first store in the background.
APART = """
from test_store_commits import attach_all, train_all
models = [Model(), Model()]
stores = attach_all(models, folder)
print([store.resumed_step for store in stores])
train_all(stores, models, range(stores[0].steps, 2))
if rank and stores[0].resumed_step is None:
    next(path for path in __import__("pathlib").Path(folder).rglob("rank-1/data") if "run-0" in str(path)).rename(folder + "/moved")
for store in stores:
    store.commit(wait=False)
train_all(stores, models, range(stores[0].steps, stores[0].steps + 1))
for store in stores:
    for call in (store.commit, store.rollback, store.step, lambda: store.save_to(folder)):
        try:
            call()
            print("no error")
        except spillway.TierError as error:
            assert "others could not commit" in str(error), error
for store in stores:
    try:
        store.close()
    except spillway.SpillwayError as error:
        print("close:", type(error).__name__)
# Threads of torch's Gloo that lost their peer can abort a process that ends in the usual way.
sys.stdout.flush()
os._exit(0)
"""


def test_a_commit_that_failed_in_one_process_stops_all_stores_of_all(tmp_path):
    codes, outputs = run(tmp_path, APART, "apart")
    assert codes == [0, 0], outputs
    (first, second) = (output.splitlines() for output, _ in outputs)
    assert first == ["[None, None]"] and second[0] == "[None, None]" and second[1].startswith("close: ") and len(second) == 2, outputs
