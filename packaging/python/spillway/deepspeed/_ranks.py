"""How ranks that commit each for itself go on together.

settle() ends a commit: no rank writes anything after it before all ranks have it. So wherever a run is killed, its ranks
are one commit apart at most, and a rank that is ahead still has the one that the others are at, whole: its tier gives it up
with the first write after a commit and not before."""

from .. import tier
from ..errors import InvalidArgument, SpillwayError


def settle(world):
    """Waits until every rank has committed."""
    if world > 1:
        import torch
        torch.distributed.barrier()


def open_together(settings, rank, world, open_at):
    """This rank's tier, from open_at(step), at the step that all ranks have; None: it begins."""
    if world == 1:
        return open_at(None)
    own = tier.steps(settings.paths, job=settings.job, rank=rank, world=world)
    everyone = [tier.Steps(*steps) for steps in _gathered(tuple(own), world)]
    last = [steps.last for steps in everyone]
    if len(set(last)) == 1:
        return open_at(own.last)
    common = set.intersection(*map(_choices, everyone))
    if len(common) != 1:
        raise _refusal(last)
    step, opened, trouble = common.pop(), None, None
    try:
        if step is None:
            _forget(settings, rank)
        opened = open_at(step)
    except SpillwayError as error:
        trouble = error
    troubles = [words for words in _gathered(trouble and str(trouble), world) if words]
    if troubles:
        if opened is not None:
            opened.close()
        raise _refusal(last, troubles) from trouble
    return opened


def _choices(steps):
    before = {None} if steps.first else {steps.before} - {None}
    return {steps.last} | before


def _forget(settings, rank):
    for path in settings.paths:
        if path.directory is not None:
            tier.collect(path.directory, job=settings.job, rank=rank)


def _gathered(value, world):
    import torch
    values = [None] * world
    torch.distributed.all_gather_object(values, value)
    return values


def _refusal(last, troubles=()):
    return InvalidArgument("; ".join([f"the run ended while its ranks committed: they hold the steps {last}", *troubles,
                                      'load a checkpoint, with "resume": false in the spillway block']))
