"""The `spillway` block of a DeepSpeed configuration: where ZeRO-3's optimizer states live, and its 16-bit parameters with
offload_param on device nvme.

    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/mnt/nvme"}},
    "spillway": {"paths": ["/mnt/nvme", "/mnt/pfs"], "cache_bytes": 8589934592, "job": "run7", "resume": true}

Without the block the one path is nvme_path, which is scratch, as DeepSpeed's swap files are: each engine has directories of its
own there, and removes what dead ones left. With "resume" every step is committed, and a run that starts again goes on at the
last commit of all its ranks; only a run that resumes under the same name ever touches that."""

import contextlib
import os
import threading
from typing import NamedTuple

from ..errors import InvalidArgument
from ..tier import DURABILITIES, TierPath
from . import _scratch

_local = threading.local()


class Settings(NamedTuple):
    """What the block says.

    paths             directories that exist, "s3://BUCKET/PREFIX", or {"path", "limit_bytes", "reserve_bytes"}; default:
                      nvme_path
    ratio             share of each path in the state; default: in proportion to its measured speed
    cache_bytes       host memory for parts that stay there from step to step, beside the buffers in motion
    part_elements     most elements of what is fetched, stepped and kept at a time: 12 bytes each, 10 with split_master, a few of
                      them in motion
    durability        "data": a commit survives a power cut; "process": only the end of the process; "full"
    job               name of the run, a directory below each path; two runs at a time that resume need two. Without
                      "resume" directories are "<job>-scratch-1" and so on, a name that no run that resumes can have
    host              name of this machine, the directory below that; default: its host name. A run that resumes needs the one
                      it had, which in a container may be another each time
    split_master      keep master weights without their upper halves, which follow from the model's weights (bfloat16, in host
                      memory): 10 bytes a parameter instead of 12. What changes those weights between steps, other than
                      DeepSpeed, ends the run with an error. With "resume" they are on the tier too, 2 bytes a commit
    resume            go on at the last commit that all ranks have if there is one, and commit every commit_interval steps
    commit_interval   0: only spillway.deepspeed.commit(engine) commits
    turns             one process of a machine at a time uses a path
    lock              page-locked buffers in 2 MiB pages
    stall_seconds     a path without progress for so long is given up; 0: 60
    enabled           false leaves states and parameters to DeepSpeed's own swappers"""

    paths: tuple
    given: bool
    ratio: tuple | None = None
    cache_bytes: int = 0
    part_elements: int = 2 << 20
    durability: str = "data"
    job: str = "deepspeed"
    host: str | None = None
    split_master: bool = False
    resume: bool = False
    commit_interval: int = 1
    turns: bool = True
    lock: bool = True
    stall_seconds: float = 0.0
    enabled: bool = True


_KINDS = {"ratio": list, "cache_bytes": int, "part_elements": int, "durability": str, "job": str, "host": str, "split_master": bool,
          "resume": bool, "commit_interval": int, "turns": bool, "lock": bool, "stall_seconds": (int, float), "enabled": bool,
          "paths": list}


@contextlib.contextmanager
def configuring(engine):
    """An engine makes its optimizer, whose stage 3 is not told the whole configuration."""
    before = getattr(_local, "block", None)
    _local.block = getattr(engine._config, "_param_dict", {}).get("spillway")
    try:
        yield
    finally:
        _local.block = before


def block():
    """The block of the engine that is being made; None if it has none."""
    return getattr(_local, "block", None)


def settings(nvme_path, given=None):
    """The settings for the engine that is being made, or those of a block that was given outside of one."""
    return parse(given if given is not None else block(), nvme_path)


def parse(block, nvme_path):
    """The settings of a block, or of its absence."""
    if block is None:
        return Settings((_directory(nvme_path),), False)
    if not isinstance(block, dict):
        raise InvalidArgument(f"spillway: {block!r} is not an object")
    # Of no concern to the tier: see _interleave.
    block = {name: value for name, value in block.items() if name != "interleave"}
    unknown = sorted(set(block) - set(_KINDS))
    if unknown:
        raise InvalidArgument(f"spillway: unknown {', '.join(unknown)}; known are {', '.join(sorted(_KINDS))}")
    for name, value in block.items():
        wrong = isinstance(value, bool) and _KINDS[name] is not bool
        if wrong or not isinstance(value, tuple if _KINDS[name] is list and isinstance(value, tuple) else _KINDS[name]):
            raise InvalidArgument(f"spillway: {name} is {value!r}")
        if isinstance(value, (int, float)) and value < 0:
            raise InvalidArgument(f"spillway: {name} is {value!r}, below 0")
    if block.get("durability", "data") not in DURABILITIES:
        raise InvalidArgument(f"spillway: durability is {block['durability']!r}; one of {', '.join(DURABILITIES)} expected")
    if _scratch.is_scratch(block.get("job", "")):
        raise InvalidArgument(f"spillway: job is {block['job']!r}; names that end in -scratch-N are those of scratch directories")
    given = {name: value for name, value in block.items() if name != "paths"}
    paths = tuple(_path(path) for path in block["paths"]) if block.get("paths") else (_directory(nvme_path),)
    found = Settings(paths, True, **given)
    if found.part_elements == 0:
        raise InvalidArgument("spillway: part_elements is 0")
    if found.ratio is not None and len(found.ratio) != len(found.paths):
        raise InvalidArgument(f"spillway: ratio has {len(found.ratio)} numbers for {len(found.paths)} paths")
    return found


def _path(given):
    if isinstance(given, (str, os.PathLike)):
        return TierPath(os.fspath(given))
    try:
        rest = dict(given)
        return TierPath(os.fspath(rest.pop("path")), **rest)
    except (TypeError, ValueError, KeyError) as error:
        raise InvalidArgument(f"spillway: a path is {given!r}; a directory, or an object with path and perhaps limit_bytes "
                              "and reserve_bytes is needed") from error


def _directory(nvme_path):
    if nvme_path is None:
        raise InvalidArgument("offload_optimizer has device nvme, but there is neither nvme_path nor spillway.paths")
    # DeepSpeed makes a path of it, which leaves one slash.
    if os.fspath(nvme_path).startswith("s3:/"):
        raise InvalidArgument(f"nvme_path is {os.fspath(nvme_path)!r}, which DeepSpeed takes for a directory; an object store "
                              "goes into spillway.paths")
    # As DeepSpeed does for its own files.
    os.makedirs(nvme_path, exist_ok=True)
    return TierPath(os.fspath(nvme_path))
