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
from ..tier import TierPath
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
    missing_gradients what a parameter steps with that had no gradient since the last step, where another of its sub-group had
                      one: "zero", or "stale", the scaled gradient of its last step, as DeepSpeed has it in host memory
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
    missing_gradients: str = "zero"
    resume: bool = False
    commit_interval: int = 1
    turns: bool = True
    lock: bool = True
    stall_seconds: float = 0.0
    enabled: bool = True


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
    # pydantic comes with DeepSpeed; where no block is given it is not needed.
    from . import _block
    found = _block.read(block)
    if _scratch.is_scratch(found.job):
        raise InvalidArgument(f"spillway.job is {found.job!r}; names that end in -scratch-N are those of scratch directories, use "
                              "another")
    given = {name: getattr(found, name) for name in Settings._fields if name not in ("paths", "given")}
    if found.ratio is not None:
        given["ratio"] = tuple(found.ratio)
    paths = tuple(TierPath(path.path, path.limit_bytes, path.reserve_bytes) for path in found.paths or ())
    paths = paths or (_directory(nvme_path),)
    if found.ratio is not None and len(found.ratio) != len(paths):
        raise InvalidArgument(f"spillway.ratio has {len(found.ratio)} numbers for {len(paths)} paths; give one for each")
    return Settings(paths, True, **given)


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
