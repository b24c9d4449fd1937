"""What of this machine stands against a job: the checks of the tool's doctor, and versions that were not run."""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import subprocess
from collections.abc import Iterator, Sequence

from .. import _native
from ..deepspeed import job as deepspeed_job
from ..errors import LibraryNotFoundError
from .findings import Obstacle

#: The versions of each package that docs/compatibility.md says were run.
RUN = {"torch": ("2.11", "2.13", "2.15"), "deepspeed": deepspeed_job.RUN}
#: The capability under which the limit of locked memory does not hold.
_IPC_LOCK = 14


def version(package: str) -> str | None:
    """The version of an installed package, without its import."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def obstacles(directories: Sequence[str], frameworks: Sequence[str], host_bytes: int) -> Iterator[Obstacle]:
    """What stands against a job.

    Args:
        directories: Of the tier or of swap files; a few MiB are written to each and removed.
        frameworks: The packages that it needs.
        host_bytes: The host memory that it pins; 0: unknown."""
    for name in frameworks:
        yield from _version_obstacles(name)
    there = [path for path in directories if os.path.isdir(path)]
    for path in directories:
        if path not in there:
            yield Obstacle(f"{path} is no directory", f"mount the disk, or: mkdir -p {path}")
    yield from _tool_obstacles(there)
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and limit < host_bytes and not _is_exempt():
        need = f"{limit / 2**30:.2f} GiB may be locked, and the states need {host_bytes / 2**30:.0f} GiB; the rest is not pinned"
        yield Obstacle(f"memlock: {need}", "ulimit -l unlimited, or memlock in limits.conf")


def _version_obstacles(name: str) -> Iterator[Obstacle]:
    found = version(name)
    if found is None:
        yield Obstacle(f"{name} is not installed in this Python", f"pip install {name}, or run the doctor where the job runs")
    elif name in RUN and not any(found == one or found.startswith((f"{one}.", f"{one}+")) for one in RUN[name]):
        yield Obstacle(f"{name} {found} was not run; {', '.join(RUN[name])} were", "compare a short run without Spillway")


def _tool_obstacles(directories: Sequence[str]) -> Iterator[Obstacle]:
    """What the tool's doctor finds wrong or worse than it can be."""
    places = [f"--dir={path}" for path in directories] or ["--machine-only"]
    tool = _native.tool_path()
    try:
        made = subprocess.run([tool, "doctor", "--json", *places], capture_output=True, check=False)
        findings = json.loads(made.stdout)["findings"]
    except (OSError, ValueError, KeyError) as error:
        raise LibraryNotFoundError(
            f"doctor: cannot run {tool}: {error}; reinstall the spillway wheel, or build the tool: make lib"
        ) from error
    for one in findings:
        if one["verdict"] in ("worse", "fails"):
            where = f"{one['directory']}: " if "directory" in one else ""
            yield Obstacle(f"{where}{one['check']}: {one['found']}", one.get("fix", "spillway doctor says more"))


def _is_exempt() -> bool:
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            held = next(line for line in file if line.startswith("CapEff:"))
    except (OSError, StopIteration):
        return False
    return bool(int(held.split()[1], 16) >> _IPC_LOCK & 1)
