"""The `spillway` block of a DeepSpeed configuration: storage of ZeRO-3's optimizer states, and of its 16-bit parameters
with offload_param on the device nvme.

    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/mnt/nvme"}},
    "spillway": {"paths": ["/mnt/nvme", "/mnt/pfs"], "cache_bytes": 8589934592, "job": "run7", "resume": true}

Without the block, nvme_path is the only path and is scratch space, like DeepSpeed's swap files: each engine has its own
directories there, and removes those of dead engines.

With "resume" every step is committed. After a crash, training resumes from the last step that every rank committed.
Only a run that resumes under the same job name changes that state."""

import contextlib
import os
import threading
from typing import NamedTuple

from ..errors import InvalidArgument
from ..tier import TierPath
from . import _scratch

_local = threading.local()


class Settings(NamedTuple):
    """The settings of the block.

    paths             existing directories, "s3://BUCKET/PREFIX", or {"path", "limit_bytes", "reserve_bytes"}; default:
                      nvme_path
    ratio             share of each path in the state; default: in proportion to its measured bandwidth
    cache_bytes       host memory for parts that stay in memory between steps, in addition to the transfer buffers
    part_elements     most elements of a part, the unit that is fetched, stepped and cached: 12 bytes per element, 10
                      with split_master; several parts are in flight
    durability        "data": a commit survives a power failure; "process": only the end of the process; "full": also
                      syncs directories
    job               name of the run, and of a directory below each path; concurrent runs that resume need different
                      names. Without "resume": directories "<job>-scratch-1" and so on, not used by runs that resume
    host              name of this machine, and of a directory below that; default: its host name. A run that resumes
                      needs its previous name, which in a container may change with every start
    split_master      store master weights without their upper halves, which the model's weights (bfloat16, in host
                      memory) imply: 10 bytes per parameter instead of 12. A change of those weights between steps,
                      other than by DeepSpeed, ends the run with an error. With "resume" commits store them too: 2 bytes
                      per parameter
    missing_gradients gradient of a parameter that had none since the last step, if another of its sub-group had one:
                      "zero", or "stale", the scaled gradient of its last step, as DeepSpeed uses in host memory
    resume            resume at the last commit that all ranks have, if any, and commit every commit_interval steps
    commit_interval   number of steps between commits; 0: only spillway.deepspeed.commit(engine) commits
    turns             one process of a machine at a time uses a path
    lock              page-locked buffers in 2 MiB pages
    stall_seconds     timeout of a path without progress, which then counts as failed; 0: 60
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
    """Makes the configuration block available while an engine makes its optimizer, because stage 3 receives only a part
    of the configuration."""
    before = getattr(_local, "block", None)
    _local.block = getattr(engine._config, "_param_dict", {}).get("spillway")
    try:
        yield
    finally:
        _local.block = before


def block():
    """The block of the engine that this thread is making; None if it has none."""
    return getattr(_local, "block", None)


def settings(nvme_path, given=None):
    """The settings for the engine that this thread is making, or those of a given block."""
    return parse(given if given is not None else block(), nvme_path)


def parse(block, nvme_path):
    """The settings of a block; the defaults if it is None."""
    if block is None:
        return Settings((_directory(nvme_path),), False)
    # pydantic is installed with DeepSpeed; it is imported only if a block is given.
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
    # DeepSpeed converts it to a path, which reduces two slashes to one.
    if os.fspath(nvme_path).startswith("s3:/"):
        raise InvalidArgument(f"nvme_path is {os.fspath(nvme_path)!r}, which DeepSpeed takes for a directory; an object store "
                              "goes into spillway.paths")
    # As DeepSpeed does for its own files.
    os.makedirs(nvme_path, exist_ok=True)
    return TierPath(os.fspath(nvme_path))
