"""Directories of runs that do not resume. Each engine has its own, under a job name that no resuming run can have.

A job "a" uses the scratch directories "a-scratch-1", "a-scratch-2" and so on, one per concurrent engine. Leftovers of
dead processes in them are removed; tiers of other names are never removed."""

import contextlib
import os
import re

from .. import tier
from ..errors import SpillwayError, TierLockedError

_MOST = 10_000
_NAME = re.compile(r".*-scratch-[0-9]+", re.DOTALL)


def is_scratch(job):
    """True if a job's name is that of scratch directories."""
    return _NAME.fullmatch(job) is not None


def open_scratch(settings, job, rank, world, **options):
    """Opens a new tier in the first scratch directories of a job that no live process holds."""
    for number in range(1, _MOST + 1):
        name = f"{job}-scratch-{number}"
        try:
            for path in settings.paths:
                tier.collect(path.directory, job=name, host=settings.host, rank=rank)
            opened = tier.Tier(
                settings.paths,
                job=name,
                host=settings.host,
                rank=rank,
                world=world,
                mode="create",
                durability="process",
                io_timeout=settings.io_timeout_seconds,
                **options,
            )
        except TierLockedError:
            if number == _MOST:
                raise
        else:
            _collect_dead(settings, job, rank, name)
            return opened


def _collect_dead(settings, job, rank, own):
    """Removes the directories of dead engines with higher numbers. Object stores are not searched."""
    for path in settings.paths:
        names = [] if path.directory.startswith("s3://") else os.listdir(path.directory)
        for name in names:
            if name != own and re.fullmatch(re.escape(job) + "-scratch-[0-9]+", name):
                with contextlib.suppress(SpillwayError):
                    tier.collect(path.directory, job=name, host=settings.host, rank=rank)
