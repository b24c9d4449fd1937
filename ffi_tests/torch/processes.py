"""Starts the processes of a worker program, which form a group of torch.distributed on this machine."""

import atexit
import functools
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "deepspeed"))

from forked import Starter


def run(worker, processes, *arguments):
    """The end of the processes, with all that they printed. They are forked from a process that has imported torch: the imports
    take longer than most workers."""
    return _starter().run([worker, *arguments], {**os.environ, "OMP_NUM_THREADS": "1"}, 900, processes)


@functools.cache
def _starter():
    starter = Starter(sys.executable, "processes", PYTHONPATH=str(HERE))
    atexit.register(starter.close)
    return starter


def import_all():
    """What the workers import; see forked.py."""
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.device_mesh
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401
