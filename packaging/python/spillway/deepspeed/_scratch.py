"""Scratch directories: the tiers of a run that does not resume.

Their job names are such that no resuming run can have. A job "a" uses "a-scratch-1", "a-scratch-2" and so on, one per concurrent engine.
Leftovers of dead processes in them are removed; tiers of other names are never removed."""

from __future__ import annotations

import contextlib
import os
import re

from .. import tier
from ..errors import SpillwayError, TierLockedError
from ..tiered import Place

_MOST_SCRATCH = 10_000
_SCRATCH_NAME = re.compile(r".*-scratch-[0-9]+", re.DOTALL)


def is_scratch(job):
    """True if a job's name is that of scratch directories."""
    return _SCRATCH_NAME.fullmatch(job) is not None


def place_of(settings, job, rank, world, **options):
    """Where a tier of these settings is."""
    given = {"io_timeout": settings.io_timeout_seconds, "turns": settings.turns}
    return Place(settings.paths, job, settings.host, rank, world, options={**given, **options})


def open_scratch(place):
    """Opens a new tier in the first scratch directories of a place's job that no live process holds."""
    options = {**place.options, "mode": "create", "durability": "process"}
    for number in range(1, _MOST_SCRATCH + 1):
        scratch = place._replace(job=f"{place.job}-scratch-{number}", options=options)
        try:
            for path in place.paths:
                tier.collect(path.directory, job=scratch.job, host=place.host, rank=place.rank)
            opened = scratch.open_alone()
        except TierLockedError:
            if number == _MOST_SCRATCH:
                raise
        else:
            _collect_dead(place, scratch.job)
            return opened


def _collect_dead(place, own):
    """Removes the directories of dead engines with higher numbers. Object stores are not searched."""
    for path in place.paths:
        names = [] if path.directory.startswith("s3://") else os.listdir(path.directory)
        for name in names:
            if name != own and re.fullmatch(re.escape(place.job) + "-scratch-[0-9]+", name):
                with contextlib.suppress(SpillwayError):
                    tier.collect(path.directory, job=name, host=place.host, rank=place.rank)
