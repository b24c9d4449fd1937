"""One process of test_tier_ranks.py: optimizers of several processes with states on a tier, of which one fails in a step or a commit.

tier_ranks_worker.py FOLDER CASE...     prints a line for each case that holds"""

import datetime
import itertools
import os
import pathlib
import sys

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[2] / "packaging" / "python")]

import torch
import torch.distributed as dist

import spillway
from spillway import torch as own

STEPS = 4
#: A tier is made once for each name.
_names = itertools.count()


class Run:
    """An optimizer over parameters of this process, on a tier of its own of all processes.

    Args:
        job: Name of the tier; None: a new one.
        options: Of AdamW."""

    def __init__(self, job=None, **options):
        self.job = f"run-{next(_names)}" if job is None else job
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.params = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in (3000, 500)]
        tier = own.TierOptions(FOLDER, job=self.job, part_elements=1024, pin_memory=False, durability="process")
        self.optimizer = own.AdamW(self.params, lr=1e-2, tier=tier, **options)
        self.home = self.optimizer._home

    def backward(self, step):
        generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
        self.optimizer.zero_grad()
        sum((param * torch.randn(param.shape, generator=generator)).sum() for param in self.params).backward()

    def train(self, steps):
        for step in steps:
            self.backward(step)
            self.optimizer.step()

    def values(self):
        return torch.cat([param.detach().flatten() for param in self.params])


def is_bad():
    """True in the process that fails, the last one."""
    return dist.get_rank() == dist.get_world_size() - 1


def disk_is_full(*_, **__):
    raise spillway.IoError("the disk is full")


def heard(work, own_words, words, kind=spillway.SpillwayError):
    """Every process gets an error of this call, and none waits for the timeout of its group."""
    wanted = own_words if is_bad() else words
    try:
        work()
    except kind as error:
        assert wanted in str(error), error
    else:
        raise AssertionError(f"no error: {wanted}")


KINDS = [
    {"max_norm": 1.0, "process_group": "WORLD", "overlap": False},
    {"max_norm": 1.0, "process_group": "WORLD", "overlap": True},
    {"overlap": False},
    {"overlap": True},
]


def kinds():
    for options in KINDS:
        given = {"process_group": dist.group.WORLD} if "process_group" in options else {}
        yield {**options, **given}


def fail_before(run):
    """The step is refused before its norm is reduced."""
    rows = run.home.rows

    def refused(*_):
        run.home.rows = rows
        disk_is_full()

    run.home.rows = refused


def fail_after(run):
    """The step fails after the reduction."""
    if run.home._beside is not None:
        decide = run.home._beside.decide

        def failing(*_):
            run.home._beside.decide = decide
            disk_is_full()

        run.home._beside.decide = failing
        return
    swap = run.home.tiered.swap
    recorded = swap._recorded

    def failing_call(*_, **__):
        swap._recorded = recorded
        disk_is_full()

    swap._recorded = failing_call


def steps():
    """One process fails in a step: all raise in the same step, and after a rollback of all the run has the bits of an undisturbed one."""
    for options in kinds():
        whole = Run(**options)
        whole.train(range(STEPS))
        for fail in (fail_before, fail_after):
            run = Run(**options)
            run.train(range(2))
            run.optimizer.commit()
            run.train(range(2, 3))
            if is_bad():
                fail(run)
            run.backward(3)
            refused_by_all = fail is fail_before and options.get("max_norm")
            words = "another process of process_group refused this step" if refused_by_all else "rank 1: IoError: the disk is full"
            words = words.replace("rank 1", f"rank {dist.get_world_size() - 1}")
            heard(run.optimizer.step, "the disk is full", words)
            if not refused_by_all:
                # Nobody continues with states of different steps.
                heard(run.optimizer.commit, "different numbers of steps", "different numbers of steps", spillway.InvalidArgumentError)
            run.optimizer.rollback()
            run.train(range(2, STEPS))
            run.optimizer.commit()
            assert torch.equal(run.values(), whole.values()), (options, fail)
            run.optimizer.close()
            again = Run(run.job, **options)
            assert again.optimizer.resumed_step == STEPS and torch.equal(again.values(), whole.values())
            again.optimizer.close()
        whole.optimizer.close()


def left_behind():
    """One process returns to the last commit alone: the next step and the next commit are errors of all."""
    for options in kinds():
        run = Run(**options)
        run.train(range(1))
        run.optimizer.commit()
        run.train(range(1, 3))
        if is_bad():
            run.optimizer.rollback()
        words = "different numbers of steps"
        heard(run.optimizer.commit, words, words, spillway.InvalidArgumentError)
        heard(lambda: run.optimizer.commit(step=9), words, words, spillway.InvalidArgumentError)
        run.backward(3)
        heard(run.optimizer.step, words, words, spillway.OutOfOrderError)
        run.optimizer.rollback()
        run.train(range(1, 2))
        run.optimizer.commit()
        assert run.home.tiered.committed_step == 2
        run.optimizer.close()


def commits():
    """A commit that one process refuses is refused by all, and nothing was committed. One that one process could not write ends all of
    them, and all resume at the commit before."""
    run, rank, other = Run(), dist.get_rank(), "another rank failed"
    run.train(range(1))
    run.optimizer.commit()
    before = run.values()
    run.train(range(1, 2))
    words = "different numbers of a commit"
    for wait in (True, False):
        heard(lambda: run.optimizer.commit(step=rank, wait=wait), words, words, spillway.InvalidArgumentError)
        heard(lambda: run.optimizer.commit(payload="text" if is_bad() else b"", wait=wait), "payload", other)
        heard(lambda: run.optimizer.commit(step=-1 if is_bad() else 7, wait=wait), "step is -1", other)
    heard(lambda: run.optimizer.commit(wait=is_bad()), "different values of wait", "different values of wait")
    assert run.home.tiered.committed_step == 1 and not run.home.tiered.apart
    if is_bad():
        run.home.tiered.swap._commit = disk_is_full
    heard(run.optimizer.commit, "the disk is full", other)
    heard(run.optimizer.commit, "some processes", "some processes", spillway.TierError)
    heard(run.optimizer.step, "some processes", "some processes", spillway.TierError)
    run.optimizer.close()
    again = Run(run.job)
    assert again.optimizer.resumed_step == 1 and torch.equal(again.values(), before)
    again.optimizer.close()


def without_gradients():
    """A process without gradients counts the steps of the others, so that all commit one number."""
    run = Run()
    for step in range(3):
        run.backward(step)
        if is_bad():
            run.optimizer.zero_grad()
        run.optimizer.step()
    run.optimizer.commit()
    assert run.home.tiered.committed_step == 3
    run.optimizer.close()


def opens():
    """A process that cannot begin is an error of all."""
    from spillway.torch._tier_states import TierStates

    fill, check = TierStates._fill, TierStates._check_served
    for name in ("_fill", "_check_served"):
        if is_bad():
            setattr(TierStates, name, disk_is_full)
        heard(Run, "the disk is full", "another rank failed")
        TierStates._fill, TierStates._check_served = fill, check
    Run().optimizer.close()


CASES = {work.__name__: work for work in (steps, left_behind, commits, without_gradients, opens)}


def main(folder, *cases):
    global FOLDER
    FOLDER = folder
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    for case in cases:
        CASES[case]()
        print(f"{case} holds\n", end="", flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
