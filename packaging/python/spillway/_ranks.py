"""Coordinates the steps and the commits of several ranks.

No rank writes after a commit before all ranks have committed. Beside a commit ranks write, and none begins the next commit before all
ranks have this one. Wherever a run is killed, its ranks are therefore at most one commit apart. A rank that is ahead still has the
previous commit intact: its tier discards that commit with the first later write, or keeps it until the next commit begins. A failure on
one rank raises an error on all ranks, so no rank waits for a failed one.

A commit that all ranks have is never removed. A run begins anew in one case only: no rank has more than its first commit, these commits are
of one round, and some ranks have none. Such a commit was never one of the whole run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from . import tier
from .errors import InvalidArgumentError, OutOfOrderError, TierError

_log = logging.getLogger("spillway")
#: Most ranks, and most texts of ranks, that a message has.
_MOST_NAMED = 4


class Report(NamedTuple):
    """The report of a rank to the others: the call that it is in, its error there, and the part of its result that the others use."""

    call: str
    trouble: str | None
    told: Any


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
    call: str = "",
    cure: str = "",
) -> tuple[Any, list[Any]]:
    """As `together`; the same gather also brings told(result) of every rank, which is returned. `call` names the call of the program, and
    is the same on all ranks. `cure` ends the message about a failure on another rank."""
    if world == 1:
        value = work()
        return value, [told(value)]
    value = trouble = own = None
    done = False
    try:
        value = work()
        done = True
        own = told(value)
    except Exception as error:
        trouble = error
    text = None if trouble is None else f"{type(trouble).__name__}: {trouble}"
    reports = gathered(Report(call, text, own), world, group)
    failed = {rank: report.trouble for rank, report in enumerate(reports) if report.trouble}
    calls = differences([report.call for report in reports])
    if (failed or calls) and done and undo:
        undo(value)
    if partly is not None and 0 < len(failed) < world:
        partly()
    if trouble is not None:
        try:
            raise trouble
        finally:
            # The error refers to this frame by its traceback: a circle would keep the caller's objects until the garbage collector runs.
            trouble = None
    if calls:
        raise OutOfOrderError(f"the ranks are in different calls: {calls}; make the same calls in the same order in all processes")
    if failed:
        raise TierError(f"another rank failed, so this rank gives up too: {_named(failed)}{cure}")
    return value, [report.told for report in reports]


def differences(values: Sequence[Any]) -> str:
    """Which ranks have which of the values; an empty text if all have the same one."""
    return "" if all(value == values[0] for value in values) else _named(dict(enumerate(map(str, values))))


def _named(texts: Mapping[int, str]) -> str:
    """The first texts with their ranks, and how many more ranks there are: a thousand ranks print this to a thousand logs."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks_of.setdefault(text, []).append(rank)
    shown = list(ranks_of.items())[:_MOST_NAMED]
    more = len(texts) - sum(len(ranks) for _, ranks in shown)
    return "; ".join(f"{_numbers(ranks)}: {text}" for text, ranks in shown) + (f"; and {more} more ranks" if more else "")


def _numbers(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = len(ranks) - _MOST_NAMED
    return f"ranks {', '.join(map(str, ranks[:_MOST_NAMED]))}" + (f" and {more} more" if more > 0 else "")


def agreed(everything: list[Any], rank: int, world: int, cure: str, group: Any = None) -> list[dict[str, int]]:
    """For each tier of this rank the options of Tier for the commit that all ranks have, of one step in all tiers. Without options it is a
    new run. `everything` has the settings of each tier of this rank; `cure` ends the message if there is no such step."""
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
    if step is None and any(steps.last is not None for ranks in everyone for steps in ranks):
        # All ranks know it from the same reports.
        _log.warning("the first commit was not made by all ranks, so the run begins anew: %s", _described(everyone))
        together(world, lambda: _forget(everything, own, rank), group=group)
    return [{} if step is None else {"at_step": step, "at_tag": tag} for tag in tags]


def chosen(everyone: list[list[tier.Steps]], cure: str) -> tuple[int | None, list[int]]:
    """The step at which all ranks can be opened, and the tag of its commit in each tier; None is a new run. `everyone` has the steps of
    each tier of each rank; `cure` ends the message if there is no such step. The tool has the rule for one tier a rank, in all_ranks.rs;
    test_common_commit.py compares both."""
    commits = {(steps.last, steps.last_tag) for ranks in everyone for steps in ranks}
    if len(commits) > 1:
        return _common(everyone, cure)
    [(step, tag)] = commits
    return step, [tag] * len(everyone[0])


def _common(everyone: list[list[tier.Steps]], cure: str) -> tuple[int | None, list[int]]:
    """The newest step at which all ranks can resume, and the tag of its commit in each tier; None is a new run.

    The commits of a round of tiers have one tag. Tiers that were committed one by one have tags of their own."""
    shared = [set.intersection(*map(_commits, ranks)) for ranks in zip(*everyone)]
    common = set.intersection(*({step for step, _ in commits} for commits in shared))
    # If two steps are common, some ranks have returned to the step before the last one, and others have not.
    chosen = max((step for step in common if step is not None), default=None)
    if chosen is None and not (None in common and _is_first_round(everyone)):
        nothing = [rank for rank, ranks in enumerate(everyone) if not all(steps.exists for steps in ranks)]
        found = f"; ranks {nothing} found no tier of their own, because a path is missing or the host has another name" if nothing else ""
        steps_of = [{step for step, _ in _commits(steps) if step is not None} for ranks in everyone for steps in ranks]
        same = set.intersection(*steps_of)
        apart = f"; these are different commits of step {max(same)}" if same else ""
        raise InvalidArgumentError(
            f"the ranks have no committed step in common: {_described(everyone)}{apart}{found}; nothing was removed. "
            f"To begin anew, {cure}. To go on from one of these commits, open the tier of each rank by spillway.Tier with at_step, and "
            "commit it with its payload under one number"
        )
    rounds = {tag for step, tag in set.intersection(*shared) if step == chosen}

    def tag_of(commits: set[tuple[int | None, int]], ranks: tuple[tier.Steps, ...]) -> int:
        # Of two commits of one step the earlier one: another tier may have only that.
        tags = rounds or {tag for step, tag in commits if step == chosen}
        return next((steps.before_tag for steps in ranks if steps.before == chosen and steps.before_tag in tags), None) or max(tags)

    return chosen, [tag_of(commits, ranks) for commits, ranks in zip(shared, zip(*everyone))]


def _is_first_round(everyone: list[list[tier.Steps]]) -> bool:
    """True if the last commits have one step, and in each tier one tag: then they are of one round. Ranks without a commit do not count."""
    steps = {steps.last for ranks in everyone for steps in ranks if steps.last is not None}
    tags = [{steps.last_tag for steps in ranks if steps.last is not None} for ranks in zip(*everyone)]
    return len(steps) <= 1 and all(len(of_tier) <= 1 for of_tier in tags)


def _commits(steps: tier.Steps) -> set[tuple[int | None, int]]:
    """Steps and tags of the commits at which a tier can be opened; (None, 0): anew, if there is no more than a first commit. A rank without
    a tier cannot begin anew: its directories may be elsewhere."""
    if not steps.exists:
        return set()
    before = {(None, 0)} if steps.first else {(steps.before, steps.before_tag)} - {(None, 0)}
    return {(steps.last, steps.last_tag)} | before


def _described(everyone: list[list[tier.Steps]]) -> str:
    """The commits of each rank, in words."""

    def of_tier(steps: tier.Steps) -> str:
        if steps.last is None:
            return "no commit"
        return f"step {steps.last}" + (f", and step {steps.before} before it" if steps.before is not None else "")

    return _named({rank: " and ".join(map(of_tier, ranks)) for rank, ranks in enumerate(everyone)})


def _forget(everything: list[Any], own: list[tier.Steps], rank: int) -> None:
    """Removes the first commits of this rank. A tier without a commit stays: its directories may just be missing."""
    for settings, steps in zip(everything, own):
        for path in settings.paths if steps.last is not None else ():
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
