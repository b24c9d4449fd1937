"""OptimizerStateStore in several processes: they resume at the step that all have, and an error of one is an error of all."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest
from hybrid import same
from test_store import Model, in_memory, stored

import spillway
from spillway.megatron import OptimizerStateStore

WORLD = 2
#: A process of a job. `script` has the name `make`, which makes the store of `model`.
WORKER = """
import os, signal, sys
sys.path[:0] = {paths!r}
import torch, spillway
from test_store import Model, stored
from hybrid import same
rank, folder = int(sys.argv[1]), {folder!r}
torch.distributed.init_process_group("gloo", init_method="file://" + {rendezvous!r}, rank=rank, world_size={world})
model = Model()
def make(**options):
    return stored(model, folder, rank=rank, world={world}, **options)
def train(store, steps):
    for step in steps:
        model.backward(step)
        store.step()
{script}
# Threads of torch's Gloo that lost their peer can abort a process that ends in the usual way.
sys.stdout.flush()
os._exit(0)
"""


def run(tmp_path, script, name, world=WORLD):
    """Runs a script in each rank; returns exit codes and outputs."""
    (tmp_path / "states").mkdir(exist_ok=True)
    code = WORKER.format(
        paths=[str(pathlib.Path(__file__).parent), *sys.path],
        folder=str(tmp_path / "states"),
        world=world,
        rendezvous=str(tmp_path / f"rendezvous-{name}"),
        script=textwrap.dedent(script),
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    return [rank.returncode for rank in ranks], outputs


#: Rank 0 commits step 2, and rank 1 is killed before its commit of this step.
KILLED = """
store = make()
train(store, [0])
store.commit()
train(store, [1])
if rank == 1:
    store._tiered.swap._commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
try:
    store.commit()
except Exception:
    print("committed", store.committed_step)
    for call in (store.commit, store.rollback, lambda: store.load_from(folder)):
        try:
            call()
        except spillway.TierError as error:
            assert "others could not commit" in str(error)
        else:
            raise AssertionError("the ranks are apart")
"""


def test_ranks_of_which_one_was_killed_before_its_commit_resume_at_the_step_of_both(tmp_path):
    codes, outputs = run(tmp_path, KILLED, "killed")
    assert codes == [0, -signal.SIGKILL] and outputs[0][0] == "committed 2\n", outputs
    codes, outputs = run(
        tmp_path,
        """
        store = make()
        print(store.resumed_step, store.steps, same(model.copies(), __import__("test_store").in_memory(range(1))))
        train(store, [1, 2])
        store.commit()
        print(store.committed_step, same(model.copies(), __import__("test_store").in_memory(range(3))))
        store.close()
        """,
        "resumed",
    )
    assert codes == [0, 0] and all(output[0] == "1 1 True\n3 True\n" for output in outputs), outputs


#: Where rank 1 fails, and the error there.
FAILURES = {
    "shards": ("stored(Model([]) if rank else model, folder, rank=rank, world=2, job=name)", "InvalidArgumentError"),
    "another world": ("stored(model, folder, rank=rank, world=3, job=name)", "InvalidArgumentError"),
    "the tier": ("make(host='x' * 5000 if rank else 'x')", "InvalidArgumentError"),
    "the budget": ("make(host_memory=1 if rank else None)", "InvalidArgumentError"),
    "the number of a commit": ("made.append(make()); made[-1].commit(-1 if rank else None)", "InvalidArgumentError"),
    "numbers of ranks": ("made.append(make()); made[-1].commit(5 + rank)", "InvalidArgumentError"),
    "other calls": ("made.append(make()); train(made[-1], range(1 + rank)); made[-1].commit()", "OutOfOrderError"),
    "a step": ("made.append(make())\nif rank: made[-1]._tiered.swap.step = None\ntrain(made[-1], [0])", "TypeError"),
    "a rollback": ("made.append(make())\nif rank: made[-1]._tiered.swap.rollback = None\nmade[-1].rollback()", "TypeError"),
    "a save": ("made.append(make()); made[-1].save_to(folder + ('/missing/saved' if rank else '/saved'))", "FileNotFoundError"),
    "a load": (
        "made.append(make()); made[-1].save_to(folder + '/saved'); made[-1].load_from(folder + ('/none' if rank else '/saved'))",
        "NoStateError",
    ),
    "a write of a load": (
        "made.append(make()); made[-1].save_to(folder + '/saved')\n"
        "if rank: made[-1]._tiered.swap.write = None\nmade[-1].load_from(folder + '/saved')",
        "TypeError",
    ),
}


def test_an_error_of_one_rank_is_an_error_of_all(tmp_path):
    codes, outputs = run(
        tmp_path,
        f"""
        make_in = make
        for name, (code, _) in {FAILURES!r}.items():
            made = []
            make = lambda **options: make_in(job=name.replace(" ", "-"), **options)
            try:
                exec(code)
            except Exception as error:
                print(f"{{name}}: {{type(error).__name__}}: {{error}}")
            else:
                print(f"{{name}}: no error")
            for store in made:
                store.close()
        """,
        "job",
    )
    assert codes == [0, 0], outputs
    first, second = (output.splitlines() for output, _ in outputs)
    assert len(first) == len(second) == len(FAILURES)
    for name, one, other in zip(FAILURES, first, second, strict=True):
        assert other.startswith(f"{name}: {FAILURES[name][1]}"), other
        words = (
            "another rank failed, so this rank gives up too: rank 1",
            "have different",
            "in different calls: rank 0: commit(); rank 1: step()",
            "world is 3",
            "for the processes [1]",
        )
        assert one.startswith(f"{name}: ") and any(word in one for word in words), one


def test_processes_without_a_group_are_refused(tmp_path):
    with pytest.raises(spillway.InvalidArgumentError, match="world is 2, and torch.distributed is not initialized"):
        stored(Model(), tmp_path, world=2)
    assert os.listdir(tmp_path) == []


def test_stores_of_a_process_that_was_killed_between_their_commits_resume_at_one_step(tmp_path, monkeypatch):
    """attach_all() agrees over the stores of all optimizers."""
    from spillway.megatron import _distributed

    models = []

    def attach(store_class, model, paths, *, job, **options):
        return store_class(model.shards(), paths, job=job, **options)

    monkeypatch.setattr(_distributed, "attach", attach)

    def attached(job="run"):
        models[:] = [Model(), Model()]
        return OptimizerStateStore.attach_all(models, [tmp_path], job=job, tier_options={"durability": "process"})

    def train(stores, steps):
        for step in steps:
            for model, store in zip(models, stores, strict=True):
                model.backward(step)
                store.step()

    stores = attached()
    train(stores, range(2))
    for store in stores:
        store.commit()
    train(stores, [2])
    stores[0].commit()
    for store in stores:
        store.close()
    stores = attached()
    assert [store.resumed_step for store in stores] == [2, 2]
    train(stores, [2, 3])
    assert all(same(model.copies(), in_memory(range(4))) for model in models)
    for store in stores:
        store.commit()
        store.close()
    stores = attached()
    assert [store.steps for store in stores] == [4, 4]
    for store in stores:
        store.close()


def test_stores_of_which_one_only_has_its_first_commit_begin_anew(tmp_path, monkeypatch):
    from spillway.megatron import _distributed

    monkeypatch.setattr(
        _distributed, "attach", lambda store_class, model, paths, *, job, **options: store_class(model.shards(), paths, job=job, **options)
    )
    with stored(Model(), tmp_path, job="run-0"):
        pass
    spillway.Tier([tmp_path], job="run-1", durability="process").close()
    stores = OptimizerStateStore.attach_all([Model(), Model()], [tmp_path], job="run", tier_options={"durability": "process"})
    assert [store.resumed_step for store in stores] == [None, None]
    for store in stores:
        store.close()
