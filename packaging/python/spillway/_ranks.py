"""Coordinates the commits of several ranks.

No rank writes after a commit before all ranks have committed. Beside a commit ranks write, and none begins the next commit before all
ranks have this one. Wherever a run is killed, its ranks are therefore at most one commit apart. A rank that is ahead still has the
previous commit intact: its tier discards that commit with the first later write, or keeps it until the next commit begins. A failure on
one rank raises an error on all ranks, so no rank waits for a failed one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import tier
from .errors import InvalidArgumentError, TierError


def together(
    world: int,
    work: Callable[[], Any],
    undo: Callable[[Any], object] | None = None,
    group: Any = None,
    partly: Callable[[], object] | None = None,
) -> Any:
    """Returns the result of `work` on this rank once every rank of `group` (None: all) has its own. If `work` fails on one rank, all
    ranks raise, and `undo` is called with this rank's result. `partly` is called on all ranks if `work` succeeded on some of them only."""
    return exchanged(world, work, lambda _: None, undo, group, partly)[0]


def exchanged(
    world: int,
    work: Callable[[], Any],
    told: Callable[[Any], Any],
    undo: Callable[[Any], object] | None = None,
    group: Any = None,
    partly: Callable[[], object] | None = None,
) -> tuple[Any, list[Any]]:
    """As together(), with one gather. Returns also what every rank tells of its result by `told`."""
    if world == 1:
        value = work()
        return value, [told(value)]
    value = trouble = words = None
    try:
        value = work()
        words = told(value)
    except Exception as error:
        trouble = error
    reports = gathered((trouble and f"{type(trouble).__name__}: {trouble}", words), world, group)
    failed = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(reports) if text]
    if failed and trouble is None and undo:
        undo(value)
    if partly is not None and 0 < len(failed) < world:
        partly()
    if trouble is not None:
        try:
            raise trouble
        finally:
            # The error refers to this frame by its traceback: a circle would keep the caller's objects until the garbage collector runs.
            trouble = None
    if failed:
        raise TierError("another rank failed, so this rank gives up too: " + "; ".join(failed))
    return value, [words for _, words in reports]


def agreed(everything: list[Any], rank: int, world: int, cure: str, group: Any = None) -> list[dict[str, int]]:
    """For each tier of this rank the options of Tier for the commit that all ranks have, of one step in all tiers. Without options it is a
    new run, for which commits of some tiers only are removed. `everything` has the settings of each tier of this rank; `cure` ends the
    message if there is no such step."""
    own, told = exchanged(
        world,
        lambda: [
            tier.steps(
                settings.paths, job=settings.job, host=settings.host, rank=rank, world=world, degraded=getattr(settings, "degraded", False)
            )
            for settings in everything
        ],
        lambda found: [tuple(steps) for steps in found],
        group=group,
    )
    everyone = [[tier.Steps(*steps) for steps in ranks] for ranks in told]
    step, tags = chosen(everyone, cure)

    def forget() -> None:
        # A tier without a commit stays: its directories may just be missing.
        for settings, steps in zip(everything, own):
            if step is None and steps.last is not None:
                _forget(settings, rank)

    if step is None and any(steps.last is not None for ranks in everyone for steps in ranks):
        together(world, forget, group=group)
    return [{} if step is None else {"at_step": step, "at_tag": tag} for tag in tags]


def chosen(everyone: list[list[tier.Steps]], cure: str) -> tuple[int | None, list[int]]:
    """The step at which all ranks can be opened, and the tag of its commit in each tier; None is a new run. `everyone` has the steps of
    each tier of each rank; `cure` ends the message if there is no such step."""
    commits = {(steps.last, steps.last_tag) for ranks in everyone for steps in ranks}
    if len(commits) > 1:
        return _common(everyone, cure)
    [(step, tag)] = commits
    return step, [tag] * len(everyone[0])


def _common(everyone: list[list[tier.Steps]], cure: str) -> tuple[int | None, list[int]]:
    """The newest step at which all ranks can resume, and the tag of its commit in each tier; None is a new run. A rank can start anew if it
    has a tier with no commit or with its first commit only. A rank without a tier cannot: its directories may be elsewhere.

    The commits of a round of tiers have one tag. Tiers that were committed one by one have tags of their own."""
    shared = [set.intersection(*map(_commits, ranks)) for ranks in zip(*everyone)]
    common = set.intersection(*({step for step, _ in commits} for commits in shared))
    if not common:
        tiers = [steps for ranks in everyone for steps in ranks]
        nothing = [rank for rank, ranks in enumerate(everyone) if not all(steps.exists for steps in ranks)]
        found = f"; ranks {nothing} found no tier of their own, because a path is missing or the host has another name" if nothing else ""
        same = set.intersection(*({step for step, _ in _commits(steps)} for steps in tiers))
        apart = f"; they have different commits of step {max(same, key=lambda step: step or 0)}" if same else ""
        raise InvalidArgumentError(
            f"the ranks have no committed step in common: their last steps are {[steps.last for steps in tiers]}{apart}{found}; {cure}"
        )
    # Two of them: some ranks have returned to the step before the last one, and others have not.
    chosen = max((step for step in common if step is not None), default=None)
    rounds = {tag for step, tag in set.intersection(*shared) if step == chosen}

    def tag_of(commits: set[tuple[int | None, int]], ranks: tuple[tier.Steps, ...]) -> int:
        # Of two commits of one step the earlier one: another tier may have only that.
        tags = rounds or {tag for step, tag in commits if step == chosen}
        return next((steps.before_tag for steps in ranks if steps.before == chosen and steps.before_tag in tags), None) or max(tags)

    return chosen, [tag_of(commits, ranks) for commits, ranks in zip(shared, zip(*everyone))]


def _commits(steps: tier.Steps) -> set[tuple[int | None, int]]:
    """Steps and tags of the commits at which a tier can be opened; (None, 0): anew."""
    if not steps.exists:
        return set()
    before = {(None, 0)} if steps.first else {(steps.before, steps.before_tag)} - {(None, 0)}
    return {(steps.last, steps.last_tag)} | before


def _forget(settings: Any, rank: int) -> None:
    for path in settings.paths:
        if path.directory is not None:
            tier.collect(path.directory, job=settings.job, host=settings.host, rank=rank)


def gathered(value: Any, world: int, group: Any = None) -> list[Any]:
    """Gathers a value from every rank of `group` (None: all)."""
    if world == 1:
        return [value]
    import torch

    if not _has_group():
        raise InvalidArgumentError(
            f"world is {world}, and torch.distributed is not initialized; call torch.distributed.init_process_group(), or leave out world"
        )
    if (size := torch.distributed.get_world_size(group)) != world:
        raise InvalidArgumentError(f"world is {world}, and the process group has {size} processes; pass the number of its processes")
    values = [None] * world
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def own(group: Any = None) -> tuple[int, int]:
    """The number of this rank in `group` (None: all), and the number of ranks; 0 and 1 without torch.distributed."""
    import torch

    return (torch.distributed.get_rank(group), torch.distributed.get_world_size(group)) if _has_group() else (0, 1)


def _has_group() -> bool:
    import torch

    return torch.distributed.is_available() and torch.distributed.is_initialized()
