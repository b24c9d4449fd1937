"""Directories of runs that do not resume: each engine has its own, whose name no run that resumes can have.

A job "a" has the scratch directories "a-scratch-1", "a-scratch-2" and so on, as many as it has engines at a time. What a dead
process left in them is removed; a tier of any other name never is."""

import contextlib
import os
import re

from .. import tier
from ..errors import SpillwayError, TierLocked

_MOST = 10_000
_NAME = re.compile(r".*-scratch-[0-9]+", re.DOTALL)


def is_scratch(job):
    """Whether a job's name is one of scratch directories."""
    return _NAME.fullmatch(job) is not None


def open_scratch(settings, job, rank, world, **options):
    """A new tier in the first scratch directories of a job that no live process holds."""
    for number in range(1, _MOST + 1):
        name = f"{job}-scratch-{number}"
        try:
            for path in settings.paths:
                tier.collect(path.directory, job=name, host=settings.host, rank=rank)
            opened = tier.Tier(settings.paths, job=name, host=settings.host, rank=rank, world=world, mode="create",
                               durability="process", stall_seconds=settings.stall_seconds, **options)
        except TierLocked:
            if number == _MOST:
                raise
        else:
            _collect_dead(settings, job, rank, name)
            return opened


def _collect_dead(settings, job, rank, own):
    """Removes what dead engines left under higher numbers. An object store is not searched."""
    for path in settings.paths:
        names = [] if path.directory.startswith("s3://") else os.listdir(path.directory)
        for name in names:
            if name != own and re.fullmatch(re.escape(job) + "-scratch-[0-9]+", name):
                with contextlib.suppress(SpillwayError):
                    tier.collect(path.directory, job=name, host=settings.host, rank=rank)
