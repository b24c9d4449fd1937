"""The settings of the engine that this thread is making, with the paths of its tier.

    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/mnt/nvme"}},
    "spillway": {"paths": ["/mnt/nvme", "/mnt/pfs"], "cache_bytes": 8589934592, "job": "run7", "resume": true}

_block.py has the settings. Without the block, nvme_path is the only path and is scratch space, like DeepSpeed's swap
files: each engine has its own directories there, and removes those of dead engines.

With "resume" every step is committed. After a crash, training resumes from the last step that every rank committed.
Only a run that resumes under the same job name changes that state."""

import contextlib
import os
import threading

from ..errors import InvalidArgumentError
from ..tier import TierPath
from . import _scratch

_local = threading.local()


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
    """The Block with `paths` as a tuple of TierPath, nvme_path alone if it names none; the defaults if it is None."""
    # pydantic is installed with the versions of DeepSpeed that reach this function, but not with all that import it.
    from . import _block

    found = _block.read(block if block is not None else {})
    if _scratch.is_scratch(found.job):
        raise InvalidArgumentError(
            f"spillway.job is {found.job!r}; names that end in -scratch-N are those of scratch directories, use another"
        )
    paths = tuple(TierPath(_fixed(path.path), path.limit_bytes, path.reserve_bytes) for path in found.paths or ())
    return found.model_copy(update={"paths": paths or (_directory(nvme_path),)})


def _directory(nvme_path):
    if nvme_path is None:
        raise InvalidArgumentError(
            "offload_optimizer has the device nvme, but there is neither nvme_path nor spillway.paths; add one of them"
        )
    # DeepSpeed converts it to a path, which reduces two slashes to one.
    if os.fspath(nvme_path).startswith("s3:/"):
        raise InvalidArgumentError(
            f"nvme_path is {os.fspath(nvme_path)!r}, which DeepSpeed takes for a directory; an object store goes into spillway.paths"
        )
    if "\0" in os.fspath(nvme_path):
        raise InvalidArgumentError(f"nvme_path is {os.fspath(nvme_path)!r}; a path without NUL is needed")
    # As DeepSpeed does for its own files.
    os.makedirs(nvme_path, exist_ok=True)
    return TierPath(_fixed(os.fspath(nvme_path)))


def _fixed(path):
    """A directory that stays the same if the program changes its working directory."""
    return path if path.startswith("s3://") else os.path.abspath(path)
