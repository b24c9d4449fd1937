"""How ranks that commit each for itself go on together.

No rank writes anything after a commit before all ranks have made theirs. So wherever a run is killed, its ranks
are one commit apart at most, and a rank that is ahead still has the one that the others are at, whole: its tier gives it up
with the first write after a commit and not before. What fails on one rank is an error on all of them: nobody waits for a
rank that has given up."""

from .. import tier
from ..errors import InvalidArgument, TierFailure


def together(world, work, undo=None):
    """What `work` gives on this rank, once every rank has it. If it fails on one, it is an error on all, and `undo` is
    called with what it gave here."""
    if world == 1:
        return work()
    value = trouble = None
    try:
        value = work()
    except Exception as error:
        trouble = error
    words = gathered(trouble and f"{type(trouble).__name__}: {trouble}", world)
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(words) if text]
    if failed and trouble is None and undo:
        undo(value)
    if trouble is not None:
        raise trouble
    if failed:
        raise TierFailure("another rank failed: " + "; ".join(failed))
    return value


def open_together(settings, rank, world, open_at):
    """This rank's tier, from open_at(step), at the step that all ranks have; None: it begins."""
    if world == 1:
        return open_at(None)
    own = together(world, lambda: tier.steps(settings.paths, job=settings.job, host=settings.host, rank=rank, world=world))
    everyone = [tier.Steps(*steps) for steps in gathered(tuple(own), world)]
    last = [steps.last for steps in everyone]
    step = last[0] if len(set(last)) == 1 else _common(everyone)

    def work():
        # None where all are at none is also said of a rank whose directories are not there.
        if step is None and own.last is not None:
            _forget(settings, rank)
        return open_at(step)

    return together(world, work, lambda opened: opened.close())


def _common(everyone):
    """The one step at which all ranks can go on. None, the beginning, is one for a rank that has not committed yet or once
    only, and for no rank that has nothing at all: its directories may be somewhere else."""
    choices = [{steps.last} | ({None} if steps.first else {steps.before} - {None}) if steps.exists else set()
               for steps in everyone]
    common = set.intersection(*choices)
    if len(common) != 1:
        nothing = [rank for rank, steps in enumerate(everyone) if not steps.exists]
        found = f"; ranks {nothing} found none of their own: is a path missing, or has the host another name?" if nothing else ""
        raise InvalidArgument(f"the run ended while its ranks committed: they hold the steps {[steps.last for steps in everyone]}"
                              f'{found}; load a checkpoint, with "resume": false in the spillway block')
    return common.pop()


def _forget(settings, rank):
    for path in settings.paths:
        tier.collect(path.directory, job=settings.job, host=settings.host, rank=rank)


def gathered(value, world):
    """A value of each rank."""
    import torch
    values = [None] * world
    torch.distributed.all_gather_object(values, value)
    return values
