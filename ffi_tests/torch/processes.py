"""Starts the processes of a worker program, which form a group of torch.distributed on this machine."""

import os
import subprocess
import sys


def run(worker, processes, *arguments):
    """The end of the processes, with all that they printed."""
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone", worker, *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
