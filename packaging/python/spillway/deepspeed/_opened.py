"""A tier that an engine opened, and the swapped update of its sub-groups on it.

Sub-groups are divided into parts. DeepSpeed's default sub-group of 10^9 elements has 12 GB of state, and an update would
hold several of them in memory. Parts are fetched, stepped, written back and cached; callers use sub-groups.

A run that does not resume uses scratch directories, under a job name that no resuming run can have. A job "a" uses
"a-scratch-1", "a-scratch-2" and so on, one per concurrent engine. Leftovers of dead processes in them are removed; tiers
of other names are never removed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re

from .. import _abi, _ranks, tier
from ..errors import InvalidArgumentError, SpillwayError, TierLockedError
from ..swap import STATES, Swap, working_bytes

_CURE = 'load a checkpoint, with "resume": false in the spillway block'
# Bytes of state per parameter.
_STATE, _SPLIT_STATE = 12, 10


class Opened:
    """The tier and the update on it, which may outlive their TierSwapper until they are closed."""

    def __init__(self, settings, rank, world):
        self._settings, self._process, self.closed, self.parted = settings, os.getpid(), False, None
        options = {"block_bytes": _block_bytes(settings.part_elements, settings.split_master)}

        def open_at(step):
            return tier.Tier(
                settings.paths,
                job=settings.job,
                host=settings.host,
                rank=rank,
                world=world,
                at_step=step,
                io_timeout=settings.io_timeout_seconds,
                durability=settings.durability,
                **options,
            )

        self.tier = (
            _ranks.open_together(settings, rank, world, open_at, _CURE)
            if settings.resume
            else open_scratch(settings, settings.job, rank, world, **options)
        )

    def swap(self, elements):
        """Opens the swapped update of sub-groups with these numbers of elements."""
        settings = self._settings
        with _naming_limits(settings, elements):
            self.parted = PartedSwap(
                self.tier,
                elements,
                settings.part_elements,
                cache_bytes=settings.cache_bytes,
                ratio=settings.ratio,
                turns=settings.turns,
                huge_pages=settings.pin_memory,
                pin_memory=settings.pin_memory,
                split_master=settings.split_master,
            )

    def close(self):
        """Closes both; removes scratch directories."""
        # A forked child's handles are copies that it does not own.
        if self.closed or self._process != os.getpid():
            return
        try:
            if self.parted is not None:
                self.parted.swap.close()
        finally:
            self.tier.close() if self._settings.resume else self.tier.destroy()
            self.closed = True


class PartedSwap:
    """A Swap of parts of at most `most` elements, addressed by sub-group."""

    def __init__(self, tier, elements, most, *, cache_bytes, split_master=False, **options):
        self.parts = [
            (index, start, min(start + most, count)) for index, count in enumerate(elements) for start in range(0, max(count, 1), most)
        ]
        sizes = [end - start for _, start, end in self.parts]
        memory_budget = working_bytes(sizes, len(tier.paths()), split_master=split_master) + cache_bytes
        self.swap = Swap(tier, sizes, memory_budget=memory_budget, split_master=split_master, **options)
        self._elements = list(elements)
        self._of = [[] for _ in elements]
        for place, (index, start, end) in enumerate(self.parts):
            self._of[index].append((place, start, end))

    def read(self, index, *arrays, weights=None):
        """Copies parts of a sub-group's state into float32 arrays; with a split master `weights` has its bf16
        weights."""
        for place, start, end in self._places(index, arrays):
            self.swap.read(place, *_cut(arrays, start, end), weights=None if weights is None else weights[start:end])

    def write(self, index, *arrays):
        """Sets parts of a sub-group's state; None keeps a part."""
        for place, start, end in self._places(index, arrays):
            self.swap.write(place, *_cut(arrays, start, end))

    def _places(self, index, arrays):
        for name, array in zip(STATES, arrays):
            if array is not None and len(array) != self._elements[index]:
                raise InvalidArgumentError(
                    f"{name} has {len(array)} elements, sub-group {index} has {self._elements[index]}; pass a "
                    "tensor of the sub-group's size"
                )
        return self._of[index]

    def ds_step(self, optimizer_id, calls, tensors, stepped=None):
        """Runs one step, with a call and a row of Swap.table() per sub-group. Calls `stepped(index, param)` with the
        new master weights of each sub-group for which `stepped.wants(index)` is true."""
        rows, cuts = [], []
        for index, start, end in self.parts:
            # Repeated calls of the same step use the same coefficients, as in DeepSpeed.
            rows.append(calls[index])
            cuts.append(_cut(tensors[index], start, end))
        table = self.swap.table(cuts)
        self.swap.ds_step(optimizer_id, rows, table, stepped and self._gathered(stepped))

    def _gathered(self, stepped):
        """Collects parts, which complete in any order, and reports a sub-group once all its parts are stepped."""
        missing, whole = {}, {}

        def part_stepped(place, address):
            index, start, end = self.parts[place]
            if not stepped.wants(index):
                return
            if len(self._of[index]) == 1:
                stepped(index, floats_at(address, end - start))
                return
            param = whole.setdefault(index, floats(self._elements[index]))
            param[start:end] = floats_at(address, end - start)
            missing[index] = missing.get(index, len(self._of[index])) - 1
            if missing[index] == 0:
                stepped(index, whole.pop(index))

        return part_stepped


def _cut(arrays, start, end):
    return [None if array is None else array[start:end] for array in arrays]


def _block_bytes(part_elements, split_master):
    """Block size with at least 128 blocks per part, because paths share a part in whole blocks; limited to 16 KiB..1
    MiB."""
    state = (_SPLIT_STATE if split_master else _STATE) * part_elements
    return min(max(state // 128 // 4096 * 4096, 16 << 10), 1 << 20)


def floats(count):
    """An uninitialized float32 tensor."""
    import torch

    return torch.empty(count, dtype=torch.float32)


def floats_at(address, count):
    """A float32 tensor over existing memory, without a copy."""
    import torch

    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)


@contextlib.contextmanager
def _naming_limits(settings, elements):
    """Turns the tier's error for too small a limit into one that names the settings."""
    try:
        yield
    except SpillwayError as error:
        limits = {f"spillway.paths[{index}].limit_bytes": path.limit_bytes for index, path in enumerate(settings.paths) if path.limit_bytes}
        if not limits or error.status != _abi.ERR_LIMIT_REACHED:
            raise
        needed = (_SPLIT_STATE if settings.split_master else _STATE) * sum(elements)
        given = ", ".join(f"{name} is {limit}" for name, limit in limits.items())
        raise InvalidArgumentError(
            f"{given}: too small for the optimizer states of this rank, which take {needed} bytes, rounded up to "
            "whole blocks; raise the limits, or add a path"
        ) from error


_MOST_SCRATCH = 10_000
_SCRATCH_NAME = re.compile(r".*-scratch-[0-9]+", re.DOTALL)


def is_scratch(job):
    """True if a job's name is that of scratch directories."""
    return _SCRATCH_NAME.fullmatch(job) is not None


def open_scratch(settings, job, rank, world, **options):
    """Opens a new tier in the first scratch directories of a job that no live process holds."""
    for number in range(1, _MOST_SCRATCH + 1):
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
            if number == _MOST_SCRATCH:
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
